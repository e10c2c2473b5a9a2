"""Self-Guided: its loss against the formulas written out, its two copies of the encoder, its runs."""
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModel

import selfguided
from formulas import POOL, agree, by_way, cosine, every_way, points
from kernels.training.text import tokens
from running import DATA, ONE_BATCH, SENTENCES, SMALL, one_by_one, refuse, run, run_text
from selfguided import compute_loss, layer_views, regularise, selfguided_loss

ROWS = [["Yes."], ["no, " * 20], *SENTENCES[:10]]
TEXT = [row[0] for row in ROWS]



def written_out(c, h, temperature, objective):
    """The four objectives term by term; in base, NT-Xent, h_i is an anchor as c_i is."""
    phi, terms = lambda u, v: torch.exp(cosine(u, v) / temperature), []
    for i, views in enumerate(h if h.dim() == 3 else h[:, None]):
        others = [j for j in range(len(c)) if j != i]
        negatives = [*h[others].reshape(-1, c.shape[1]), *c[others if objective in ("base", "opt1") else []]]
        pairs = [(c[i], view) for view in views] + [(views[0], c[i])] * (objective == "base")
        terms += [phi(u, v) / (phi(u, v) + sum(phi(u, n) for n in negatives)) for u, v in pairs]
    return -sum(torch.log(term) for term in terms) / len(terms)


@every_way
@pytest.mark.parametrize("objective", selfguided.OBJECTIVES)
@pytest.mark.parametrize("temperature", [0.01, 0.2])
def test_loss_is_the_papers(temperature, objective, way):
    """Also of sentences that occur twice, of c = h, of a zero vector, and of one sentence, which has 0."""
    c, h, views = points(7, 6, 0), points(7, 6, 1), points(21, 6, 2).view(7, 3, 6)
    twice, zero = c[[0, 1, 2, 1, 4]], c * (torch.arange(7) != 2)[:, None]
    cases = [(c[:2], h[:2]), (c[:1], h[:1]), (twice, twice), (twice, 2 * twice), (zero, h), (c, h)]
    if objective == "opt3":
        cases += [(c[:1], views[:1]), (twice, twice[:, None].expand(5, 4, 6)), (c, views)]
    part = lambda c, h: lambda own, **how: selfguided_loss(
        c[own], h[own], temperature, objective, gathered=(c, h), **how)
    for c, h in cases:
        agree(lambda c, h: by_way(way, len(c), part(c, h)),
              lambda c, h: written_out(c, h, temperature, objective), c, h)


@pytest.mark.parametrize("objective, flags, pooling, layers", [
    ("base", "--layers 2", "max", [2]), ("opt1", "--layers 2 --form code", "mean", [2]),
    ("opt2", "--layers 0 --view-pooling sum", "sum", [0]), ("opt3", "", "max", range(4)),
    ("opt3", "--form code --view-pooling max --layers 3 1", "max", [3, 1])])
def test_first_loss_is_the_papers(objective, flags, pooling, layers, tmp_path, bert, monkeypatch):
    """By the states of one sentence at a time; when T changes the views stay, however rows are grouped."""
    flags = ["--model", bert, "--objective", objective, "--lr", 0, "--width", 16, *ONE_BATCH, *flags.split()]
    result = run_text("selfguided", tmp_path, ROWS, *flags)
    model, head = result.model, result.model.projection
    assert [type(part).__name__ for part in head] == ["Linear", "GELU"] * 2 and head[1].approximate == "none"
    encoder = AutoModel.from_pretrained(bert, output_hidden_states=True).eval().requires_grad_(False)
    states = [encoder(**model.tokenizer(text, return_tensors="pt")).hidden_states for text in TEXT]
    views = torch.stack([torch.stack([POOL[pooling](x[layer][0]) for layer in layers]) for x in states])
    c = head(one_by_one(encoder, model.tokenizer, TEXT, "cls"))
    wanted = written_out(c.double(), head(views).double(), 0.01, objective).item()
    assert result.losses == pytest.approx([wanted], rel=1e-4)
    for weight in model.encoder.encoder.parameters():
        weight.data *= 1.5
    cls = one_by_one(model.encoder, model.tokenizer, TEXT, "cls")
    for cost in (0, 10**6):
        monkeypatch.setitem(tokens.GROUP_COST, "cpu", cost)
        batch = model.batch(tokens.tokenise(TEXT, model.tokenizer, 128)[0])
        assert len(batch) == 1 if cost else len(batch) > 4
        torch.testing.assert_close(layer_views(model, batch, result.args), views, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(model(batch), cls, atol=1e-5, rtol=0)


@pytest.mark.parametrize("form", ["paper", "code"])
def test_fixed_copy_stays_and_draws_the_tuned_one(form, tmp_path):
    """Six steps tune all of T but its word embeddings; F, with dropout in the code form, is outside. The
    gradient of ‖θ_T − θ_F‖² is 2λ (θ_T − θ_F), and nothing, not NaN, before the first step."""
    flags = ["--model", "scratch", "--form", form, "--lr", 1e-2, "--width", 16, "--regulariser-weight", 0.3]
    result = run_text("selfguided", tmp_path, ROWS, *flags, *ONE_BATCH, "--steps", 6)
    assert result.losses[-1] < 0.9 * result.losses[0], result.losses
    model, args, fixed = result.model.train(), result.args, result.model.fixed[0]
    assert [500 * step["lr"] for step in result.steps] == pytest.approx([0, 5, 4, 3, 2, 1])
    assert [step["distance"] > 0 for step in result.steps] == [False] * 2 + [True] * 4
    torch.manual_seed(args.seed)
    start = dict(selfguided.build_model(args, result.run).encoder.named_parameters())
    assert all(torch.equal(weight, start[name]) for name, weight in fixed.named_parameters())
    for name, weight in model.encoder.named_parameters():
        assert torch.equal(weight, start[name]) == name.startswith("embeddings."), name
    assert {name.split(".")[0] for name in result.state["model"]} == {"encoder", "projection"}
    batch = model.batch(tokens.tokenise(TEXT, model.tokenizer, 128)[0])
    same = torch.equal(*(layer_views(model, batch, args) for _ in range(2)))
    assert same == (form == "paper") and not torch.equal(model(batch), model(batch))
    model.zero_grad()
    compute_loss(model, batch, 12, args)[0].backward()
    pairs = list(zip(model.encoder.encoder.parameters(), fixed.encoder.parameters()))
    wanted = [tuned.grad + 0.6 * (tuned - fixed) for tuned, fixed in pairs]
    distance = sum((tuned - fixed).square().sum() for tuned, fixed in pairs).item()
    assert regularise(model, args).item() == pytest.approx(distance, rel=1e-5) and distance > 0.1
    torch.testing.assert_close([tuned.grad for tuned, _ in pairs], wanted)


@pytest.mark.parametrize("objective", ["base", "opt1", "opt2"])
def test_layers_are_drawn_for_each_sentence(objective, monkeypatch):
    """The value of a view is its place among three layers."""
    views, loss = torch.arange(3.0)[:, None].expand(600, 3, 4), Mock(return_value=torch.zeros(()))
    monkeypatch.setattr(selfguided, "layer_views", lambda *_: views)
    monkeypatch.setattr(selfguided, "selfguided_loss", loss)
    model = Mock(return_value=views[:, 0], projection=torch.nn.Identity(), device=views.device, bf16=False)
    for _ in range(2):
        compute_loss(model, None, 600, Mock(objective=objective))
    first, second = (call.args[1] for call in loss.call_args_list)
    assert first.shape == (600, 1, 4) and torch.equal(first.amin(2), first.amax(2))
    assert first.long().flatten().bincount().min() > 4 * 150 and 300 < (first != second).sum() / 4 < 500


@pytest.mark.parametrize("content, wanted", [
    ("sentence1\tscore\tsentence2\tgenre\nA\t5\tB\tx\nC\t0.5\t7\tx\n", "A B C 7"),     # by name
    ("A\tB\t5\nC\t7\t0.5\n", "A B C 7"), ("5\tA\t2\n0.5\tB\t.5\n", "A B"), ("A\nB\n", "A B")])
def test_columns_of_sentences(content, wanted, tmp_path):
    """Named, or all that are not numbers throughout."""
    (tmp_path / "a.tsv").write_text(content)
    args = selfguided.make_parser().parse_args(["--data", "x", "--batch-size", "2"])
    assert [text for _, (text,) in selfguided.load_data(tmp_path / "a.tsv", args)] == wanted.split()


FILES = {"one.txt": "A\n", "numbers.tsv": "1\t2\n3\t4.5\n", "empty.csv": "sentence1,sentence2,score\nA,,5\n"}


@pytest.mark.parametrize("flags, wanted", [
    ("--data one.txt", "one.txt: 1 sentences, wanted at least --batch-size, and that at least 2; it is 2"),
    ("--batch-size 1", "good.csv: 6 .*; it is 1"), ("--data numbers.tsv", "numbers.tsv: 0 .*; it is 2"),
    ("--data empty.csv", "empty.csv line 2: an empty cell; fill it or delete the row"),
    ("--objective opt4", "argument .* invalid choice: 'opt4' .*"), ("--width 0", "argument .* at least 1"),
    ("--view-pooling cls", "argument .* invalid choice: 'cls' .*"), ("--layers -1", "argument .* at least 0"),
    ("--layers 0 3", "--layers 3: scratch has layers 0, the word embeddings, to 2"),
    ("--regulariser-weight -1", "argument .* at least 0")])
def test_bad_input(flags, wanted, here, capfd):
    for name, content in FILES.items():
        Path(name).write_text(content)
    refuse("selfguided", capfd, wanted, *SMALL, *flags.split())


def test_learns(tmp_path):
    """SimCSE's encoder with noise for its last layer: [CLS] regains what the layers below know."""
    first, flags = tmp_path / "first", ["--data", DATA / "nli.csv", "--batch-size", 16, "--steps", 40]
    run("simcse", first, "--model", "scratch", *flags)
    encoder = AutoModel.from_pretrained(first, add_pooling_layer=False)
    torch.manual_seed(0)
    for weight in encoder.encoder.layer[-1].parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.1)
    encoder.save_pretrained(first)
    flags = ["--model", first, "--data", DATA / "sentences.txt", "--dev", DATA / "sts.tsv", "--form", "code"]
    flags += ["--width", 128, "--batch-size", 12, "--lr", 2e-3, "--temperature", 0.05, "--steps", 60]
    flags += ["--pooling", "cls"]                              # the folder says avg
    result = run("selfguided", tmp_path / "out", *flags, "--eval-every", 60)
    before, best = (float(result.said["done"].split()[i]) for i in (2, 4))
    assert best > before + 8                                   # 33.59 → 49.78
