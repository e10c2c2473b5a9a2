"""Mistakes that users of other libraries report for contrastive losses on several processes, one test each.

Three processes have 2, 2 and 3 of 7 rows. One process with the textbook formulas gives the expected numbers.
Related tests: gradients of all losses and scripts on several processes (tests/contract), wrappers of PyTorch
(test_distributed_docs.py), and random states of all ranks after --resume (tests/training/test_run.py).
"""
import functools
import os
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from kernels import (
    embed_in_chunks,
    gather,
    gather_rows,
    info_nce,
    nt_xent,
    own_rows,
    queue_loss,
    sup_con_loss,
)
from kernels.training.loop import all_reduce_gradients
from running import fork_context, free_port
from simcse import simcse_loss

ROWS, RANKS = 7, 3
LABELS = torch.tensor([0, 1, 0, 2, 1, 0, 2])


def views(count=2):
    """Return random rows (7, 5) of each view, float64, the same on each rank."""
    numbers = torch.Generator().manual_seed(3)
    return torch.randn(count, ROWS, 5, generator=numbers, dtype=torch.float64)


class Encoder(torch.nn.Module):
    """Two layers with dropout, and a learned temperature."""
    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(5)
        layers = [torch.nn.Linear(5, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 4)]
        self.layers = torch.nn.Sequential(*layers).double()
        self.log_tau = torch.nn.Parameter(torch.tensor(-1.0, dtype=torch.float64))

    def forward(self, x):
        return self.layers(x)


def own_views(count=2):
    """Return this rank's rows of the views, and the argument offset."""
    own = own_rows(ROWS)
    return views(count)[:, own], own.start


def part(loss):
    """Return this rank's part of a mean over rows."""
    own = own_rows(ROWS)
    return loss * (own.stop - own.start) / ROWS


def summed_gradients(loss, parameters):
    """Return the gradients of all ranks' parts, summed."""
    gradients = torch.autograd.grad(loss, parameters)
    if dist.is_initialized():
        for gradient in gradients:
            dist.all_reduce(gradient)
    return gradients


# ── what each rank computes; in one process, the expected numbers ───────────────────────────────────────────


def in_batch(encoder, impl):
    """One step of in-batch negatives with a learned temperature."""
    (x1, x2), offset = own_views()
    keys = gather_rows(encoder(x2), ROWS)
    loss = info_nce(encoder(x1), keys, encoder.log_tau.exp(), offset=offset, normalize=True, impl=impl)
    return summed_gradients(part(loss), list(encoder.parameters()))


def keys_only(encoder, impl):
    """The gradient of the keys alone, which comes from all ranks."""
    (x1, x2), offset = own_views()
    with torch.no_grad():
        queries = encoder(x1)
    loss = info_nce(queries, gather_rows(encoder(x2), ROWS), 0.3, offset=offset, normalize=True, impl=impl)
    return summed_gradients(part(loss), list(encoder.layers.parameters()))


def hard_negatives(encoder, impl):
    """Positives and two hard negatives per row are gathered separately."""
    (x1, *others), offset = own_views(4)
    z2, *hard = (gather_rows(encoder(x), ROWS) for x in others)
    loss = simcse_loss(encoder(x1), z2, torch.stack(hard, 1), 0.1, 0.4, offset=offset, impl=impl)
    return summed_gradients(part(loss), list(encoder.layers.parameters()))


def supervised(encoder, impl):
    (x1, x2), offset = own_views()
    z, labels = torch.stack([encoder(x1), encoder(x2)], 1), LABELS[own_rows(ROWS)]
    gathered = gather_rows(z, ROWS), gather_rows(labels, ROWS)
    loss = sup_con_loss(z, labels, 0.2, gathered=gathered, offset=offset, normalize=True, impl=impl)
    return summed_gradients(part(loss), list(encoder.layers.parameters()))


def transposed_use(encoder, impl):
    """The gradient that reaches the gather is transposed, and then expanded: both are not contiguous."""
    (x1, _), _ = own_views()
    gathered = gather_rows(encoder(x1), ROWS)
    weight = torch.arange(4 * ROWS, dtype=torch.float64).view(4, ROWS)
    loss = (gathered.T * weight).sum() + gathered.sum()
    return summed_gradients(loss / max(1, dist.get_world_size() if dist.is_initialized() else 1),
                            list(encoder.layers.parameters()))


def with_queue(encoder, impl):
    """Two steps with a queue of 10 keys; all ranks enqueue the gathered keys. Returns gradients and queue."""
    queue, found = F.normalize(views(4).flatten(0, 1)[:10, :4], dim=1), []
    for _ in range(2):
        (x1, x2), _ = own_views()
        with torch.no_grad():
            keys = F.normalize(encoder(x2), dim=1)
        loss = queue_loss(F.normalize(encoder(x1), dim=1), keys, queue, 0.2, impl=impl)
        found += summed_gradients(part(loss), list(encoder.layers.parameters()))
        queue = torch.cat([gather_rows(keys, ROWS), queue])[:10]
    return [*found, queue]


CASES = dict(in_batch=in_batch, keys_only=keys_only, hard_negatives=hard_negatives, supervised=supervised,
             transposed_use=transposed_use, with_queue=with_queue)


def count_collectives(size):
    """Return the numbers of (gathers, reduce-scatters, other calls) of one step in chunks of `size` rows."""
    encoder, calls = Encoder(), []
    real = gather.ALL_GATHER, gather.REDUCE_SCATTER

    def counted(name, f, *arguments, **named):
        calls.append(name)
        return f(*arguments, **named)

    gather.ALL_GATHER = functools.partial(counted, "gather", real[0])
    gather.REDUCE_SCATTER = functools.partial(counted, "reduce-scatter", real[1])
    (x1, x2), offset = own_views()
    z = embed_in_chunks(encoder, torch.cat([x1, x2]).split(size), encoder)
    z1, z2 = z.chunk(2)
    nt_xent(z1, z2, gathered=gather_rows(torch.stack([z1, z2], 1), ROWS).unbind(1), offset=offset).backward()
    gather.ALL_GATHER, gather.REDUCE_SCATTER = real
    return sorted(calls)


def frozen_in_last_chunk():
    """Return summed gradients if each rank's last chunk needs no gradient."""
    encoder = Encoder()
    (x1, x2), offset = own_views()
    chunks = torch.cat([x1, x2]).split(1)
    frozen = [len(chunks) - 1]

    def embed(numbered):
        z = encoder(numbered[1])
        return z.detach() if numbered[0] in frozen else z

    z1, z2 = embed_in_chunks(embed, list(enumerate(chunks)), encoder).chunk(2)
    loss = info_nce(z1, gather_rows(z2, ROWS), 0.3, offset=offset, normalize=True)
    part(loss).backward()
    all_reduce_gradients(encoder)
    return [weight.grad for weight in encoder.layers.parameters()]


def one_rank(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    found = {name: case(Encoder(), "blockwise") for name, case in CASES.items()}
    found["collectives"] = [count_collectives(size) for size in (1, 2, 20)]
    found["frozen"] = frozen_in_last_chunk()
    torch.save(found, folder / str(rank))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return the results of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    fork_context()
    torch.multiprocessing.start_processes(one_rank, (free_port(), folder), RANKS, start_method="forkserver")
    return [torch.load(folder / str(rank)) for rank in range(RANKS)]


def assert_equal_to_one_process(name, ranks):
    for found in (rank[name] for rank in ranks):
        for a, b in zip(found, CASES[name](Encoder(), "eager"), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


# ── gathering ───────────────────────────────────────────────────────────────────────────────────────────────


def test_gathered_keys_keep_the_gradients_of_other_ranks(ranks):
    """Elsewhere: torch.distributed.all_gather returns tensors without gradient, so a key learns only from
    the queries of its own rank."""
    assert_equal_to_one_process("keys_only", ranks)


def test_gradients_have_no_factor_of_the_number_of_ranks(ranks):
    """Elsewhere: gradients are 1/W or W times those of one process, because a mean over ranks and a sum in
    the gather's backward do not fit together. The split is uneven: 2, 2 and 3 rows."""
    assert_equal_to_one_process("in_batch", ranks)


def test_learned_temperature_gets_the_gradient_of_all_ranks(ranks):
    """Elsewhere: each rank updates the temperature with the gradient of its rows, and ranks drift apart."""
    log_tau = [rank["in_batch"][0] for rank in ranks]
    assert log_tau[0].shape == () and log_tau[0] == log_tau[1] == log_tau[2]
    torch.testing.assert_close(log_tau[0], CASES["in_batch"](Encoder(), "eager")[0])


def test_columns_do_not_interleave(ranks):
    """Elsewhere: positives and hard negatives are stacked before the gather. Then the columns are positives
    and negatives of rank 0, followed by those of rank 1, and labels point to wrong columns."""
    assert_equal_to_one_process("hard_negatives", ranks)


def test_labels_are_those_of_the_gathered_rows(ranks):
    """Elsewhere: row i of rank 1 is compared with column i, the positive of rank 0."""
    assert_equal_to_one_process("supervised", ranks)


def test_a_missing_offset_is_an_error():
    """Elsewhere: without an offset the loss is finite and wrong. Here gathered rows know where they start."""
    z = torch.randn(ROWS, 4)
    z.own_rows = 2, 4                                          # as gather_rows marks its result on rank 1
    for call in (lambda: info_nce(z[2:4], z), lambda: nt_xent(z[2:4], z[2:4], gathered=(z, z))):
        with pytest.raises(ValueError, match=r"offset: 0, but .* expected offset=own_rows\(7\)\.start"):
            call()
    with pytest.raises(ValueError, match=r"offset: 1, but .* start at 2; expected offset=own_rows\(7\)"):
        info_nce(z[2:4], z, offset=1)
    texts, images = torch.randn(2, 4), torch.randn(2, 4)
    both = [torch.cat([x, x]) for x in (texts, images)]
    for x, rows in zip((texts, images), both):
        rows.gathered_from = weakref.ref(x)
    with pytest.raises(ValueError, match=r"gathered: found \(k, q\), expected \(q, k\)"):
        info_nce(images, texts, symmetric=True, gathered=both)
    with pytest.raises(ValueError, match=r"gathered: found \(z2, z1\), expected \(z1, z2\)"):
        nt_xent(images, texts, gathered=both)
    pairs = torch.stack([z, z], 1)
    with pytest.raises(ValueError, match="labels: not equal to the gathered labels"):
        sup_con_loss(pairs[1:3], LABELS[1:3], gathered=(pairs, LABELS))


def test_gradients_of_any_layout_reach_all_ranks(ranks):
    """Elsewhere: a collective gets a gradient that is not contiguous, and fails or sends wrong numbers."""
    assert_equal_to_one_process("transposed_use", ranks)


def test_all_ranks_have_the_same_queue(ranks):
    """Elsewhere: each rank enqueues its own keys, so that a queue for the whole batch has the keys of one
    rank only, and ranks have different negatives."""
    assert_equal_to_one_process("with_queue", ranks)
    assert all(torch.equal(rank["with_queue"][-1], ranks[0]["with_queue"][-1]) for rank in ranks)


# ── gradient caching ────────────────────────────────────────────────────────────────────────────────────────


def test_chunks_do_not_communicate(ranks):
    """Elsewhere: gradient caching gathers in each chunk and for each column."""
    assert all(rank["collectives"] == [["gather", "reduce-scatter"]] * 3 for rank in ranks)


def test_frozen_chunks_do_not_hang(ranks):
    """Elsewhere: gradients are summed when the last chunk's backward pass ends. If that chunk has no gradient
    on one rank, the other ranks wait forever. Here all ranks sum after backward."""
    assert all(torch.equal(a, b) for rank in ranks for a, b in zip(rank["frozen"], ranks[0]["frozen"]))
    assert any(gradient.any() for gradient in ranks[0]["frozen"])


def test_inputs_changed_in_place_are_an_error():
    """Elsewhere: the second pass embeds what the first pass, or code between the passes, has left of the
    inputs, and gradients are silently wrong."""
    encoder, x = Encoder(), views()[0]
    chunks = [{"x": part} for part in x.split(4)]
    z = embed_in_chunks(lambda chunk: encoder(chunk["x"].mul_(2)), chunks, encoder)
    with pytest.raises(RuntimeError, match="a chunk, a parameter or the training mode .* has changed"):
        z.sum().backward()
    batch = [(part.clone(), None) for part in x.split(4)]
    z = embed_in_chunks(lambda chunk: encoder(chunk[0]), batch, encoder)
    batch[1][0].zero_()                                        # a data loader that reuses its buffers
    with pytest.raises(RuntimeError, match="a chunk, a parameter or the training mode .* has changed"):
        z.sum().backward()
