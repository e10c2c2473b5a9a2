"""Test image augmentation, compared with Pillow and with plain code for one image at a time."""
import colorsys
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import moco
import simclr
from kernels.training.images.augmentation import blur, crop_and_resize, flip, jitter


def random_images(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bicubic, size", [(False, 1), (False, 5), (False, 30), (True, 30)])
def test_crop_and_resize_matches_pillow(bicubic, size):
    """The result is Pillow's crop, then resize. Bicubic interpolation repeats the edge pixels of a box."""
    x, pad = random_images(4, 3, 12, 20), 2 * bicubic
    boxes = np.array([[0, 0, 20, 12], [3, 2, 15, 10], [19, 11, 1, 1], [0, 5, 20, 2]])
    found = crop_and_resize(x, boxes, size, bicubic).flatten(0, 1).numpy()
    method = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    for channel, (left, top, w, h), view in zip(x.flatten(0, 1).numpy(), boxes.repeat(3, 0).tolist(), found):
        cut = np.pad(channel[top : top + h, left : left + w], pad, mode="edge")
        resized = Image.fromarray(cut).resize((size, size), method, box=(pad, pad, pad + w, pad + h))
        np.testing.assert_allclose(view, np.asarray(resized).clip(0, 1), atol=1e-5)


@pytest.mark.parametrize("script, median", [(simclr, 25 / 24), (moco, 1)])
def test_distribution_of_crop_areas_aspects_and_positions(script, median):
    """Areas from 0.08 to 0.5 of the image, for which every aspect ratio fits, are uniform, and so are
    positions. In SimCLR the aspect ratio is uniform from 3/4 to 4/3, in MoCo its logarithm is uniform."""
    n, size = 20_000, np.array([480, 640])
    boxes = script.CROPS.sample_boxes(3, 1, np.arange(n), np.tile(size, (n, 1)), 2)
    assert boxes.shape == (2, n, 4) and not (boxes[0] == boxes[1]).all(1).any()
    first, length = boxes.reshape(-1, 2, 2).transpose(1, 0, 2)
    area, ratio = length.prod(1) / size.prod(), length[:, 0] / length[:, 1]
    assert 0.075 < area.min() < 0.085 and area.max() > 0.97 and 0.74 < ratio.min() and ratio.max() < 1.35
    counts, _ = np.histogram(area, np.linspace(0.1, 0.5, 5))
    assert counts.max() / counts.min() < 1.08
    assert script.CROPS.sample_aspect(0.5) == pytest.approx(median)
    for side in (0, 1):
        free = size[side] - length[:, side]
        places = (first[:, side] / free.clip(1))[free > 20]
        assert abs(places.mean() - 0.5) < 0.01 and abs(places.var() - 1 / 12) < 0.01


@pytest.mark.parametrize("script", [simclr, moco])
def test_boxes_differ_between_seeds_epochs_images_and_views(script):
    draws = itertools.product((7, 8), (0, 1, 2), (0, 1, 2))
    found = [script.CROPS.sample_boxes(seed, epoch, [row], [[500, 500]], 2) for seed, epoch, row in draws]
    assert len({tuple(box) for box in np.concatenate(found).reshape(-1, 4).tolist()}) == 2 * 2 * 3 * 3


def test_flip_changes_half_of_the_images():
    x = random_images(400, 3, 4, 4)
    torch.manual_seed(1)
    views = flip(x)
    same, flipped = ((views == expected).flatten(1).all(1) for expected in (x, x.flip(3)))
    assert (same ^ flipped).all() and abs(flipped.float().mean() - 0.5) < 0.1


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
    x = random_images(1, 3, 5, 5).expand(60, 3, 5, 5).clone()
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
    """Sigma is uniform from 0.1 to 2. The kernel's width is about a tenth of the image's height (papers)."""
    x = random_images(3, 3, 40, 40)
    torch.manual_seed(4)
    out = blur(x)
    torch.manual_seed(4)
    for image, blurred, sigma in zip(x, out, (0.1 + 1.9 * torch.rand(3, 1))[:, 0].tolist()):
        taps = np.exp(-np.arange(-2, 3) ** 2 / (2 * sigma**2))
        kernel = torch.tensor(np.outer(taps, taps) / taps.sum() ** 2).float()[None, None]
        expected = torch.nn.functional.conv2d(image[:, None], kernel, padding=2)[:, 0]
        torch.testing.assert_close(blurred, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("script, v1, expected", [
    (simclr, False, [("jitter", 0.4, 0.1, 0.8), 0.1, "grey", 0.3, "blur"]),        # flags: see the test
    (moco, False, [("jitter", 0.4, 0.1, 0.8), 0.2, "grey", 0.3, "blur"]),
    (moco, True, [0.2, "grey", ("jitter", 0.4, 0.4, 1)])])
def test_augmentation_matches_the_paper(script, v1, expected, monkeypatch):
    """Check the order of augmentations, the strengths of jitter, and the probabilities of grey and blur."""
    calls, bernoulli_mask = [], script.bernoulli_mask

    def replace(name, change):
        def record(x, *amounts):
            calls.append((name, *amounts) if amounts else name)
            return x + change
        monkeypatch.setattr(script, name, record)

    def record_mask(p, x):
        calls.append(p)
        return bernoulli_mask(p, x)

    replace("jitter", 0), replace("grey", 0.25), replace("blur", 0.5)
    monkeypatch.setattr(script, "bernoulli_mask", record_mask)
    torch.manual_seed(0)
    views = script.augment(torch.zeros(4000, 3, 2, 1), SimpleNamespace(colour=0.5, grey=0.1, blur=0.3, v1=v1))
    assert calls == expected and views.shape == (4000, 3, 2, 1)
    for p, amount in zip([call for call in calls if isinstance(call, float)], (0.25, 0.5)):
        assert abs(((views / amount).int() % 2).float().mean() - p) < 0.03    # a share p of images is changed
