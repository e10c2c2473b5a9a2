"""Building blocks of a training loop: batch order, learning rates, parameter groups, gradient all-reduce."""
import math

import torch
import torch.distributed as dist

from .errors import fail
from .ranks import world_size


def batches(rows, size, seed, step=0, min_rows=2):
    """Yield the row indices of the global batch (of all ranks) for each step after `step`, without end.

    The order depends only on the seed and the epoch, and not on the number of ranks.

    rows       number of rows, or a list of row indices
    min_rows   skip the last batch of an epoch, which may be short, if it has fewer rows than this
    """
    rows = range(rows) if isinstance(rows, int) else rows
    steps = steps_per_epoch(len(rows), size, min_rows)
    if not steps:
        fail(f"{len(rows):,} rows, expected at least a batch of {size}")
    epoch, done = divmod(step, steps)
    while True:
        generator = torch.Generator().manual_seed(seed + 1_000_003 * epoch)
        order = torch.randperm(len(rows), generator=generator)
        for batch in order.split(size)[done:steps]:
            yield [rows[i] for i in batch.tolist()]
        epoch, done = epoch + 1, 0


def steps_per_epoch(rows, size, min_rows=2):
    """Return the number of steps in an epoch. The arguments are those of batches(). Fail if the last batch
    has fewer rows than there are processes."""
    if min_rows <= rows % size < world_size():
        fail(f"the last batch of an epoch has {rows % size} of {rows:,} rows, fewer than the {world_size()} "
             "processes; choose another --batch-size")
    return rows // size + (rows % size >= min_rows)


def warmup_linear(step, total, warmup, lr):
    """Return the learning rate at `step`, counted from 0. The rate rises linearly from 0 to lr in `warmup`
    steps, then falls linearly to 0 at step `total`."""
    return lr * min(step / warmup if warmup else 1.0, (total - step) / max(1, total - warmup))


def warmup_cosine(step, total, warmup, lr):
    """Return the learning rate at `step`, counted from 0. The rate rises linearly from 0 to lr in `warmup`
    steps, then falls along a cosine to 0 at step `total`."""
    if step < warmup:
        return lr * step / warmup
    return lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def set_lr(optimizer, lr):
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def decay_groups(model, weight_decay):
    """Return two parameter groups for an optimizer: matrices, with weight decay; biases and norm weights,
    without weight decay. Frozen weights are in neither group."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return [dict(params=[weight for weight in weights if weight.dim() > 1], weight_decay=weight_decay),
            dict(params=[weight for weight in weights if weight.dim() <= 1], weight_decay=0.0)]


BUCKET_BYTES = 32 * 2**20                                      # approximate size of one all-reduce


def all_reduce_gradients(model):
    """Sum each weight's gradient over the ranks, because the global loss is the sum of the ranks' losses.

    A missing gradient counts as zeros. Gradients are joined into a few large buckets, summed concurrently.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    buckets, size = {}, {}
    for weight in (weight for weight in model.parameters() if weight.requires_grad):
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        dtype = weight.grad.dtype
        size[dtype] = size.get(dtype, 0) + weight.grad.nbytes
        buckets.setdefault((dtype, size[dtype] // BUCKET_BYTES), []).append(weight.grad)
    flat = [torch.cat([gradient.flatten() for gradient in bucket]) for bucket in buckets.values()]
    for work in [dist.all_reduce(bucket, async_op=True) for bucket in flat]:
        work.wait()
    for summed, bucket in zip(flat, buckets.values()):
        parts = summed.split([gradient.numel() for gradient in bucket])
        torch._foreach_copy_(bucket, [part.view_as(gradient) for part, gradient in zip(parts, bucket)])
