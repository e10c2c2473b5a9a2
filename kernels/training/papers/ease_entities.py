"""For ease.py: number the entities of the data, read entity vectors that Wikipedia2Vec wrote, and train a
table of entity vectors with a built-in AdamW."""
import bz2
import gzip
import random
import re
from pathlib import Path

import numpy as np
import torch

from ..errors import fail
from ..progress import progress

MAX_IDLE_STEPS = 160           # after 160 steps, 0.9¹⁶⁰ = 5e-8 of the momentum is left: float32 rounds it off


class LazyEmbedding(torch.nn.Module):
    """An embedding with AdamW (β 0.9 and 0.999, ε 1e-8, no weight decay) built in.

    AdamW's momentum moves a row even in steps in which the row has no gradient. This class makes all such
    moves of a row at once, when a batch needs the row. Up to rounding, the vectors are those of
    torch.optim.AdamW. Call set_schedule() before the first step, and step() after each backward pass.

    vectors    (rows, D) float32 initial vectors
    max_rows   largest number of distinct rows in a batch
    """

    def __init__(self, vectors, max_rows):
        super().__init__()
        self.register_buffer("vectors", vectors)
        self.register_buffer("m", torch.zeros_like(vectors))   # AdamW's mean of gradients
        self.register_buffer("v", torch.zeros_like(vectors))   # AdamW's mean of squared gradients
        last = torch.zeros(len(vectors), dtype=torch.int64) # step of a row's last gradient; 0: none so far
        self.register_buffer("last", last)
        # forward copies the batch's rows into this parameter, so that backward, all_reduce_gradients and
        # clip_grad_norm_ see no other rows.
        self.used = torch.nn.Parameter(vectors.new_zeros(max_rows, vectors.shape[1]))

    def set_schedule(self, rates, done):
        """Set `rates`, the learning rates of all steps of the run, and `done`, the number of steps done."""
        steps = torch.arange(1, len(rates) + 1, dtype=torch.float64)
        scales = (1 - 0.999 ** steps).rsqrt()                  # bias correction of √v
        rates = torch.tensor(rates, dtype=torch.float64) / (1 - 0.9 ** steps)  # bias correction of m
        self.rates = rates.to(self.vectors)
        self.scales = scales.to(self.vectors)
        self.done = done

    @torch.no_grad()
    def catch_up(self, rows):
        """Return (vectors, m, v) of the rows after all steps so far, without changing the buffers."""
        vectors, m, v, last = (x[rows] for x in (self.vectors, self.m, self.v, self.last))
        idle, root = torch.where(last > 0, self.done - last, -1), v.sqrt()
        for k in range(min(int(idle.max()) + 1, MAX_IDLE_STEPS)):  # each row makes its step number last + k
            at = (last + k - 1).clamp(0, self.done - 1)
            rate = torch.where(k <= idle, self.rates[at] * 0.9 ** k, 0)
            vectors -= rate[:, None] * m / (root * (self.scales[at] * 0.999 ** (k / 2))[:, None] + 1e-8)
        idle = idle.clamp(min=0)[:, None]
        return vectors, m * 0.9 ** idle, v * 0.999 ** idle

    def forward(self, ids):
        """Return the vectors of the rows `ids`: shape (n, m, D) for ids of shape (n, m), for example."""
        rows, places = ids.unique(return_inverse=True)
        self.batch = rows, *self.catch_up(rows)
        with torch.no_grad():
            self.used[: len(rows)] = self.batch[1]
        return self.used[places]

    @torch.no_grad()
    def step(self):
        """Update m and v of the last batch's rows from their gradient. catch_up moves the vectors later."""
        rows, vectors, m, v = self.batch
        gradient = self.used.grad[: len(rows)]
        self.done += 1
        self.vectors[rows] = vectors
        self.m[rows] = 0.9 * m + 0.1 * gradient
        self.v[rows] = 0.999 * v + 0.001 * gradient ** 2
        self.last[rows] = self.done
        self.used.grad = None


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
    except ValueError as error:                                # not a number, or not UTF-8
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
