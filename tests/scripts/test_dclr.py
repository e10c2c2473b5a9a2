"""DCLR against float64 formulas written out row by row, its edge cases, and how it reads its guide."""
import json
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertTokenizer

import dclr
from dclr import dclr_loss, instance_weights, noise_negatives
from formulas import agree, by_way, cosine, every_way, points
from running import DATA, ONE_BATCH, SENTENCES, SMALL, embed_saved, refuse, run_text

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


@every_way
@every_form
@pytest.mark.parametrize("n, k, phi, temperature", [
    (7, 7, 0.3, 0.05), (5, 12, 0.3, 0.2), (9, 0, 0.3, 0.05), (8, 2, 0.999, 0.05), (6, 3, 1.5, 0.05),
    (6, 3, -1.5, 0.05), (1, 3, 0.9, 0.05), (2, 0, 1.5, 0.05), (1, 0, 0.9, 0.05), (4, 0, -1.5, 0.05)])
def test_loss(form, way, n, k, phi, temperature, monkeypatch):
    """φ 0.999 flags the duplicate alone, 1.5 none, −1.5 all. Without negatives value and gradient are 0. The
    code form takes what eager is not asked for in blocks of two."""
    z1, z2, noise, f1, f2 = case(n, k)
    apply, rest = dclr.SumOfBlocks.apply, (phi, temperature, form)
    if way != "eager":
        monkeypatch.setattr(dclr.SumOfBlocks, "apply", lambda block, z, keys, _: apply(block, z, keys, 2))
    part = lambda a, b: lambda own, **how: dclr_loss(a[own], b, noise, f1[own], f2, *rest, **how)
    agree(lambda a, b: by_way(way, n, part(a, b)),
          lambda a, b: written_out(a, b, noise, f1, f2, *rest), z1, z2)
    assert not dclr_loss(z1, z2, *(x.requires_grad_() for x in (noise, f1, f2)), *rest).requires_grad


@pytest.mark.parametrize("temperature", [0.05, 0.02, 0.005])
def test_code_form_where_q_rounds_to_one(temperature):
    """A negative beside its anchor, the positive opposite: 1 − q is exp(−1/τ …), far below its rounding."""
    axes = torch.eye(4).double()
    z1, z2, *others = axes[:3], axes[[1, 2, 0]] - 0.1, -axes[:2] - 1, axes[:3], axes[:3]
    rest = 0.9, temperature, "code"
    written = lambda a, b: written_out(a, b, *others, *rest)
    agree(lambda a, b: dclr_loss(a, b, *others, *rest), written, z1, z2)
    single = [x.float().requires_grad_() for x in (z1, z2, *others)]
    loss = dclr_loss(*single, *rest)
    gradient, = torch.autograd.grad(loss, single[0])
    assert loss.item() == pytest.approx(written(z1, z2).item(), rel=1e-5)
    assert gradient.isfinite().all() and gradient.abs().max() > 0.1


def test_instance_weights():
    """φ counts as similar."""
    f1, f2, axes = points(8, 3, 0), points(8, 3, 1), torch.eye(3)[[0, 0, 1]]
    wanted = [[float(i == j or cosine(f1[i], f2[j]) < 0.2) for j in range(8)] for i in range(8)]
    assert instance_weights(f1[3:] * 7, f2 / 9, 0.2, offset=3).tolist() == wanted[3:]
    assert instance_weights(axes, axes, 0.0).tolist() == torch.eye(3).tolist()
    assert instance_weights(axes, axes, 1.0).tolist() == [[1, 0, 1], [0, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize("impl", ["blockwise", "eager"])
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


@pytest.fixture(scope="module")
def guides(bert, tmp_path_factory):
    """With modules.json, one with other numbers for tokens; without a pooler."""
    home = tmp_path_factory.mktemp("guides")
    made = {name: shutil.copytree(bert, home / name) for name in ("mean", "first", "bare")}
    for name, mode in ("mean", "mean"), ("first", "cls"):
        modules = [dict(path="", type="models.Transformer"), dict(path="1_Pooling", type="models.Pooling")]
        (made[name] / "modules.json").write_text(json.dumps(modules))
        (made[name] / "1_Pooling").mkdir()
        (made[name] / "1_Pooling" / "config.json").write_text(json.dumps(dict(pooling_mode=mode)))
    vocab = AutoTokenizer.from_pretrained(bert).get_vocab()
    turned = {piece: len(vocab) + 4 - i if i > 4 else i for piece, i in vocab.items()}
    BertTokenizer(turned, model_max_length=512).save_pretrained(made["mean"])
    AutoModel.from_pretrained(bert, add_pooling_layer=False).save_pretrained(made["bare"])
    return made | {"pooler": bert}


@pytest.mark.parametrize("name, how", [
    ("pooler", "pooler"), ("mean", "avg"), ("first", "cls"), ("bare", "cls")])
def test_guide_is_read_as_its_folder_says(name, how, guides, capsys):
    """At rest; a model of another class may know no pooler."""
    args = SimpleNamespace(guide=guides[name], max_length=32)
    guide = dclr.build_guide(args, SimpleNamespace(args=args, device=torch.device("cpu"), bf16=False))
    wanted = embed_saved(guides[name], TEXTS[:8], how)
    torch.testing.assert_close(guide.embed_texts(TEXTS[:8]), wanted, atol=1e-5, rtol=0)
    assert not guide.training and not any(weight.requires_grad for weight in guide.parameters())
    said = {"avg": "avg pooling", "cls": "cls pooling", "pooler": "cls pooling, its pooler as head"}[how]
    assert capsys.readouterr().out == f"guide    {guides[name]}, 0.0 M parameters, {said}\n"


@pytest.mark.parametrize("form, noise_times, name, below, more, climb", [
    ("paper", 1.3, "pooler", "cls", "", (4, 1e-3, 0.05)), ("code", 0, "bare", "cls", "", (4, 1e-3, 0.05)),
    ("paper", 1.3, "pooler", "cls", "--noise-step-size 0.5 --noise-temperature 0.3", (4, 0.5, 0.3)),
    ("code", 1.3, "pooler", "pooler", "--noise-step-size 0.5 --temperature 0.1", (4, 0.5, 0.1))])
def test_first_loss_is_the_papers(form, noise_times, name, below, more, climb, guides, tmp_path, monkeypatch):
    """Without dropout, all rows one batch: the formula on the folders' own embeddings, each with its own
    tokenizer, the released head on the pooler, and the noise that was drawn, and climbed by its own flags."""
    monkeypatch.setattr(dclr, "noise_negatives", asked := Mock(wraps=noise_negatives))
    rows = SENTENCES[:10] + SENTENCES[:2]                      # two come twice
    flags = ["--model", guides[name], "--guide", guides["mean"], "--noise-times", noise_times, "--lr", 0]
    flags += ["--phi", 0.99, "--form", form, *more.split()]
    result = run_text("dclr", tmp_path, rows, *flags, *ONE_BATCH)
    linear, texts = result.model.head[-2], [row[0] for row in rows]
    assert abs(linear.weight.std() - 0.2) < 0.02 and not linear.bias.any()
    z = torch.tanh(linear(embed_saved(guides[name], texts, below))).detach().double()
    f = embed_saved(guides["mean"], texts, "avg").double()     # phi is 0.001 from each of their cosines
    assert 4 < (1 - instance_weights(f, f, 0.99)).sum() < 100  # the duplicates and others, not all
    noise = asked.call_args_list[0].args[2].double()
    assert noise.shape == (int(noise_times * 12), 32)
    assert noise.square().sum() / 32 == pytest.approx(len(noise), rel=0.1)
    assert asked.call_args_list[0].args[3:] == climb
    wanted = written_out(z, z, ascent_written_out(z, z, noise, *climb, form), f, f, 0.99,
                         result.args.temperature, form)
    assert result.losses == pytest.approx([wanted.item()], abs=2e-4)


@pytest.mark.parametrize("impl", ["eager", "blockwise"])
def test_a_nan_is_no_anchor_without_negatives(impl):
    """Whose loss is 0: a run with NaN weights would go on."""
    z, f = torch.randn(2, 4, 8), torch.eye(4)
    assert dclr_loss(*z, z[0], f, f, 2.0, impl=impl) > 0
    z[0, 1, 0] = torch.nan
    assert dclr_loss(*z, z[1], f, f, 2.0, impl=impl).isnan()


@pytest.mark.parametrize("head, name, layers, origin", [
    (None, "pooler", 4, "new"), (None, "bare", 2, "new"), (["pooler"], "pooler", 2, "pooler")])
def test_head_of_the_released_code(head, name, layers, origin, guides):
    """Base models: a new layer on the pooler. Large ones: the pooler of a SimCSE alone, in training."""
    flags = ["--data", str(DATA / "sentences.txt"), "--model", str(guides[name]), "--form", "code"]
    args = dclr.make_parser().parse_args([*flags, *(["--head", *head] if head else [])])
    model = dclr.build_model(args, SimpleNamespace(args=args, device=torch.device("cpu"), bf16=False))
    assert (len(model.head), model.origin, model.keep_head) == (layers, origin, False)


@pytest.mark.parametrize("flags, wanted", [
    ("--guide scratch", r"--guide scratch: a new model has learnt nothing; name a folder or one of the hub"),
    ("--phi 1.2", r"--phi 1\.2: wanted a cosine, from -1 to 1"),
    ("--phi -2", r"argument .* at least -1"), ("--noise-times -1", r"argument .* at least 0"),
    ("--noise-step-size -1", r"argument .* at least 0"), ("--noise-temperature 0", r".* at least 0\.0001"),
    ("--data good.csv", r"good\.csv line 1: 2 columns, wanted 1 \(sentence\), as by --columns 1")])
def test_bad_input(flags, wanted, here, bert, capfd):
    refuse("dclr", capfd, wanted, *SMALL, "--data", DATA / "sentences.txt", "--guide", bert, *flags.split())
