"""DCLR against float64 formulas written out row by row, its edge cases, and how it reads its guide."""
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertTokenizer, DistilBertConfig, DistilBertModel

import dclr
from dclr import dclr_loss, instance_weights, noise_negatives
from running import DATA, SENTENCES, Memory, read, refuse, run_text
from test_losses import agree, cosine, points

every_impl = pytest.mark.parametrize("impl", ["blockwise", "eager"])
every_form = pytest.mark.parametrize("form", ["paper", "code"])
TEXTS = [row[0] for row in SENTENCES]


def written_out(z1, z2, noise, f1, f2, phi, temperature=0.05, form="paper"):
    """Both objectives as printed. paper: the sum has negatives alone, and an anchor without any adds 0. code:
    a weight of 0 makes a logit 0, and every entry is a yes or no, 1 − q being the sum of the others."""
    total, columns = 0 * (z1.sum() + z2.sum()), [*z2, *noise]
    for i, z in enumerate(z1):
        others = [j for j in range(len(columns)) if j != i]
        kept = [j for j in others if j >= len(z2) or cosine(f1[i], f2[j]) < phi]
        e = [torch.exp(cosine(z, y) / temperature) for y in columns]
        if form == "code":
            e = [x if j in (i, *kept) else torch.ones_like(x) for j, x in enumerate(e)]
            no = sum(torch.log(sum(e[:j] + e[j + 1 :]) / sum(e)) for j in others)
            total = total - torch.log(e[i] / sum(e)) - no
        elif kept:
            total = total - torch.log(e[i] / sum(e[j] for j in kept))
    return total / len(z1) / (len(columns) if form == "code" else 1)


def ascent_written_out(z1, z2, noise, steps=4, step_size=1e-3, temperature=0.05, form="paper"):
    """Steps up the gradient of Σ_i log Σ_k exp(cos(z_i, n_k) / τ), in the code form over z2 too."""
    for _ in range(steps if len(noise) else 0):
        noise = noise.detach().requires_grad_()
        columns = [*noise, *z2] if form == "code" else noise
        total = sum(torch.log(sum(torch.exp(cosine(z, y) / temperature) for y in columns)) for z in z1)
        gradient, = torch.autograd.grad(total, noise)
        noise = noise + step_size * torch.stack([g / g.norm() for g in gradient])
    return noise.detach()


def case(n, k):
    """Raw rows (z1, z2, noise, f1, f2): no symmetric weights; the first and the last row are duplicates."""
    rows = points(n, 6, 0), points(n, 6, 1), points(k, 6, 2), points(n, 4, 3), points(n, 4, 4)
    rows[3][-1] = rows[4][0]
    return rows


@every_impl
@every_form
@pytest.mark.parametrize("n, k, phi, temperature", [
    (7, 7, 0.3, 0.05), (5, 12, 0.3, 0.2), (9, 0, 0.3, 0.05), (8, 2, 0.999, 0.05), (6, 3, 1.5, 0.05),
    (6, 3, -1.5, 0.05), (1, 3, 0.9, 0.05), (2, 0, 1.5, 0.05), (1, 0, 0.9, 0.05), (4, 0, -1.5, 0.05)])
def test_loss(form, impl, n, k, phi, temperature):
    """φ 0.999 flags the duplicate alone, 1.5 none, −1.5 all. Without negatives value and gradient are 0."""
    z1, z2, *rest = *case(n, k), phi, temperature, form
    agree(lambda a, b: dclr_loss(a, b, *rest, impl=impl), lambda a, b: written_out(a, b, *rest), z1, z2)


@pytest.mark.parametrize("temperature", [0.05, 0.02, 0.005])
def test_code_form_where_q_rounds_to_one(temperature):
    """A negative beside its anchor, the positive opposite: 1 − q is exp(−1/τ …), far below its rounding."""
    axes = torch.eye(4).double()
    given = axes[:3], axes[[1, 2, 0]] - 0.1, -axes[:2] - 1, axes[:3], axes[:3]
    rest = *given[2:], 0.9, temperature, "code"
    agree(lambda a, b: dclr_loss(a, b, *rest), lambda a, b: written_out(a, b, *rest), *given[:2])
    single = [x.float().requires_grad_() for x in given]
    loss = dclr_loss(*single, *rest[3:])
    loss.backward()
    assert loss.item() == pytest.approx(written_out(*given, *rest[3:]).item(), rel=1e-5)
    assert single[0].grad.isfinite().all() and single[0].grad.abs().max() > 0.1


@every_form
def test_ranks_and_blocks_make_the_global_loss(form, monkeypatch):
    """Ranks of 1, 2 and 3 anchors against gathered rows, which the code form takes in blocks of two."""
    z1, z2, noise, f, _ = case(6, 5)
    cuts, apply = [slice(0, 1), slice(1, 3), slice(3, 6)], dclr.SumOfBlocks.apply
    monkeypatch.setattr(dclr.SumOfBlocks, "apply", lambda block, z, keys, size: apply(block, z, keys, 2))

    def parts(a, b):
        of_rank = lambda own: dclr_loss(a[own], b, noise, f[own], f, 0.3, form=form, offset=own.start)
        return sum(of_rank(own) * (own.stop - own.start) / 6 for own in cuts)
    agree(parts, lambda a, b: written_out(a, b, noise, f, f, 0.3, form=form), z1, z2)


@every_form
def test_constants_and_types(form):
    rows = [x.requires_grad_() for x in case(5, 4)]
    loss = dclr_loss(*rows, 0.3, form=form)
    gradients = torch.autograd.grad(loss, rows, allow_unused=True)
    assert [g is None for g in gradients] == [False, False, True, True, True]
    short = dclr_loss(*(x.detach().bfloat16() for x in rows), 0.3, form=form)
    assert short.dtype == torch.float32 and short.item() == pytest.approx(loss.item(), rel=0.1)


@pytest.mark.parametrize("form, impl, stores", [
    ("paper", "auto", False), ("code", "auto", False), ("paper", "eager", True), ("code", "auto", True)])
def test_memory(form, impl, stores, monkeypatch):
    """3,500 rows; their matrix, 47 MB, is stored by eager, or by the code form if one block had all rows."""
    z1, z2, f = (torch.randn(3500, 16, requires_grad=True) for _ in range(3))
    if stores:
        apply = dclr.SumOfBlocks.apply
        monkeypatch.setattr(dclr.SumOfBlocks, "apply", lambda block, z, keys, _: apply(block, z, keys, 3500))
    with Memory() as memory:
        noise = noise_negatives(z1, z2, torch.randn(500, 16), 1, form=form, impl=impl)
        dclr_loss(z1, z2, noise, f, f, 0.9, form=form, impl=impl).backward()
    assert (memory.peak > 150) == stores, memory.peak


def test_instance_weights():
    f1, f2 = points(8, 3, 0), points(8, 3, 1)
    for phi in (-1.5, -0.2, 0.5, 0.9, 1.5):
        wanted = [[float(i == j or cosine(f1[i], f2[j]) < phi) for j in range(8)] for i in range(8)]
        assert instance_weights(f1, f2, phi).tolist() == wanted
        assert instance_weights(f1[3:] * 7, f2 / 9, phi, offset=3).tolist() == wanted[3:]
    axes = torch.eye(3)[[0, 0, 1]]
    assert instance_weights(axes, axes, 0.0).tolist() == torch.eye(3).tolist()         # φ counts as similar
    assert instance_weights(axes, axes, 1.0).tolist() == [[1, 0, 1], [0, 1, 1], [1, 1, 1]]


def test_wrong_form():
    for function, given in ((dclr_loss, (*case(4, 3), 0.9)), (noise_negatives, case(4, 3)[:3])):
        with pytest.raises(ValueError, match="form: 'papr', wanted paper or code"):
            function(*given, form="papr")


@every_impl
@every_form
@pytest.mark.parametrize("n, k, steps, step_size, temperature", [
    (5, 5, 4, 1e-3, 0.05), (3, 7, 2, 0.5, 0.2), (1, 2, 1, 1e-3, 0.05), (5, 5, 0, 1, 1), (5, 0, 4, 1, 1)])
def test_noise(form, impl, n, k, steps, step_size, temperature):
    z1, z2, noise, *_ = case(n, k)
    how = steps, step_size, temperature, form
    with torch.no_grad():                                      # the gradient inside is its own affair
        ours = noise_negatives(z1.requires_grad_(), z2, noise, *how, impl=impl)
    torch.testing.assert_close(ours, ascent_written_out(z1, z2, noise, *how), rtol=1e-10, atol=1e-10)
    assert not ours.requires_grad and torch.equal(noise, case(n, k)[2])        # what was given is as it was


@every_form
@pytest.mark.parametrize("dtype, temperature", [(torch.float64, 0.005), (torch.float32, 0.025)])
def test_noise_steps_are_whole_or_none(form, dtype, temperature):
    """The weight of the second row is exp(−1/τ …), the square of its gradient no number of this type; along
    the anchor, at cosine ±1, the gradient is 0."""
    noise = torch.tensor([[0.99, 0.1, 0], [-0.99, 0.1, 0], [4, 0, 0], [-1, 0, 0]], dtype=dtype)
    z = 2 * torch.eye(3, dtype=dtype)[:1]
    moved = noise_negatives(z, z, noise, 1, 0.5, temperature, form) - noise
    assert moved.norm(dim=1).tolist() == pytest.approx([0.5, 0.5, 0, 0], abs=0, rel=1e-6)


def build(function, **flags):
    args = SimpleNamespace(**dict(data="none", pooling="cls", mlm_weight=0, max_length=32) | flags)
    return function(args, SimpleNamespace(args=args, device=torch.device("cpu"), bf16=False))


@pytest.fixture(scope="module")
def guides(bert, tmp_path_factory):
    """With 1_Pooling, one with other numbers for tokens; without a pooler; of a class with dropout."""
    home = tmp_path_factory.mktemp("guides")
    made = {name: shutil.copytree(bert, home / name) for name in ("mean", "first", "bare", "distilbert")}
    for name, mean in ("mean", "true"), ("first", "false"):
        config = made[name] / "1_Pooling" / "config.json"
        config.parent.mkdir()
        config.write_text(f'{{"pooling_mode_cls_token": true,\n "pooling_mode_mean_tokens": {mean}}}')
    vocab = AutoTokenizer.from_pretrained(bert).get_vocab()
    turned = {piece: len(vocab) + 4 - i if i > 4 else i for piece, i in vocab.items()}
    BertTokenizer(turned, model_max_length=512).save_pretrained(made["mean"])
    AutoModel.from_pretrained(bert, add_pooling_layer=False).save_pretrained(made["bare"])
    shape = dict(dim=32, n_layers=1, n_heads=2, hidden_dim=64, vocab_size=len(vocab))
    DistilBertModel(DistilBertConfig(**shape)).save_pretrained(made["distilbert"])
    return made | {"pooler": bert}


@pytest.mark.parametrize("name, how", [
    ("pooler", "pooler"), ("mean", "avg"), ("first", "cls"), ("bare", "cls"), ("distilbert", "cls")])
def test_guide_is_read_as_its_folder_says(name, how, guides, capsys):
    guide = build(dclr.build_guide, guide=guides[name])
    torch.testing.assert_close(guide.read(TEXTS[:8]), read(guides[name], TEXTS[:8], how), atol=1e-5, rtol=0)
    assert not guide.training and not any(weight.requires_grad for weight in guide.parameters())
    said = {"avg": "avg pooling", "cls": "cls pooling", "pooler": "cls pooling, its pooler"}[how]
    assert capsys.readouterr().out == f"guide    {guides[name]}, {said}\n"


@pytest.mark.parametrize("form, name, below", [
    ("paper", "pooler", "cls"), ("code", "pooler", "pooler"), ("code", "bare", "cls")])
def test_head_of_the_code_form_sits_on_the_pooler(form, name, below, guides):
    model = build(dclr.build_model, model=guides[name], form=form)
    linear = model.head if below == "cls" else model.head[-1]
    assert abs(linear.weight.std() - 0.2) < 0.02 and not linear.bias.any()
    wanted = torch.tanh(linear(read(guides[name], TEXTS[:4], below)))
    torch.testing.assert_close(model.train().read(TEXTS[:4]), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("form, noise_times", [("paper", 1.3), ("code", 1.3), ("paper", 0)])
def test_first_loss_is_the_papers(form, noise_times, guides, tmp_path, monkeypatch):
    """Without dropout and with all rows in one batch: the formula on the folders' own embeddings, each with
    its own tokenizer, and the noise that was drawn. The order of the rows is no matter."""
    monkeypatch.setattr(dclr, "noise_negatives", asked := Mock(wraps=noise_negatives))
    rows = SENTENCES[:10] + SENTENCES[:2]                      # two come twice
    z, f = (read(guides[name], [row[0] for row in rows], "avg").double() for name in ("bare", "mean"))
    phi = 0.99                                                 # 0.001 from each of their cosines
    flags = ["--model", guides["bare"], "--guide", guides["mean"], "--noise-times", noise_times, "--phi", phi,
             "--form", form, "--pooling", "avg", "--batch-size", 12, "--steps", 1, "--max-length", 512]
    loss, = run_text("dclr", tmp_path, rows, *flags).losses
    assert 4 < (1 - instance_weights(f, f, phi)).sum() < 100   # the duplicates and others, not all
    noise = asked.call_args_list[0].args[2].double()
    assert noise.shape == (int(noise_times * 12), 32)
    assert noise.square().sum() / 32 == pytest.approx(len(noise), rel=0.1)
    noise = ascent_written_out(z, z, noise, form=form)
    assert loss == pytest.approx(written_out(z, z, noise, f, f, phi, form=form).item(), abs=2e-4)


@pytest.mark.parametrize("flags, wanted", [
    ("--guide scratch", r"--guide scratch: no such folder, and the hub .*; name a local folder"),
    ("--phi 1.2", r"--phi 1\.2: wanted a cosine, from -1 to 1"),
    ("--phi -2", r"argument --phi: -2: wanted a number of at least -1"),
    ("--noise-times -1", r"argument --noise-times: -1: wanted a number of at least 0"),
    ("--data two.csv", r"two\.csv line 1: 2 columns, wanted 1 \(sentence\)")])
def test_bad_input(flags, wanted, bert, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.csv").write_text("A man eats.,He eats.\nA dog runs.,It runs.\n")
    small = ["--data", DATA / "sentences.txt", "--model", "scratch", "--guide", bert, *flags.split()]
    refuse("dclr", capfd, wanted, *small)
