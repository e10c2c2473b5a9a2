"""Pictures: augmentations against plain per-picture code, losses and LARS against float64 formulas, and whole small runs."""
import colorsys
import importlib
import json
import math
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
simclr, moco = importlib.import_module("simclr"), importlib.import_module("moco")


def pictures(n, size, seed=0):
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(seed))


# ── augmentations ──


def keys(t):
    """Keys' cubic with a = −1/2, written from its definition."""
    t = abs(t)
    return 1 - 2.5 * t ** 2 + 1.5 * t ** 3 if t <= 1 else 2 - 4 * t + 2.5 * t ** 2 - 0.5 * t ** 3 if t < 2 else 0.0


def test_crops_are_resized_by_keys_cubic():
    size, first, length = 9, [0, 2, 5], [9, 4, 3]
    matrix = simclr.cubic(torch.tensor(first).float(), torch.tensor(length).float(), size, torch.zeros(3, 1))
    for picture in range(3):
        for out in range(size):
            centre = (out + 0.5) * length[picture] / size - 0.5
            wanted = np.zeros(size)
            for pixel in range(math.floor(centre) - 1, math.floor(centre) + 3):
                wanted[first[picture] + min(max(pixel, 0), length[picture] - 1)] += keys(centre - pixel)
            np.testing.assert_allclose(matrix[picture, out].numpy(), wanted, atol=1e-6)


def test_linear_resizing_is_pillows():
    from PIL import Image
    size = 12
    picture = np.random.default_rng(0).integers(0, 256, (size, size)).astype(np.float32)
    for top, left, h, w in ((0, 0, 12, 12), (3, 1, 5, 9), (11, 4, 1, 8), (2, 0, 10, 2)):
        box = torch.tensor([[top, left], [h, w]]).float()
        rows, columns = (moco.linear(*box[:, i:i + 1], size, torch.zeros(1, 1))[0] for i in (0, 1))
        wanted = Image.fromarray(picture).crop((left, top, left + w, top + h)).resize((size, size), Image.Resampling.BILINEAR)
        np.testing.assert_allclose((rows @ torch.tensor(picture) @ columns.T).numpy(), np.asarray(wanted), atol=1e-3)


@pytest.mark.parametrize("script, tries", [("simclr", 100), ("moco", 10)])
def test_crop_draws_the_papers_boxes(script, tries, monkeypatch):
    """Aspects are flat in simclr.py, as TensorFlow draws them, and flat in their logarithm in moco.py, as torchvision does."""
    script = {"simclr": simclr, "moco": moco}[script]
    boxes, size = [], 320

    def stop_after_two(first, length, *_):
        boxes.append((first, length))
        if len(boxes) == 2:
            raise StopIteration

    def crop(x, least, aspects, resize):
        assert aspects.shape == (20_000, tries)
        real(torch.zeros(1, 1, 1, 1).expand(20_000, 1, size, size), least, aspects, stop_after_two)

    real = script.crop_and_flip
    monkeypatch.setattr(script, "crop_and_flip", crop)
    torch.manual_seed(0)
    with pytest.raises(StopIteration):
        script.augment(torch.zeros(20_000, 1, 1, 3, dtype=torch.uint8), SimpleNamespace(crop=0.08))
    (top, h), (left, w) = boxes
    area, ratio = h * w / size ** 2, w / h
    assert (top + h <= size).all() and (left + w <= size).all() and (top >= 0).all() and (left >= 0).all()
    assert 0.075 < area.min() < 0.085 and area.max() > 0.97 and 0.74 < ratio.min() and ratio.max() < 1.35
    # boxes of up to half the area fit at any aspect: of those, area and aspect are flat, and so are the places
    flat = [((area >= low) & (area < low + 0.1)).float().mean() for low in (0.1, 0.2, 0.3, 0.4)]
    assert max(flat) / min(flat) < 1.1
    ratio = ratio.log() if script is moco else ratio
    low, high = (math.log(3 / 4), math.log(4 / 3)) if script is moco else (3 / 4, 4 / 3)
    edges = np.linspace(low, high, 8)[1:-1]
    flat = [((ratio >= a) & (ratio < b) & (area < 0.5)).float().mean() for a, b in zip(edges, edges[1:])]
    assert max(flat) / min(flat) < 1.15
    for first, length in boxes:
        places = (first / (size - length))[length < size - 20]
        assert abs(places.mean() - 0.5) < 0.01 and abs(places.var() - 1 / 12) < 0.01


def test_flip_is_half_and_keeps_the_picture():
    torch.manual_seed(1)
    x = pictures(1, 8)
    views = simclr.crop_and_flip(x.expand(400, 3, 8, 8), 1.0, torch.ones(400, 1), simclr.cubic)
    whole = [(views - side).abs().amax((1, 2, 3)) < 1e-5 for side in (x, x.flip(3))]
    assert (whole[0] | whole[1]).all() and abs(whole[0].float().mean() - 0.5) < 0.1


@pytest.mark.parametrize("v1", [True, False])
def test_moco_views_are_the_versions(v1, monkeypatch):
    """What is done to a view, in order, with which amounts: v1 greys before a jitter of every picture; v2 jitters four in five,
    greys and blurs."""
    done = []
    for name in ("jitter", "grey", "blur"):
        monkeypatch.setattr(moco, name, lambda x, *amounts, name=name: done.append((name, *amounts)) or x)
    monkeypatch.setattr(moco, "coin", lambda p, x: done.append(p) or simclr.coin(p, x))
    moco.augment(torch.zeros(2, 8, 8, 3, dtype=torch.uint8), SimpleNamespace(crop=0.2, v1=v1, blur=0.5))
    steps = [0.2, ("grey",), ("jitter", 0.4, 0.4, 1)] if v1 else [("jitter", 0.4, 0.1, 0.8), 0.2, ("grey",), 0.5, ("blur",)]
    assert done == [0.5, *steps]                               # the flip's coin comes first


@pytest.mark.parametrize("shift", [0.0, 0.1, -0.2, 0.5])
def test_hue_turns_like_colorsys(shift):
    x = torch.cat([pictures(2, 6), torch.tensor([0.0, 0.5, 1.0])[None, :, None, None].expand(1, 3, 6, 6), torch.full((1, 3, 6, 6), 0.3)])
    turned = simclr.shift_hue(x, torch.full((4, 1, 1), shift))
    for picture, out in zip(x, turned):
        for a, b in zip(picture.flatten(1).T.tolist(), out.flatten(1).T.tolist()):
            hue, saturation, value = colorsys.rgb_to_hsv(*a)
            np.testing.assert_allclose(b, colorsys.hsv_to_rgb((hue + shift) % 1, saturation, value), atol=1e-5)


def test_jitter_is_one_of_the_orders_of_four_plain_operations():
    import itertools
    import itertools
    torch.manual_seed(2)
    x = pictures(1, 5).expand(60, 3, 5, 5)
    torch.manual_seed(3)
    out = simclr.jitter(x, 0.4, 0.1, 0.8)
    torch.manual_seed(3)                                           # the same draws, read off one by one
    order = torch.rand(60, 4).argsort(1)
    on = torch.rand(60, 1, 1, 1) < 0.8
    b, c, s = (0.6 + 0.8 * torch.rand(60, 1, 1, 1) for _ in range(3))
    hue = -0.1 + 0.2 * torch.rand(60, 1, 1)
    luma = lambda p: np.tensordot([0.299, 0.587, 0.114], p, 1)
    for i in range(60):
        picture = x[i].double().numpy()
        for which in order[i].tolist() if on[i] else []:
            if which == 0:
                picture = picture * b[i].item()
            elif which == 1:
                picture = (picture - luma(picture).mean()) * c[i].item() + luma(picture).mean()
            elif which == 2:
                picture = luma(picture) + (picture - luma(picture)) * s[i].item()
            else:
                flat = [colorsys.rgb_to_hsv(*p) for p in picture.reshape(3, -1).T]
                picture = np.array([colorsys.hsv_to_rgb((h + hue[i].item()) % 1, sat, v) for h, sat, v in flat]).T.reshape(3, 5, 5)
            picture = picture.clip(0, 1)
        np.testing.assert_allclose(out[i].numpy(), picture, atol=2e-5)
    assert 30 < on.sum() < 58 and len({tuple(row) for row in order.tolist()}) > 12


def test_blur_is_a_gaussian_per_picture():
    torch.manual_seed(4)
    x = pictures(3, 40)
    out = simclr.blur(x)
    torch.manual_seed(4)
    x = pictures(3, 40)
    for picture, blurred, sigma in zip(x, out, (0.1 + 1.9 * torch.rand(3, 1))[:, 0].tolist()):
        taps = np.exp(-np.arange(-2, 3) ** 2 / (2 * sigma ** 2))
        taps /= taps.sum()
        padded = np.pad(picture.numpy(), ((0, 0), (2, 2), (2, 2)))
        wanted = sum(a * b * padded[:, i:i + 40, j:j + 40] for i, a in enumerate(taps) for j, b in enumerate(taps))
        np.testing.assert_allclose(blurred.numpy(), wanted, atol=1e-5)


def test_views_are_seeded_and_differ():
    args = SimpleNamespace(crop=0.08, colour=0.5, grey=0.2, blur=0.5)
    x = torch.randint(256, (6, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(6)
    one = simclr.augment(x, args)
    two = simclr.augment(x, args)
    torch.manual_seed(6)
    assert torch.equal(one, simclr.augment(x, args)) and not torch.equal(one, two)
    assert one.shape == (6, 3, 32, 32) and one.dtype == torch.float32 and 0 <= one.min() and one.max() <= 1


# ── losses and optimizer ──


def naive_nt_xent(z1, z2, tau):
    z = F.normalize(torch.cat([z1, z2]), dim=1)
    total, n = 0, len(z1)
    for i in range(2 * n):
        logits = torch.stack([z[i] @ z[j] / tau for j in range(2 * n) if j != i])
        total = total - (z[i] @ z[(i + n) % (2 * n)] / tau - logits.logsumexp(0))
    return total / (2 * n)


def naive_sup_con(features, labels, tau):
    n, v, _ = features.shape
    z, y = F.normalize(features, dim=2).flatten(0, 1), labels.repeat_interleave(v)
    total = 0
    for i in range(n * v):
        lse = torch.stack([z[i] @ z[a] / tau for a in range(n * v) if a != i]).logsumexp(0)
        terms = [z[i] @ z[p] / tau - lse for p in range(n * v) if p != i and y[p] == y[i]]
        if terms:
            total = total - torch.stack(terms).mean()
    return total / (n * v)


def same(f, g, *tensors):
    """Values and gradients agree to 1e-10 in float64."""
    for h in (f, g):
        inputs = [t.clone().requires_grad_() for t in tensors]
        value = h(*inputs)
        result = [value, *torch.autograd.grad(value, inputs)]
        if h is f:
            first = result
    for a, b in zip(first, result):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("impl", ["eager", "blockwise"])
def test_losses_are_the_papers(impl):
    random = torch.Generator().manual_seed(7)
    z1, z2 = (torch.randn(7, 5, dtype=torch.float64, generator=random) for _ in range(2))
    same(lambda a, b: simclr.simclr_loss(a, b, 0.3, impl=impl), lambda a, b: naive_nt_xent(a, b, 0.3), z1, z2)
    features = torch.randn(6, 2, 5, dtype=torch.float64, generator=random)
    labels = torch.tensor([0, 0, 1, 2, 0, 1])
    same(lambda f: simclr.sup_con_loss(f, labels, 0.3, impl=impl), lambda f: naive_sup_con(f, labels, 0.3), features)
    same(lambda f: simclr.sup_con_loss(f, None, 0.3, impl=impl), lambda f: naive_nt_xent(f[:, 0], f[:, 1], 0.3), features)
    same(lambda f: simclr.sup_con_loss(f, labels, 0.3, 0.07, impl=impl), lambda f: naive_sup_con(f, labels, 0.3) * 0.3 / 0.07, features)
    alone = torch.randn(3, 1, 5, dtype=torch.float64, generator=random)
    assert simclr.sup_con_loss(alone, torch.arange(3), impl=impl) == 0               # no view has a positive
    assert simclr.simclr_loss(z1[:1], z2[:1], impl=impl) == 0


def test_gathered_rows_are_the_same_loss():
    random = torch.Generator().manual_seed(8)
    z1, z2 = (torch.randn(6, 5, dtype=torch.float64, generator=random) for _ in range(2))
    whole = simclr.simclr_loss(z1, z2, 0.3)
    parts = [simclr.simclr_loss(z1[i:i + 2], z2[i:i + 2], 0.3, gathered=(z1, z2), offset=i) for i in (0, 2, 4)]
    torch.testing.assert_close(torch.stack(parts).mean(), whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("impl", ["eager", "blockwise"])
@pytest.mark.parametrize("n, k", [(1, 1), (5, 12), (4, 3)])
def test_moco_loss_is_the_papers(n, k, impl):
    random = torch.Generator().manual_seed(10)
    q, keys, queue = (torch.randn(rows, 6, dtype=torch.float64, generator=random) for rows in (n, n, k))
    queue = F.normalize(queue, dim=1)

    def naive(q):
        total = 0
        for i in range(n):
            q_i, key = q[i] / q[i].norm(), keys[i] / keys[i].norm()
            logits = torch.stack([q_i @ key, *(q_i @ row for row in queue)]) / 0.07
            total = total - logits.log_softmax(0)[0]
        return total / n

    same(lambda q: moco.moco_loss(q, keys, queue, impl=impl), naive, q)
    keys.requires_grad_(), queue.requires_grad_()
    moco.moco_loss(q.requires_grad_(), keys, queue, impl=impl).backward()
    assert q.grad is not None and keys.grad is None and queue.grad is None


def test_queue_turns_round():
    queue = torch.arange(6.0)[:, None].repeat(1, 2)
    pointer = moco.enqueue(queue, 0, torch.full((4, 2), 10.0))
    assert pointer == 4 and queue[:, 0].tolist() == [10, 10, 10, 10, 4, 5]
    pointer = moco.enqueue(queue, pointer, torch.tensor([[20.0], [21], [22], [23]]).repeat(1, 2).requires_grad_())
    assert pointer == 2 and queue[:, 0].tolist() == [22, 23, 10, 10, 20, 21] and not queue.requires_grad
    assert moco.enqueue(queue, 0, torch.zeros(6, 2)) == 0 and not queue.any()
    with pytest.raises(ValueError, match="7 rows, the queue holds 6"):
        moco.enqueue(queue, 0, torch.zeros(7, 2))


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.999, 1.0])
def test_key_encoder_follows(momentum):
    torch.manual_seed(11)
    query, key = (torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).double() for _ in range(2))
    query[1].running_mean += 5
    wanted = [momentum * k + (1 - momentum) * q for k, q in zip(key.parameters(), query.parameters())]
    moco.update_key_encoder(key, query, momentum)
    for k, q, w in zip(key.parameters(), query.parameters(), wanted):
        torch.testing.assert_close(k, w, rtol=1e-14, atol=1e-14)
        assert momentum > 0 or torch.equal(k, q)
    assert not key[1].running_mean.any() and key[1].num_batches_tracked == 0          # statistics are the key encoder's own


def test_split_batch_norm_is_one_a_part():
    torch.manual_seed(12)
    x = torch.randn(8, 3, 4, 4, dtype=torch.float64)
    parts = [torch.nn.BatchNorm2d(3).double() for _ in range(4)]
    split = moco.SplitBatchNorm(3).double()
    split.rows = 2
    wanted = torch.cat([norm(part) for norm, part in zip(parts, x.chunk(4))])
    torch.testing.assert_close(split(x), wanted, rtol=1e-12, atol=1e-12)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(split, name), torch.stack([getattr(norm, name) for norm in parts]).mean(0))
    split.eval(), parts[0].load_state_dict(split.state_dict()), parts[0].eval()
    assert torch.equal(split(x), parts[0](x)) and split.num_batches_tracked == 1


def test_keys_are_encoded_in_other_parts_and_come_back_in_order(monkeypatch):
    seen = []
    monkeypatch.setattr(moco, "embed", lambda model, views: seen.append(views) or views)
    model = SimpleNamespace(key=SimpleNamespace(head=lambda x: x))
    views = F.normalize(torch.randn(16, 5), dim=1)
    keys = moco.encode_keys(model, views, SimpleNamespace(world=1, rank=0, rows=16))
    torch.testing.assert_close(keys, views)
    assert not torch.equal(seen[0], views) and torch.equal(seen[0].sum(1).sort()[0], views.sum(1).sort()[0])


def test_moco_schedules():
    rates = [moco.epoch_rate(epoch, 200, SimpleNamespace(v1=True)) for epoch in (0, 119, 120, 159, 160, 199)]
    assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    assert [moco.epoch_rate(epoch, 200, SimpleNamespace(v1=False)) for epoch in (0, 100, 150)] == pytest.approx([1, 0.5, 0.5 - 0.125 ** 0.5])


def test_lars_step():
    random = torch.Generator().manual_seed(9)
    matrix, bias, zero = torch.randn(3, 4, generator=random).double(), torch.randn(3, generator=random).double(), torch.zeros(2, 2).double()
    tensors = [torch.nn.Parameter(x.clone()) for x in (matrix, bias, zero)]
    optimizer = simclr.LARS(tensors, lr=0.5, weight_decay=0.01)
    wanted, momenta = [matrix.clone(), bias.clone(), zero.clone()], [0, 0, 0]
    for step, lr in enumerate((0.5, 0.2, 0.1)):
        gradients = [torch.randn(x.shape, generator=random).double() for x in wanted]
        for i, (w, g) in enumerate(zip(wanted, gradients)):
            if w.dim() > 1:
                g = g + 0.01 * w
                g = g * (0.001 * w.norm() / g.norm() if w.norm() > 0 else 1)
            momenta[i] = 0.9 * momenta[i] + lr * g
            wanted[i] = w - momenta[i]
        for tensor, g in zip(tensors, gradients):
            tensor.grad = g
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    for tensor, w in zip(tensors, wanted):
        torch.testing.assert_close(tensor.detach(), w, rtol=1e-10, atol=1e-12)


def test_schedule():
    rates = [simclr.warmup_cosine(step, 100, 10, 2.0) for step in range(101)]
    assert rates[0] == 0 and rates[5] == 1.0 and rates[10] == 2.0 and rates[55] == pytest.approx(1.0) and rates[100] == pytest.approx(0)
    assert simclr.warmup_cosine(0, 10, 0, 3.0) == 3.0


# ── whole runs ──


SHAPES = ROOT / "tests" / "data" / "shapes.npz"


def shapes(n):
    with np.load(SHAPES) as file:
        return file["images"][:n], file["labels"][:n]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A part of the shapes, for speed."""
    path = tmp_path_factory.mktemp("data") / "shapes.npz"
    images, labels = shapes(280)
    np.savez(path, images=images[:200], labels=labels[:200], test_images=images[200:], test_labels=labels[200:])
    return path


SMALL = {"simclr": ["--batch-size", 50, "--epochs", 3, "--warmup", 0, "--optimizer", "sgd", "--lr", 0.1, "--probe-epochs", 5],
         "moco": ["--batch-size", 50, "--bn-splits", 5, "--queue", 100, "--epochs", 3, "--probe-epochs", 5]}
SCRIPTS = {"simclr": simclr, "moco": moco}


@pytest.mark.parametrize("script", SCRIPTS)
def test_copied_with_kernels_alone(script, data, tmp_path):
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / f"{script}.py", tmp_path)
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
    command = [sys.executable, f"{script}.py", "--model", "resnet-small", "--data", data, "--out", "out", "--steps", 3, *SMALL[script]]
    done = subprocess.run([*map(str, command)], cwd=tmp_path, env=env | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert files == {"README.md", "args.json", "config.json", "metrics.jsonl", "model.safetensors", "modeling.py", "preprocessor_config.json",
                     "state.pt", f"{script}.py"}


@pytest.mark.parametrize("script, flags", [
    ("simclr", []), ("simclr", ["--supervised", "--temperature", 0.1]), ("simclr", ["--form", "code", "--head-layers", 3]),
    ("moco", []), ("moco", ["--v1"]), ("moco", ["--symmetric", "--head-layers", 1])], ids=str)
def test_run_and_load(script, flags, data, tmp_path, capsys):
    out = tmp_path / "out"
    SCRIPTS[script].main([*map(str, ["--model", "resnet-small", "--data", data, "--out", out, *SMALL[script], *flags])])
    said = capsys.readouterr().out
    assert "kNN" in said and "linear" in said and "load     AutoModel" in said
    rows = [json.loads(line) for line in open(out / "metrics.jsonl")]
    assert all(math.isfinite(row["loss"]) for row in rows) and rows[-1]["step"] == 12 and "dev_knn" in rows[-1]
    from transformers import AutoImageProcessor, AutoModel
    model = AutoModel.from_pretrained(out, trust_remote_code=True).eval()
    assert type(model).__name__ == "SmallPictureResNet" and model.embedder.embedder.convolution.kernel_size == (3, 3)
    module = SCRIPTS[script]
    (images, _), _ = module.read_pictures(data)
    again = module.build_model(build_args(script, out))
    try:
        processor = AutoImageProcessor.from_pretrained(out)
    except ImportError:                                        # transformers 5.17 has it with torchvision only; all before this line held
        pytest.skip("AutoImageProcessor wants torchvision here")
    prepared = processor([image.numpy() for image in images[:4]], return_tensors="pt")
    torch.testing.assert_close(model(**prepared).pooler_output.flatten(1), module.features(again, images[:4]), rtol=1e-4, atol=1e-5)


def test_profile_times_and_writes_nothing(data, tmp_path, capsys):
    simclr.main([*map(str, ["--model", "resnet-small", "--data", data, "--out", tmp_path / "out", *SMALL["simclr"], "--profile"])])
    step, loss, share = (float(word) for word in re.findall(r"[\d.]+", capsys.readouterr().out.splitlines()[-1])[:3])
    assert share == pytest.approx(100 * loss / step, abs=0.1) and 0 < loss < step and not (tmp_path / "out").exists()


def build_args(script, model="resnet-small"):
    flags = ["--data", "x", "--model", str(model), *map(str, SMALL[script])]
    args = SCRIPTS[script].make_parser().parse_args(flags)
    defaults = dict(head_layers=2, momentum=0.99, temperature=0.2, v1=False, crop=0.08, blur=0.0) if script == "moco" else {}
    for name, value in dict(size=16, device="cpu", rank=0, world=1, **defaults).items():
        setattr(args, name, value)
    return args


@pytest.mark.parametrize("script", SCRIPTS)
def test_probe_moves_nothing(script, data):
    module, args = SCRIPTS[script], build_args(script)
    train, test = module.read_pictures(data)
    model = module.build_model(args)
    model.pictures, model.labels = train
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    module.evaluate(model, test, args), module.linear_probe(model, test, args)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("script, flags", [("simclr", []), ("moco", []), ("moco", ["--symmetric"])])
def test_resume_is_exact(script, flags, data, tmp_path, monkeypatch):
    """Step 5 begins the second epoch; step 7, which the interrupted run did after its evaluation, is done again."""
    module = SCRIPTS[script]
    flags = list(map(str, ["--data", data, "--model", "resnet-small", *SMALL[script], *flags, "--eval-every", 6, "--probe-epochs", 0]))
    module.main([*flags, "--out", str(tmp_path / "whole")])
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(module, "average_gradients", Mock(side_effect=[None] * 7 + [KeyboardInterrupt]))
        module.main([*flags, "--out", str(tmp_path / "parts")])
    module.main([*flags, "--out", str(tmp_path / "parts"), "--resume"])
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    one, two = (torch.load(tmp_path / name / "state.pt")["model"] for name in ("whole", "parts"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    one, two = ([json.loads(line) | {"seconds": 0} for line in open(tmp_path / name / "metrics.jsonl")] for name in ("whole", "parts"))
    assert one == two


def same_views(pictures, args):
    """Views without chance: the picture, and the picture in a mirror."""
    x = pictures.permute(0, 3, 1, 2).float() / 255
    return torch.cat([x[: len(x) // 2], x[len(x) // 2:].flip(3)])


def still(model):
    """Its batch norms stay at what they were made with."""
    for norm in [module for module in model.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]:
        norm.train = lambda mode=True: None
        norm.training = False
    return model


def in_float64(patch):
    """Batch norms of few pictures make much of rounding; with float64 all through, equal runs stay equal to nine digits."""
    patch.setattr(torch.Tensor, "float", torch.Tensor.double)
    patch.setattr(moco, "augment", same_views)
    patch.setattr(simclr, "augment", same_views)
    build = simclr.build_model
    patch.setattr(simclr, "build_model", lambda args: still(build(args)))
    torch.set_default_dtype(torch.float64)


def one_of_several(rank, world, port, script, flags):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        in_float64(patch)
        SCRIPTS[script].main(flags)


@pytest.mark.parametrize("script, world, flags", [("moco", 2, ["--bn-splits", 10, "--symmetric"]), ("simclr", 3, []),
                                                  ("simclr", 3, ["--supervised"])], ids=str)
def test_several_processes_equal_one(script, world, flags, data, tmp_path):
    """MoCo's shuffled and split batch norms, queue and pointer included; SimCLR's unequal shares, without batch norms' statistics,
    which processes on CPUs have for themselves."""
    flags = [*map(str, ["--data", data, "--model", "resnet-small", *SMALL[script], *flags, "--probe-epochs", 0, "--steps", 3])]
    try:
        with pytest.MonkeyPatch.context() as patch:
            in_float64(patch)
            SCRIPTS[script].main([*flags, "--out", str(tmp_path / "one")])
    finally:
        torch.set_default_dtype(torch.float32)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(one_of_several, (world, port, script, [*flags, "--out", str(tmp_path / "two")]), nprocs=world, start_method="forkserver")
    one, two = (torch.load(tmp_path / name / "state.pt") for name in ("one", "two"))
    assert one["progress"].get("pointer") == two["progress"].get("pointer") and one["progress"]["best"] == two["progress"]["best"]
    for name, tensor in one["model"].items():
        torch.testing.assert_close(two["model"][name], tensor, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("script, size", [("simclr", 7), ("simclr", 64), ("moco", 10), ("moco", 30)])
def test_chunks_are_the_whole_step(script, size, data, tmp_path):
    """SimCLR without batch norms' statistics, which chunks have for themselves; MoCo's are those of its parts, whole in each chunk."""
    flags = [*map(str, ["--data", data, "--model", "resnet-small", *SMALL[script], "--probe-epochs", 0, "--steps", 2])]
    try:
        with pytest.MonkeyPatch.context() as patch:
            in_float64(patch)
            SCRIPTS[script].main([*flags, "--out", str(tmp_path / "whole")])
            SCRIPTS[script].main([*flags, "--out", str(tmp_path / "chunked"), "--chunk-size", str(size)])
    finally:
        torch.set_default_dtype(torch.float32)
    whole, chunked = (torch.load(tmp_path / name / "state.pt")["model"] for name in ("whole", "chunked"))
    for name in (name for name in whole if script == "simclr" or not re.search("running|tracked", name)):
        torch.testing.assert_close(chunked[name], whole[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("script, size", [("simclr", 7), ("moco", 20)])
def test_chunks_with_batch_norm(script, size, data, tmp_path, monkeypatch):
    """The same chunks embedded once and all kept: equal weights, and running statistics that count every chunk once."""
    flags = [*map(str, ["--data", data, "--model", "resnet-small", *SMALL[script], "--probe-epochs", 0, "--steps", 1, "--chunk-size", size])]
    SCRIPTS[script].main([*flags, "--out", str(tmp_path / "chunked")])
    monkeypatch.setattr(SCRIPTS[script], "embed_in_chunks", lambda embed, chunks, _: torch.cat([embed(chunk) for chunk in chunks]))
    SCRIPTS[script].main([*flags, "--out", str(tmp_path / "kept")])
    kept, chunked = (torch.load(tmp_path / name / "state.pt")["model"] for name in ("kept", "chunked"))
    for name, tensor in kept.items():
        torch.testing.assert_close(chunked[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def test_knn_accuracy():
    bank, labels = torch.eye(4).repeat(3, 1), torch.arange(4).repeat(3)
    assert simclr.knn_accuracy(bank, labels, torch.eye(4), torch.arange(4), k=3) == 100
    assert simclr.knn_accuracy(bank, labels, torch.eye(4), torch.tensor([1, 1, 2, 3]), k=3) == 75


# ── readers and bad input ──


def test_folders_and_cifar_batches_hold_the_same_pictures(tmp_path):
    from PIL import Image
    images, labels = shapes(12)
    for i, (image, label) in enumerate(zip(images, labels)):
        (tmp_path / "folder" / f"class{label}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "folder" / f"class{label}" / f"{i:03}.png")
    (found, classes), test = simclr.read_pictures(tmp_path / "folder")
    order = np.argsort(labels, kind="stable")
    assert test is None and np.array_equal(found.numpy(), images[order]) and classes.tolist() == labels[order].tolist()
    images = np.random.default_rng(0).integers(0, 256, (10, 32, 32, 3)).astype(np.uint8)
    (tmp_path / "cifar").mkdir()
    for name in ("data_batch_1", "test_batch"):
        with open(tmp_path / "cifar" / name, "wb") as file:
            pickle.dump({b"data": images.transpose(0, 3, 1, 2).reshape(10, -1), b"labels": list(range(10))}, file)
    train, test = simclr.read_pictures(tmp_path / "cifar")
    assert np.array_equal(train[0].numpy(), images) and test[1].tolist() == list(range(10))


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


def bad(tmp_path, name):
    from PIL import Image
    images, labels = shapes(8)
    folder = tmp_path / "pictures"
    (folder / "a").mkdir(parents=True)
    Image.fromarray(images[0]).save(folder / "a" / "0.png")
    flags = ["--batch-size", 4]
    if name == "unreadable":
        (folder / "a" / "1.png").write_bytes(b"no picture")
    elif name == "mixed sizes":
        Image.fromarray(images[1][:8]).save(folder / "a" / "1.png")
    elif name == "beside":
        Image.fromarray(images[1]).save(folder / "1.png")
    elif name == "no labels":
        np.save(tmp_path / "x.npy", images)
        return [tmp_path / "x.npy", *flags, "--supervised"]
    elif name == "queue":
        np.save(tmp_path / "x.npy", images)
        return [tmp_path / "x.npy", *flags, "--queue", 10]
    elif name == "splits":
        np.save(tmp_path / "x.npy", images)
        return [tmp_path / "x.npy", *flags, "--queue", 8, "--bn-splits", 3]
    elif name == "few":
        flags = ["--batch-size", 400]
    elif name == "floats":
        np.savez(tmp_path / "x.npz", images=images / 255)
        return [tmp_path / "x.npz", *flags]
    elif name == "keys":
        np.savez(tmp_path / "x.npz", pictures=images)
        return [tmp_path / "x.npz", *flags]
    elif name == "labels":
        np.savez(tmp_path / "x.npz", images=images, labels=labels[:3])
        return [tmp_path / "x.npz", *flags]
    elif name == "pickle":
        (tmp_path / "cifar").mkdir()
        pickle.dump(Evil(), open(tmp_path / "cifar" / "data_batch_1", "wb"))
        return [tmp_path / "cifar", *flags]
    elif name == "cut off":
        np.savez(tmp_path / "x.npz", images=images)
        (tmp_path / "x.npz").write_bytes((tmp_path / "x.npz").read_bytes()[:-40])
        return [tmp_path / "x.npz", *flags]
    elif name == "no batch":
        (tmp_path / "cifar").mkdir()
        pickle.dump([1, 2], open(tmp_path / "cifar" / "data_batch_1", "wb"))
        return [tmp_path / "cifar", *flags]
    elif name == "absent":
        return [tmp_path / "nowhere", *flags]
    return [folder, *flags]


@pytest.mark.parametrize("name, said", [
    ("unreadable", "1.png: not readable (UnidentifiedImageError); repair or delete it"), ("mixed sizes", "1.png: 16 x 8, 0.png is 16 x 16"),
    ("queue", "--queue 10 is no multiple of the 4 keys of a step; try 8"), ("splits", "--bn-splits 3 does not divide --batch-size, which is 4"),
    ("beside", "pictures beside the folders a"), ("no labels", "--supervised wants labels"), ("few", "1 pictures, wanted at least --batch-size, which is 400"),
    ("floats", "images are float64 (8, 16, 16, 3), wanted uint8"), ("keys", "holds pictures; wanted images"), ("labels", "labels are uint8 (3,), wanted 8 integers"),
    ("cut off", "x.npz: File is not a zip file"), ("no batch", "cifar: list indices must be integers"), ("pickle", "holds posix.system, which no CIFAR batch does"), ("absent", "nowhere: No such file or directory")])
def test_bad_pictures_get_one_line(name, said, tmp_path, capsys):
    path, *flags = bad(tmp_path, name)
    script = SCRIPTS["moco" if name in ("queue", "splits") else "simclr"]
    with pytest.raises(SystemExit) as end:
        script.main([*map(str, ["--model", "resnet-small", "--data", path, "--out", tmp_path / "out", *flags])])
    written = capsys.readouterr().err
    assert end.value.code == 2 and written.count("\n") == 1 and said in written
    assert not (tmp_path / "out").exists()
