"""Bags of sentences for cil.py: reading, marks around entities, edited copies, precision and recall."""
import itertools
import math
import random
import re
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken

from kernels.training.data import RowError, read_jsonl
from kernels.training.errors import fail, log
from kernels.training.progress import progress
from kernels.training.text.tokens import tokenise

MARKS = {"h": ("[H-CLS]", "[H-SEP]"), "t": ("[T-CLS]", "[T-SEP]")}     # start and end marks of both entities
UNKNOWN = "NA", "no_relation"                                  # both names mean: no relation is known
WORD = re.compile(r"\w\w+")                                    # a word that an edit may change


def load_sentences(path):
    """Read JSON lines. Return (lines as dicts, ["NA", names of the other relations])."""
    rows = []
    for place, row in read_jsonl(Path(path)):
        error = str(row) if isinstance(row, RowError) else line_error(row)
        if error:
            fail(f"{path} {place}: {error}")
        rows.append(row)
    names = sorted({row["relation"] for row in rows}.difference(UNKNOWN))
    if not names:
        fail(f"{path}: no line has a relation other than {' and '.join(UNKNOWN)}")
    return rows, ["NA", *names]


def line_error(row):
    """Return a message about what is wrong with a line, or None if the line is right."""
    match row:
        case {"text": str(text), "relation": str(), "h": {"id": _, "name": _, "pos": [int(), int()]},
              "t": {"id": _, "name": _, "pos": [int(), int()]}}:
            for entity in MARKS:
                name, (start, end) = row[entity]["name"], row[entity]["pos"]
                if not 0 <= start < end or text[start:end] != name:
                    found = text[start:end]
                    return f"{entity}: pos [{start}, {end}] is {found!r:.60}, expected the name {name!r:.60}"
            return None
    return "expected a JSON object with text, relation, h and t; in h and t: id, name, pos [start, end]"


def add_marks(model):
    """Add the four MARKS to the vocabulary of a SentenceEncoder with a masked LM. Set model.marks to their
    ids (4,): start of the head, end of the head, start of the tail, end of the tail."""
    marks = [*itertools.chain(*MARKS.values())]
    model.tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    model.lm.resize_token_embeddings(len(model.tokenizer), mean_resizing=False)
    model.marks = torch.tensor(model.tokenizer.convert_tokens_to_ids(marks), device=model.device)


def marked_text(row, editor=None, rng=None):
    """Return a line's text with marks around both entities. If entities overlap, shared words appear twice.
    editor: None, or a WordEditor that edits the text outside the entities, with random numbers from `rng`."""
    text, places = row["text"], sorted((*row[entity]["pos"], *marks) for entity, marks in MARKS.items())
    (start, end, *first), (start2, end2, *second) = places
    stretches = text[:start], text[end:start2], text[max(end, end2) :]
    before, between, after = [editor.edit(part, rng) for part in stretches] if editor else stretches
    return (f"{before} {first[0]} {text[start:end]} {first[1]} {between} "
            f"{second[0]} {text[start2:end2]} {second[1]} {after}")


class WordEditor:
    """Changes unimportant words of a text, which are those with a low TF-IDF. A word that occurs n times in
    all L texts has the idf log(L / n). In a text of k words, each occurrence has the TF-IDF idf / k.

    form    "paper": each change replaces a word or inserts a new word before it, with equal probability.
            "code": each change replaces a word; punctuation and one-letter words of the text are dropped
    """

    def __init__(self, texts, form="paper"):
        self.form, texts = form, [WORD.findall(text) for text in texts]
        self.count, self.occurrences = len(texts), Counter(itertools.chain(*texts))
        totals = Counter()                                     # each word's TF-IDF, summed over all texts
        for words in texts:
            totals.update({word: n * self.idf(word) / len(words) for word, n in Counter(words).items()})
        self.vocabulary, most = [*totals], max(totals.values(), default=0)
        # A new word has the weight (largest total − its total) + 1e-9. Without 1e-9, all weights could be 0.
        self.cumulative = [*itertools.accumulate(most - total + 1e-9 for total in totals.values())]

    def idf(self, word):
        """Return a word's inverse document frequency; an unknown word counts as if it occurred once."""
        return math.log(self.count / (self.occurrences[word] or 1))

    def edit(self, text, rng):
        """Change 30 % of the words of a text, at least 1 and at most 10, mostly common words. Return the new
        text. rng: a random.Random."""
        words = WORD.findall(text)
        if not words:
            return text
        count = min(max(int(0.3 * len(words)), 1), 10)
        values = [self.idf(word) / len(words) for word in words]
        most = max(values)
        gaps = [most - value for value in values]
        # Draw words without replacement. Their weight is the gap to the largest TF-IDF. Gap 0 comes last.
        keys = [(1, math.log(1 - rng.random()) / gap) if gap > 0 else (0, rng.random()) for gap in gaps]
        chosen = sorted(range(len(words)), key=keys.__getitem__)[len(words) - count :]
        for i, new in zip(chosen, rng.choices(self.vocabulary, cum_weights=self.cumulative, k=count)):
            inserted = self.form == "paper" and rng.random() < 0.5
            words[i] = f"{new} {words[i]}" if inserted else new
        if self.form == "code":
            return " ".join(words)
        changed = iter(words)
        return WORD.sub(lambda _: next(changed), text)


def tokenise_sentences(rows, model, args, editor=None):
    """Tokenise lines. Leave out a line if truncation cuts off a start mark. Return (lines, tokens).

    editor    a WordEditor, or None. Its random numbers depend only on --seed and on the line number
    tokens    a tuple for each line: (token ids,), with an editor (token ids, token ids of an edited copy)
    """
    limit, starts = min(args.max_length, model.max_length), model.marks[::2].cpu().numpy()
    columns = [[marked_text(row) for row in rows]]
    if editor:
        columns.append([marked_text(row, editor, random.Random(f"{args.seed} edit {i}"))
                        for i, row in enumerate(progress(rows, "editing sentences"))])
    tokens = [*zip(*(tokenise(texts, model.tokenizer, limit)[0] for texts in columns))]
    whole = [all(np.isin(starts, ids).all() for ids in row) for row in tokens]
    log("tokens", f"{whole.count(False):,} of {len(rows):,} sentences left out: an entity starts after the "
                  f"first {limit} tokens")
    return [*itertools.compress(rows, whole)], [*itertools.compress(tokens, whole)]


def group_rows(rows, *names):
    """Group rows into bags {(head id, tail id, *values of fields `names`): [row indices]}, in file order."""
    bags = defaultdict(list)
    for i, row in enumerate(rows):
        bags[(row["h"]["id"], row["t"]["id"], *(row[name] for name in names))].append(i)
    return bags


def protected(ids, marks, form):
    """Return (n, L) bool, True for never masked tokens: "paper": entities and marks | "code": start marks."""
    starts, ends = torch.isin(ids, marks[::2]), torch.isin(ids, marks[1::2])
    return starts if form == "code" else starts.cumsum(1) > ends.cumsum(1) - ends.long()


def load_bags(path, model, args):
    """Read a file for evaluation. A bag is made of all sentences of one pair of entities.

    returns   (token ids of all sentences, [indices of sentences] of each bag, facts, total)
    facts     (B, R) bool: whether the file says that the pair of bag b has relation r of the model
    total     number of facts in the file, including those without a bag or with a relation new to the model
    """
    rows, _ = load_sentences(path)
    number_of = model.encoder.config.label2id
    facts = {key for key in group_rows(rows, "relation") if key[2] not in UNKNOWN}
    unknown = [relation for *_, relation in facts if relation not in number_of]
    rows, tokens = tokenise_sentences(rows, model, args)
    bags = group_rows(rows)
    labels = torch.tensor([[(*pair, name) in facts for name in number_of] for pair in bags])
    log("bags", f"{len(rows):,} sentences in {len(bags):,} bags, {len(facts):,} facts from {path}; the model "
                f"does not know the relations of {len(unknown):,} facts")
    return [ids for ids, in tokens], [*bags.values()], labels, len(facts)


def precision_recall(scores, facts, total, form="paper"):
    """Rank all (bag, relation) pairs except those with NA, and compare them with the known facts.

    scores    (B, R) result of bag_scores; relation 0 is NA. Pairs with equal scores keep their order
    facts     (B, R) bool: the known relations of each bag
    total     number of facts in the file, including facts without a bag; see load_bags
    form      "paper" | "code"; with "code", p@N is the precision of the first N + 1 pairs
    returns   {"auc", "f1", "p@100", "p@200", "p@300"} in percent; p@N is missing if there are too few pairs
    """
    order = scores[:, 1:].flatten().sort(descending=True, stable=True).indices
    hits = facts[:, 1:].flatten()[order].double().cumsum(0)
    count = torch.arange(1, len(hits) + 1, device=hits.device)
    precision, recall = hits / count, hits / total
    found = {"auc": torch.trapezoid(precision, recall), "f1": (2 * hits / (count + total)).max()}
    at = {n: n - (form == "paper") for n in (100, 200, 300)}   # p@n is precision[at[n]]
    found |= {f"p@{n}": precision[i] for n, i in at.items() if i < len(hits)}
    return {name: 100 * value.item() for name, value in found.items()}
