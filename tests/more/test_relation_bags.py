"""Relation extraction: marked texts, edited copies, protected tokens, precision and recall."""
import math
import random

import pytest
import torch

from kernels.training.extras import relation_bags, tfidf
from kernels.training.extras.relation_bags import MARKS, marked_text, precision_recall, protected
from kernels.training.extras.tfidf import WordEditor
from running import SENTENCES

TEXTS = [text for text, in SENTENCES]


def row(text, head, tail):
    """Return a line whose entities are the first occurrences of these names."""
    h, t = (dict(id=name, name=name, pos=[text.index(name), text.index(name) + len(name)])
            for name in (head, tail))
    return dict(text=text, relation="r", h=h, t=t)


@pytest.mark.parametrize("text, head, tail, expected", [
    ("Ada met Bo.", "Ada", "Bo", "HAda) met TBo) ."), ("Bo met Ada", "Ada", "Bo", "TBo) met HAda)"),
    ("AdaBo", "Ada", "Bo", "HAda) TBo)"), ("a New York", "a New", "New York", "Ha New) TNew York)"),
    ("New York City.", "New York City", "York", "HNew York City) TYork) ."),
    ("Ada", "Ada", "Ada", "HAda) TAda)")])
def test_marks(text, head, tail, expected):
    """Cases: the tail first, entities that touch, overlap, contain each other, or are the same."""
    expected = expected.replace("H", "[H-CLS] ").replace("T", "[T-CLS] ")
    found = marked_text(row(text, head, tail)).split()
    ends = iter(["[H-SEP]", "[T-SEP]"] if expected.startswith("[H") else ["[T-SEP]", "[H-SEP]"])
    expected = "".join(f" {next(ends)} " if letter == ")" else letter for letter in expected)
    assert found == expected.split()


def test_entities_are_not_edited():
    """Each stretch is edited alone; names stay, also if they are common words."""
    line = row("The dog saw Ada near the old house of Bo in the dark wood", "Ada", "Bo")
    editor = WordEditor(TEXTS)
    for seed in range(50):
        rng = random.Random(seed)
        found = marked_text(line, lambda stretch, rng=rng: editor.edit(stretch, rng))
        assert "[H-CLS] Ada [H-SEP]" in found and "[T-CLS] Bo [T-SEP]" in found
        assert found != marked_text(line)


@pytest.mark.parametrize("words, changes", [(0, 0), (1, 1), (3, 1), (6, 1), (7, 2), (33, 9), (60, 10)])
@pytest.mark.parametrize("insert", [False, True])
def test_number_of_changes(words, changes, insert, monkeypatch):
    """30 % of the words change, at least 1 and at most 10. A substitution keeps the number of words."""
    editor = WordEditor(TEXTS, insert)
    monkeypatch.setattr(editor, "vocabulary", ["NEW"] * len(editor.vocabulary))
    text = ", ".join(["word", "other", "third"][i % 3] for i in range(words))
    found = [editor.edit(text, random.Random(seed)) for seed in range(40)]
    assert {edited.count("NEW") for edited in found} == {changes}
    insertions = {len(tfidf.WORD.findall(edited)) - words for edited in found}
    assert min(insertions) >= 0 and max(insertions) <= changes
    assert (len(insertions) > 1) == (insert and changes > 0)   # else none
    assert all(edited.count(",") == text.count(",") for edited in found)


def test_released_edit_loses_punctuation():
    editor = WordEditor(TEXTS, insert=False, keep_all=False)
    found = editor.edit("A dog, I say, a b c ran!", random.Random(0))
    assert found.replace(" ", "").isalpha() and len(found.split()) == 3
    assert editor.edit(" , a ", random.Random(0)) == " , a "   # no words: nothing is lost


def test_common_words_are_replaced_and_chosen(monkeypatch):
    """TF-IDF by definition: of three texts, "the" occurs in three (idf 0), "dog" in two and "cat" in one."""
    editor = WordEditor(["the cat", "the dog", "the dog"], insert=False)
    assert editor.idf("the") == 0 and editor.idf("cat") == editor.idf("unknown") == math.log(3)
    # totals are 0, 2 · log(3/2) / 2 and log(3) / 2; a new word's weight is the distance from the largest
    weights = dict(zip(editor.vocabulary, torch.tensor([0.0, *editor.cumulative]).diff().tolist()))
    expected = dict(the=math.log(3) / 2, dog=math.log(3) / 2 - math.log(1.5), cat=0)
    assert weights == pytest.approx(expected, abs=1e-6)
    monkeypatch.setattr(editor, "vocabulary", ["NEW"] * 3)
    edited = [editor.edit("the dog cat", random.Random(seed)).split() for seed in range(4000)]
    replaced = [sum(words[i] == "NEW" for words in edited) for i in range(3)]
    assert replaced[2] == 0                                    # weights of places: log(3), log(2), 0
    assert replaced[0] / replaced[1] == pytest.approx(math.log(3) / math.log(2), rel=0.1)


def test_protected_tokens():
    """Marks are 1 to 4. Between and on a pair of marks nothing is masked (paper); start marks only (code)."""
    ids = torch.tensor([[9, 1, 9, 2, 9, 3, 9, 9, 4, 9], [3, 4, 9, 9, 1, 9, 9, 9, 9, 2]])
    marks = torch.tensor([1, 2, 3, 4])
    paper = [[0, 1, 1, 1, 0, 1, 1, 1, 1, 0], [1, 1, 0, 0, 1, 1, 1, 1, 1, 1]]
    assert protected(ids, marks, "paper").int().tolist() == paper
    assert protected(ids, marks, "code").tolist() == ((ids == 1) | (ids == 3)).tolist()
    assert {*MARKS} == {"h", "t"}


def reference_curve(scores, facts, total):
    """Return [(precision, recall)] after each pair, best first; pairs with equal scores keep their order."""
    pairs = [(-scores[b][r], b, r) for b in range(len(scores)) for r in range(1, len(scores[0]))]
    points, hits = [], 0
    for count, (_, b, r) in enumerate(sorted(pairs), 1):
        hits += facts[b][r]
        points.append((hits / count, hits / total))
    return points


@pytest.mark.parametrize("bags, relations, missing", [(40, 9, 0), (8, 5, 3), (1, 2, 0)])
def test_precision_recall(bags, relations, missing):
    """Scores have ties. Facts without a bag lower the recall. p@N exists if there are enough pairs."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(8, (bags, relations), generator=generator) / 8
    facts = torch.rand(bags, relations, generator=generator) < 0.2
    facts[0, 1] = True
    total = int(facts[:, 1:].sum()) + missing
    found, precision, recall = precision_recall(scores, facts, total)
    points = reference_curve(scores.tolist(), facts.tolist(), total)
    expected = torch.tensor(points, dtype=torch.float64).T
    torch.testing.assert_close(torch.stack([precision, recall]), expected)
    area = sum((b[1] - a[1]) * (a[0] + b[0]) / 2 for a, b in zip(points, points[1:]))
    f1 = max(2 * p * r / (p + r) if p + r else 0 for p, r in points)
    assert found["auc"] == pytest.approx(100 * area) and found["f1"] == pytest.approx(100 * f1)
    shifted, *_ = precision_recall(scores, facts, total, "code")
    for n in (100, 200, 300):
        assert (f"p@{n}" in found) == (len(points) >= n) and (f"p@{n}" in shifted) == (len(points) > n)
        if f"p@{n}" in found:
            assert found[f"p@{n}"] == pytest.approx(100 * points[n - 1][0])
            assert shifted[f"p@{n}"] == pytest.approx(100 * points[n][0])
    if len(points) > 300:
        assert found["p_mean"] == pytest.approx(sum(points[n - 1][0] for n in (100, 200, 300)) / 3 * 100)
    first = [next((p for p, r in points if r >= level / 100 - 1e-12), None) for level in range(1, 101)]
    assert found["curve"] == pytest.approx([p for p in first if p is not None])


def test_no_facts():
    with pytest.raises(ValueError, match="facts: no fact of a relation other than NA"):
        precision_recall(torch.ones(2, 3), torch.eye(3, dtype=torch.bool)[:1].expand(2, 3))
    assert relation_bags.precision_recall(torch.eye(3), torch.eye(3, dtype=torch.bool))[0]["auc"] == 50
