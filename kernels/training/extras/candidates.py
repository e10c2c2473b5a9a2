"""Evaluate --objective ranking (SimCLS): which of several candidates an encoder selects for a text."""
import re

import torch
import torch.nn.functional as F

from .. import data
from ..data import RANKING_COLUMNS, empty_cell, join_names, normalise_name, read_table
from ..errors import fail

# Header names of each column
ROLES = RANKING_COLUMNS | {"scores": "scores rouge rouges candidatescores".split()}
NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)"


def is_scored_pairs(path):
    """Return whether a file of --dev has columns sentence1, sentence2, score, which sts.load_sts reads."""
    header, table = read_table(path)
    if header:
        return {"sentence1", "sentence2", "score"} <= {normalise_name(name) for name in header}
    first = next(iter(table))[1]
    return len(first) == 3 and any(re.fullmatch(NUMBER, first[i].strip()) for i in (0, 2))


def load_candidates(path):
    """Return [(text, [candidate], [score] or None)] of a file of --dev. The columns are those of --data with
    --objective ranking; the reference is not used. A last column `scores`, if there is one, has a number for
    each candidate, such as its ROUGE, separated by spaces."""
    header, table = read_table(path, empty_cell, roles=ROLES)
    scored, rows = bool(header) and header[-1].split()[0] == "scores", []
    for place, (text, _, *candidates) in table:
        cells = candidates.pop().split() if scored else []
        if not candidates or scored and (len(cells) != len(candidates)
                                         or not all(re.fullmatch(NUMBER, cell) for cell in cells)):
            found, expected = f"{len(candidates)} candidates", "text, reference, candidates"
            if scored:
                found = f"{len(cells)} scores ({join_names(cells)[:60]}) for {found}"
                expected += ", and a number for each candidate, separated by spaces"
            fail(f"{path} {place}: {found}; expected {expected}")
        rows.append((text, candidates, [*map(float, cells)] if scored else None))
    return rows


def load_dev(path):
    """Return (key of the score that selects the best checkpoint, its printed name, rows of
    load_candidates)."""
    rows = load_candidates(path)
    return ("chosen", "score of the chosen", rows) if rows[0][2] else ("first", "% first chosen", rows)


@torch.no_grad()
def evaluate_candidates(model, rows):
    """Select the candidate with the highest cosine to its text, and return the scores of this selection.

    rows      of load_candidates; texts are not truncated to --max-length
    returns   {"chosen": mean score of the selected candidates, "best": mean score of each text's best
              candidate, "first": percentage of texts whose first candidate is selected}; only "first" if the
              rows have no scores
    """
    z, places = model.embed([text for row in rows for text in (row[0], *row[1])])
    z = F.normalize(torch.nan_to_num(z), dim=1, eps=1e-8)[places].double()
    start, selected = 0, []
    for _, candidates, _ in rows:
        end = start + 1 + len(candidates)
        selected.append(int((z[start + 1 : end] @ z[start]).argmax()))
        start = end
    found = {"first": 100 * selected.count(0) / len(selected)}
    if rows[0][2]:
        total = sum(scores[at] for at, (*_, scores) in zip(selected, rows))
        best = sum(max(scores) for *_, scores in rows)
        found = {"chosen": total / len(rows), "best": best / len(rows)} | found
    return found


def read_numbers(path, columns):
    """Return the numbers in these columns of a data file or Table, one list per row. Fail on other cells."""
    def not_a_number(cells):
        if not all(re.fullmatch(data.NUMBER, cell.strip()) for cell in cells):
            return f"found {', '.join(cells)[:60]}, expected numbers"

    _, table = read_table(path, not_a_number, columns=columns)
    return [[float(cell) for cell in cells] for _, cells in table]
