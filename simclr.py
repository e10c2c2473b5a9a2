"""SimCLR: A Simple Framework for Contrastive Learning of Visual Representations. Chen, Kornblith, Norouzi,
Hinton, ICML 2020, arXiv 2002.05709; SimCLR v2, Chen et al., NeurIPS 2020, arXiv 2006.10029; SupCon, Khosla et
al., NeurIPS 2020, arXiv 2004.11362.

Two random views of every picture pass one encoder and one projection head. A view is pulled to the other view
of its picture and pushed from both views of all others; after training the head is dropped. With u = z / |z|
and s(i, j) = u_i·u_j / τ,

    L = 1/2N Σ_i [ −s(i, i') + log Σ_{j≠i} exp s(i, j) ],    i' the other view of i (NT-Xent)
    L = 1/2N Σ_i −1/|P(i)| Σ_{p∈P(i)} [ s(i, p) − log Σ_{j≠i} exp s(i, j) ],    P(i) all other views of the
                                                                 label of i (--supervised: SupCon)
    L = 1/N Σ_x −Σ_y P_teacher(y | x; τ) log P_student(y | x; τ)    (--distill: v2)

v2 keeps a part of the head: --finetune trains the encoder, the head's first layers and a classifier on a
share of the labels; --distill teaches what that knows to another encoder, or the same, without labels.

Data: a folder of pictures of any size (sub-folders are labels), a .tsv of files and labels, CIFAR's python
batches (a folder), .npz (images, labels, test_images, test_labels; uint8, N x H x W x 3), the folder of an
unpacked one, or .npy (images). Files are decoded as they are needed, and views cut out of all their pixels.

    python simclr.py --recipe cifar --data cifar-10-batches-py --out out/simclr
    python simclr.py --supervised --data cifar-10-batches-py --out out/supcon
    torchrun --nproc-per-node 8 simclr.py --recipe v2 --data train --dev val --out out/v2
    python simclr.py --finetune train --labels 0.01 --model out/v2 --dev val --out out/tuned
    python simclr.py --distill out/tuned --model resnet-18 --data train --dev val --out out/student

Expected on test pictures, with the flags of ours that come nearest to the run that a number is from; for the
defaults, which are CIFAR-10's with the paper's head and 100 epochs, no source has one:
    91 % linear     --recipe cifar, "around"
    83.2 % kNN      --optimizer sgd --lr 0.06 --warmup 0 --weight-decay 5e-4 --crop 0.2 --grey 0.1, CIFAR-10:
                    dkobak/simclr-cifar10, whose head is 512-1024-128; 85.6 % linear
    96.0 % linear   --supervised --model resnet-50 --batch-size 1024 --epochs 1000, CIFAR-10: SupCon's command
    64.5 % linear   --recipe code; 69.1 %: --recipe paper --form code --epochs 1000, ImageNet, released
    71.1 % linear   --recipe v2, ImageNet; then --finetune: 57.9 % with 1 % of the labels, 68.4 % with
                    --labels 0.1 --epochs 30

Departures from the released code: its loss is twice the paper's mean; its head has batch norms, which --form
code brings back. SupCon's normalises pictures and multiplies its loss by τ / 0.07; here neither is done.
Arrays are resized bicubically without antialiasing, as by TensorFlow 2, files as by Pillow, with it. Of v2
there are no selective kernels, no wider nets, and no labels in distillation.
"""
from argparse import BooleanOptionalAction

from kernels.training.cli import Flags, afford, answer_early, at_least, command, fail, fill, ratio, say
from kernels.training.recipes import Recipe, say_recipe

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────

IMAGENET = dict(model="resnet-50", size=224, batch_size=4096, temperature=0.1, probe_epochs=90)
RECIPES = {
    "paper": Recipe("ImageNet, Chen et al. 2020, section 2 and appendix B", IMAGENET | dict(
        epochs=100, lr=0.3, lr_scaling="linear", weight_decay=1e-6, warmup=10, head_layers=2, form="paper")),
    "code": Recipe("ImageNet, the released code's command", IMAGENET | dict(
        epochs=100, lr=0.075, lr_scaling="sqrt", weight_decay=1e-4, warmup=10, head_layers=3, form="code")),
    "cifar": Recipe("CIFAR-10, the released code's command", dict(
        model="resnet-18", size=32, batch_size=512, epochs=1000, lr=1.0, lr_scaling="linear",
        weight_decay=1e-4, temperature=0.5, warmup=10, head_layers=3, form="code", colour=0.5, blur=0.0)),
    "v2": Recipe("ImageNet, SimCLR v2", IMAGENET | dict(
        epochs=800, lr=0.1, lr_scaling="sqrt", weight_decay=1e-4, warmup=40, head_layers=3, form="code"))}
IMPLIED = {
    "supervised": Recipe("SupCon's command for CIFAR-10, its factor τ / 0.07 in rate and decay", dict(
        temperature=0.1, optimizer="sgd", lr=0.18, weight_decay=7e-5, crop=0.2)),
    "finetune": Recipe("SimCLR v2, 1 % of the labels", dict(
        batch_size=1024, epochs=60, lr=0.005, lr_scaling="sqrt", weight_decay=0.0, warmup=0, from_layer=1)),
    "distill": Recipe("SimCLR v2, rates as in pre-training", dict(
        batch_size=4096, epochs=400, lr=0.1, lr_scaling="sqrt", weight_decay=1e-4, warmup=20,
        temperature=1.0))}


def make_parser():
    parser = Flags(__doc__)
    add, common = parser.add_argument, parser.common
    parser.add_recipes(RECIPES, IMPLIED)
    add("--supervised", action="store_true", help="SupCon over the labels, with its recipe")
    add("--finetune", reads="training data", metavar="DATA",
        help="train the encoder of --model, and a classifier, on labelled pictures (v2); no --data")
    add("--labels", type=ratio, default=1.0, help="share of each class for --finetune; default 1")
    add("--from-layer", type=at_least(0, int), default=0,
        help="of --model's head that a classifier stands on; default 0: none, --finetune 1 (v2)")
    add("--distill", reads="model", metavar="TEACHER",
        help="train --model on the soft labels that a fine-tuned folder gives --data (v2)")
    add("--head-layers", type=int, choices=(0, 1, 2, 3), default=2,
        help="of the projection head; default 2 (paper), 3 in v2 and the released code")
    add("--head-norm", action=BooleanOptionalAction, help="batch norms in the head; default by --form")
    add("--width", type=at_least(1, int), default=128, help="of the projection; default 128 (paper)")
    add("--normalize", action=BooleanOptionalAction, default=True, help="of projections; default on (paper)")
    add("--crop", type=ratio, default=0.08,
        help="least share of a picture that a view shows; default 0.08 (paper)")
    add("--colour", type=at_least(0), help="strength of the colour jitter; default 1, to 32 px 0.5 (paper)")
    add("--grey", type=ratio, default=0.2, help="share of grey views; default 0.2 (paper)")
    add("--blur", type=ratio, help="share of blurred views; default 0.5, up to 32 px 0 (paper)")
    add("--optimizer", choices=("lars", "sgd", "nesterov", "adam"), default="lars",
        help="default lars (paper); sgd is SupCon's")
    add("--lr-scaling", choices=("linear", "sqrt"), default="linear",
        help="--lr times batch / 256, or times √batch; default linear")
    add("--warmup", type=at_least(0), default=10, help="epochs that the rate rises; default 10 (paper)")
    common("--weight-decay", 1e-6, "1e-6 (paper)")
    add("--probe-epochs", type=at_least(0, int), default=100, help="of the linear probe; default 100, or 0")
    add("--profile", action="store_true", help="time ten steps, and their loss alone, instead of training")
    common("--form", "paper", "paper; code: batch norms in the head")
    parser.plain("--evaluate", "--data")
    common("--dev", said="the test set in --data")
    common("--size", said="of arrays theirs; of files --model's, 224, or theirs if all are smaller")
    common("--workers", said="the cores")
    parser.plain("--skip-damaged")
    common("--model", "resnet-18", "resnet-18; from scratch as resnet-small, -34, -50, -101, -152")
    common("--out", "out/simclr")
    common("--batch-size", 512)
    common("--chunk-size", said="the batch")
    common("--epochs", 100)
    common("--steps", said="by --epochs")
    common("--lr", 1.0, "1.0 before --lr-scaling (CIFAR-10); ImageNet 0.3, or 0.075 with sqrt")
    common("--temperature", 0.5, "0.5 (CIFAR-10); ImageNet and SupCon 0.1")
    common("--seed", 42)
    common("--eval-every", 1000)
    common("--impl", "auto")
    parser.plain("--resume", "--keep-state", "--log", "--precision")
    return parser


if __name__ == "__main__":
    answer_early(make_parser)  # --help, and wrong flags, before the seconds that torch takes

import contextlib
import functools

import torch
import torch.nn.functional as F
from torch import nn

import kernels
from kernels import check_rows, checks, gather_rows, nt_xent, own_rows, similarity_lse
from kernels.training.extras.simclr_v2 import Tuning, distillation_loss  # noqa: F401 - for importers
from kernels.training.images import encoders as nets
from kernels.training.images import evaluation
from kernels.training.images.augmentation import Crops, blur, coin, grey, jitter
from kernels.training.images.dataset import Pictures
from kernels.training.images.encoders import PictureEncoder, load_image_encoder
from kernels.training.images.evaluation import knn_accuracy, train_probe  # noqa: F401
from kernels.training.images.lars import LARS, make_optimizer  # noqa: F401
from kernels.training.loop import epoch_steps, half_products, set_lr, sum_gradients, warmup_cosine
from kernels.training.run import Run

# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────

# shares and aspects are drawn evenly; all of a picture where no box fits
CROPS = Crops(0.08, 100, aspects=lambda u: 3 / 4 + (4 / 3 - 3 / 4) * u, limits=(1e-9, 1e9), cubic=True)


def check(args):
    """Flags that do not go together; says what the recipe is."""
    say_recipe(args, RECIPES | IMPLIED)
    modes = [f"--{name}" for name in ("supervised", "finetune", "distill") if getattr(args, name)]
    if len(modes) > 1:
        fail(f"{' and '.join(modes)}: wanted one of them")
    if args.supervised and not args.normalize:
        fail("--no-normalize: SupCon's projections are unit vectors")
    if not args.labels:
        fail("--labels 0: wanted a share above 0")
    if args.labels < 1 and not args.finetune:
        fail("--labels: is a share for --finetune, which is not given")
    if args.from_layer and not (args.finetune or args.distill):
        fail("--from-layer: is for --finetune or --distill, neither of which is given")
    if args.profile and (args.finetune or args.distill):
        fail("--profile: times a contrastive loss; leave --finetune and --distill out")


def load_data(path, args):
    """The Pictures to train on and to be judged by; fills the flags that their size decides."""
    pictures = Pictures(args, CROPS)
    fill(args, dict(colour=0.5, blur=0.0) if pictures.small else dict(colour=1.0, blur=0.5))
    for flag in ("supervised", "finetune"):
        if getattr(args, flag) and pictures.train.labels is None:
            fail(f"--{flag} wants labels, and {path} has none: sub-folders, a .tsv of files and labels, or "
                 "labels in the .npz")
    if args.finetune:
        pictures.keep_share(args.labels)
        pictures.enough(args.batch_size)
    kinds = "supervised", "finetune", "distill"
    kind = next((kind for kind in kinds if getattr(args, kind)), "unsupervised")
    say("simclr", f"{kind}: {pictures.describe()}")
    return pictures


def make_batch(rows, pictures, args):
    """(views, labels) of this rank's n pictures of a global batch: two views of each, all first before all
    second, (2n, 3, S, S) float32 from 0 to 1; with --supervised the labels of all ranks, else None."""
    views = augment(next(pictures.feed), args)
    return views, pictures.train.labels[rows].to(views.device) if args.supervised else None


def augment(x, args):
    """Views (n, 3, S, S) float32 in [0, 1] of crops: colours, grey, blur."""
    x = jitter(x, 0.8 * args.colour, 0.2 * args.colour, 0.8)
    x = torch.where(coin(args.grey, x), grey(x), x)
    if args.blur:
        x = torch.where(coin(args.blur, x), blur(x), x)
    return x.clamp(0, 1)


def build_model(args, pictures, run, tuning=None):
    """The encoder and its projection head; for `tuning` (--finetune, --distill) a classifier instead."""
    encoder = load_image_encoder(args.model, pictures.small)
    width = encoder.config.hidden_sizes[-1]
    if args.model in nets.RESNETS:
        for block in (block for stage in encoder.encoder.stages for block in stage.layers):
            nn.init.zeros_(block.layer[-1].normalization.weight)   # the block starts as the identity (paper)
    head = tuning.make_head(width) if tuning else projection_head(width, args)
    classes = tuning and tuning.classes
    model = PictureEncoder(encoder, head, run, *nets.read_statistics(args.model), classes)
    if run.world > 1 and run.device.type != "cpu":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    size = sum(p.numel() for p in encoder.parameters()) / 1e6
    what = f"classifier on layer {args.from_layer}" if classes else f"{args.head_layers}-layer head"
    say("model", f"{args.model}, {size:.1f} M parameters, {what}")
    return model.to(run.device, memory_format=torch.channels_last)


def projection_head(width, args):
    """g: linear layers with a ReLU between two; with norms (--form code) each has one, and the last of these
    scales and does not shift."""
    norms = args.form == "code" if args.head_norm is None else args.head_norm
    sizes, layers = [width] * args.head_layers + [args.width], []
    afford(f"--width {args.width}", 16 * width * args.width)   # weights, gradients, the optimizer's
    for inside, outside in zip(sizes[: args.head_layers], sizes[1:]):
        layers.append(nn.Linear(inside, outside, bias=not norms))
        if norms:
            nn.init.normal_(layers[-1].weight, std=0.01)
            layers.append(nn.BatchNorm1d(outside))
        layers.append(nn.ReLU())
    head = nn.Sequential(*layers[:-1])
    if norms and layers:
        head[-1].bias.requires_grad_(False)
    return head


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def simclr_loss(z1, z2, temperature=0.5, *, gathered=None, offset=0, normalize=True, impl="auto"):
    """NT-Xent: mean over the 2N views of −log softmax of a picture's other view among all other views.

    z1, z2        (N, D) raw projections of the two views, any float type; normalised here
    gathered      (z1, z2) of all ranks, (M, D) each, with gradient; None: one process
    offset        this rank's first row in them
    normalize     False: products of projections as they are, whatever their lengths
    returns       scalar float32, float64 for float64; one picture: 0. The released code returns twice this
    source        Chen et al. 2020, eq. 1 and algorithm 1
    """
    checks.check_flag("normalize", normalize)
    alone = gathered is None
    all_z1, all_z2 = (z1, z2) if alone else checks.check_pair("gathered", gathered, "(z1, z2) of all ranks")
    check_rows(offset, z1=(z1, "N D"), z2=(z2, "N D"), gathered_z1=(all_z1, "M D"),
               gathered_z2=(all_z2, "M D"))
    checks.check_alike(z1=z1, z2=z2, gathered_z1=all_z1, gathered_z2=all_z2)
    checks.check_temperature(temperature, z1.device)
    unit = functools.partial(F.normalize, dim=1) if normalize else lambda z: z
    z1, z2 = unit(z1), unit(z2)
    if alone:
        return nt_xent(z1, z2, temperature, impl=impl)         # the same formula, in one process
    others = [*map(unit, gathered)]
    positive = (z1 * z2).sum(1) / temperature
    losses = []
    for z in (z1, z2):  # "diagonal" leaves out a view itself in one part, and its positive in the other
        negatives = [similarity_lse(z, other, temperature, exclude="diagonal", offset=offset, impl=impl)
                     for other in others]
        # log(exp positive + Σ exp negatives) − positive, the positive kept out of the large sum
        losses.append(-F.logsigmoid(positive - torch.logaddexp(*negatives)))
    return torch.cat(losses).mean()


def compute_loss(model, batch, rows, args):
    """This rank's part of the loss of a batch (views, labels) of `rows` pictures. Both views go through the
    encoder at once, so batch norms see all of them, or a chunk of them."""
    views, labels = batch
    z1, z2 = model(views).chunk(2)
    gathered = None
    if args.supervised or len(z1) < rows:
        gathered = gather_rows(z1, rows), gather_rows(z2, rows)
    with half_products(z1, args) if args.normalize else contextlib.nullcontext():
        if args.supervised:
            loss = sup_con_loss(torch.stack(gathered, 1), labels, args.temperature, impl=args.impl)
        else:
            loss = simclr_loss(z1, z2, args.temperature, gathered=gathered, offset=own_rows(rows).start,
                               normalize=args.normalize, impl=args.impl)
    loss = loss * (len(z1) / rows)
    return loss, {"loss": loss.detach()}


def sup_con_loss(features, labels=None, temperature=0.1, base_temperature=None, *, impl="auto"):
    """SupCon, the logarithm inside the sum: mean over views of the mean −log softmax of their positives.

    features          (N, V, D) raw projections of V views, any float type; normalised here
    labels            (N,) integers: all other views of the same label are positives; None: of the same sample
    base_temperature  the released code multiplies by temperature / base_temperature, 0.07 there; None: the
                      paper's loss
    returns           scalar float32, float64 for float64; a view without positives adds 0 and counts
    source            Khosla et al. 2020, L^sup_out
    """
    check_rows(features=(features, "N V D"), labels=(labels, "N", int, None))
    base = temperature if base_temperature is None else base_temperature
    return kernels.sup_con_loss(F.normalize(features, dim=2), labels, temperature, base, impl=impl)


# ── evaluation ──────────────────────────────────────────────────────────────────────────────────────────────


def linear_probe(model, pictures, run):
    """Percent of test pictures that one linear layer on the frozen features labels right, trained on crops:
    rate 0.1 · batch / 256 along a cosine, Nesterov (SimCLR); 5, a fifth of it at 60, 75, 90 % (SupCon).
    SimCLR's batches for CIFAR-10 are of 512 pictures; for ImageNet of 4,096, with decay, and so here where
    the pictures are large and an epoch has 100 such batches."""
    supervised, large = run.args.supervised, not pictures.small and len(pictures) >= 100 * 4096
    batch, decay = (4096, 1e-6) if large and not supervised else (min(512, len(pictures)), 0.0)

    def rate(step, total):
        if supervised:
            return 5 * 0.2 ** sum(step >= share * total for share in (0.6, 0.75, 0.9))
        return warmup_cosine(step, total, 0, 0.1 * batch / 256)
    return train_probe(model, pictures, run, batch=batch, rate=rate, nesterov=not supervised, decay=decay)


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    if args.evaluate:
        return evaluation.score(args, __file__, CROPS, linear_probe)
    check(args)
    pictures = load_data(args.data, args)
    run = Run(args, __file__)
    tuning = Tuning(args, pictures, run) if args.finetune or args.distill else None
    model = build_model(args, pictures, run, tuning)
    pictures.join(run)
    epoch = epoch_steps(len(pictures), args.batch_size, least=args.batch_size)
    total, warmup = args.steps or args.epochs * epoch, round(args.warmup * epoch)
    rate = args.lr * (args.batch_size / 256 if args.lr_scaling == "linear" else args.batch_size ** 0.5)
    optimizer = make_optimizer(model, rate, args)
    if args.profile:
        from kernels.training.extras.step_times import profile
        return profile(model, optimizer, pictures, run, make_batch, compute_loss)
    run.begin(model, optimizer, total, warmup)
    evaluation.before(model, pictures, run)
    pictures.start(run, total, args.crop, 1 if model.classes else 2)
    model.train()
    for step, rows in run.steps(total, len(pictures), least=args.batch_size):  # full batches alone (paper)
        set_lr(optimizer, warmup_cosine(step - 1, total, warmup, rate))
        if tuning:
            loss, values = tuning.compute_loss(model, rows)
        else:
            loss, values = compute_loss(model, make_batch(rows, pictures, args), len(rows), args)
        optimizer.zero_grad()
        loss.backward()
        sum_gradients(model)
        optimizer.step()
        run.note(values, lr=optimizer.param_groups[0]["lr"])
        if run.due:
            evaluation.judge(model, pictures, run)
    evaluation.after(model, pictures, run, linear_probe)


if __name__ == "__main__":
    main()
