"""Pictures: read, encoded, judged by their neighbours, saved."""
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModel, ResNetConfig, ResNetModel

from kernels import embed_in_chunks, similarity_topk

from .command import Fault, afford, fail, say
from .folder import check_files, model_card, new_files
from .layout import read_json
from .loop import batches, set_lr
from .picture_files import by, read_pictures
from .run import Run
from .views import scaled


class Pictures:
    """The pictures of --data, and those that a model is judged by: of --dev, or a test set in --data.

    images, labels    (N, H, W, 3) uint8, (N,) int64 or None
    test              (images, labels), or None where either side has no labels
    size, small       (H, W), and whether H is at most 32: the papers have other settings there
    """

    def __init__(self, args):
        classes = {}
        (self.images, self.labels), test = read_pictures(args.data, classes)
        if args.dev:
            test, _ = read_pictures(args.dev, classes)
        self.path, self.size = args.data, tuple(self.images.shape[1:3])
        self.small = self.size[0] <= 32
        if (least := args.batch_size) > len(self) and not args.evaluate:
            fail(f"{self.path}: {len(self)} pictures, wanted at least --batch-size, which is {least}")
        if test is not None and (other := tuple(test[0].shape[1:3])) != self.size:
            fail(f"{args.dev or self.path}: test pictures are {by(other)}, the others {by(self.size)}")
        labelled = self.labels is not None and test is not None and test[1] is not None
        self.test = test if labelled else None
        if labelled:
            self.number_classes()

    def __len__(self):
        return len(self.images)

    def number_classes(self):
        """Labels become numbers from 0 on without a gap: each has a column where pictures vote, and a row of
        weights."""
        labels, wanted = self.labels, self.test[1]
        classes, numbers = torch.cat([labels, wanted]).unique(return_inverse=True)
        afford(f"{self.path}: {len(classes):,} labels for {len(wanted):,} test pictures",
               4 * len(classes) * len(wanted))
        self.labels, wanted = numbers.split([len(labels), len(wanted)])
        self.test = self.test[0], wanted

    def describe(self):
        """600 pictures of 16 x 16 from shapes.npz, 6 classes, 300 test pictures"""
        judged = "no labelled test set: no evaluation"
        if self.test:
            judged = f"{self.labels.max() + 1} classes, {len(self.test[0]):,} test pictures"
        return f"{len(self):,} pictures of {by(self.size)} from {self.path}, {judged}"

    def place(self, device):
        """Names the device of training; pictures that take less than a quarter of its memory move there."""
        self.device = device
        if device.type == "cuda" and self.images.nbytes < torch.cuda.mem_get_info()[0] / 4:
            self.images = self.images.to(device)

    def take(self, rows):
        """(n, H, W, 3) uint8 pictures of row numbers, on the device of training."""
        return self.images[torch.tensor(rows, device=self.images.device)].to(self.device)

    def before(self, model, run):
        """The score before the first step."""
        if self.test and run.step == 0:
            run.progress["before"] = evaluate(model, self, run.impl)
        if self.test:
            say("before", f"kNN {run.progress['before']['knn']:.2f} %")

    def judge(self, model, run):
        """Evaluates and saves the model: the last one is kept, nothing is chosen on test pictures."""
        average_statistics(model)
        if run.keeps(evaluate(model, self, run.impl) if self.test else {}):
            save(model, run, self.size)

    def after(self, model, run, linear_probe):
        """Reads the checkpoint, trains a linear layer on its features, and says how to load it."""
        model.restore(run.out)
        rise = ""
        if self.test:
            rise = f"kNN {run.progress['before']['knn']:.2f} → {run.progress['best']['knn']:.2f} %, "
        if self.test and run.args.probe_epochs:
            rise += f"linear {linear_probe(model, self, run):.2f} %, "
        run.done(rise)
        say("load", load_line(model, run))


class SmallPictureResNet(ResNetModel):
    """transformers' ResNet with the papers' stem for 32 pixels: a 3 x 3 convolution, and no pooling."""

    def __init__(self, config):
        super().__init__(config)
        config.small_stem = True                               # load_encoder reads it
        stem = nn.Conv2d(config.num_channels, config.embedding_size, 3, padding=1, bias=False)
        self.embedder.embedder.convolution = stem
        self.embedder.pooler = nn.Identity()
        self.post_init()


BASIC, DEEP = dict(layer_type="basic"), dict(layer_type="bottleneck")
RESNETS = {"resnet-small": BASIC | dict(embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[1] * 4),
           "resnet-18": BASIC | dict(hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2]),
           "resnet-34": BASIC | dict(hidden_sizes=[64, 128, 256, 512], depths=[3, 4, 6, 3]),
           "resnet-50": DEEP | dict(hidden_sizes=[256, 512, 1024, 2048], depths=[3, 4, 6, 3])}


# of folders from before small_stem; the file that it names is not run
OLD_CODE = {"AutoModel": "modeling.SmallPictureResNet"}


def load_encoder(name, small=False, flag="--model"):
    """A random ResNet, with the small stem for small pictures, or the one of a folder or a hub name."""
    if name in RESNETS:
        return (SmallPictureResNet if small else ResNetModel)(ResNetConfig(**RESNETS[name]))
    local, named = Path(name).is_dir(), f"{flag} {name}"
    if not local:
        say("hub", f"{name} is fetched, unless it is in the cache")
    elif not Path(name, "config.json").is_file():
        fail(f"{named}: no config.json in this folder, so it is no transformers model")
    else:
        check_files(name, named)
    try:
        saved = read_json(name, "config.json")
        if not saved:                                          # a hub that does not answer is asked once
            raise OSError("config.json is empty")
        code, prepared = saved.pop("auto_map", None), read_json(name, "preprocessor_config.json")
        if prepared.get("auto_map") or code and code != OLD_CODE:
            fail(f"{named}: wants to run Python that lies in it, which is never done; "
                 "wanted an architecture of transformers")
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        vars(config).pop("auto_map", None)
        check_config(named, config, name if local else None)
        kind = SmallPictureResNet if code or saved.get("small_stem") is True else AutoModel
        settings = dict(config=config, dtype=torch.float32, ignore_mismatched_sizes=True)
        encoder, info = kind.from_pretrained(name, **settings, trust_remote_code=False,
                                             output_loading_info=True)
    except Fault:
        raise
    except Exception as error:  # whatever the network or a damaged file makes of it
        if local:
            fail(f"{named}: {type(error).__name__}: {str(error).strip()}".splitlines()[0])
        fail(f"{named}: no such folder, and the hub does not give it; name a local folder, or take resnet-18")
    if lost := [*info["missing_keys"], *(part for part, *_ in info["mismatched_keys"])]:
        fail(f"{named}: {len(lost)} weights, such as {min(lost)}, are missing or do not fit its config.json")
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


def check_config(named, config, folder):
    """Refuses what is no encoder of pictures, or, before it is built, larger than the weights beside it."""
    if not hasattr(config, "hidden_sizes"):
        fail(f"{named}: {config.model_type} is no image encoder like ResNet")
    if (channels := getattr(config, "num_channels", 3)) != 3:
        fail(f"{named}: reads pictures of {channels} channels, wanted 3")
    sizes = config.hidden_sizes
    depths = getattr(config, "depths", None) or [1] * len(sizes)
    least = sum(depth * (500 + size * size) for depth, size in zip(depths, sizes))         # names and weights
    least += 27 * getattr(config, "embedding_size", 0)
    files = Path(folder).glob("*") if folder else []
    there = sum(file.stat().st_size for file in files if file.suffix in (".safetensors", ".bin"))
    if min(*depths, *sizes) < 1 or folder and least > there:
        fail(f"{named}: config.json has {sum(depths):,} layers of up to {max(sizes):,} channels, at least "
             f"{least:,} bytes, its weights are {there:,}; wanted the config.json of these weights")
    afford(f"{named}: its config.json", least)


class PictureEncoder(nn.Module):
    """An encoder of pictures, and the projection head that training alone uses.

    mean, std    of each channel: what pictures from 0 to 1 are scaled by
    chunk_size   rows embedded at a time; the gradients are those of the whole batch
    """

    def __init__(self, encoder, head, run, mean=(0, 0, 0), std=(1, 1, 1)):
        super().__init__()
        self.encoder, self.head, self.width = encoder, head, encoder.config.hidden_sizes[-1]
        self.bf16, self.chunk_size = run.bf16, run.args.chunk_size
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values).float()[:, None, None], persistent=False)

    def features(self, pictures):
        """(n, H) float32: the encoder's pooled output for pictures (n, 3, S, S) from 0 to 1."""
        pictures = ((pictures - self.mean) / self.std).contiguous(memory_format=torch.channels_last)
        with torch.autocast(pictures.device.type, torch.bfloat16, enabled=self.bf16):
            return self.encoder(pictures).pooler_output.flatten(1).float()

    def forward(self, views):
        """(n, D) float32 projections of views (n, 3, S, S)."""
        chunks = views.split(self.chunk_size or len(views))
        module = self if self.chunk_size else None
        return embed_in_chunks(lambda x: self.head(self.features(x)).float(), chunks, module)

    @torch.no_grad()
    def read(self, pictures):
        """(N, H) features of pictures (N, H, W, 3) uint8 as they are, batch norms at rest."""
        training = self.training
        self.eval()
        parts = [self.features(scaled(part.to(self.mean.device))) for part in pictures.split(512)]
        self.train(training)
        return torch.cat(parts)

    def restore(self, folder):
        """Puts the saved checkpoint back."""
        self.encoder.load_state_dict(load_file(folder / "model.safetensors"))


def average_statistics(model):
    """The mean over ranks of what batch norms have seen, so that all save and evaluate the same model."""
    for name, statistic in model.named_buffers():
        if "running" in name and dist.is_initialized():
            dist.all_reduce(statistic)
            statistic /= dist.get_world_size()


def knn_accuracy(bank, bank_labels, queries, labels, k=200, temperature=0.1, impl="auto"):
    """Percent of queries whose label the k nearest rows of the bank give; each votes with exp(cosine / τ)."""
    bank, queries = F.normalize(bank, dim=1), F.normalize(queries, dim=1)
    cosine, at = similarity_topk(queries, bank, min(k, len(bank)), impl=impl)
    votes = torch.zeros(len(queries), int(bank_labels.max()) + 1, device=bank.device)
    votes.scatter_add_(1, bank_labels[at], (cosine / temperature).exp())
    return 100 * (votes.argmax(1) == labels).float().mean().item()


def evaluate(model, pictures, impl="auto"):
    """{"knn": percent} of the labelled test pictures, by the training pictures."""
    bank, queries = model.read(pictures.images), model.read(pictures.test[0])
    labels, wanted = (labels.to(bank.device) for labels in (pictures.labels, pictures.test[1]))
    return {"knn": knn_accuracy(bank, labels, queries, wanted, impl=impl)}


def score(args, script, linear_probe):
    """--evaluate of picture encoders: kNN and linear probe of --model on --data."""
    if not args.data:
        fail("--evaluate: nothing to evaluate; name pictures with labels, and a test set, by --data")
    if args.model in RESNETS:
        fail(f"--model {args.model}: a new model has learnt nothing; name a folder or one of the hub")
    pictures = Pictures(args)
    say("data", pictures.describe())
    if not pictures.test:
        fail("--evaluate: wanted labels on both sides, and a test set: in --data, or by --dev")
    run = Run(args, script)
    encoder = load_encoder(args.model, pictures.small)
    model = PictureEncoder(encoder, None, run, *read_statistics(args.model)).to(run.device)
    pictures.place(run.device)
    found = f"kNN {evaluate(model, pictures, run.impl)['knn']:.2f} %"
    if args.probe_epochs:
        found += f", linear {linear_probe(model, pictures, run):.2f} %"
    say("test", f"{found}  {args.model}")


def read_statistics(name):
    """(mean, standard deviation) of each channel, by which a folder or hub name wants pictures scaled."""
    try:
        prepared = read_json(name, "preprocessor_config.json")
        mean, std = prepared.get("image_mean", [0] * 3), prepared.get("image_std", [1] * 3)
        if len(mean) == len(std) == 3 and torch.tensor([mean, std]).isfinite().all() and min(std) > 0:
            return mean, std
        what = f"image_mean {mean}, image_std {std}"
    except (AttributeError, TypeError, ValueError, RuntimeError, OSError) as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
    fail(f"--model {name}: its preprocessor_config.json is damaged ({what}); wanted three numbers each")


def train_probe(model, pictures, run, *, view, batch, rate, std=0.0, nesterov=False):
    """Percent of test pictures that a linear layer on the frozen features labels right.

    view    what training sees, for --probe-epochs, of pictures (n, 3, S, S) from 0 to 1
    rate    (step from 0, steps) → learning rate
    std     of the layer's first weights
    """
    model.eval()
    torch.manual_seed(run.args.seed)                           # the same after training and by --evaluate
    labels, wanted = (labels.to(run.device) for labels in (pictures.labels, pictures.test[1]))
    layer = nn.Linear(model.width, int(labels.max()) + 1, device=run.device)
    nn.init.normal_(layer.weight, std=std) if std else nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0, momentum=0.9, nesterov=nesterov)
    total = run.args.probe_epochs * (len(pictures) // batch)
    order = batches(len(pictures), batch, run.args.seed, least=batch)
    for step, rows in zip(range(total), order):
        set_lr(optimizer, rate(step, total))
        with torch.no_grad():
            h = model.features(view(scaled(pictures.take(rows))))
        optimizer.zero_grad()
        F.cross_entropy(layer(h), labels[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        right = layer(model.read(pictures.test[0])).argmax(1) == wanted
    return 100 * right.float().mean().item()


def save(model, run, size):
    """The encoder of a PictureEncoder for pictures of size (H, W) as transformers reads it, into --out."""
    if run.rank:
        return
    encoder, (height, width) = model.encoder, size
    prepare = dict(image_processor_type="ViTImageProcessor", size=dict(height=height, width=width))
    prepare |= dict(image_mean=model.mean.flatten().tolist(), image_std=model.std.flatten().tolist())
    with new_files(run) as aside:
        encoder.save_pretrained(aside)
        (aside / "preprocessor_config.json").write_text(json.dumps(prepare))
        text = (f"Features of pictures, {model.width} numbers each, compared by cosine; "
                "AutoImageProcessor makes the input.")
        if isinstance(encoder, SmallPictureResNet):
            text += "\nIts first layer, for small pictures, is none of transformers': AutoModel refuses it."
        tags = ["transformers", "image-feature-extraction"]
        card = model_card(run, "image-feature-extraction", tags, text, load_line(model, run))
        (aside / "README.md").write_text(card, encoding="utf-8")


def load_line(model, run):
    """How others load the folder."""
    if isinstance(model.encoder, SmallPictureResNet):
        return f'from kernels.training.images import load_encoder; load_encoder("{run.args.out}")'
    return f'AutoModel.from_pretrained("{run.args.out}")'
