"""--ignore-equal: SimCSE's loss, in which texts equal to an anchor's own positive are not its negatives."""
import numpy as np
import torch
import torch.nn.functional as F

from kernels import similarity_lse

from .errors import is_first_rank, log


def loss_without_equal_texts(z1, z2, hard, ids, temperature, hard_negative_weight, offset, impl):
    """Return SimCSE's loss without the negatives whose text id is that of the anchor's own positive.

    z1, z2, hard    (N, D) anchors, (M, D) positives, and a list of (M, D) hard negatives; unit rows
    ids             (M, 1 + n) integers: text ids of the positives and of the n hard negatives
    offset          row of z2 that is the positive of this rank's first anchor
    """
    own = slice(offset, offset + len(z1))

    def negatives_lse(keys, column):
        """Return log Σ exp s over the keys of other rows whose text is not that of the anchor's positive."""
        exclude = "diagonal", ids[own, 0], ids[:, column]
        return similarity_lse(z1, keys, temperature, exclude=exclude, offset=offset, impl=impl)

    negatives = negatives_lse(z2, 0)
    positive = (z1 * z2[own]).sum(1) / temperature
    for column, z in enumerate(hard, 1):
        weighted = hard_negative_weight + (z1 * z[own]).sum(1) / temperature
        weighted = weighted.masked_fill(ids[own, column] == ids[own, 0], torch.finfo(weighted.dtype).min)
        negatives = torch.logaddexp(torch.logaddexp(negatives, weighted), negatives_lse(z, column))
    return -F.logsigmoid(positive - negatives).mean()


def text_ids(tokens, row_indices):
    """Return (n, columns - 1) int64 ids of the texts in all columns but the anchors', for these
    rows. Two ids are equal if the texts have equal tokens. With a single column: (n, 1), ids of its texts."""
    numbers = {}
    rows = ([ids.tobytes() for ids in tokens[i][1:] or tokens[i]] for i in row_indices)
    return torch.tensor([[numbers.setdefault(text, len(numbers)) for text in row] for row in rows])


def log_equal_texts(tokens):
    """Print how many rows have a positive that occurs again: --ignore-equal may remove negatives of these."""
    if not is_first_rank():
        return
    rows = (tokens[i][1:] or tokens[i] for i in range(len(tokens)))
    texts = np.array([[hash(ids.tobytes()) for ids in row] for row in rows])   # 8 bytes per text
    _, which, counts = np.unique(texts, return_inverse=True, return_counts=True)
    repeated = (counts[which.reshape(texts.shape)[:, 0]] > 1).sum()
    text = "positive" if tokens.columns > 1 else "sentence"
    log("equal", f"{repeated:,} of {len(tokens):,} rows have a {text} that is also the positive of another "
                 "row or a hard negative")
