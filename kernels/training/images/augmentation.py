"""Views of pictures: boxes that are drawn, cut out and resized; colours and blur on the device.

x is (n, 3, H, W) float32 in [0, 1]; each picture has its own draw of every number.
"""
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

# ── boxes ──


def numbers(seed, epoch, keys, first, count):
    """(count, n) float64 in [0, 1) of n keys: those of a picture depend on it, the epoch and the seed alone,
    not on who draws them (SplitMix64). Others with other `first`: how many were drawn before."""
    state = mixed(mixed(mixed(np.array([seed])) + np.uint64(epoch)) + np.asarray(keys, np.uint64))
    at = np.arange(first + 1, first + count + 1, dtype=np.uint64)[:, None]
    return (mixed(state + at * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(11)) * 2.0**-53


def mixed(state):
    """Every bit of a state in every bit."""
    x = state.astype(np.uint64)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


class Crops(NamedTuple):
    """How the boxes of views are drawn, and how they are brought to one size.

    least     share of the picture that a box has at least; up to all, evenly
    tries     boxes that are drawn for a view: the first that lies in the picture is taken
    aspects   numbers in [0, 1) → how many times as wide as high boxes are
    limits    where no box fits: the middle of the picture, such that it is that wide for its height
    cubic     resized bicubically, or linearly
    """
    least: float
    tries: int
    aspects: Callable
    limits: tuple
    cubic: bool

    def draw(self, seed, epoch, rows, sizes, views):
        """Boxes (views, n, 4): left, top, width and height, of n pictures of sizes (n, 2): width, height."""
        keys = (np.asarray(rows) + (np.arange(views)[:, None] << 40)).ravel()
        width, height = np.tile(sizes, (views, 1)).T.astype(float)
        narrow, wide = self.limits
        w, h = np.minimum(width, (height * wide).round()), np.minimum(height, (width / narrow).round())
        left, top = np.floor((width - w) / 2), np.floor((height - h) / 2)
        todo, drawn = np.arange(len(keys)), 0
        while len(todo) and drawn < self.tries:
            area, aspect, across, down = numbers(seed, epoch, keys[todo], 4 * drawn, 4)
            area, aspect = self.least + (1 - self.least) * area, self.aspects(aspect)
            tall = np.sqrt(area * width[todo] * height[todo] / aspect).round().clip(1)
            broad = (tall * aspect).round().clip(1)
            free_w, free_h = width[todo] - broad, height[todo] - tall
            fits = (free_w >= 0) & (free_h >= 0)
            found = broad, tall, np.floor(across * (free_w + 1)), np.floor(down * (free_h + 1))
            for side, value in zip((w, h, left, top), found):
                side[todo[fits]] = value[fits]
            todo, drawn = todo[~fits], drawn + 1
        return np.stack([left, top, w, h], 1).astype(np.int64).reshape(views, -1, 4)


def middle(sizes, share):
    """Boxes (1, n, 4): the square in the middle, a share of a picture's shorter side."""
    side = np.round(share * sizes.min(1, keepdims=True)).clip(1).astype(np.int64)
    return np.concatenate([(sizes - side + 1) // 2, side, side], 1)[None]


def resized(x, boxes, size, cubic):
    """(n, 3, size, size): the box (left, top, width, height) of each picture, brought to this size."""
    if list(x.shape[2:]) == [size, size] and (boxes == [0, 0, size, size]).all():
        return x
    left, top, width, height = torch.from_numpy(boxes).to(x.device, x.dtype).T
    resize = keys_cubic if cubic else linear
    rows, columns = resize(top, height, x.shape[2], size, x), resize(left, width, x.shape[3], size, x)
    return (rows[:, None] @ x @ columns.mT[:, None]).clamp(0, 1)


def keys_cubic(first, length, width, size, x):
    """(n, size, width): what resizes pixels [first, first + length) of `width` to size by Keys' cubic, edges
    repeated."""
    at = torch.arange(size, device=x.device)
    centre = (at + 0.5) * (length / size)[:, None] - 0.5       # of each new pixel, in pixels of the box
    base = centre.floor()
    matrix = x.new_zeros(len(first), size, width)
    for tap in range(-1, 3):
        t = (centre - base - tap).abs()
        near, far = (1.5 * t - 2.5) * t * t + 1, ((-0.5 * t + 2.5) * t - 4) * t + 2        # a = −1/2
        pixel = first[:, None] + (base + tap).clamp(min=0).minimum(length[:, None] - 1)
        matrix.scatter_add_(2, pixel.long()[:, :, None], torch.where(t <= 1, near, far)[:, :, None])
    return matrix


def linear(first, length, width, size, x):
    """(n, size, width): what resizes pixels [first, first + length) of `width` to size linearly, as Pillow
    does: a new pixel that covers several is a mean of all of them."""
    at, scale = torch.arange(width, device=x.device), (length / size)[:, None, None]
    centre = (torch.arange(size, device=x.device)[:, None] + 0.5) * scale - 0.5 + first[:, None, None]
    inside = (at >= first[:, None]) & (at < (first + length)[:, None])
    weight = (1 - (at - centre).abs() / scale.clamp(min=1)).clamp(min=0) * inside[:, None]
    return weight / weight.sum(2, keepdim=True)


# ── colours ──


def scaled(pictures):
    """(n, 3, H, W) float32 in [0, 1] of pictures (n, H, W, 3) uint8."""
    return pictures.float().div_(255).permute(0, 3, 1, 2)


def uniform(low, high, shape, like):
    return low + (high - low) * torch.rand(shape, device=like.device)


def coin(p, like):
    """(n, 1, 1, 1) bool for the n pictures of like, true with probability p."""
    return uniform(0, 1, (len(like), 1, 1, 1), like) < p


def flip(x):
    """Half of the pictures in a mirror."""
    return torch.where(coin(0.5, x), x.flip(3), x)


def jitter(x, colour, hue, share):
    """For a share of the pictures brightness, contrast, saturation (by up to colour) and hue (by up to hue
    circles) change, in random order."""
    n = len(x)
    order = uniform(0, 1, (n, 4), x).argsort(1)
    on = coin(share, x)
    least, most = max(0, 1 - colour), 1 + colour
    brightness, contrast, saturation = (uniform(least, most, (n, 1, 1, 1), x) for _ in range(3))
    shift = uniform(-hue, hue, (n, 1, 1), x)
    for place in range(4):
        now = [(order[:, place] == which).view(n, 1, 1, 1) & on for which in range(4)]
        x = torch.where(now[0], x * brightness, x)
        luma = grey(x)
        mean = luma.mean((2, 3), keepdim=True)
        x = torch.where(now[1], mean + (x - mean) * contrast, x)
        x = torch.where(now[2], luma + (x - luma) * saturation, x)
        x = torch.where(now[3], shift_hue(x, shift), x)
        x = x.clamp(0, 1)
    return x


def grey(x):
    """The luma in all three channels (ITU-R 601)."""
    return (x * x.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True).expand_as(x)


def shift_hue(x, shift):
    """Colours turned by shift (n, 1, 1), in full circles; value and saturation stay."""
    red, green, blue = x.unbind(1)
    value, least = x.amax(1), x.amin(1)
    chroma = value - least
    scale = torch.where(chroma > 0, 1 / chroma.clamp(min=1e-12), 0.0)
    hue = torch.where(value == green, 2 + (blue - red) * scale, 4 + (red - green) * scale)
    hue = torch.where(value == red, (green - blue) * scale, hue)
    hue = (hue / 6 + shift) % 1 * 6

    def channel(n):
        tooth = (hue + n) % 6
        return value - chroma * torch.minimum(tooth, 4 - tooth).clamp(0, 1)
    return torch.stack([channel(5), channel(3), channel(1)], 1)


def blur(x):
    """Gaussian blur with sigma from 0.1 to 2, a kernel of a tenth of the height; zeros around the picture."""
    radius = max(1, x.shape[2] // 20)
    at = torch.arange(-radius, radius + 1, device=x.device)
    kernel = (-at ** 2 / (2 * uniform(0.1, 2, (len(x), 1), x) ** 2)).exp()
    kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(3, 0)[:, None]       # (3n, 1, taps)
    flat = x.reshape(1, -1, *x.shape[2:])                      # a picture's channel is a channel of its own
    flat = F.conv2d(flat, kernel[:, :, :, None], padding=(radius, 0), groups=flat.shape[1])
    return F.conv2d(flat, kernel[:, :, None, :], padding=(0, radius), groups=flat.shape[1]).view_as(x)
