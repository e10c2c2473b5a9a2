"""Batch order, learning rates, an optimizer and gradient all-reduce, compared with simple implementations."""
import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from kernels import check_rows, gather_rows, info_nce, own_rows, sigmoid_loss, similarity_lse
from kernels.training import loop
from kernels.training.errors import UserError
from kernels.training.loop import all_reduce_gradients, batches, steps_per_epoch, warmup_cosine, warmup_linear
from running import equal, free_port


def order(steps, skip=0, rows=23, seed=3, least=1):
    return list(itertools.islice(batches(rows, 4, seed, skip, least), steps))


def test_batches():
    """An epoch of 23 rows has six steps, the last one with a short batch."""
    run, epochs = order(18), [order(6, skip) for skip in (0, 6, 12)]
    assert run == sum(epochs, []) == order(18)        # independent of torch's global generator
    for epoch in epochs:
        assert [len(batch) for batch in epoch] == [4, 4, 4, 4, 4, 3]
        assert sorted(sum(epoch, [])) == list(range(23))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] != order(6, seed=4)
    assert all(order(5, skip) == run[skip : skip + 5] for skip in range(13))
    assert order(18, rows=[*range(100, 123)]) == [[100 + i for i in batch] for batch in run]


def test_steps_do_not_depend_on_the_number_of_ranks(monkeypatch):
    """67 rows in batches of 33: two steps on any number of ranks, none with a single row."""
    for ranks in "123":
        monkeypatch.setenv("WORLD_SIZE", ranks)
        found = [*itertools.islice(batches(67, 33, 5), 3)]
        assert [len(batch) for batch in found] == [33, 33, 33] and steps_per_epoch(67, 33) == 2
    with pytest.raises(UserError, match="the last batch of an epoch has 2 of 68 rows, fewer than the 3 .*"):
        steps_per_epoch(68, 33)


@pytest.mark.parametrize("rows", [24, 25, 23])
@pytest.mark.parametrize("least", [1, 2, 3, 4])
def test_last_batch_with_too_few_rows_is_skipped(rows, least):
    """The shares of the ranks differ by at most one row."""
    steps = steps_per_epoch(rows, 4, least)
    epoch = order(steps + 1, rows=rows, least=least)
    last = [rows % 4] if rows % 4 >= least else []
    assert [len(batch) for batch in epoch[:steps]] == [4] * (rows // 4) + last
    assert len(epoch[steps]) == 4                              # first batch of the next epoch
    shares = [[batch[own_rows(len(batch), rank, least)] for rank in range(least)] for batch in epoch]
    assert [sum(share, []) for share in shares] == epoch
    for sizes in ([len(part) for part in share] for share in shares):
        assert max(sizes) - min(sizes) <= 1 and min(sizes) > 0


@pytest.mark.parametrize("ours, theirs", [(warmup_linear, get_linear_schedule_with_warmup),
                                          (warmup_cosine, get_cosine_schedule_with_warmup)])
@pytest.mark.parametrize("total, warmup", [(20, 2), (1079, 108), (1, 1), (5, 0)])
def test_schedules_equal_those_of_transformers(ours, theirs, total, warmup):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2.0)
    schedule = theirs(optimizer, warmup, total)
    for step in range(total):
        assert ours(step, total, warmup, 2.0) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        schedule.step()


def small_model():
    """Return a model in float64 with matrices, biases, a norm, and a frozen last layer."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(5, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3), torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(*layers).double()
    model[3].requires_grad_(False)
    return model


def set_gradients(model, step):
    """Give random gradients, which depend on the step, to the first four weights; the next two have none."""
    generator = torch.Generator().manual_seed(step)
    for weight in [*model.parameters()][:4]:
        weight.grad = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight.dtype)


def test_uncorrected_adamw_matches_the_formula():
    model, lr, eps, decay = small_model(), 0.01, 1e-6, 0.1
    optimizer = loop.UncorrectedAdamW(loop.decay_groups(model, decay), lr, eps)
    expected = [weight.detach().clone() for weight in model.parameters()]
    m, v = ([torch.zeros_like(weight) for weight in expected] for _ in range(2))
    for step in range(4):
        set_gradients(model, step)
        optimizer.step()
        for i, weight in enumerate([*model.parameters()][:4]):
            m[i] = 0.9 * m[i] + 0.1 * weight.grad
            v[i] = 0.999 * v[i] + 0.001 * weight.grad**2
            kept = 1 - lr * decay if weight.dim() > 1 else 1
            expected[i] = kept * expected[i] - lr * m[i] / (v[i].sqrt() + eps)
    found = [weight.detach() for weight in model.parameters()]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]        # not the frozen ones


def test_uncorrected_adamw_resumes():
    """Two steps, load_state_dict in another optimizer, and two steps give the bits of four steps."""
    straight, resumed = small_model().float(), small_model().float()
    whole, first = (loop.UncorrectedAdamW(loop.decay_groups(x, 0.1), 0.01) for x in (straight, resumed))
    second = loop.UncorrectedAdamW(loop.decay_groups(resumed, 0.0), 1.0)       # other values are replaced
    for step in range(4):
        if step == 2:
            second.load_state_dict(copy.deepcopy(first.state_dict()))
        for model, optimizer in ((straight, whole), (resumed, first if step < 2 else second)):
            set_gradients(model, step)
            optimizer.step()
    assert equal(straight.state_dict(), resumed.state_dict())


def rank_main(rank, world_size, port, bucket_bytes, out):
    loop.BUCKET_BYTES = bucket_bytes
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    model = make_gradients(rank)
    all_reduce_gradients(model)
    check_gather_rows(rank)
    if rank == 0:
        torch.save([weight.grad for weight in model], out)
    dist.destroy_process_group()


def check_gather_rows(rank):
    """Check gather_rows, and errors about a missing offset; three ranks have 2, 3 and 3 of 8 rows."""
    z, own = torch.eye(8), own_rows(8)
    with pytest.raises(ValueError, match="rows: found 2, fewer than the 3 processes"):
        gather_rows(z[own], 2)
    for wrong in (5, 12):
        with pytest.raises(ValueError, match=f"rows: found {wrong}, of which .* has ., but x has [23]; "):
            gather_rows(z[own], wrong)
    keys = gather_rows(z[own], 8)
    assert torch.equal(keys, z)
    labels = torch.arange(8, dtype=torch.int16)
    assert torch.equal(gather_rows(labels[own], 8), labels)

    def only_check(q, k, **offset):                            # no loss, only its check of the offset
        check_rows(*offset.values(), q=(q, "N D"), k=(k, "M D"))

    def lse_without_diagonal(q, k, **offset):
        similarity_lse(q, k, exclude="diagonal", **offset)

    for loss in (info_nce, sigmoid_loss, lse_without_diagonal, only_check):
        loss(z[own], keys, offset=own.start)
        loss(z, keys)                                          # every rank may compute the whole loss
        if rank:
            with pytest.raises(ValueError, match=rf"k has .* start at {own.start}; .*own_rows\(8\)\.start"):
                loss(z[own], keys)
    similarity_lse(z[own], keys)                               # without exclude it needs no offset
    halves = z[own].half().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):                # the other half type
        gather_rows(halves, 8).sum().backward()
    assert torch.equal(halves.grad, torch.full_like(halves, dist.get_world_size()))
    check_groups(rank)
    check_half_rows(z / 3, own)


def check_groups(rank):
    """Ranks 0 and 2 share five rows, and rank 1 has five rows alone; gradients are sums over the group."""
    groups, ranks = [dist.new_group(ranks) for ranks in ([0, 2], [1])], [[0, 2], [1]]
    for group, members in zip(groups, ranks):
        if rank not in members:
            for call in (lambda: own_rows(5, group=group), lambda: gather_rows(torch.eye(5), 5, group=group)):
                with pytest.raises(ValueError, match="group: this process is not part of it; expected"):
                    call()
            continue
        own = own_rows(5, group=group)
        assert own == own_rows(5, members.index(rank), len(members))
        x = torch.arange(5.0)[own, None].requires_grad_()
        gathered = gather_rows(x, 5, group=group)
        assert torch.equal(gathered[:, 0], torch.arange(5.0))
        (gathered * (rank + 1)).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, sum(members) + len(members)))


def check_half_rows(z, own):
    """Rows are sent as float16; the result and the gradient are float32, and the gradient is not rounded."""
    x = z[own].clone().requires_grad_()
    gathered = gather_rows(x, 8, dtype=torch.float16)
    assert gathered.dtype == torch.float32 and torch.equal(gathered, z.half().float())
    (gathered * 1e-9).sum().backward()                         # would be 0 in float16
    torch.testing.assert_close(x.grad, torch.full_like(x, 3e-9))


def make_gradients(rank):
    """Return weights with gradients. The second has a gradient on rank 1 only; the last is frozen."""
    torch.manual_seed(rank)
    weights = torch.randn(3, 5), torch.randn(7), torch.randn(2, 2).double(), torch.randn(40), torch.randn(1)
    model = torch.nn.ParameterList(weights)
    model[4].requires_grad_(False)
    for i in (0, 1, 2, 3):
        model[i].grad = None if i == 1 and rank != 1 else torch.randn_like(model[i])
    model[0].grad = model[0].grad.T.contiguous().T            # strides as in a channels-last convolution
    return model


@pytest.mark.parametrize("bucket_bytes", [64, 2**25])
def test_gradients_are_summed_over_ranks(bucket_bytes, tmp_path):
    """The sums are right with many small buckets and with one bucket per dtype."""
    arguments = 3, free_port(), bucket_bytes, tmp_path / "sum"
    torch.multiprocessing.start_processes(rank_main, arguments, 3, start_method="forkserver")
    ranks = [make_gradients(rank) for rank in range(3)]
    for i, found in enumerate(torch.load(tmp_path / "sum")):
        parts = [rank[i].grad for rank in ranks if rank[i].grad is not None]
        assert (found is None) == (i == 4)
        if parts:
            torch.testing.assert_close(found, sum(parts), rtol=1e-6, atol=1e-6)
