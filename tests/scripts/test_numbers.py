"""Test that the scripts use the numbers of the papers and of their released code: defaults that depend on
other flags, optimizers, clipping, learning rates and linear probes."""
import importlib
import math
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from good import words
from running import run

# ── defaults that depend on other flags or on the data ──────────────────────────────────────────────────────

IMAGENET = dict(model="resnet-50", image_size=224, batch_size=256, epochs=200, lr=0.03, weight_decay=1e-4,
                queue_size=65536, momentum=0.999, crop=0.2, bn_splits=8, projection_dim=128)
V1, V2 = dict(head_layers=1, temperature=0.07, blur=0), dict(head_layers=2, temperature=0.2, blur=0.5)
# (script, flags, {flag: the default that these flags choose})
DEFAULTS = [
    ("simcse", "--columns 1", dict(batch_size=64, lr=3e-5, epochs=1)),
    ("simcse", "--columns 1 2 3", dict(batch_size=512, lr=5e-5, epochs=3)),
    ("cline", "--columns 1 2 3", dict(
        synonym_rate=0.4, antonym_rate=0.2, batch_size=256, max_length=512, length=30_000, warmup_part=60,
        eps=1e-8)),                                            # length / warmup_part = 500 warm-up steps
    ("cline", "--columns 1 2 3 --form code", dict(
        synonym_rate=0.5, antonym_rate=0.5, batch_size=128, max_length=256, length=1_000_000, warmup_part=100,
        eps=1e-6)),                                            # length / warmup_part = 10,000 warm-up steps
    ("ease", "", dict(hard_negatives=1)),
    ("vascl", "--columns 1", dict(form="code", radius=15)),
    ("simclr", "", dict(lr=1.0, temperature=0.5, optimizer="lars", blur=0, form="paper")),
    ("simclr", "--recipe paper", dict(
        batch_size=4096, image_size=224, lr=0.3, lr_scaling="linear", weight_decay=1e-6, temperature=0.1,
        head_layers=2, form="paper", colour=1, blur=0.5)),
    ("simclr", "--recipe code", dict(
        lr=0.075, lr_scaling="sqrt", weight_decay=1e-4, temperature=0.1, head_layers=3, form="code")),
    ("simclr", "--epochs 500 --recipe cifar", dict(                           # --epochs overrides the recipe
        epochs=500, lr=1.0, lr_scaling="linear", temperature=0.5, head_layers=3, form="code", colour=0.5)),
    ("simclr", "--recipe v2", dict(lr=0.1, lr_scaling="sqrt", weight_decay=1e-4, warmup_epochs=40, epochs=800,
                                   temperature=0.1, head_layers=3, form="code")),
    ("simclr", "--recipe supcon", dict(supervised=True, temperature=0.1, optimizer="sgd", lr=0.18,
                                       weight_decay=7e-5, crop=0.2)),
    ("simclr_v2", "", dict(batch_size=1024, epochs=60, lr=0.005, weight_decay=0, warmup_epochs=0,
                           from_layer=1, optimizer="lars")),
    ("simclr_v2", "--teacher t", dict(batch_size=4096, epochs=400, lr=0.1, weight_decay=1e-4,
                                      warmup_epochs=20, from_layer=0, temperature=1)),
    ("moco", "--recipe v1", IMAGENET | V1 | dict(v1=True)),
    ("moco", "--recipe v2", IMAGENET | V2 | dict(v1=False)),
    ("moco", "--image-size 224", IMAGENET | V2), ("moco", "--image-size 224 --v1", IMAGENET | V1),
    ("moco", "", dict(queue_size=4096, momentum=0.99, crop=0.08, blur=0, weight_decay=5e-4)),
    ("moco", "--recipe demo", dict(
        image_size=32, batch_size=512, weight_decay=5e-4, crop=0.08, queue_size=4096, momentum=0.99,
        head_layers=1, temperature=0.1, bn_splits=8)),
    ("memory_bank", "", dict(v1=True, head_layers=1, temperature=0.07, weight_decay=5e-4))]


@pytest.fixture(scope="module")
def large_files(tmp_path_factory):
    """Return a folder with data files that have enough rows for the default batch sizes."""
    folder = tmp_path_factory.mktemp("large")
    rows = "".join(f"sentence {i}\tentity {i}\tother {i % 9}\n" for i in range(1024))
    (folder / "texts.tsv").write_text("text\tentity\tnegative_entity\n" + rows)
    labels = np.arange(4096) % 2
    np.savez(folder / "images.npz", images=np.zeros((4096, 2, 2, 3), np.uint8), labels=labels)
    return folder


@pytest.mark.parametrize("name, flags, wanted", DEFAULTS)
def test_defaults_of_flags(name, flags, wanted, large_files, capsys):
    script = importlib.import_module(name)
    has_images = name in ("simclr", "moco", "memory_bank", "simclr_v2")
    data = str(large_files / ("images.npz" if has_images else "texts.tsv"))
    args = script.make_parser().parse_args(["--data", data, *flags.split()])
    script.load_data(data, args)
    assert ("--epochs 500 (not 1000)" in capsys.readouterr().out) == ("--epochs 500" in flags)
    assert {key: getattr(args, key) for key in wanted} == wanted


# ── optimizers, clipping and learning rates ─────────────────────────────────────────────────────────────────

LINEAR = [1 - step / 10 for step in range(10)]                 # linear decay to 0, from the first step on
WARM_UP = [0, *(1 - step / 9 for step in range(9))]            # one of ten steps is warm-up
COSINE = [(1 + math.cos(math.pi * step / 10)) / 2 for step in range(10)]
WARM_COSINE = [0, 1 / 2, *((1 + math.cos(math.pi * step / 8)) / 2 for step in range(8))]  # 2 steps of warm-up
ADAM, ROBERTA = dict(betas=(0.9, 0.999), eps=1e-8, weight_decay=0), dict(betas=(0.9, 0.999), eps=1e-6)
# (script and flags, factors of --lr in ten steps, norm to which gradients are clipped or None, settings of
# each parameter group). An epoch has 16 images: two steps of simclr.py, one step of moco.py
RUNS = [
    ("simcse --lr 1e-3", LINEAR, 1, [ADAM]),
    ("selfguided --lr 1e-3", WARM_UP, 1, [dict(betas=(0.9, 0.9), eps=1e-6, weight_decay=0)]),
    ("cline --lr 1e-3", WARM_UP, 1, [ADAM | dict(weight_decay=0.01), ADAM]),
    ("cline --form code --lr 1e-3", WARM_UP, 1,
     [ROBERTA | dict(weight_decay=0.01), ROBERTA | dict(weight_decay=0)]),
    ("tacl --lr 1e-3", WARM_UP, 1, [ROBERTA | dict(weight_decay=0)]),
    ("ease --warmup-steps 1 --lr 1e-3", WARM_UP, 1, [ADAM]),
    ("vascl --head-lr 0.1 --lr 1e-3", [1] * 10, None, [ADAM | dict(lr=1e-3), ADAM | dict(lr=0.1)]),
    ("dclr --lr 1e-3", LINEAR, 1, [ADAM]),
    ("childtuning --lr 1e-3", WARM_UP, 1, [ADAM | dict(weight_decay=0.01, mode="F", reserve_p=0.3), ADAM]),
    ("childtuning --form code --lr 1e-3", LINEAR, 1,
     [ADAM | dict(weight_decay=0.01, mode="F", reserve_p=0.3), ADAM]),
    ("childtuning --form code --mode none --lr 1e-3", WARM_UP, 1, [ADAM | dict(weight_decay=0.01), ADAM]),
    ("simclr --lr 0.32 --warmup-epochs 1", WARM_COSINE, None,
     [dict(trust=0.001, momentum=0.9, weight_decay=1e-6)]),
    ("simclr --lr 0.32 --warmup-epochs 0 --lr-scaling sqrt --optimizer sgd", COSINE, None,
     [dict(momentum=0.9, nesterov=False, weight_decay=1e-6)]),
    ("moco --batch-size 16 --lr 0.32", COSINE, None, [dict(momentum=0.9, nesterov=False, weight_decay=5e-4)]),
    ("moco --batch-size 16 --lr 0.32 --v1", [1] * 6 + [0.1] * 2 + [0.01] * 2, None, [dict(momentum=0.9)])]


@pytest.mark.parametrize("command, rates, norm, groups", RUNS, ids=[command for command, *_ in RUNS])
def test_optimizers_and_learning_rates(command, rates, norm, groups, here, monkeypatch):
    """Image scripts multiply --lr by batch / 256 or, with --lr-scaling sqrt, by the root of the batch."""
    clip = Mock(wraps=torch.nn.utils.clip_grad_norm_)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    monkeypatch.chdir(here)
    name, *flags = words(command)
    result = run(name, here / "out", *flags, "--steps", 10)
    lr, batch = 1e-3, result.args.batch_size
    if name in ("simclr", "moco"):
        lr = 0.32 * (batch**0.5 if "sqrt" in command else batch / 256)
    assert [step["lr"] for step in result.steps] == pytest.approx([lr * rate for rate in rates])
    assert {call.args[1] for call in clip.call_args_list} == ({norm} if norm else set())
    found = result.run.optimizer.param_groups
    settings = [{key: group[key] for key in wanted} for group, wanted in zip(found, groups, strict=True)]
    assert settings == groups


@pytest.mark.parametrize("name, flags, batch, rates, settings", [
    ("simclr", "", 512, [0.2, 0.1, 0], dict(nesterov=True, weight_decay=0)),
    ("simclr", "--supervised", 512, [5, 5, 5 * 0.2**3], dict(nesterov=False, weight_decay=0)),
    ("simclr", "--image-size 224", 4096, [1.6, 0.8, 0], dict(nesterov=True, weight_decay=1e-6)),
    ("moco", "", 256, [30, 30, 0.3], dict(init_std=0.01))])
def test_linear_probes(name, flags, batch, rates, settings, monkeypatch):
    """Check batch size, settings, and learning rates in the first step, halfway and after the last step."""
    script, train_probe = importlib.import_module(name), Mock()
    monkeypatch.setattr(script, "train_probe", train_probe)
    args = script.make_parser().parse_args(["--data", "x", *flags.split()])
    images = Mock(is_small=args.image_size is None, __len__=lambda _: 10**6)
    script.linear_probe(None, images, SimpleNamespace(args=args))
    used = train_probe.call_args.kwargs
    assert used["batch"] == batch and settings.items() <= used.items()
    assert [used["lr_schedule"](step, 100) for step in (0, 50, 100)] == pytest.approx(rates, abs=1e-9)
