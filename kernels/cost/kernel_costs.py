"""What a launch of each kernel does, and its cycles by resource; see predict.py.

The listing of a kernel tells what its program does in a tile, TILES how many tiles each program has. Programs
start where the fewest tiles are, and the multiprocessor that has the most is the one that is waited for.
"""
import functools
import heapq
import math
from collections import Counter
from typing import NamedTuple

from .launches import REGISTERS
from .listing import read_listing

# CUDA's programming guide: a clock and multiprocessor has bytes, results, instructions of warps
SHARED, MUFU, ISSUE = 128, 16, 4
THREADS, PROGRAMS = 2048, 32             # that a multiprocessor has at a time
LATENCY = 700                            # clocks of a load


class Tiles(NamedTuple):
    """What the listing does not tell of a launch."""
    of: tuple            # programs, in the order in which they start: their tiles, or the rounds of a loop
    wanted: str = ""     # see listing.read_listing
    products: int = 0    # of a tile; with 2, weights are multiplied with the columns again
    rows: int = 0        # of q and k that all programs read
    resident: bool = True                                       # a program fetches its own side once
    owns: str = "BLOCK_N"                                       # its side of a tile; it walks the other


@functools.cache
def walked(tiles_x, tiles_y, walk, own, triangle):
    """Tiles of each program that owns tile x and walks y, up to those on the diagonal of x if triangle."""
    last = lambda x: min(tiles_y, (x + 1) * own) if triangle else tiles_y
    return tuple(max(0, min((step + 1) * walk, last(x)) - step * walk)
                 for step in range(math.ceil(tiles_y / walk)) for x in range(tiles_x))


def of_sums(a):
    tiles = math.ceil(a.width / a.BLOCK_M), math.ceil(a.height / a.BLOCK_N)
    of = walked(*tiles, a.walk, a.BLOCK_M // a.BLOCK_N, a.TRIANGLE)
    return Tiles(of, "mma", 1, a.height + a.width * (not a.TRIANGLE), a.RESIDENT, "BLOCK_M")


def of_parts(a):
    tiles = math.ceil(a.height / a.BLOCK_N), math.ceil(a.width / a.BLOCK_M)
    return Tiles(walked(*tiles, a.walk, 1, False), "mma", 1, a.height + a.width, a.RESIDENT)


def of_block(a, mirrored=False):
    tiles = a.tiles_x * (a.tiles_x + 1) // 2 if mirrored else a.programs
    return Tiles((1,) * tiles, "mma", 1, a.tiles_x * a.BLOCK_N + a.tiles_y * a.BLOCK_M, False)


def of_fixed_keys(a):
    of = (math.ceil(min(a.split, a.M - y * a.split) / a.BLOCK_M) for y in range(a.y) for _ in range(a.x))
    return Tiles(tuple(of), "mma", 2, a.N + a.M)


def alike(a, tiles=1, *rest):
    """Tiles of a launch whose programs all have as many."""
    return Tiles((math.ceil(tiles),) * a.programs, *rest)


TILES = {
    "sums_kernel": of_sums, "parts_kernel": of_parts, "fixed_keys_kernel": of_fixed_keys,
    "weights_kernel": lambda a: of_block(a, a.MIRROR), "sigmoid_kernel": of_block,
    "rows_kernel": lambda a: alike(a, a.M / a.BLOCK_M, "mma", 2, a.N + a.M, a.RESIDENT),
    "strip_kernel": lambda a: alike(a, 1, "mma", 1, a.height + a.M, False),
    "merge_kernel": lambda a: alike(a, a.tiles / a.HIGH, "loops"),
    "add_kernel": lambda a: alike(a, a.tiles / 32, "loops"),
    "merge_keys_kernel": lambda a: alike(a, a.splits, "loops"),
    "reference_kernel": lambda a: alike(a, a.N / a.BLOCK, "loops"),
    "scale_kernel": lambda a: alike(a) if a.REFERENCE is None else Tiles(()),    # bounded: returns at once
    "ends_kernel": alike, "finish_kernel": alike, "fold_kernel": alike, "factors_kernel": alike,
    "copy_kernel": alike,
}
counted = functools.cache(read_listing)


@functools.cache
def busiest(tiles, multiprocessors):
    """(programs, tiles) of the multiprocessor with the most tiles; a program starts where the fewest are."""
    loads = [(0, 0, i) for i in range(multiprocessors)]
    for of_program in tiles:
        load, programs, i = loads[0]
        heapq.heapreplace(loads, (load + of_program, programs + 1, i))
    load, programs, _ = max(loads)
    return programs, load


class Operands(NamedTuple):
    """Of a kernel with products."""
    steps: int = 0       # blocks of features in a tile's inner loop; 0: no such loop
    flop: int = 0        # of a tile
    fetched: int = 0     # bytes of q and k that come to shared memory for a tile,
    own: int = 0         # and once for a program
    taken: int = 0       # bytes of them that the products of a tile take


def operands(a, does, size):
    """The Operands of a launch; size: bytes of a feature."""
    if not does.products:
        return Operands()
    steps = 0 if does.resident else math.ceil(a.SHAPE.D / a.BLOCK_D)
    features, again = a.BLOCK_D * max(steps, 1), a.BLOCK_D * (does.products - 1)
    sides, weighted = (a.BLOCK_N + a.BLOCK_M) * features * size, a.BLOCK_M * again * size
    own = 0 if steps else getattr(a, does.owns) * features * size
    fetched = sides + weighted if steps else sides - own
    return Operands(steps, a.BLOCK_N * a.BLOCK_M * (features + again) * size, fetched, own, sides + weighted)


def once_and_tile(way, steps):
    """What a warp does once, and what it does in a tile."""
    once, tile, over_tiles = Counter(), Counter(), way.loops - (steps > 0)     # loops; none: one tile
    for done, depth in way.blocks:
        times = steps if steps and depth > over_tiles else 1
        (tile if depth or not over_tiles else once).update({what: times * x for what, x in done.items()})
    return once, tile


def kernel_cost(name, a, metadata, binary, chip, size):
    """What is counted of a launch, with its cycles by resource."""
    does = TILES[name](a)
    if not does.of:
        return dict(bytes=0, cycles={"latency": LATENCY})
    way, fetch, warps = counted(binary, does.wanted), operands(a, does, size), metadata.num_warps
    once, tile = once_and_tile(way, fetch.steps)
    of = tuple(tiles for tiles in does.of if tiles) or does.of
    programs, tiles = busiest(of, chip.multiprocessors)
    busy, all_of = Counter(), Counter()
    for what in {*once, *tile}:
        busy[what] = (programs * once[what] + tiles * tile[what]) * warps
        all_of[what] = (len(of) * once[what] + sum(of) * tile[what]) * warps
    if busy["tensor"] not in (0, tiles * fetch.flop):
        raise RuntimeError(f"{name}: {busy['tensor']} FLOP in the listing, {tiles * fetch.flop} launched")
    if not busy["tensor"]:                                      # sm_100: the listing has no shapes
        busy.update(tensor=tiles * fetch.flop, shared=tiles * fetch.taken)
    at_once = min(REGISTERS // (math.ceil(way.registers / 8) * 256 * warps),
                  chip.shared // (metadata.shared + 1024), THREADS // (32 * warps), PROGRAMS)
    waves = len(of) / at_once / chip.multiprocessors
    arrives = tiles * fetch.fetched + programs * fetch.own
    rows, straight = does.rows * a.SHAPE.D * size if fetch.flop else all_of["read"], not fetch.flop
    cycles = {"tensor": busy["tensor"] / chip.tensor, "MUFU": busy["mufu"] / MUFU,
              "issue": busy["instructions"] / ISSUE, "shared": (busy["shared"] + arrives) / SHARED,
              "L2": (sum(of) * fetch.fetched + len(of) * fetch.own + all_of["read"] + all_of["written"])
                    / chip.l2,
              "HBM": (rows + all_of["written"]) / chip.hbm_bytes(),
              "latency": LATENCY * max(1, *of) * math.ceil(waves) * straight}
    return dict(registers=way.registers, spills=way.spills, shared=metadata.shared, programs=at_once,
                waves=round(waves, 2), tiles=tiles, instructions=tile["instructions"], mma=tile["mma"],
                mufu=tile["mufu"] // 32, bytes=rows + all_of["written"], cycles=cycles)
