"""SimCLR: A Simple Framework for Contrastive Learning of Visual Representations. Chen, Kornblith, Norouzi, Hinton, ICML 2020,
arXiv 2002.05709; SimCLR v2's head, arXiv 2006.10029; SupCon, Khosla et al., NeurIPS 2020, arXiv 2004.11362.

Two random views of every picture pass one encoder and one projection head. A view is pulled to the other view of its picture
and pushed from both views of all others; after training the head is dropped. With u = z / |z| and s(i, j) = u_i·u_j / τ,

    L = 1/2N Σ_i [ −s(i, i') + log Σ_{j≠i} exp s(i, j) ],   i' the other view of i                     NT-Xent
    L = 1/2N Σ_i −1/|P(i)| Σ_{p∈P(i)} [ s(i, p) − log Σ_{j≠i} exp s(i, j) ]                             --supervised (SupCon),
                                                            P(i) all other views of the same label

Data: a folder of pictures of one size (sub-folders are labels), CIFAR-10's python batches (a folder), .npz (images, labels,
test_images, test_labels; uint8, N x H x W x 3) or .npy (images). Labels are for evaluation and --supervised alone.

    python simclr.py --data cifar-10-batches-py --out out/simclr
    python simclr.py --data cifar10.npz --supervised --temperature 0.1 --out out/supcon
    torchrun --nproc-per-node 4 simclr.py --data cifar10.npz --batch-size 2048 --lr-scaling sqrt --lr 0.2 --out out/four

Expected: ResNet-18, batch 512, CIFAR-10: about 83 % kNN and 85 % linear after 100 epochs, 91 % after 1,000; SupCon 93.8 %.
ImageNet, ResNet-50, 1,000 epochs: 69.1 % linear (the released checkpoint).

Departures from the released code: its loss is twice the paper's mean; its head has batch norms, which --form code brings back.
SupCon's released factor τ / 0.07 is left out. Resizing is bicubic without antialiasing, as TensorFlow's.
"""
import argparse, datetime, functools, hashlib, inspect, json, logging, math, os, pickle, re, shutil, signal, sys, time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, ResNetConfig, ResNetModel

from kernels import choose_impl, embed_in_chunks, gather_rows, nt_xent, own_rows, similarity_lse, similarity_topk

# ── flags ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error, add = fail, parser.add_argument
    add("--supervised", action="store_true", help="SupCon over the labels instead of NT-Xent")
    add("--head-layers", type=int, choices=(2, 3), default=2, help="of the projection head; default 2 (paper), 3 in SimCLR v2")
    add("--width", type=at_least(1, int), default=128, help="of the projection; default 128 (paper)")
    add("--form", choices=("paper", "code"), default="paper", help="default paper; code: batch norms in the head")
    add("--crop", type=at_least(0), default=0.08, help="least share of a picture that a view shows; default 0.08 (paper)")
    add("--colour", type=at_least(0), help="strength of the colour jitter; default 1, pictures up to 32 px 0.5 (paper)")
    add("--grey", type=at_least(0), default=0.2, help="share of grey views; default 0.2 (paper)")
    add("--blur", type=at_least(0), help="share of blurred views; default 0.5, pictures up to 32 px 0 (paper)")
    add("--optimizer", choices=("lars", "sgd"), default="lars", help="default lars (paper)")
    add("--lr-scaling", choices=("linear", "sqrt"), default="linear", help="lr · batch / 256, or lr · √batch; default linear")
    add("--warmup", type=at_least(0), default=10, help="epochs of linear warm-up before the cosine; default 10 (paper)")
    add("--weight-decay", type=at_least(0), default=1e-6, help="default 1e-6 (paper); the released code has 1e-4")
    add("--profile", action="store_true", help="time ten steps, and their loss alone, instead of training")
    add("--probe-epochs", type=at_least(0, int), default=100, help="of the linear probe at the end; default 100, 0: none")
    add("--data", required=True, help="training data; see above")
    add("--dev", help="labelled pictures to evaluate on, where --data holds no test set of its own")
    add("--model", default="resnet-18", help="hub name, local folder, or from scratch; default resnet-18, from scratch as resnet-small, -34, -50")
    add("--out", default="out/simclr", help="folder to write; default out/simclr")
    add("--batch-size", type=at_least(1, int), default=512, help="over all GPUs; default 512 pictures")
    add("--chunk-size", type=at_least(1, int), help="rows embedded at a time, with the whole batch's gradients; default the batch")
    add("--epochs", type=at_least(1, int), default=100, help="default 100")
    add("--steps", type=at_least(1, int), help="length of the training in steps instead of epochs")
    add("--lr", type=at_least(0), default=1.0, help="learning rate; default 1.0 before --lr-scaling (CIFAR-10; ImageNet 0.3, or sqrt 0.075)")
    add("--temperature", type=at_least(1e-4), default=0.5, help="τ; default 0.5 (CIFAR-10), ImageNet and SupCon 0.1")
    add("--seed", type=at_least(0, int), default=42, help="default 42")
    add("--eval-every", type=at_least(1, int), default=1000, help="steps between evaluations; default 1000")
    add("--resume", action="store_true", help="continue the run in --out from its last evaluation, with the same flags")
    add("--impl", default="auto", choices=("auto", "triton", "blockwise", "eager"), help="kernels; default auto")
    add("--precision", choices=["bf16", "fp32"], help="of the encoder, by default bf16 on a GPU and fp32 on a CPU; newer CPUs are fast in bf16")
    return parser


# ── data ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """(train, test): (images uint8 (N, H, W, 3), labels int64 (N,) or None) each; test is None where there is none."""
    train, test = read_pictures(path)
    if args.dev:
        test, _ = read_pictures(args.dev)
    args.size = size = train[0].shape[1]
    for name, value in dict(colour=0.5 if size <= 32 else 1.0, blur=0.0 if size <= 32 else 0.5).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.batch_size > len(train[0]):
        fail(f"{path}: {len(train[0])} pictures, wanted at least --batch-size, which is {args.batch_size}")
    if args.supervised and train[1] is None:
        fail(f"--supervised wants labels, and {path} has none: sub-folders, or labels in the .npz")
    if test is not None and test[0].shape[1:] != train[0].shape[1:]:
        fail(f"{args.dev or path}: test pictures are {test[0].shape[2]} x {test[0].shape[1]}, the others {train[0].shape[2]} x {size}")
    labelled = train[1] is not None and test is not None and test[1] is not None
    what = f"{train[1].max() + 1} classes, {len(test[0]):,} test pictures" if labelled else "no labelled test set: no evaluation"
    say(Path(__file__).stem, f"{'supervised' if args.supervised else 'unsupervised'}: {len(train[0]):,} pictures of "
                             f"{train[0].shape[2]} x {size} from {path}, {what}")
    return train, test if labelled else None


def make_batch(rows, model, args):
    """(views, labels): two views of each of n pictures, all first views before all second, (2n, 3, S, S) float32 in [0, 1]
    on the device, and with --supervised the labels of all ranks' pictures."""
    rows = torch.tensor(rows, device=model.pictures.device)
    pictures = model.pictures[rows].to(model.device)
    labels = gather_rows(model.labels[rows.cpu()].to(model.device), args.rows) if args.supervised else None
    return augment(torch.cat([pictures, pictures]), args), labels


def augment(pictures, args):
    """Views of pictures (n, H, W, 3) uint8, as (n, 3, H, W) float32 in [0, 1]: crop, flip, colours, grey, blur (SimCLR).

    Every picture has its own draw of every parameter.
    """
    x = pictures.permute(0, 3, 1, 2).float() / 255
    x = crop_and_flip(x, args.crop, uniform(3 / 4, 4 / 3, (len(x), 100), x), cubic)
    x = jitter(x, 0.8 * args.colour, 0.2 * args.colour, 0.8)
    x = torch.where(coin(args.grey, x), grey(x), x)
    if args.blur:
        x = torch.where(coin(args.blur, x), blur(x), x)
    return x.clamp(0, 1)


def uniform(low, high, shape, like):
    return low + (high - low) * torch.rand(shape, device=like.device)


def coin(p, like):
    """(n, 1, 1, 1) bool for the n pictures of like, true with probability p."""
    return uniform(0, 1, (len(like), 1, 1, 1), like) < p


def crop_and_flip(x, least, aspects, resize):
    """A box of at least `least` of the area, resized to all of the picture; half are flipped. aspects (n, tries): the box is that
    many times as wide for its height as the picture; the first that fits is taken, else all of it."""
    n, _, height, width = x.shape
    area, ratio = uniform(least, 1, aspects.shape, x), aspects * width / height
    h = (area * height * width / ratio).sqrt().round().clamp(min=1)
    w = (h * ratio).round().clamp(min=1)
    fits = (h <= height) & (w <= width)
    try_ = fits.int().argmax(1, keepdim=True)
    h, w = (torch.where(fits.any(1), side.gather(1, try_)[:, 0], whole) for side, whole in ((h, height), (w, width)))
    top = (uniform(0, 1, (n,), x) * (height - h + 1)).floor()
    left = (uniform(0, 1, (n,), x) * (width - w + 1)).floor()
    rows, columns = resize(top, h, height, x), resize(left, w, width, x)
    columns = torch.where(coin(0.5, x)[:, 0], columns.flip(1), columns)
    return (rows[:, None] @ x @ columns.mT[:, None]).clamp(0, 1)


def cubic(first, length, size, x):
    """(n, size, size): the matrix that resizes pixels [first, first + length) to size by Keys' cubic, edges repeated."""
    centre = (torch.arange(size, device=x.device) + 0.5) * (length / size)[:, None] - 0.5     # in pixels of the box
    base = centre.floor()
    matrix = x.new_zeros(len(first), size, size)
    for tap in range(-1, 3):
        t = (centre - base - tap).abs()
        weight = torch.where(t <= 1, (1.5 * t - 2.5) * t * t + 1, ((-0.5 * t + 2.5) * t - 4) * t + 2)          # a = −1/2
        pixel = first[:, None] + (base + tap).clamp(min=0).minimum(length[:, None] - 1)
        matrix.scatter_add_(2, pixel.long()[:, :, None], weight[:, :, None])
    return matrix


def jitter(x, colour, hue, share):
    """Brightness, contrast and saturation by up to `colour`, hue by up to `hue` circles, in random order, for a share of the pictures."""
    n = len(x)
    order = uniform(0, 1, (n, 4), x).argsort(1)
    on = coin(share, x)
    factors = [uniform(max(0, 1 - colour), 1 + colour, (n, 1, 1, 1), x) for _ in range(3)]
    shift = uniform(-hue, hue, (n, 1, 1), x)
    for place in range(4):
        now = [(order[:, place] == which).view(n, 1, 1, 1) & on for which in range(4)]
        x = torch.where(now[0], x * factors[0], x)
        luma = grey(x)
        mean = luma.mean((2, 3), keepdim=True)
        x = torch.where(now[1], mean + (x - mean) * factors[1], torch.where(now[2], luma + (x - luma) * factors[2], x))
        x = torch.where(now[3], shift_hue(x, shift), x)
        x = x.clamp(0, 1)
    return x


def grey(x):
    """(n, 3, H, W): luma in all three channels (ITU-R 601)."""
    return (x * x.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True).expand_as(x)


def shift_hue(x, shift):
    """Colours of (n, 3, H, W) turned by shift (n, 1, 1), in full circles; value and saturation stay."""
    red, green, blue = x.unbind(1)
    value, least = x.amax(1), x.amin(1)
    chroma = value - least
    scale = torch.where(chroma > 0, 1 / chroma.clamp(min=1e-12), 0.0)
    hue = torch.where(value == red, (green - blue) * scale, torch.where(value == green, 2 + (blue - red) * scale, 4 + (red - green) * scale))
    hue = (hue / 6 + shift) % 1 * 6
    tooth = lambda n: value - chroma * torch.minimum((hue + n) % 6, 4 - (hue + n) % 6).clamp(0, 1)
    return torch.stack([tooth(5), tooth(3), tooth(1)], 1)


def blur(x):
    """Gaussian blur with sigma from 0.1 to 2, a kernel of a tenth of the height; zeros around the picture."""
    radius = max(1, x.shape[2] // 20)
    at = torch.arange(-radius, radius + 1, device=x.device)
    kernel = (-at ** 2 / (2 * uniform(0.1, 2, (len(x), 1), x) ** 2)).exp()
    kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(3, 0)[:, None]                         # (3n, 1, taps)
    flat = x.reshape(1, -1, *x.shape[2:])
    flat = F.conv2d(flat, kernel[:, :, :, None], padding=(radius, 0), groups=flat.shape[1])
    return F.conv2d(flat, kernel[:, :, None, :], padding=(0, radius), groups=flat.shape[1]).view_as(x)


# ── model ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class SmallPictureResNet(ResNetModel):
    """transformers' ResNet with the papers' stem for pictures of 32 pixels: a 3 x 3 convolution of stride 1, no pooling."""

    def __init__(self, config):
        super().__init__(config)
        self.embedder.embedder.convolution = nn.Conv2d(config.num_channels, config.embedding_size, 3, padding=1, bias=False)
        self.embedder.pooler = nn.Identity()
        self.post_init()


RESNETS = {"resnet-small": dict(embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 1, 1], layer_type="basic"),
           "resnet-18": dict(hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic"),
           "resnet-34": dict(hidden_sizes=[64, 128, 256, 512], depths=[3, 4, 6, 3], layer_type="basic"),
           "resnet-50": dict(hidden_sizes=[256, 512, 1024, 2048], depths=[3, 4, 6, 3], layer_type="bottleneck")}


def build_model(args):
    """The encoder, and the projection head that training alone uses."""
    model = nn.Module()
    model.device, model.bf16 = torch.device(args.device), args.precision == "bf16"
    model.mean, model.std = torch.zeros(3, 1, 1, device=args.device), torch.ones(3, 1, 1, device=args.device)    # as they are (code)
    model.encoder = load_encoder(args)
    if args.model in RESNETS:
        for block in (block for stage in model.encoder.encoder.stages for block in stage.layers):
            nn.init.zeros_(block.layer[-1].normalization.weight)                 # a residual block starts as the identity (paper)
    width = model.encoder.config.hidden_sizes[-1]
    sizes, layers = [width] * args.head_layers + [args.width], []
    for i, (inside, outside) in enumerate(zip(sizes, sizes[1:])):
        last, norms = i == args.head_layers - 1, args.form == "code"
        layers.append(nn.Linear(inside, outside, bias=not norms))
        nn.init.normal_(layers[-1].weight, std=0.01) if norms else None
        if norms:
            layers.append(nn.BatchNorm1d(outside))
            layers[-1].bias.requires_grad_(not last)           # the last one scales and does not shift
        if not last:
            layers.append(nn.ReLU())
    model.head = nn.Sequential(*layers)
    if args.world > 1 and args.device != "cpu":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model.to(model.device, memory_format=torch.channels_last)


def load_encoder(args):
    """A random ResNet, with the small stem for small pictures, or the one of a folder or a hub name."""
    if args.model in RESNETS:
        config = ResNetConfig(**RESNETS[args.model])
        return (SmallPictureResNet if args.size <= 32 else ResNetModel)(config)
    local = Path(args.model).is_dir()
    try:
        if local and "auto_map" in json.loads((Path(args.model) / "config.json").read_text()):
            return SmallPictureResNet.from_pretrained(args.model)
        encoder = AutoModel.from_pretrained(args.model, dtype=torch.float32)
    except Exception as error:                                 # whatever the network or a damaged file makes of it
        if local:
            fail(f"--model {args.model}: {type(error).__name__}: {str(error).strip()}".splitlines()[0])
        fail(f"--model {args.model}: no such folder, and the hub does not give it; name a local folder, or take resnet-18")
    if not hasattr(encoder.config, "hidden_sizes"):
        fail(f"--model {args.model}: {type(encoder).__name__} is no image encoder like ResNet")
    return encoder


def embed(model, pictures):
    """(n, H) float32 features of pictures (n, 3, S, S) from 0 to 1: the encoder's pooled output, before the head."""
    pictures = ((pictures - model.mean) / model.std).contiguous(memory_format=torch.channels_last)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
        return model.encoder(pictures).pooler_output.flatten(1).float()


# ── the paper ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def compute_loss(model, batch, args):
    """The loss of a batch (views, labels or None): both views in one pass, so batch norms see all of them, or a chunk of them."""
    views, labels = batch
    chunks = views.split(args.chunk_size or len(views))
    z = embed_in_chunks(lambda x: model.head(embed(model, x)).float(), chunks, model if args.chunk_size else None)
    loss = loss_of_projections(z, labels, args)
    return loss, {"loss": loss.detach()}


def loss_of_projections(z, labels, args):
    """The loss of this rank's raw projections z (2n, D), first views before second, among those of all ranks."""
    z1, z2 = z.chunk(2)
    gathered = (gather_rows(z1, args.rows), gather_rows(z2, args.rows)) if args.supervised or args.world > 1 else None
    if args.supervised:
        return sup_con_loss(torch.stack(gathered, 1), labels, args.temperature, impl=args.impl)
    loss = simclr_loss(z1, z2, args.temperature, gathered=gathered, offset=own_rows(args.rows).start, impl=args.impl)
    return loss * (len(z1) * args.world / args.rows)


def simclr_loss(z1, z2, temperature=0.5, *, gathered=None, offset=0, impl="auto"):
    """NT-Xent: mean over the 2N views of −log softmax of the other view of the same picture among all other views.

    z1, z2        (N, D) raw projections of the two views, any float type; normalised here
    gathered      (z1, z2) of all ranks, (M, D) each, with gradient; None: one process
    offset        this rank's first row in them
    returns       scalar float32, float64 for float64; one picture: 0. The released code returns twice this
    source        Chen et al. 2020, eq. 1 and algorithm 1
    """
    z1, z2 = F.normalize(z1, dim=1), F.normalize(z2, dim=1)
    if gathered is None:
        return nt_xent(z1, z2, temperature, impl=impl)
    others = [F.normalize(z, dim=1) for z in gathered]
    positive = (z1 * z2).sum(1) / temperature
    losses = []
    for z in (z1, z2):                                         # a view's own row and its other view are row offset + i of each
        negatives = [similarity_lse(z, other, temperature, exclude="diagonal", offset=offset, impl=impl) for other in others]
        losses.append(-F.logsigmoid(positive - torch.logaddexp(*negatives)))
    return torch.cat(losses).mean()


def sup_con_loss(features, labels=None, temperature=0.1, base_temperature=None, *, impl="auto"):
    """SupCon, the form with the logarithm inside the sum: mean over views of the mean −log softmax of their positives.

    features          (N, V, D) raw projections of V views, any float type; normalised here
    labels            (N,) integers: all other views of the same label are positives; None: of the same sample
    base_temperature  the released code multiplies by temperature / base_temperature (0.07 there); None: the paper's loss
    returns           scalar float32, float64 for float64; a view without positives adds 0 and counts
    source            Khosla et al. 2020, L^sup_out
    """
    n, views, d = features.shape
    z = F.normalize(features, dim=2).flatten(0, 1)
    labels = torch.arange(n, device=z.device) if labels is None else labels
    _, group = labels.repeat_interleave(views).unique(return_inverse=True)
    wide = z.double() if z.dtype == torch.float64 else z.float()
    sums = wide.new_zeros(len(z), d).index_add(0, group, wide)                 # of each label: Σ_p u_i·u_p needs no matrix
    positives = group.bincount(minlength=len(z))[group] - 1
    similarity = ((wide * sums[group]).sum(1) - (wide * wide).sum(1)) / temperature
    lse = similarity_lse(z, None, temperature, exclude="diagonal", impl=impl)
    loss = torch.where(positives > 0, lse - similarity / positives.clamp(min=1), 0.0).mean()
    return loss if base_temperature is None else loss * temperature / base_temperature


class LARS(torch.optim.Optimizer):
    """SGD whose step for every weight matrix is scaled by 0.001 |w| / |gradient|; norms and biases are left out (paper)."""

    def __init__(self, parameters, lr, weight_decay, momentum=0.9, trust=0.001):
        super().__init__(list(parameters), dict(lr=lr, weight_decay=weight_decay, momentum=momentum, trust=trust))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for w in (w for w in group["params"] if w.grad is not None):
                step = w.grad
                if w.dim() > 1:
                    step = step + group["weight_decay"] * w
                    norms = w.norm(), step.norm()
                    step = step * torch.where((norms[0] > 0) & (norms[1] > 0), group["trust"] * norms[0] / norms[1], 1.0)
                v = self.state[w].setdefault("momentum", torch.zeros_like(w))
                v.mul_(group["momentum"]).add_(step, alpha=group["lr"])          # the rate inside: a changing one is not SGD's
                w.sub_(v)


# ── evaluation ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def knn_accuracy(bank, bank_labels, queries, labels, k=200, temperature=0.1, impl="auto"):
    """Percent of queries whose label the k nearest rows of the bank give, each voting with exp(cosine / τ)."""
    bank, queries = F.normalize(bank, dim=1), F.normalize(queries, dim=1)
    cosine, at = similarity_topk(queries, bank, min(k, len(bank)), impl=impl)
    votes = torch.zeros(len(queries), int(bank_labels.max()) + 1, device=bank.device)
    votes.scatter_add_(1, bank_labels[at], (cosine / temperature).exp())
    return 100 * (votes.argmax(1) == labels).float().mean().item()


@torch.no_grad()
def features(model, pictures):
    """(N, H) features of pictures as they are, the encoder and its batch norms at rest."""
    training = model.training
    model.eval()
    parts = [embed(model, part.to(model.device).permute(0, 3, 1, 2).float() / 255) for part in pictures.split(512)]
    model.train(training)
    return torch.cat(parts)


def evaluate(model, test, args):
    """{"knn": percent} of the labelled test pictures, by the training pictures."""
    bank, labels = features(model, model.pictures), model.labels.to(model.device)
    return {"knn": knn_accuracy(bank, labels, features(model, test[0]), test[1].to(model.device), impl=args.impl)}


def linear_probe(model, test, args):
    """Percent of test pictures that one linear layer on the frozen features labels right. Training sees crops and flips.

    Nesterov momentum, rate 0.1 · batch / 256 along a cosine (SimCLR); or rate 5, a fifth at 60, 75 and 90 % (SupCon).
    """
    model.eval()
    labels, classes = model.labels.to(model.device), int(model.labels.max()) + 1
    probe = nn.Linear(model.encoder.config.hidden_sizes[-1], classes, device=model.device)
    nn.init.zeros_(probe.weight), nn.init.zeros_(probe.bias)
    batch = min(512, len(labels))
    rate, total = 5 if args.supervised else 0.1 * batch / 256, args.probe_epochs * (len(labels) // batch)
    optimizer = torch.optim.SGD(probe.parameters(), lr=rate, momentum=0.9, nesterov=not args.supervised)
    for step, rows in zip(range(total), full_batches(len(labels), 0, batch, args.seed)):
        rows = torch.tensor(rows, device=model.pictures.device)
        with torch.no_grad():
            x = model.pictures[rows].to(model.device).permute(0, 3, 1, 2).float() / 255
            h = embed(model, crop_and_flip(x, args.crop, uniform(3 / 4, 4 / 3, (batch, 100), x), cubic))
        falls = sum(step >= share * total for share in (0.6, 0.75, 0.9))
        optimizer.param_groups[0]["lr"] = rate * 0.2 ** falls if args.supervised else warmup_cosine(step, total, 0, rate)
        optimizer.zero_grad()
        F.cross_entropy(probe(h), labels[rows.to(model.device)]).backward()
        optimizer.step()
    with torch.no_grad():
        right = probe(features(model, test[0])).argmax(1) == test[1].to(model.device)
    return 100 * right.float().mean().item()


# ── plumbing ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_pictures(path):
    """((pictures uint8 (N, H, W, 3), labels int64 (N,) or None), the same of a test set or None) of a path of any kind."""
    path = Path(path)
    try:
        if path.suffix == ".npy":
            return check_pictures(path, "", np.load(path, allow_pickle=False), None), None
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                if "images" not in file:
                    fail(f"{path}: holds {', '.join(file.files) or 'nothing'}; wanted images, and labels, test_images, test_labels")
                sets = [[file[prefix + name] if prefix + name in file else None for name in ("images", "labels")] for prefix in ("", "test_")]
            return check_pictures(path, "", *sets[0]), check_pictures(path, "test_", *sets[1]) if sets[1][0] is not None else None
        if (path / "data_batch_1").is_file():
            files = sorted(path.glob("data_batch_*")), [path / "test_batch"] * (path / "test_batch").is_file()
            return tuple(read_cifar(names) if names else None for names in files)
        if path.is_dir():
            return read_folder(path), None
    except Exception as error:                                 # a damaged file has many ways to fail
        fail(f"{path}: {getattr(error, 'strerror', None) or str(error) or type(error).__name__}".splitlines()[0])
    fail(f"{path}: wanted a folder of pictures, CIFAR-10's python batches, .npz or .npy" if path.exists() else f"{path}: No such file or directory")


def check_pictures(path, prefix, pictures, labels):
    """(pictures, labels) as tensors; what does not fit is named."""
    if pictures.dtype != np.uint8 or pictures.ndim != 4 or pictures.shape[3] != 3 or not len(pictures):
        fail(f"{path}: {prefix}images are {pictures.dtype} {pictures.shape}, wanted uint8 (N, height, width, 3)")
    if labels is not None and (labels.shape != pictures.shape[:1] or labels.dtype.kind not in "iu" or labels.min() < 0):
        fail(f"{path}: {prefix}labels are {labels.dtype} {labels.shape}, wanted {len(pictures)} integers from 0 up")
    return torch.from_numpy(pictures), None if labels is None else torch.from_numpy(labels.astype(np.int64))


class Arrays(pickle.Unpickler):
    """Reads what CIFAR's batches hold, arrays and plain values, and refuses everything else: a pickle can run code."""

    def find_class(self, module, name):
        if module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype") or (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise ValueError(f"holds {module}.{name}, which no CIFAR batch does")


def read_cifar(paths):
    """Pictures and labels of CIFAR's python batches."""
    batches = []
    for path in paths:
        with open(path, "rb") as file:
            batches.append(Arrays(file, encoding="bytes").load())
    pictures = np.concatenate([batch[b"data"] for batch in batches]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    labels = np.concatenate([batch.get(b"labels", batch.get(b"fine_labels")) for batch in batches])
    return check_pictures(paths[0], "", np.ascontiguousarray(pictures), labels)


def read_folder(path):
    """Pictures of a folder, decoded by Pillow in processes of their own; its sub-folders, if it has any, are the labels."""
    kinds = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".gif", ".tif", ".tiff"}
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in kinds)
    if not files:
        fail(f"{path}: no pictures; wanted {', '.join(sorted(kinds))}")
    with ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        decoded = list(pool.map(decode, files, chunksize=64))
    for file, picture in zip(files, decoded):
        if isinstance(picture, str):
            fail(f"{file}: {picture}; repair or delete it")
        if picture.shape != decoded[0].shape:
            fail(f"{file}: {picture.shape[1]} x {picture.shape[0]}, {files[0].name} is {decoded[0].shape[1]} x {decoded[0].shape[0]}; "
                 "bring all pictures to one size first")
    folders = sorted({file.relative_to(path).parts[0] for file in files if file.parent != path})
    mixed = folders and any(file.parent == path for file in files)
    if mixed:
        fail(f"{path}: pictures beside the folders {', '.join(folders[:3])}; a label is a folder, so all or none lie in one")
    labels = np.array([folders.index(file.relative_to(path).parts[0]) for file in files]) if folders else None
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


def start(args):
    """Rank, world and device; refuses an --out that cannot be, or must not be, written."""
    args.rank, args.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    args.device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    args.precision = args.precision or ("fp32" if args.device == "cpu" else "bf16")
    args.rows, args.fingerprint = args.batch_size, fingerprint(Path(args.data))
    if args.batch_size < args.world:
        fail(f"--batch-size {args.batch_size} is less than a row for each of {args.world} processes")
    out = Path(args.out).absolute()
    existing = next(folder for folder in (out, *out.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        fail(f"--out {args.out}: {existing} is no folder that can be written")
    if args.resume and not (out / "state.pt").is_file():
        fail(f"--out {args.out}: no state.pt to resume from")
    if not args.resume and existing == out and any(out.iterdir()):
        kept = "another run: continue it with --resume" if (out / "state.pt").is_file() else "files but no checkpoint: empty it"
        fail(f"--out {args.out} holds {kept}, or name another folder")
    if "RANK" in os.environ:
        if args.device != "cpu":
            torch.cuda.set_device(args.device)
        timeout = datetime.timedelta(minutes=30)               # rank 0 evaluates alone meanwhile
        dist.init_process_group("gloo" if args.device == "cpu" else "nccl", timeout=timeout)
    if args.device != "cpu" and args.precision == "bf16":             # tensor cores also for what autocast leaves in float32
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    try:                                                       # before anything is read or written
        similarity_lse(torch.zeros(1, 16, device=args.device), impl=args.impl)
    except ValueError as error:
        fail(f"--{error}")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def fingerprint(path):
    """Tells whether data changed between runs: of a file its size and up to 256 places in it, of a folder its names and sizes."""
    digest, size = hashlib.sha1(), path.stat().st_size
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        digest.update("".join(f"{file.relative_to(path)} {file.stat().st_size}\n" for file in files).encode())
    else:
        digest.update(str(size).encode())
        with open(path, "rb") as file:
            for place in range(0, size, max(2**16, size // 256)):
                file.seek(place)
                digest.update(file.read(2**16))
    return digest.hexdigest()


def begin_out(args):
    """The folder of a new run, with its flags and the code that ran."""
    if args.resume or args.rank:
        return
    flags = {name: value for name, value in vars(args).items() if name not in ("resume", "out", "rank", "rows", "device")}
    try:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        (Path(args.out) / "args.json").write_text(json.dumps(flags, indent=1))
        shutil.copy(__file__, args.out)
    except OSError as error:
        fail(f"--out {args.out}: {error.strerror}")


def average_gradients(model, args):
    """The mean over ranks; with gather_rows it is the gradient of the mean loss over the global batch."""
    if args.world > 1:
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= args.world


def average_statistics(model, args):
    """The mean over ranks of what batch norms have seen, so that all save and evaluate the same model."""
    for statistic in (buffer for buffer in model.buffers() if args.world > 1 and buffer.is_floating_point()):
        dist.all_reduce(statistic)
        statistic /= args.world


def warmup_cosine(step, total, warmup, lr):
    """From 0 up to lr in `warmup` steps, then half a cosine down to 0 at `total`; step counts from 0 (paper)."""
    if step < warmup:
        return lr * step / warmup
    return lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def full_batches(count, step, size, seed):
    """Row numbers of each step after `step`, endlessly, without the incomplete batch at an epoch's end (paper)."""
    epoch, done = divmod(step, count // size)
    while True:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + 1_000_003 * epoch)).tolist()
        for first in range(done * size, count // size * size, size):
            yield order[first : first + size]
        epoch, done = epoch + 1, 0


SIGNALS = []                                                   # Ctrl-C and SIGTERM that came during a step


def command(main):
    """main, telling the faults of the machine in one line; during training Ctrl-C and SIGTERM wait for the end of a step."""
    @functools.wraps(main)
    def run(argv=None):
        kept = "; a checkpoint that --out holds is whole, and --resume continues from it"
        handlers = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            main(argv)
        except KeyboardInterrupt:                              # asked_to_stop takes it from then on
            say("stopped", "before the first step")
            sys.exit(130)
        except torch.OutOfMemoryError:
            flags = [flag for flag in ("--chunk-size", "--batch-size", "--max-length") if flag in make_parser().format_usage()]
            fail(f"the GPU's memory is full; lower {' or '.join(flags)}{kept}", every_rank=True)
        except (OSError, SafetensorError) as error:
            fail(f"{getattr(error, 'strerror', None) or error}" + kept, every_rank=True)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):         # what torch.save makes of a full disk
                fail(f"{error.__context__.strerror}{kept}", every_rank=True)
            if not dist.is_initialized() or not re.search("gloo|NCCL|[Cc]onnection|[Tt]imed? ?out", str(error)):
                raise
            fail(f"another process of this run has died or hangs ({str(error).splitlines()[0][:80]})" + kept, every_rank=True)
        finally:
            SIGNALS.clear()
            for kind, handler in handlers.items():
                signal.signal(kind, handler)
    return run


def asked_to_stop(step, args):
    """Whether Ctrl-C or SIGTERM came on any rank. Ranks agree every tenth step; a second signal ends the run at once."""
    def heard(number, _):
        if SIGNALS:
            sys.exit(128 + number)
        SIGNALS.append(number)
        if args.rank == 0:                                     # print is not reentrant
            os.write(1, b"\n" * sys.stdout.isatty() + b"stopping when this step is done and saved; once more, and at once\n")

    if step == 0:
        for kind in (signal.SIGINT, signal.SIGTERM):
            signal.signal(kind, heard)
    if args.world == 1 or step % 10:
        return bool(SIGNALS) and args.world == 1
    asked = torch.tensor(float(bool(SIGNALS)), device=args.device)
    dist.all_reduce(asked)
    return asked.item() > 0


def refuse_bad_loss(first_bad, where, progress, args):
    """Ends the run if a loss was not finite: at which step, where in the data (a text for a step), and what is left."""
    if args.world > 1:
        dist.all_reduce(first_bad, dist.ReduceOp.MAX)
    if step := int(first_bad):
        left = f"the checkpoint of step {progress['step']} in {args.out} is whole" if progress["step"] else "there is no checkpoint yet"
        fail(f"step {step}: the loss is not finite; {where(step)} of --data; {left}; try a lower --lr")


def named(batches):
    return f"rows {', '.join(str(row + 1) for row in next(batches)[:20])}, ..."


def report(step, total, values, began, args):
    """A row of metrics.jsonl, and a bar on a terminal or a line in a log. Tensors become means over the ranks."""
    for name in values:
        if torch.is_tensor(values[name]):
            if args.world > 1:
                dist.all_reduce(values[name])
            values[name] = values[name].item() / args.world
    if args.rank == 0:
        first, clock = began
        seconds = time.perf_counter() - clock
        with open(Path(args.out) / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step, **values, "seconds": round(seconds, 3)}) + "\n")
        left, done = round(seconds / (step - first) * (total - step)), 16 * step // total
        line = (f"{step:7,}/{total:,} {'━' * done}{'─' * (16 - done)}  loss {values['loss']:.4f}  lr {values['lr']:.1e}  "
                f"{(step - first) * args.batch_size / seconds:,.0f} rows/s  left {left // 60}:{left % 60:02}")
        for score in (values[name] for name in ("dev_spearman", "dev_knn") if name in values):
            line += f"  dev {score:.2f}{' best' if values['best'] else ''}"
        bar = sys.stdout.isatty()
        print(f"\r\x1b[K{line}" if bar else line, end="" if bar and "best" not in values else "\n", flush=True)


def save_model(model, scores, args):
    """The encoder as transformers reads it: written aside, then renamed file by file."""
    out, aside = Path(args.out), Path(args.out) / ".saving"
    shutil.rmtree(aside, ignore_errors=True)
    if isinstance(model.encoder, SmallPictureResNet):          # plain AutoModel has no such stem: its code goes with it
        model.encoder.config.auto_map = {"AutoModel": "modeling.SmallPictureResNet"}
    model.encoder.save_pretrained(aside)
    if isinstance(model.encoder, SmallPictureResNet):
        source = "from torch import nn\nfrom transformers import ResNetModel\n\n\n" + inspect.getsource(SmallPictureResNet)
        (aside / "modeling.py").write_text(source, encoding="utf-8")
    scale = dict(image_mean=model.mean.flatten().tolist(), image_std=model.std.flatten().tolist())
    size = dict(height=args.size, width=model.pictures.shape[2])
    (aside / "preprocessor_config.json").write_text(json.dumps(dict(image_processor_type="ViTImageProcessor", size=size, **scale)))
    (aside / "README.md").write_text(model_card(model, scores, args), encoding="utf-8")
    for file in [path for path in aside.rglob("*") if path.is_file()]:
        os.replace(file, out / file.relative_to(aside))
    shutil.rmtree(aside)


def model_card(model, scores, args):
    return f"""---
library_name: transformers
pipeline_tag: image-feature-extraction
---
# {Path(args.out).name}

Features of pictures, {model.encoder.config.hidden_sizes[-1]} numbers each, compared by cosine, trained by {Path(__file__).name} on
{Path(args.data).name}: {", ".join(f"{name} {value:.4g}" for name, value in scores.items())}.
Every setting is in args.json, the course of the training in metrics.jsonl; AutoImageProcessor makes the input.

    {load_line(model, args)}
"""


def load_line(model, args):
    """How others load the folder."""
    code = ", trust_remote_code=True" if isinstance(model.encoder, SmallPictureResNet) else ""
    return f'AutoModel.from_pretrained("{args.out}"{code})'


def load_best(model, args):
    """Puts the saved checkpoint back into the encoder."""
    model.encoder.load_state_dict(load_file(Path(args.out) / "model.safetensors"))


def save_state(model, optimizer, progress, args):
    """All that the next step depends on, the random numbers of every rank included: written aside, then renamed."""
    cuda = model.device.type == "cuda"
    random = [[torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None]] * args.world
    if args.world > 1:
        dist.all_gather_object(random, random[0])
    if args.rank == 0:
        state = dict(progress=progress, random=random, model=model.state_dict(), optimizer=optimizer.state_dict())
        with open(Path(args.out) / "state.tmp", "wb") as file:
            torch.save(state, file)
            os.fsync(file.fileno())                            # whole on the disk before it takes the old one's place
        os.replace(Path(args.out) / "state.tmp", Path(args.out) / "state.pt")


def load_state(model, optimizer, args):
    """Continues the run in --out: its progress; metrics of later steps are dropped, other flags than it had refused."""
    out = Path(args.out)
    try:
        for name, value in json.loads((out / "args.json").read_text()).items():
            if getattr(args, name, None) != value:
                what = "the content of --data, by its checksum," if name == "fingerprint" else name
                fail(f"--resume: {what} was {value} in {out}, now it is {getattr(args, name, None)}")
        state = torch.load(out / "state.pt", map_location=model.device, weights_only=True)
        if state["progress"]["best"]:
            load_best(model, args)                             # would be missed at the end only
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"][args.rank][0].cpu())
        if model.device.type == "cuda":
            torch.cuda.set_rng_state(state["random"][args.rank][1].cpu())
        rows = [row for row in open(out / "metrics.jsonl") if row.endswith("\n") and json.loads(row)["step"] <= state["progress"]["step"]]
    except Exception as error:                                 # a damaged file has many ways to fail
        fail(f"--resume: {out} holds a damaged state.pt, model, args.json or metrics.jsonl ({type(error).__name__})")
    if args.rank == 0:
        (out / "metrics.jsonl").write_text("".join(rows))
    return state["progress"]


def profile(model, optimizer, batch, args):
    """Says what share of a step the loss is, forward and backward: medians of ten after three."""
    def step():
        optimizer.zero_grad()
        compute_loss(model, batch, args)[0].backward()
        optimizer.step()

    def milliseconds(run):
        times = []
        for _ in range(13):
            began = time.perf_counter()
            run()
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - began))
        return float(np.median(times[3:]))

    whole, peak = milliseconds(step), peak_gb(model.device)
    z = model.head(embed(model, batch[0])).float().detach().requires_grad_()
    alone = milliseconds(lambda: loss_of_projections(z, batch[1], args).backward())
    say("profile", f"step {whole:.1f} ms, loss {alone:.2f} ms, {100 * alone / whole:.1f} % of it; peak {peak:.2f} GB; views not counted")


def peak_gb(device):
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    try:
        import resource
    except ImportError:                                        # Windows
        return math.nan
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def at_least(least, kind=float):
    """An argparse type: a finite number from least up."""
    def convert(text):
        value = kind(text)
        if not least <= value < 2**63:                         # no infinity, no NaN, no seed too long for PyTorch
            raise argparse.ArgumentTypeError(f"{text}: wanted a number of at least {least}")
        return value
    convert.__name__ = kind.__name__                           # argparse names it where the text is no number
    return convert


def say(label, text):
    if os.environ.get("RANK", "0") == "0":
        print("\r\x1b[K" * sys.stdout.isatty() + f"{label:<8} {text}", flush=True)          # in the place of a bar


def fail(message, every_rank=False):
    """Ends the run with one line for the person who started it; mostly the ranks of a run find the same fault."""
    if every_rank or os.environ.get("RANK", "0") == "0":
        print("\r\x1b[K" * sys.stderr.isatty() + f"{Path(__file__).name}: {message}", file=sys.stderr, flush=True)
    if dist.is_initialized():                                  # with another rank gone, a group makes an ordinary exit abort now and then
        sys.stdout.flush()
        os._exit(2)
    sys.exit(2)


# ── main ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    train, test = load_data(args.data, args)
    start(args)
    model = build_model(args)
    fits = model.device.type == "cpu" or train[0].nbytes < torch.cuda.mem_get_info()[0] / 4
    model.pictures, model.labels = train[0].to(model.device) if fits else train[0], train[1]
    epoch = len(train[0]) // args.batch_size
    total, warmup = args.steps or args.epochs * epoch, round(args.warmup * epoch)
    rate = args.lr * (args.batch_size / 256 if args.lr_scaling == "linear" else args.batch_size ** 0.5)
    kinds = dict(lars=LARS, sgd=lambda *a, **k: torch.optim.SGD(*a, **k, momentum=0.9))
    optimizer = kinds[args.optimizer]([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=args.weight_decay)
    torch.manual_seed(args.seed + args.rank)                   # ranks have equal weights and different views
    size = sum(p.numel() for p in model.encoder.parameters()) / 1e6
    say("model", f"{args.model}, {size:.1f} M parameters, {args.head_layers}-layer head")
    say("run", f"seed {args.seed}, {args.world} × {model.device.type}, {args.precision}, "
               f"kernels {choose_impl(args.impl, torch.empty(0, device=model.device))}, "
               f"{total:,} steps of {args.batch_size}, writing {args.out}")
    if args.profile:
        return profile(model.train(), optimizer, make_batch(list(range(args.batch_size // args.world)), model, args), args)

    begin_out(args)
    progress = {"step": 0, "before": None, "best": None}
    if args.resume:
        progress = load_state(model, optimizer, args)
    elif args.rank == 0:
        progress["before"] = evaluate(model, test, args) if test else None
    if test and args.rank == 0:
        say("before", f"kNN {progress['before']['knn']:.2f} %")
    model.train()
    asked_to_stop(0, args)
    began, first_bad = (progress["step"], time.perf_counter()), torch.zeros((), dtype=torch.int64, device=model.device)
    for step, rows in zip(range(progress["step"] + 1, total + 1), full_batches(len(train[0]), progress["step"], args.batch_size, args.seed)):
        for group in optimizer.param_groups:
            group["lr"] = warmup_cosine(step - 1, total, warmup, rate)
        batch = make_batch(rows[own_rows(args.rows)], model, args)
        loss, values = compute_loss(model, batch, args)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model, args)
        optimizer.step()
        values["lr"] = optimizer.param_groups[0]["lr"]
        first_bad = torch.where((first_bad == 0) & ~values["loss"].isfinite(), step, first_bad)
        stop, due = asked_to_stop(step, args), step % args.eval_every == 0 or step == total
        shown = due or stop or step % (1 + total // 40) == 0
        if shown:
            refuse_bad_loss(first_bad, lambda step: named(full_batches(len(train[0]), step - 1, args.batch_size, args.seed)), progress, args)
        if due:
            average_statistics(model, args)
        if due and args.rank == 0:
            scores = evaluate(model, test, args) if test else {}
            values |= {f"dev_{name}": value for name, value in scores.items()} | {"best": True}
            progress["best"] = {"step": step, **scores}        # the last one is kept: nothing is chosen on test pictures
            save_model(model, progress["best"], args)
        if shown:
            report(step, total, values, began, args)
        if due or stop:
            progress["step"] = step
            save_state(model, optimizer, progress, args)
        if stop:
            say("stopped", f"at step {step}, saved; --resume continues")
            sys.exit(130)

    if args.rank == 0:
        minutes, seconds = divmod(round(time.perf_counter() - began[1]), 60)
        before, best = progress["before"], progress["best"]
        rise = f"kNN {before['knn']:.2f} → {best['knn']:.2f} %, " if test else ""
        if test and args.probe_epochs:
            rise += f"linear {linear_probe(model, test, args):.2f} %, "
        say("done", f"{rise}{minutes} min {seconds} s, peak {peak_gb(model.device):.1f} GB")
        say("load", load_line(model, args))
    if args.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
