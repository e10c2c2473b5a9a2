"""docs/eleventh/cil.py: losses and bags against the formulas in float64, whole runs, bad input."""
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer

import cil
from cil import bag_attention, bag_scores, cil_loss
from formulas import both_impls, check_equal, cosine, randn
from kernels.training.extras import relation_bags
from running import DATA, rejects, run, run_distributed
from whole_runs import check_processes, check_resume

FLAGS = ["--model", "scratch", "--data", DATA / "relations.jsonl", "--dev", DATA / "relations_dev.jsonl"]
SHORT = [*FLAGS, "--steps", 6, "--warmup-steps", 2, "--lr", "5e-4", "--batch-size", 10]
both_forms = pytest.mark.parametrize("form", ["paper", "code"])

# ── the losses, in float64 up to 1e-10 ──


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


@both_impls
@both_forms
@pytest.mark.parametrize("temperature", [0.01, 0.05, 1.0])
@pytest.mark.parametrize("count, size, d", [(4, 3, 5), (2, 1, 8), (1, 3, 4), (7, 2, 1)])
def test_loss_matches_the_formula(count, size, d, temperature, form, impl):
    """Cases: a single bag, bags of one sentence, copies that equal their sentences up to the length."""
    x, a, bags = randn(count * size, d, 0), randn(count * size, d, 1), randn(count, d, 2)
    bag_of = torch.arange(count).repeat_interleave(size)
    for copies in (a, 2 * x):
        check_equal(lambda *z: cil_loss(*z, bag_of, temperature, form, impl=impl),
                    lambda *z: reference_loss(*z, bag_of, temperature, form), x, copies, bags)
    if count == 1:
        assert cil_loss(x, a, bags, bag_of, temperature, form) == 0
    scaled = cil_loss(3 * x, a, 0.1 * bags, bag_of, temperature, form)         # lengths do not matter
    torch.testing.assert_close(scaled, cil_loss(x, a, bags, bag_of, temperature, form))


def test_unequal_bags_and_zero_vectors():
    x, a, bags, bag_of = randn(6, 4, 0), randn(6, 4, 1), randn(3, 4, 2), torch.tensor([0, 0, 1, 2, 2, 2])
    x[3] = bags[1] = 0
    check_equal(lambda *z: cil_loss(*z, bag_of), lambda *z: reference_loss(*z, bag_of, 0.05, "paper"),
                x, a, bags)
    with pytest.raises(ValueError, match="bag_of: expected the same number of sentences"):
        cil_loss(x, a, randn(4, 4, 2), bag_of, form="code")


@both_forms
def test_the_default_form_and_low_precision(form):
    x, a, bags, bag_of = randn(6, 16, 0), randn(6, 16, 1), randn(2, 16, 2), torch.tensor([0, 0, 0, 1, 1, 1])
    exact = reference_loss(x, a, bags, bag_of, 0.05, form).item()
    found = cil_loss(x.float(), a.float(), bags.float(), bag_of, *([] if form == "paper" else [0.05, form]))
    assert found.dtype == torch.float32 and found.item() == pytest.approx(exact, rel=1e-5)
    x[0] = 0                                                   # 1e-8 is 0 in float16
    half = cil_loss(*(z.half() for z in (x, a, bags)), bag_of.to(torch.uint8), form=form)
    exact = reference_loss(*(z.half().double() for z in (x, a, bags)), bag_of, 0.05, form).item()
    assert half.dtype == torch.float32 and half.item() == pytest.approx(exact, rel=1e-5)


@both_forms
def test_shares_of_ranks_add_up(form):
    """Three ranks have 1, 2 and 1 of four bags; each compares its rows with the rows of all ranks."""
    x, a, bags = randn(12, 5, 0), randn(12, 5, 1), randn(4, 5, 2)
    bag_of = torch.arange(4).repeat_interleave(3)
    cuts = [slice(0, 3), slice(3, 9), slice(9, 12)]
    check_equal(lambda x, a, bags: sum(cil_loss(x[own], a[own], bags, bag_of[own], 0.05, form, all_x=x)
                                       * len(x[own]) / 12 for own in cuts),
                lambda x, a, bags: cil_loss(x, a, bags, bag_of, 0.05, form), x, a, bags)


def test_bag_attention_matches_the_formula():
    """Rows of a bag need not be neighbours. A bag's only sentence has weight 1. Scores may be thousands."""
    bag_of = torch.tensor([1, 0, 2, 0, 0])

    def expected(x, queries):
        bags = []
        for b, query in enumerate(queries):
            rows = x[bag_of == b]
            bags.append(F.softmax(rows @ query, 0) @ rows)
        return torch.stack(bags)

    for scale in (1, 2000):
        x, queries = randn(5, 4, 0), scale * randn(3, 4, 1)
        check_equal(lambda *z: bag_attention(z[0], bag_of, z[1]).square().sum(),
                    lambda *z: expected(*z).square().sum(), x, queries)
    torch.testing.assert_close(bag_attention(x, bag_of.to(torch.uint8), queries)[1], x[0])


def test_bag_scores_match_the_formula():
    x, weight, bias = randn(6, 4, 0), randn(5, 4, 1), randn(1, 5, 2)[0]
    bag_of = torch.tensor([0, 0, 0, 1, 2, 2])
    found = bag_scores(x, bag_of, weight, bias)
    for b in range(3):
        rows = x[bag_of == b]
        for r in range(5):
            bag = F.softmax(rows @ weight[r], 0) @ rows
            torch.testing.assert_close(found[b, r], F.softmax(weight @ bag + bias, 0)[r])


# ── the batch, the sentence vectors and the total loss ──


def build(tmp_path, *flags):
    """Return (model, token ids, bags, args) as main makes them, without training."""
    args = cil.make_parser().parse_args([*map(str, [*FLAGS, "--out", tmp_path, *flags])])
    rows, relations = cil.load_data(args.data, args)
    run = SimpleNamespace(args=args, device=torch.device("cpu"), bf16=False)
    torch.manual_seed(0)
    model = cil.build_model(args, run, relations, [row["text"] for row in rows])
    editor = cil.WordEditor([row["text"] for row in rows])
    rows, tokens = relation_bags.tokenise_sentences(rows, model, args.max_length, editor)
    return model, tokens, [*relation_bags.group_rows(rows, "relation").items()], args


def sentence_vector(model, ids):
    """Return the vector of one sentence: W [h_head; h_tail] + b at the first token of each start mark."""
    hidden = model.encoder(torch.tensor(ids[None]).long()).last_hidden_state[0]
    head, tail = (ids.tolist().index(mark) for mark in model.marks[::2].tolist())
    return model.sentence(torch.cat([hidden[head], hidden[tail]]))


def test_batch_and_sentence_vectors(tmp_path):
    """A bag of at least --bag-size sentences has no sentence twice, a smaller one has all of its sentences.
    Draws depend on the step. Each vector is that of the sentence alone."""
    model, tokens, bags, args = build(tmp_path)
    sentences, copies, relations = cil.make_batch(bags, tokens, 1, model, args)
    assert len(sentences) == len(copies) == 3 * len(bags) == 3 * 40
    row_of = {id(pair[0]): i for i, pair in enumerate(tokens)}
    for i, ((_, _, relation), rows) in enumerate(bags):
        drawn = [row_of[id(ids)] for ids in sentences[3 * i : 3 * i + 3]]
        assert set(drawn) <= set(rows) and len(set(drawn)) == min(3, len(rows))
        assert model.encoder.config.id2label[relations[i].item()] == relation
    assert not all(a is b for a, b in zip(sentences, cil.make_batch(bags, tokens, 2, model, args)[0]))
    model.eval()
    found = cil.encode(model, model.batch(sentences[:20], copies[:20]))
    expected = torch.stack([sentence_vector(model, ids) for ids in (*sentences[:20], *copies[:20])])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@both_forms
def test_loss_of_a_batch(form, tmp_path):
    """The loss is L_bag + 10 λ L_C + 0.1 L_MLM, each as defined. W gets no gradient from the attention."""
    model, tokens, bags, args = build(tmp_path, "--form", form)
    batch = cil.make_batch(bags[:8], tokens, 1, model, args)
    model.eval()                                               # no dropout before the classifier
    loss, values = cil.compute_loss(model, batch, 8, args, 0.3)
    values = {name: value.item() for name, value in values.items()}
    expected = values["bag"] + 3 * values["contrast"] + 0.1 * values["mlm"]
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    x, a = (torch.stack([sentence_vector(model, ids) for ids in view]).detach() for view in batch[:2])
    weight = model.classifier.weight.detach()
    vectors = torch.stack([F.softmax(rows @ weight[y], 0) @ rows for rows, y in zip(x.split(3), batch[2])])
    logits = vectors @ model.classifier.weight.T + model.classifier.bias
    bag_loss = F.cross_entropy(logits, batch[2])
    assert values["bag"] == pytest.approx(bag_loss.item(), rel=1e-4)
    bag_of = torch.arange(8).repeat_interleave(3)
    contrast = reference_loss(*(z.double() for z in (x, a, vectors)), bag_of, 0.05, form)
    assert values["contrast"] == pytest.approx(contrast.item(), rel=1e-3)
    model.classifier.weight.grad = None
    loss.backward()
    expected, = torch.autograd.grad(bag_loss, model.classifier.weight)
    torch.testing.assert_close(model.classifier.weight.grad, expected, atol=1e-4, rtol=1e-3)
    args.contrastive_weight = args.mlm_weight = 0.0
    assert cil.compute_loss(model, batch, 8, args)[1].keys() == {"loss", "bag"}


@both_forms
def test_protected_tokens_are_not_masked(form, tmp_path, monkeypatch):
    """Special tokens and, in the paper's form, entities with their marks may not be chosen."""
    model, tokens, bags, args = build(tmp_path, "--form", form, "--contrastive-weight", 0)
    batch, masked = cil.make_batch(bags[:2], tokens, 1, model, args), Counter()

    def mask_all(ids, maskable, tokenizer):
        masked.update((ids * maskable).unique().tolist())
        return ids, maskable

    monkeypatch.setattr("kernels.training.text.mlm.mask_tokens", mask_all)
    cil.compute_loss(model, batch, 2, args)
    names = {row["h"]["name"].lower() for row in relation_bags.load_sentences(args.data)[0]}
    names &= {*model.tokenizer.get_vocab()}
    found = {*model.tokenizer.convert_ids_to_tokens([*masked])}
    assert "." in found and not found & {"[H-CLS]", "[T-CLS]", "[CLS]", "[SEP]"}
    assert bool(found & {"[H-SEP]", "[T-SEP]"}) == bool(found & names) == (form == "code")


# ── whole runs ──


@both_forms
def test_learns(form, tmp_path):
    """Training raises the area under the curve on bags of other pairs. The saved model scores the same."""
    flags = ["--form", form, "--epochs", 12, "--warmup-steps", 20, "--eval-every", 12]
    result = run("cil", tmp_path / "out", *FLAGS, *flags)
    before, saved = result.run.extra_state["before"], result.run.extra_state["saved"]
    assert saved["auc"] > before["auc"] + 12, (before["auc"], saved["auc"])    # measured: 18 → 60, 53 (code)
    again = cil.evaluate(*reload(tmp_path / "out", form))
    assert all(saved[name] == pytest.approx(value, rel=1e-6) for name, value in again.items())


def reload(folder, form):
    """Return the arguments of cil.evaluate for a saved model."""
    flags = ["--evaluate", "--model", folder, "--data", DATA / "relations_dev.jsonl", "--form", form]
    args = cil.make_parser().parse_args([*map(str, flags)])
    model = cil.build_model(args, SimpleNamespace(args=args, device=torch.device("cpu"), bf16=False), None)
    return model, relation_bags.load_bags(args.data, model, args), args


def test_saved_model_loads_in_transformers(tmp_path):
    """transformers loads encoder and tokenizer with the marks. A further run starts from all saved layers."""
    first = run("cil", tmp_path / "out", *SHORT, "--eval-every", 9)     # saves the last model
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "[H-CLS] Ada [H-SEP] taught [T-CLS] Otto [T-SEP] ."
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert {*first.model.marks.tolist()} < {*ids[0].tolist()}
    encoder = AutoModel.from_pretrained(tmp_path / "out", add_pooling_layer=False).eval()
    expected = first.model.eval().encoder(ids).last_hidden_state
    torch.testing.assert_close(encoder(ids).last_hidden_state, expected)
    second = run("cil", tmp_path / "next", "--model", tmp_path / "out", *SHORT[2:], "--steps", 1, "--lr", 0)
    before, after = second.run.extra_state["before"], first.run.extra_state["saved"]
    assert before["auc"] == pytest.approx(after["auc"])


def test_damaged_heads(tmp_path, cwd, capfd):
    """A classifier with another number of relations than the model's config names."""
    run("cil", tmp_path / "out", *SHORT, "--steps", 1)
    save_file({"0.weight": torch.zeros(2, 2)}, tmp_path / "out/heads.safetensors")
    flags = "--evaluate", "--model", tmp_path / "out", "--data", DATA / "relations_dev.jsonl"
    rejects("cil", capfd, ".*heads.safetensors: .*", *flags)


def test_resume(tmp_path):
    flags = [*SHORT, "--eval-every", 2]
    check_resume("cil", tmp_path, flags, SHORT, 3, [3, 1])


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


@pytest.mark.parametrize("change, message", [
    (dict(text=3), "line 1: expected a JSON object with the texts text and relation, and .*"),
    (dict(h=dict(LINE["h"], pos=[1, 3])), r"line 1: h: pos \[1, 3\] is '..', expected the name '\w+'"),
    (dict(h=dict(LINE["h"], pos=[0, 900])), r"line 1: h: pos \[0, 900\] is .*, expected the name '\w+'"),
    (dict(h=dict(LINE["h"], pos=[-5, 900])), r"line 1: h: pos \[-5, 900\] is .*"),
    (dict(h=dict(LINE["h"], pos=[0])), "line 1: h: found .*, expected an object with the texts id .*"),
    (dict(t=None), "line 1: t: found None, expected an object with the texts .*"),
    (dict(text=LINE["text"] + " [T-SEP]"), r"line 1: the text contains \[T-SEP\], .*; delete it"),
    (dict(relation="NA"), "all relations are NA or no_relation; expected at least one other")])
def test_wrong_lines(change, message, cwd, capfd):
    Path("a.jsonl").write_text(json.dumps(LINE | change) + "\n")
    separator = ": " if message.startswith("all") else " "
    rejects("cil", capfd, f"a.jsonl{separator}{message}", *FLAGS[:2], "--data", "a.jsonl")


@pytest.mark.parametrize("flags, message", [
    (["--data", "good.csv"], r"good.csv line 1: not JSON: .* \(2 more lines are wrong\)"),
    (["--data", "missing.jsonl"], "missing.jsonl: No such file or directory"),
    (["--data", "empty.jsonl"], "empty.jsonl: no lines"), (["--dev", "empty.jsonl"], "empty.jsonl: no lines"),
    (["--max-length", 3], "--max-length 3: cuts all sentences before their entities; .*"),
    (["--batch-size", 41], r".*relations.jsonl: 40 bags, expected at least --batch-size \(41\)"),
    (["--bag-size", 0], "argument --bag-size: 0: expected a number of at least 1"),
    (["--form", "both"], "argument .* invalid choice: 'both' .*")])
def test_bad_input(flags, message, cwd, capfd):
    Path("empty.jsonl").write_text("")
    rejects("cil", capfd, message, *FLAGS, *flags)


def test_evaluate_needs_a_trained_model(bert, cwd, capfd):
    flags = "--evaluate", "--model", bert, "--data", DATA / "relations_dev.jsonl"
    rejects("cil", capfd, ".* no heads.safetensors, expected a model that this script has trained", *flags)
