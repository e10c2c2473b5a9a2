"""simclr.py: losses against explicit sums, LARS, projection heads, recipes, and the stages of v2."""
import contextlib
import io
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import simclr
from kernels.training.errors import UserError
from kernels.training.images import encoders
from kernels.training.images.encoders import ImageEncoder, load_classifier, load_image_encoder
from kernels.training.papers import simclr_lars, simclr_v2
from kernels.training.papers.simclr_v2 import FinetuneOrDistill
from running import DATA, equal, run

randn = partial(torch.randn, dtype=torch.float64)


def test_lars_steps():
    weights = [randn(3, 4), randn(3), torch.zeros(2, 2, dtype=torch.float64)]
    tensors, momenta = [torch.nn.Parameter(w.clone()) for w in weights], [0, 0, 0]
    optimizer = simclr_lars.LARS(tensors, lr=0.5, weight_decay=0.01)
    for lr in (0.5, 0.2, 0.1):
        optimizer.param_groups[0]["lr"] = lr
        for i, w in enumerate(weights):
            g = randn(*w.shape)
            tensors[i].grad = g
            if w.dim() > 1:
                g = g + 0.01 * w
                g = g * (0.001 * w.norm() / g.norm() if w.norm() > 0 else 1)
            momenta[i] = 0.9 * momenta[i] + lr * g
            weights[i] = w - momenta[i]
        optimizer.step()
    torch.testing.assert_close([w.detach() for w in tensors], weights, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("optimizer, decay", [("lars", 0.0), ("sgd", 0.1), ("nesterov", 0.0), ("adam", 0.0)])
def test_parameter_groups(optimizer, decay):
    """With sgd all weights decay; with nesterov and adam all weights except norms do. LARS does not scale
    steps of a classifier by the norm of its weights, which start at 0: it learns a linearly separable task at
    the released learning rate."""
    encoder = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    model = torch.nn.Module()
    model.encoder, model.head, model.classes = encoder, torch.nn.Sequential(torch.nn.Linear(8, 2)), ["a", "b"]
    for w in model.head.parameters():
        torch.nn.init.zeros_(w)
    args = flags("--optimizer", optimizer, "--weight-decay", "0.1")
    made = simclr_lars.make_optimizer(model, 0.16, args)            # 0.005 · √1024
    norm = next(group for group in made.param_groups if any(w is encoder[1].weight for w in group["params"]))
    assert norm["weight_decay"] == decay or optimizer == "lars"
    assert made.param_groups[0]["weight_decay"] == 0.1
    assert norm.get("nesterov", False) == (optimizer == "nesterov")
    assert sum(len(group["params"]) for group in made.param_groups) == 6
    if optimizer != "lars":
        return
    x = randn(64, 4).float()
    y = (x[:, 0] > 0).long()
    for _ in range(150):
        loss = F.cross_entropy(model.head(encoder(x)), y)
        made.zero_grad()
        loss.backward()
        made.step()
    assert model.head[0].weight.norm() > 0.5 and loss < 0.1


@pytest.mark.parametrize("gathered", [False, True])
def test_no_normalize(gathered):
    """--no-normalize: similarities are dot products of the projections as they are."""
    torch.manual_seed(1)
    x = randn(5, 2, 8, requires_grad=True)
    s = x.transpose(0, 1).flatten(0, 1) @ x.transpose(0, 1).flatten(0, 1).T / 0.7
    s = s.masked_fill(torch.eye(10, dtype=torch.bool), -torch.inf)
    wanted = F.cross_entropy(s, (torch.arange(10) + 5) % 10)
    z = x.unbind(1)
    found = simclr.simclr_loss(*z, 0.7, gathered=z if gathered else None, normalize=False, impl="blockwise")
    both = ([loss, *torch.autograd.grad(loss, x)] for loss in (found, wanted))
    torch.testing.assert_close(*both, rtol=1e-10, atol=1e-10)


def test_distillation_loss():
    """The loss equals the paper's formula, the teacher gets no gradient, and invalid arguments raise."""
    student, teacher = randn(4, 3, requires_grad=True), randn(4, 3, requires_grad=True)
    p, q = ((x / 0.5).exp() / (x / 0.5).exp().sum(1, keepdim=True) for x in (teacher, student))
    wanted = -(p.detach() * q.log()).sum(1).mean()
    found = simclr_v2.distillation_loss(student, teacher, 0.5)
    both = ([loss, *torch.autograd.grad(loss, student)] for loss in (found, wanted))
    torch.testing.assert_close(*both, rtol=1e-12, atol=1e-12)
    loss = simclr_v2.distillation_loss(student, teacher)
    assert torch.autograd.grad(loss, teacher, allow_unused=True) == (None,)
    for others, wrong in (([teacher[:2]], "teacher_logits"), ([teacher, 0], "temperature")):
        with pytest.raises(ValueError, match=wrong):
            simclr_v2.distillation_loss(student, *others)


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
@pytest.mark.parametrize("form, norm", [("paper", None), ("code", None), ("paper", True), ("code", False)])
def test_layers_of_projection_heads(form, norm, layers):
    args = SimpleNamespace(head_layers=layers, projection_dim=4, form=form, head_norm=norm)
    head = simclr.projection_head(8, args)
    norms = form == "code" if norm is None else norm
    inner = ["Linear", "BatchNorm1d", "ReLU"] if norms else ["Linear", "ReLU"]
    assert [type(part).__name__ for part in head] == (layers * inner)[:-1]
    assert head(torch.randn(6, 8)).shape == (6, 4 if layers else 8)
    if layers:
        assert head[-1].bias.requires_grad != norms and (head[0].bias is None) == norms


def flags(*given):
    return simclr.make_parser().parse_args([*given, "--data", "x"])


@pytest.mark.parametrize("given, wanted", [
    ("", dict(recipe=None, lr=1.0, model="resnet-18", temperature=0.5, optimizer="lars", from_layer=0)),
    ("--recipe paper", dict(lr=0.3, weight_decay=1e-6, batch_size=4096, image_size=224, form="paper")),
    ("--recipe code --epochs 7", dict(lr=0.075, lr_scaling="sqrt", weight_decay=1e-4, epochs=7, form="code")),
    ("--recipe cifar", dict(image_size=32, epochs=1000, colour=0.5, blur=0.0, weight_decay=1e-4)),
    ("--epochs 100 --recipe cifar", dict(epochs=100, lr=1.0)),
    ("--recipe v2", dict(head_layers=3, warmup_epochs=40, epochs=800, lr=0.1)),
    ("--supervised", dict(temperature=0.1, optimizer="sgd", lr=0.18, crop=0.2, recipe="supervised")),
    ("--supervised --recipe cifar", dict(temperature=0.5, supervised=True, crop=0.08, recipe="cifar")),
    ("--distill t", dict(epochs=400, temperature=1.0, from_layer=0))])
def test_recipes(given, wanted, capsys):
    args = flags(*given.split())
    assert wanted.items() <= vars(args).items()
    said = capsys.readouterr().out
    assert bool(said) == bool(args.recipe) and said.count("(not ") == given.count("--epochs")


@pytest.mark.parametrize("given, wanted", [
    ("--from-layer 1", "--from-layer 1: needs --finetune or"),
    ("--label-fraction 0.5", "--label-fraction 0.5: needs --finetune"),
    ("--finetune x --label-fraction 0", "argument --label-fraction: 0: expected a number from 1e-09 to 1"),
    ("--distill t --supervised", "--supervised and --distill: expected only one"),
    ("--supervised --no-normalize", "--no-normalize: --supervised needs")])
def test_contradicting_flags(given, wanted):
    with pytest.raises(UserError, match=wanted):
        simclr.check_flags(flags(*given.split()))


def test_no_normalize_computes_in_float32():
    """Products of long projections would overflow float16."""
    args, z = flags("--no-normalize", "--precision", "bf16"), 1000 * torch.randn(6, 8)
    loss, _ = simclr.compute_loss(lambda x: x, (z, None), 3, args)
    torch.testing.assert_close(loss, simclr.simclr_loss(*z.chunk(2), 0.5, normalize=False, impl="eager"))


def test_finetune_names_the_data_and_changes_defaults():
    args = simclr.make_parser().parse_args(["--finetune", "x", "--from-layer", "0"])
    assert (args.data, args.lr, args.from_layer, args.warmup_epochs) == ("x", 0.005, 0, 0)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """Return a folder with data (x.npz) and a short run (run), whose head has three layers with norms."""
    folder = tmp_path_factory.mktemp("v2")
    with np.load(DATA / "shapes.npz") as file:
        x, y, n = file["images"][:, ::2, ::2] // 2, file["labels"] % 3, 200
    x[np.arange(len(x)), :, :, y] += 120                       # each class has a colour
    arrays = dict(images=x[:n], labels=y[:n] + 5, test_images=x[n : n + 60], test_labels=y[n : n + 60] + 5)
    np.savez(folder / "x.npz", **arrays)
    head = ["--head-layers", 3, "--form", "code"]
    run("simclr", folder / "run", "--data", folder / "x.npz", *SMALL, "--steps", 2, *head)
    return folder


SMALL = ["--model", "resnet-small", "--batch-size", 20, "--eval-every", 50, "--probe-epochs", 0]


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_finetuning_and_distillation(layer, pretrained, tmp_path):
    """Fine-tuning keeps --from-layer layers of the saved head, uses a fraction of each class, and learns. The
    saved classifier gives the same logits after loading, and --evaluate scores it. A student learns from
    it."""
    given = ["--finetune", pretrained / "x.npz", *SMALL, "--model", pretrained / "run", "--from-layer", layer]
    result = run("simclr", tmp_path / "out", *given, "--label-fraction", 0.25, "--steps", 40)
    head, last = load_file(pretrained / "run" / "head.safetensors"), 3 * layer
    assert len(result.model.head) == (last + 1 if layer < 3 else 9) and len(result.model.classes) == 3
    assert "50 images" in result.said["simclr"] or "51 images" in result.said["simclr"]
    assert result.steps[-1]["dev_top1"] > 60 and result.steps[-1]["loss"] < 1
    args = flags("--from-layer", str(layer), "--model", str(pretrained / "run"))
    tuning = FinetuneOrDistill(args, SimpleNamespace(classes=["5", "6", "7"]), None)
    start = tuning.make_head(result.model.feature_dim)
    kept = start[:-1].state_dict()
    assert all(torch.equal(kept[name], head[name]) for name in kept)
    assert not start[-1].weight.any() and not start[-1].bias.any()
    images = torch.rand(4, 3, 16, 16)
    loaded = load_classifier(tmp_path / "out")
    assert torch.equal(loaded(images), result.model.eval()(images)) and loaded.classes == ["5", "6", "7"]
    scored = ["--evaluate", "--data", pretrained / "x.npz", "--model", tmp_path / "out", "--probe-epochs", 0]
    with contextlib.redirect_stdout(io.StringIO()) as lines:
        simclr.main([*map(str, scored)])
    assert f"classifier {result.steps[-1]['dev_top1']:.2f} %" in lines.getvalue()
    with contextlib.redirect_stdout(io.StringIO()) as lines:   # a classifier needs no --data
        simclr.main(["--evaluate", "--dev", str(pretrained / "x.npz"), "--model", str(tmp_path / "out")])
    assert re.search(r"\ntest     classifier [\d.]+ %  .*out\n$", lines.getvalue())
    if layer == 1:
        given = ["--distill", tmp_path / "out", "--data", pretrained / "x.npz", *SMALL, "--lr", 0.03]
        given += ["--warmup-epochs", 0, "--steps", 60, "--temperature", 0.7]
        student = run("simclr", tmp_path / "student", *given)
        assert student.steps[-1]["dev_top1"] > 60
        assert load_classifier(tmp_path / "student").classes == loaded.classes


@pytest.mark.parametrize("given", ["--distill t --temperature 0.3", "--finetune x"])
def test_classifier_loss(given, monkeypatch):
    """For this rank's half of the images, the loss is the cross entropy with the labels, or with the
    teacher's predictions at --temperature."""
    teacher = ImageEncoder(load_image_encoder("resnet-small", True), torch.nn.Linear(256, 3), classes="abc")
    monkeypatch.setattr(simclr_v2, "load_classifier", lambda *_: teacher.train())
    monkeypatch.setattr(simclr_v2, "own_rows", lambda count: slice(4, count))
    views, logits, labels = torch.rand(4, 3, 16, 16), torch.randn(4, 3), torch.arange(9) % 3
    train = SimpleNamespace(labels=labels)
    images = SimpleNamespace(training_views=iter([views]), classes="abc", train=train)
    tuning = FinetuneOrDistill(flags(*given.split()), images, SimpleNamespace(device="cpu"))
    loss, _ = tuning.compute_loss(lambda x: logits * torch.equal(x, views), [*range(8)])
    wanted = F.cross_entropy(logits, labels[4:8])
    if tuning.teacher:
        wanted = simclr_v2.distillation_loss(logits, teacher.eval()(views), 0.3)
    torch.testing.assert_close(loss, wanted / 2)


def test_adam_trains(pretrained, tmp_path):
    given = ["--data", pretrained / "x.npz", *SMALL, "--optimizer", "adam", "--lr", 1e-2]
    result = run("simclr", tmp_path / "out", *given, "--warmup-epochs", 0, "--steps", 4)
    assert type(result.run.optimizer) is torch.optim.Adam and result.losses[-1] < result.losses[0]


def test_synchronised_batch_norms_are_saved_as_plain_ones(tmp_path):
    """A head that was trained on several GPUs loads on one."""
    args = SimpleNamespace(head_layers=3, projection_dim=4, form="code", head_norm=None)
    plain = simclr.projection_head(8, args)
    encoders.save_head(torch.nn.SyncBatchNorm.convert_sync_batchnorm(plain), None, tmp_path)
    head, classes = encoders.load_head(tmp_path)
    assert [type(part).__name__ for part in head] == (3 * ["Linear", "BatchNorm1d", "ReLU"])[:-1]
    assert equal(head.state_dict(), plain.state_dict()) and classes is None
