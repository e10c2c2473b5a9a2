"""Test simclr.py: LARS and other optimizers, projection heads, and the stages of SimCLR v2. Augmentation and
several processes are tested in tests/training/images."""
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import simclr
from kernels.training.images import encoders
from kernels.training.images.encoders import ImageEncoder, load_classifier, load_image_encoder
from kernels.training.papers import simclr_lars, simclr_v2
from kernels.training.papers.simclr_v2 import FinetuneOrDistill
from running import DATA, equal, run

randn = partial(torch.randn, dtype=torch.float64)


def flags(*given):
    return simclr.make_parser().parse_args([*given, "--data", "x"])


# ── optimizers ──


def test_lars_steps():
    """Three steps equal the formula, for a matrix, a bias, and a zero matrix with an unscaled first step."""
    weights = [randn(3, 4), randn(3), torch.zeros(2, 2, dtype=torch.float64)]
    tensors, momenta = [torch.nn.Parameter(w.clone()) for w in weights], [0, 0, 0]
    optimizer = simclr_lars.LARS(tensors, lr=0.5, weight_decay=0.01)
    for lr in (0.5, 0.2, 0.1):
        optimizer.param_groups[0]["lr"] = lr
        for i, w in enumerate(weights):
            g = tensors[i].grad = randn(*w.shape)
            if w.dim() > 1:
                g = g + 0.01 * w
                g = g * (0.001 * w.norm() / g.norm() if w.norm() > 0 else 1)
            momenta[i] = 0.9 * momenta[i] + lr * g
            weights[i] = w - momenta[i]
        optimizer.step()
    torch.testing.assert_close([w.detach() for w in tensors], weights, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("optimizer, decay, trust", [
    ("lars", 0.1, 0.001), ("sgd", 0.1, None), ("nesterov", 0.0, None), ("adam", 0.0, None)])
def test_weight_decay_and_classifiers(optimizer, decay, trust):
    """`decay` is the weight decay in the group of batch norms; LARS does not apply it. LARS does not scale
    the steps of a classifier by the norm of its weights, which start at 0 and would stay small."""
    model = torch.nn.Module()
    model.encoder = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    model.head, model.classes = torch.nn.Sequential(torch.nn.Linear(8, 2)), ["a", "b"]
    made = simclr_lars.make_optimizer(model, 0.1, flags("--optimizer", optimizer, "--weight-decay", "0.1"))

    def group_of(weight):
        return next(group for group in made.param_groups if any(w is weight for w in group["params"]))

    norm, classifier = group_of(model.encoder[1].weight), group_of(model.head[0].weight)
    assert norm["weight_decay"] == decay and norm.get("trust") == trust and classifier.get("trust") is None
    assert classifier["weight_decay"] == group_of(model.encoder[0].weight)["weight_decay"] == 0.1
    assert norm.get("nesterov", False) == (optimizer == "nesterov")
    assert sum(len(group["params"]) for group in made.param_groups) == 6


# ── the model and the loss ──


@pytest.mark.parametrize("layers", [0, 3])
@pytest.mark.parametrize("form, norm, norms", [
    ("paper", None, False), ("code", None, True), ("paper", True, True)])
def test_layers_of_projection_heads(form, norm, norms, layers):
    """With batch norms, linear layers have no bias, and the bias of the last batch norm is not trained."""
    args = SimpleNamespace(head_layers=layers, projection_dim=4, form=form, head_norm=norm)
    head = simclr.projection_head(8, args)
    inner = ["Linear", "BatchNorm1d", "ReLU"] if norms else ["Linear", "ReLU"]
    assert [type(part).__name__ for part in head] == (layers * inner)[:-1]
    assert head(torch.randn(6, 8)).shape == (6, 4 if layers else 8)
    if layers:
        assert head[-1].bias.requires_grad != norms and (head[0].bias is None) == norms


def test_batch_norms_are_synchronised_and_saved_as_plain_ones(tmp_path):
    """On several GPUs, batch norms see the whole batch. A head trained on several GPUs loads on one."""
    args = flags("--model", "resnet-small", "--form", "code")
    run = SimpleNamespace(world_size=2, device=torch.device("meta"), bf16=False, args=args)
    model = simclr.build_model(args, SimpleNamespace(is_small=True), run)
    norms = [part for part in model.modules() if "BatchNorm" in type(part).__name__]
    assert len(norms) > 5 and {type(norm) for norm in norms} == {torch.nn.SyncBatchNorm}
    head = simclr.projection_head(8, args)
    encoders.save_head(torch.nn.SyncBatchNorm.convert_sync_batchnorm(head), None, tmp_path)
    loaded, classes = encoders.load_head(tmp_path)
    assert type(loaded[1]) is torch.nn.BatchNorm1d and classes is None
    assert equal(loaded.state_dict(), head.state_dict())


# ── SimCLR v2 ──


@pytest.mark.parametrize("given", ["--distill t --temperature 0.3", "--finetune x"])
def test_loss_of_a_classifier(given, monkeypatch):
    """This rank has half of the images. Its loss is half the mean cross entropy of these images with their
    labels or, at --temperature, with the predictions of the teacher in eval mode."""
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
        p, q = (teacher.eval()(views) / 0.3).softmax(1), (logits / 0.3).log_softmax(1)
        wanted = -(p * q).sum(1).mean()
    torch.testing.assert_close(loss, wanted / 2)


SMALL = ["--model", "resnet-small", "--batch-size", 20, "--eval-every", 50, "--probe-epochs", 0]


def test_the_seed_decides_which_labels_are_kept():
    def kept(seed):
        train = SimpleNamespace(labels=torch.arange(60) % 3, keep_only=Mock())
        simclr_v2.subsample(SimpleNamespace(seed=seed, train=train), 0.25)
        return train.keep_only.call_args.args[0].tolist()

    assert kept(1) == kept(1) != kept(2) and [row % 3 for row in kept(1)].count(0) == 5


def test_finetuning_and_distillation(tmp_path):
    """Fine-tuning keeps --from-layer layers of the saved head, trains on a share of each class, and learns.
    The saved classifier gives the same logits after loading. A student learns from this classifier."""
    with np.load(DATA / "shapes.npz") as file:
        x, y = file["images"][:260, ::2, ::2] // 2, file["labels"][:260] % 3
    x[np.arange(260), :, :, y] += 120                          # each class has a colour
    data, first, tuned, student = (tmp_path / name for name in ("x.npz", "first", "tuned", "student"))
    np.savez(data, images=x[:200], labels=y[:200] + 5, test_images=x[200:], test_labels=y[200:] + 5)
    run("simclr", first, "--data", data, *SMALL, "--steps", 2, "--head-layers", 3, "--form", "code")
    head = load_file(first / "head.safetensors")
    for layer, last in ((0, 0), (1, 3), (3, 8)):               # last: index of the new layer
        args = flags("--from-layer", str(layer), "--model", str(first))
        start = FinetuneOrDistill(args, SimpleNamespace(classes=["5", "6", "7"]), None).make_head(256)
        assert len(start) == last + 1 and not start[-1].weight.any() and not start[-1].bias.any()
        assert all(torch.equal(weight, head[name]) for name, weight in start[:-1].state_dict().items())
    given = ["--finetune", data, *SMALL, "--model", first, "--label-fraction", 0.25, "--steps", 40]
    result = run("simclr", tuned, *given)
    assert len(result.model.head) == 4 and result.said["simclr"].split()[1] in ("50", "51")
    assert result.steps[-1]["dev_top1"] > 60 and result.steps[-1]["loss"] < 1
    images, loaded = torch.rand(4, 3, 16, 16), load_classifier(tuned)
    assert torch.equal(loaded(images), result.model.eval()(images)) and loaded.classes == ["5", "6", "7"]
    given = ["--distill", tuned, "--data", data, *SMALL, "--lr", 0.03, "--warmup-epochs", 0, "--steps", 60]
    assert run("simclr", student, *given, "--temperature", 0.7).steps[-1]["dev_top1"] > 60
    assert load_classifier(student).classes == loaded.classes
