"""Fine-tuning and distillation of SimCLR v2: Big Self-Supervised Models are Strong Semi-Supervised Learners.
Chen, Kornblith, Swersky, Norouzi, Hinton, NeurIPS 2020, arXiv 2006.10029. simclr.py --recipe v2 does the
first stage, pre-training without labels.

Fine-tuning trains the encoder, the first layer of its projection head, and a new classifier, with the cross
entropy on labelled images. Distillation (--teacher) trains a student to match a fine-tuned teacher. P_s and
P_t are the probabilities that student and teacher give to class y for image x, at the temperature τ:

    L = mean over images x of −Σ_y P_t(y | x; τ) log P_s(y | x; τ)

    python docs/more/simclr_v2.py --data train --model out/v2 --label-fraction 0.01 --dev val --out out/tuned
    python docs/more/simclr_v2.py --data train --model resnet-18 --teacher out/tuned --dev val --out out/small
    python docs/more/simclr_v2.py --evaluate --model out/small --dev val

Data: as for simclr.py. Each image has one view, with crops and flips only.

Published top-1 accuracy on ImageNet, ResNet-50: 57.9 % with 1 % of the labels (the first command), 68.4 %
with 10 % (--label-fraction 0.1 --epochs 30). This script never mixes true labels into the distillation loss.
"""
import functools
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))  # where kernels/ is
from kernels import check_rows, checks, own_rows
from kernels.training.errors import command, fail, log
from kernels.training.flags import ScriptParser, at_least, check_batch_size, fill_defaults, image_flags
from kernels.training.images import encoders, evaluation
from kernels.training.images.dataset import ImageDataset
from kernels.training.loop import all_reduce_gradients, set_lr, steps_per_epoch, warmup_cosine
from kernels.training.papers.simclr_lars import LARS, make_optimizer
from kernels.training.run import Run
from simclr import CROPS, build_model

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────

# Defaults of fine-tuning and distillation (v2's paper, 1 % of the labels); DISTILL has pre-training's lr
FINETUNE = dict(batch_size=1024, epochs=60, lr=0.005, weight_decay=0.0, warmup_epochs=0, from_layer=1)
DISTILL = dict(batch_size=4096, epochs=400, lr=0.1, weight_decay=1e-4, warmup_epochs=20, from_layer=0)


def make_parser():
    parser = ScriptParser(__doc__)
    add = parser.add_argument
    image_flags(
        parser, "resnet-18", out="out/simclr_v2", batch_size=(None, "1024, or 4096 with --teacher (paper)"),
        epochs=(None, "60, or 400 with --teacher (paper)"),
        lr=(None, "0.005 (paper), or 0.1 with --teacher; it is always multiplied by √(batch size)"),
        weight_decay=(None, "0, or 1e-4 with --teacher (paper)"),
        temperature=(1.0, "1 (released notebook); only used with --teacher"))
    add("--label-fraction", group="data", type=at_least(1e-9, most=1), default=1.0,
        help="fraction of the images of each class that fine-tuning uses; default 1")
    add("--from-layer", group="model", type=at_least(0, int),
        help="N: keep the first N linear layers of --model's head; default 1 (paper), or 0 with --teacher")
    add("--teacher", group="model", reads="model",
        help="teacher model; default none: fine-tune --model. With a teacher, --model learns to match it")
    add("--optimizer", group="training", choices=("lars", "sgd"), default="lars",
        help="optimizer; sgd: with momentum, and weight decay for all weights (SupCon); default lars (paper)")
    add("--warmup-epochs", group="training", type=at_least(0),
        help="epochs of learning-rate warm-up; default 0, or 20 with --teacher (paper)")
    return parser


# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """Load the images, keep --label-fraction of them, and set the defaults of flags not given."""
    fill_defaults(args, DISTILL if args.teacher else FINETUNE)
    if args.teacher and args.label_fraction < 1:
        fail("--label-fraction: --teacher trains on all images, without labels; leave out one of the two")
    images = ImageDataset(args, CROPS)
    if not args.teacher:
        if images.train.labels is None:
            fail(f"{path} has no labels, but fine-tuning needs them")
        subsample(images, args.label_fraction)
        check_batch_size(len(images), path, args.batch_size, "images")
    log("simclr_v2", f"{'distillation' if args.teacher else 'fine-tuning'}: {images.describe()}")
    return images


def subsample(images, share):
    """Keep a random share of the training images of each class, at least one image. Seed: images.seed."""
    generator, labels = torch.Generator().manual_seed(images.seed), images.train.labels
    kept = []
    for rows in ((labels == label).nonzero()[:, 0] for label in labels.unique()):
        order = torch.randperm(len(rows), generator=generator)
        kept.append(rows[order[: max(1, round(share * len(rows)))]])
    images.train.keep_only(torch.cat(kept).sort().values.numpy())


def make_batch(rows, images, teacher):
    """Return (views (n, 3, S, S) of this rank's images, targets): the labels (n,), or the logits (n, C) of
    the teacher. rows: indices of the images in the batches of all ranks."""
    views = next(images.training_views)
    if teacher is None:
        return views, images.train.labels[rows[own_rows(len(rows))]].to(views.device)
    with torch.no_grad():
        return views, teacher.head(teacher.features(views))


def classifier_head(width, args, count):
    """Return the first --from-layer linear layers of --model's projection head, each with the norm and the
    activation that follow it, and then a new linear layer with `count` outputs, whose weights are 0."""
    layers = []
    if args.from_layer:
        head = encoders.load_head(args.model) or nn.Sequential()
        linear = [i for i, part in enumerate(head) if isinstance(part, nn.Linear)]
        if args.from_layer > len(linear):
            fail(f"--from-layer {args.from_layer}: --model {args.model} has a head of {len(linear)} linear "
                 "layers, expected more")
        layers = head[: [*linear, len(head)][args.from_layer]]
        width = head[linear[args.from_layer - 1]].out_features
    last = nn.Linear(width, count)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)


def load_classifier(name, flag="--model", run=None):
    """Load a model that this script saved. Return an ImageEncoder in eval mode, which maps images
    (n, 3, S, S) in [0, 1] to logits (n, C). The names of the C classes are in encoder.config.id2label."""
    head, encoder = encoders.load_head(name, flag), encoders.load_image_encoder(name, flag=flag)
    outputs = [layer.out_features for layer in head or () if isinstance(layer, nn.Linear)]
    if outputs[-1:] != [len(encoder.config.id2label)]:
        fail(f"{flag} {name}: has no classifier; expected the --out of a run of simclr_v2.py")
    return encoders.ImageEncoder(encoder, head, run, *encoders.read_mean_std(name)).eval()


def classifier_optimizer(model, lr, args):
    """Make the optimizer. LARS does not scale the steps of the last layer (released code): its weights start
    at 0, so steps in proportion to their norm would stay small."""
    if args.optimizer != "lars":
        return make_optimizer(model, lr, args)
    last = model.head[-1].weight
    others = [weight for weight in model.parameters() if weight is not last]
    groups = [dict(params=others), dict(params=[last], trust=None)]
    return LARS(groups, lr=lr, weight_decay=args.weight_decay)


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def distillation_loss(logits, teacher_logits, temperature=1.0):
    """Return the mean over images of −Σ_y P_teacher(y) log P_student(y), P = softmax(logits / temperature).

    logits           (N, C) of the student, any float type
    teacher_logits   (N, C) of the teacher, any float type; they get no gradient
    returns          scalar of the student's type
    source           Chen et al. 2020 (SimCLR v2), distillation loss
    """
    check_rows(logits=(logits, "N C"), teacher_logits=(teacher_logits, "N C"))
    checks.check_temperature(temperature, logits.device)
    soft_labels = (teacher_logits.detach() / temperature).softmax(1).to(logits.dtype)
    return F.cross_entropy(logits / temperature, soft_labels)


def compute_loss(model, batch, rows, args):
    """Return this rank's part of the loss of a global batch of `rows` images, and the values to log. batch is
    the result of make_batch."""
    views, targets = batch
    logits = model(views)
    if args.teacher:
        loss = distillation_loss(logits, targets, args.temperature)
    else:
        loss = F.cross_entropy(logits, targets)
    loss = loss * (len(logits) / rows)
    return loss, {"loss": loss.detach()}


# ── evaluation ──────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def accuracy(model, images):
    """Return the percentage of test images that the model labels correctly. The classes of model and images
    are matched by name. Images of a class that the model does not know count as errors."""
    numbers = {name: i for i, name in model.encoder.config.id2label.items()}
    labels = torch.tensor([numbers.get(name, -1) for name in images.classes])[images.test.labels]
    model.eval()
    predicted = model.head(images.encode_split(images.test, model)).argmax(1).cpu()
    model.train()
    return 100 * (predicted == labels).float().mean().item()


def evaluate_model(args):
    """Run --evaluate: print the accuracy of --model on the images of --dev, or on the test set in --data."""
    args.data = args.data or args.dev
    images, run = ImageDataset(args, CROPS), Run(args, __file__)
    if not images.test:
        fail("--evaluate: expected labelled test images, in --dev or in --data")
    log("data", images.describe())
    model = load_classifier(args.model, run=run).to(run.device)
    images.to_device(run)
    log("test", f"classifier {accuracy(model, images):.2f} %  {args.model}")


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    if args.evaluate:
        return evaluate_model(args)
    images = load_data(args.data, args)
    run = Run(args, __file__)
    teacher = load_classifier(args.teacher, "--teacher", run).to(run.device) if args.teacher else None
    names = teacher.encoder.config.id2label if teacher else dict(enumerate(images.classes))
    model = build_model(args, images, run, functools.partial(classifier_head, count=len(names)))
    model.encoder.config.id2label = names
    images.to_device(run)
    epoch = steps_per_epoch(len(images), args.batch_size, min_rows=args.batch_size)
    total = args.steps or args.epochs * epoch
    warmup = round(args.warmup_epochs * epoch)
    lr = args.lr * args.batch_size ** 0.5
    optimizer = classifier_optimizer(model, lr, args)
    run.begin(model, optimizer, total, warmup)
    images.start_training_views(run, total, CROPS.min_area, 1)
    model.train()
    for step, picked in run.steps(total, len(images), min_rows=args.batch_size):  # only full batches
        set_lr(optimizer, warmup_cosine(step - 1, total, warmup, lr))
        loss, values = compute_loss(model, make_batch(picked, images, teacher), len(picked), args)
        optimizer.zero_grad()
        loss.backward()
        all_reduce_gradients(model)
        optimizer.step()
        run.log_metrics(values, lr=optimizer.param_groups[0]["lr"])
        if run.eval_due:
            evaluation.evaluate_and_save(model, images, run, "top1", accuracy)
    run.finish(f"top-1 {run.extra_state['saved']['top1']:.2f} %, " if images.test else "")
    log("load", f'simclr_v2.load_classifier("{args.out}"), with docs/more on PYTHONPATH')


if __name__ == "__main__":
    main()
