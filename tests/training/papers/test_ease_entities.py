"""Test EASE's entities: an embedding table with AdamW built in, and files of entity vectors."""
import bz2
import gzip

import pytest
import torch

from kernels.training.loop import warmup_linear
from kernels.training.papers.ease_entities import LazyEmbedding, load_entity_vectors


@pytest.mark.parametrize("size", [1e-7, 1.0])                  # with small gradients eps matters
def test_lazy_updates_equal_adamw(size):
    """Some rows occur twice in a batch, are unused for a few or for many steps, or are never used."""
    torch.manual_seed(0)
    rates = [warmup_linear(step, 300, 20, 3e-3) for step in range(300)]
    start = torch.randn(40, 6)
    dense, table = start.clone().requires_grad_(), LazyEmbedding(start.clone(), 8)
    table.set_schedule(rates, 0)
    optimizer = torch.optim.AdamW([dense], weight_decay=0.0)
    for step, optimizer.param_groups[0]["lr"] in enumerate(rates):
        ids = torch.randint(0, 30 if step % 200 < 20 else 5, (4, 2))
        gradient = torch.randn(4, 2, 6) * size
        optimizer.zero_grad()
        (dense[ids] * gradient).sum().backward()
        optimizer.step()
        (table(ids) * gradient).sum().backward()
        table.step()
    vectors = table.catch_up(torch.arange(40))[0]
    assert (vectors - start).abs().max() > 0.05 and torch.equal(vectors[30:], start[30:])
    torch.testing.assert_close(vectors, dense.detach(), atol=1e-5, rtol=0)


TABS = "the\t9 9 9\nENTITY/New York\t1 -2 0.5\nNew York\t8 8 8\nENTITY/Ulm\t0.25 3 4\nENTITY/Bonn\t7 7 7\n"
GLOVE = TABS.replace(" York", "_York").replace("\t", " ")


@pytest.mark.parametrize("pack, name, text", [
    (bytes, "a.txt", TABS), (gzip.compress, "a.gz", GLOVE), (bz2.compress, "a.bz2", "5 3\n" + GLOVE)])
def test_entity_vectors(pack, name, text, tmp_path):
    """Three text formats of Wikipedia2Vec can be read, compressed or not. Word vectors are ignored. Entities
    that are not in the file get random vectors."""
    (tmp_path / name).write_bytes(pack(text.encode()))
    vectors, found = load_entity_vectors(str(tmp_path / name), ["Ulm", "the", "New York"])
    assert found == 2 and vectors[[0, 2]].tolist() == [[0.25, 3, 4], [1, -2, 0.5]]
    assert vectors.shape == (3, 3) and 0 < vectors[1].abs().max() <= 0.05
