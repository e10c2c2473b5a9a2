"""Augmentations of pictures against plain code, one picture and one pixel at a time."""
import colorsys
import itertools
import math

import numpy as np
import pytest
import torch

from kernels.training.views import blur, crop_and_flip, cubic, jitter, linear, shift_hue

LUMA = (0.299, 0.587, 0.114)


def pictures(n, size, seed=0):
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(seed))


def keys(t):
    """Keys' cubic with a = −1/2, written from its definition."""
    t = abs(t)
    return 1 - 2.5 * t**2 + 1.5 * t**3 if t <= 1 else 2 - 4 * t + 2.5 * t**2 - 0.5 * t**3 if t < 2 else 0.0


def test_cubic_is_keys():
    size, first, length = 9, [0, 2, 5], [9, 4, 3]
    matrix = cubic(torch.tensor(first).float(), torch.tensor(length).float(), size, torch.zeros(3, 1))
    for picture, out in itertools.product(range(3), range(size)):
        centre = (out + 0.5) * length[picture] / size - 0.5
        wanted = np.zeros(size)
        for pixel in range(math.floor(centre) - 1, math.floor(centre) + 3):
            wanted[first[picture] + min(max(pixel, 0), length[picture] - 1)] += keys(centre - pixel)
        np.testing.assert_allclose(matrix[picture, out].numpy(), wanted, atol=1e-6)


def test_linear_is_pillows():
    from PIL import Image
    size = 12
    picture = np.random.default_rng(0).integers(0, 256, (size, size)).astype(np.float32)
    for top, left, h, w in ((0, 0, 12, 12), (3, 1, 5, 9), (11, 4, 1, 8), (2, 0, 10, 2)):
        box = torch.tensor([[top, left], [h, w]]).float()
        rows, columns = (linear(*box[:, i : i + 1], size, torch.zeros(1, 1))[0] for i in (0, 1))
        cut = Image.fromarray(picture).crop((left, top, left + w, top + h))
        wanted = np.asarray(cut.resize((size, size), Image.Resampling.BILINEAR))
        np.testing.assert_allclose((rows @ torch.tensor(picture) @ columns.T).numpy(), wanted, atol=1e-3)


def test_crop_draws_all_areas_aspects_and_places():
    """Boxes of up to half the area fit at any aspect: areas and aspects of those are flat, as drawn."""
    n, size, boxes = 20_000, 320, []

    def stop_after_two(first, length, *_):
        boxes.append((first, length))
        if len(boxes) == 2:
            raise StopIteration

    torch.manual_seed(0)
    x, aspects = torch.zeros(1).expand(n, 1, size, size), 3 / 4 + 7 / 12 * torch.rand(n, 10)
    with pytest.raises(StopIteration):
        crop_and_flip(x, 0.08, aspects, stop_after_two)
    (top, h), (left, w) = boxes
    area, ratio = h * w / size**2, w / h
    assert min(top.min(), left.min()) >= 0 and max((top + h).max(), (left + w).max()) <= size
    assert 0.075 < area.min() < 0.085 and area.max() > 0.97 and 0.74 < ratio.min() and ratio.max() < 1.35
    for values, edges in ((area, np.linspace(0.1, 0.5, 5)), (ratio[area < 0.5], np.linspace(0.8, 1.3, 6))):
        counts, _ = np.histogram(values.numpy(), edges)
        assert counts.max() / counts.min() < 1.12
    for first, length in boxes:
        places = (first / (size - length))[length < size - 20]
        assert abs(places.mean() - 0.5) < 0.01 and abs(places.var() - 1 / 12) < 0.01


def test_flip_is_half_and_keeps_the_picture():
    torch.manual_seed(1)
    x = pictures(1, 8)
    views = crop_and_flip(x.expand(400, 3, 8, 8), 1.0, torch.ones(400, 1), cubic)
    whole = [(views - side).abs().amax((1, 2, 3)) < 1e-5 for side in (x, x.flip(3))]
    assert (whole[0] | whole[1]).all() and abs(whole[0].float().mean() - 0.5) < 0.1


@pytest.mark.parametrize("shift", [0.0, 0.1, -0.2, 0.5])
def test_hue_turns_like_colorsys(shift):
    ramp = torch.tensor([0.0, 0.5, 1.0])[None, :, None, None].expand(1, 3, 6, 6)
    x = torch.cat([pictures(2, 6), ramp, torch.full((1, 3, 6, 6), 0.3)])
    turned = shift_hue(x, torch.full((4, 1, 1), shift))
    for a, b in zip(x.transpose(0, 1).flatten(1).T.tolist(), turned.transpose(0, 1).flatten(1).T.tolist()):
        hue, saturation, value = colorsys.rgb_to_hsv(*a)
        np.testing.assert_allclose(b, colorsys.hsv_to_rgb((hue + shift) % 1, saturation, value), atol=1e-5)


def changed(picture, which, factors, hue):
    """One of the four plain operations on a picture (3, H, W), which is then cut off at 0 and 1."""
    luma = np.tensordot(LUMA, picture, 1)
    if which == 3:
        flat = [colorsys.rgb_to_hsv(*pixel) for pixel in picture.reshape(3, -1).T]
        flat = [colorsys.hsv_to_rgb((h + hue) % 1, s, v) for h, s, v in flat]
        return np.array(flat).T.reshape(picture.shape).clip(0, 1)
    centre = (0, luma.mean(), luma)[which]                     # brightness, contrast, saturation
    return (centre + (picture - centre) * factors[which]).clip(0, 1)


def test_jitter_is_one_of_the_orders_of_four_plain_operations():
    x = pictures(1, 5).expand(60, 3, 5, 5)
    torch.manual_seed(3)
    out = jitter(x, 0.4, 0.1, 0.8)
    torch.manual_seed(3)                                       # the same draws, read off one by one
    order = torch.rand(60, 4).argsort(1)
    on = torch.rand(60, 1, 1, 1) < 0.8
    factors = [0.6 + 0.8 * torch.rand(60, 1, 1, 1) for _ in range(3)]
    hue = -0.1 + 0.2 * torch.rand(60, 1, 1)
    for i in range(60):
        picture = x[i].double().numpy()
        for which in order[i].tolist() if on[i] else []:
            picture = changed(picture, which, [factor[i].item() for factor in factors], hue[i].item())
        np.testing.assert_allclose(out[i].numpy(), picture, atol=2e-5)
    assert 30 < on.sum() < 58 and len({tuple(row) for row in order.tolist()}) > 12


def test_blur_is_a_gaussian_per_picture():
    x = pictures(3, 40)
    torch.manual_seed(4)
    out = blur(x)
    torch.manual_seed(4)
    for picture, blurred, sigma in zip(x, out, (0.1 + 1.9 * torch.rand(3, 1))[:, 0].tolist()):
        taps = np.exp(-np.arange(-2, 3) ** 2 / (2 * sigma**2))
        taps /= taps.sum()
        padded = np.pad(picture.numpy(), ((0, 0), (2, 2), (2, 2)))
        grid = itertools.product(enumerate(taps), enumerate(taps))
        wanted = sum(a * b * padded[:, i : i + 40, j : j + 40] for (i, a), (j, b) in grid)
        np.testing.assert_allclose(blurred.numpy(), wanted, atol=1e-5)
