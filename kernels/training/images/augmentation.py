"""Augmentation of images: random crop boxes, crop and resize, colour jitter, blur.

Crop boxes are computed with NumPy on the CPU; all other functions run on the device of the images. An
argument x is a batch of images, (n, 3, H, W) float32 in [0, 1]. Each image gets its own random numbers.
"""
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F


def random_uniform(seed, epoch, keys, first, count):
    """Return (count, n) float64 uniform random numbers in [0, 1) for n images. The numbers depend only on
    seed, epoch and key, not on the calling rank or worker (SplitMix64, a counter-based generator).

    keys     (n,) integers that identify the images
    first    number of random numbers of each key to skip: earlier calls have returned them
    """
    state = mix_bits(mix_bits(mix_bits(np.array([seed])) + np.uint64(epoch)) + np.asarray(keys, np.uint64))
    counter = np.arange(first + 1, first + count + 1, dtype=np.uint64)[:, None]
    return (mix_bits(state + counter * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(11)) * 2.0**-53


def mix_bits(state):
    """Mix 64-bit integers so that each output bit depends on all input bits (SplitMix64's output step)."""
    x = state.astype(np.uint64)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


class Crops(NamedTuple):
    """Settings of random resized crops.

    min_area         smallest area of a box / area of the image; this ratio is uniform from min_area to 1
    attempts         number of boxes to sample for a view; the first box that fits into the image is used
    sample_aspect    function: uniform random numbers in [0, 1) → aspect ratios (width / height) of boxes
    aspect_limits    (smallest, largest) aspect ratio of the centre crop that is used if no box fits
    bicubic          True: resize with bicubic interpolation; False: bilinear
    """
    min_area: float
    attempts: int
    sample_aspect: Callable
    aspect_limits: tuple
    bicubic: bool

    def sample_boxes(self, seed, epoch, rows, sizes, views):
        """Return random boxes (views, n, 4) int64, each (left, top, width, height) in pixels, for n images.

        rows     (n,) row numbers of the images; they determine the random numbers of each image
        sizes    (n, 2) width and height of the images
        """
        keys = (np.asarray(rows) + (np.arange(views)[:, None] << 40)).ravel()
        width, height = np.tile(sizes, (views, 1)).T.astype(float)
        narrowest, widest = self.aspect_limits
        w = np.minimum(width, (height * widest).round())
        h = np.minimum(height, (width / narrowest).round())
        left, top = np.floor((width - w) / 2), np.floor((height - h) / 2)
        missing, attempt = np.arange(len(keys)), 0             # missing: indices of views without a box yet
        while len(missing) and attempt < self.attempts:
            area, aspect, x, y = random_uniform(seed, epoch, keys[missing], 4 * attempt, 4)
            area, aspect = self.min_area + (1 - self.min_area) * area, self.sample_aspect(aspect)
            new_h = np.sqrt(area * width[missing] * height[missing] / aspect).round().clip(1)
            new_w = (new_h * aspect).round().clip(1)
            free_w, free_h = width[missing] - new_w, height[missing] - new_h
            fits = (free_w >= 0) & (free_h >= 0)
            sampled = new_w, new_h, np.floor(x * (free_w + 1)), np.floor(y * (free_h + 1))
            for side, value in zip((w, h, left, top), sampled):
                side[missing[fits]] = value[fits]
            missing, attempt = missing[~fits], attempt + 1
        return np.stack([left, top, w, h], 1).astype(np.int64).reshape(views, -1, 4)


def centre_crop_boxes(sizes, share):
    """Return boxes (1, n, 4) of square centre crops, whose side is `share` of the image's shorter side.

    sizes    (n, 2) width and height of the images
    """
    side = np.round(share * sizes.min(1, keepdims=True)).clip(1).astype(np.int64)
    return np.concatenate([(sizes - side + 1) // 2, side, side], 1)[None]


def crop_and_resize(x, boxes, size, bicubic):
    """Crop each image to its box (left, top, width, height) and resize the crop to (3, size, size)."""
    if list(x.shape[2:]) == [size, size] and (boxes == [0, 0, size, size]).all():
        return x
    left, top, width, height = torch.from_numpy(boxes).to(x.device, x.dtype).T
    resize_matrix = bicubic_matrix if bicubic else bilinear_matrix
    rows = resize_matrix(top, height, x.shape[2], size, x)
    columns = resize_matrix(left, width, x.shape[3], size, x)
    return (rows[:, None] @ x @ columns.mT[:, None]).clamp(0, 1)


def bicubic_matrix(first, length, width, size, like):
    """Return n matrices (size, width). Each matrix crops a row of `width` pixels to a box and resizes it to
    `size` pixels by Keys' cubic kernel (a = −1/2). Beyond the box, its edge pixels repeat; no antialiasing.

    first, length    (n,) tensors: first pixel of each box, and number of its pixels, in the dtype of `like`
    like             a tensor that gives the device and dtype of the result
    """
    at = torch.arange(size, device=like.device)
    centre = (at + 0.5) * (length / size)[:, None] - 0.5       # the new pixels' centres, in pixels of the box
    base = centre.floor()
    matrix = like.new_zeros(len(first), size, width)
    for tap in range(-1, 3):
        t = (centre - base - tap).abs()
        near = (1.5 * t - 2.5) * t * t + 1                     # the cubic kernel for distances t ≤ 1
        far = ((-0.5 * t + 2.5) * t - 4) * t + 2               # the cubic kernel for 1 < t < 2
        pixel = first[:, None] + (base + tap).clamp(min=0).minimum(length[:, None] - 1)
        matrix.scatter_add_(2, pixel.long()[:, :, None], torch.where(t <= 1, near, far)[:, :, None])
    return matrix


def bilinear_matrix(first, length, width, size, like):
    """Return n matrices (size, width). Each matrix crops a row of `width` pixels to a box and resizes the box
    to `size` pixels by bilinear interpolation with Pillow's antialiasing: a new pixel that covers several old
    pixels is their weighted mean. The arguments are those of bicubic_matrix."""
    at, scale = torch.arange(width, device=like.device), (length / size)[:, None, None]
    centre = (torch.arange(size, device=like.device)[:, None] + 0.5) * scale - 0.5 + first[:, None, None]
    inside = (at >= first[:, None]) & (at < (first + length)[:, None])
    weight = (1 - (at - centre).abs() / scale.clamp(min=1)).clamp(min=0) * inside[:, None]
    return weight / weight.sum(2, keepdim=True)


def to_float(images):
    """Convert images (n, H, W, 3) uint8 to (n, 3, H, W) float32 in [0, 1]."""
    return images.float().div_(255).permute(0, 3, 1, 2)


def uniform(low, high, shape, like):
    """Return uniform random numbers of this shape in [low, high), on the device of `like`."""
    return low + (high - low) * torch.rand(shape, device=like.device)


def bernoulli_mask(p, like):
    """Return a random (n, 1, 1, 1) bool mask for the n images of `like`; True with probability p."""
    return uniform(0, 1, (len(like), 1, 1, 1), like) < p


def flip(x):
    """Flip each image horizontally with probability 0.5."""
    return torch.where(bernoulli_mask(0.5, x), x.flip(3), x)


def jitter(x, colour, hue, p):
    """With probability p for each image, change brightness, contrast, saturation and hue, in random order.

    colour    brightness, contrast, saturation get random factors from max(0, 1 − colour) to 1 + colour
    hue       the hue is shifted by a random number from −hue to hue; 1 is a full turn of the colour circle
    """
    n = len(x)
    order = uniform(0, 1, (n, 4), x).argsort(1)
    changed = bernoulli_mask(p, x)
    low, high = max(0, 1 - colour), 1 + colour
    brightness, contrast, saturation = (uniform(low, high, (n, 1, 1, 1), x) for _ in range(3))
    shift = uniform(-hue, hue, (n, 1, 1), x)
    for turn in range(4):
        # now[0] to now[3] select the images that change brightness, contrast, saturation or hue in this turn
        now = [(order[:, turn] == which).view(n, 1, 1, 1) & changed for which in range(4)]
        x = torch.where(now[0], x * brightness, x)
        luma = grey(x)
        mean = luma.mean((2, 3), keepdim=True)
        x = torch.where(now[1], mean + (x - mean) * contrast, x)
        x = torch.where(now[2], luma + (x - luma) * saturation, x)
        x = torch.where(now[3], shift_hue(x, shift), x)
        x = x.clamp(0, 1)
    return x


def grey(x):
    """Return grey images, whose three channels all equal the luma (ITU-R 601)."""
    return (x * x.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True).expand_as(x)


def shift_hue(x, shift):
    """Shift the hue by `shift` (n, 1, 1) full turns. Saturation and value do not change (HSV colours)."""
    red, green, blue = x.unbind(1)
    value, low = x.amax(1), x.amin(1)
    chroma = value - low
    scale = torch.where(chroma > 0, 1 / chroma.clamp(min=1e-12), 0.0)
    hue = torch.where(value == green, 2 + (blue - red) * scale, 4 + (red - green) * scale)
    hue = torch.where(value == red, (green - blue) * scale, hue)
    hue = (hue / 6 + shift) % 1 * 6

    def channel(n):
        sector = (hue + n) % 6
        return value - chroma * torch.minimum(sector, 4 - sector).clamp(0, 1)
    return torch.stack([channel(5), channel(3), channel(1)], 1)


def blur(x):
    """Apply a Gaussian blur with a random sigma from 0.1 to 2 pixels. The kernel's width is about a tenth of
    the image's height. The image is padded with zeros."""
    radius = max(1, x.shape[2] // 20)
    at = torch.arange(-radius, radius + 1, device=x.device)
    kernel = (-at ** 2 / (2 * uniform(0.1, 2, (len(x), 1), x) ** 2)).exp()
    kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(3, 0)[:, None]       # (3n, 1, width)
    flat = x.reshape(1, -1, *x.shape[2:])                      # (1, 3n, H, W): one conv2d group per channel
    flat = F.conv2d(flat, kernel[:, :, :, None], padding=(radius, 0), groups=flat.shape[1])
    return F.conv2d(flat, kernel[:, :, None, :], padding=(0, radius), groups=flat.shape[1]).view_as(x)
