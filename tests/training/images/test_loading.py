"""Image files decoded by worker processes: crops equal Pillow's, and views do not depend on the number of
workers."""
import numpy as np
import pytest
import torch
from PIL import Image

import simclr
from kernels.training.images.formats import read_images
from kernels.training.images.loading import Cutter, crop_files
from running import equal


def photo(size, seed=0):
    """Return a random image that is smooth like a photograph."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3)).astype(np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


class FixedCutter(Cutter):
    """A Cutter of given boxes (left, top, width, height)."""
    fixed = None

    def boxes(self, epoch, rows, sizes):
        return np.array(self.fixed)[:, None]


def decode_views(source, boxes, size, bicubic=False):
    """Return the views (views, size, size, 3) of the only image of ImageFiles."""
    FixedCutter.fixed = boxes
    return crop_files(source, FixedCutter(None, 0, 1, 1.0, size, bicubic), 0, np.array([0]))[:, 0].numpy()


def pillow_view(image, box, size, bicubic=False):
    left, top, width, height = box
    method = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    return np.asarray(image.crop((left, top, left + width, top + height)).resize((size, size), method))


@pytest.mark.parametrize("bicubic", [True, False])
@pytest.mark.parametrize("name, mode", [
    ("a.png", "RGB"), ("a.png", "L"), ("a.png", "P"), ("a.png", "RGBA"), ("a.png", "1"), ("a.gif", "P"),
    ("a.bmp", "RGB"), ("a.webp", "RGB"), ("a.tif", "RGB"), ("a.jpg", "CMYK"), ("a.jpg", "L")])
def test_crops_equal_pillows(name, mode, bicubic, tmp_path):
    """Crops of images that are decoded at full size are bitwise equal. Boxes are smaller and larger than
    views and have other aspect ratios. The first image of an animation is used."""
    more = dict(save_all=True, append_images=[photo((70, 50), 1)]) if name == "a.gif" else {}
    photo((70, 50)).convert(mode).save(tmp_path / name, **more)
    boxes = [(0, 0, 70, 50), (3, 5, 40, 31), (69, 49, 1, 1), (10, 0, 9, 50)]
    found = decode_views(read_images(tmp_path, workers=0)[0], boxes, 32, bicubic)
    whole = Image.open(tmp_path / name).convert("RGB")
    for view, box in zip(found, boxes):
        assert np.array_equal(view, pillow_view(whole, box, 32, bicubic))


def test_a_jpeg_is_decoded_at_reduced_size_if_boxes_are_large_enough(tmp_path, monkeypatch):
    """Views are close to those of the full image. If one view needs all pixels, all are decoded."""
    photo((803, 601)).save(tmp_path / "a.jpg", quality=95)
    source, whole = read_images(tmp_path, workers=0)[0], Image.open(tmp_path / "a.jpg").convert("RGB")
    decoded_sizes, real_crop = [], Image.Image.crop

    def crop(image, *more):
        decoded_sizes.append(image.size)
        return real_crop(image, *more)

    monkeypatch.setattr(Image.Image, "crop", crop)
    for boxes, size in (([(0, 0, 803, 601), (201, 99, 402, 501)], (201, 151)),
                        ([(7, 9, 130, 140)], (402, 301)),
                        ([(0, 0, 803, 601), (5, 5, 64, 127)], (803, 601))):
        found = decode_views(source, boxes, 64)
        assert decoded_sizes[-1] == size
        for view, box in zip(found, boxes):
            assert np.abs(view - pillow_view(whole, box, 64).astype(float)).mean() < 4


def test_views_do_not_depend_on_the_number_of_workers(tmp_path):
    """There may be more workers than images in a batch. Training's random state does not change."""
    for i in range(12):                                        # images of many shapes
        photo((20 + 3 * i, 60 - 2 * i), i).save(tmp_path / f"{i:02}.{('png', 'jpg')[i % 2]}")
    batches = [(epoch, np.arange(12)[epoch:]) for epoch in range(4)] + [(4, np.array([7]))]
    cutter, state, found = Cutter(simclr.CROPS, 5, 2, 1.0, 8, True), torch.get_rng_state(), []
    for workers in (0, 1, 2):
        views = read_images(tmp_path, workers)[0].load_views(batches, cutter, torch.device("cpu"))
        found.append([x.clone() for x in views])
    assert [len(x) for x in found[0]] == [24, 22, 20, 18, 2]
    assert equal(found[1], found[0]) and equal(found[2], found[0])
    assert torch.equal(torch.get_rng_state(), state)
