"""Pass the keys of all processes round a ring. So no process stores all keys, in contrast to gather_rows.

The keys of a process are one block. In each of W hops (W processes), a process compares its queries with the
block that it holds. Meanwhile it sends this block to the next process, and receives one from the previous.

    forward    max_i and sum_i of row i (see blockwise.py) are computed per block, then merged over all blocks
    backward   The blocks travel once more. Since max_i and sum_i are known for all keys, the terms of a block
               in dq_i and dk_j do not depend on other blocks. dk_j travels with its block, and each process
               adds its terms to dk_j. After the last hop, dk_j is on the process that has key j.
"""
import dataclasses
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .blockwise import gradient_of_temperature, merge_stats, new_stats, rows_of, subtract_positives
from .eager import cast
from .fused import TwoPasses
from .gather import cat_rows, check_share
from .masks import positive_columns


@dataclasses.dataclass(eq=False)
class RingRows:
    """The result of ring_rows. It represents the rows of all processes, but has only this process's rows."""
    own: torch.Tensor        # (n, ..., D) rows of this process, with gradient
    shares: list             # one slice per process: its rows in the batch of all processes
    rank: int                # number of this process in the group
    group: object = None     # process group; None: all processes
    views: int = 1           # each index in a slice stands for 1 row, or for 2 rows after cat_views

    def __post_init__(self):
        self.shape = (self.views * self.shares[-1].stop, *self.own.shape[1:])
        self.dtype, self.device, self.ndim = self.own.dtype, self.own.device, self.own.ndim

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, rows):
        if isinstance(rows, tuple) and rows[0] == slice(None):     # an index such as [:, None] keeps all rows
            return dataclasses.replace(self, own=self.own[rows])
        if rows != self.shares[self.rank]:
            raise ValueError(f"ring_rows: found {rows}, expected this process's {self.shares[self.rank]}")
        return self.own

    def unbind(self, dim):                                 # this works as Tensor.unbind, but only for dim > 0
        return [dataclasses.replace(self, own=own) for own in self.own.unbind(dim)]


def ring_rows(x, rows, *, group=None):
    """Return an object that represents the rows of all processes; with one process, return x.

    Pass it to a loss in place of gather_rows(x, rows): as the keys of similarity_lse, info_nce and
    sigmoid_loss, or in the argument `gathered` of info_nce, clip_loss and nt_xent. The loss and its gradients
    equal those with gather_rows, up to rounding. impl="eager" and similar=... raise; "auto" is never "eager".

    x, rows, group  as in gather_rows; x (n, ..., D) needs a gradient on all ranks or on none (not checked)
    returns  RingRows of shape (rows, ..., D). Indexed with own_rows(rows, group=group), it returns x. As with
             gather_rows, pass offset=own_rows(rows, group=group).start to the loss
    raises   as gather_rows. All ranks must run the loss and its backward pass. A rank that waits for another
             rank fails at the timeout of the process group or, with gloo, as soon as the other rank has ended
    memory   a loss stores inputs, gradients (in the dtype of sums), the buffers of similarity_lse, and arrays
             of the size of this process's rows: three in the dtype of products, three in the dtype of sums
    source   Cheng et al. 2024 (Inf-CL), arXiv 2410.17243, section 3.2
    """
    shares, rank = check_share(x, rows, group)
    return x if len(shares) == 1 else RingRows(x, shares, rank, group)


def cat_views(z1, z2):
    """Return the first views, then the second views, of two tensors or of two RingRows."""
    if isinstance(z1, RingRows):
        return dataclasses.replace(z1, own=cat_rows([z1.own, z2.own]), views=2)
    return cat_rows([z1, z2])


def exchange(ring, x, hop):
    """Start to send x to the next process. Return a function that waits for the previous process's x, and
    returns it. hop: the sent x belongs to the block of the process `hop` places before this process."""
    world, group = len(ring.shares), ring.group or dist.group.WORLD
    share = ring.shares[(ring.rank - hop - 1) % world]
    received = x.new_empty(ring.views * (share.stop - share.start), *x.shape[1:])
    after, before = (dist.get_global_rank(group, (ring.rank + step) % world) for step in (1, -1))
    operations = [dist.P2POp(dist.isend, x, after, group), dist.P2POp(dist.irecv, received, before, group)]
    requests = dist.batch_isend_irecv(operations)
    def wait():
        for request in requests:
            request.wait()
        return operations[1].tensor             # operations keeps x alive as long as the function wait exists
    return wait


def blocks(call):
    """Yield (hop, call for one block of keys), the own block first. The next block arrives meanwhile."""
    ring, block, world = call.ring, cast(call.k, call.product_dtype).contiguous(), len(call.ring.shares)
    for hop in range(world):
        wait = exchange(ring, block, hop) if hop < world - 1 else None
        share = ring.shares[(ring.rank - hop) % world]
        yield hop, call._replace(k=block, mask=mask_of_block(call.mask, len(call.q) // ring.views, share))
        block = wait() if wait else None
        del wait                                               # this also frees the block that was sent


def mask_of_block(mask, count, share):
    """Return the part of a mask for the keys of a slice. count: number of queries (nt_xent: of samples)."""
    excludes = share.start < mask.offset + count and mask.offset < share.stop
    ids, groups = (x if x is None else x[share] for x in (mask.column_ids, mask.column_groups))
    return mask._replace(exclude=mask.exclude if excludes else "none", column_ids=ids, column_groups=groups,
                         offset=mask.offset - share.start)


def sum_over_blocks(call, needs, gradients_of, targets=None, dlse=None):
    """Return (dq, dk, dτ, ...). dk: gradient of all processes' losses with respect to this process's keys.

    gradients_of  function (call of a block, needs, sums over earlier blocks or None) that returns the block's
                  gradients (None for dτ), or adds these to the sums and returns the sums
    targets       (N,) from own_positives: also subtract the terms of the positives, with dlse (N,); or None
    """
    sums, of_block = None, (needs[0] or needs[2], needs[1], False, *needs[3:])
    for hop, block in blocks(call._replace(q=cast(call.q, call.temperature.dtype))):
        terms = gradients_of(block, of_block, sums)        # q has the dtype of sums, so terms are not rounded
        sums = list(terms) if sums is None else [
            total if term is None or term is total else total.add_(term) for total, term in zip(sums, terms)]
        del block, terms                                       # free them before more memory is needed
        if needs[1]:
            sums[1] = exchange(call.ring, sums[1], hop)()
    (q, k), (dq, dk, _, *rest) = rows_of(call), sums
    if targets is not None:
        subtract_positives(dq, dk, q, k, targets, dlse / call.temperature)
    return dq, dk, gradient_of_temperature(call, q, dq, needs), *rest


# ── operations of a call with a ring ────────────────────────────────────────────────────────────────────────


@torch.compiler.disable
def similarity_lse(call, targets=None):
    """Return the log-sum-exp of each row (N,) or, with targets from own_positives, the mean loss."""
    return TwoPasses.apply(*call[:3], call, lambda call: lse_forward(call, targets), lse_backward)


def softmax_loss(call, both=False):
    """Return the mean over rows of softplus(lse_i − q_i·k_p/τ). Row i's positive p is a key of this rank."""
    return similarity_lse(call, own_positives(call))


def lse_forward(call, targets):
    """Return (log-sum-exp (N,) or loss, and for lse_backward: targets, dloss_dlse, stats, ...)."""
    is_triton = call.impl == "triton"                          # Triton's statistics are in log2 units
    exp, log, unit = (torch.exp2, torch.log2, math.log(2)) if is_triton else (torch.exp, torch.log, 1)
    stats = new_stats(call.q.new_empty(len(call.q), dtype=call.temperature.dtype))
    for _, block in blocks(call):                    # rest holds Triton's COMMON_M, which is always None here
        _, (maximum, total), *rest = block.compute.similarity_lse(block)
        maximum = maximum.where(total != 0, stats[0])  # total is 0 if the mask excludes all keys of the block
        merge_stats(stats, maximum, total, exp)
        del block
    lse = (stats[0] + log(stats[1])) * unit
    if targets is None:
        return lse, None, None, stats, *rest
    q, k = rows_of(call)
    gap = lse - (q * k[targets]).sum(1) / call.temperature
    return F.softplus(gap, threshold=40).mean(), targets, gap.sigmoid() / len(gap), stats, *rest


def lse_backward(call, grad, targets, dloss_dlse, stats, *rest):
    """Return (dq, dk, dτ). stats (2, N) are over all keys; the last element of rest is `needs`."""
    dlse = grad if targets is None else grad * dloss_dlse
    def gradients_of(block, needs, sums):
        in_place = [sums[:2]] if sums and call.impl == "blockwise" else []
        return block.compute.similarity_lse_backward(block, dlse, stats, *rest[:-1], needs, *in_place)
    return sum_over_blocks(call, rest[-1], gradients_of, targets, dlse)


@torch.compiler.disable
def sigmoid_loss(call, bias):
    """Return 1/N Σ_ij softplus(∓(q_i·k_j/τ + bias)): − for positives (keys of this rank), else +."""
    own_positives(call)                  # this raises ValueError if the positives are not this process's keys
    def forward(call):
        losses = (block.compute.sigmoid_loss(block, bias, [False] * 4)[0] for _, block in blocks(call))
        return sum(losses), bias                               # backward needs bias
    return TwoPasses.apply(*call[:3], call, forward, sigmoid_backward, bias)


def sigmoid_backward(call, grad, bias, needs):
    """Return (dq, dk, dτ, dbias)."""
    def gradients_of(block, needs, sums):
        in_place = [sums[:2]] if sums and call.impl == "blockwise" else []
        return block.compute.sigmoid_loss(block, bias, needs, grad, *in_place)[1:]
    return sum_over_blocks(call, needs, gradients_of)


def own_positives(call):
    """Return (N,): index of each query's positive in this process's keys. ValueError if it is not there."""
    first = call.ring.shares[call.ring.rank].start
    if len(call.q) != len(call.k) or call.mask.offset != first:
        raise ValueError(f"offset: found {call.mask.offset} for {len(call.q)} queries, expected {first} for "
                         f"{len(call.k)} queries: the positives must be the rows given to ring_rows")
    return positive_columns(call.mask._replace(offset=0), len(call.q), len(call.k), call.q.device)
