"""Test cil.py and cil_bags.py: losses, edited copies of sentences, and scores, compared with definitions."""
import itertools
import math
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import cil
import cil_bags
from cil import bag_attention, bag_scores, cil_loss
from cil_bags import WORD, WordEditor, marked_text, precision_recall, protected
from loss_check import check, numbers
from running import DATA, SENTENCES, run

FLAGS = ["--model", "scratch", "--data", DATA / "relations.jsonl"]
both_forms = pytest.mark.parametrize("form", ["paper", "code"])


def test_bag_attention_and_scores():
    """Bag vectors and scores equal their formulas, also if the rows of a bag are not adjacent."""
    x, bag_of = numbers(6, 4), torch.tensor([1, 2, 0, 2, 0, 0])

    def attend(x, bag_of, queries):
        parts = [(x[bag_of == b], query) for b, query in enumerate(queries)]
        return torch.stack([F.softmax(rows @ query, 0) @ rows for rows, query in parts])

    given = dict(x=x, bag_of=bag_of, queries=numbers(3, 4, seed=1))
    check(bag_attention, attend, given, [torch.float64])
    weight, bias = numbers(5, 4, seed=1), numbers(5, seed=2)
    vectors = [attend(x, bag_of, query.expand(3, -1)) for query in weight]
    scores = [F.softmax(bags @ weight.T + bias, 1)[:, r] for r, bags in enumerate(vectors)]
    torch.testing.assert_close(bag_scores(x, bag_of, weight, bias), torch.stack(scores, 1))


def build(tmp_path, *flags):
    """Return (model, token ids of sentences and copies, bags, args), made as in cil.main before training."""
    args = cil.make_parser().parse_args([*map(str, [*FLAGS, "--out", tmp_path, *flags])])
    rows, relations = cil.load_data(args.data, args)
    texts = [row["text"] for row in rows]
    torch.manual_seed(0)
    run = SimpleNamespace(args=args, device=torch.device("cpu"), bf16=False)
    model = cil.build_model(args, run, relations, texts)
    rows, tokens = cil_bags.tokenise_sentences(rows, model, args, WordEditor(texts))
    return model, tokens, [*cil_bags.group_rows(rows, "relation").items()], args


def sentence_vector(model, ids):
    """Return the sentence's vector W [h_head; h_tail] + b, with the states h of the two start marks."""
    hidden = model.encoder(torch.tensor(ids[None]).long()).last_hidden_state[0]
    head, tail = (ids.tolist().index(mark) for mark in model.marks[::2].tolist())
    return model.sentence(torch.cat([hidden[head], hidden[tail]]))


@both_forms
def test_loss_of_a_batch(form, tmp_path, monkeypatch):
    """The loss is L_bag + 10 λ L_C + 0.1 L_MLM. The weights of the classifier get no gradient from the
    attention. Three sentences of each bag are drawn: different ones if possible, and all of a smaller bag."""
    masked = set()

    def mask_all(ids, maskable, tokenizer):
        masked.update(tokenizer.convert_ids_to_tokens(ids[maskable]))
        return ids, maskable

    monkeypatch.setattr("kernels.training.text.mlm.mask_tokens", mask_all)
    model, tokens, bags, args = build(tmp_path, "--form", form)
    of_other_seed = build(tmp_path, "--form", form, "--seed", 7)[1]
    assert [copy.tolist() for _, copy in tokens] != [copy.tolist() for _, copy in of_other_seed]
    *_, relations = batch = cil.make_batch(bags[:8], tokens, 1, model, args)
    drawn, *_ = cil.make_batch(bags[:8], [(i, i) for i in range(162)], 1, model, args)
    assert [len({*drawn[i : i + 3]}) for i in range(0, 24, 3)] == [min(3, len(rows)) for _, rows in bags[:8]]
    model.eval()                                               # this turns off the classifier's dropout
    loss, values = cil.compute_loss(model, batch, 8, args, 0.3)
    assert "." in masked and masked.isdisjoint({"[H-CLS]", "[T-CLS]", "[CLS]", "[SEP]"})
    assert ("[H-SEP]" in masked) == ("[T-SEP]" in masked) == (form == "code")
    x, a = (torch.stack([sentence_vector(model, ids) for ids in view]).detach() for view in batch[:2])
    bag_of, weight = torch.arange(8).repeat_interleave(3), model.classifier.weight
    vectors = bag_attention(x, bag_of, weight.detach()[relations])
    bag_loss = F.cross_entropy(model.classifier(vectors), relations)
    wanted = {"bag": bag_loss.detach(), "contrast": cil_loss(x, a, vectors, bag_of, 0.05, form)}
    wanted |= {"mlm": values["mlm"], "loss": wanted["bag"] + 3 * wanted["contrast"] + 0.1 * values["mlm"]}
    torch.testing.assert_close(values, wanted, atol=1e-4, rtol=1e-4)
    expected, = torch.autograd.grad(bag_loss, weight)
    loss.backward()
    torch.testing.assert_close(weight.grad, expected, atol=1e-4, rtol=1e-3)


def test_weight_of_the_contrastive_loss(tmp_path):
    """The weight of L_C rises towards 10. In step t = 1, 2, ... it is 10 · tanh(t / (2 · warm-up steps))."""
    flags = ["--batch-size", 4, "--steps", 3, "--warmup-steps", 2]
    steps = run("cil", tmp_path / "out", *FLAGS, *flags).steps
    weights = [(row["loss"] - row["bag"] - 0.1 * row["mlm"]) / row["contrast"] for row in steps]
    assert weights == pytest.approx([10 * math.tanh(step / 4) for step in (1, 2, 3)], rel=1e-4)


def test_protected_tokens():
    """Ids 1 to 4 are marks. "paper" protects both marks and the tokens between them, "code" start marks."""
    ids, marks = torch.tensor([[9, 1, 9, 2, 9, 3, 9, 9, 4, 9], [3, 4, 9, 9, 1, 9, 9, 9, 9, 2]]), range(1, 5)
    paper = [[0, 1, 1, 1, 0, 1, 1, 1, 1, 0], [1, 1, 0, 0, 1, 1, 1, 1, 1, 1]]
    assert protected(ids, torch.tensor(marks), "paper").int().tolist() == paper
    assert protected(ids, torch.tensor(marks), "code").equal((ids == 1) | (ids == 3))


@both_forms
@pytest.mark.parametrize("words, changes", [(1, 1), (7, 2), (60, 10)])
def test_number_of_changes(words, changes, form, monkeypatch):
    """30 % of the words change, at least 1 and at most 10. Only form "paper" inserts words and keeps
    punctuation. Entities do not change, and each stretch of text around them is edited separately."""
    editor = WordEditor([text for text, in SENTENCES], form)
    monkeypatch.setattr(editor, "vocabulary", ["NEW"] * len(editor.vocabulary))
    text = ", ".join(["word", "other", "third"][i % 3] for i in range(words))
    found = [editor.edit(text, random.Random(seed)) for seed in range(40)]
    assert {edited.count("NEW") for edited in found} == {changes}
    insertions = {len(WORD.findall(edited)) - words for edited in found}
    assert min(insertions) >= 0 and max(insertions) <= changes
    assert (len(insertions) > 1) == (form == "paper")
    assert {edited.count(",") for edited in found} == {text.count(",") if form == "paper" else 0}
    row = dict(text=f"Ada the Bo {text}", h=dict(pos=[8, 10]), t=dict(pos=[0, 3]))
    marked = marked_text(row, editor, random.Random(0))
    assert marked.startswith(" [T-CLS] Ada [T-SEP] ") and "[H-CLS] Bo [H-SEP]" in marked
    assert marked.count("NEW") == 1 + changes


def test_common_words_are_replaced_and_chosen():
    """Common words are preferred. "the" is in all three texts (TF-IDF 0), "dog" in two and "cat" in one."""
    editor = WordEditor(["the cat", "the dog", "the dog"], "code")
    # TF-IDF totals: 0, 2 · log(3/2) / 2, log(3) / 2. The weight of a new word: largest total − its total
    weights = dict(zip(editor.vocabulary, torch.tensor([0.0, *editor.cumulative]).diff().tolist()))
    expected = dict(the=math.log(3) / 2, dog=math.log(3) / 2 - math.log(1.5), cat=0)
    assert weights == pytest.approx(expected, abs=1e-6)
    edited = [editor.edit("the dog cat", random.Random(seed)).split() for seed in range(50)]
    assert {words[2] for words in edited} == {"cat"} and {words[0] for words in edited} > {"the"}
    assert WordEditor(["the cat"]).edit("cat", random.Random(0))                   # all weights are 1e-9 here


@both_forms
@pytest.mark.parametrize("bags, relations, missing", [(40, 9, 0), (8, 5, 3)])
def test_precision_recall(bags, relations, missing, form):
    """Pairs of a bag and a relation with equal scores keep their order. Facts without a bag lower the recall.
    p@N is the precision of N pairs ("code": N + 1), and exists only if there are that many pairs."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(8, (bags, relations), generator=generator) / 8
    facts = torch.rand(bags, relations, generator=generator) < 0.2
    facts[0, 1] = True
    ranked = sorted((-scores[b, r].item(), b, r) for b in range(bags) for r in range(1, relations))
    hits = [*itertools.accumulate(facts[b, r].item() for _, b, r in ranked)]
    total, more = hits[-1] + missing, int(form == "code")
    points = [(count / n, count / total) for n, count in enumerate(hits, 1)]   # precision, recall
    area = sum((b[1] - a[1]) * (a[0] + b[0]) / 2 for a, b in zip(points, points[1:]))
    expected = {"auc": 100 * area, "f1": 100 * max(2 * p * r / (p + r) if p else 0 for p, r in points)}
    at = {f"p@{n}": 100 * points[n - 1 + more][0] for n in (100, 200, 300) if n + more <= len(points)}
    found = precision_recall(scores, facts, total, form)
    assert found == pytest.approx(expected | at)
