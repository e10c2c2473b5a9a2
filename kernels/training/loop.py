"""What the loop of a script is made of: order of batches, learning rates, products, gradients over ranks."""
import math

import torch
import torch.distributed as dist


def batches(rows, size, seed, step=0, least=1):
    """The row numbers of the global batch of each step after `step`, endlessly, in an order that depends on
    the seed and the epoch alone. An epoch's last batch is short, and left out where it has fewer than `least`
    rows. rows: how many, or their numbers."""
    rows = range(rows) if isinstance(rows, int) else rows
    epoch, done = divmod(step, steps := epoch_steps(len(rows), size, least))
    while True:
        generator = torch.Generator().manual_seed(seed + 1_000_003 * epoch)
        order = torch.randperm(len(rows), generator=generator)
        for batch in order.split(size)[done:steps]:
            yield [rows[i] for i in batch.tolist()]
        epoch, done = epoch + 1, 0


def epoch_steps(rows, size, least=1):
    """Steps of an epoch; see batches."""
    return rows // size + (rows % size >= least)


def warmup_linear(step, total, warmup, lr):
    """From 0 up to lr in `warmup` steps, then straight down to 0 at `total`; step counts from 0."""
    return lr * min(step / warmup if warmup else 1.0, (total - step) / max(1, total - warmup))


def warmup_cosine(step, total, warmup, lr):
    """From 0 up to lr in `warmup` steps, then half a cosine down to 0 at `total`; step counts from 0."""
    if step < warmup:
        return lr * step / warmup
    return lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def set_lr(optimizer, lr):
    """Sets the learning rate of all groups of weights."""
    for group in optimizer.param_groups:
        group["lr"] = lr


HALF = torch.float16  # of unit rows: an eighth of bfloat16's error, and a range that they do not leave


def half_products(x, args):
    """A context for losses on x's device: with --precision bf16 kernels multiply in HALF, and the gradients
    that they return stay float32.

    It is torch.autocast: layers, products that are written out and rows of any length belong outside.
    """
    return torch.autocast(x.device.type, HALF, enabled=args.precision == "bf16")


BUCKET = 32 * 2**20                                            # bytes of gradients that travel as one


def sum_gradients(model):
    """The sum over ranks of each weight's gradient: that of the global loss. A weight without one counts as
    zeros.

    In a few large buckets, all under way at once: for hundreds of small tensors it is the calls that cost.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    buckets, size = {}, {}
    for weight in (weight for weight in model.parameters() if weight.requires_grad):
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        kind = weight.grad.dtype
        size[kind] = size.get(kind, 0) + weight.grad.nbytes
        buckets.setdefault((kind, size[kind] // BUCKET), []).append(weight.grad)
    flat = [torch.cat([gradient.flatten() for gradient in bucket]) for bucket in buckets.values()]
    for work in [dist.all_reduce(bucket, async_op=True) for bucket in flat]:
        work.wait()
    for whole, bucket in zip(flat, buckets.values()):
        parts = whole.split([gradient.numel() for gradient in bucket])
        torch._foreach_copy_(bucket, [part.view_as(gradient) for part, gradient in zip(parts, bucket)])
