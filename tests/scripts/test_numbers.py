"""Test that the scripts use the numbers of the papers and of their released code: defaults of flags,
optimizers, clipping, learning rates and linear probes."""
import importlib
import math
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from running import DATA, few_images, run

# ── defaults of flags ───────────────────────────────────────────────────────────────────────────────────────

SIMCSE = dict(temperature=0.05, max_length=32, hard_negative_weight=0, mlm_weight=0, eval_every=125, seed=42)
CLINE = dict(steps=None, eval_every=1000, lr=1e-4)
EASE = dict(temperature=0.05, entity_temperature=100, entity_weight=0.01, simcse_weight=1, hard_negatives=1,
            batch_size=128, epochs=1, lr=3e-5, warmup_steps=500, max_length=32, eval_every=125)
VASCL = dict(temperature=0.05, neighbours=16, ascent_steps=1, batch_size=1024, epochs=5, lr=5e-6,
             head_lr=5e-4, max_length=32, eval_every=500, seed=0)
CHILD = dict(model="bert-large-cased", reserve_p=0.3, batch_size=16, epochs=3, lr=4e-5, weight_decay=0.01,
             max_length=128, mode="D", seed=42)
SG = dict(objective="opt3", temperature=0.01, regulariser_weight=0.1, projection_dim=4096, batch_size=16,
          epochs=1, lr=5e-5, max_length=128, eval_every=50, layers=None, seed=1)
IMAGENET = dict(model="resnet-50", image_size=224, batch_size=256, epochs=200, lr=0.03, weight_decay=1e-4,
                queue_size=65536, momentum=0.999, crop=0.2, bn_splits=8, projection_dim=128)
V1, V2 = dict(head_layers=1, temperature=0.07, blur=0), dict(head_layers=2, temperature=0.2, blur=0.5)
# (script, flags, {flag: its default})
DEFAULTS = [
    ("simcse", "--columns 1", SIMCSE | dict(batch_size=64, lr=3e-5, epochs=1)),
    ("simcse", "--columns 1 2 3", SIMCSE | dict(batch_size=512, lr=5e-5, epochs=3)),
    ("selfguided", "--columns 1", SG | dict(view_pooling="max")),
    ("selfguided", "--columns 1 --form code", SG | dict(view_pooling="mean")),
    ("cline", "", CLINE | dict(synonym_rate=0.4, antonym_rate=0.2, batch_size=256, max_length=512,
                               length=30_000, warmup_part=60, eps=1e-8)),        # warm-up: 500 steps
    ("cline", "--form code", CLINE | dict(synonym_rate=0.5, antonym_rate=0.5, batch_size=128, max_length=256,
                                          length=1_000_000, warmup_part=100, eps=1e-6)),  # warm-up: 10,000
    ("tacl", "", dict(temperature=0.01, contrastive_weight=1, similarity="cosine", batch_size=256, lr=1e-4,
                      steps=150_000, max_length=256, eval_every=10_000, whole_word=False)),
    ("ease", "", EASE | dict(form="paper", entity_map="linear", hard_negative_weight=0, equal_entities="mask",
                             negative_group_size=None)),
    ("ease", "--form code", EASE | dict(entity_map="tanh", hard_negative_weight=1, equal_entities="keep",
                                        negative_group_size=8)),
    ("vascl", "--columns 1", VASCL | dict(form="code", radius=15)),
    ("vascl", "--columns 1 --form paper", VASCL | dict(radius=None, relative_radius=0.25)),  # our own value
    ("dclr", "--columns 1", dict(
        temperature=0.05, phi=0.9, noise_per_sentence=1, noise_steps=4, noise_step_size=1e-3,
        noise_temperature=0.05, batch_size=128, epochs=3, lr=3e-5, max_length=32, eval_every=125,
        guide="princeton-nlp/unsup-simcse-bert-base-uncased")),
    ("childtuning", "", CHILD | dict(fisher_batch_size=1, fisher_clip=0, fisher_samples=None)),
    ("childtuning", "--form code", CHILD | dict(fisher_batch_size=16, fisher_clip=1, fisher_samples=None)),
    ("simclr", "", dict(lr=1.0, lr_scaling="linear", weight_decay=1e-6, warmup_epochs=10, temperature=0.5,
                        optimizer="lars", colour=0.5, blur=0, crop=0.08, grey=0.2, head_layers=2,
                        projection_dim=128, form="paper")),
    ("simclr", "--recipe paper", dict(
        model="resnet-50", batch_size=4096, epochs=100, image_size=224, lr=0.3, lr_scaling="linear",
        weight_decay=1e-6, warmup_epochs=10, temperature=0.1, head_layers=2, form="paper", colour=1,
        blur=0.5, probe_epochs=90)),
    ("simclr", "--recipe code", dict(
        lr=0.075, lr_scaling="sqrt", weight_decay=1e-4, temperature=0.1, head_layers=3, form="code")),
    ("simclr", "--epochs 500 --recipe cifar", dict(                           # --epochs overrides the recipe
        model="resnet-18", batch_size=512, epochs=500, lr=1.0, lr_scaling="linear", weight_decay=1e-4,
        temperature=0.5, head_layers=3, form="code", colour=0.5, blur=0)),
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
        model="resnet-18", image_size=32, batch_size=512, epochs=200, lr=0.03, weight_decay=5e-4, crop=0.08,
        queue_size=4096, momentum=0.99, blur=0, head_layers=1, temperature=0.1, bn_splits=8)),
    ("memory_bank", "", dict(v1=True, head_layers=1, temperature=0.07, queue_size=4096, bank_momentum=0.5,
                             crop=0.2, weight_decay=5e-4)),
    ("ood", "", dict(ood_epochs=20, epochs=20, temperature=0.1, adversarial=0.1))]


@pytest.fixture(scope="module")
def large_files(tmp_path_factory):
    """Return ({script: data file}, data file of other scripts), with enough rows for default batches."""
    folder = tmp_path_factory.mktemp("large")
    files = {"text": "".join(f"sentence {i}\tpositive {i}\tother {i}\n" for i in range(1024)),
             "ease": "text\tentity\tnegative_entity\n" + "".join(f"{i}\te{i}\tother\n" for i in range(128)),
             "tacl": "A man eats.\nHe likes it.\n\nA dog runs.\nIt is fast.\n"}
    for name, content in files.items():
        (folder / f"{name}.tsv").write_text(content)
    labels = np.arange(4096) % 2
    np.savez(folder / "images.npz", images=np.zeros((4096, 2, 2, 3), np.uint8), labels=labels)
    paths = {name: folder / f"{name}.tsv" for name in ("ease", "tacl")}
    scripts = "simclr", "moco", "memory_bank", "simclr_v2"
    return paths | {name: folder / "images.npz" for name in scripts}, folder / "text.tsv"


@pytest.mark.parametrize("name, flags, wanted", DEFAULTS)
def test_defaults_of_flags(name, flags, wanted, large_files):
    script, data = importlib.import_module(name), large_files[0].get(name, large_files[1])
    args = script.make_parser().parse_args(["--data", str(data), *flags.split()])
    script.load_data(args.data, args)
    assert {key: getattr(args, key) for key in wanted} == wanted


# ── optimizers, clipping and learning rates ─────────────────────────────────────────────────────────────────

LINEAR = [1 - step / 10 for step in range(10)]                 # linear decay to 0, from the first step on
WARM_UP = [0, *(1 - step / 9 for step in range(9))]            # one of ten steps is warm-up
COSINE = [(1 + math.cos(math.pi * step / 10)) / 2 for step in range(10)]
WARM_COSINE = [0, 1 / 2, *((1 + math.cos(math.pi * step / 8)) / 2 for step in range(8))]  # 2 steps of warm-up
TEXT = ["--model", "scratch", "--lr", 1e-3, "--batch-size", 4, "--data"]
ONE_COLUMN, TRIPLES = [*TEXT, DATA / "sentences.txt"], [*TEXT, DATA / "nli.csv"]
CHILD_RUN = [*TEXT, DATA / "topics.tsv", "--mode"]
PICTURES = ["--model", "resnet-small", "--lr", 0.32, "--batch-size", 8, "--probe-epochs", 0,
            "--data", "IMAGES"]
MOCO = [*PICTURES, "--queue-size", 16, "--bn-splits", 2]
ADAM, ROBERTA = dict(betas=(0.9, 0.999), eps=1e-8, weight_decay=0), dict(betas=(0.9, 0.999), eps=1e-6)
# {run: (flags, factors of --lr in ten steps, norm to which gradients are clipped or None, settings of each
# parameter group)}. An epoch of eight images is one step, or two steps with batches of four images.
RUNS = {
    "simcse": (TRIPLES, LINEAR, 1, [ADAM]),
    "selfguided": ([*ONE_COLUMN, "--projection-dim", 16], WARM_UP, 1,
                   [dict(betas=(0.9, 0.9), eps=1e-6, weight_decay=0)]),
    "cline": ([*TRIPLES, "--held-out-rows", 0], WARM_UP, 1,
              [ADAM | dict(weight_decay=0.01), ADAM]),
    "cline code": ([*TRIPLES, "--held-out-rows", 0, "--form", "code"], WARM_UP, 1,
                   [ROBERTA | dict(weight_decay=0.01), ROBERTA | dict(weight_decay=0)]),
    "tacl": ([*TEXT, "DOCUMENTS"], WARM_UP, 1, [ROBERTA | dict(weight_decay=0)]),
    "ease": ([*TEXT, DATA / "entities.tsv", "--warmup-steps", 1], WARM_UP, 1, [ADAM]),
    "vascl": ([*ONE_COLUMN, "--neighbours", 2, "--head-lr", 0.1], [1] * 10, None,
              [ADAM | dict(lr=1e-3), ADAM | dict(lr=0.1)]),
    "dclr": ([*ONE_COLUMN, "--guide", "GUIDE"], LINEAR, 1, [ADAM]),
    "childtuning": ([*CHILD_RUN, "F"], WARM_UP, 1,
                    [ADAM | dict(weight_decay=0.01, mode="F", reserve_p=0.3), ADAM]),
    "childtuning code F": ([*CHILD_RUN, "F", "--form", "code"], LINEAR, 1,
                           [ADAM | dict(weight_decay=0.01, mode="F", reserve_p=0.3), ADAM]),
    "childtuning code": ([*CHILD_RUN, "none", "--form", "code"], WARM_UP, 1,
                         [ADAM | dict(weight_decay=0.01), ADAM]),
    "simclr": ([*PICTURES, "--batch-size", 4, "--warmup-epochs", 1], WARM_COSINE, None,
               [dict(trust=0.001, momentum=0.9)]),
    "simclr sqrt": ([*PICTURES, "--warmup-epochs", 0, "--lr-scaling", "sqrt"], COSINE, None, [{}]),
    "moco": (MOCO, COSINE, None, [dict(momentum=0.9, nesterov=False, weight_decay=5e-4)]),
    "moco v1": ([*MOCO, "--v1"], [1] * 6 + [0.1] * 2 + [0.01] * 2, None, [dict(momentum=0.9)])}


@pytest.mark.parametrize("name", RUNS)
def test_optimizers_and_learning_rates(name, tmp_path, bert, monkeypatch):
    """Image scripts multiply --lr by batch / 256 or, with --lr-scaling sqrt, by the root of the batch."""
    flags, rates, norm, groups = RUNS[name]
    (tmp_path / "documents").write_text("A man eats.\nHe likes it.\n\nA dog runs.\nIt is fast.\n")
    paths = dict(IMAGES=few_images(tmp_path, 8), GUIDE=bert, DOCUMENTS=tmp_path / "documents")
    clip = Mock(wraps=torch.nn.utils.clip_grad_norm_)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    flags = [paths.get(flag, flag) for flag in flags]
    result = run(name.split()[0], tmp_path / "out", *flags, "--steps", 10)
    batch = result.args.batch_size
    lr = 0.32 * (batch**0.5 if "sqrt" in name else batch / 256) if "IMAGES" in RUNS[name][0] else 1e-3
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
