"""Test EASE's files of entity vectors."""
import bz2
import gzip

import pytest

from kernels.training.papers.ease_entities import load_entity_vectors

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
