"""Augmentations of pictures against plain code, one picture and one pixel at a time."""
import colorsys
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import moco
import simclr
from kernels.training.views import blur, crop_and_flip, cubic, jitter, linear


def pictures(n, size):
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(0))


def keys(t):
    """Keys' cubic with a = −1/2, written from its definition."""
    return 1 - 2.5 * t**2 + 1.5 * t**3 if t <= 1 else 2 - 4 * t + 2.5 * t**2 - 0.5 * t**3 if t < 2 else 0.0


@pytest.mark.parametrize("resize, kernel", [(cubic, keys), (linear, lambda t: max(0, 1 - t))])
def test_resize_is_its_kernel(resize, kernel):
    """Each new pixel weighs the four around it by their distance; beyond the box its edges are repeated."""
    size, first, length = 9, [0, 2, 5, 8], [9, 4, 3, 1]
    matrix = resize(torch.tensor(first).float(), torch.tensor(length).float(), size, torch.zeros(4, 1))
    for picture, out in itertools.product(range(4), range(size)):
        centre = (out + 0.5) * length[picture] / size - 0.5
        wanted = np.zeros(size)
        for pixel in range(math.floor(centre) - 1, math.floor(centre) + 3):
            wanted[first[picture] + min(max(pixel, 0), length[picture] - 1)] += kernel(abs(centre - pixel))
        np.testing.assert_allclose(matrix[picture, out].numpy(), wanted, atol=1e-6)


def test_crop_draws_all_areas_aspects_and_places():
    """Boxes of up to half the area fit at any aspect: areas and aspects of those are flat, as drawn."""
    n, height, width, boxes = 20_000, 640, 320, []

    def stop_after_two(*box):
        boxes.append(box)
        if len(boxes) == 2:
            raise StopIteration

    torch.manual_seed(0)
    x, aspects = torch.zeros(1).expand(n, 1, height, width), 3 / 4 + 7 / 12 * torch.rand(n, 10)
    with pytest.raises(StopIteration):
        crop_and_flip(x, 0.08, aspects, stop_after_two)
    h, w = boxes[0][1], boxes[1][1]
    area, ratio = h * w / (height * width), w / h * (height / width)
    assert 0.075 < area.min() < 0.085 and area.max() > 0.97 and 0.74 < ratio.min() and ratio.max() < 1.35
    for values, edges in ((area, np.linspace(0.1, 0.5, 5)), (ratio[area < 0.5], np.linspace(0.8, 1.3, 6))):
        counts, _ = np.histogram(values.numpy(), edges)
        assert counts.max() / counts.min() < 1.12
    for first, length, size, _ in boxes:
        assert first.min() >= 0 and (first + length).max() <= size
        places = (first / (size - length))[length < size - 20]
        assert abs(places.mean() - 0.5) < 0.01 and abs(places.var() - 1 / 12) < 0.01


def test_flip_is_half_and_keeps_the_picture():
    torch.manual_seed(1)
    x, aspects = pictures(1, 8).round().expand(400, 3, 8, 8), torch.ones(400, 1)
    views, parts = (crop_and_flip(x, least, aspects, cubic) for least in (1, 0.1))
    as_it_is, flipped = ((views - side).abs().amax((1, 2, 3)) < 1e-5 for side in (x, x.flip(3)))
    assert (as_it_is | flipped).all() and abs(flipped.float().mean() - 0.5) < 0.1
    assert parts.min() == 0 and parts.max() == 1               # the cubic shoots over


def changed(picture, which, factors, hue):
    """One of the four plain operations on a picture (3, H, W), which is then cut off at 0 and 1."""
    luma = np.tensordot([0.299, 0.587, 0.114], picture, 1)
    if which == 3:
        flat = [colorsys.rgb_to_hsv(*pixel) for pixel in picture.reshape(3, -1).T]
        flat = [colorsys.hsv_to_rgb((h + hue) % 1, s, v) for h, s, v in flat]
        return np.array(flat).T.reshape(picture.shape)
    centre = (0, luma.mean(), luma)[which]                     # brightness, contrast, saturation
    return (centre + (picture - centre) * factors[which]).clip(0, 1)


def test_jitter_is_one_of_the_orders_of_four_plain_operations():
    """Also of grey pixels, and of those with two channels of one value."""
    x = pictures(1, 5).expand(60, 3, 5, 5).clone()
    x[..., 0, :], x[:, 1:, 1], x[:, :2, 2] = 0.3, 0.6, 0.9
    torch.manual_seed(3)
    out = jitter(x, 0.4, 0.5, 0.8)
    torch.manual_seed(3)                                       # the same draws, read off one by one
    order, on = torch.rand(60, 4).argsort(1), torch.rand(60, 1, 1, 1) < 0.8
    factors = [0.6 + 0.8 * torch.rand(60, 1, 1, 1) for _ in range(3)]
    hue = torch.rand(60, 1, 1) - 0.5
    for i in range(60):
        picture = x[i].double().numpy()
        for which in order[i].tolist() if on[i] else []:
            picture = changed(picture, which, [factor[i].item() for factor in factors], hue[i].item())
        np.testing.assert_allclose(out[i].numpy(), picture, atol=2e-5)


def test_blur_is_a_gaussian_per_picture():
    x = pictures(3, 40)
    torch.manual_seed(4)
    out = blur(x)
    torch.manual_seed(4)
    for picture, blurred, sigma in zip(x, out, (0.1 + 1.9 * torch.rand(3, 1))[:, 0].tolist()):
        taps = np.exp(-np.arange(-2, 3) ** 2 / (2 * sigma**2))
        kernel = torch.tensor(np.outer(taps, taps) / taps.sum() ** 2).float()[None, None]
        wanted = torch.nn.functional.conv2d(picture[:, None], kernel, padding=2)[:, 0]
        torch.testing.assert_close(blurred, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("script, v1, share", [(simclr, False, 0.1), (moco, False, 0.2), (moco, True, 0.2)])
def test_views_are_the_papers(script, v1, share, monkeypatch):
    """What is done in which order, with which amounts and shares; SimCLR draws the aspects of boxes evenly as
    TensorFlow does, MoCo their logarithms as torchvision does."""
    done, boxes, coin = [], [], script.coin
    for name in ("jitter", "grey", "blur"):
        act = lambda x, *amounts, name=name: done.append((name, *amounts)) or x + (name == "grey")
        monkeypatch.setattr(script, name, act)
    monkeypatch.setattr(script, "coin", lambda p, x: done.append(p) or coin(p, x))
    monkeypatch.setattr(script, "crop_and_flip", lambda x, *given: boxes.extend(given) or x)
    torch.manual_seed(0)
    tries, scale, resize = (100, np.copy, cubic) if script is simclr else (10, np.log, linear)
    args = SimpleNamespace(crop=0.15, colour=0.5, grey=0.1, blur=0.3, v1=v1)
    views = script.augment(torch.zeros(40_000 // tries, 2, 1, 3, dtype=torch.uint8), args)
    late = [("jitter", 0.4, 0.1, 0.8), share, ("grey",), 0.3, ("blur",)]
    assert done == ([0.2, ("grey",), ("jitter", 0.4, 0.4, 1)] if v1 else late)
    assert views.shape[1:] == (3, 2, 1) and abs(views.mean() - share) < 0.03
    counts, _ = np.histogram(scale(boxes[1].numpy()), np.linspace(*scale([3 / 4, 4 / 3]), 6))
    assert boxes[1].shape == (len(views), tries) and counts.min() > 7_700 and boxes[::2] == [0.15, resize]
