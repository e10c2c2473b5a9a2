"""Pictures: read, encoded, judged by their neighbours, saved."""
import inspect
import json
import pickle
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, ResNetConfig, ResNetModel

from kernels import embed_in_chunks, similarity_topk

from .command import Fault, fail, say
from .folder import model_card, new_files
from .layout import read_json
from .loop import batches, set_lr
from .run import Run
from .views import scaled


class Pictures:
    """The pictures of --data, and those that a model is judged by: of --dev, or a test set in --data.

    images, labels    (N, H, W, 3) uint8, (N,) int64 or None
    test              (images, labels), or None where either side has no labels
    size, small       (H, W), and whether H is at most 32: the papers have other settings there
    """

    def __init__(self, args):
        (self.images, self.labels), test = read_pictures(args.data)
        if args.dev:
            test, _ = read_pictures(args.dev)
        self.path, self.size = args.data, tuple(self.images.shape[1:3])
        self.small = self.size[0] <= 32
        if (least := args.batch_size) > len(self) and not args.evaluate:
            fail(f"{self.path}: {len(self)} pictures, wanted at least --batch-size, which is {least}")
        if test is not None and (other := tuple(test[0].shape[1:3])) != self.size:
            fail(f"{args.dev or self.path}: test pictures are {by(other)}, the others {by(self.size)}")
        labelled = self.labels is not None and test is not None and test[1] is not None
        self.test = test if labelled else None

    def __len__(self):
        return len(self.images)

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


def by(shape):
    return f"{shape[1]} x {shape[0]}"                          # as one says it: width first


def read_pictures(path):
    """((pictures uint8 (N, H, W, 3), labels int64 (N,) or None), the same of a test set or None)."""
    path = Path(path)
    try:
        if path.suffix == ".npy":
            return check_pictures(path, "", np.load(path, allow_pickle=False), None), None
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                names, wanted = file.files, ("images", "labels", "test_images", "test_labels")
                images, labels, *test = (file[name] if name in names else None for name in wanted)
            if images is None:
                names = ", ".join(names) or "nothing"
                fail(f"{path}: holds {names}; wanted images, and {', '.join(wanted[1:])}")
            test = None if test[0] is None else check_pictures(path, "test_", *test)
            return check_pictures(path, "", images, labels), test
        if (path / "data_batch_1").is_file():
            test = read_cifar([path / "test_batch"]) if (path / "test_batch").is_file() else None
            return read_cifar(sorted(path.glob("data_batch_*"))), test
        if path.is_dir():
            return read_folder(path), None
        path.stat()                                            # no such file: an OSError that says so
    except Fault:
        raise
    except Exception as error:                                 # a damaged file has many ways to fail
        what = getattr(error, "strerror", None) or str(error) or type(error).__name__
        fail(f"{path}: {what}".splitlines()[0])
    fail(f"{path}: wanted a folder of pictures, CIFAR-10's python batches, .npz or .npy")


def check_pictures(path, prefix, pictures, labels):
    """(pictures, labels) as tensors; what does not fit is named."""
    if pictures.dtype != np.uint8 or pictures.ndim != 4 or pictures.shape[3] != 3 or not len(pictures):
        found = f"{prefix}images are {pictures.dtype} {pictures.shape}"
        fail(f"{path}: {found}, wanted uint8 (N, height, width, 3)")
    if labels is None:
        return torch.from_numpy(pictures), None
    if labels.shape != pictures.shape[:1] or labels.dtype.kind not in "iu" or labels.min() < 0:
        found = f"{prefix}labels are {labels.dtype} {labels.shape}"
        fail(f"{path}: {found}, wanted {len(pictures)} integers from 0 up")
    return torch.from_numpy(pictures), torch.from_numpy(labels.astype(np.int64))


class Arrays(pickle.Unpickler):
    """Reads arrays and plain values, as CIFAR's batches hold, and nothing else: a pickle can run code."""

    def find_class(self, module, name):
        array = module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype")
        if array or (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise ValueError(f"holds {module}.{name}, which no CIFAR batch does")


def read_cifar(paths):
    """Pictures and labels of CIFAR's python batches."""
    found = []
    for path in paths:
        with open(path, "rb") as file:
            found.append(Arrays(file, encoding="bytes").load())
    pictures = np.concatenate([batch[b"data"] for batch in found]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([batch.get(b"labels", batch.get(b"fine_labels")) for batch in found])
    return check_pictures(paths[0], "", np.ascontiguousarray(pictures.transpose(0, 2, 3, 1)), labels)


KINDS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")


def read_folder(path):
    """Pictures of a folder, decoded in processes of their own; sub-folders, if it has any, are the labels."""
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in KINDS)
    if not files:
        fail(f"{path}: no pictures; wanted {', '.join(KINDS)}")
    with ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        decoded = list(pool.map(decode, files, chunksize=64))
    for file, picture in zip(files, decoded):
        if isinstance(picture, str):
            fail(f"{file}: {picture}; repair or delete it")
        if picture.shape != decoded[0].shape:
            fail(f"{file}: {by(picture.shape)}, {files[0].name} is {by(decoded[0].shape)}; "
                 "bring all pictures to one size first")
    inside = [file.relative_to(path).parts[:-1] for file in files]
    folders = sorted({parts[0] for parts in inside if parts})
    if folders and () in inside:
        fail(f"{path}: pictures beside the folders {', '.join(folders[:3])}; "
             "a label is a folder, so all or none lie in one")
    labels = np.array([folders.index(parts[0]) for parts in inside]) if folders else None
    return check_pictures(path, "", np.stack(decoded), labels)


def decode(file):
    """(H, W, 3) uint8 of a picture, or what is wrong with it."""
    try:
        from PIL import Image
    except ImportError:
        return "reading it wants the package Pillow: pip install Pillow"
    try:
        with Image.open(file) as picture:
            return np.asarray(picture.convert("RGB"))
    except Exception as error:                                 # a damaged picture has many ways to fail
        return f"not readable ({type(error).__name__})"


class SmallPictureResNet(ResNetModel):
    """transformers' ResNet with the papers' stem for 32 pixels: a 3 x 3 convolution, and no pooling."""

    def __init__(self, config):
        super().__init__(config)
        stem = nn.Conv2d(config.num_channels, config.embedding_size, 3, padding=1, bias=False)
        self.embedder.embedder.convolution = stem
        self.embedder.pooler = nn.Identity()
        self.post_init()


BASIC, DEEP = dict(layer_type="basic"), dict(layer_type="bottleneck")
RESNETS = {"resnet-small": BASIC | dict(embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[1] * 4),
           "resnet-18": BASIC | dict(hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2]),
           "resnet-34": BASIC | dict(hidden_sizes=[64, 128, 256, 512], depths=[3, 4, 6, 3]),
           "resnet-50": DEEP | dict(hidden_sizes=[256, 512, 1024, 2048], depths=[3, 4, 6, 3])}


def load_encoder(name, small, flag="--model"):
    """A random ResNet, with the small stem for small pictures, or the one of a folder or a hub name."""
    if name in RESNETS:
        return (SmallPictureResNet if small else ResNetModel)(ResNetConfig(**RESNETS[name]))
    local, config, kind = Path(name).is_dir(), Path(name, "config.json"), AutoModel
    if not local:
        say("hub", f"{name} is fetched, unless it is in the cache")
    elif not config.is_file():
        fail(f"{flag} {name}: no config.json in this folder, so it is no transformers model")
    try:
        if local and "auto_map" in json.loads(config.read_text()):
            kind = SmallPictureResNet
        encoder, info = kind.from_pretrained(name, dtype=torch.float32, output_loading_info=True,
                                             trust_remote_code=False)
    except Exception as error:  # whatever the network or a damaged file makes of it
        if local:
            fail(f"{flag} {name}: {type(error).__name__}: {str(error).strip()}".splitlines()[0])
        fail(f"{flag} {name}: no such folder, and the hub does not give it; "
             "name a local folder, or take resnet-18")
    if not hasattr(encoder.config, "hidden_sizes"):
        fail(f"{flag} {name}: {type(encoder).__name__} is no image encoder like ResNet")
    if lost := info["missing_keys"]:
        fail(f"{flag} {name}: {len(lost)} weights, such as {min(lost)}, are missing")
    return encoder


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
    prepared = read_json(args.model, "preprocessor_config.json")
    statistics = [prepared[name] for name in ("image_mean", "image_std") if name in prepared]
    model = PictureEncoder(load_encoder(args.model, pictures.small), None, run, *statistics).to(run.device)
    pictures.place(run.device)
    found = f"kNN {evaluate(model, pictures, run.impl)['knn']:.2f} %"
    if args.probe_epochs:
        found += f", linear {linear_probe(model, pictures, run):.2f} %"
    say("test", f"{found}  {args.model}")


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
        if isinstance(encoder, SmallPictureResNet):  # AutoModel has no such stem: its code goes with it
            encoder.config.auto_map = {"AutoModel": "modeling.SmallPictureResNet"}
            source = inspect.getsource(SmallPictureResNet)
            imports = "from torch import nn\nfrom transformers import ResNetModel\n\n\n"
            (aside / "modeling.py").write_text(imports + source, encoding="utf-8")
        encoder.save_pretrained(aside)
        (aside / "preprocessor_config.json").write_text(json.dumps(prepare))
        text = (f"Features of pictures, {model.width} numbers each, compared by cosine; "
                "AutoImageProcessor makes the input.")
        tags = ["transformers", "image-feature-extraction"]
        card = model_card(run, "image-feature-extraction", tags, text, load_line(model, run))
        (aside / "README.md").write_text(card, encoding="utf-8")


def load_line(model, run):
    """How others load the folder."""
    code = ", trust_remote_code=True" if isinstance(model.encoder, SmallPictureResNet) else ""
    return f'AutoModel.from_pretrained("{run.args.out}"{code})'
