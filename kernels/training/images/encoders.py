"""Image encoders and their heads: create, load, and save them in the format of transformers."""
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, ResNetConfig, ResNetModel

from kernels import embed_in_chunks

from ..errors import fail
from ..out import atomic_output
from ..pretrained import loading, read_config, read_json

SMALL_SIZE = 32                                                # largest side in pixels of a small view
CENTRE_CROP = 0.875      # side of the centre crop / image's shorter side, if views are larger than SMALL_SIZE


class SmallImageResNet(ResNetModel):
    """ResNet with the papers' first layers (stem) for small images: a 3 x 3 convolution, no max pooling."""

    def __init__(self, config):
        super().__init__(config)
        config.small_stem = True                               # tells load_image_encoder to use this class
        stem = nn.Conv2d(config.num_channels, config.embedding_size, 3, padding=1, bias=False)
        self.embedder.embedder.convolution = stem
        self.embedder.pooler = nn.Identity()
        self.post_init()


BASIC = dict(layer_type="basic")
BOTTLENECK = dict(layer_type="bottleneck")
RESNETS = {"resnet-small": BASIC | dict(embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[1] * 4),
           "resnet-18": BASIC | dict(hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2]),
           "resnet-34": BASIC | dict(hidden_sizes=[64, 128, 256, 512], depths=[3, 4, 6, 3]),
           "resnet-50": BOTTLENECK | dict(hidden_sizes=[256, 512, 1024, 2048], depths=[3, 4, 6, 3]),
           "resnet-101": BOTTLENECK | dict(hidden_sizes=[256, 512, 1024, 2048], depths=[3, 4, 23, 3]),
           "resnet-152": BOTTLENECK | dict(hidden_sizes=[256, 512, 1024, 2048], depths=[3, 8, 36, 3])}


def load_image_encoder(name, small=False, flag="--model"):
    """Return an image encoder: a new ResNet if `name` is in RESNETS, else a model from a folder or the hub.

    small    True: a new ResNet is a SmallImageResNet, with other first layers
    flag     the flag that gave `name`, for messages
    """
    if name in RESNETS:
        return (SmallImageResNet if small else ResNetModel)(ResNetConfig(**RESNETS[name]))
    label = f"{flag} {name}"
    config = read_config(label, name, hint=", or use resnet-18")
    if not hasattr(config, "hidden_sizes") or getattr(config, "num_channels", 3) != 3:
        fail(f"{label}: found {config.model_type}, expected an image encoder like ResNet, for 3 channels")
    kind = SmallImageResNet if getattr(config, "small_stem", False) is True else AutoModel
    with loading(label):
        encoder, info = kind.from_pretrained(
            name, config=config, dtype=torch.float32, ignore_mismatched_sizes=True,
            trust_remote_code=False, output_loading_info=True)
    if lost := [*info["missing_keys"], *(part for part, *_ in info["mismatched_keys"])]:
        fail(f"{label}: {len(lost)} weights, such as {min(lost)}, are missing or do not fit its config.json")
    return encoder


def read_mean_std(name):
    """Return (means, standard deviations) of the channels, for normalising the input of a model."""
    prepared = {} if name in RESNETS else read_json(name, "preprocessor_config.json")
    return prepared.get("image_mean", [0] * 3), prepared.get("image_std", [1] * 3)


def read_size(name):
    """Return the side in pixels of the input images of a model, as saved in its folder; 224 if not saved."""
    is_saved = name not in RESNETS and Path(name).is_dir()
    size = read_json(name, "preprocessor_config.json").get("size", 224) if is_saved else 224
    return size.get("shortest_edge", 224) if isinstance(size, dict) else size  # older files have a number


class ImageEncoder(nn.Module):
    """An image encoder and its head.

    run          Run whose flags --precision and --chunk-size are used; None: float32 and whole batches
    mean, std    mean and standard deviation of each channel, by which images in [0, 1] are normalised
    """

    def __init__(self, encoder, head, run=None, mean=(0, 0, 0), std=(1, 1, 1)):
        super().__init__()
        self.encoder, self.head = encoder, head
        self.feature_dim = encoder.config.hidden_sizes[-1]
        self.bf16, self.chunk_size = (run.bf16, run.args.chunk_size) if run else (False, None)
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values).float()[:, None, None], persistent=False)

    def features(self, images):
        """Return the encoder's pooled output (n, feature_dim) float32 for images (n, 3, S, S) in [0, 1]."""
        images = ((images - self.mean) / self.std).contiguous(memory_format=torch.channels_last)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.bf16):
            return self.encoder(images).pooler_output.flatten(1).float()

    def forward(self, views):
        """Return the head's output (n, D) float32 for views (n, 3, S, S) in [0, 1]. With --chunk-size, views
        are encoded in chunks (GradCache); a batch norm then uses the statistics of one chunk at a time."""
        chunks = views.split(self.chunk_size or len(views))
        module = self if self.chunk_size else None
        return embed_in_chunks(lambda x: self.head(self.features(x)).float(), chunks, module)


HEAD = "head.safetensors"                                      # file next to the encoder's weights


def save_head(head, folder):
    """Save a head to head.safetensors, with its layer types in the file's metadata. A SyncBatchNorm is saved
    as a BatchNorm1d."""
    kinds = (type(part).__name__.replace("SyncBatchNorm", "BatchNorm1d") for part in head)
    weights = {name: weight.detach().cpu().contiguous() for name, weight in head.state_dict().items()}
    save_file(weights, folder / HEAD, {"layers": " ".join(kinds)})


def load_head(name, flag="--model"):
    """Return the head saved in a folder, or None if the folder contains no head.safetensors."""
    path, layers = Path(name, HEAD), []
    if name in RESNETS or not path.is_file():
        return None
    with loading(f"{flag} {name}: {HEAD}"):
        with safe_open(path, "pt") as file:
            metadata, weights = file.metadata(), load_file(path)
        for i, kind in enumerate(metadata["layers"].split()):
            if kind == "Linear":
                outputs, inputs = weights[f"{i}.weight"].shape
                layers.append(nn.Linear(inputs, outputs, bias=f"{i}.bias" in weights))
            else:
                layers.append(nn.ReLU() if kind == "ReLU" else nn.BatchNorm1d(len(weights[f"{i}.weight"])))
        head = nn.Sequential(*layers)
        head.load_state_dict(weights)
        return head


def save_encoder(model, run, size):
    """Save an ImageEncoder to --out, on rank 0: the encoder in the format of transformers, the head, and the
    settings of the image processor for views of `size` pixels."""
    if run.rank:
        return
    encoder = model.encoder
    settings = dict(image_processor_type="ConvNextImageProcessor", size=dict(shortest_edge=size),
                    crop_pct=1 if size <= SMALL_SIZE else CENTRE_CROP,
                    image_mean=model.mean.flatten().tolist(), image_std=model.std.flatten().tolist())
    with atomic_output(run) as aside:
        encoder.save_pretrained(aside)
        save_head(model.head, aside)
        (aside / "preprocessor_config.json").write_text(json.dumps(settings))


def load_hint(model, run):
    """Return a line of Python that loads the model saved in --out and its image processor."""
    start, load = "", "AutoModel.from_pretrained"
    if isinstance(model.encoder, SmallImageResNet):
        load = "load_image_encoder"
        start = f"from kernels.training.images.encoders import {load}; "
    out = run.args.out
    return f'{start}processor = AutoImageProcessor.from_pretrained("{out}"); model = {load}("{out}")'
