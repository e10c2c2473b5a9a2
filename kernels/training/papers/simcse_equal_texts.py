"""--ignore-equal of simcse.py: give the same number to all texts of a batch that mean the same.

An anchor and its positive mean the same. Texts with equal tokens (prompt included) mean the same. So all
texts in the rows (A, B) and (B, C) mean the same. A text is a negative of an anchor only if their numbers
differ.
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
    """Print the percentage of anchors that occur more than once, or that of positives if it is larger.
    Without --ignore-equal, print the percentage only if it is above 1 %."""
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
