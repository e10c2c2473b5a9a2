"""MoCo: Momentum Contrast for Unsupervised Visual Representation Learning. He, Fan, Wu, Xie, Girshick, CVPR
2020, arXiv 1911.05722; v2: Improved Baselines with Momentum Contrastive Learning. Chen, Fan, Girshick, He,
arXiv 2003.04297.

The encoder maps one random view of an image to a query q. The key encoder, a copy of the encoder, maps a
second view to the key k of this query. Training pulls the query towards its key, and pushes it away from the
keys of earlier batches, which are stored in a queue. The encoder gets gradients; the weights θ_k of the key
encoder are a running mean of the encoder's weights θ_q: θ_k ← m θ_k + (1 − m) θ_q. For unit vectors q and k,
the keys n_1 ... n_K in the queue, and the temperature τ, the loss is

    L = mean over queries of −log( exp(q·k / τ) / ( exp(q·k / τ) + Σ_j exp(q·n_j / τ) ) )

    python moco.py --recipe v2 --data imagenet/train --dev imagenet/val --out out/moco
    python moco.py --recipe v1 --data imagenet/train --dev imagenet/val --out out/moco-v1
    python moco.py --recipe demo --data cifar-10-batches-py --symmetric --out out/demo

The queue starts with random vectors. While keys replace these vectors, the loss rises. If a query and its key
shared batch-norm statistics, the encoder could recognise the key by these statistics. So batch norms have
separate statistics for --bn-splits parts of the batch, and images are shuffled before they become keys.

Data, one of:
    folder    images of any size, with sub-folders as labels; or CIFAR's python batches
    .npz      images, test_images (uint8, N x H x W x 3), labels, test_labels
Labels are only used for evaluation. Image files are decoded when they are needed; views are cropped before
they are resized.

Published test accuracies of the three commands, after 200 epochs:
    67.7 % linear    v2, ImageNet, ResNet-50
    60.6 % linear    v1, ImageNet, ResNet-50
    85.3 % kNN       the authors' demo, CIFAR-10, ResNet-18 (without --symmetric: 82.6 %)

Departures from the released code:
- The released code needs several GPUs; this script also runs on one.
- The released code blurs with three box filters (Pillow); this script blurs with a Gaussian.
- The authors' demo computes kNN on outputs of the projection head; this script uses the encoder's features.
- In the authors' demo, each batch-norm part has every 8th image; this script's parts are consecutive images.
- In the cosine schedule, the authors' CIFAR-10 demo counts epochs from 1; this script counts from 0.
"""
import copy
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from kernels import check_rows, checks, gather_rows, own_rows, queue_loss
from kernels.training.errors import command, fail, log
from kernels.training.flags import Recipe, ScriptParser, at_least, fill_defaults, image_flags, ratio
from kernels.training.images import evaluation
from kernels.training.images.augmentation import Crops, bernoulli_mask, blur, grey, jitter
from kernels.training.images.dataset import ImageDataset
from kernels.training.images.encoders import ImageEncoder, load_image_encoder
from kernels.training.images.evaluation import train_probe
from kernels.training.loop import all_reduce_gradients, set_lr, steps_per_epoch
from kernels.training.precision import LOSS_DTYPE, loss_autocast, unit_rows
from kernels.training.run import Run

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────

IMAGENET = dict(model="resnet-50", image_size=224, batch_size=256, epochs=200, lr=0.03, weight_decay=1e-4,
                queue_size=65536, momentum=0.999, crop=0.2)
V1 = dict(v1=True, head_layers=1, temperature=0.07, blur=0.0)
V2 = dict(head_layers=2, temperature=0.2)
RECIPES = {
    "v1": Recipe("ImageNet, He et al. 2020", IMAGENET | V1),
    "v2": Recipe("ImageNet, Chen et al. 2020", IMAGENET | V2 | dict(blur=0.5)),
    "demo": Recipe("CIFAR-10, the authors' demo", dict(
        model="resnet-18", image_size=32, batch_size=512, epochs=200, lr=0.03, weight_decay=5e-4,
        queue_size=4096, momentum=0.99, crop=0.08, blur=0.0, head_layers=1, temperature=0.1, bn_splits=8))}

# Defaults of flags: SMALL is for views of at most 32 pixels (authors' demo), LARGE for larger ones (paper).
SMALL = dict(queue_size=4096, momentum=0.99, crop=0.08, blur=0.0, weight_decay=5e-4)
LARGE = dict(queue_size=65536, momentum=0.999, crop=0.2, blur=0.5, weight_decay=1e-4)


def make_parser():
    parser = ScriptParser(__doc__)
    add = parser.add_argument
    image_flags(
        parser, "resnet-50", out="out/moco", batch_size=(256, "256 (paper)"), epochs=(200, "200 (paper)"),
        probe_epochs=100, temperature=(None, "0.2, or 0.07 with --v1 (paper)"),
        lr=(0.03, "0.03 (paper); it is always multiplied by batch / 256"),
        weight_decay=(None, "1e-4 (paper), or 5e-4 for views up to 32 px (demo)"))
    add("--crop", group="data", type=ratio,
        help="smallest area of a crop, as a fraction of the image; default 0.2 (paper), or 0.08 for views "
             "up to 32 px")
    add("--blur", group="data", type=ratio,
        help="probability of blur; default 0.5 (v2), 0 with --v1 or for views up to 32 px")
    add("--head-layers", group="model", type=int, choices=(1, 2),
        help="number of linear layers in the projection head; default 2, or 1 with --v1 (paper)")
    add("--projection-dim", group="model", type=at_least(1, int), default=128,
        help="output dimension of the projection head; default 128 (paper)")
    add("--v1", action="store_true",
        help="MoCo v1: linear head, τ 0.07, stronger colour jitter, no blur, step decay of the learning rate")
    add("--queue-size", type=at_least(1, int),
        help="K, number of stored negatives; default 65536 (paper), or 4096 for views up to 32 px (demo)")
    add("--momentum", type=ratio,
        help="m, momentum of the key encoder; default 0.999 (paper), or 0.99 for views up to 32 px (demo)")
    add("--symmetric", action="store_true",
        help="use each view once as a query and once as a key, and add both losses (authors' demo)")
    add("--bn-splits", type=at_least(1, int), default=8,
        help="number of parts of the global batch with separate batch-norm statistics; default 8 (paper)")
    parser.add_recipes(RECIPES)
    return parser


# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────

# as in torchvision: aspect ratios are log-uniform; if no random crop fits, the centre crop is used
CROPS = Crops(min_area=0.08, attempts=10, sample_aspect=lambda u: 3 / 4 * (16 / 9) ** u,
              aspect_limits=(3 / 4, 4 / 3), bicubic=False)


def load_data(path, args):
    """Load the images, and set the flags whose defaults depend on the image size or on --v1."""
    images = ImageDataset(args, CROPS)
    fill_defaults(args, (SMALL if images.is_small else LARGE) | (V1 if args.v1 else V2))
    if args.v1 and args.blur:
        fail(f"--blur {args.blur:g}: --v1 has no blur; leave out one of the two flags")
    keys_per_step = args.batch_size * (2 if args.symmetric else 1)
    if args.queue_size % keys_per_step:
        multiple = max(1, args.queue_size // keys_per_step) * keys_per_step
        fail(f"--queue-size {args.queue_size}: expected a multiple of {keys_per_step}, the keys per step; "
             f"try {multiple}")
    check_bn_splits(args)
    log("moco", f"{args.recipe or ('v1' if args.v1 else 'v2')}: {images.describe()}")
    if args.queue_size > len(images):
        log("note", f"--queue-size {args.queue_size:,} is larger than the number of images: old keys of an "
                    "image will be among its own negatives")
    return images


def check_bn_splits(args):
    """Raise UserError if --bn-splits does not fit --batch-size or --chunk-size."""
    if args.batch_size % args.bn_splits:
        fail(f"--bn-splits {args.bn_splits}: expected a divisor of --batch-size, which is {args.batch_size}")
    part = args.batch_size // args.bn_splits
    if part < 2:
        fail(f"--bn-splits {args.bn_splits}: each part has 1 image, expected at least 2; lower --bn-splits")
    if args.chunk_size and args.chunk_size % part:
        fail(f"--chunk-size {args.chunk_size}: expected a multiple of {part} (--batch-size / --bn-splits)")


def make_batch(images, args):
    """Return (views for queries, views for keys) of this rank's n images in the next batch. Each is a list of
    one tensor (n, 3, S, S) float32 in [0, 1], or with --symmetric of two tensors."""
    x1, x2 = augment(next(images.training_views), args).chunk(2)
    return ([x2, x1], [x1, x2]) if args.symmetric else ([x1], [x2])  # keys of x1 enter the queue first


def augment(x, args):
    """Apply random colour jitter, greyscale and blur to crops (n, 3, S, S) float32 in [0, 1]. With --v1,
    greyscale comes first, the jitter is stronger, and there is no blur."""
    if args.v1:
        x = torch.where(bernoulli_mask(0.2, x), grey(x), x)
        return jitter(x, 0.4, 0.4, 1)
    x = jitter(x, 0.4, 0.1, 0.8)
    x = torch.where(bernoulli_mask(0.2, x), grey(x), x)
    return torch.where(bernoulli_mask(args.blur, x), blur(x), x) if args.blur else x


# (means, standard deviations) of the red, green and blue channels
CIFAR_STATISTICS = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
IMAGENET_STATISTICS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def build_model(args, images, run):
    """Build the query encoder with its projection head, the key encoder, and the queue."""
    model, queue = build_query_encoder(args, images, run, args.queue_size)
    model.key = copy.deepcopy(model).requires_grad_(False)
    model.register_buffer("queue", queue)
    return model.to(run.device, memory_format=torch.channels_last)


def build_query_encoder(args, images, run, num_keys):
    """Build an encoder with split batch norms and a projection head, and random unit keys (num_keys, D).
    Return (ImageEncoder, keys). The keys have the dtype in which the loss multiplies them."""
    if args.bn_splits % run.world_size:
        fail(f"--bn-splits {args.bn_splits}: expected a multiple of {run.world_size}, the number of "
             "processes")
    encoder = load_image_encoder(args.model, images.is_small)
    width, dim = encoder.config.hidden_sizes[-1], args.projection_dim
    hidden = [nn.Linear(width, width), nn.ReLU()] if args.head_layers == 2 else []
    head = nn.Sequential(*hidden, nn.Linear(width, dim))
    use_split_batch_norm(encoder, args.batch_size // args.bn_splits)
    mean, std = CIFAR_STATISTICS if images.is_small else IMAGENET_STATISTICS
    model = ImageEncoder(encoder, head, run, mean, std)
    keys = F.normalize(torch.randn(num_keys, dim), dim=1)
    size = sum(p.numel() for p in encoder.parameters()) / 1e6
    log("model", f"{args.model}, {size:.1f} M parameters, {args.head_layers}-layer head, "
                 f"{num_keys:,} stored keys")
    return model, keys.to(LOSS_DTYPE) if run.bf16 else keys


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def moco_loss(q, k, queue, temperature=0.07, *, impl="auto"):
    """Return the mean cross entropy of finding each query's key among this key and the keys in the queue.

    q, k       (N, D) queries and their keys, of one float type and any norm; k gets no gradient
    queue      (K, D) keys of earlier batches: unit rows without gradient, in q's or autocast's dtype
    returns    scalar: float64 for float64 inputs, else float32
    source     He et al. 2020, eq. 1
    """
    check_rows(q=(q, "N D"), k=(k, "N D"), queue=(queue, "K D"))
    # −log( e^{q·k/τ} / (e^{q·k/τ} + Σ_j e^{q·n_j/τ}) ); kernels/eager.py computes this in plain PyTorch
    return queue_loss(unit_rows(q, 1e-12), unit_rows(k, 1e-12).detach(), queue, temperature, impl=impl)


def compute_loss(model, batch, rows, args):
    """Return this rank's part of the loss of a global batch of `rows` images, and the values to log.
    batch: (list of this rank's query views (n, 3, S, S), list of all ranks' keys (rows, D))."""
    views, keys = batch
    own, loss = own_rows(rows), 0
    for x, k in zip(views, keys):
        q = model(x)
        with loss_autocast(q, args):
            mean = moco_loss(q, k[own], model.queue, args.temperature, impl=args.impl)
        loss = loss + mean * (len(x) / rows)
    return loss, {"loss": loss.detach()}


@torch.no_grad()
def update_key_encoder(key_encoder, query_encoder, momentum):
    """Update each parameter of the key encoder: θ_k ← m θ_k + (1 − m) θ_q (He et al. 2020, eq. 2). θ_q is the
    parameter of the query encoder with the same index. Batch-norm statistics do not change. Parameters should
    be float32: in half precision, an update with 1 − m = 1e-3 would be rounded away."""
    torch._foreach_lerp_(list(key_encoder.parameters()), list(query_encoder.parameters()), 1 - momentum)


@torch.no_grad()
def enqueue(queue, pointer, keys):
    """Write keys (N, D) over the oldest keys in queue (K, D), a ring buffer, from row `pointer` on. Return
    the new pointer. Raise ValueError if N > K. The queue changes in place, so call enqueue after the backward
    pass, which needs the old keys."""
    check_rows(queue=(queue, "K D"), keys=(keys, "n D"))
    checks.check_integer("pointer", pointer, 0, len(queue) - 1)
    if len(keys) > len(queue):
        raise ValueError(f"keys: found {len(keys)} rows, expected at most {len(queue)}, the queue's size")
    queue[(pointer + torch.arange(len(keys), device=queue.device)) % len(queue)] = keys.to(queue.dtype)
    return (pointer + len(keys)) % len(queue)


@torch.no_grad()
def encode_keys(model, views, rows):
    """Return the unit keys (rows, D) of all ranks, from this rank's views (n, 3, S, S). The views of all
    ranks are shuffled first, so the batch-norm parts of a key and of its query have few common images."""
    views = gather_rows(views, rows)
    order = torch.randperm(rows, device=views.device)
    if dist.is_initialized():
        dist.broadcast(order, 0)
    features = model.key.features(views[order[own_rows(rows)]])
    keys = gather_rows(F.normalize(model.key.head(features).float(), dim=1), rows)
    return keys[order.argsort()]                               # this restores the order before the shuffle


class SplitBatchNorm(nn.BatchNorm2d):
    """Batch norm with separate statistics for each part of `split_size` consecutive images, as if each part
    were on its own GPU. The running mean and variance are averages over the parts (authors' demo)."""

    def forward(self, x):
        if not self.training or len(x) <= self.split_size:
            return super().forward(x)
        parts, means, variances = [], [], []
        for part in x.split(self.split_size):
            mean, var = self.running_mean.clone(), self.running_var.clone()
            parts.append(F.batch_norm(part, mean, var, self.weight, self.bias, True, self.momentum, self.eps))
            means.append(mean)
            variances.append(var)
        self.running_mean.copy_(torch.stack(means).mean(0))
        self.running_var.copy_(torch.stack(variances).mean(0))
        self.num_batches_tracked += 1
        return torch.cat(parts)


def use_split_batch_norm(encoder, split_size):
    """Replace each batch norm of the encoder by a SplitBatchNorm."""
    for module in list(encoder.modules()):
        for name, norm in module.named_children():
            if isinstance(norm, nn.BatchNorm2d):
                split = SplitBatchNorm(norm.num_features, norm.eps, norm.momentum)
                split.split_size = split_size
                split.load_state_dict(norm.state_dict())
                setattr(module, name, split)


def step_decay(step, total):
    """Return the learning rate's factor: 1, then 0.1 from 60 % of `total` on, and 0.01 from 80 % (paper)."""
    decays = [fraction for fraction in (0.6, 0.8) if step >= fraction * total]
    return 0.1 ** len(decays)


def lr_factor(epoch, epochs, args):
    """Return the learning rate's factor in an epoch: cosine decay, or with --v1 step_decay (paper)."""
    return step_decay(epoch, epochs) if args.v1 else 0.5 * (1 + math.cos(math.pi * epoch / epochs))


# ── evaluation ──────────────────────────────────────────────────────────────────────────────────────────────


def linear_probe(model, images, run):
    """Train a linear layer on frozen features of random crops, and return its test accuracy in percent. The
    learning rate is as large as 30 because pooled features are small (paper)."""
    def lr_schedule(step, total):
        return 30 * step_decay(step, total)
    batch = min(256, len(images))
    return train_probe(model, images, run, batch=batch, lr_schedule=lr_schedule, init_std=0.01)


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    if args.evaluate:
        return evaluation.evaluate_model(args, __file__, CROPS, linear_probe)
    images = load_data(args.data, args)
    run = Run(args, __file__)
    model = build_model(args, images, run)
    images.to_device(run)
    epoch_steps = steps_per_epoch(len(images), args.batch_size, min_rows=args.batch_size)
    total = args.steps or args.epochs * epoch_steps
    lr = args.lr * args.batch_size / 256
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=lr, momentum=0.9, weight_decay=args.weight_decay)
    run.extra_state["pointer"] = 0                        # the next keys overwrite the queue from this row on
    run.begin(model, optimizer, total, then=evaluation.probe_text(images, args))
    evaluation.evaluate_before(model, images, run)
    images.start_training_views(run, total, args.crop)
    model.train()
    for step, picked in run.steps(total, len(images), min_rows=args.batch_size):  # this skips short batches
        set_lr(optimizer, lr * lr_factor((step - 1) // epoch_steps, total / epoch_steps, args))
        query_views, key_views = make_batch(images, args)
        update_key_encoder(model.key.encoder, model.encoder, args.momentum)
        update_key_encoder(model.key.head, model.head, args.momentum)
        keys = [encode_keys(model, x, len(picked)) for x in key_views]
        loss, values = compute_loss(model, (query_views, keys), len(picked), args)
        optimizer.zero_grad()
        loss.backward()
        all_reduce_gradients(model)
        optimizer.step()
        run.extra_state["pointer"] = enqueue(model.queue, run.extra_state["pointer"], torch.cat(keys))
        run.log_metrics(values, lr=optimizer.param_groups[0]["lr"])
        if run.eval_due:
            evaluation.evaluate_and_save(model, images, run)
    evaluation.finish(model, images, run, linear_probe)


if __name__ == "__main__":
    main()
