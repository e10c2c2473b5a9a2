"""Self-Guided: its loss against the formulas written out, its two copies of the encoder, its runs."""
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

import selfguided
from kernels.training import tokens
from running import DATA, SENTENCES, one_by_one, refuse, run, run_text
from selfguided import compute_loss, layer_views, pool_tokens, regularise, selfguided_loss
from test_losses import agree, cosine, points

every_objective = pytest.mark.parametrize("objective", selfguided.OBJECTIVES)
ROWS = [["Yes."], ["no, " * 20], *SENTENCES[:10]]
TEXT = [row[0] for row in ROWS]
POOL = dict(max=lambda x: x.amax(0), mean=lambda x: x.mean(0), sum=lambda x: x.sum(0))

# ── the loss ──


def written_out(c, h, temperature, objective):
    """The four objectives term by term; in base, NT-Xent, h_i is an anchor as c_i is."""
    phi, terms = lambda u, v: torch.exp(cosine(u, v) / temperature), []
    for i, views in enumerate(h if h.dim() == 3 else h[:, None]):
        others = [j for j in range(len(c)) if j != i]
        negatives = [*h[others].reshape(-1, c.shape[1]), *c[others if objective in ("base", "opt1") else []]]
        pairs = [(c[i], view) for view in views] + [(views[0], c[i])] * (objective == "base")
        terms += [phi(u, v) / (phi(u, v) + sum(phi(u, n) for n in negatives)) for u, v in pairs]
    return -sum(torch.log(term) for term in terms) / len(terms)


@every_objective
@pytest.mark.parametrize("impl", ["blockwise", "eager"])
@pytest.mark.parametrize("temperature", [0.01, 0.2])
def test_loss_is_the_papers(temperature, impl, objective):
    """Also of sentences that occur twice, of c = h, of a zero vector, and of one sentence, which has 0."""
    c, h, views = points(7, 6, 0), points(7, 6, 1), points(21, 6, 2).view(7, 3, 6)
    twice, zero = c[[0, 1, 2, 1, 4]], c * (torch.arange(7) != 2)[:, None]
    cases = [(c, h), (c[:2], h[:2]), (c[:1], h[:1]), (twice, twice), (twice, 2 * twice), (zero, h)]
    if objective == "opt3":
        cases += [(c, views), (c[:1], views[:1]), (twice, twice[:, None].expand(5, 4, 6))]
    for c, h in cases:
        agree(lambda c, h: selfguided_loss(c, h, temperature, objective, impl=impl),
              lambda c, h: written_out(c, h, temperature, objective), c, h)


@every_objective
def test_ranks_make_the_global_loss(objective):
    """Two ranks of 2 and 4 sentences: their parts, and the sum of the gathered rows' gradients."""
    c, h = points(6, 5, 8), points(24, 5, 9).view(6, 4, 5)[:, : 4 if objective == "opt3" else 1]
    whole = lambda c, h, **more: selfguided_loss(c, h, 0.1, objective, **more)
    part = lambda own, c, h: whole(c[own], h[own], gathered=(c, h), offset=own.start) * len(c[own]) / 6
    agree(lambda *both: part(slice(0, 2), *both) + part(slice(2, 6), *both), whole, c, h, tolerance=1e-12)


@every_objective
def test_dtypes(objective):
    c, h = points(5, 6, 10), points(5, 6, 11)
    exact = selfguided_loss(c, h, 0.1, objective).item()
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        loss = selfguided_loss(c.to(dtype), h.to(dtype), 0.1, objective)
        assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact, rel=tolerance)


def test_no_tensor_of_all_pairs_waits_for_the_gradient():
    """Of 64 sentences with 8 views of 4 numbers."""
    sizes, c, h = [], points(64, 4, 12).requires_grad_(), points(512, 4, 13).view(64, 8, 4).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        selfguided_loss(c, h, impl="blockwise")
    assert 64 * 8 <= max(sizes) <= 64 * 8 * 4


@pytest.mark.parametrize("h, objective, wanted", [
    ((3, 4), "opt4", "objective: 'opt4', wanted base, .*"), ((3, 5), "opt2", "k: 5 features a row, q has 4"),
    ((3, 2, 4), "opt1", r"h: found \(3, 2, 4\), wanted \(3, D\) or for opt3 \(3, L, D\)"),
    ((2, 4), "opt3", r"h: found \(2, 4\), wanted \(3, D\).*"), ((4,), "opt2", r"h: found \(4,\), wanted .*")])
def test_loss_refuses(h, objective, wanted):
    with pytest.raises(ValueError, match=wanted):
        selfguided_loss(torch.randn(3, 4), torch.randn(h), objective=objective)


# ── the two copies ──


def trained(folder, model, *flags):
    return run_text("selfguided", folder, ROWS, "--model", model, "--width", 16, "--batch-size", 12, *flags)


def batch_of(model):
    return model.batch(tokens.tokenise(TEXT, model.tokenizer, 128)[0])


@pytest.mark.parametrize("objective, flags, pooling, layers", [
    ("base", "--layers 2", "max", [2]), ("opt1", "--layers 2 --form code", "mean", [2]),
    ("opt2", "--layers 0 --view-pooling sum", "sum", [0]), ("opt3", "", "max", range(4)),
    ("opt3", "--form code --view-pooling max --layers 3 1", "max", [3, 1])])
def test_first_loss_is_the_papers(objective, flags, pooling, layers, tmp_path, bert, monkeypatch):
    """By the states of one sentence at a time; when T changes the views stay, however rows are grouped."""
    result = trained(tmp_path, bert, "--objective", objective, *flags.split(), "--lr", 0, "--steps", 1)
    model, head = result.model, result.model.projection
    assert [type(part).__name__ for part in head] == ["Linear", "GELU"] * 2 and head[1].approximate == "none"
    encoder = AutoModel.from_pretrained(bert, output_hidden_states=True).eval().requires_grad_(False)
    states = [encoder(**model.tokenizer(text, return_tensors="pt")).hidden_states for text in TEXT]
    views = torch.stack([torch.stack([POOL[pooling](x[layer][0]) for layer in layers]) for x in states])
    c = head(one_by_one(encoder, model.tokenizer, TEXT, "cls"))
    wanted = written_out(c.double(), head(views).double(), 0.01, objective).item()
    assert result.losses[0] == pytest.approx(wanted, rel=1e-4)
    for weight in model.encoder.encoder.parameters():
        weight.data *= 1.5
    cls = one_by_one(model.encoder, model.tokenizer, TEXT, "cls")
    for cost in (0, 10**6):
        monkeypatch.setitem(tokens.GROUP_COST, "cpu", cost)
        batch = batch_of(model)
        assert len(batch) == 1 if cost else len(batch) > 4
        torch.testing.assert_close(layer_views(model, batch, result.args), views, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(model(batch), cls, atol=1e-5, rtol=0)


def test_pool_tokens():
    """Padding, even enormous, changes nothing, and stays as it was; a row of it alone gives no NaN."""
    hidden, mask = torch.randn(2, 4, 5), torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]])
    hidden[:, 2:] = 1e6
    for pooling, pool in POOL.items():
        ours = pool_tokens(hidden, mask, pooling)
        torch.testing.assert_close(ours[0], pool(hidden[0, :2]))
        assert ours.isfinite().all() and (hidden[:, 2:] == 1e6).all()


@pytest.mark.parametrize("form", ["paper", "code"])
def test_fixed_copy_is_fixed_and_stays_outside(form, tmp_path):
    """Six steps tune all of T but its word embeddings; F, with dropout in the code form, is in no file."""
    result = trained(tmp_path, "scratch", "--lr", 1e-3, "--steps", 6, "--form", form)
    model, fixed, batch = result.model.train(), result.model.fixed[0], batch_of(result.model)
    assert [5e3 * step["lr"] for step in result.steps] == pytest.approx([0, 5, 4, 3, 2, 1])
    torch.manual_seed(result.args.seed)
    start = dict(selfguided.build_model(result.args, result.run).encoder.named_parameters())
    assert all(torch.equal(weight, start[name]) for name, weight in fixed.named_parameters())
    for name, weight in model.encoder.named_parameters():
        assert torch.equal(weight, start[name]) == name.startswith("embeddings."), name
    assert {name.split(".")[0] for name in result.state["model"]} == {"encoder", "projection"}
    assert len(result.state["optimizer"]["state"]) == len(start) - 5 + 4       # no embeddings; two linears
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(fixed.state_dict())
    same = torch.equal(*(layer_views(model, batch, result.args) for _ in range(2)))
    assert same == (form == "paper") and not torch.equal(model(batch), model(batch))


def test_regulariser(tmp_path, bert):
    """‖θ_T − θ_F‖², whose gradient is 2λ (θ_T − θ_F), and nothing, not NaN, before the first step."""
    result = trained(tmp_path, bert, "--lr", 1e-2, "--steps", 3, "--regulariser-weight", 0.3)
    first, second, third = (step["distance"] for step in result.steps)
    assert first == second == 0 < third                        # the warm-up begins at 0
    model, args = result.model, result.args
    model.zero_grad()
    compute_loss(model, batch_of(model), 12, args)[0].backward()
    pairs = list(zip(model.encoder.encoder.parameters(), model.fixed[0].encoder.parameters()))
    wanted = [tuned.grad + 0.6 * (tuned - fixed) for tuned, fixed in pairs]
    distance = sum((tuned - fixed).square().sum() for tuned, fixed in pairs).item()
    assert regularise(model, args).item() == pytest.approx(distance, rel=1e-5) and distance > 0.1
    torch.testing.assert_close([tuned.grad for tuned, _ in pairs], wanted)


@pytest.mark.parametrize("objective", ["base", "opt1", "opt2"])
def test_layers_are_drawn_for_each_sentence(objective, monkeypatch):
    """The value of a view is its place among three layers."""
    views, loss = torch.arange(3.0)[:, None].expand(6, 3, 4), Mock(return_value=torch.zeros(()))
    monkeypatch.setattr(selfguided, "layer_views", lambda *_: views)
    monkeypatch.setattr(selfguided, "selfguided_loss", loss)
    model = Mock(return_value=views[:, 0], projection=torch.nn.Identity(), device=views.device, bf16=False)
    torch.manual_seed(0)
    for _ in range(100):
        compute_loss(model, None, 6, Mock(objective=objective))
    drawn = torch.stack([call.args[1] for call in loss.call_args_list])
    assert drawn.shape == (100, 6, 1, 4) and torch.equal(drawn.amin(3), drawn.amax(3))
    assert min((drawn[..., 0] == place).sum(0).min() for place in range(3)) > 15         # of 33 expected
    assert (drawn == drawn[:, :1]).flatten(1).all(1).float().mean() < 0.05     # sentences draw for themselves


@pytest.mark.parametrize("content, wanted", [
    ("sentence1\tscore\tsentence2\tgenre\nA\t5\tB\tx\nC\t0.5\t7\tx\n", "A B C 7"),     # by name
    ("A\tB\t5\nC\t7\t0.5\n", "A B C 7"), ("5\tA\t2\n0.5\tB\t.5\n", "A B"), ("A\nB\n", "A B")])
def test_columns_of_sentences(content, wanted, tmp_path):
    """Named, or all that are not numbers throughout."""
    (tmp_path / "a.tsv").write_text(content)
    args = selfguided.make_parser().parse_args(["--data", "x", "--batch-size", "2"])
    assert [text for _, (text,) in selfguided.load_data(tmp_path / "a.tsv", args)] == wanted.split()


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
    result = run("selfguided", tmp_path / "out", *flags, "--eval-every", 60)
    before, best = (float(result.said["done"].split()[i]) for i in (2, 4))
    assert best > before + 8                                   # 33.59 → 49.78


@pytest.mark.parametrize("content, flags, wanted", [
    ("A\n", "", "a.tsv: 1 sentences, wanted at least --batch-size, and that at least 2; it is 2"),
    ("A\nB\n", "--batch-size 1", "a.tsv: 2 sentences, wanted .*; it is 1"),
    ("1\t2\n3\t4.5\n", "", "a.tsv: 0 sentences, wanted .*; it is 2"),
    ("sentence1\tsentence2\tscore\nA\t\t5\n", "", "a.tsv line 2: an empty cell; fill it or delete the row"),
    ("A\nB\n", "--objective opt4", "argument --objective: invalid choice: 'opt4' .*"),
    ("A\nB\n", "--view-pooling cls", "argument --view-pooling: invalid choice: 'cls' .*"),
    ("A\nB\n", "--layers 0 3", "--layers 3: scratch has layers 0, the word embeddings, to 2"),
    ("A\nB\n", "--regulariser-weight -1", "argument --regulariser-weight: -1: wanted .*"),
    ("A\nB\n", "--width 0", ".* --width: 0: wanted .*"), ("A\nB\n", "--layers -1", ".* -1: wanted .*")])
def test_bad_input(content, flags, wanted, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.tsv").write_text(content)
    refuse("selfguided", capfd, wanted, *f"--data a.tsv --model scratch --batch-size 2 {flags}".split())
