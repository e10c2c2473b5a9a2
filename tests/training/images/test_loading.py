"""Image files decoded by worker processes: crops equal Pillow's, and views do not depend on the number of
workers."""

import numpy as np
import pytest
import torch
from PIL import Image

import moco
import simclr
from kernels.training.images.formats import read_images
from kernels.training.images.loading import Cutter, crop_files, parallel_map
from running import equal

SCRIPTS = {"simclr": simclr, "moco": moco}
FLAGS = "--data x --model resnet-small --batch-size 4 --image-size 8 --probe-epochs 0".split()
CPU = torch.device("cpu")


def photo(size, seed=0):
    """Return a random image that is smooth like a photograph."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3)).astype(np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def write_photos(folder, count=24):
    """Write PNG and JPEG files of many shapes to a folder, and return the folder."""
    folder.mkdir(parents=True)
    for i in range(count):
        photo((20 + 3 * i, 60 - 2 * i), i).save(folder / f"{i:02}.{('png', 'jpg')[i % 2]}")
    return folder


# ── crops ──


class FixedCutter(Cutter):
    """A Cutter of given boxes (views, 1, 4)."""
    fixed = None

    def boxes(self, epoch, rows, sizes):
        return np.array(self.fixed)


def decode_views(source, boxes, size, bicubic):
    """Return the views (views, size, size, 3) of the only image of ImageFiles."""
    FixedCutter.fixed = boxes
    return crop_files(source, FixedCutter(None, 0, 1, 1.0, size, bicubic), 0, np.array([0]))[:, 0].numpy()


@pytest.mark.parametrize("script", SCRIPTS.values())
@pytest.mark.parametrize("name, mode", [
    ("a.png", "RGB"), ("a.png", "L"), ("a.png", "P"), ("a.png", "RGBA"), ("a.png", "1"), ("a.gif", "P"),
    ("a.bmp", "RGB"), ("a.webp", "RGB"), ("a.tif", "RGB"), ("a.jpg", "CMYK"), ("a.jpg", "L")])
def test_crops_equal_pillows(name, mode, script, tmp_path):
    """Crops of images that are decoded at full size are bitwise equal. Boxes are smaller and larger than
    views and have other aspect ratios. The first image of an animation is used."""
    image = photo((70, 50)).convert(mode)
    more = dict(save_all=True, append_images=[photo((70, 50), 1)]) if name == "a.gif" else {}
    image.save(tmp_path / name, **more)
    bicubic = script.CROPS.bicubic
    boxes = np.array([[[0, 0, 70, 50]], [[3, 5, 40, 31]], [[69, 49, 1, 1]], [[10, 0, 9, 50]]])
    found = decode_views(read_images(tmp_path, workers=0)[0], boxes, 32, bicubic)
    method = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    whole = Image.open(tmp_path / name).convert("RGB")
    for view, (left, top, w, h) in zip(found, boxes[:, 0].tolist()):
        expected = whole.crop((left, top, left + w, top + h)).resize((32, 32), method)
        assert np.array_equal(view, np.asarray(expected))


def test_a_jpeg_is_decoded_at_reduced_size_if_boxes_are_large_enough(tmp_path, monkeypatch):
    """Views are close to those of the full image. If one view needs all pixels, all are decoded."""
    photo((803, 601)).save(tmp_path / "a.jpg", quality=95)
    source, whole = read_images(tmp_path, workers=0)[0], Image.open(tmp_path / "a.jpg").convert("RGB")
    decoded_sizes, real_crop = [], Image.Image.crop

    def crop(image, *more):
        decoded_sizes.append(image.size)
        return real_crop(image, *more)

    monkeypatch.setattr(Image.Image, "crop", crop)
    for boxes, size in (([[0, 0, 803, 601], [201, 99, 402, 501]], (201, 151)),
                        ([[7, 9, 130, 140]], (402, 301)),
                        ([[0, 0, 803, 601], [5, 5, 64, 127]], (803, 601))):
        found = decode_views(source, np.array(boxes)[:, None], 64, False)
        assert decoded_sizes[-1] == size
        for view, (left, top, w, h) in zip(found, boxes):
            part = whole.crop((left, top, left + w, top + h))
            expected = np.asarray(part.resize((64, 64), Image.Resampling.BILINEAR))
            assert np.abs(view - expected.astype(float)).mean() < 4


# ── batches of views ──


def run_plan(source, batches, size=8):
    """Return the views of batches (epoch, rows), copied as they arrive."""
    cutter = Cutter(simclr.CROPS, 5, 2, 1.0, size, True)
    return [x.clone() for x in source.load_views(batches, cutter, CPU)]


def test_views_do_not_depend_on_the_number_of_workers(tmp_path):
    """There may be more workers than images in a batch. A plan without batches yields no views."""
    path, rows = write_photos(tmp_path / "x"), np.random.default_rng(0).permutation(24)
    batches = [(epoch, rows[epoch:][:20]) for epoch in range(9)] + [(9, rows[:2])]
    found = [run_plan(read_images(path, workers=workers)[0], batches) for workers in (0, 1, 2, 3)]
    assert [len(x) for x in found[0]] == [40, 40, 40, 40, 40, 38, 36, 34, 32, 4]
    assert all(equal(other, found[0]) for other in found[1:])
    assert run_plan(read_images(path, workers=2)[0], []) == []


def test_results_come_in_order_and_the_global_generator_is_not_used(tmp_path):
    state = torch.get_rng_state()
    for workers in (0, 2):
        done = parallel_map(lambda a, b: a // b, ((i, 7) for i in range(50)), workers)
        assert [*done] == [i // 7 for i in range(50)]
    run_plan(read_images(write_photos(tmp_path / "x", 4), workers=1)[0], [(0, np.arange(4))])
    assert torch.equal(torch.get_rng_state(), state)
