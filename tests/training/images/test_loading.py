"""Test the decoding of image files in worker processes: crops equal those of Pillow, and views do not depend
on the number of workers."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import simclr
from kernels.training.images.formats import read_images
from kernels.training.images.loading import Cutter, crop_files
from running import equal


def photo(width, height, seed=0):
    """Return a random image that is smooth like a photograph."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3)).astype(np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("bicubic", [True, False])
@pytest.mark.parametrize("name, mode", [("a.png", "RGB"), ("a.png", "P"), ("a.png", "RGBA"), ("a.jpg", "L")])
def test_crops_equal_pillows(name, mode, bicubic, tmp_path):
    """If an image is decoded at full size, its crops equal Pillow's bit by bit, for small and large boxes."""
    photo(70, 50).convert(mode).save(tmp_path / name)
    boxes = [(0, 0, 70, 50), (3, 5, 40, 31), (69, 49, 1, 1), (10, 0, 9, 50)]
    crops = SimpleNamespace(sample_boxes=lambda *_: np.array(boxes)[:, None])
    source, cutter = read_images(tmp_path, workers=0)[0], Cutter(crops, 0, 1, 1.0, 32, bicubic)
    found = crop_files(source, cutter, 0, np.array([0]))[:, 0].numpy()
    whole = Image.open(tmp_path / name).convert("RGB")
    method = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    for view, (left, top, width, height) in zip(found, boxes, strict=True):
        part = whole.crop((left, top, left + width, top + height))
        assert np.array_equal(view, np.asarray(part.resize((32, 32), method)))


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.tif", "a.webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(name, orientation, tmp_path):
    """A photo is read as it is displayed, also if it is decoded at reduced size."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    photo(400, 240).save(tmp_path / name, exif=exif, **dict(lossless=True) if name == "a.webp" else {})
    upright = ImageOps.exif_transpose(Image.open(tmp_path / name)).convert("RGB")
    assert upright.size == ((400, 240) if orientation < 5 else (240, 400))
    box = 20, 40, upright.width - 30, upright.height - 80
    crops = SimpleNamespace(sample_boxes=lambda seed, epoch, rows, sizes, views: np.array([[box]])
                            if sizes.tolist() == [[*upright.size]] else None)
    source = read_images(tmp_path, workers=0)[0]
    view, = crop_files(source, Cutter(crops, 0, 1, 1.0, 32, True), 0, np.array([0]))[:, 0].numpy()
    expected = upright.crop((20, 40, box[2] + 20, box[3] + 40)).resize((32, 32), Image.Resampling.BICUBIC)
    assert np.abs(view - np.asarray(expected, float)).mean() < 3


def test_views_do_not_depend_on_the_number_of_workers(tmp_path):
    """A batch may have fewer images than workers. Loading does not change PyTorch's random state."""
    for i in range(12):                                        # images of many shapes
        photo(20 + 3 * i, 60 - 2 * i, i).save(tmp_path / f"{i:02}.{('png', 'jpg')[i % 2]}")
    batches = [(epoch, np.arange(12)[epoch:]) for epoch in range(4)] + [(4, np.array([7]))]
    cutter, state, found = Cutter(simclr.CROPS, 5, 2, 1.0, 8, True), torch.get_rng_state(), []
    for workers in (0, 1, 2):
        views = read_images(tmp_path, workers)[0].load_views(batches, cutter, torch.device("cpu"))
        found.append([x.clone() for x in views])
    assert [len(x) for x in found[0]] == [24, 22, 20, 18, 2]
    assert equal(found[1], found[0]) and equal(found[2], found[0])
    assert torch.equal(torch.get_rng_state(), state)
