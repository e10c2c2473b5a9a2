"""Test memory_bank.py and simclr_v2.py. Several processes: tests/training/images/test_dataset.py."""
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import loss_formulas
import memory_bank
import simclr_v2
from kernels.training.images.encoders import ImageEncoder, load_image_encoder
from loss_check import numbers
from running import DATA, run
from simclr_v2 import load_classifier


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_step_with_a_memory_bank(momentum, monkeypatch):
    """The positive of a query is the bank's slot of the same image; the negatives are sampled slots. The step
    moves only the slots of the batch's images. They move towards the queries, and stay unit vectors."""
    bank, q, rows = F.normalize(numbers(7, 5), dim=1), numbers(3, 5, seed=1).requires_grad_(), [4, 0, 6]
    sampled = torch.tensor([0, 2, 2, 5])
    model = Mock(return_value=q, bank=bank.clone())
    monkeypatch.setattr(torch, "randint", lambda *size, device: sampled)
    args = SimpleNamespace(queue_size=4, temperature=0.07, bank_momentum=momentum, impl="eager",
                           precision="fp32")
    loss, _ = memory_bank.compute_loss(model, q, rows, args)
    wanted = loss_formulas.moco_loss(q, bank[rows], bank[sampled], 0.07)
    gradients = [torch.autograd.grad(x, q)[0] for x in (loss, wanted)]
    torch.testing.assert_close([loss, gradients[0]], [wanted, gradients[1]], rtol=1e-10, atol=1e-10)
    moved = F.normalize(momentum * bank[rows] + (1 - momentum) * F.normalize(q.detach(), dim=1), dim=1)
    expected = bank.index_copy(0, torch.tensor(rows), moved)
    torch.testing.assert_close(model.bank, expected, rtol=1e-6, atol=1e-6)   # the bank is updated in float32


@pytest.mark.parametrize("given", ["--teacher t --temperature 0.3", ""])
def test_loss_of_a_classifier(given, monkeypatch):
    """This rank has half of the images. Its loss is half the mean cross entropy of these images with their
    labels or, at --temperature, with the predictions of the teacher in eval mode."""
    monkeypatch.setattr(simclr_v2, "own_rows", lambda count: slice(4, count))
    views, logits, labels = torch.rand(4, 3, 16, 16), torch.randn(4, 3), torch.arange(9) % 3
    images = SimpleNamespace(training_views=iter([views]), train=SimpleNamespace(labels=labels))
    teacher, wanted = None, F.cross_entropy(logits, labels[4:8])
    if given:
        teacher = ImageEncoder(load_image_encoder("resnet-small", True), torch.nn.Linear(256, 3)).eval()
        p, q = (teacher(views) / 0.3).softmax(1), (logits / 0.3).log_softmax(1)
        wanted = -(p * q).sum(1).mean()
    args = simclr_v2.make_parser().parse_args(["--data", "x", *given.split()])
    batch = simclr_v2.make_batch([*range(8)], images, teacher)
    loss, _ = simclr_v2.compute_loss(lambda x: logits * torch.equal(x, views), batch, 8, args)
    torch.testing.assert_close(loss, wanted / 2)


def test_accuracy():
    """Classes are matched by name. An image of a class that the model does not have counts as an error."""
    images = Mock(classes=["cat", "dog", "ant"], test=Mock(labels=torch.tensor([0, 1, 2, 2])))
    model = Mock(head=torch.nn.Identity())
    model.encoder.config.id2label = {0: "ant", 1: "cat"}
    images.encode_split.return_value = torch.eye(2)[[1, 0, 0, 1]]
    assert simclr_v2.accuracy(model, images) == 50


def test_the_seed_decides_which_labels_are_kept():
    def kept(seed, share=0.25):
        train = SimpleNamespace(labels=torch.arange(60) % 3, keep_only=Mock())
        simclr_v2.subsample(SimpleNamespace(seed=seed, train=train), share)
        return train.keep_only.call_args.args[0].tolist()

    assert len(kept(1, 0.01)) == 3                             # at least one image of each class
    assert kept(1) == kept(1) != kept(2) and [row % 3 for row in kept(1)].count(0) == 5


def test_finetuning_and_distillation(tmp_path):
    """Fine-tuning keeps --from-layer layers of the saved head, trains on a share of each class, and learns.
    The saved classifier gives the same logits after loading. A student learns from this classifier."""
    with np.load(DATA / "shapes.npz") as file:
        x, y = file["images"][:260, ::2, ::2] // 2, file["labels"][:260] % 3
    x[np.arange(260), :, :, y] += 120                          # each class has a colour
    data, first, tuned, student = (tmp_path / name for name in ("x.npz", "first", "tuned", "student"))
    np.savez(data, images=x[:200], labels=y[:200] + 5, test_images=x[200:], test_labels=y[200:] + 5)
    small = ["--model", "resnet-small", "--batch-size", 20, "--eval-every", 50]
    given = ["--probe-epochs", 0, "--steps", 2, "--head-layers", 3, "--form", "code"]
    run("simclr", first, "--data", data, *small, *given)
    head = load_file(first / "head.safetensors")
    for layer, last in ((0, 0), (1, 3), (3, 8)):               # last is the index of the new layer
        start = simclr_v2.classifier_head(256, SimpleNamespace(from_layer=layer, model=str(first)), 3)
        assert len(start) == last + 1 and not start[-1].weight.any() and not start[-1].bias.any()
        assert all(torch.equal(weight, head[name]) for name, weight in start[:-1].state_dict().items())
    given = ["--data", data, *small, "--model", first, "--label-fraction", 0.25, "--steps", 40]
    result = run("simclr_v2", tuned, *given)
    assert len(result.model.head) == 4 and result.said["simclr_v2"].split()[1] in ("50", "51")
    assert result.steps[-1]["dev_top1"] > 60 and result.steps[-1]["loss"] < 1
    others, last = result.run.optimizer.param_groups           # LARS does not scale the last layer's steps
    assert others["trust"] and last["trust"] is None and last["params"] == [result.model.head[-1].weight]
    images, loaded = torch.rand(4, 3, 16, 16), load_classifier(tuned)
    assert torch.equal(loaded(images), result.model.eval()(images))
    assert loaded.encoder.config.id2label == {0: "5", 1: "6", 2: "7"}
    given = ["--teacher", tuned, "--data", data, *small, "--lr", 0.03, "--warmup-epochs", 0, "--steps", 60]
    assert run("simclr_v2", student, *given, "--temperature", 0.7).steps[-1]["dev_top1"] > 60
    assert load_classifier(student).encoder.config.id2label == loaded.encoder.config.id2label
