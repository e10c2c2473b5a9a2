"""SimCLR: A Simple Framework for Contrastive Learning of Visual Representations. Chen, Kornblith, Norouzi,
Hinton, ICML 2020, arXiv 2002.05709; SimCLR v2, Chen et al., NeurIPS 2020, arXiv 2006.10029; SupCon, Khosla et
al., NeurIPS 2020, arXiv 2004.11362.

An encoder and a projection head map two random views of each image to two vectors z. Training pulls the two
vectors together and pushes them away from the vectors of all other images. After training, the projection
head is dropped. N images have 2N views; views i and i' are the two views of one image. With u = z / |z|, the
temperature τ and s(i, j) = u_i·u_j / τ, the loss (NT-Xent) is
    L = 1/2N Σ_i [ −s(i, i') + log Σ_{j≠i} exp s(i, j) ]

    python simclr.py --recipe cifar --data cifar-10-batches-py --out out/simclr
    python simclr.py --recipe supcon --data cifar-10-batches-py --out out/supcon
    torchrun --nproc-per-node 8 simclr.py --recipe v2 --data train --dev val --out out/v2

--supervised trains with the SupCon loss. The positives P(i) of view i are all other views with i's label:
    L = 1/2N Σ_i 1/|P(i)| Σ_{p∈P(i)} [ −s(i, p) + log Σ_{j≠i} exp s(i, j) ]
docs/more/simclr_v2.py has the other stages of SimCLR v2: fine-tuning and distillation.

Data, one of:
    folder    images of any size, with sub-folders as labels; or CIFAR's python batches
    .npz      images, test_images (uint8, N x H x W x 3), labels, test_labels
Image files are decoded when needed, large JPEGs at a reduced size. Views are cropped, then resized.

Published test accuracies, with the flags closest to each setup. No accuracy is published for the defaults:
    CIFAR-10    about 91 % linear           --recipe cifar
                83.2 % kNN, 85.6 % linear   --optimizer sgd --lr 0.06 --warmup-epochs 0 --weight-decay 5e-4
                                            --crop 0.2 --grey 0.1 (dkobak/simclr-cifar10, head 512-1024-128)
                96.0 % linear               --recipe supcon --model resnet-50 --batch-size 1024 --epochs 1000
    ImageNet    64.5 % linear               --recipe code
                69.1 % linear               --recipe paper --form code --epochs 1000 (released checkpoint)
                71.1 % linear               --recipe v2

Departures from the released code:
- The released loss is twice the mean over views; this script's loss is the mean (paper).
- The released head has batch norms; this script's head has them only with --form code or --head-norm.
- The released code resizes without antialiasing; this script uses antialiasing, but only for image files.
- SupCon's code normalises images, and multiplies its loss by τ / 0.07; new models here do neither.
- v2 has selective kernels and wider networks; this script has none of these.
"""
from argparse import BooleanOptionalAction

import torch
from torch import nn

import kernels
from kernels import check_rows, nt_xent, own_rows
from kernels.training.errors import command, fail, log
from kernels.training.flags import Recipe, ScriptParser, at_least, fill_defaults, image_flags, ratio
from kernels.training.images import evaluation
from kernels.training.images.augmentation import Crops, bernoulli_mask, blur, grey, jitter
from kernels.training.images.dataset import ImageDataset
from kernels.training.images.encoders import RESNETS, ImageEncoder, load_image_encoder, read_mean_std
from kernels.training.images.evaluation import train_probe
from kernels.training.loop import all_reduce_gradients, set_lr, steps_per_epoch, warmup_cosine
from kernels.training.papers.simclr_lars import make_optimizer
from kernels.training.precision import gather_keys, loss_autocast
from kernels.training.run import Run

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────

IMAGENET = dict(model="resnet-50", image_size=224, batch_size=4096, temperature=0.1, probe_epochs=90)
RECIPES = {
    "paper": Recipe("ImageNet, Chen et al. 2020, section 2 and appendix B", IMAGENET | dict(epochs=100,
        lr=0.3, lr_scaling="linear", weight_decay=1e-6, warmup_epochs=10, head_layers=2, form="paper")),
    "code": Recipe("ImageNet, the released code's command", IMAGENET | dict(epochs=100,
        lr=0.075, lr_scaling="sqrt", weight_decay=1e-4, warmup_epochs=10, head_layers=3, form="code")),
    "cifar": Recipe("CIFAR-10, the released code's command", dict(model="resnet-18", image_size=32,
        batch_size=512, epochs=1000, lr=1.0, lr_scaling="linear", weight_decay=1e-4, temperature=0.5,
        warmup_epochs=10, head_layers=3, form="code", colour=0.5, blur=0.0)),
    "v2": Recipe("ImageNet, SimCLR v2", IMAGENET | dict(epochs=800,
        lr=0.1, lr_scaling="sqrt", weight_decay=1e-4, warmup_epochs=40, head_layers=3, form="code")),
    "supcon": Recipe("CIFAR-10; SupCon's τ, crop, SGD; lr and decay for a loss without factor τ / 0.07", dict(
        supervised=True, temperature=0.1, optimizer="sgd", lr=0.18, weight_decay=7e-5, crop=0.2))}


def make_parser():
    parser = ScriptParser(__doc__)
    add = parser.add_argument
    image_flags(
        parser, "resnet-18", out="out/simclr", batch_size=512, epochs=100, probe_epochs=100,
        weight_decay=(1e-6, "1e-6 (paper)"),
        temperature=(0.5, "0.5 (paper, CIFAR-10)"),
        form=("paper", "paper; code: batch norms in the head"),
        lr=(1.0, "1.0 (released CIFAR-10 command); --lr-scaling multiplies it"))
    add("--crop", group="data", type=ratio, default=0.08,
        help="smallest area of a crop, as a fraction of the image; default 0.08 (paper)")
    add("--colour", group="data", type=at_least(0),
        help="strength of the colour jitter; default 1 (paper), or 0.5 for views of at most 32 px")
    add("--grey", group="data", type=ratio, default=0.2, help="probability of greyscale; default 0.2 (paper)")
    add("--blur", group="data", type=ratio,
        help="probability of blur; default 0.5 (paper), or 0 for views of at most 32 px")
    add("--head-layers", group="model", type=int, choices=(0, 1, 2, 3), default=2,
        help="number of linear layers in the projection head; default 2 (paper)")
    add("--head-norm", group="model", action=BooleanOptionalAction,
        help="use batch norms in the projection head; default off (paper), or on with --form code")
    add("--projection-dim", group="model", type=at_least(1, int), default=128,
        help="output dimension of the projection head; default 128 (paper)")
    add("--supervised", action="store_true",
        help="train with the SupCon loss; --recipe supcon sets this flag and most flags of SupCon's command")
    parser.add_shared_flags("--ring")
    parser.add_recipes(RECIPES)
    add("--optimizer", group="training", choices=("lars", "sgd"), default="lars",
        help="optimizer; sgd: with momentum, and weight decay for all weights (SupCon); default lars (paper)")
    add("--lr-scaling", group="training", choices=("linear", "sqrt"), default="linear",
        help="linear: multiply --lr by batch size / 256; sqrt: by √(batch size); default linear")
    add("--warmup-epochs", group="training", type=at_least(0), default=10,
        help="epochs of learning-rate warm-up; default 10 (paper)")
    return parser


# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────

# areas and aspect ratios of crops are uniformly distributed; if no crop fits, the whole image is used
CROPS = Crops(min_area=0.08, attempts=100, sample_aspect=lambda u: 3 / 4 + (4 / 3 - 3 / 4) * u,
              aspect_limits=(1e-9, 1e9), bicubic=True)


def load_data(path, args):
    """Load the images for training and evaluation, and set flags whose defaults depend on the image size."""
    images = ImageDataset(args, CROPS)
    fill_defaults(args, dict(colour=0.5, blur=0.0) if images.is_small else dict(colour=1.0, blur=0.5))
    if args.supervised and images.train.labels is None:
        fail(f"--supervised needs labels, but {path} has none; expected sub-folders, or labels in the .npz")
    if args.supervised and args.ring:
        fail("--ring does not support --supervised")
    log("simclr", f"{'supervised' if args.supervised else 'unsupervised'}: {images.describe()}")
    return images


def make_batch(rows, images, args):
    """Return (views, labels). views (2n, 3, S, S) float32 in [0, 1]: the first views of this rank's n images,
    then the second views. labels: one per image of the global batch `rows`; None without --supervised. The
    images of training_views come in the order of run.steps."""
    views = augment(next(images.training_views), args)
    return views, images.train.labels[rows].to(views.device) if args.supervised else None


def augment(x, args):
    """Apply random colour jitter, greyscale and blur to crops (n, 3, S, S) float32 in [0, 1]."""
    x = jitter(x, 0.8 * args.colour, 0.2 * args.colour, 0.8)
    x = torch.where(bernoulli_mask(args.grey, x), grey(x), x)
    if args.blur:
        x = torch.where(bernoulli_mask(args.blur, x), blur(x), x)
    return x.clamp(0, 1)


def projection_head(width, args):
    """Return the projection head: linear layers with ReLUs between them. With --head-norm, a batch norm
    follows each linear layer, and the bias of the last batch norm stays 0."""
    use_norms = args.form == "code" if args.head_norm is None else args.head_norm
    layers = []
    for i in range(args.head_layers):
        is_last = i == args.head_layers - 1
        outputs = args.projection_dim if is_last else width
        layers.append(nn.Linear(width, outputs, bias=not use_norms))
        if use_norms:
            nn.init.normal_(layers[-1].weight, std=0.01)
            layers.append(nn.BatchNorm1d(outputs))
            layers[-1].bias.requires_grad_(not is_last)
        if not is_last:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def build_model(args, images, run, make_head=projection_head):
    """Build an encoder with a head. make_head: function (number of the encoder's features, args) → head."""
    encoder = load_image_encoder(args.model, images.is_small)
    if args.model in RESNETS:
        for stage in encoder.encoder.stages:
            for block in stage.layers:                         # each residual branch outputs 0 at the start
                nn.init.zeros_(block.layer[-1].normalization.weight)
    head = make_head(encoder.config.hidden_sizes[-1], args)
    model = ImageEncoder(encoder, head, run, *read_mean_std(args.model))
    if run.world_size > 1 and run.device.type != "cpu":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    size = sum(p.numel() for p in encoder.parameters()) / 1e6
    layers = [part for part in head if isinstance(part, nn.Linear)]
    log("model", f"{args.model}, {size:.1f} M parameters, {len(layers)}-layer head")
    return model.to(run.device, memory_format=torch.channels_last)


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def simclr_loss(z1, z2, temperature=0.5, *, gathered=None, offset=0, normalize=True, impl="auto"):
    """Return the NT-Xent loss, a mean over 2N views: each view must identify the other view of its image.

    z1, z2        (N, D) projections of the first views and of the second views, any float type
    gathered      (z1, z2) of all ranks, (M, D) each, with gradient, or RingRows; None: there is one process
    offset        index in `gathered` of this rank's first row
    normalize     True: similarities are cosines; False: they are dot products of the given projections
    returns       scalar, float32 (float64 for float64 input); 0 for one image; half the released code's value
    source        Chen et al. 2020, eq. 1 and algorithm 1
    """
    # mean over i of −log( e^{s(i,i')} / Σ_{j≠i} e^{s(i,j)} ); kernels/eager.py computes this in plain PyTorch
    return nt_xent(z1, z2, temperature, gathered=gathered, offset=offset, normalize=normalize, impl=impl)


def compute_loss(model, batch, rows, args):
    """Return this rank's part of the loss of a global batch of `rows` images, and the values to log. batch is
    the result of make_batch. Without --chunk-size, first and second views share batch-norm statistics."""
    views, labels = batch
    z = torch.stack(model(views).chunk(2), 1)                  # (n, 2, D)
    own, gathered = own_rows(rows), None
    if len(z) < rows:                                          # other ranks have the other rows
        gathered = gather_keys(z, rows, args)
    with loss_autocast(z, args):
        if args.supervised:
            loss = sup_con_loss(z, labels[own], args.temperature, impl=args.impl, offset=own.start,
                                gathered=None if gathered is None else (gathered, labels))
        else:
            loss = simclr_loss(*z.unbind(1), args.temperature, offset=own.start, impl=args.impl,
                               gathered=None if gathered is None else gathered.unbind(1))
    loss = loss * (len(z) / rows)
    return loss, {"loss": loss.detach()}


def sup_con_loss(features, labels=None, temperature=0.1, base_temperature=None, *, gathered=None, offset=0,
                 impl="auto"):
    """Return the SupCon loss: −log softmax, averaged over the positives of each view, then over all views.

    features          (N, V, D) projections of V views of N images, any float type and norm
    labels            (N,) integers: positives are other views with the same label; None: of the same image
    base_temperature  factor of the loss: temperature / base_temperature (released code: 0.07); None: 1
    gathered          (features (M, V, D) with gradient, labels (M,)) of all ranks; None: there is one process
    offset            index in `gathered` of this rank's first row
    returns           scalar: float64 for float64 inputs, else float32; a view without positives counts as 0
    source            Khosla et al. 2020, L^sup_out: the logarithm is inside the sum over positives
    """
    check_rows(features=(features, "N V D"), labels=(labels, "N", int, None))
    return kernels.sup_con_loss(features, labels, temperature, base_temperature, gathered=gathered,
                                offset=offset, normalize=True, impl=impl)


# ── evaluation ──────────────────────────────────────────────────────────────────────────────────────────────


def linear_probe(model, images, run):
    """Train a linear layer on frozen features of random crops, and return its test accuracy in percent.

    SimCLR   Nesterov momentum, learning rate 0.1 · batch / 256 with cosine decay, 512 images per batch. With
             409,600 or more images and views above 32 px: 4096 images per batch and weight decay 1e-6
    SupCon   learning rate 5, multiplied by 0.2 after 60, 75 and 90 % of the steps
    """
    supervised = run.args.supervised
    batch, weight_decay = min(512, len(images)), 0.0
    if not supervised and not images.is_small and len(images) >= 100 * 4096:
        batch, weight_decay = 4096, 1e-6

    def lr_schedule(step, total):
        if supervised:
            decays = [fraction for fraction in (0.6, 0.75, 0.9) if step >= fraction * total]
            return 5 * 0.2 ** len(decays)
        return warmup_cosine(step, total, 0, 0.1 * batch / 256)
    return train_probe(model, images, run, batch=batch, lr_schedule=lr_schedule, nesterov=not supervised,
                       weight_decay=weight_decay)


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
    warmup = round(args.warmup_epochs * epoch_steps)
    lr = args.lr * (args.batch_size / 256 if args.lr_scaling == "linear" else args.batch_size ** 0.5)
    optimizer = make_optimizer(model, lr, args)
    run.begin(model, optimizer, total, warmup, evaluation.probe_text(images, args))
    evaluation.evaluate_before(model, images, run)
    images.start_training_views(run, total, args.crop)
    model.train()
    for step, picked in run.steps(total, len(images), min_rows=args.batch_size):  # this skips short batches
        set_lr(optimizer, warmup_cosine(step - 1, total, warmup, lr))
        loss, values = compute_loss(model, make_batch(picked, images, args), len(picked), args)
        optimizer.zero_grad()
        loss.backward()
        all_reduce_gradients(model)
        optimizer.step()
        run.log_metrics(values, lr=optimizer.param_groups[0]["lr"])
        if run.eval_due:
            evaluation.evaluate_and_save(model, images, run)
    evaluation.finish(model, images, run, linear_probe)


if __name__ == "__main__":
    main()
