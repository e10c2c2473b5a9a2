"""--ignore-equal of simcse.py: number the texts of a batch, so that texts that mean the same share a number.

An anchor means the same as its positive, and a text means the same as another text with equal tokens, which
include the prompt. For example, the rows (A, B) and (B, C) have texts of one meaning. Negatives have another
meaning than the anchor.
"""
from collections import Counter

import torch

from ..errors import fail, is_first_rank, log


def text_ids(tokens, row_indices, device):
    """Return the numbers (n, max(1, columns - 1)) of the positives and hard negatives in n rows of TokenRows.
    If there is one column, the anchor is its own positive. Fail if no anchor has a negative."""
    parent = {}                                                # union-find: {text: text that means the same}

    def find(text):
        """Return the text that represents all texts that mean the same as `text`."""
        while parent.setdefault(text, text) != text:
            parent[text] = parent[parent[text]]
            text = parent[text]
        return text

    rows = [[ids.tobytes() for ids in tokens[i]] for i in row_indices]
    for anchor, *others in rows:
        for positive in others[:1]:
            parent[find(positive)] = find(anchor)
    numbers = {}
    ids = [[numbers.setdefault(find(text), len(numbers)) for text in row[1:] or row] for row in rows]
    if len(numbers) == 1:
        fail("--ignore-equal: a batch has no negatives, because all its texts mean the same")
    return torch.tensor(ids, device=device)


def log_equal_texts(tokens, args):
    """Print the share of anchors, or of positives if it is larger, that occur more than once. Without
    --ignore-equal, print a share above 1 % only."""
    if not is_first_rank():
        return
    share, column = 0.0, 0
    for i in range(min(2, tokens.columns)):
        times = Counter(tokens[row][i].tobytes() for row in range(len(tokens)))
        repeated = sum(count for count in times.values() if count > 1) / len(tokens)
        if repeated > share:
            share, column = repeated, i
    if args.ignore_equal or share > 0.01:
        names = ("anchors", "positives") if tokens.columns > 1 else ("sentences",)
        use = "leaves" if args.ignore_equal else "would leave"
        log("equal", f"{100 * share:.0f} % of the {names[column]} occur more than once; --ignore-equal {use} "
                     "out negatives that mean the same as the anchor")
