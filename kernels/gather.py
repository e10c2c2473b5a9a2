"""Rows of all processes for a loss of each one's own rows, with exact gradients.

Rank r has the rows z_r and L_r(z_r, K), its part of the global loss L = Σ_r L_r, against the rows
K = [z_0; z_1; ...] of all ranks: of a mean over all rows, loss * (own rows / rows). With

    all = gather_rows(z_r, rows);  loss_r = f(z_r, all);  loss_r.backward();  parameters' gradients, summed

the result is the gradient of L: a key's gradient is the sum of what all ranks want of it,

    dL/dz_r = ∂L_r/∂z_r + Σ_s (∂L_s/∂K)[rows of r]

the first part as autograd has it, the second a reduce-scatter of the (M, D) gradients of K. A rank stores K
and its gradient, O(M·D); similarity_lse with `offset` never stores its (N, M) similarities. A ring would hold
one rank's keys at a time instead of K, and send them forward twice and their gradients once, O(M·D) bytes as
here: it saves 8·M·D bytes a rank, 0.4 GB at M = 65,536 and D = 768, where the encoder's activations are in
the tens, and gives each kernel 1/world of the columns. So there is none.
"""
from numbers import Integral

import torch
import torch.distributed as dist

from .checks import check_dense, check_is_somewhere, told


def own_rows(rows, rank=None, world=None):
    """The slice of a batch of `rows` rows that is this process's, or that of `rank` of `world`.

    rows     integer ≥ 0; shares differ by one row at most
    """
    if not is_count(rows):
        wanted = "the number of rows of the whole batch: len(batch)"
        raise ValueError(f"rows: found {told(rows)}, wanted {wanted}")
    if rank is None and world is None:
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if not is_count(rank) or not is_count(world) or rank >= world:
        found = f"{told(rank)} and {told(world)}"
        raise ValueError(f"rank, world: found {found}, wanted 0 ≤ rank < world, or neither")
    return slice(rows * rank // world, rows * (rank + 1) // world)


def is_count(x):
    return isinstance(x, (Integral, torch.SymInt)) and not isinstance(x, bool) and x >= 0


def gather_rows(x, rows):
    """The rows of all ranks, in the order of ranks, with gradient; x itself where there is one process.

    x        (n, ...) this rank's rows, any type: n as own_rows(rows) has it
    rows     of the whole batch; shares differ by one row at most, and all send as many as the largest
    returns  (rows, ...). A loss of this rank's queries against it takes offset=own_rows(rows).start
    raises   ValueError where n is not this rank's share of rows. Ranks do not compare their n: where one
             alone raises, the others wait for it until torchrun or the group's time limit ends them
    """
    if not isinstance(x, torch.Tensor) or x.dim() == 0:
        found = "a tensor without dimensions" if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"x: found {found}, wanted a tensor of this process's rows, (n, ...)")
    check_dense("x", x)
    check_is_somewhere("x", x)
    if x.is_quantized:
        raise ValueError(f"x: found {x.dtype}, wanted no quantised tensor; call .dequantize()")
    own, world = own_rows(rows), dist.get_world_size() if dist.is_initialized() else 1
    if len(x) != own.stop - own.start:
        share = f"of {told(rows)} over {world} processes, {told(own.stop - own.start)} are this one's"
        wanted = "the rows of all processes, split by own_rows(rows)"
        raise ValueError(f"rows: {share}, x has {len(x)}; wanted {wanted}")
    if world == 1:
        return x
    shares = [own_rows(rows, rank, world) for rank in range(world)]
    gathered = GatherRows.apply(x, [share.stop - share.start for share in shares])
    if not torch.compiler.is_compiling():
        gathered.own_rows = own.start, own.stop                # check_gathered reads it
    return gathered


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shares):
        ctx.shares = shares
        parts = [x.new_empty(max(shares), *x.shape[1:]) for _ in shares]
        dist.all_gather(parts, as_long(x, max(shares)))
        return torch.cat([part[:share] for part, share in zip(parts, shares)])

    @staticmethod
    def backward(ctx, gradient):
        parts = [as_long(part, max(ctx.shares)) for part in gradient.split(ctx.shares)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts)
        return own[: ctx.shares[dist.get_rank()]], None


def as_long(x, rows):
    return x.contiguous() if len(x) == rows else torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])
