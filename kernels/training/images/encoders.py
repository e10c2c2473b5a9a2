"""Image encoders and their heads: create, load, and save them in the format of transformers."""
import contextlib
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, ResNetConfig, ResNetModel

from kernels import embed_in_chunks

from ..cli import fail
from ..output_dir import atomic_output, model_card
from ..pretrained import forbid_remote_code, one_line_errors, read_config, read_json

SMALL_SIZE = 32                                                # pixels: views up to this size count as small
CENTRE_CROP = 0.875                                            # share of the shorter side, for larger views


class SmallImageResNet(ResNetModel):
    """transformers' ResNet with the papers' stem for 32 pixels: a 3 x 3 convolution and no max pooling."""

    def __init__(self, config):
        super().__init__(config)
        config.small_stem = True                               # saved in config.json for load_image_encoder
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

# auto_map in the config.json of older folders; newer ones have the setting small_stem instead. The file with
# Python code that auto_map names is never run.
OLD_CODE = {"AutoModel": "modeling.SmallImageResNet"}


def load_image_encoder(name, small=False, flag="--model"):
    """Return an image encoder: a new ResNet for a name in RESNETS, else the one in a folder or on the hub.

    small    give a new ResNet the stem for images of 32 pixels
    flag     the flag that gave `name`, for messages
    """
    if name in RESNETS:
        return (SmallImageResNet if small else ResNetModel)(ResNetConfig(**RESNETS[name]))
    local, label = Path(name).is_dir(), f"{flag} {name}"
    with one_line_errors(label):
        prepared = read_json(name, "preprocessor_config.json") if local else {}
        saved = read_json(name, "config.json") if local else {}
        code = saved.get("auto_map")
        if prepared.get("auto_map") or code and code != OLD_CODE:
            fail(f"{label}: needs to run its own Python code, which is never done; expected an architecture "
                 "of the transformers library")
    config = read_config(label, name, hint=", or use resnet-18")
    with one_line_errors(label):
        if not hasattr(config, "hidden_sizes"):
            fail(f"{label}: {config.model_type} is not an image encoder like ResNet")
        if (channels := getattr(config, "num_channels", 3)) != 3:
            fail(f"{label}: its input images have {channels} channels, expected 3")
        kind = SmallImageResNet if code or getattr(config, "small_stem", False) is True else AutoModel
        with forbid_remote_code():
            encoder, info = kind.from_pretrained(
                name, config=config, dtype=torch.float32, ignore_mismatched_sizes=True,
                trust_remote_code=False, output_loading_info=True)
    if lost := [*info["missing_keys"], *(part for part, *_ in info["mismatched_keys"])]:
        fail(f"{label}: {len(lost)} weights, such as {min(lost)}, are missing or do not fit its config.json")
    if bad := next((part for part, x in encoder.state_dict().items() if not x.isfinite().all()), None):
        fail(f"{label}: {bad} contains NaN or infinity; choose a checkpoint from before training diverged")
    if config.model_type != "resnet" and pooled_feature_dim(encoder) != config.hidden_sizes[-1]:
        fail(f"{label}: {config.model_type} is not an image encoder like ResNet")
    return encoder


def pooled_feature_dim(encoder):
    """Return the dimension of the encoder's pooled features; None if it has no pooled output."""
    try:
        with torch.no_grad():
            return encoder(torch.zeros(1, 3, 224, 224)).pooler_output.flatten(1).shape[1]
    except Exception:                  # Segformer has no pooled output, CLIP needs a text as well as an image
        return None


def read_mean_std(name):
    """Return (mean, standard deviation) of each channel, with which a model's input images are normalised."""
    if name in RESNETS:
        return (0, 0, 0), (1, 1, 1)
    prepared = read_json(name, "preprocessor_config.json")
    return prepared.get("image_mean", [0] * 3), prepared.get("image_std", [1] * 3)


def read_size(name):
    """Return the side in pixels of the input images of the model in a folder; 224 if it is not known."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):     # read_mean_std reports damage
        prepared = read_json(name, "preprocessor_config.json") if Path(name).is_dir() else {}
        edge = prepared["size"]["shortest_edge"]
        if type(edge) is int and edge > 0:
            return edge
    return 224


class ImageEncoder(nn.Module):
    """An image encoder and its head: a projection head, used in training only, or a classifier.

    run          the Run, for its flags --precision and --chunk-size; None: float32, and whole batches
    mean, std    of each channel, to normalise images in [0, 1]
    classes      class names of the logits; None: the head is a projection head
    """

    def __init__(self, encoder, head, run=None, mean=(0, 0, 0), std=(1, 1, 1), classes=None):
        super().__init__()
        self.encoder, self.head, self.classes = encoder, head, classes
        self.feature_dim = encoder.config.hidden_sizes[-1]
        self.bf16, self.chunk_size = (run.bf16, run.args.chunk_size) if run else (False, None)
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values).float()[:, None, None], persistent=False)

    def features(self, images):
        """Return the encoder's pooled output (n, H) float32 for images (n, 3, S, S) in [0, 1]."""
        images = ((images - self.mean) / self.std).contiguous(memory_format=torch.channels_last)
        autocast = torch.autocast(images.device.type, torch.bfloat16, enabled=self.bf16)
        with autocast, explain_batch_norm_error():
            return self.encoder(images).pooler_output.flatten(1).float()

    def forward(self, views):
        """Return projections, or logits, (n, D) float32 of views (n, 3, S, S) in [0, 1]. With --chunk-size,
        views are encoded in chunks, and gradients are those of the full batch (GradCache)."""
        chunks = views.split(self.chunk_size or len(views))
        module = self if self.chunk_size else None
        with explain_batch_norm_error():
            return embed_in_chunks(lambda x: self.head(self.features(x)).float(), chunks, module)

    @torch.no_grad()
    def encode_batches(self, batches, logits=False):
        """Return features (N, H), or the head's logits, of batches (n, 3, S, S), computed in eval mode."""
        training = self.training
        self.eval()
        parts = [self.features(x) for x in batches]
        parts = [self.head(part) for part in parts] if logits else parts
        self.train(training)
        return torch.cat(parts)

    def restore(self, folder):
        """Load the weights of encoder and head from an output folder."""
        self.encoder.load_state_dict(load_file(folder / "model.safetensors"))
        self.head.load_state_dict(load_file(folder / HEAD))


@contextlib.contextmanager
def explain_batch_norm_error():
    """Turn PyTorch's error about a single value per channel into a UserError that names flags to change."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):  # this ValueError has no type of its own
            raise
        fail("a batch norm gets a single value per channel, expected at least two: raise --batch-size or "
             "--chunk-size, or lower --bn-splits (moco.py)", every_rank=True)


# ── heads ──

HEAD = "head.safetensors"                                      # in the folder of the encoder's weights


def save_head(head, classes, folder):
    """Save a head to head.safetensors, with its layer types and classes in the file's metadata. A
    SyncBatchNorm is saved as a BatchNorm1d."""
    kinds = (type(part).__name__.replace("SyncBatchNorm", "BatchNorm1d") for part in head)
    metadata = {"layers": " ".join(kinds), "classes": json.dumps(classes)}
    weights = {name: weight.detach().cpu().contiguous() for name, weight in head.state_dict().items()}
    save_file(weights, folder / HEAD, metadata)


def load_head(name, flag="--model"):
    """Return the head and the classes saved in a folder. The classes of a projection head are None; without
    head.safetensors both are None."""
    path, layers = Path(name, HEAD), []
    if not path.is_file():
        return None, None
    try:
        with safe_open(path, "pt") as file:
            metadata, weights = file.metadata(), load_file(path)
        for i, kind in enumerate(metadata["layers"].split()):
            if kind == "ReLU":
                layers.append(nn.ReLU())
                continue
            outputs, *inputs = weights[f"{i}.weight"].shape
            if kind == "Linear" and outputs:
                layers.append(nn.Linear(*inputs, outputs, bias=f"{i}.bias" in weights))
            elif kind == "BatchNorm1d" and outputs:
                layers.append(nn.BatchNorm1d(outputs))
            else:
                raise ValueError("unknown or empty layer")
        head, classes = nn.Sequential(*layers), json.loads(metadata["classes"])
        head.load_state_dict(weights)
        if classes is not None and len(classes) != len(layers[-1].weight):
            raise ValueError("classes and weights differ")
        return head, classes
    except Exception as error:                                 # damaged files raise many types of errors
        fail(f"{flag} {name}: {HEAD} is damaged ({type(error).__name__}); save it again")


def load_head_layers(name, count):
    """Return (modules, output dimension) of the first `count` linear layers of the head saved in a folder,
    each with the norm and activation that follow it."""
    head, _ = load_head(name)
    linear = [i for i, part in enumerate(head or ()) if isinstance(part, nn.Linear)]
    if count > len(linear):
        fail(f"--from-layer {count}: the head of {name} has {len(linear)} layers; expected no higher number")
    return head[: [*linear, len(head)][count]], head[linear[count - 1]].out_features


def load_classifier(name, flag="--model", run=None):
    """Load a classifier that simclr.py saved after --finetune or --distill. Returns an ImageEncoder in eval
    mode, which maps images (n, 3, S, S) in [0, 1] to logits (n, C); its `classes` are the C class names."""
    head, classes = load_head(name, flag)
    if classes is None:
        fail(f"{flag} {name}: has no classifier; expected the --out of a run with --finetune or --distill")
    encoder = load_image_encoder(name, flag=flag)
    return ImageEncoder(encoder, head, run, *read_mean_std(name), classes).eval()


# ── saving ──


def save_encoder(model, run, size):
    """Save an ImageEncoder to --out, on rank 0: the encoder in the format of transformers, the head, the
    settings of the image processor, and a model card.

    size    side of a view in pixels
    """
    if run.rank:
        return
    encoder = model.encoder
    settings = dict(image_processor_type="ConvNextImageProcessor", size=dict(shortest_edge=size),
                    crop_pct=1 if size <= SMALL_SIZE else CENTRE_CROP,
                    image_mean=model.mean.flatten().tolist(), image_std=model.std.flatten().tolist())
    with atomic_output(run) as aside:
        encoder.save_pretrained(aside)
        save_head(model.head, model.classes, aside)
        (aside / "preprocessor_config.json").write_text(json.dumps(settings))
        text = (f"Image encoder: {model.feature_dim} features for each image, to be compared by cosine "
                "similarity. AutoImageProcessor prepares the input.")
        if model.classes:
            text += f"\nIts head is a classifier with {len(model.classes)} classes."
        if isinstance(encoder, SmallImageResNet):
            text += "\nIts first layer is made for small images; transformers' AutoModel cannot load it."
        tags = ["transformers", "image-feature-extraction"]
        card = model_card(run, "image-feature-extraction", tags, text, load_hint(model, run))
        (aside / "README.md").write_text(card, encoding="utf-8")


LOAD = "from kernels.training.images.encoders import load_{0}; load_{0}"


def load_hint(model, run):
    """Return the Python expression that loads the saved folder."""
    if model.classes:
        return f'{LOAD.format("classifier")}("{run.args.out}")'
    if isinstance(model.encoder, SmallImageResNet):
        return f'{LOAD.format("image_encoder")}("{run.args.out}")'
    return f'AutoModel.from_pretrained("{run.args.out}")'
