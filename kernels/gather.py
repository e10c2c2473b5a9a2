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
import torch
import torch.distributed as dist


def own_rows(rows, rank=None, world=None):
    """The slice of a batch of `rows` rows that is this process's, or that of `rank` of `world`.

    Shares differ by one row at most.
    """
    if rank is None:
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return slice(rows * rank // world, rows * (rank + 1) // world)


def gather_rows(x, rows):
    """The rows of all ranks, in the order of ranks, with gradient; x itself where there is one process.

    x        (n, ...) this rank's rows, any type: n as own_rows(rows) has it
    rows     of the whole batch; shares differ by one row at most, and all send as many as the largest
    returns  (rows, ...)
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        return x
    shares = [own_rows(rows, rank, world) for rank in range(world)]
    return GatherRows.apply(x, [share.stop - share.start for share in shares])


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
