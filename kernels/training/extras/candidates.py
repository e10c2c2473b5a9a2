"""Texts with a reference and candidates to choose from (SimCLS): which one an encoder chooses."""
import re

import torch
import torch.nn.functional as F

from ..cli import fail
from ..columns import RANKING, listed, plain
from ..tables import empty_cell, read_table

ROLES = RANKING | {"scores": "scores rouge rouges candidatescores".split()}
NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)"


def is_scored_pairs(path):
    """Whether a file of --dev is one of sentence1, sentence2, score, which sts.load_sts reads."""
    header, table = read_table(path)
    if header:
        return {"sentence1", "sentence2", "score"} <= {plain(name) for name in header}
    first = next(iter(table))[1]
    return len(first) == 3 and any(re.fullmatch(NUMBER, first[i].strip()) for i in (0, 2))


def load_candidates(path):
    """[(text, [candidate], [score] or None)]: as --data of --objective ranking; no reference is read; a last
    column `scores` has a number for each candidate, such as its ROUGE, between spaces."""
    header, table = read_table(path, empty_cell, roles=ROLES)
    scored, rows = bool(header) and header[-1].split()[0] == "scores", []
    for place, (text, _, *candidates) in table:
        cells = candidates.pop().split() if scored else []
        if not candidates or scored and (len(cells) != len(candidates)
                                         or not all(re.fullmatch(NUMBER, cell) for cell in cells)):
            found = f"{len(cells)} scores ({listed(cells)[:60]}) for " if scored else ""
            fail(f"{path} {place}: {found}{len(candidates)} candidates; wanted text, reference, candidates"
                 + ", and a number for each, with spaces between" * scored)
        rows.append((text, candidates, [*map(float, cells)] if scored else None))
    return rows


def load_dev(path):
    """(which score of choose chooses the best checkpoint, its name, the rows of load_candidates)"""
    rows = load_candidates(path)
    return ("chosen", "score of the chosen", rows) if rows[0][2] else ("first", "% first chosen", rows)


@torch.no_grad()
def choose(model, rows):
    """{"chosen": mean score of the candidates with the highest cosine to their text; "best": that of the best
    ones; "first": percent of texts whose first candidate is chosen}; without scores `first` alone. Texts are
    not cut to --max-length."""
    z, places = model.embed([text for row in rows for text in (row[0], *row[1])])
    z, start, chosen = F.normalize(torch.nan_to_num(z), dim=1, eps=1e-8)[places].double(), 0, []
    for _, candidates, _ in rows:
        end = start + 1 + len(candidates)
        chosen.append(int((z[start + 1 : end] @ z[start]).argmax()))
        start = end
    found = {"first": 100 * chosen.count(0) / len(chosen)}
    if rows[0][2]:
        mean = lambda numbers: sum(numbers) / len(rows)
        found = {"chosen": mean(scores[at] for at, (*_, scores) in zip(chosen, rows)),
                 "best": mean(max(scores) for *_, scores in rows)} | found
    return found
