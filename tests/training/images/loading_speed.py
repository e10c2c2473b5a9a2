"""Measure how many images of a folder are decoded per second and how much memory this takes, compared with a
bare loop over Pillow in the same number of processes.

    python tests/training/images/loading_speed.py big --make 200000
    python tests/training/images/loading_speed.py big --image-size 32
    python tests/training/images/loading_speed.py photos --make 2000 --largest 500
    python tests/training/images/loading_speed.py photos --image-size 224
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
from kernels.training.images.formats import read_images  # noqa: E402
from kernels.training.loop import batches  # noqa: E402


def make(args):
    """Write --make image files, alternately PNG and JPEG, of random sizes, in a folder for each class."""
    with np.load(Path(__file__).resolve().parents[2] / "data" / "shapes.npz") as file:
        images, labels = file["images"], file["labels"]
    generator = random.Random(0)
    for i in range(args.make):
        folder = Path(args.folder, f"class{labels[i % len(labels)]}")
        folder.mkdir(parents=True, exist_ok=True)
        size = [generator.randint(min(24, args.largest), args.largest) for _ in range(2)]
        image = Image.fromarray(images[i % len(labels)]).resize(size, Image.Resampling.BICUBIC)
        image = Image.blend(image, Image.effect_noise(size, 60).convert("RGB"), 0.2)
        image.save(folder / (f"{i:07}.jpg" if i % 2 else f"{i:07}.png"))


def bare_loop(paths, size):
    """Open each file, crop two random boxes and resize them: the loop that a user would write."""
    views = np.empty((2, size, size, 3), np.uint8)
    for path in paths:
        with Image.open(path) as image:
            image = image.convert("RGB")
            for view in views:
                view[:] = image.resize((size, size), Image.Resampling.BICUBIC, random_box(*image.size))


def random_box(width, height):
    """Return the corners (left, top, right, bottom) of a random resized crop."""
    for _ in range(100):
        area, aspect = random.uniform(0.08, 1) * width * height, random.uniform(3 / 4, 4 / 3)
        h = round((area / aspect) ** 0.5)
        w = round(h * aspect)
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            return left, top, left + w, top + h
    return 0, 0, width, height


def megabytes(process):
    """Return the memory of a process in MB, with its part of memory that processes share (PSS)."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1024


def main():
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("folder", help="folder of image files")
    parser.add_argument("--make", type=int, help="write this many image files, and measure nothing")
    parser.add_argument("--largest", type=int, default=160, help="longest side in pixels; default 160")
    parser.add_argument("--image-size", type=int, default=32, help="side of the views in pixels; default 32")
    parser.add_argument("--batch", type=int, default=512, help="images in a batch; default 512")
    parser.add_argument("--count", type=int, default=40_000, help="images in each round; default 40000")
    parser.add_argument("--workers", type=int, default=2, help="processes that decode; default 2")
    args = parser.parse_args()
    if args.make:
        return make(args)
    torch.set_num_threads(1)
    began = time.perf_counter()
    source, _ = read_images(args.folder, workers=args.workers)
    took = time.perf_counter() - began
    print(f"{len(source):,} files listed and checked in {took:.1f} s, {len(source) / took:,.0f} per second")
    order = [rows for rows, _ in zip(batches(len(source), args.batch, 1), range(args.count // args.batch))]

    def plan():
        for rows in map(np.array, order):
            yield rows, simclr.CROPS.sample_boxes(1, 0, rows, source.sizes(rows), 2)

    def our_loader():
        for batch, _ in enumerate(source.decode(plan(), args.image_size, simclr.CROPS.bicubic), 1):
            if batch % -(-len(order) // 4) == 0:
                children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
                used.append(f"{megabytes(os.getpid()):.0f} + {sum(map(megabytes, children)):.0f}")

    def bare_loops():
        paths = [source.path(row) for rows in order for row in rows]
        parts = [(paths[i :: args.workers], args.image_size) for i in range(args.workers)]
        processes = [multiprocessing.Process(target=bare_loop, args=part) for part in parts]
        for process in processes:
            process.start()
        for process in processes:
            process.join()

    for _ in range(3):
        rates, used = [], []
        for read in (our_loader, bare_loops):
            began = time.perf_counter()
            read()
            rates.append(len(order) * args.batch / (time.perf_counter() - began))
        print("{:,.0f} images/s, bare loop {:,.0f}: ratio {:.2f};".format(*rates, rates[0] / rates[1]),
              f"MB after each quarter, this process + {args.workers} workers: {', '.join(used)}", flush=True)


if __name__ == "__main__":
    main()
