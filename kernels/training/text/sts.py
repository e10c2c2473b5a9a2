"""Scored sentence pairs (STS): read them, and compute Spearman correlation, alignment and uniformity."""
import math
import re

import numpy as np
import torch
import torch.nn.functional as F

from kernels import similarity_lse

from ..cli import fail, log
from ..tables import join_names, normalise_name, read_table, show_cells


def load_sts(path):
    """Return [(sentence1, sentence2, score)] of a file, all of its subsets together (STS setting "all")."""
    names = ["sentence1", "sentence2", "score"]
    header, table = read_table(path, names=names)
    header = header and [normalise_name(name) for name in header]
    first = next(iter(table))[1]
    if header is None and len(first) == 3:     # the score is first only if the last cell is not a number
        header = names if re.fullmatch(r"[\d. ]*", first[2]) else ["score", "sentence1", "sentence2"]
        log("note", f"{path} has no header; its first row is read as {show_cells(header, first)}")
    if header is None or not set(names) <= set(header):
        found = join_names(header or ["no header"])
        fail(f"{path}: found {found}; expected {', '.join(names)}, or 3 columns with the score first or last")
    pairs = []
    for place, cells in table:
        one, two, score = (" ".join(cells[header.index(name)].split()) for name in names)
        if not one or not two:
            fail(f"{path} {place}: an empty sentence")
        if not re.fullmatch(r"(\d+(\.\d*)?|\.\d+)?", score) or float(score or 0) > 5:
            fail(f"{path} {place}: score {score[:40]!r}, expected a number from 0 to 5")
        if score:                              # SemEval files have pairs without a score, which are skipped
            pairs.append((one, two, float(score)))
    if len(pairs) < 2:
        fail(f"{path}: {len(pairs)} scored pairs, expected at least 2")
    return pairs


def spearman(a, b):
    """Return the Pearson correlation of the ranks of a and b; 0 if one of them is constant. Equal values all
    get their mean rank."""
    ranks = []
    for x in (a, b):
        _, group, sizes = np.unique(x, return_inverse=True, return_counts=True)
        ranks.append((sizes.cumsum() - (sizes - 1) / 2)[group])
    return 0.0 if min(np.ptp(r) for r in ranks) == 0 else float(np.corrcoef(*ranks)[0, 1])


@torch.no_grad()
def evaluate(model, pairs, impl="auto"):
    """Return {"spearman": 100 ρ, "alignment", "uniformity"} of scored pairs. Sentences are not truncated to
    --max-length. Alignment, over pairs with a score above 4, and uniformity: Wang and Isola 2020."""
    z, indices = model.embed([pair[side] for side in (0, 1) for pair in pairs])
    z = F.normalize(torch.nan_to_num(z), dim=1, eps=1e-8)
    one, two = z[indices].double().chunk(2)
    scores = np.array([pair[2] for pair in pairs])
    result = {"spearman": 100 * spearman((one * two).sum(1).cpu().numpy(), scores)}
    near = torch.from_numpy(scores > 4).to(z.device)
    if near.any():
        result["alignment"] = (one - two)[near].square().sum(1).mean().item()
    if len(z) > 1:                             # exp(−2 |x − y|²) = exp(4 x·y − 4) for unit rows
        lse = similarity_lse(z, temperature=0.25, exclude="diagonal", impl=impl).double()
        result["uniformity"] = lse.logsumexp(0).item() - 4 - math.log(len(z) * (len(z) - 1))
    return result
