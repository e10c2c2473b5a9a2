"""Relation extraction from bags of sentences: OpenNRE's JSON lines, marks around the two entities, bags, and
the curve of precision and recall.

    {"text": "Ada was born in Ulm.", "relation": "born_in",
     "h": {"id": "Q1", "name": "Ada", "pos": [0, 3]}, "t": {"id": "Q2", "name": "Ulm", "pos": [16, 19]}}
"""
import itertools
import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken

from kernels import check_rows, checks

from ..data import RowError, read_jsonl
from ..errors import fail, log
from ..pretrained import loading
from ..progress import progress
from ..text.tokens import tokenise

MARKS = {"h": ("[H-CLS]", "[H-SEP]"), "t": ("[T-CLS]", "[T-SEP]")}     # around the head and the tail
UNKNOWN = "NA", "no_relation"                                  # names of "no relation is known"


def load_sentences(path):
    """Return (lines of a file, also .gz, as dicts; names of their relations, NA first).

    Fail if a line is wrong, or if there is no relation other than NA."""
    rows, errors = [], []
    for place, row in read_jsonl(Path(path)):
        error = str(row) if isinstance(row, RowError) else line_error(row)
        if error:
            errors.append(f"{place}: {error}")
        else:
            rows.append(row)
    if errors or not rows:
        more = f" ({len(errors) - 1:,} more lines are wrong)" if len(errors) > 1 else ""
        fail(f"{path} {errors[0]}{more}" if errors else f"{path}: no lines")
    names = sorted({row["relation"] for row in rows}.difference(UNKNOWN))
    if not names:
        fail(f"{path}: all relations are {' or '.join(UNKNOWN)}; expected at least one other")
    return rows, ["NA", *names]


def line_error(row):
    """Return what is wrong with a line, or None."""
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in ("text", "relation")):
        return "expected a JSON object with the texts text and relation, and the objects h and t"
    text = row["text"]
    for entity in MARKS:
        match row.get(entity):
            case {"id": str(), "name": str(name), "pos": [int(start), int(end)]}:
                if not 0 <= start < end or text[start:end] != name:
                    found = text[max(start, 0) : max(end, 0)]
                    return f"{entity}: pos [{start}, {end}] is {found!r:.60}, expected the name {name!r:.60}"
            case found:
                return (f"{entity}: found {found!r:.60}, expected an object with the texts id and name, and "
                        "integers pos [start, end]")
    for mark in itertools.chain(*MARKS.values()):
        if mark in text:
            return f"the text contains {mark}, which marks an entity after reading; delete it"
    return None


def add_marks(model):
    """Add the marks to the vocabulary of a SentenceEncoder with a masked LM, and their ids as model.marks:
    start and end of the head, start and end of the tail (4,)."""
    marks = [*itertools.chain(*MARKS.values())]
    model.tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    model.lm.resize_token_embeddings(len(model.tokenizer), mean_resizing=False)
    model.marks = torch.tensor(model.tokenizer.convert_tokens_to_ids(marks), device=model.device)


def load_heads(heads, file):
    """Load the weights of a module from a file that save_transformer wrote. Fail if they do not fit."""
    with loading(str(file)):
        heads.load_state_dict(load_file(file))


def marked_text(row, edit=None):
    """Return the text with marks around its entities. edit: function of each stretch of text outside of them.
    The words of overlapping entities occur twice."""
    text, places = row["text"], sorted((*row[entity]["pos"], *marks) for entity, marks in MARKS.items())
    (start, end, *first), (start2, end2, *second) = places
    stretches = text[:start], text[end:start2], text[max(end, end2) :]
    before, between, after = map(edit, stretches) if edit else stretches
    return (f"{before} {first[0]} {text[start:end]} {first[1]} {between} "
            f"{second[0]} {text[start2:end2]} {second[1]} {after}")


def tokenise_sentences(rows, model, max_length, editor=None, seed=0):
    """Return (rows, their token ids): without sentences that lose a mark when they are truncated.

    editor    a WordEditor; then the ids are pairs: of the sentence, and of a copy with edited words, which
              depends on the seed and the row's number only
    """
    def edited(i, row):
        rng = random.Random(f"{seed} edit {i}")
        return marked_text(row, lambda stretch: editor.edit(stretch, rng))

    limit, starts = min(max_length, model.max_length), model.marks[::2].cpu().numpy()
    columns = [[marked_text(row) for row in rows]]
    if editor:
        columns.append([edited(i, row) for i, row in enumerate(progress(rows, "editing sentences"))])
    tokens = [*zip(*(tokenise(texts, model.tokenizer, limit)[0] for texts in columns))]
    whole = [all(np.isin(starts, ids).all() for ids in row) for row in tokens]
    log("tokens", f"{whole.count(False):,} of {len(rows):,} sentences left out, whose entities start after "
                  f"the first {limit} tokens")
    if not any(whole):
        fail(f"--max-length {max_length}: cuts all sentences before their entities; expected a larger number")
    return [*itertools.compress(rows, whole)], [*itertools.compress(tokens, whole)]


def group_rows(rows, *names):
    """Return {(head id, tail id, values of `names`): [indices of the rows]}, the bags in file order."""
    bags = defaultdict(list)
    for i, row in enumerate(rows):
        bags[(row["h"]["id"], row["t"]["id"], *(row[name] for name in names))].append(i)
    return bags


def protected(ids, marks, form):
    """Return (n, L) bool: tokens that are not masked: entities with marks (paper), start marks (code)."""
    starts, ends = torch.isin(ids, marks[::2]), torch.isin(ids, marks[1::2])
    return starts if form == "code" else starts.cumsum(1) > ends.cumsum(1) - ends.long()


def load_bags(path, model, args):
    """Read a file for evaluation, where a bag has one pair of entities and all relations of the pair.

    returns   token ids of all sentences; [indices of a bag's sentences]; facts (B, R) bool, for the relations
              in the model's config; number of facts in the file, also those without a bag or a known relation
    """
    rows, _ = load_sentences(path)
    number_of = model.encoder.config.label2id
    facts = {key for key in group_rows(rows, "relation") if key[2] not in UNKNOWN}
    rows, tokens = tokenise_sentences(rows, model, args.max_length)
    bags = group_rows(rows)
    labels = torch.tensor([[(*pair, name) in facts for name in number_of] for pair in bags])
    log("bags", f"{len(rows):,} sentences in {len(bags):,} bags, {len(facts):,} facts from {path}")
    return [ids for ids, in tokens], [*bags.values()], labels, len(facts)


def precision_recall(scores, facts, total=None, form="paper"):
    """Rank all pairs of a bag and a relation except NA, and compare them with the known facts.

    scores    (B, R) of bag_scores; relation 0 is NA. Pairs with equal scores keep their order
    facts     (B, R) bool: the known relations of each bag
    total     number of facts, also those without a bag; None: the facts in `facts`
    form      "code": p@N is the precision of the first N + 1 pairs
    returns   {"auc", "f1", "p@100", "p@200", "p@300", "p_mean"} in percent, p@N if there are so many pairs,
              and "curve": the precision, 0 to 1, at 1, 2 ... % of recall; precision and recall after each
              pair, (B · (R − 1),) float64, 0 to 1
    source    antct/cil
    """
    check_rows(scores=(scores, "B R"), facts=(facts, "B R", bool))
    checks.check_choice("form", form, "paper", "code")
    if scores.shape[1] < 2:
        raise ValueError("scores: found 1 relation, expected NA and at least one other")
    order = scores[:, 1:].flatten().sort(descending=True, stable=True).indices
    hits = facts[:, 1:].flatten()[order].double().cumsum(0)
    total = hits.max().item() if total is None else total
    if not total:
        raise ValueError("facts: no fact of a relation other than NA, expected at least one")
    count = torch.arange(1, len(hits) + 1, device=hits.device)
    precision, recall = hits / count, hits / total
    found = {"auc": torch.trapezoid(precision, recall), "f1": (2 * hits / (count + total)).max()}
    at = {n: n - (form == "paper") for n in (100, 200, 300)}   # counted from 0
    found |= {f"p@{n}": precision[i] for n, i in at.items() if i < len(hits)}
    if "p@300" in found:
        found["p_mean"] = (found["p@100"] + found["p@200"] + found["p@300"]) / 3
    found = {name: 100 * value.item() for name, value in found.items()}
    levels = torch.arange(1, 101, dtype=recall.dtype, device=recall.device) / 100
    places = torch.searchsorted(recall, levels - 1e-9)         # 1e-9: rounding of hits / total
    return found | {"curve": precision[places[places < len(recall)]].tolist()}, precision, recall


def format_scores(scores):
    """Return the scores of precision_recall as a text."""
    return ", ".join(f"{name} {x:.2f}" for name, x in scores.items() if name not in ("step", "curve"))
