"""For ease.py: number the entities of the data, and read entity vectors that Wikipedia2Vec wrote."""
import bz2
import gzip
import random
import re
from pathlib import Path

import numpy as np
import torch

from ..errors import fail
from ..progress import progress


def load_entity_vectors(path, titles):
    """Read the vectors of entities from a file with lines like "ENTITY/Title 0.1 0.2".

    path      a text file, which may be compressed (.gz or .bz2)
    titles    titles of the entities; entities that are not in the file get random vectors (released code)
    returns   (vectors (entities, D) float32, number of entities that are in the file)
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
                    fail(f"{path} line {line}: {width} numbers, earlier lines have {vectors.shape[1]}")
                title = name.removeprefix(b"ENTITY/").decode().replace("_", " ")
                if name.startswith(b"ENTITY/") and title in rows:
                    vectors[rows[title]] = torch.from_numpy(np.array(numbers.split(b" "), np.float32))
                    found.add(title)
    except (OSError, EOFError) as error:
        fail(f"{path}: {getattr(error, 'strerror', None) or error}")
    except ValueError as error:                                # the line has a non-number or is not UTF-8
        fail(f"{path} line {line}: {error}")
    if not found:
        fail(f"{path}: no vector of the {len(titles):,} entities; expected lines like ENTITY/Title 0.1 0.2, "
             "as Wikipedia2Vec's save_text writes them")
    if not vectors.isfinite().all():
        fail(f"{path}: not all numbers are finite")
    return vectors, len(found)


def make_records(path, rows, args):
    """Return (records, titles): the input of sample_entities for each row, and the titles of all entities.

    records   [(row number, entity, candidates for hard negatives, entities that must not be hard negatives)].
              An entity is given as the index of its title in `titles`
    """
    numbers = {}                                               # title → index
    on_page = {}                                               # page → its entities
    of_type = {}                                               # type → {entity: None}, an ordered set

    def number(title):
        return numbers.setdefault(" ".join(title.replace("_", " ").split()), len(numbers))

    def parts(cell):
        return [part.strip() for part in cell.split("|") if part.strip()]

    for row in rows:
        entity = number(row["entity"])
        on_page.setdefault(row.get("page") or row["text"], set()).add(entity)
        for kind in parts(row.get("type", "")):
            of_type.setdefault(kind, {})[entity] = None
    tuples = {kind: tuple(entities) for kind, entities in of_type.items()}
    rng = random.Random(args.seed)
    records = []
    for i, row in enumerate(rows):
        entity = number(row["entity"])
        candidates, members, excluded, what = (), (), (), ""   # members: the candidates, for fast `in` tests
        if "negatives" in row:
            candidates = members = tuple(dict.fromkeys(map(number, parts(row["negatives"]))))
            excluded, what = (entity,), "hard negatives"
        elif "type" in row:                                    # draw one of the row's types
            kind = rng.choice(parts(row["type"]))
            candidates, members = tuples[kind], of_type[kind]
            excluded = on_page[row.get("page") or row["text"]]
            what = f"entities of type {kind!r} that are not on its page"
        usable = len(candidates) - len([other for other in excluded if other in members])
        if usable < args.hard_negatives:
            fail(f"{path} {row['place']}: {usable} {what}, expected at least --hard-negatives "
                 f"({args.hard_negatives})")
        records.append((i, entity, candidates, excluded))
    return records, list(numbers)
