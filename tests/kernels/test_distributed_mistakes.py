"""Mistakes that users of other libraries report for several processes and for gradient caching.

tests/contract checks that the losses and gradients of several processes are those of one process, and
test_checks.py that a missing offset is an error. Here three processes have 2, 2 and 3 of 7 rows.
"""
import functools
import os

import pytest
import torch
import torch.distributed as dist

from kernels import embed_in_chunks, gather, gather_rows, nt_xent, own_rows
from kernels.training.loop import all_reduce_gradients
from running import fork_context, free_port

ROWS, RANKS = 7, 3


def views():
    """Return two random views (7, 5), float64, the same on each rank."""
    return torch.randn(2, ROWS, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def make_encoder():
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Linear(8, 4)).double()


def transposed_use():
    """Return the gradients of all rows, of which the gather gets a transposed and an expanded gradient."""
    encoder, (x, _) = make_encoder(), views()
    gathered = gather_rows(encoder(x[own_rows(ROWS)]), ROWS)
    weight = torch.arange(4 * ROWS, dtype=torch.float64).view(4, ROWS)
    ((gathered.T * weight).sum() + gathered.sum()).backward()
    all_reduce_gradients(encoder)
    return [weight.grad for weight in encoder.parameters()]


def count_collectives(size):
    """Return the names of the collectives of one step in chunks of `size` rows."""
    encoder, calls, own = make_encoder(), [], own_rows(ROWS)
    real = gather.ALL_GATHER, gather.REDUCE_SCATTER

    def counted(name, f, *arguments, **named):
        calls.append(name)
        return f(*arguments, **named)

    gather.ALL_GATHER = functools.partial(counted, "gather", real[0])
    gather.REDUCE_SCATTER = functools.partial(counted, "reduce-scatter", real[1])
    z1, z2 = embed_in_chunks(encoder, views()[:, own].flatten(0, 1).split(size), encoder).chunk(2)
    gathered = gather_rows(torch.stack([z1, z2], 1), ROWS).unbind(1)
    nt_xent(z1, z2, gathered=gathered, offset=own.start).backward()
    gather.ALL_GATHER, gather.REDUCE_SCATTER = real
    return calls


def one_rank(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    collectives = [count_collectives(size) for size in (1, 2, 20)]
    torch.save({"transposed": transposed_use(), "collectives": collectives}, folder / str(rank))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return the results of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    fork_context()
    torch.multiprocessing.start_processes(one_rank, (free_port(), folder), RANKS, start_method="forkserver")
    return [torch.load(folder / str(rank)) for rank in range(RANKS)]


def test_gradients_of_any_layout_reach_all_ranks(ranks):
    """Elsewhere: a collective gets a gradient that is not contiguous, and fails or sends wrong numbers.
    All ranks compute the same loss of the gathered rows, so its gradient is counted three times."""
    expected = transposed_use()
    for rank in ranks:
        for found, alone in zip(rank["transposed"], expected, strict=True):
            torch.testing.assert_close(found, 3 * alone, rtol=1e-9, atol=1e-12)


def test_chunks_do_not_communicate(ranks):
    """Elsewhere: gradient caching gathers in each chunk and for each column."""
    assert all(rank["collectives"] == [["gather", "reduce-scatter"]] * 3 for rank in ranks)


def test_inputs_changed_in_place_are_an_error():
    """Elsewhere: the second pass embeds what the first pass, or code between the passes, has left of the
    inputs, and gradients are silently wrong."""
    encoder, x = make_encoder(), views()[0]
    chunks = [{"x": part} for part in x.split(4)]
    z = embed_in_chunks(lambda chunk: encoder(chunk["x"].mul_(2)), chunks, encoder)
    with pytest.raises(RuntimeError, match="a chunk, a parameter or the training mode .* has changed"):
        z.sum().backward()
    batch = [(part.clone(), None) for part in x.split(4)]
    z = embed_in_chunks(lambda chunk: encoder(chunk[0]), batch, encoder)
    batch[1][0].zero_()                                        # a data loader that reuses its buffers
    with pytest.raises(RuntimeError, match="a chunk, a parameter or the training mode .* has changed"):
        z.sum().backward()
