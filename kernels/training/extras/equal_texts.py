"""--ignore-equal: SimCSE's loss where a text that equals an anchor's own positive is not its negative."""
import numpy as np
import torch
import torch.nn.functional as F

from kernels import similarity_lse

from ..cli import is_first_rank, say


def loss_without_equal_texts(z1, z2, hard, ids, temperature, hard_negative_weight, offset, impl):
    """SimCSE's loss of unit rows, without the negatives that have the id of their anchor's positive.

    z1, z2, hard    (N, D) anchors, (M, D) positives and a list of (M, D) hard negatives, unit rows
    ids             (M, 1 + n) integers, of the texts of the positives and of the n hard negatives
    """
    own, texts = slice(offset, offset + len(z1)), bits(ids)
    others = dict(temperature=temperature, exclude="diagonal", offset=offset, impl=impl)
    equal = lambda column: (texts[own, 0], texts[:, column], 64)
    negatives = similarity_lse(z1, z2, similar=equal(0), **others)
    positive = (z1 * z2[own]).sum(1) / temperature
    for column, z in enumerate(hard, 1):
        weighted = hard_negative_weight + (z1 * z[own]).sum(1) / temperature
        weighted = weighted.masked_fill(ids[own, column] == ids[own, 0], torch.finfo(weighted.dtype).min)
        rest = similarity_lse(z1, z, similar=equal(column), **others)
        negatives = torch.logaddexp(torch.logaddexp(negatives, weighted), rest)
    return -F.logsigmoid(positive - negatives).mean()


def bits(ids):
    """Return (..., 64) of ids, ±1: the product of two is 64 where the ids are equal.

    Products can be combined with the diagonal in one rule, pairs of ids cannot.
    """
    return ((ids.long()[..., None] >> torch.arange(64, device=ids.device) & 1) * 2 - 1).half()


def text_ids(tokens, places):
    """(n, columns - 1) int64: ids of the texts behind the anchors, equal where tokens are; (n, 1) of one
    column."""
    numbers = {}
    rows = ([ids.tobytes() for ids in tokens[i][1:] or tokens[i]] for i in places)
    return torch.tensor([[numbers.setdefault(text, len(numbers)) for text in row] for row in rows])


def say_equal(tokens):
    """How many rows --ignore-equal can spare a negative."""
    if not is_first_rank():
        return
    rows = (tokens[i][1:] or tokens[i] for i in range(len(tokens)))
    texts = np.array([[hash(ids.tobytes()) for ids in row] for row in rows])   # 8 bytes a text
    _, which, times = np.unique(texts, return_inverse=True, return_counts=True)
    again = (times[which.reshape(texts.shape)[:, 0]] > 1).sum()
    what = "a positive that" if tokens.columns > 1 else "a sentence that"
    say("equal", f"{again:,} of {len(tokens):,} rows have {what} occurs again behind an anchor")
