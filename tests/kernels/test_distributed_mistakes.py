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
from running import fork_context, free_port

ROWS, RANKS = 7, 3


def views():
    """Return two random views (7, 5), float64, the same on each rank."""
    return torch.randn(2, ROWS, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def make_encoder():
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Linear(8, 4)).double()


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
    torch.save([count_collectives(size) for size in (1, 2, 20)], folder / str(rank))
    dist.destroy_process_group()


def test_chunks_do_not_communicate(tmp_path):
    """Elsewhere: gradient caching gathers in each chunk and for each column."""
    fork_context()
    torch.multiprocessing.start_processes(
        one_rank, (free_port(), tmp_path), RANKS, start_method="forkserver")
    for rank in range(RANKS):
        assert torch.load(tmp_path / str(rank)) == [["gather", "reduce-scatter"]] * 3


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
