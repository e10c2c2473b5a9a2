"""docs/more/cil.py and cil_bags.py: losses and bags against formulas in float64, whole runs, bad input."""
import json
import math
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import cil
import cil_bags
from cil import bag_attention, bag_scores, cil_loss
from cil_bags import WORD, WordEditor, marked_text, precision_recall, protected
from formulas import both_impls, check_equal, cosine, randn
from running import DATA, ROOT, SENTENCES, rejects, run, run_distributed
from whole_runs import check_processes, check_resume

FLAGS = ["--model", "scratch", "--data", DATA / "relations.jsonl", "--dev", DATA / "relations_dev.jsonl"]
SHORT = [*FLAGS, "--steps", 6, "--warmup-steps", 2, "--lr", "5e-4", "--batch-size", 10]
both_forms = pytest.mark.parametrize("form", ["paper", "code"])


def reference_loss(x, a, bags, bag_of, temperature, form):
    """Compute L_C term by term. In the code's form, the rows of a bag are numbered k = 0, 1 ..."""
    def s(u, v):
        return cosine(u, v) / temperature

    terms, place = [], {i: sum(int(b == bag_of[i]) for b in bag_of[:i]) for i in range(len(x))}
    for i, own in enumerate(bag_of.tolist()):
        if form == "paper":
            others = [s(x[i], bags[b]) for b in range(len(bags)) if b != own]
        else:
            others = [s(x[j], bags[own]) for j in place if place[j] == place[i] and bag_of[j] != own]
        positive = s(x[i], a[i])
        terms.append(torch.logsumexp(torch.stack([positive, *others]), 0) - positive)
    return sum(terms) / len(terms) + 0 * bags.sum()            # one bag: its vector has gradient 0


def shuffled_bags(count, size):
    """Return the bags of count · size sentences in random order."""
    return torch.arange(count).repeat_interleave(size)[randn(count * size, 1, 9)[:, 0].argsort()]


@both_impls
@both_forms
@pytest.mark.parametrize("temperature", [0.01, 1.0])
@pytest.mark.parametrize("count, size, d", [(4, 3, 5), (2, 1, 8), (1, 3, 4), (7, 2, 1)])
def test_loss_matches_the_formula(count, size, d, temperature, form, impl):
    """Cases: a single bag, bags of one sentence, copies that equal their sentences up to the length."""
    x, a, bags = randn(count * size, d, 0), randn(count * size, d, 1), randn(count, d, 2)
    bag_of = shuffled_bags(count, size)
    for copies in (a, 2 * x):
        check_equal(lambda *z: cil_loss(*z, bag_of, temperature, form, impl=impl),
                    lambda *z: reference_loss(*z, bag_of, temperature, form), x, copies, bags)
    if count == 1:
        assert cil_loss(x, a, bags, bag_of, temperature, form) == 0
    scaled = cil_loss(3 * x, a, 0.1 * bags, bag_of, temperature, form)         # lengths do not matter
    torch.testing.assert_close(scaled, cil_loss(x, a, bags, bag_of, temperature, form))


@pytest.mark.parametrize("sizes", [(2, 1, 3), (1, 2, 3, 2), (3, 3, 0), (2, 2, 1)])
def test_bags_of_different_sizes(sizes):
    """The paper's form takes them, and zero vectors; the code's form does not."""
    bag_of = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    x, a, bags = randn(len(bag_of), 4, 0), randn(len(bag_of), 4, 1), randn(len(sizes), 4, 2)
    x[3] = bags[1] = 0
    check_equal(lambda *z: cil_loss(*z, bag_of), lambda *z: reference_loss(*z, bag_of, 0.05, "paper"),
                x, a, bags)
    with pytest.raises(ValueError, match="bag_of: expected the same number of sentences in each bag"):
        cil_loss(x, a, bags, bag_of, form="code")


@both_forms
def test_float16(form):
    x, a, bags, bag_of = randn(6, 16, 0), randn(6, 16, 1), randn(2, 16, 2), shuffled_bags(2, 3)
    x[0] = 0                                                   # 1e-8 is 0 in float16
    half = [z.half() for z in (x, a, bags)]
    found = cil_loss(*half, bag_of.to(torch.uint8), form=form)
    exact = reference_loss(*(z.double() for z in half), bag_of, 0.05, form).item()
    assert found.dtype == torch.float32 and found.item() == pytest.approx(exact, rel=1e-5)


@both_forms
def test_shares_of_ranks_add_up(form):
    """Three ranks have bag 2, bags 0 and 3, and bag 1; each compares its rows with the rows of all ranks."""
    x, a, bags, bag_of = randn(12, 5, 0), randn(12, 5, 1), randn(4, 5, 2), shuffled_bags(4, 3)
    parts = [torch.isin(bag_of, torch.tensor(own)) for own in ([2], [0, 3], [1])]
    check_equal(lambda x, a, bags: sum(cil_loss(x[own], a[own], bags, bag_of[own], 0.05, form, all_x=x,
                                                all_bag_of=bag_of) * own.sum() / 12 for own in parts),
                lambda x, a, bags: cil_loss(x, a, bags, bag_of, 0.05, form), x, a, bags)
    with pytest.raises(ValueError, match="all_bag_of: found .*, expected"):
        cil_loss(x[:6], a[:6], bags, bag_of[:6], form=form, all_x=x)
    with pytest.raises(ValueError, match="bag_of: expected the same number"):  # parts of bags
        cil_loss(x[:6], a[:6], bags, bag_of[:6], form="code", all_x=x, all_bag_of=bag_of)


def test_bag_attention_and_scores_match_the_formula():
    """Rows of a bag need not be neighbours. A bag's only sentence has weight 1. Scores may be thousands."""
    bag_of = torch.tensor([1, 2, 0, 2, 0, 0])

    def expected(x, queries):
        parts = [(x[bag_of == b], query) for b, query in enumerate(queries)]
        return torch.stack([F.softmax(rows @ query, 0) @ rows for rows, query in parts])

    x, queries = randn(6, 4, 0), torch.tensor([[1.0], [1], [2000]], dtype=torch.float64) * randn(3, 4, 1)
    check_equal(lambda *z: bag_attention(z[0], bag_of.to(torch.uint8), z[1]).square().sum(),
                lambda *z: expected(*z).square().sum(), x, queries)
    weight, bias = randn(5, 4, 1), randn(1, 5, 2)[0]
    vectors = [expected(x, query.expand(3, -1)) for query in weight]
    scores = [F.softmax(bags @ weight.T + bias, 1)[:, r] for r, bags in enumerate(vectors)]
    torch.testing.assert_close(bag_scores(x, bag_of, weight, bias), torch.stack(scores, 1))


def build(tmp_path, *flags):
    """Return (model, token ids, bags, args) as main makes them, without training."""
    args = cil.make_parser().parse_args([*map(str, [*FLAGS, "--out", tmp_path, *flags])])
    rows, relations = cil.load_data(args.data, args)
    texts = [row["text"] for row in rows]
    torch.manual_seed(0)
    run = SimpleNamespace(args=args, device=torch.device("cpu"), bf16=False)
    model = cil.build_model(args, run, relations, texts)
    rows, tokens = cil_bags.tokenise_sentences(rows, model, args, WordEditor(texts))
    return model, tokens, [*cil_bags.group_rows(rows, "relation").items()], args


def sentence_vector(model, ids):
    """Return the vector of one sentence: W [h_head; h_tail] + b at the first token of each start mark."""
    hidden = model.encoder(torch.tensor(ids[None]).long()).last_hidden_state[0]
    head, tail = (ids.tolist().index(mark) for mark in model.marks[::2].tolist())
    return model.sentence(torch.cat([hidden[head], hidden[tail]]))


def test_batch(tmp_path):
    """A bag of at least --bag-size sentences has none twice; a smaller one has all of its sentences."""
    model, tokens, bags, args = build(tmp_path)
    sentences, _, relations = cil.make_batch(bags, tokens, 1, model, args)
    number_of = {id(ids): i for i, (ids, _) in enumerate(tokens)}
    drawn = [number_of[id(ids)] for ids in sentences]
    for i, ((_, _, relation), rows) in enumerate(bags):
        found = {*drawn[3 * i : 3 * i + 3]}
        assert found <= {*rows} and len(found) == min(3, len(rows))
        assert model.encoder.config.id2label[relations[i].item()] == relation


@both_forms
def test_loss_of_a_batch(form, tmp_path, monkeypatch):
    """The loss is L_bag + 10 λ L_C + 0.1 L_MLM, each as defined. W gets no gradient from the attention."""
    def mask_all(ids, maskable, tokenizer):
        masked.update(tokenizer.convert_ids_to_tokens(ids[maskable]))
        return ids, maskable

    monkeypatch.setattr("kernels.training.text.mlm.mask_tokens", mask_all)
    model, tokens, bags, args = build(tmp_path, "--form", form)
    batch, masked = cil.make_batch(bags[:8], tokens, 1, model, args), set()
    model.eval()                                               # no dropout before the classifier
    loss, values = cil.compute_loss(model, batch, 8, args, 0.3)
    assert "." in masked and not masked & {"[H-CLS]", "[T-CLS]", "[CLS]", "[SEP]"}
    assert masked >= {"[H-SEP]", "[T-SEP]"} if form == "code" else not masked & {"[H-SEP]", "[T-SEP]"}
    values = {name: value.item() for name, value in values.items()}
    expected = values["bag"] + 3 * values["contrast"] + 0.1 * values["mlm"]
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    x, a = (torch.stack([sentence_vector(model, ids) for ids in view]).detach() for view in batch[:2])
    torch.testing.assert_close(cil.encode(model, model.batch(batch[0])), x, atol=1e-5, rtol=1e-5)
    weight = model.classifier.weight.detach()
    vectors = torch.stack([F.softmax(rows @ weight[y], 0) @ rows for rows, y in zip(x.split(3), batch[2])])
    logits = vectors @ model.classifier.weight.T + model.classifier.bias
    bag_loss = F.cross_entropy(logits, batch[2])
    assert values["bag"] == pytest.approx(bag_loss.item(), rel=1e-4)
    doubles = [z.double() for z in (x, a, vectors)]
    contrast = reference_loss(*doubles, torch.arange(8).repeat_interleave(3), 0.05, form)
    assert values["contrast"] == pytest.approx(contrast.item(), rel=1e-3)
    model.classifier.weight.grad = None
    loss.backward()
    expected, = torch.autograd.grad(bag_loss, model.classifier.weight)
    torch.testing.assert_close(model.classifier.weight.grad, expected, atol=1e-4, rtol=1e-3)
    args.contrastive_weight = args.mlm_weight = 0.0
    assert cil.compute_loss(model, batch, 8, args)[1].keys() == {"loss", "bag"}


def test_protected_tokens():
    """Marks are 1 to 4. On and between a pair of marks nothing is masked (paper); start marks only (code)."""
    ids, marks = torch.tensor([[9, 1, 9, 2, 9, 3, 9, 9, 4, 9], [3, 4, 9, 9, 1, 9, 9, 9, 9, 2]]), range(1, 5)
    paper = [[0, 1, 1, 1, 0, 1, 1, 1, 1, 0], [1, 1, 0, 0, 1, 1, 1, 1, 1, 1]]
    assert protected(ids, torch.tensor(marks), "paper").int().tolist() == paper
    assert protected(ids, torch.tensor(marks), "code").equal((ids == 1) | (ids == 3))


def line(text, head, tail):
    """Return a line whose entities are the first occurrences of these names."""
    h, t = (dict(id=x, name=x, pos=[text.index(x), text.index(x) + len(x)]) for x in (head, tail))
    return dict(text=text, relation="r", h=h, t=t)


@pytest.mark.parametrize("text, head, tail, expected", [
    ("Ada met Bo.", "Ada", "Bo", "HAdah met TBot ."), ("Bo met Ada", "Ada", "Bo", "TBot met HAdah"),
    ("AdaBo", "Ada", "Bo", "HAdah TBot"), ("a New York", "a New", "New York", "Ha Newh TNew Yorkt"),
    ("New York City.", "New York City", "York", "HNew York Cityh TYorkt ."),
    ("Ada", "Ada", "Ada", "HAdah TAdat")])
def test_marks(text, head, tail, expected):
    """Cases: the tail first, entities that touch, overlap, contain each other, or are the same."""
    found = marked_text(line(text, head, tail))
    for mark, letter in (("[H-CLS] ", "H"), (" [H-SEP]", "h"), ("[T-CLS] ", "T"), (" [T-SEP]", "t")):
        found = found.replace(mark, letter)
    assert found.split() == expected.split()


@both_forms
@pytest.mark.parametrize("words, changes", [(0, 0), (1, 1), (3, 1), (6, 1), (7, 2), (33, 9), (60, 10)])
def test_number_of_changes(words, changes, form, monkeypatch):
    """30 % of the words change, at least 1 and at most 10. Only the paper's form inserts words and keeps
    punctuation. Entities do not change."""
    editor = WordEditor([text for text, in SENTENCES], form)
    monkeypatch.setattr(editor, "vocabulary", ["NEW"] * len(editor.vocabulary))
    text = ", ".join(["word", "other", "third"][i % 3] for i in range(words))
    found = [editor.edit(text, random.Random(seed)) for seed in range(40)]
    assert {edited.count("NEW") for edited in found} == {changes}
    insertions = {len(WORD.findall(edited)) - words for edited in found}
    assert min(insertions) >= 0 and max(insertions) <= changes
    assert (len(insertions) > 1) == (form == "paper" and changes > 0)          # else none
    assert {edited.count(",") for edited in found} == {text.count(",") if form == "paper" else 0}
    marked = marked_text(line(f"Ada the Bo {text}", "Ada", "Bo"), editor, random.Random(0))
    assert marked.startswith(" [H-CLS] Ada [H-SEP] ") and "[T-CLS] Bo [T-SEP]" in marked
    assert marked.count("NEW") == 1 + changes                  # each stretch is edited alone


def test_common_words_are_replaced_and_chosen(monkeypatch):
    """TF-IDF by definition: of three texts, "the" occurs in three (idf 0), "dog" in two and "cat" in one."""
    editor = WordEditor(["the cat", "the dog", "the dog"], "code")
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


@pytest.mark.parametrize("bags, relations, missing", [(40, 9, 0), (8, 5, 3), (1, 2, 0)])
def test_precision_recall(bags, relations, missing):
    """Scores have ties. Facts without a bag lower the recall. p@N exists if there are enough pairs."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(8, (bags, relations), generator=generator) / 8
    facts = torch.rand(bags, relations, generator=generator) < 0.2
    facts[0, 1] = True
    total, points, hits = int(facts[:, 1:].sum()) + missing, [], 0
    pairs = [(-scores[b, r].item(), b, r) for b in range(bags) for r in range(1, relations)]
    for count, (_, b, r) in enumerate(sorted(pairs), 1):       # pairs with equal scores keep their order
        hits += facts[b, r].item()
        points.append((hits / count, hits / total))
    area = sum((b[1] - a[1]) * (a[0] + b[0]) / 2 for a, b in zip(points, points[1:]))
    expected = {"auc": 100 * area, "f1": 100 * max(2 * p * r / (p + r) if p + r else 0 for p, r in points)}
    for form, more in (("paper", 0), ("code", 1)):
        at = {f"p@{n}": 100 * points[n - 1 + more][0] for n in (100, 200, 300) if n + more <= len(points)}
        mean = {"p_mean": sum(at.values()) / 3} if len(at) == 3 else {}
        found = precision_recall(scores, facts, total, form)
        curve = found.pop("curve")
        assert found == pytest.approx(expected | at | mean)
    first = [next((p for p, r in points if r >= level / 100 - 1e-12), None) for level in range(1, 101)]
    assert curve == pytest.approx([p for p in first if p is not None])


@both_forms
def test_learns(form, tmp_path, cwd, capfd):
    """AUC rises. --evaluate and a further run start from all saved layers."""
    flags = ["--form", form, "--epochs", 12, "--warmup-steps", 20, "--eval-every", 12]
    first = run("cil", tmp_path / "out", *FLAGS, *flags)
    before, saved = first.run.extra_state["before"], first.run.extra_state["saved"]
    assert saved["auc"] > before["auc"] + 12, (before["auc"], saved["auc"])    # measured: 18 → 60, 53 (code)
    second = run("cil", tmp_path / "next", "--model", tmp_path / "out", *FLAGS[2:], "--steps", 1, "--lr", 0)
    assert second.run.extra_state["before"]["auc"] == pytest.approx(saved["auc"])
    evaluate, facts = ["--evaluate", "--model", "out", "--form", form, "--data"], FLAGS[-1].read_text()
    cil.main([*evaluate, str(FLAGS[-1])])
    assert f"auc {saved['auc']:.2f}, f1 {saved['f1']:.2f}, " in capfd.readouterr().out
    Path("some.jsonl").write_text(facts.replace('"taught"', '"new"'))
    cil.main([*evaluate, "some.jsonl"])
    assert "some.jsonl: 8 of 32 facts have relations unknown to the model (new); " in capfd.readouterr().out
    Path("none.jsonl").write_text(re.sub('"relation": "[^N]', '"relation": "new_', facts))
    rejects("cil", capfd, r"none.jsonl: 32 of 32 facts .* \(new_arent_of, new_arried_to, new_aught\)",
            *evaluate, "none.jsonl")


def test_resume_and_copies(tmp_path):
    """The copy in --out runs where kernels/ is; the script itself finds kernels/ from any folder."""
    flags = [*SHORT, "--eval-every", 2]
    check_resume("cil", tmp_path, flags, SHORT, 3, [3, 1])
    (tmp_path / "kernels").symlink_to(ROOT / "kernels")
    for name in ("cil.py", "cil_bags.py"):
        shutil.copy(tmp_path / "whole" / name, tmp_path)
    for script in (tmp_path / "cil.py", ROOT / "docs/more/cil.py"):
        subprocess.run([sys.executable, script, "--help"], cwd="/", check=True, stdout=subprocess.DEVNULL)


@both_forms
def test_processes_and_chunks(form, tmp_path):
    """Three processes, which have 4, 3 and 3 of ten bags, and encoding in chunks, give the run of one."""
    # processes mask different tokens, and have different dropout
    flags = [*SHORT, "--form", form, "--mlm-weight", 0, "--classifier-dropout", 0]
    one = run("cil", tmp_path / "one", *flags)
    norms = run_distributed(3, "cil", tmp_path / "three", flags)
    check_processes(one, tmp_path / "three", norms, loose=3)
    chunks = run("cil", tmp_path / "chunks", *flags, "--chunk-size", 7)
    assert chunks.norms == pytest.approx(one.norms, rel=1e-4)
    assert chunks.losses == pytest.approx(one.losses, rel=1e-4)


LINE = json.loads((DATA / "relations.jsonl").read_text().splitlines()[0])
SHAPE = "a.jsonl line 1: expected a JSON object with text, relation, h and t; in h and t: id, name, pos .*"
NAME = r"a.jsonl line 1: h: pos \[-?1, \d+\] is '.*', expected the name '\w+'"


@pytest.mark.parametrize("change, flags, message", [
    (dict(text=3), [], SHAPE), (dict(t=None), [], SHAPE), (dict(h=dict(LINE["h"], pos=[0])), [], SHAPE),
    (dict(h=dict(LINE["h"], pos=[1, 3])), [], NAME), (dict(h=dict(LINE["h"], pos=[-1, 900])), [], NAME),
    (dict(relation="NA"), [], "a.jsonl: no line has a relation other than NA and no_relation"),
    ({}, [], "a.jsonl: 1 bags, expected at least --batch-size .*"),
    ({}, [*FLAGS, "--dev", "good.csv"], "good.csv line 1: not JSON: .*"),
    ({}, ["--evaluate", "--model", "."], "--model .: no heads.safetensors, expected a model that .*")])
def test_mistakes(change, flags, message, cwd, capfd):
    Path("a.jsonl").write_text(json.dumps(LINE | change) + "\n")
    rejects("cil", capfd, message, "--model", "scratch", "--data", "a.jsonl", *flags)
