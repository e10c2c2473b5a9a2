"""Pictures that processes decode: what they cut out, and the same views whoever does it. Kills and signals of
these processes: tests/attack/faults.py."""
import os
import re
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

import moco
import simclr
from kernels.training.cli import Fault
from kernels.training.images.formats import read_pictures
from kernels.training.images.workers import in_workers
from running import equal

SCRIPTS = {"simclr": simclr, "moco": moco}
FLAGS = "--data x --model resnet-small --batch-size 4 --size 8 --probe-epochs 0".split()
CPU = torch.device("cpu")


def photo(size, seed=0):
    """Smooth, as photographs are."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3)).astype(np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def put_photos(folder, count=24):
    """Of many shapes."""
    folder.mkdir(parents=True)
    for i in range(count):
        photo((20 + 3 * i, 60 - 2 * i), i).save(folder / f"{i:02}.{('png', 'jpg')[i % 2]}")
    return folder


# ── what is cut out ──


def views_of(source, boxes, size, cubic):
    """(views, n, size, size, 3) of all pictures of Files."""
    plan = [(np.arange(len(source)), boxes)]
    (parts,) = source.decode(plan, size, cubic)
    return torch.cat(parts, 1).numpy()


@pytest.mark.parametrize("script", SCRIPTS.values())
@pytest.mark.parametrize("name, mode", [
    ("a.png", "RGB"), ("a.png", "L"), ("a.png", "P"), ("a.png", "RGBA"), ("a.png", "1"), ("a.gif", "P"),
    ("a.bmp", "RGB"), ("a.webp", "RGB"), ("a.tif", "RGB"), ("a.jpg", "CMYK"), ("a.jpg", "L")])
def test_a_cut_is_pillows(name, mode, script, tmp_path):
    """To the bit where nothing is shrunk before: boxes smaller, larger and other in shape than views; of an
    animation the first picture."""
    picture = photo((70, 50)).convert(mode)
    more = dict(save_all=True, append_images=[photo((70, 50), 1)]) if name == "a.gif" else {}
    picture.save(tmp_path / name, **more)
    cubic = script.CROPS.cubic
    boxes = np.array([[[0, 0, 70, 50]], [[3, 5, 40, 31]], [[69, 49, 1, 1]], [[10, 0, 9, 50]]])
    found = views_of(read_pictures(tmp_path, workers=0)[0], boxes, 32, cubic)[:, 0]
    method = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
    whole = Image.open(tmp_path / name).convert("RGB")
    for view, (left, top, w, h) in zip(found, boxes[:, 0].tolist()):
        wanted = whole.crop((left, top, left + w, top + h)).resize((32, 32), method)
        assert np.array_equal(view, np.asarray(wanted))


def test_a_jpeg_is_decoded_smaller_where_boxes_have_pixels_enough(tmp_path, monkeypatch):
    """Near what all of its pixels give; only just where one view of the picture wants them, all are."""
    photo((803, 601)).save(tmp_path / "a.jpg", quality=95)
    source, whole = read_pictures(tmp_path, workers=0)[0], Image.open(tmp_path / "a.jpg").convert("RGB")
    opened, real = [], Image.Image.crop
    monkeypatch.setattr(Image.Image, "crop", lambda image, *more: opened.append(image.size) or real(
        image, *more))
    for boxes, size in (([[0, 0, 803, 601], [201, 99, 402, 501]], (201, 151)),
                        ([[7, 9, 130, 140]], (402, 301)),
                        ([[0, 0, 803, 601], [5, 5, 64, 127]], (803, 601))):
        found = views_of(source, np.array(boxes)[:, None], 64, False)[:, 0]
        assert opened[-1] == size
        for view, (left, top, w, h) in zip(found, boxes):
            part = whole.crop((left, top, left + w, top + h))
            wanted = np.asarray(part.resize((64, 64), Image.Resampling.BILINEAR))
            assert np.abs(view - wanted.astype(float)).mean() < 4


# ── the feed ──


def feed(source, batches, size=8):
    """The bits of the views of a plan, each taken when it comes."""
    plan = ((rows, simclr.CROPS.draw(5, epoch, rows, source.sizes(rows), 2)) for epoch, rows in batches)
    return [x.clone() for x in source.load_views(plan, size, True, CPU)]


def test_views_are_the_same_whoever_decodes(tmp_path):
    """More workers than pictures, too; of a plan without batches there are none."""
    path, rows = put_photos(tmp_path / "x"), np.random.default_rng(0).permutation(24)
    batches = [(epoch, rows[epoch:][:20]) for epoch in range(9)] + [(9, rows[:2])]
    found = [feed(read_pictures(path, workers=workers)[0], batches) for workers in (0, 1, 2, 3)]
    assert [len(x) for x in found[0]] == [40, 40, 40, 40, 40, 38, 36, 34, 32, 4]
    assert all(equal(other, found[0]) for other in found[1:])
    assert feed(read_pictures(path, workers=2)[0], []) == []


def test_work_comes_in_order_and_draws_from_no_generator(tmp_path):
    state = torch.get_rng_state()
    for workers in (0, 2):
        done = in_workers(lambda a, b: a // b, ((i, 7) for i in range(50)), workers)
        assert [*done] == [i // 7 for i in range(50)]
    feed(read_pictures(put_photos(tmp_path / "x", 4), workers=1)[0], [(0, np.arange(4))])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("change, wanted", [
    (lambda path: photo((30, 20)).save(path), "is 30 x 20 now, was 29 x 54"),
    (lambda path: path.unlink(), "No such file or directory"),
    (lambda path: os.truncate(path, 900), r"not readable \(OSError\)"),
    (lambda path: path.write_text("a text"), r"not readable \(UnidentifiedImageError\)")])
def test_files_that_change_in_training(workers, change, wanted, tmp_path):
    source = read_pictures(put_photos(tmp_path / "x", 8), workers=workers)[0]
    change(tmp_path / "x" / "03.jpg")
    try:                                                       # pytest.raises would keep the workers too
        told = feed(source, [(0, np.arange(8))])
    except Fault as fault:
        told = str(fault) * fault.every_rank
    assert re.fullmatch(f".*x/03.jpg: {wanted}; it was whole when training began", told)


def test_little_shared_memory(here, monkeypatch, capfd):
    """A task takes it itself: where it is left to the queue, an error there would keep the run waiting."""
    put_photos(Path("x"))
    message = "unable to write to file </torch_1>: No space left on device (28), in shared memory"
    monkeypatch.setattr(torch.Tensor, "share_memory_", Mock(side_effect=RuntimeError(message)))
    with pytest.raises(SystemExit, match="2"):
        simclr.main([*FLAGS, "--steps", "1", "--workers", "1"])
    wanted = r"simclr\.py: a process that decoded pictures was killed, .*; /dev/shm is full; .*\n"
    assert re.fullmatch(wanted, capfd.readouterr().err)
