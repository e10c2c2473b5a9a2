"""Augmentations of pictures against plain code, one picture and one pixel at a time."""
import colorsys
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import moco
import simclr
from kernels.training.images.augmentation import blur, flip, jitter, keys_cubic, middle, mixed, resized


def pictures(n, size):
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(0))


def keys(t):
    """Keys' cubic with a = −1/2, written from its definition."""
    return 1 - 2.5 * t**2 + 1.5 * t**3 if t <= 1 else 2 - 4 * t + 2.5 * t**2 - 0.5 * t**3 if t < 2 else 0.0


def test_cubic_is_its_kernel():
    """Each new pixel weighs the four around it by their distance; beyond the box its edges are repeated."""
    size, width, first, length = 7, 9, [0, 2, 5, 8], [9, 4, 3, 1]
    box = torch.tensor(first).float(), torch.tensor(length).float()
    matrix = keys_cubic(*box, width, size, torch.zeros(1))
    for picture, out in itertools.product(range(4), range(size)):
        centre = (out + 0.5) * length[picture] / size - 0.5
        wanted = np.zeros(width)
        for pixel in range(math.floor(centre) - 1, math.floor(centre) + 3):
            wanted[first[picture] + min(max(pixel, 0), length[picture] - 1)] += keys(abs(centre - pixel))
        np.testing.assert_allclose(matrix[picture, out].numpy(), wanted, atol=1e-6)


@pytest.mark.parametrize("size", [1, 5, 12, 30])
def test_linear_is_pillows(size):
    """Of what is cut out first; also where a new pixel covers several. Pillow rounds twice, to whole
    numbers."""
    x = torch.randint(256, (4, 3, 12, 20), generator=torch.Generator().manual_seed(0))
    boxes = np.array([[0, 0, 20, 12], [3, 2, 15, 10], [19, 11, 1, 1], [0, 5, 20, 2]])
    found = resized(x / 255, boxes, size, cubic=False)
    for picture, (left, top, w, h), view in zip(x.byte().permute(0, 2, 3, 1).numpy(), boxes.tolist(), found):
        cut = Image.fromarray(picture[top : top + h, left : left + w])
        wanted = np.asarray(cut.resize((size, size), Image.Resampling.BILINEAR)) / 255
        assert abs(view.permute(1, 2, 0).numpy() - wanted).max() < 1.1 / 255


def test_resizing_stays_in_range_and_keeps_what_is_whole():
    x, all_of_it = pictures(2, 8).round(), np.array([[0, 0, 8, 8]] * 2)
    assert resized(x, all_of_it, 8, cubic=True) is x and resized(x, all_of_it, 8, cubic=False) is x
    parts = resized(x, np.array([[1, 2, 5, 4], [0, 0, 8, 8]]), 8, cubic=True)
    assert parts.min() == 0 and parts.max() == 1               # the cubic shoots over
    torch.testing.assert_close(parts[1], x[1], rtol=0, atol=1e-6)


# ── boxes ──


def test_numbers_are_splitmix64():
    """The first three of its stream from 1234567, from its authors' code."""
    stream = np.uint64(1234567) + np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert mixed(stream).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("script, scale", [(simclr, np.copy), (moco, np.log)])
def test_crop_draws_all_areas_aspects_and_places(script, scale):
    """Boxes of up to half the area fit at any aspect: areas and aspects of those are flat, as drawn; SimCLR's
    aspects as TensorFlow draws them, evenly, MoCo's logarithms as torchvision does."""
    n, size = 20_000, np.array([480, 640])
    boxes = script.CROPS._replace(least=0.08).draw(3, 1, np.arange(n), np.tile(size, (n, 1)), 2)
    assert boxes.shape == (2, n, 4) and not (boxes[0] == boxes[1]).all(1).any()
    first, length = boxes.reshape(-1, 2, 2).transpose(1, 0, 2)
    area, ratio = length.prod(1) / size.prod(), length[:, 0] / length[:, 1]
    assert 0.075 < area.min() < 0.085 and area.max() > 0.97 and 0.74 < ratio.min() and ratio.max() < 1.35
    edges = np.linspace(*scale([3 / 4 + 0.01, 4 / 3 - 0.01]), 6)
    for values, bins in ((area, np.linspace(0.1, 0.5, 5)), (scale(ratio[area < 0.5]), edges)):
        counts, _ = np.histogram(values, bins)
        assert counts.max() / counts.min() < 1.08
    assert (first >= 0).all() and (first + length <= size).all()
    for side in (0, 1):
        free = size[side] - length[:, side]
        places = (first[:, side] / free.clip(1))[free > 20]
        assert abs(places.mean() - 0.5) < 0.01 and abs(places.var() - 1 / 12) < 0.01


@pytest.mark.parametrize("script", [simclr, moco])
def test_a_box_depends_on_seed_epoch_picture_and_view_alone(script):
    """Not on who else is in the batch, nor on how many views are drawn."""
    draw, rows = script.CROPS.draw, np.array([5, 3, 10**6, 0])
    sizes = np.array([[300, 200], [1000, 2], [224, 224], [50, 70]])                # one of them fits no box
    whole = draw(7, 2, rows, sizes, 2)
    for i in range(4):
        assert np.array_equal(draw(7, 2, rows[i:][:1], sizes[i:][:1], 2), whole[:, i:][:, :1])
    assert np.array_equal(draw(7, 2, rows[::-1], sizes[::-1], 1), whole[:1, ::-1])
    square = np.array([[500, 500]] * 2)
    found = [draw(seed, epoch, [row, row], square, 2)[:, 0] for seed, epoch, row in itertools.product(
        (7, 8), (0, 1, 2), (0, 1, 2))]
    assert len({tuple(box) for box in np.concatenate(found).tolist()}) == 2 * 2 * 3 * 3


@pytest.mark.parametrize("script, size, wanted", [
    (simclr, (1000, 2), (0, 0, 1000, 2)), (simclr, (3, 999), (0, 0, 3, 999)),
    (moco, (1000, 2), (498, 0, 3, 2)), (moco, (3, 999), (0, 497, 3, 4)),
    (moco, (2**26, 1), (2**25 - 1, 0, 1, 1)), (simclr, (1, 1), (0, 0, 1, 1)), (moco, (1, 1), (0, 0, 1, 1))])
def test_where_no_box_fits(script, size, wanted):
    """SimCLR takes all of the picture, MoCo the middle, from 3:4 to 4:3."""
    boxes = script.CROPS.draw(0, 0, range(50), np.array([size] * 50), 2)
    assert (boxes == wanted).all()


@pytest.mark.parametrize("script", [simclr, moco])
def test_boxes_lie_in_pictures_of_any_shape(script):
    sizes = np.random.default_rng(0).integers(1, [40, 9], (5000, 2))
    boxes = script.CROPS.draw(1, 0, range(5000), sizes, 3)
    assert boxes.min() >= 0 and boxes[..., 2:].min() >= 1
    assert (boxes[..., :2] + boxes[..., 2:] <= sizes).all()


def test_middle():
    sizes = np.array([[100, 50], [31, 77], [1, 9], [64, 64]])
    (boxes,) = middle(sizes, 0.875)
    assert boxes[:, 2:].tolist() == [[44, 44], [27, 27], [1, 1], [56, 56]]
    assert abs(sizes - boxes[:, 2:] - 2 * boxes[:, :2]).max() <= 1
    assert middle(sizes, 1)[0, 3].tolist() == [0, 0, 64, 64]


# ── colours ──


def test_flip_is_half_and_keeps_the_picture():
    torch.manual_seed(1)
    x = pictures(1, 8).expand(400, 3, 8, 8)
    as_it_is, flipped = ((flip(x) == side).all(3).all(2).all(1) for side in (x, x.flip(3)))
    assert abs(flipped.float().mean() - 0.5) < 0.1 and abs(as_it_is.float().mean() - 0.5) < 0.1
    views = flip(x)
    assert all(torch.equal(view, x[0]) or torch.equal(view, x[0].flip(2)) for view in views)


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
    """What is done to crops in which order, with which amounts and shares."""
    done, coin = [], script.coin
    for name in ("jitter", "grey", "blur"):
        act = lambda x, *amounts, name=name: done.append((name, *amounts)) or x + (name == "grey")
        monkeypatch.setattr(script, name, act)
    monkeypatch.setattr(script, "coin", lambda p, x: done.append(p) or coin(p, x))
    torch.manual_seed(0)
    args = SimpleNamespace(colour=0.5, grey=0.1, blur=0.3, v1=v1)
    views = script.augment(torch.zeros(4000, 3, 2, 1), args)
    late = [("jitter", 0.4, 0.1, 0.8), share, ("grey",), 0.3, ("blur",)]
    assert done == ([0.2, ("grey",), ("jitter", 0.4, 0.4, 1)] if v1 else late)
    assert views.shape[1:] == (3, 2, 1) and abs(views.mean() - share) < 0.03
