"""Pictures: augmentations against plain per-picture code, losses and LARS against float64 formulas, and whole small runs."""
import colorsys
import importlib
import json
import math
import os
import pickle
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
simclr = importlib.import_module("simclr")


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


def test_crop_draws_the_papers_boxes(monkeypatch):
    boxes, size = [], 320

    def stop_after_two(first, length, *_):
        boxes.append((first, length))
        if len(boxes) == 2:
            raise StopIteration

    monkeypatch.setattr(simclr, "cubic", stop_after_two)
    torch.manual_seed(0)
    with pytest.raises(StopIteration):
        simclr.crop_and_flip(torch.zeros(1, 1, 1, 1).expand(20_000, 1, size, size), 0.08)
    (top, h), (left, w) = boxes
    area, ratio = h * w / size ** 2, w / h
    assert (top + h <= size).all() and (left + w <= size).all() and (top >= 0).all() and (left >= 0).all()
    assert 0.075 < area.min() < 0.085 and area.max() > 0.97 and 0.74 < ratio.min() and ratio.max() < 1.35
    # boxes of up to half the area fit at any aspect: of those, area and aspect are flat, and so are the places
    flat = [((area >= low) & (area < low + 0.1)).float().mean() for low in (0.1, 0.2, 0.3, 0.4)]
    assert max(flat) / min(flat) < 1.1
    flat = [((ratio >= low) & (ratio < low + 0.1) & (area < 0.5)).float().mean() for low in (0.8, 0.9, 1.0, 1.1, 1.2)]
    assert max(flat) / min(flat) < 1.15
    for first, length in boxes:
        places = (first / (size - length))[length < size - 20]
        assert abs(places.mean() - 0.5) < 0.01 and abs(places.var() - 1 / 12) < 0.01


def test_flip_is_half_and_keeps_the_picture():
    torch.manual_seed(1)
    x = pictures(1, 8)
    views = simclr.crop_and_flip(x.expand(400, 3, 8, 8), 1.0)
    whole = [(views - side).abs().amax((1, 2, 3)) < 1e-5 for side in (x, x.flip(3))]
    assert 0.05 < whole[0].float().mean() and abs(whole[0].float().mean() - whole[1].float().mean()) < 0.1


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
    torch.manual_seed(2)
    x = pictures(1, 5).expand(60, 3, 5, 5)
    torch.manual_seed(3)
    out = simclr.jitter(x, 0.5)
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


def shapes(n, seed=0):
    """Pictures of 16 px that can be told apart: each of four classes has a bar at its own place, the rest is noise."""
    random = np.random.default_rng(seed)
    labels = np.arange(n) % 4
    images = random.integers(0, 120, (n, 16, 16, 3))
    for i, label in enumerate(labels):
        if label < 2:
            images[i, 3 + 8 * label:6 + 8 * label, :, :] += 130
        else:
            images[i, 2:14, 2:14, label - 2] += 130
    return images.astype(np.uint8), labels


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "shapes.npz"
    images, labels = shapes(200)
    test_images, test_labels = shapes(80, 1)
    np.savez(path, images=images, labels=labels, test_images=test_images, test_labels=test_labels)
    return path


def run(*flags, cwd=ROOT):
    return subprocess.run([sys.executable, "simclr.py", "--model", "resnet-small", *map(str, flags)], cwd=cwd, text=True, capture_output=True,
                          env={**os.environ, "TRITON_INTERPRET": "0"})


SMALL = ["--batch-size", 50, "--epochs", 3, "--warmup", 0, "--optimizer", "sgd", "--lr", 0.1, "--probe-epochs", 5]


@pytest.mark.parametrize("flags", [[], ["--supervised", "--temperature", 0.1], ["--form", "code", "--head-layers", 3]], ids=["paper", "supervised", "code, v2"])
def test_run_and_load(flags, data, tmp_path):
    out = tmp_path / "out"
    done = run("--data", data, "--out", out, *SMALL, *flags)
    assert done.returncode == 0, done.stderr
    assert "kNN" in done.stdout and "linear" in done.stdout and "load     AutoModel" in done.stdout
    rows = [json.loads(line) for line in open(out / "metrics.jsonl")]
    assert all(math.isfinite(row["loss"]) for row in rows) and rows[-1]["step"] == 12 and "dev_knn" in rows[-1]
    from transformers import AutoModel
    model = AutoModel.from_pretrained(out, trust_remote_code=True).eval()
    assert type(model).__name__ == "SmallPictureResNet" and model.embedder.embedder.convolution.kernel_size == (3, 3)
    again = simclr.SmallPictureResNet.from_pretrained(out).eval()
    x = pictures(2, 16)
    assert torch.equal(model(x).pooler_output, again(x).pooler_output)


def test_probe_moves_nothing(data):
    train, test = simclr.read_pictures(data)
    args = SimpleNamespace(device="cpu", fp32=True, model="resnet-small", size=16, head_layers=2, width=8, form="paper", world=1, impl="auto",
                           probe_epochs=2, crop=0.08, seed=0)
    model = simclr.build_model(args)
    model.pictures, model.labels = train
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    simclr.evaluate(model, test, args), simclr.linear_probe(model, test, args)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_resume_is_exact(data, tmp_path, monkeypatch):
    """Step 5 begins the second epoch; step 7, which the interrupted run did after its evaluation, is done again."""
    flags = list(map(str, ["--data", data, "--model", "resnet-small", *SMALL, "--eval-every", 6, "--probe-epochs", 0]))
    simclr.main([*flags, "--out", str(tmp_path / "whole")])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(simclr, "average_gradients", Mock(side_effect=[None] * 7 + [KeyboardInterrupt]))
        simclr.main([*flags, "--out", str(tmp_path / "parts")])
    simclr.main([*flags, "--out", str(tmp_path / "parts"), "--resume"])
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    one, two = ([json.loads(line) | {"seconds": 0} for line in open(tmp_path / name / "metrics.jsonl")] for name in ("whole", "parts"))
    assert one == two


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
    ("beside", "pictures beside the folders a"), ("no labels", "--supervised wants labels"), ("few", "1 pictures, wanted at least --batch-size, which is 400"),
    ("floats", "images are float64 (8, 16, 16, 3), wanted uint8"), ("keys", "holds pictures; wanted images"), ("labels", "labels are int64 (3,), wanted 8 integers"),
    ("cut off", "x.npz: File is not a zip file"), ("no batch", "cifar: list indices must be integers"), ("pickle", "holds posix.system, which no CIFAR batch does"), ("absent", "nowhere: No such file or directory")])
def test_bad_pictures_get_one_line(name, said, tmp_path):
    path, *flags = bad(tmp_path, name)
    done = run("--data", path, "--out", tmp_path / "out", *flags)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and said in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()
