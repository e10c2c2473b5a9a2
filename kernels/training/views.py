"""Random views of pictures, on the device.

x is (n, 3, H, W) float32 in [0, 1]; each picture has its own draw of every number.
"""
import torch
import torch.nn.functional as F


def scaled(pictures):
    """(n, 3, H, W) float32 in [0, 1] of pictures (n, H, W, 3) uint8."""
    return pictures.permute(0, 3, 1, 2).float() / 255


def uniform(low, high, shape, like):
    return low + (high - low) * torch.rand(shape, device=like.device)


def coin(p, like):
    """(n, 1, 1, 1) bool for the n pictures of like, true with probability p."""
    return uniform(0, 1, (len(like), 1, 1, 1), like) < p


def crop_and_flip(x, least, aspects, resize):
    """A box of at least `least` of the area, resized to all of the picture; half are flipped.

    aspects   (n, tries): a box is that many times as wide for its height as the picture; of the tries the
              first that fits is taken, else all of the picture
    resize    cubic or linear
    """
    n, _, height, width = x.shape
    area, ratio = uniform(least, 1, aspects.shape, x), aspects * width / height
    h = (area * height * width / ratio).sqrt().round().clamp(min=1)
    w = (h * ratio).round().clamp(min=1)
    fits = (h <= height) & (w <= width)
    first = fits.int().argmax(1, keepdim=True)
    h = torch.where(fits.any(1), h.gather(1, first)[:, 0], height)
    w = torch.where(fits.any(1), w.gather(1, first)[:, 0], width)
    top = (uniform(0, 1, (n,), x) * (height - h + 1)).floor()
    left = (uniform(0, 1, (n,), x) * (width - w + 1)).floor()
    rows, columns = resize(top, h, height, x), resize(left, w, width, x)
    columns = torch.where(coin(0.5, x)[:, 0], columns.flip(1), columns)
    return (rows[:, None] @ x @ columns.mT[:, None]).clamp(0, 1)


def cubic(first, length, size, x):
    """(n, size, size): what resizes pixels [first, first + length) to size by Keys' cubic, edges repeated."""
    at = torch.arange(size, device=x.device)
    centre = (at + 0.5) * (length / size)[:, None] - 0.5       # of each new pixel, in pixels of the box
    base = centre.floor()
    matrix = x.new_zeros(len(first), size, size)
    for tap in range(-1, 3):
        t = (centre - base - tap).abs()
        near, far = (1.5 * t - 2.5) * t * t + 1, ((-0.5 * t + 2.5) * t - 4) * t + 2        # a = −1/2
        pixel = first[:, None] + (base + tap).clamp(min=0).minimum(length[:, None] - 1)
        matrix.scatter_add_(2, pixel.long()[:, :, None], torch.where(t <= 1, near, far)[:, :, None])
    return matrix


def linear(first, length, size, x):
    """(n, size, size): what resizes pixels [first, first + length) to size linearly, edges repeated."""
    at = torch.arange(size, device=x.device)
    centre = (at[:, None] + 0.5) * (length / size)[:, None, None] - 0.5 + first[:, None, None]
    inside = (at >= first[:, None]) & (at < (first + length)[:, None])
    weight = (1 - (at - centre).abs()).clamp(min=0) * inside[:, None]
    return weight / weight.sum(2, keepdim=True)


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
