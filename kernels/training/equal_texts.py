"""--ignore-equal for SimCSE's loss: copies of an anchor or of its positives are not negatives of this anchor.

Example: a batch has the rows (A, B1), (A, B2) and (B1, C). The texts A, B1 and B2 are not negatives of the
anchor A, in any row and column. The texts B1 and C are not negatives of the anchor B1.

sentence-transformers' sampler NO_DUPLICATES instead moves a row to a later batch if one of the row's texts is
already in the batch. The sampler thus changes the batches, and the last batches of an epoch are short or
missing. --ignore-equal does not change the batches.
"""
import numpy as np
import torch
import torch.nn.functional as F

from kernels import check_rows, checks, similarity_lse

from .errors import fail, is_first_rank, log


def loss_without_equal_texts(z1, z2, hard, ids, temperature, hard_negative_weight, offset, impl,
                             anchor_ids=None):
    """Return SimCSE's loss without the negatives that --ignore-equal excludes.

    z1, z2, hard    unit rows: (N, D) anchors, (M, D) positives, and a list of (M, D) hard negatives
    ids             (M, 1 + n) integers: text ids of the positives and of the n hard negatives
    offset          row of z2 that is the positive of this rank's first anchor
    anchor_ids      (M,) integers, text ids of the anchors: exclude the anchor's text and the positives of all
                    rows with this anchor. None: exclude only the text of the anchor's own positive
    """
    own = slice(offset, offset + len(z1))
    rules = [(ids[:, 0], ids, torch.zeros_like(ids))]
    if anchor_ids is not None:
        rules = exclusion_rules(anchor_ids, ids)

    def negatives_lse(keys, column):
        """Return log Σ exp(similarity / τ) over the keys of other rows, without the excluded keys."""
        found = None
        for row_ids, column_ids, other in rules:               # each rule sums over the texts that it covers
            covered = None if len(rules) == 1 else (torch.zeros_like(row_ids[own]), other[:, column])
            part = similarity_lse(z1, keys, temperature, exclude=("diagonal", row_ids[own],
                                  column_ids[:, column]), within=covered, offset=offset, impl=impl)
            part = part.clamp(min=torch.finfo(part.dtype).min)  # no -inf: two of them give NaN gradients
            found = part if found is None else torch.logaddexp(found, part)
        return found

    negatives = negatives_lse(z2, 0)
    positive = (z1 * z2[own]).sum(1) / temperature
    for column, z in enumerate(hard, 1):
        excluded = sum((column_ids[own, column] == row_ids[own]) & (other[own, column] == 0)
                       for row_ids, column_ids, other in rules) > 0
        weighted = hard_negative_weight + (z1 * z[own]).sum(1) / temperature
        weighted = weighted.masked_fill(excluded, torch.finfo(weighted.dtype).min)
        negatives = torch.logaddexp(torch.logaddexp(negatives, weighted), negatives_lse(z, column))
    return -F.logsigmoid(positive - negatives).mean()


def check_loss_arguments(z1, z2, z3, hard_negative_weight, offset, ids, anchor_ids):
    """Raise ValueError if the arguments of simcse_loss do not fit together."""
    several = getattr(z3, "ndim", 2) == 3
    n = z3.shape[1] if several else int(z3 is not None)        # hard negatives per row
    check_rows(offset, z1=(z1, "N D"), z2=(z2, "M D"), z3=(z3, "M n D" if several else "M D", None),
               ids=(ids, "M t", int, None), anchor_ids=(anchor_ids, "M", int, None), t=1 + n)
    checks.check_same_dtype(z1=z1, z2=z2, z3=z3)
    checks.check_number("hard_negative_weight", hard_negative_weight, -torch.inf, device=z1.device)


def exclusion_rules(anchor_ids, ids):
    """Return the rules of --ignore-equal: [(row ids (M,), column ids (M, 1 + n), other (M, 1 + n))].

    A rule excludes a text for an anchor if the row id of the anchor equals the column id of the text. `other`
    is 1 for texts that another rule covers. The owners of a text are the anchors that exclude it: the
    anchor with the same text, and each anchor that has the text as a positive. Texts with the same owners
    share one number. In a rule, this number is the row id of the owners, and the column id of the texts. An
    anchor has one row id per rule, so two sets of owners with a common anchor need two rules.
    """
    anchors, keys = anchor_ids.tolist(), ids.tolist()
    owners = {anchor: {anchor} for anchor in anchors}
    for anchor, (positive, *_) in zip(anchors, keys):
        owners.setdefault(positive, set()).add(anchor)
    number_of, taken = {}, [{}]                # number_of[owners]: (rule, number); taken[rule][owner]: number
    sets_of = {text: frozenset(owners.get(text, ())) for row in keys for text in row}
    for found in sets_of.values():
        if found and found not in number_of:
            rule = 0
            while rule < len(taken) and found & taken[rule].keys():
                rule += 1
            if rule == len(taken):
                taken.append({})
            number_of[found] = rule, len(number_of)
            taken[rule].update(dict.fromkeys(found, number_of[found][1]))
    places = torch.tensor([[number_of.get(sets_of[text], (0, -1)) for text in row] for row in keys])
    rules = []
    for rule, id_of in enumerate(taken):
        row_ids = torch.tensor([id_of.get(anchor, -2) for anchor in anchors])
        rules.append((row_ids, places[:, :, 1].contiguous(), (places[:, :, 0] != rule).long()))
    return [tuple(x.to(ids.device) for x in rule) for rule in rules]


def text_ids(tokens, row_indices, device):
    """Return text ids of n rows: (n, columns - 1) of the positives and hard negatives, (n,) of the anchors.
    Texts with equal tokens have equal ids. In data with a single column, the anchor is also the positive.
    Fail if no anchor has a negative, because the loss would be 0."""
    numbers, positives_of = {}, {}
    rows = ([ids.tobytes() for ids in tokens[i]] for i in row_indices)
    rows = [[numbers.setdefault(text, len(numbers)) for text in row] for row in rows]
    for anchor, *others in rows:
        positives_of.setdefault(anchor, {anchor}).update(others[:1])
    texts = {text for row in rows for text in row[min(1, tokens.columns - 1) :]}
    if not any(texts - own for own in positives_of.values()):
        fail("--ignore-equal: a batch has no negatives, because its texts are equal after tokenisation")
    found = torch.tensor(rows)
    return found[:, min(1, tokens.columns - 1) :].to(device), found[:, 0].to(device)


def log_equal_texts(tokens, args):
    """Print the share of anchors or positives that occur more than once, if --ignore-equal is set or if the
    share exceeds 1 %."""
    if not is_first_rank():
        return
    hashes = np.array([[hash(ids.tobytes()) for ids in tokens[i][:2]] for i in range(len(tokens))])
    shares = []
    for name, column in zip(("anchors", "positives") if tokens.columns > 1 else ("sentences",), hashes.T):
        _, which, counts = np.unique(column, return_inverse=True, return_counts=True)
        shares.append((100 * (counts[which] > 1).mean(), name))
    share, name = max(shares)
    text = f"{share:.0f} % of the {name} are equal after truncation to {args.max_length} tokens; "
    others = "their other positives" if name == "anchors" else "their copies"
    if args.ignore_equal:
        log("equal", f"{text}{others} are left out of the negatives")
    elif share > 1:
        log("equal", f"{text}--ignore-equal leaves {others} out of the negatives")
