"""Self-Guided: its loss against float64 formulas written out, its two copies of the encoder, and whole small runs."""
import csv
import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer, get_linear_schedule_with_warmup

import selfguided
import simcse
from selfguided import pool_tokens, regularise, selfguided_loss, warmup_linear
from test_losses import agree, cosine, points
from test_scripts import DATA, SENTENCES, bert, one_cpu_thread, pooled, run, run_text  # noqa: F401, the fixtures hold here too

OBJECTIVES = ("base", "opt1", "opt2", "opt3")
every_objective = pytest.mark.parametrize("objective", OBJECTIVES)
every_impl = pytest.mark.parametrize("impl", ["blockwise", "eager"])
TEXT = [row[0] for row in SENTENCES]


# ── the loss ──


def written_out(c, h, temperature, objective):
    """The four objectives as they are printed, term by term."""
    phi = lambda u, v: torch.exp(cosine(u, v) / temperature)
    b, h, terms = len(c), h if h.dim() == 3 else h[:, None], []
    if objective == "base":
        x = [*c, *h[:, 0]]
        for m in range(2 * b):
            terms.append(phi(x[m], x[(m + b) % (2 * b)]) / sum(phi(x[m], x[n]) for n in range(2 * b) if n != m))
    for i in range(b if objective != "base" else 0):
        negatives = sum(phi(c[i], view) for j in range(b) if j != i for view in h[j])
        if objective == "opt1":
            negatives = negatives + sum(phi(c[i], c[j]) for j in range(b) if j != i)
        terms += [phi(c[i], view) / (phi(c[i], view) + negatives) for view in h[i]]
    return -sum(torch.log(term) for term in terms) / len(terms)


@every_impl
@every_objective
@pytest.mark.parametrize("b", [1, 2, 7])
@pytest.mark.parametrize("temperature", [0.01, 0.2])
def test_loss_is_the_papers(impl, objective, b, temperature):
    for h in (points(b, 6, 1), *([points(3 * b, 6, 2).view(b, 3, 6)] if objective == "opt3" else [])):
        agree(lambda c, h: selfguided_loss(c, h, temperature, objective, impl=impl),
              lambda c, h: written_out(c, h, temperature, objective), points(b, 6, 0), h)


@every_impl
@every_objective
def test_identical_views_and_duplicate_sentences(impl, objective):
    """c = h (the loss's floor in a batch), and rows that occur twice, which are each other's negatives."""
    c = points(5, 6, 3)
    c[3] = c[1]
    for h in (c, c[:, None].expand(5, 4, 6) if objective == "opt3" else c * 2):
        agree(lambda c, h: selfguided_loss(c, h, 0.05, objective, impl=impl),
              lambda c, h: written_out(c, h, 0.05, objective), c, h.clone())


def test_number_of_views():
    """One view: opt3 is opt2. The same view L times: every negative counts L times, so it is not."""
    c, h = points(5, 6, 4), points(5, 6, 5)
    assert selfguided_loss(c, h[:, None], 0.1) == selfguided_loss(c, h, 0.1) == selfguided_loss(c, h, 0.1, "opt2")
    logits = F.normalize(c, dim=1) @ F.normalize(h, dim=1).T / 0.1 + math.log(3) * (1 - torch.eye(5, dtype=torch.float64))
    wanted = F.cross_entropy(logits, torch.arange(5))
    torch.testing.assert_close(selfguided_loss(c, h[:, None].expand(5, 3, 6), 0.1), wanted, rtol=1e-12, atol=1e-12)
    assert wanted > selfguided_loss(c, h, 0.1, "opt2") + 0.1


@every_impl
@every_objective
def test_one_sentence_is_zero(impl, objective):
    c, h = points(1, 6, 6).requires_grad_(), points(1, 6, 7).requires_grad_()
    loss = selfguided_loss(c, h, objective=objective, impl=impl)
    loss.backward()
    assert loss == 0 and not c.grad.any() and not h.grad.any()


@every_objective
def test_ranks_make_the_global_loss(objective):
    """Two ranks of 3 sentences: the mean of their losses, and the sum of the gathered rows' gradients, are one process's."""
    leaves = points(6, 5, 8).requires_grad_(), points(6 * 4, 5, 9).view(6, 4, 5)[:, : 4 if objective == "opt3" else 1].requires_grad_()
    whole = selfguided_loss(*leaves, 0.1, objective)
    c, h = leaves
    parts = sum(selfguided_loss(c[i:i + 3], h[i:i + 3], 0.1, objective, gathered=(c, h), offset=i) for i in (0, 3)) / 2
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    for ours, wanted in zip(torch.autograd.grad(parts, leaves), torch.autograd.grad(whole, leaves)):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)


@every_objective
def test_scale_zero_vectors_and_dtypes(objective):
    c, h = points(5, 6, 10), points(5, 6, 11)
    loss = selfguided_loss(c, h, objective=objective)
    torch.testing.assert_close(selfguided_loss(c * torch.arange(1, 6)[:, None], h * 1e3, objective=objective), loss, rtol=1e-12, atol=1e-12)
    assert selfguided_loss(c.float(), h.float(), objective=objective).item() == pytest.approx(loss.item(), rel=1e-5)
    half = c.bfloat16(), h.bfloat16()
    units = [F.normalize(x, dim=1).double() for x in half]     # rounding to bfloat16 is the caller's
    ours = selfguided_loss(*half, 0.1, objective)
    assert loss.dtype == torch.float64 and ours.dtype == torch.float32
    n = [x.norm(dim=1, keepdim=True) for x in units]
    assert max((x - 1).abs().max() for x in n) < 0.01 and ours.item() == pytest.approx(selfguided_loss(*units, 0.1, objective).item(), rel=0.02)
    c[2] = 0
    c.requires_grad_()
    loss = selfguided_loss(c, h, objective=objective)
    loss.backward()
    torch.testing.assert_close(loss.detach(), written_out(c.detach(), h, 0.01, objective), rtol=1e-10, atol=1e-10)
    assert c.grad.isfinite().all()


def test_no_tensor_of_all_pairs_waits_for_the_gradient():
    """Of 64 sentences with 8 views of 4 numbers; eager keeps what blockwise does not."""
    def largest(impl):
        sizes, keep = [], lambda x: sizes.append(x.numel()) or x
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            selfguided_loss(points(64, 4, 12).requires_grad_(), points(512, 4, 13).view(64, 8, 4).requires_grad_(), impl=impl)
        return max(sizes)
    assert largest("eager") >= 64 * 64 * 8 and largest("blockwise") <= 64 * 8 * 4


@pytest.mark.parametrize("c, h, objective, wanted", [
    ((3, 4), (3, 4), "opt4", "objective: 'opt4', wanted base, opt1, opt2 or opt3"),
    ((3, 4), (3, 2, 4), "opt1", r"h: found shape \(3, 2, 4\), wanted \(3, D\) or for opt3 \(3, L, D\)"),
    ((3, 4), (2, 4), "opt3", r"h: found shape \(2, 4\), wanted \(3, D\).*"),
    ((3, 4), (4,), "opt2", r"h: found shape \(4,\), wanted .*"),
    ((3, 4), (3, 5), "opt2", "k: 5 features a row, q has 4")])
def test_loss_refuses(c, h, objective, wanted):
    with pytest.raises(ValueError, match=wanted):
        selfguided_loss(torch.randn(c), torch.randn(h), objective=objective)


# ── the two copies ──


def one_by_one(encoder, tokenizer, sentences, pooling, layers):
    """(n, layers, H): each sentence alone, so without padding, and pooled by the definitions."""
    pools = dict(max=lambda x: x.max(0).values, mean=lambda x: x.mean(0), sum=lambda x: x.sum(0))
    rows = []
    for tokens in (tokenizer(sentence, return_tensors="pt") for sentence in sentences):
        with torch.no_grad():
            states = encoder.eval()(**tokens, output_hidden_states=True).hidden_states
        rows.append(torch.stack([pools[pooling](states[k][0]) for k in layers]))
    return torch.stack(rows)


@pytest.mark.parametrize("flags, pooling, layers", [
    ([], "max", [0, 1, 2, 3]), (["--form", "code"], "mean", [0, 1, 2, 3]), (["--view-pooling", "sum"], "sum", [0, 1, 2, 3]),
    (["--form", "code", "--view-pooling", "max", "--layers", 3, 1], "max", [3, 1])])
def test_views_are_those_of_the_folder(flags, pooling, layers, tmp_path, bert, monkeypatch):
    """After training, however rows are ordered and grouped; [CLS] is the tuned copy's."""
    sentences = ["Yes.", "no, " * 20, *TEXT[:10]]
    result = run_text("selfguided", tmp_path, SENTENCES[:12], "--model", bert, "--batch-size", 4, "--width", 16, "--lr", 1e-2, *flags)
    model, tokenizer, sizes = result.model, result.model.tokenizer, set()
    wanted = one_by_one(AutoModel.from_pretrained(bert), tokenizer, sentences, pooling, layers)
    cls = pooled(model.encoder, tokenizer, sentences, "cls")
    assert (cls - pooled(model.fixed[0], tokenizer, sentences, "cls")).abs().max() > 0.1
    rows = [(ids,) for ids in selfguided.tokenise(sentences, model, 128)[0]]
    for cost in (0, 10**6):
        monkeypatch.setitem(selfguided.GROUP_COST, "cpu", cost)
        for order in (list(range(12)), [7, 1, 3, 0, 3]):
            batch = selfguided.make_batch([rows[i] for i in order], model, result.args)
            sizes.add(len(batch))
            torch.testing.assert_close(selfguided.layer_views(model, batch, result.args), wanted[order], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(selfguided.embed(model, batch), cls[order], atol=1e-5, rtol=0)
    assert min(sizes) == 1 and max(sizes) > 4


def test_pool_tokens():
    """Padding, even enormous, changes nothing, a row of it gives no NaN, and the hidden states stay as they were."""
    hidden, mask = torch.randn(3, 4, 5), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    hidden[0, 2:] = 1e6
    before = hidden.clone()
    for pooling, wanted in (("max", hidden[0, :2].max(0).values), ("mean", hidden[0, :2].mean(0)), ("sum", hidden[0, :2].sum(0))):
        ours = pool_tokens(hidden, mask, pooling)
        torch.testing.assert_close(ours[0], wanted)
        assert ours.isfinite().all() and torch.equal(hidden, before)


def test_fixed_copy_is_fixed_and_stays_outside(tmp_path):
    """Six steps tune all layers of T but its word embeddings; F, without dropout unless --form code, is nowhere but beside it."""
    flags = ["--model", "scratch", "--batch-size", 8, "--width", 16, "--lr", 1e-3, "--steps", 6]
    result = run_text("selfguided", tmp_path, SENTENCES[:36], *flags)
    model, fixed = result.model, result.model.fixed[0]
    torch.manual_seed(result.args.seed)
    start = dict(selfguided.load_encoder(result.args)[0].named_parameters())
    same = {name: torch.equal(weight, start[name]) for name, weight in model.encoder.named_parameters()}
    assert all(torch.equal(weight, start[name]) for name, weight in fixed.named_parameters())
    assert [name for name in same if same[name]] == [name for name in same if name.startswith("embeddings.")]
    assert {name.split(".")[0] for name in result.state["model"]} == {"encoder", "projection"}
    trained = sum(1 for weight in model.parameters() if weight.requires_grad)
    assert len(result.state["optimizer"]["state"]) == trained == len(same) - 5 + 4            # two linears, and no word embeddings
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(fixed.state_dict())
    model.train()
    batch = selfguided.make_batch([(ids,) for ids in selfguided.tokenise(TEXT[:4], model, 128)[0]], model, result.args)
    assert torch.equal(*(selfguided.layer_views(model, batch, result.args) for _ in range(2)))
    assert not torch.equal(*(selfguided.embed(model, batch) for _ in range(2)))
    (tmp_path / "code").mkdir()
    result = run_text("selfguided", tmp_path / "code", SENTENCES[:36], *flags, "--form", "code")
    assert not torch.equal(*(selfguided.layer_views(result.model, batch, result.args) for _ in range(2)))


def test_regulariser(tmp_path, bert):
    """Its gradient is autograd's of λ Σ (θ_T − θ_F)², and nothing, not NaN, before the first step."""
    result = run_text("selfguided", tmp_path, SENTENCES[:12], "--model", bert, "--batch-size", 6, "--width", 16, "--lr", 1e-2, "--steps", 2)
    assert result.steps[0]["distance"] == 0 and result.steps[1]["distance"] == 0              # the warm-up begins at 0
    model, args = result.model.train(), result.args
    args.regulariser_weight = 0.3
    batch = selfguided.make_batch([(ids,) for ids in selfguided.tokenise(TEXT[:6], model, 128)[0]], model, args)
    fixed = dict(model.fixed[0].named_parameters())
    def gradients(total):
        model.zero_grad()
        total.backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.requires_grad}
    loss = selfguided.compute_loss(model, batch, args)[0]
    distance = sum((weight - fixed[name]).square().sum() for name, weight in model.encoder.named_parameters())
    wanted = gradients(loss + 0.3 * distance)
    gradients(selfguided.compute_loss(model, batch, args)[0])
    assert distance > 0.1 and regularise(model, args).item() == pytest.approx(distance.item(), rel=1e-5)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            torch.testing.assert_close(weight.grad, wanted[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("objective", ["base", "opt1", "opt2"])
def test_layers_are_drawn_for_each_sentence(objective, tmp_path, bert, monkeypatch):
    flags = ["--model", bert, "--batch-size", 6, "--width", 16, "--steps", 1, "--objective", objective, "--layers", 1, 2, 3]
    result, seen = run_text("selfguided", tmp_path, SENTENCES[:12], *flags), []
    views = torch.arange(3.0)[None, :, None].expand(6, 3, 32)                  # the value is the place among --layers
    monkeypatch.setattr(selfguided, "layer_views", lambda *_: views)
    monkeypatch.setattr(selfguided, "selfguided_loss", lambda c, h, *_, **__: seen.append(h) or h.sum())
    result.model.projection = torch.nn.Identity()
    batch = selfguided.make_batch([(ids,) for ids in selfguided.tokenise(TEXT[:6], result.model, 128)[0]], result.model, result.args)
    torch.manual_seed(0)
    for _ in range(100):
        selfguided.compute_loss(result.model, batch, result.args)
    drawn = torch.stack(seen)
    assert drawn.shape == (100, 6, 1, 32) and torch.equal(drawn, drawn[..., :1].expand_as(drawn))
    counts = [(drawn[..., 0] == k).sum(0) for k in range(3)]
    assert min(count.min() for count in counts) > 15 and sum(count.sum() for count in counts) == 600      # of 33 expected
    pairs = sum((drawn[:, i, 0, 0] == drawn[:, j, 0, 0]).float().mean() for i in range(6) for j in range(i)) / 15
    assert 0.25 < pairs < 0.42


# ── whole runs ──


@every_objective
@pytest.mark.parametrize("pooling", ["max", "mean"])
def test_first_loss_is_the_papers(objective, pooling, tmp_path, bert):
    """Without dropout and with all rows in one batch: the folder's own vectors through the head that was drawn."""
    layers = [0, 1, 2, 3] if objective == "opt3" else [2]
    flags = ["--model", bert, "--batch-size", 12, "--width", 16, "--lr", 0, "--temperature", 0.05, "--steps", 1]
    result = run_text("selfguided", tmp_path, SENTENCES[:12], *flags, "--objective", objective, "--view-pooling", pooling, "--layers", *layers)
    encoder, tokenizer = AutoModel.from_pretrained(bert), AutoTokenizer.from_pretrained(bert)
    head = result.model.projection
    assert [type(part).__name__ for part in head] == ["Linear", "GELU"] * 2 and head[1].approximate == "none"
    with torch.no_grad():
        c = head(pooled(encoder, tokenizer, TEXT[:12], "cls")).double()
        h = head(one_by_one(encoder, tokenizer, TEXT[:12], pooling, layers)).double()
    assert result.losses[0] == pytest.approx(written_out(c, h, 0.05, objective).item(), abs=1e-4)
    assert result.losses[0] > 0.1


def test_learns(tmp_path):
    """SimCSE's encoder with noise for its last layer: [CLS] regains what the layers below know."""
    simcse.main(["--model", "scratch", "--data", f"{DATA}/nli.csv", "--dev", f"{DATA}/sts.tsv", "--out", str(tmp_path / "first")])
    encoder, folder = AutoModel.from_pretrained(tmp_path / "first", add_pooling_layer=False), tmp_path / "noisy"
    torch.manual_seed(0)
    for weight in encoder.encoder.layer[-1].parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.1)
    encoder.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tmp_path / "first").save_pretrained(folder)
    flags = ["--model", folder, "--data", DATA / "sentences.txt", "--dev", DATA / "sts.tsv", "--form", "code"]
    result = run("selfguided", tmp_path / "out", *flags, "--width", 256, "--batch-size", 32, "--lr", 2e-3, "--steps", 50)
    before, best = (float(result.said["done"].split()[i]) for i in (2, 4))
    assert best > before + 12


@pytest.mark.parametrize("pooling", ["cls", "avg"])
@pytest.mark.parametrize("library", ["transformers", "sentence_transformers"])
def test_others_load_the_folder(library, pooling, tmp_path, bert):
    """By the line that was printed: the embeddings are those of the tuned copy in state.pt, and no head is random."""
    module = pytest.importorskip(library)
    flags = ["--model", bert, "--pooling", pooling, "--batch-size", 8, "--width", 16, "--steps", 3, "--lr", 1e-2, "--max-length", 16]
    result = run_text("selfguided", tmp_path, SENTENCES[:24], *flags)
    sentences = ["no, " * 20, *TEXT[:12]]                      # longer than 16 tokens
    model = result.model.eval()
    model.load_state_dict(result.state["model"])
    rows = [(ids,) for ids in selfguided.tokenise(sentences, model, 512)[0]]
    ours = selfguided.embed(model, selfguided.make_batch(rows, model, result.args)).detach()
    sentence_transformer, auto_model = result.said["load"].split("  or  ")
    if library == "sentence_transformers":
        theirs = torch.from_numpy(eval(sentence_transformer, vars(module)).encode(sentences))
    else:
        loaded, info = AutoModel.from_pretrained(tmp_path / "out", add_pooling_layer=False, output_loading_info=True)
        assert not any(info.values()) and eval(auto_model, {"AutoModel": AutoModel}).pooler is None
        theirs = pooled(loaded, AutoTokenizer.from_pretrained(tmp_path / "out"), sentences, pooling)
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)


def test_data_formats(tmp_path):
    """Sentences are those of the named columns, or of all columns that are not numbers throughout."""
    pairs = [("A man eats.", "He eats.", 5), ("In 1914", "7", 0.5), ("\"Go,\" he said.", "B", 3.25)]
    texts = {"a.txt": "\n".join(text for row in pairs for text in row[:2]), "b.jsonl": "\n".join(json.dumps(row) for row in pairs),
             "c.json": json.dumps([dict(score=score, sentence2=b, genre="news", sentence1=a) for a, b, score in pairs]),
             "d.tsv": "\n".join("\t".join(map(str, row)) for row in pairs), "e.json": json.dumps([row[:2] for row in pairs])}
    args = selfguided.make_parser().parse_args(["--data", "x", "--batch-size", "2"])
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        rows = selfguided.load_data(tmp_path / name, args)
        assert sorted(text for _, text in rows) == sorted((text,) for row in pairs for text in row[:2]), name
    with open(tmp_path / "f.csv", "w", newline="") as file:
        csv.writer(file).writerows([("sentence1", "sentence2", "score", "subset"), *((*row, "x") for row in pairs)])
    f, a = ([text for _, text in selfguided.load_data(tmp_path / name, args)] for name in ("f.csv", "a.txt"))
    assert f == a


@pytest.mark.parametrize("total, warmup", [(20, 2), (1079, 108), (1, 1), (5, 0)])
def test_learning_rate_is_transformers_linear_schedule(total, warmup):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2.0)
    schedule = get_linear_schedule_with_warmup(optimizer, warmup, total)
    for step in range(total):
        assert warmup_linear(step, total, warmup, 2.0) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("name, content, flags, wanted", [
    ("wiki.txt", "", "", r"wiki\.txt: no rows"),
    ("wiki.txt", "A man eats.\n", "", r"wiki\.txt: 1 sentences, wanted at least --batch-size, and that at least 2; it is 2"),
    ("wiki.txt", "A\nB\nC\n", "--batch-size 1", r"wiki\.txt: 3 sentences, wanted at least --batch-size, and that at least 2; it is 1"),
    ("wiki.txt", "A\nB\nC\n", "--batch-size 4", r"wiki\.txt: 3 sentences, wanted at least --batch-size, and that at least 2; it is 4"),
    ("wiki.txt", "A\n\nC\n", "", r"wiki\.txt line 2: an empty cell; fill it or delete the row"),
    ("numbers.csv", "1,2\n3,4.5\n", "", r"numbers\.csv: 0 sentences, wanted at least --batch-size, and that at least 2; it is 2"),
    ("sts.tsv", "A\tB\t5\nC\tD\n", "", r"sts\.tsv line 2: 2 columns, wanted 3"),
    ("sts.jsonl", '["A", "B"]\n["A", ["B"]]\n', "", r"sts\.jsonl line 2: wanted a row of texts, found .*"),
    ("sts.tsv", "sentence1\tsentence2\tscore\nA\t\t5\n", "", r"sts\.tsv line 2: an empty cell; .*"),
    ("wiki.txt", "A\nB\n", "--objective opt4", r"argument --objective: invalid choice: 'opt4' \(choose from .*\)"),
    ("wiki.txt", "A\nB\n", "--form released", r"argument --form: invalid choice: 'released' .*"),
    ("wiki.txt", "A\nB\n", "--view-pooling cls", r"argument --view-pooling: invalid choice: 'cls' .*"),
    ("wiki.txt", "A\nB\n", "--layers 0 3", r"--layers 3: scratch has layers 0, the word embeddings, to 2"),
    ("wiki.txt", "A\nB\n", "--layers -1", r"argument --layers: -1: wanted a number of at least 0"),
    ("wiki.txt", "A\nB\n", "--layers", r"argument --layers: expected at least one argument"),
    ("wiki.txt", "A\nB\n", "--regulariser-weight -1", r"argument --regulariser-weight: -1: wanted a number of at least 0"),
    ("wiki.txt", "A\nB\n", "--width 0", r"argument --width: 0: wanted a number of at least 1"),
    ("wiki.txt", "A\nB\n", "--max-length 513", r"--max-length 513: scratch reads at most 512 tokens"),
    ("wiki.txt", "A\nB\n", "--model none/such", r"--model none/such: no such folder, and the hub .*; name a local folder, or take scratch"),
    ("wiki.txt", "A\nB\n", "--model empty", r"--model empty: no config\.json in this folder, so it is no transformers model"),
    ("wiki.txt", "A\nB\n", "--dev wiki.txt", r"wiki\.txt: no header; wanted sentence1, sentence2, score, or 3 columns.*"),
    ("wiki.txt", "A\nB\n", "--resume", r"--out out: no state\.pt to resume from")])
def test_bad_input(name, content, flags, wanted, tmp_path, monkeypatch, capfd):
    """One line, exit code 2, nothing written."""
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path(name).write_text(content)
    with pytest.raises(SystemExit) as end:
        selfguided.main(["--data", name, "--model", "scratch", "--batch-size", "2", "--width", "16", "--out", "out", *flags.split()])
    err = capfd.readouterr().err
    assert end.value.code == 2 and re.fullmatch(rf"selfguided\.py: {wanted}\n", err), err
    assert {path.name for path in tmp_path.iterdir()} == {"empty", name}
