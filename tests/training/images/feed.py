"""How fast and in how much memory pictures of a folder are read, beside a bare loop over Pillow in as many
processes, in one run.

    python tests/training/images/feed.py big --make 200000
    python tests/training/images/feed.py big --size 32
    python tests/training/images/feed.py photos --make 2000 --largest 500
    python tests/training/images/feed.py photos --size 224
"""
import argparse
import multiprocessing
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import simclr  # noqa: E402
from kernels.training.images.formats import read_pictures  # noqa: E402
from kernels.training.loop import batches  # noqa: E402


def make(args):
    """PNG and JPEG files in turn, each of a size of its own, in a folder for each class."""
    with np.load(Path(__file__).resolve().parents[2] / "data" / "shapes.npz") as file:
        pictures, labels = file["images"], file["labels"]
    draw = random.Random(0)
    for i in range(args.make):
        folder = Path(args.folder, f"class{labels[i % len(labels)]}")
        folder.mkdir(parents=True, exist_ok=True)
        size = [draw.randint(min(24, args.largest), args.largest) for _ in range(2)]
        picture = Image.fromarray(pictures[i % len(labels)]).resize(size, Image.Resampling.BICUBIC)
        picture = Image.blend(picture, Image.effect_noise(size, 60).convert("RGB"), 0.2)
        picture.save(folder / (f"{i:07}.jpg" if i % 2 else f"{i:07}.png"))


def bare(paths, size):
    """What a reader would write: open, draw two boxes, resize them."""
    views = np.empty((2, size, size, 3), np.uint8)
    for path in paths:
        with Image.open(path) as picture:
            picture = picture.convert("RGB")
            for view in views:
                view[:] = picture.resize((size, size), Image.Resampling.BICUBIC, box(*picture.size))


def box(width, height):
    for _ in range(100):
        area, aspect = random.uniform(0.08, 1) * width * height, random.uniform(3 / 4, 4 / 3)
        h = round((area / aspect) ** 0.5)
        w = round(h * aspect)
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            return left, top, left + w, top + h
    return 0, 0, width, height


def megabytes(process):
    """Of a process, its part of what it shares with others included."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1024


def main():
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("folder")
    parser.add_argument("--make", type=int, help="write so many files instead")
    parser.add_argument("--largest", type=int, default=160, help="pixels of a side of those; default 160")
    parser.add_argument("--size", type=int, default=32, help="pixels of a view's sides; default 32")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--count", type=int, default=40_000, help="pictures a round; default 40000")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    if args.make:
        return make(args)
    torch.set_num_threads(1)
    began = time.perf_counter()
    source, _ = read_pictures(args.folder, workers=args.workers)
    took = time.perf_counter() - began
    print(f"{len(source):,} files listed and checked in {took:.1f} s, {len(source) / took:,.0f} a second")
    order = [rows for rows, _ in zip(batches(len(source), args.batch, 1), range(args.count // args.batch))]

    def plan():
        for rows in map(np.array, order):
            yield rows, simclr.CROPS.draw(1, 0, rows, source.sizes(rows), 2)

    def ours():
        for batch, _ in enumerate(source.decode(plan(), args.size, simclr.CROPS.cubic), 1):
            if batch % -(-len(order) // 4) == 0:
                here = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
                used.append(f"{megabytes(os.getpid()):.0f} + {sum(map(megabytes, here)):.0f}")

    def theirs():
        paths = [source.path(row) for rows in order for row in rows]
        parts = [(paths[i :: args.workers], args.size) for i in range(args.workers)]
        processes = [multiprocessing.Process(target=bare, args=part) for part in parts]
        for process in processes:
            process.start()
        for process in processes:
            process.join()

    for _ in range(3):
        rates, used = [], []
        for read in (ours, theirs):
            began = time.perf_counter()
            read()
            rates.append(len(order) * args.batch / (time.perf_counter() - began))
        print("{:,.0f} pictures a second, a bare loop {:,.0f}: {:.2f}".format(*rates, rates[0] / rates[1]),
              f" MB over time, this process + {args.workers} workers: {', '.join(used)}", flush=True)


if __name__ == "__main__":
    main()
