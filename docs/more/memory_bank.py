"""Memory bank: Unsupervised Feature Learning via Non-Parametric Instance Discrimination. Wu, Xiong, Yu, Lin,
CVPR 2018, arXiv 1805.01978. It is the baseline to which the paper of MoCo compares its queue.

The encoder maps a random view of image i to the query q_i. The bank has a stored vector v_i for each image:
the running mean of the queries of this image. Training pulls the query towards v_i, and pushes it away from
the vectors n_1 ... n_K of random images. For unit vectors q and v, and the temperature τ, the loss is

    L = mean over queries of −log( exp(q_i·v_i / τ) / ( exp(q_i·v_i / τ) + Σ_j exp(q_i·n_j / τ) ) )

After each step, with the momentum m, the stored vectors of the batch's images become m v_i + (1 − m) q_i,
scaled to length 1.

    python docs/more/memory_bank.py --data imagenet/train --dev imagenet/val --out out/bank
    python docs/more/memory_bank.py --model resnet-18 --data cifar-10-batches-py --out out/bank-cifar

Data: as for moco.py. Batch norms, lr, linear probe and views (if above 32 px) are those of moco.py --v1.
Published: 58.5 % linear on ImageNet, for a later model of the authors (closest: --queue-size 65536).

Departures from the paper and its released code: the loss is a softmax (as in the later model), not
noise-contrastive estimation. All images of a batch have the same negatives. Defaults are those for ImageNet.
"""
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))  # where kernels/ is
from kernels import gather_rows, own_rows, queue_loss
from kernels.training.errors import command, log
from kernels.training.flags import ScriptParser, at_least, fill_defaults, image_flags, ratio
from kernels.training.images import evaluation
from kernels.training.images.dataset import ImageDataset
from kernels.training.loop import all_reduce_gradients, set_lr, steps_per_epoch
from kernels.training.precision import loss_autocast
from kernels.training.run import Run
from moco import CROPS, augment, build_query_encoder, check_bn_splits, linear_probe, lr_factor

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = ScriptParser(__doc__)
    add = parser.add_argument
    image_flags(
        parser, "resnet-50", out="out/memory_bank", batch_size=(256, "256 (paper)"),
        epochs=(200, "200 (paper)"), probe_epochs=100, temperature=(0.07, "0.07 (paper)"),
        lr=(0.03, "0.03 (paper); it is always multiplied by batch / 256"),
        weight_decay=(None, "1e-4 (paper), or 5e-4 for views up to 32 px"))
    add("--queue-size", type=at_least(1, int), default=4096,
        help="K, number of stored negatives; default 4096 (paper)")
    add("--bank-momentum", type=ratio, default=0.5,
        help="m, weight of the old vector when a stored vector changes; default 0.5 (released code)")
    add("--bn-splits", type=at_least(1, int), default=8,
        help="number of parts of the global batch with separate batch-norm statistics; default 8 (MoCo)")
    parser.set_defaults(v1=True, head_layers=1, projection_dim=128)          # functions of moco.py read these
    return parser


# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """Load the images, and set --weight-decay if it was not given."""
    images = ImageDataset(args, CROPS)
    fill_defaults(args, dict(weight_decay=5e-4 if images.is_small else 1e-4))
    check_bn_splits(args)
    log("bank", images.describe())
    return images


def build_model(args, images, run):
    """Build the encoder with its projection head, and the bank: one random unit vector per image."""
    model, bank = build_query_encoder(args, images, run, len(images))
    model.register_buffer("bank", bank)
    return model.to(run.device, memory_format=torch.channels_last)


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def compute_loss(model, views, rows, args):
    """Return this rank's part of the loss, and the values to log. Update the bank.

    views   (n, 3, S, S) views of this rank's images
    rows    indices of the images in the batches of all ranks
    """
    bank, rows = model.bank, torch.tensor(rows, device=views.device)
    # The negatives are drawn uniformly, and may include an image's own vector (released code).
    drawn = torch.randint(len(bank), (args.queue_size,), device=views.device)
    if dist.is_initialized():
        dist.broadcast(drawn, 0)
    q, own = F.normalize(model(views), dim=1), rows[own_rows(len(rows))]
    with loss_autocast(q, args):
        mean = queue_loss(q, bank[own], bank[drawn], args.temperature, impl=args.impl)
    update_bank(bank, rows, gather_rows(q.detach(), len(rows)), args.bank_momentum)
    loss = mean * (len(q) / len(rows))
    return loss, {"loss": loss.detach()}


@torch.no_grad()
def update_bank(bank, rows, q, momentum):
    """Change the bank (M, D) in place. Row rows[i] becomes momentum · row + (1 − momentum) · q[i], scaled to
    length 1 (Wu et al. 2018, released code). rows: (n,), no index twice; q: (n, D) unit queries."""
    bank[rows] = F.normalize(torch.lerp(q.float(), bank[rows].float(), momentum), dim=1).to(bank.dtype)


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
    epoch = steps_per_epoch(len(images), args.batch_size, min_rows=args.batch_size)
    total = args.steps or args.epochs * epoch
    lr = args.lr * args.batch_size / 256
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=args.weight_decay)
    run.begin(model, optimizer, total, then=evaluation.probe_text(images, args))
    evaluation.evaluate_before(model, images, run)
    images.start_training_views(run, total, 0.2, 1)            # 0.2: smallest area of a crop (released code)
    model.train()
    for step, picked in run.steps(total, len(images), min_rows=args.batch_size):  # only full batches
        set_lr(optimizer, lr * lr_factor((step - 1) // epoch, total / epoch, args))
        views = augment(next(images.training_views), args)
        loss, values = compute_loss(model, views, picked, args)
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
