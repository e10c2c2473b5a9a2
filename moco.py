"""MoCo: Momentum Contrast for Unsupervised Visual Representation Learning. He, Fan, Wu, Xie, Girshick, CVPR
2020, arXiv 1911.05722; v2: Improved Baselines with Momentum Contrastive Learning. Chen, Fan, Girshick, He,
arXiv 2003.04297.

Two random views of every picture: one is encoded as a query q, the other, by a slowly following copy of the
encoder, as its key k. The query is pulled to its key and pushed from a queue of the keys of earlier batches.
Keys get no gradient; the copy's weights are a running mean of the encoder's, θ_k ← m θ_k + (1 − m) θ_q. With
unit q, k and queue n_1 ... n_K,

    L = mean over queries of −log( exp(q·k / τ) / ( exp(q·k / τ) + Σ_j exp(q·n_j / τ) ) )

Batch norms see --bn-splits parts of the batch apart, and keys in another order than queries: shared
statistics would give a key away. The loss rises at first, while the queue fills with real keys.

--memory-bank has what MoCo is compared with (Wu, Xiong, Yu, Lin, CVPR 2018, arXiv 1805.01978): no second
encoder, but a slot for each picture. A picture's key is its slot, its negatives are slots that are drawn, and
a slot is a running mean of its picture's queries.

Data: a folder of pictures of any size (sub-folders are labels), a .tsv of files and labels, CIFAR's python
batches (a folder), .npz (images, labels, test_images, test_labels; uint8, N x H x W x 3), the folder of an
unpacked one, or .npy (images). Files are decoded as they are needed, and views cut out of all their pixels.
Labels are for evaluation alone.

    python moco.py --recipe v2 --data imagenet/train --dev imagenet/val --out out/moco
    python moco.py --recipe v1 --data imagenet/train --dev imagenet/val --out out/moco-v1
    python moco.py --recipe demo --data cifar-10-batches-py --symmetric --out out/demo

Expected, of the three commands:
    67.7 % linear   v2, ImageNet, ResNet-50, 200 epochs
    60.6 % linear   v1, the same
    85.3 % kNN      the authors' CIFAR-10 demo, ResNet-18, 200 epochs; without --symmetric 82.6 %. Its kNN
                    compares the head's output, here the encoder's features; a part of its batch norms is
                    every n-th picture, here pictures in a row; its epochs count from 1 in the cosine

Departures from the released code: one GPU does; the blur is a plain Gaussian instead of Pillow's three boxes.
The copy follows before the next keys are encoded, and the learning rate falls once an epoch, as there.
"""
from kernels.training.cli import Flags, afford, answer_early, at_least, command, fail, fill, ratio, say
from kernels.training.recipes import Recipe, say_recipe

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────

IMAGENET = dict(model="resnet-50", size=224, batch_size=256, epochs=200, lr=0.03, weight_decay=1e-4,
                queue=65536, momentum=0.999, crop=0.2)
V1 = dict(v1=True, head_layers=1, temperature=0.07, blur=0.0)
V2 = dict(head_layers=2, temperature=0.2)
RECIPES = {
    "v1": Recipe("ImageNet, He et al. 2020", IMAGENET | V1),
    "v2": Recipe("ImageNet, Chen et al. 2020", IMAGENET | V2 | dict(blur=0.5)),
    "demo": Recipe("CIFAR-10, the authors' demo", dict(
        model="resnet-18", size=32, batch_size=512, epochs=200, lr=0.03, weight_decay=5e-4, queue=4096,
        momentum=0.99, crop=0.08, blur=0.0, head_layers=1, temperature=0.1, bn_splits=8))}
BANK = V1 | dict(queue=4096, momentum=0.5, crop=0.2)
IMPLIED = {"memory_bank": Recipe("Wu et al. 2018, released code", BANK)}

# What a flag is where it was not given: by the size of the views (the authors' demo, the paper).
SMALL = dict(queue=4096, momentum=0.99, crop=0.08, blur=0.0, weight_decay=5e-4)
LARGE = dict(queue=65536, momentum=0.999, crop=0.2, blur=0.5, weight_decay=1e-4)


def make_parser():
    parser = Flags(__doc__)
    add, common = parser.add_argument, parser.common
    parser.add_recipes(RECIPES, IMPLIED)
    add("--v1", action="store_true", help="linear head, τ 0.07, other colours, no blur, rate in steps")
    add("--queue", type=at_least(1, int),
        help="K, keys that wait as negatives; default 65536, pictures up to 32 px 4096 (paper, demo)")
    add("--momentum", type=ratio,
        help="m, of the key encoder; default 0.999, pictures up to 32 px 0.99 (paper, demo)")
    add("--memory-bank", action="store_true",
        help="a slot for each picture, with its recipe; --queue slots are drawn, --momentum is theirs")
    add("--symmetric", action="store_true", help="a view is query and key once; both losses add up (demo)")
    add("--bn-splits", type=at_least(1, int), default=8,
        help="parts of a batch with statistics of their own, over all GPUs; default 8 (paper)")
    add("--head-layers", type=int, choices=(1, 2), help="of the projection head; default 2, with --v1 1")
    add("--width", type=at_least(1, int), default=128, help="of the projection; default 128 (paper)")
    add("--crop", type=ratio,
        help="least share of a picture that a view shows; default 0.2, up to 32 px 0.08 (paper, demo)")
    add("--blur", type=ratio,
        help="share of blurred views; default 0.5, with --v1 and up to 32 px 0 (paper, demo)")
    common("--weight-decay", said="1e-4, to 32 px 5e-4 (paper, demo)")
    add("--probe-epochs", type=at_least(0, int), default=100, help="of the linear probe; default 100, or 0")
    parser.plain("--evaluate", "--data")
    common("--dev", said="the test set in --data")
    common("--size", said="of arrays theirs; of files --model's, 224, or theirs if all are smaller")
    common("--workers", said="the cores")
    parser.plain("--skip-damaged")
    common("--model", "resnet-50", "resnet-50; from scratch as resnet-small, -18, -34, -101, -152")
    common("--out", "out/moco")
    common("--batch-size", 256, "256 (paper)")
    common("--chunk-size", said="the batch")
    common("--epochs", 200, "200 (paper)")
    common("--steps", said="by --epochs")
    common("--lr", 0.03, "0.03, times batch / 256 (paper)")
    common("--temperature", said="0.2, with --v1 0.07 (paper)")
    common("--seed", 42)
    common("--eval-every", 1000)
    common("--impl", "auto")
    parser.plain("--resume", "--keep-state", "--log", "--precision")
    return parser


if __name__ == "__main__":
    answer_early(make_parser)  # --help, and wrong flags, before the seconds that torch takes

import copy
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from kernels import check_rows, check_unit, checks, gather_rows, own_rows, queue_loss
from kernels.training.extras.memory_bank import compute_bank_loss, update_bank  # noqa: F401 - for importers
from kernels.training.images import evaluation
from kernels.training.images.augmentation import Crops, blur, coin, grey, jitter
from kernels.training.images.dataset import Pictures
from kernels.training.images.encoders import PictureEncoder, load_image_encoder
from kernels.training.images.evaluation import knn_accuracy, train_probe  # noqa: F401
from kernels.training.loop import HALF, epoch_steps, half_products, set_lr, sum_gradients
from kernels.training.run import Run

# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────

# views as torchvision draws them: the logarithms of aspects evenly, and the middle where no box fits
CROPS = Crops(0.08, 10, aspects=lambda u: 3 / 4 * (16 / 9) ** u, limits=(3 / 4, 4 / 3), cubic=False)


def load_data(path, args):
    """The Pictures to train on and to be judged by; fills the flags that their size and --v1 decide."""
    say_recipe(args, RECIPES | IMPLIED)
    if args.memory_bank and args.symmetric:
        fail("--symmetric: a memory bank takes one view of a picture; leave it out")
    pictures, batch = Pictures(args, CROPS), args.batch_size
    fill(args, (SMALL if pictures.small else LARGE) | (V1 if args.v1 else V2))
    keys = batch * (2 if args.symmetric else 1)
    if args.queue % keys and not args.memory_bank:
        multiple = max(1, args.queue // keys) * keys
        fail(f"--queue {args.queue} is no multiple of the {keys} keys of a step; try {multiple}")
    if batch % args.bn_splits:
        fail(f"--bn-splits {args.bn_splits} does not divide --batch-size, which is {batch}")
    part = batch // args.bn_splits
    if args.chunk_size and args.chunk_size % part:
        fail(f"--chunk-size {args.chunk_size}: wanted a multiple of {part}, --batch-size / --bn-splits")
    say("moco", f"{args.recipe or ('v1' if args.v1 else 'v2')}: {pictures.describe()}")
    if args.queue > len(pictures) and not args.memory_bank:
        say("note", f"--queue {args.queue:,} is more than the pictures: "
                    "old keys of a picture itself are among its negatives")
    return pictures


def make_batch(pictures, args):
    """(queries, keys) of this rank's n pictures of the next batch: a list each, of one view of every picture,
    (n, 3, S, S) float32 from 0 to 1; with --symmetric of two."""
    x1, x2 = augment(next(pictures.feed), args).chunk(2)
    return ([x2, x1], [x1, x2]) if args.symmetric else ([x1], [x2])


def augment(x, args):
    """Views (n, 3, S, S) float32 in [0, 1] of crops: colours, grey, blur; v1 greys before its stronger
    colours, and has no blur."""
    if args.v1:
        x = torch.where(coin(0.2, x), grey(x), x)
        return jitter(x, 0.4, 0.4, 1)
    x = jitter(x, 0.4, 0.1, 0.8)
    x = torch.where(coin(0.2, x), grey(x), x)
    return torch.where(coin(args.blur, x), blur(x), x) if args.blur else x


# CIFAR-10's and ImageNet's mean and standard deviation of each channel
CIFAR_STATISTICS = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
IMAGENET_STATISTICS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def build_model(args, pictures, run):
    """The query encoder and its projection head, their copies for keys, and the queue."""
    if args.bn_splits % run.world:
        fail(f"--bn-splits {args.bn_splits} cannot be shared evenly by {run.world} processes")
    encoder = load_image_encoder(args.model, pictures.small)
    width = encoder.config.hidden_sizes[-1]
    waiting = len(pictures) if args.memory_bank else args.queue
    afford(f"--width {args.width} with {waiting} keys", 16 * (width + waiting) * args.width)
    hidden = [nn.Linear(width, width), nn.ReLU()] if args.head_layers == 2 else []
    head = nn.Sequential(*hidden, nn.Linear(width, args.width))
    split_norms(encoder, args.batch_size // args.bn_splits)
    statistics = CIFAR_STATISTICS if pictures.small else IMAGENET_STATISTICS
    model = PictureEncoder(encoder, head, run, *statistics)
    if not args.memory_bank:
        model.key = copy.deepcopy(model).requires_grad_(False)
    queue = F.normalize(torch.randn(waiting, args.width), dim=1)
    model.register_buffer("queue", queue.to(HALF) if run.bf16 else queue)              # as it is multiplied
    size = sum(p.numel() for p in encoder.parameters()) / 1e6
    say("model", f"{args.model}, {size:.1f} M parameters, {args.head_layers}-layer head, "
                 f"{'memory bank' if args.memory_bank else 'queue'} of {waiting:,}")
    return model.to(run.device, memory_format=torch.channels_last)


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def moco_loss(q, k, queue, temperature=0.07, *, impl="auto"):
    """Mean over queries of −log softmax of their key among that key and the queue.

    q, k       (N, D) raw queries and their keys, any float type; normalised here; k gets no gradient
    queue      (K, D) unit keys of earlier batches, without gradient; its type may be autocast's
    returns    scalar float32, float64 for float64
    source     He et al. 2020, eq. 1
    """
    check_rows(q=(q, "N D"), k=(k, "N D"), queue=(queue, "K D"))
    check_unit("queue", queue)
    # the mean of −log( e^{q·k/τ} / (e^{q·k/τ} + Σ_j e^{q·n_j/τ}) ); kernels/eager.py writes it out
    return queue_loss(F.normalize(q, dim=1), F.normalize(k, dim=1).detach(), queue, temperature, impl=impl)


def compute_loss(model, batch, rows, args):
    """This rank's part of the loss of `rows` pictures: queries are views (n, 3, S, S) of this rank, keys are
    (rows, D), of all; the lists hold one of each, with --symmetric two."""
    queries, keys = batch
    own, loss = own_rows(rows), 0
    for x, k in zip(queries, keys):
        q = model(x)
        with half_products(q, args):
            mean = moco_loss(q, k[own], model.queue, args.temperature, impl=args.impl)
        loss = loss + mean * (len(x) / rows)
    return loss, {"loss": loss.detach()}


@torch.no_grad()
def update_key_encoder(key_encoder, query_encoder, momentum):
    """θ_k ← m θ_k + (1 − m) θ_q over parameters, in their order (He et al. 2020, eq. 2).

    Batch statistics are the key encoder's own. momentum 0 copies, 1 freezes. Parameters are to be float32:
    in half types 1 − m = 1e-3 would vanish.
    """
    torch._foreach_lerp_(list(key_encoder.parameters()), list(query_encoder.parameters()), 1 - momentum)


@torch.no_grad()
def enqueue(queue, pointer, keys):
    """Writes keys (N, D) over the oldest of the queue (K, D), from row `pointer` on; returns the next one.

    The queue is a ring, changed in place: call it after backward. Raises ValueError if N > K.
    """
    check_rows(queue=(queue, "K D"), keys=(keys, "n D"))
    checks.check_integer("pointer", pointer, 0, len(queue) - 1)
    if len(keys) > len(queue):
        raise ValueError(f"keys: {len(keys)} rows, the queue holds {len(queue)}")
    queue[(pointer + torch.arange(len(keys), device=queue.device)) % len(queue)] = keys.to(queue.dtype)
    return (pointer + len(keys)) % len(queue)


@torch.no_grad()
def encode_keys(model, views, rows):
    """(rows, D) unit keys of all ranks' views (n, 3, S, S), which meet in other parts than the queries do."""
    views = gather_rows(views, rows)
    order = torch.randperm(rows, device=views.device)
    if dist.is_initialized():
        dist.broadcast(order, 0)
    mine = model.key.features(views[order[own_rows(rows)]])
    keys = gather_rows(F.normalize(model.key.head(mine).float(), dim=1), rows)
    return keys[order.argsort()]


class SplitBatchNorm(nn.BatchNorm2d):
    """A batch norm that sees every `rows` pictures in a row apart, as a GPU without synchronisation does; the
    running mean and variance are means over these parts (demo)."""

    def forward(self, x):
        if not self.training or len(x) <= self.rows:
            return super().forward(x)
        running, parts = [], []
        for part in x.split(self.rows):
            mean, var = self.running_mean.clone(), self.running_var.clone()
            parts.append(F.batch_norm(part, mean, var, self.weight, self.bias, True, self.momentum, self.eps))
            running.append((mean, var))
        for mine, stats in zip((self.running_mean, self.running_var), zip(*running)):
            mine.copy_(torch.stack(stats).mean(0))
        self.num_batches_tracked += 1
        return torch.cat(parts)


def split_norms(encoder, rows):
    """Puts a SplitBatchNorm into the place of each batch norm."""
    for module in list(encoder.modules()):
        for name, norm in module.named_children():
            if isinstance(norm, nn.BatchNorm2d):
                split = SplitBatchNorm(norm.num_features, norm.eps, norm.momentum)
                split.rows = rows
                split.load_state_dict(norm.state_dict())
                setattr(module, name, split)


def epoch_rate(epoch, epochs, args):
    """The learning rate's factor: half a cosine; with --v1 a tenth at 60 and 80 % of the epochs (paper)."""
    if args.v1:
        return 0.1 ** sum(epoch >= share * epochs for share in (0.6, 0.8))
    return 0.5 * (1 + math.cos(math.pi * epoch / epochs))


# ── evaluation ──────────────────────────────────────────────────────────────────────────────────────────────


def linear_probe(model, pictures, run):
    """Percent of test pictures that one linear layer on the frozen features labels right, trained on crops:
    rate 30, a tenth of it at 60 and 80 % (paper; pooled features are small)."""
    def rate(step, total):
        return 30 * 0.1 ** sum(step >= share * total for share in (0.6, 0.8))
    return train_probe(model, pictures, run, batch=min(256, len(pictures)), rate=rate, std=0.01)


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    if args.evaluate:
        return evaluation.score(args, __file__, CROPS, linear_probe)
    pictures = load_data(args.data, args)
    run = Run(args, __file__)
    model = build_model(args, pictures, run)
    pictures.join(run)
    epoch = epoch_steps(len(pictures), args.batch_size, least=args.batch_size)
    total, rate = args.steps or args.epochs * epoch, args.lr * args.batch_size / 256
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=rate, momentum=0.9, weight_decay=args.weight_decay)
    run.progress["pointer"] = 0                                # of the queue, not of a memory bank
    run.begin(model, optimizer, total)
    if run.progress["pointer"] >= args.queue:
        fail(f"--resume: {args.out}/state.pt is damaged: its place in the queue is beyond {args.queue} keys")
    evaluation.before(model, pictures, run)
    pictures.start(run, total, args.crop, 1 if args.memory_bank else 2)
    model.train()
    for step, rows in run.steps(total, len(pictures), least=args.batch_size):  # full batches alone (paper)
        set_lr(optimizer, rate * epoch_rate((step - 1) // epoch, total / epoch, args))
        if args.memory_bank:
            loss, values = compute_bank_loss(model, augment(next(pictures.feed), args), rows, args)
        else:
            queries, views = make_batch(pictures, args)
            for part in ("encoder", "head"):
                update_key_encoder(getattr(model.key, part), getattr(model, part), args.momentum)
            keys = [encode_keys(model, x, len(rows)) for x in views]
            loss, values = compute_loss(model, (queries, keys), len(rows), args)
        optimizer.zero_grad()
        loss.backward()
        sum_gradients(model)
        optimizer.step()
        if not args.memory_bank:
            run.progress["pointer"] = enqueue(model.queue, run.progress["pointer"], torch.cat(keys))
        run.note(values, lr=optimizer.param_groups[0]["lr"])
        if run.due:
            evaluation.judge(model, pictures, run)
    evaluation.after(model, pictures, run, linear_probe)


if __name__ == "__main__":
    main()
