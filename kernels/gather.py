"""Gather the rows of all processes, with exact gradients, when each process computes its part of the loss.

Rank r has the rows z_r and compares them with the rows K = [z_0; z_1; ...] of all ranks. This gives
L_r(z_r, K), the part of rank r in the global loss L = Σ_r L_r. If L is a mean over all rows, L_r is the mean
over the rows of rank r, times (number of rows of rank r / number of all rows). Each rank runs

    all = gather_rows(z_r, rows);  loss_r = f(z_r, all);  loss_r.backward()

The sum of the parameters' gradients over all ranks is then the gradient of L. The gradient of z_r is

    dL/dz_r = ∂L_r/∂z_r + Σ_s (∂L_s/∂K)[rows of r]        (sum over all ranks s)

Autograd computes the first term. The second is a reduce-scatter of the (M, D) gradients of K. Each rank
stores K and its gradient, O(M·D), but the fused losses store no large (N, M) matrix.
"""
from numbers import Integral

import torch
import torch.distributed as dist

from .checks import describe, refuse_second_derivative

# torch 2.13 has new names for these two functions, and warns about the old names
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def own_rows(rows, rank=None, world=None, *, group=None):
    """Return the slice of a batch of `rows` rows that belongs to this process, or to rank `rank` of `world`.

    rows     number of rows of the batch, an integer ≥ 0; the slices of two ranks differ by at most one row
    group    process group whose ranks share the batch; None: all processes
    """
    if not is_count(rows):
        expected = "the number of rows of the whole batch: len(batch)"
        raise ValueError(f"rows: found {describe(rows)}, expected {expected}")
    if rank is None and world is None:
        rank, world = rank_and_world(group)
    if not is_count(rank) or not is_count(world) or rank >= world:
        found = f"{describe(rank)} and {describe(world)}"
        raise ValueError(f"rank, world: found {found}, expected 0 ≤ rank < world, or None for both")
    return slice(rows * rank // world, rows * (rank + 1) // world)


def is_count(x):
    """Return whether x is an integer ≥ 0 (not True or False) or a symbolic integer of torch.compile."""
    return isinstance(x, (Integral, torch.SymInt)) and not isinstance(x, bool) and x >= 0


def rank_and_world(group=None):
    """Return (rank of this process in the group, number of processes of the group)."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def gather_rows(x, rows, *, group=None, dtype=None):
    """Return the rows of all ranks, in the order of the ranks, with gradient; with one process, return x.

    x        (n, ...) this rank's rows; n must be the length of the slice own_rows(rows, group=group). All
             ranks must pass the same dtype (this is not checked). int16 rows are sent as int32
    rows     number of rows of the whole batch
    group    process group whose ranks share the batch; None: all processes
    dtype    torch.float16 or torch.bfloat16: send float rows rounded to this dtype, which takes half the
             bytes of float32. Use this if the loss multiplies rows in this dtype anyway. The result and the
             gradients keep the dtype of x. None: send the dtype of x
    returns  (rows, ...) all rows. If a loss compares this rank's queries with them, pass
             offset=own_rows(rows, group=group).start to the loss
    raises   ValueError if n is not the length of this rank's slice. Ranks do not compare their n: if only one
             rank raises, the others wait until torchrun or the time limit of the process group ends them
    """
    if dtype not in (None, torch.float16, torch.bfloat16):
        raise ValueError(f"dtype: found {describe(dtype)}, expected torch.float16, torch.bfloat16 or None")
    shares, rank = check_share(x, rows, group)
    if len(shares) == 1:
        return x
    sent = dtype if dtype and x.is_floating_point() else x.dtype
    sent = torch.int32 if sent == torch.int16 else sent
    return GatherRows.apply(x, [share.stop - share.start for share in shares], rank, group, sent)


def check_share(x, rows, group):
    """Return (each process's slice of the rows, this process's rank). Raise ValueError if len(x) is wrong."""
    if not isinstance(x, torch.Tensor) or x.dim() == 0:
        found = "a tensor without dimensions" if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"x: found {found}, expected a tensor of this process's rows, (n, ...)")
    rank, world = rank_and_world(group)
    shares = [own_rows(rows, rank, world) for rank in range(world)]
    own = shares[rank]
    if rows < world:
        raise ValueError(f"rows: found {describe(rows)}, fewer than the {world} processes; expected a batch "
                         "with a row for each process")
    if len(x) != own.stop - own.start:
        found = f"{describe(rows)}, so rank {rank} of {world} needs {describe(own.stop - own.start)} rows"
        expected = "the number of rows of the whole batch, split over the processes by own_rows(rows)"
        raise ValueError(f"rows: found {found}, but x has {len(x)} rows; expected {expected}")
    return shares, rank


class GatherRows(torch.autograd.Function):
    """All-gather in forward, reduce-scatter in backward.

    shares  list with the number of rows of each rank

    Collectives need equal sizes. If the shares differ, smaller shares are padded with a zero row before they
    are sent. Forward then makes a copy without the padding; backward makes a padded copy of the gradients.
    """

    @staticmethod
    def forward(ctx, x, shares, rank, group, dtype):
        ctx.shares, ctx.rank, ctx.group = shares, rank, group
        sent = pad_rows(x.to(dtype), max(shares))
        gathered = sent.new_empty(len(shares) * max(shares), *x.shape[1:])
        ALL_GATHER(gathered, sent, group)
        if min(shares) < max(shares):
            parts = gathered.split(max(shares))
            gathered = cat_rows([part[:share] for part, share in zip(parts, shares)])
        return gathered.to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        refuse_second_derivative("gather_rows", "run one process")
        shares = ctx.shares
        if min(shares) < max(shares):
            gradient = cat_rows([pad_rows(part, max(shares)) for part in gradient.split(shares)])
        own = gradient.new_empty(max(shares), *gradient.shape[1:])
        REDUCE_SCATTER(own, gradient.contiguous(), group=ctx.group)
        return own[: shares[ctx.rank]], None, None, None, None


def pad_rows(x, count):
    """Return x, made contiguous and padded with zero rows to `count` rows."""
    return x.contiguous() if len(x) == count else cat_rows([x, x.new_zeros(count - len(x), *x.shape[1:])])


def cat_rows(parts):
    """Return torch.cat(parts), with autocast off: CPU autocast's cat accepts only one of the half types."""
    device_type = parts[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return torch.cat(parts)
    with torch.autocast(device_type, enabled=False):
        return torch.cat(parts)
