"""Image augmentation, compared with plain code for one image or one pixel at a time."""
import colorsys
import itertools
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import moco
import simclr
from kernels.training.images.augmentation import (
    bicubic_matrix,
    blur,
    centre_crop_boxes,
    crop_and_resize,
    flip,
    jitter,
    mix_bits,
)


def random_images(n, size):
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(0))


def keys_kernel(t):
    """Return Keys' cubic kernel with a = −1/2 at distance t ≥ 0, from its definition."""
    if t <= 1:
        return 1 - 2.5 * t**2 + 1.5 * t**3
    return 2 - 4 * t + 2.5 * t**2 - 0.5 * t**3 if t < 2 else 0.0


def test_bicubic_weights_match_the_kernel():
    """A new pixel is a weighted sum of four neighbours. Outside a box its edge pixels are repeated."""
    size, width, first, length = 7, 9, [0, 2, 5, 8], [9, 4, 3, 1]
    box = torch.tensor(first).float(), torch.tensor(length).float()
    matrix = bicubic_matrix(*box, width, size, torch.zeros(1))
    for image, out in itertools.product(range(4), range(size)):
        centre = (out + 0.5) * length[image] / size - 0.5
        expected = np.zeros(width)
        for pixel in range(math.floor(centre) - 1, math.floor(centre) + 3):
            expected[first[image] + min(max(pixel, 0), length[image] - 1)] += keys_kernel(abs(centre - pixel))
        np.testing.assert_allclose(matrix[image, out].numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("size", [1, 5, 12, 30])
def test_bilinear_matches_pillow(size):
    """Pillow crops and then resizes, also to fewer pixels; it rounds to integers twice, hence 1.1 / 255."""
    x = torch.randint(256, (4, 3, 12, 20), generator=torch.Generator().manual_seed(0))
    boxes = np.array([[0, 0, 20, 12], [3, 2, 15, 10], [19, 11, 1, 1], [0, 5, 20, 2]])
    found = crop_and_resize(x / 255, boxes, size, bicubic=False)
    for image, (left, top, w, h), view in zip(x.byte().permute(0, 2, 3, 1).numpy(), boxes.tolist(), found):
        cut = Image.fromarray(image[top : top + h, left : left + w])
        expected = np.asarray(cut.resize((size, size), Image.Resampling.BILINEAR)) / 255
        assert abs(view.permute(1, 2, 0).numpy() - expected).max() < 1.1 / 255


def test_resizing_stays_in_range_and_full_boxes_change_nothing():
    x, full = random_images(2, 8).round(), np.array([[0, 0, 8, 8]] * 2)
    assert crop_and_resize(x, full, 8, bicubic=True) is x and crop_and_resize(x, full, 8, bicubic=False) is x
    parts = crop_and_resize(x, np.array([[1, 2, 5, 4], [0, 0, 8, 8]]), 8, bicubic=True)
    assert parts.min() == 0 and parts.max() == 1               # bicubic values overshoot and are clamped
    torch.testing.assert_close(parts[1], x[1], rtol=0, atol=1e-6)


# ── boxes ──


def test_random_numbers_match_splitmix64():
    """The first three outputs for seed 1234567 equal those of the reference code."""
    stream = np.uint64(1234567) + np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert mix_bits(stream).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("script, scale", [(simclr, np.copy), (moco, np.log)])
def test_distribution_of_crop_areas_aspects_and_positions(script, scale):
    """Areas up to half the image's, where every aspect ratio fits, are uniform; so are positions, SimCLR's
    aspect ratios (as in TensorFlow), and the logarithms of MoCo's (as in torchvision)."""
    n, size = 20_000, np.array([480, 640])
    boxes = script.CROPS._replace(min_area=0.08).sample_boxes(3, 1, np.arange(n), np.tile(size, (n, 1)), 2)
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
def test_a_box_depends_on_seed_epoch_image_and_view_only(script):
    """A box does not depend on the other images in the batch or on the number of views."""
    sample, rows = script.CROPS.sample_boxes, np.array([5, 3, 10**6, 0])
    sizes = np.array([[300, 200], [1000, 2], [224, 224], [50, 70]])                # in the second no box fits
    whole = sample(7, 2, rows, sizes, 2)
    for i in range(4):
        assert np.array_equal(sample(7, 2, rows[i:][:1], sizes[i:][:1], 2), whole[:, i:][:, :1])
    assert np.array_equal(sample(7, 2, rows[::-1], sizes[::-1], 1), whole[:1, ::-1])
    square = np.array([[500, 500]] * 2)
    found = [sample(seed, epoch, [row, row], square, 2)[:, 0] for seed, epoch, row in itertools.product(
        (7, 8), (0, 1, 2), (0, 1, 2))]
    assert len({tuple(box) for box in np.concatenate(found).tolist()}) == 2 * 2 * 3 * 3


@pytest.mark.parametrize("script, size, expected", [
    (simclr, (1000, 2), (0, 0, 1000, 2)), (simclr, (3, 999), (0, 0, 3, 999)),
    (moco, (1000, 2), (498, 0, 3, 2)), (moco, (3, 999), (0, 497, 3, 4)),
    (moco, (2**26, 1), (2**25 - 1, 0, 1, 1)), (simclr, (1, 1), (0, 0, 1, 1)), (moco, (1, 1), (0, 0, 1, 1))])
def test_fallback_if_no_box_fits(script, size, expected):
    """SimCLR uses the whole image, MoCo a centre crop with an aspect ratio from 3:4 to 4:3."""
    boxes = script.CROPS.sample_boxes(0, 0, range(50), np.array([size] * 50), 2)
    assert (boxes == expected).all()


@pytest.mark.parametrize("script", [simclr, moco])
def test_boxes_lie_within_images_of_any_shape(script):
    sizes = np.random.default_rng(0).integers(1, [40, 9], (5000, 2))
    boxes = script.CROPS.sample_boxes(1, 0, range(5000), sizes, 3)
    assert boxes.min() >= 0 and boxes[..., 2:].min() >= 1
    assert (boxes[..., :2] + boxes[..., 2:] <= sizes).all()


def test_centre_crop_boxes():
    sizes = np.array([[100, 50], [31, 77], [1, 9], [64, 64]])
    (boxes,) = centre_crop_boxes(sizes, 0.875)
    assert boxes[:, 2:].tolist() == [[44, 44], [27, 27], [1, 1], [56, 56]]
    assert abs(sizes - boxes[:, 2:] - 2 * boxes[:, :2]).max() <= 1
    assert centre_crop_boxes(sizes, 1)[0, 3].tolist() == [0, 0, 64, 64]


# ── colours ──


def test_flip_changes_half_of_the_images():
    torch.manual_seed(1)
    x = random_images(1, 8).expand(400, 3, 8, 8)
    same, flipped = ((flip(x) == expected).all(3).all(2).all(1) for expected in (x, x.flip(3)))
    assert abs(flipped.float().mean() - 0.5) < 0.1 and abs(same.float().mean() - 0.5) < 0.1
    views = flip(x)
    assert all(torch.equal(view, x[0]) or torch.equal(view, x[0].flip(2)) for view in views)


def changed(image, which, factors, hue):
    """Return an image (3, H, W) after one of the four colour changes, clamped to [0, 1]. which: 0
    brightness, 1 contrast, 2 saturation, 3 hue."""
    luma = np.tensordot([0.299, 0.587, 0.114], image, 1)
    if which == 3:
        flat = [colorsys.rgb_to_hsv(*pixel) for pixel in image.reshape(3, -1).T]
        flat = [colorsys.hsv_to_rgb((h + hue) % 1, s, v) for h, s, v in flat]
        return np.array(flat).T.reshape(image.shape)
    centre = (0, luma.mean(), luma)[which]                     # brightness, contrast, saturation
    return (centre + (image - centre) * factors[which]).clip(0, 1)


def test_jitter_applies_four_colour_changes_in_random_order():
    """The result equals plain code, also for grey pixels and for pixels with two equal channels."""
    x = random_images(1, 5).expand(60, 3, 5, 5).clone()
    x[..., 0, :], x[:, 1:, 1], x[:, :2, 2] = 0.3, 0.6, 0.9
    torch.manual_seed(3)
    out = jitter(x, 0.4, 0.5, 0.8)
    torch.manual_seed(3)                                       # repeat the random numbers of jitter
    order, changes = torch.rand(60, 4).argsort(1), torch.rand(60, 1, 1, 1) < 0.8
    factors = [0.6 + 0.8 * torch.rand(60, 1, 1, 1) for _ in range(3)]
    hue = torch.rand(60, 1, 1) - 0.5
    for i in range(60):
        image = x[i].double().numpy()
        for which in order[i].tolist() if changes[i] else []:
            image = changed(image, which, [factor[i].item() for factor in factors], hue[i].item())
        np.testing.assert_allclose(out[i].numpy(), image, atol=2e-5)


def test_blur_is_gaussian_with_a_sigma_for_each_image():
    x = random_images(3, 40)
    torch.manual_seed(4)
    out = blur(x)
    torch.manual_seed(4)
    for image, blurred, sigma in zip(x, out, (0.1 + 1.9 * torch.rand(3, 1))[:, 0].tolist()):
        taps = np.exp(-np.arange(-2, 3) ** 2 / (2 * sigma**2))
        kernel = torch.tensor(np.outer(taps, taps) / taps.sum() ** 2).float()[None, None]
        expected = torch.nn.functional.conv2d(image[:, None], kernel, padding=2)[:, 0]
        torch.testing.assert_close(blurred, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("script, v1, share", [(simclr, False, 0.1), (moco, False, 0.2), (moco, True, 0.2)])
def test_augmentation_matches_the_paper(script, v1, share, monkeypatch):
    """Check order, strengths and probabilities of the augmentations."""
    calls, bernoulli_mask = [], script.bernoulli_mask

    def record(name, x, *amounts):
        calls.append((name, *amounts))
        return x + 1 if name == "grey" else x

    def record_mask(p, x):
        calls.append(p)
        return bernoulli_mask(p, x)

    for name in ("jitter", "grey", "blur"):
        monkeypatch.setattr(script, name, partial(record, name))
    monkeypatch.setattr(script, "bernoulli_mask", record_mask)
    torch.manual_seed(0)
    args = SimpleNamespace(colour=0.5, grey=0.1, blur=0.3, v1=v1)
    views = script.augment(torch.zeros(4000, 3, 2, 1), args)
    v2_calls = [("jitter", 0.4, 0.1, 0.8), share, ("grey",), 0.3, ("blur",)]
    assert calls == ([0.2, ("grey",), ("jitter", 0.4, 0.4, 1)] if v1 else v2_calls)
    assert views.shape[1:] == (3, 2, 1) and abs(views.mean() - share) < 0.03
