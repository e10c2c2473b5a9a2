"""Read entity vectors from text files as Wikipedia2Vec's save_text writes them."""
import bz2
import gzip
import re
from pathlib import Path

import numpy as np
import torch

from ..errors import fail
from ..progress import progress


def load_entity_vectors(path, titles):
    """Read the vectors of entities, line by line, from lines like "ENTITY/Title 0.1 0.2".

    path      a text file, which may be compressed (.gz or .bz2)
    titles    titles of the entities; those that are not in the file get random vectors (EASE's released code)
    returns   ((entities, D) float32, number of the entities that are in the file)
    """
    rows = {title: i for i, title in enumerate(titles)}
    vectors, found, line = None, set(), 0
    opener = {".gz": gzip.open, ".bz2": bz2.open}.get(Path(path).suffix, open)
    try:
        with opener(path, "rb") as file:
            for line, text in enumerate(progress(file, "vectors", unit=" lines"), 1):
                if line == 1 and re.fullmatch(rb"\d+ \d+\s*", text):           # header of the word2vec format
                    continue
                name, _, numbers = text.strip().partition(b"\t" if b"\t" in text else b" ")
                width = numbers.count(b" ") + bool(numbers)
                if vectors is None:
                    vectors = torch.empty(len(titles), width).uniform_(-0.05, 0.05)
                if width != vectors.shape[1]:
                    fail(f"{path} line {line}: {width} numbers, expected {vectors.shape[1]} as before")
                title = name.removeprefix(b"ENTITY/").decode().replace("_", " ")
                if name.startswith(b"ENTITY/") and title in rows:
                    vectors[rows[title]] = torch.from_numpy(np.array(numbers.split(b" "), np.float32))
                    found.add(title)
    except (OSError, EOFError) as error:
        fail(f"{path}: {getattr(error, 'strerror', None) or error}")
    except ValueError as error:                                # not a number, or not UTF-8
        fail(f"{path} line {line}: {error}")
    if not found:
        fail(f"{path}: none of the {len(titles):,} entities; expected lines like ENTITY/Title 0.1 0.2, as "
             "Wikipedia2Vec's save_text writes them")
    if not vectors.isfinite().all():
        fail(f"{path}: not all numbers are finite")
    return vectors, len(found)
