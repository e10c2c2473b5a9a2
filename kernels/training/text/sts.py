"""Semantic textual similarity (STS): read scored pairs, compute Spearman's ρ, alignment and uniformity."""
import math
import re

import numpy as np
import torch
import torch.nn.functional as F

from kernels import similarity_lse

from ..data import NUMBER, join_names, normalise_name, read_table, show_cells
from ..errors import fail, log

NAMES = "sentence1", "sentence2", "score"


def load_sts(path, columns=None):
    """Read [(sentence1, sentence2, score)] from a file. All its subsets form one list (STS setting "all").

    columns   names or numbers of the three columns (--dev-columns); None: find the columns by the header.
              A file without a header must have three columns, with the score first or last
    """
    header, table = read_table(path, columns=columns, names=NAMES)
    first = next(iter(table))[1]
    names = [*NAMES] if columns else [normalise_name(name) for name in header or []]
    if not names and len(first) == 3:          # score last or, if the last cell is not a number, first
        names = [*NAMES] if re.fullmatch(f"({NUMBER})?", first[2].strip()) else [NAMES[2], *NAMES[:2]]
        log("note", f"{path} has no header; its first row is read as {show_cells(names, first)}")
    if not {*NAMES} <= {*names}:
        found = join_names(header or [f"{len(first)} columns without a header"])
        fail(f"{path}: found {found}; expected {', '.join(NAMES)}, or 3 columns with the score first or last;"
             " choose them by --dev-columns, by name or number")
    pairs = []
    for place, cells in table:
        one, two, score = (" ".join(cells[names.index(name)].split()) for name in NAMES)
        if not one or not two:
            fail(f"{path} {place}: an empty sentence")
        if score and not (re.fullmatch(NUMBER, score) and math.isfinite(float(score))):
            fail(f"{path} {place}: score {score[:40]!r}, expected a number, such as one from 0 to 5")
        if score:                              # pairs without a score, as in SemEval files, are skipped
            pairs.append((one, two, float(score)))
    if len({score for *_, score in pairs}) < 2:
        fail(f"{path}: {len(pairs)} scored pairs whose scores are all equal, expected at least 2 different "
             "scores: without them there is no correlation")
    return pairs


def pearson(a, b):
    """Return the Pearson correlation of a and b, or 0 if a or b is constant."""
    return 0.0 if min(np.ptp(a), np.ptp(b)) == 0 else float(np.corrcoef(a, b)[0, 1])


def spearman(a, b):
    """Return Spearman's ρ, the Pearson correlation of ranks. Equal values all get their mean rank."""
    ranks = []
    for x in (a, b):
        _, group, sizes = np.unique(x, return_inverse=True, return_counts=True)
        ranks.append((sizes.cumsum() - (sizes - 1) / 2)[group])
    return pearson(*ranks)


@torch.no_grad()
def evaluate(model, pairs, impl="auto"):
    """Score a model on pairs, without truncation to --max-length. Return {"spearman": 100 ρ} and, as in Wang
    and Isola 2020, "alignment" of pairs scored above 4 (if none has above 5), "uniformity" of sentences."""
    z, indices = model.embed([pair[side] for side in (0, 1) for pair in pairs])
    z = F.normalize(torch.nan_to_num(z), dim=1, eps=1e-8)
    one, two = z[indices].double().chunk(2)
    scores = np.array([pair[2] for pair in pairs])
    result = {"spearman": 100 * spearman((one * two).sum(1).cpu().numpy(), scores)}
    near = torch.from_numpy(scores > 4).to(z.device)
    if near.any() and scores.max() <= 5:
        result["alignment"] = (one - two)[near].square().sum(1).mean().item()
    if len(z) > 1:                             # log mean exp(−2 |x − y|²); for unit rows, exp(4 x·y − 4)
        lse = similarity_lse(z, temperature=0.25, exclude="diagonal", impl=impl).double()
        result["uniformity"] = lse.logsumexp(0).item() - 4 - math.log(len(z) * (len(z) - 1))
    return result
