"""Test batch order, and what the ranks of a run exchange, by comparison with simple implementations.
tests/scripts/test_numbers.py tests the learning rates."""
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from kernels import RingRows, gather_rows, own_rows, ring_rows
from kernels.training import loop, precision
from kernels.training.loop import batches, steps_per_epoch
from running import run_ranks


def order(steps, skip=0, rows=23, seed=3, least=1):
    return list(itertools.islice(batches(rows, 4, seed, skip, least), steps))


def test_batches():
    """The order of rows depends only on the seed and the epoch. A resumed run continues the order after any
    step. An epoch of 23 rows has six steps, the last one with a short batch."""
    run, epochs = order(18), [order(6, skip) for skip in (0, 6, 12)]
    torch.rand(3)                                              # changes PyTorch's own generator
    assert run == sum(epochs, []) == order(18)
    for epoch in epochs:
        assert [len(batch) for batch in epoch] == [4, 4, 4, 4, 4, 3]
        assert sorted(sum(epoch, [])) == list(range(23))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] != order(6, seed=4)
    assert all(order(5, skip) == run[skip : skip + 5] for skip in range(13))
    assert order(18, rows=[*range(100, 123)]) == [[100 + i for i in batch] for batch in run]


@pytest.mark.parametrize("rows", [24, 25, 23])
@pytest.mark.parametrize("least", [1, 2, 3, 4])
def test_last_batch_with_too_few_rows_is_skipped(rows, least):
    steps = steps_per_epoch(rows, 4, least)
    sizes = [len(batch) for batch in order(steps + 1, rows=rows, least=least)]
    last = [rows % 4] if rows % 4 >= least else []
    assert sizes == [4] * (rows // 4) + last + [4]             # [4] is the first batch of the next epoch


# ── three ranks ──

BUCKETS = 64, 2**25                                            # bytes; 2**25 gives one bucket per dtype


def make_gradients(rank):
    """Return five weights with gradients. The second has a gradient only on rank 1. The last is frozen."""
    torch.manual_seed(rank)
    weights = torch.randn(3, 5), torch.randn(7), torch.randn(2, 2).double(), torch.randn(40), torch.randn(1)
    model = torch.nn.ParameterList(weights)
    model[4].requires_grad_(False)
    for i in (0, 1, 2, 3):
        model[i].grad = None if i == 1 and rank != 1 else torch.randn_like(model[i])
    model[0].grad = model[0].grad.T.contiguous().T            # strides as in a channels-last convolution
    return model


def sum_and_gather(rank, out):
    for bucket_bytes in BUCKETS:
        loop.BUCKET_BYTES, model = bucket_bytes, make_gradients(rank)
        loop.all_reduce_gradients(model)
        torch.save([weight.grad for weight in model], out / f"{rank} {bucket_bytes}")
    check_gathered_rows(rank)


def check_gathered_rows(rank):
    """Three ranks share 8 rows: 2, 3 and 3. Then ranks 0 and 2 share 5 rows, and rank 1 has 5 rows alone."""
    z, own = torch.eye(8), own_rows(8)
    keys, labels = gather_rows(z[own], 8), torch.arange(8, dtype=torch.int16) + 300
    assert torch.equal(keys, z) and torch.equal(gather_rows(labels[own], 8, dtype=torch.bfloat16), labels)
    x = (z[own] / 3).requires_grad_()                         # rows are sent as float16, gradients as float32
    gathered = gather_rows(x, 8, dtype=torch.float16)
    assert gathered.dtype == torch.float32 and torch.equal(gathered, (z / 3).half().float())
    (gathered * 1e-9).sum().backward()                         # 1e-9 would be 0 in float16
    torch.testing.assert_close(x.grad, torch.full_like(x, 3e-9))
    alone = [dist.new_group([i]) for i in range(dist.get_world_size())][rank]
    assert ring_rows(z, 8, group=alone) is z                   # a group of one process needs no ring
    args = SimpleNamespace(ring=True, precision="bf16")
    assert isinstance(precision.gather_keys(z[own], 8, args), RingRows)


def test_ranks_sum_gradients_and_gather_rows(tmp_path):
    """All ranks get the sums of the gradients, with many small buckets and with one bucket per dtype."""
    run_ranks(sum_and_gather, 3, tmp_path)
    gradients = [[weight.grad for weight in make_gradients(rank)] for rank in range(3)]
    expected = [sum(x for x in parts if x is not None) for parts in zip(*gradients)]
    for rank, bucket_bytes in itertools.product(range(3), BUCKETS):
        *found, frozen = torch.load(tmp_path / f"{rank} {bucket_bytes}")
        torch.testing.assert_close(found, expected[:4], rtol=1e-6, atol=1e-6)
        assert frozen is None
