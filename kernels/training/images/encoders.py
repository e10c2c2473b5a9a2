"""Encoders of pictures: made, loaded, saved with their heads as transformers reads them."""
import contextlib
import json
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, ResNetConfig, ResNetModel

from kernels import embed_in_chunks

from ..cli import fail
from ..output_dir import model_card, new_files
from ..pretrained import blaming, check_size, no_code, own_memory, read_config, read_json, refuse_nan

SMALL = 32                                                     # pixels, up to which nets have the small stem
CENTRE = 0.875                                                 # of a larger picture's side is what is judged


class SmallPictureResNet(ResNetModel):
    """transformers' ResNet with the papers' stem for 32 pixels: a 3 x 3 convolution, and no pooling."""

    def __init__(self, config):
        super().__init__(config)
        config.small_stem = True                               # load_image_encoder reads it
        stem = nn.Conv2d(config.num_channels, config.embedding_size, 3, padding=1, bias=False)
        self.embedder.embedder.convolution = stem
        self.embedder.pooler = nn.Identity()
        self.post_init()


BASIC, DEEP = dict(layer_type="basic"), dict(layer_type="bottleneck")
RESNETS = {"resnet-small": BASIC | dict(embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[1] * 4),
           "resnet-18": BASIC | dict(hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2]),
           "resnet-34": BASIC | dict(hidden_sizes=[64, 128, 256, 512], depths=[3, 4, 6, 3]),
           "resnet-50": DEEP | dict(hidden_sizes=[256, 512, 1024, 2048], depths=[3, 4, 6, 3]),
           "resnet-101": DEEP | dict(hidden_sizes=[256, 512, 1024, 2048], depths=[3, 4, 23, 3]),
           "resnet-152": DEEP | dict(hidden_sizes=[256, 512, 1024, 2048], depths=[3, 8, 36, 3])}


# of folders from before small_stem; the file that it names is not run
OLD_CODE = {"AutoModel": "modeling.SmallPictureResNet"}


def load_image_encoder(name, small=False, flag="--model"):
    """A random ResNet, with the small stem for small pictures, or the one of a folder or a hub name."""
    if name in RESNETS:
        return (SmallPictureResNet if small else ResNetModel)(ResNetConfig(**RESNETS[name]))
    local, named = Path(name).is_dir(), f"{flag} {name}"
    with blaming(named):
        prepared = read_json(name, "preprocessor_config.json") if local else {}
        saved = read_json(name, "config.json") if local else {}
        code = saved.get("auto_map")
        if prepared.get("auto_map") or code and code != OLD_CODE:
            fail(f"{named}: wants to run Python that lies in it, which is never done; "
                 "wanted an architecture of transformers")
    config = read_config(named, name, otherwise=", or take resnet-18")
    with blaming(named):
        if not hasattr(config, "hidden_sizes"):
            fail(f"{named}: {config.model_type} is no image encoder like ResNet")
        if (channels := getattr(config, "num_channels", 3)) != 3:
            fail(f"{named}: reads pictures of {channels} channels, wanted 3")
        if (least := min([*config.hidden_sizes, *(getattr(config, "depths", None) or ())])) < 1:
            fail(f"{named}: config.json has {least} layers or channels, wanted at least 1")
        kind = SmallPictureResNet if code or getattr(config, "small_stem", False) is True else AutoModel
        build = kind if kind is SmallPictureResNet else partial(kind.from_config, trust_remote_code=False)
        check_size(named, config, lambda: build(config), Path(name) if local else None)
        with no_code():
            encoder, info = kind.from_pretrained(
                name, config=config, dtype=torch.float32, ignore_mismatched_sizes=True,
                trust_remote_code=False, output_loading_info=True)
        own_memory(encoder)
    if lost := [*info["missing_keys"], *(part for part, *_ in info["mismatched_keys"])]:
        fail(f"{named}: {len(lost)} weights, such as {min(lost)}, are missing or do not fit its config.json")
    refuse_nan(named, encoder)
    if config.model_type != "resnet" and pooled_width(encoder) != config.hidden_sizes[-1]:
        fail(f"{named}: {config.model_type} is no image encoder like ResNet")
    return encoder


def pooled_width(encoder):
    """Of a picture's features; None: it gives none."""
    try:
        with torch.no_grad():
            return encoder(torch.zeros(1, 3, 224, 224)).pooler_output.flatten(1).shape[1]
    except Exception:                                          # Segformer has none, CLIP wants a text too
        return None


def read_statistics(name):
    """(mean, standard deviation) of each channel, by which a folder or hub name wants pictures scaled."""
    if name in RESNETS:
        return (0, 0, 0), (1, 1, 1)
    try:
        prepared = read_json(name, "preprocessor_config.json")
        mean, std = prepared.get("image_mean", [0] * 3), prepared.get("image_std", [1] * 3)
        if len(mean) == len(std) == 3 and torch.tensor([mean, std]).isfinite().all() and min(std) > 0:
            return mean, std
        what = f"image_mean {mean}, image_std {std}"
    except (AttributeError, TypeError, ValueError, RuntimeError, OSError) as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
    fail(f"--model {name}: its preprocessor_config.json is damaged ({what}); wanted three numbers each")


def read_size(name):
    """Pixels of the sides of the pictures that a folder was trained on; 224 where it does not say."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):     # read_statistics complains
        prepared = read_json(name, "preprocessor_config.json") if Path(name).is_dir() else {}
        if type(edge := prepared["size"]["shortest_edge"]) is int and edge > 0:
            return edge
    return 224


class PictureEncoder(nn.Module):
    """An encoder of pictures, and the head behind it: a projection, for training alone, or a classifier.

    mean, std    of each channel: what pictures from 0 to 1 are scaled by
    classes      what a classifier's numbers stand for; None: the head is a projection
    run          its --precision and --chunk-size: rows embedded at a time; gradients are the batch's
    """

    def __init__(self, encoder, head, run=None, mean=(0, 0, 0), std=(1, 1, 1), classes=None):
        super().__init__()
        self.encoder, self.head, self.classes = encoder, head, classes
        self.width = encoder.config.hidden_sizes[-1]
        self.bf16, self.chunk_size = (run.bf16, run.args.chunk_size) if run else (False, None)
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values).float()[:, None, None], persistent=False)

    def features(self, pictures):
        """(n, H) float32: the encoder's pooled output for pictures (n, 3, S, S) from 0 to 1."""
        pictures = ((pictures - self.mean) / self.std).contiguous(memory_format=torch.channels_last)
        autocast = torch.autocast(pictures.device.type, torch.bfloat16, enabled=self.bf16)
        with autocast, single_values_refused():
            return self.encoder(pictures).pooler_output.flatten(1).float()

    def forward(self, views):
        """(n, D) float32 projections, or logits, of views (n, 3, S, S)."""
        chunks = views.split(self.chunk_size or len(views))
        module = self if self.chunk_size else None
        with single_values_refused():
            return embed_in_chunks(lambda x: self.head(self.features(x)).float(), chunks, module)

    @torch.no_grad()
    def encode_batches(self, batches, logits=False):
        """(N, H) features, or the head's logits, of batches (n, 3, S, S), batch norms at rest."""
        training = self.training
        self.eval()
        parts = [self.features(x) for x in batches]
        parts = [self.head(part) for part in parts] if logits else parts
        self.train(training)
        return torch.cat(parts)

    def restore(self, folder):
        """Puts the saved checkpoint back."""
        self.encoder.load_state_dict(load_file(folder / "model.safetensors"))
        self.head.load_state_dict(load_file(folder / HEAD))


@contextlib.contextmanager
def single_values_refused():
    """Says which flags help if a batch norm of the block sees a single value of each channel."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):  # PyTorch's words alone tell
            raise
        fail("batch norms see a single value of each channel; wanted more pictures at a time: raise "
             "--batch-size or --chunk-size, or split batch norms less", every_rank=True)


# ── heads ──

HEAD = "head.safetensors"                                      # beside the encoder's weights


def save_head(head, classes, folder):
    """The layers' kinds and the classes stand in the file's metadata; what was a synchronised batch norm
    over GPUs is a plain one."""
    kinds = (type(part).__name__.replace("SyncBatchNorm", "BatchNorm1d") for part in head)
    about = {"layers": " ".join(kinds), "classes": json.dumps(classes)}
    weights = {name: weight.detach().cpu().contiguous() for name, weight in head.state_dict().items()}
    save_file(weights, folder / HEAD, about)


def load_head(name, flag="--model"):
    """(head, classes or None) of a folder that save wrote; (None, None): it has none."""
    path, layers = Path(name, HEAD), []
    if not path.is_file():
        return None, None
    try:
        with safe_open(path, "pt") as file:
            about, weights = file.metadata(), load_file(path)
        for i, kind in enumerate(about["layers"].split()):
            out, *inside = weights[f"{i}.weight"].shape if kind != "ReLU" else (None,)
            bias = {"bias": f"{i}.bias" in weights} if inside else {}
            layers.append(dict(Linear=nn.Linear, BatchNorm1d=nn.BatchNorm1d)[kind](*inside, out, **bias)
                          if out else nn.ReLU())
        head, classes = nn.Sequential(*layers), json.loads(about["classes"])
        head.load_state_dict(weights)
        if classes is not None and len(classes) != len(layers[-1].weight):
            raise ValueError("classes and weights differ")
        return head, classes
    except Exception as error:                                 # a damaged file has many ways to fail
        fail(f"{flag} {name}: {HEAD} is damaged ({type(error).__name__}); save it again")


def load_layers(name, count):
    """(modules, width of what they give) of the first linear layers, with what follows each, of the head of a
    folder."""
    head, _ = load_head(name)
    at = [i for i, part in enumerate(head or ()) if isinstance(part, nn.Linear)]
    if count > len(at):
        fail(f"--from-layer {count}: the head of {name} has {len(at)} layers; wanted one of them, or 0")
    return head[: [*at, len(head)][count]], head[at[count - 1]].out_features


def load_classifier(name, flag="--model", run=None):
    """The PictureEncoder of a folder that simclr.py fine-tuned or distilled: logits (n, classes) of pictures
    (n, 3, S, S) from 0 to 1; what they stand for is in its `classes`."""
    head, classes = load_head(name, flag)
    if classes is None:
        fail(f"{flag} {name}: holds no classifier; wanted the --out of a run with --finetune or --distill")
    encoder = load_image_encoder(name, flag=flag)
    return PictureEncoder(encoder, head, run, *read_statistics(name), classes).eval()


# ── saving ──


def save(model, run, size):
    """A PictureEncoder for views of this size into --out: the encoder as transformers reads it, its head."""
    if run.rank:
        return
    encoder, cut = model.encoder, 1 if size <= SMALL else CENTRE
    prepare = dict(image_processor_type="ConvNextImageProcessor", size=dict(shortest_edge=size), crop_pct=cut)
    prepare |= dict(image_mean=model.mean.flatten().tolist(), image_std=model.std.flatten().tolist())
    with new_files(run) as aside:
        encoder.save_pretrained(aside)
        save_head(model.head, model.classes, aside)
        (aside / "preprocessor_config.json").write_text(json.dumps(prepare))
        text = (f"Features of pictures, {model.width} numbers each, compared by cosine; "
                "AutoImageProcessor makes the input.")
        if model.classes:
            text += f"\nThe head behind them tells {len(model.classes)} classes apart."
        if isinstance(encoder, SmallPictureResNet):
            text += "\nIts first layer, for small pictures, is none of transformers': AutoModel refuses it."
        tags = ["transformers", "image-feature-extraction"]
        card = model_card(run, "image-feature-extraction", tags, text, load_line(model, run))
        (aside / "README.md").write_text(card, encoding="utf-8")


LOAD = "from kernels.training.images.encoders import load_{0}; load_{0}"


def load_line(model, run):
    """How others load the folder."""
    if model.classes:
        return f'{LOAD.format("classifier")}("{run.args.out}")'
    if isinstance(model.encoder, SmallPictureResNet):
        return f'{LOAD.format("image_encoder")}("{run.args.out}")'
    return f'AutoModel.from_pretrained("{run.args.out}")'
