"""The work of each kernel launch, and the clock cycles that it needs of each resource; see predict.py.

The SASS of a kernel tells what a program does in a tile; WORK tells how many tiles each program has. Each
program starts on the streaming multiprocessor (SM) that has the fewest tiles so far, and the SM that ends up
with the most tiles determines the time.
"""
import functools
import heapq
import math
from collections import Counter
from typing import NamedTuple

from .launches import REGISTERS
from .sass import analyse_sass

# per clock and SM (CUDA programming guide): bytes of shared memory, results of the special function unit
# (MUFU), issued warp instructions
SHARED_BYTES, MUFU_RESULTS, WARP_INSTRUCTIONS = 128, 16, 4
THREADS_PER_SM, PROGRAMS_PER_SM = 2048, 32
LOAD_CLOCKS = 700                        # latency of a load from global memory


class Work(NamedTuple):
    """What the programs of a launch do, as far as the SASS does not tell."""
    tiles: tuple                   # number of tiles, or of loop iterations, of each program in starting order
    prefer: str = ""               # which code path counts; see sass.analyse_sass
    products: int = 0              # matrix products per tile; 2 if weights are multiplied with columns too
    rows: int = 0                  # rows of q and k that all programs read together
    resident: bool = True          # a program loads the rows of its own side once, for all of its tiles
    own_block: str = "BLOCK_N"     # block size of that side; the program loops over the other side


@functools.cache
def tiles_of_programs(tiles_x, tiles_y, tiles_per_program, own, triangle):
    """Return the number of tiles of each program. A program owns one tile of x and loops over up to
    tiles_per_program tiles of y; with `triangle`, only over those up to the diagonal.

    own    tiles of y that are as long as a tile of x
    """
    def end(x):
        return min(tiles_y, (x + 1) * own) if triangle else tiles_y

    return tuple(max(0, min((step + 1) * tiles_per_program, end(x)) - step * tiles_per_program)
                 for step in range(math.ceil(tiles_y / tiles_per_program)) for x in range(tiles_x))


# Each function returns the Work of a launch; a: the kernel's arguments by name, and the grid (launches.py)


def bounded_sums_work(a):
    tiles_x, tiles_y = math.ceil(a.width / a.BLOCK_M), math.ceil(a.height / a.BLOCK_N)
    tiles = tiles_of_programs(tiles_x, tiles_y, a.tiles_per_program, a.BLOCK_M // a.BLOCK_N, a.TRIANGLE)
    rows = a.height if a.TRIANGLE else a.height + a.width
    return Work(tiles, "mma", 1, rows, a.RESIDENT, "BLOCK_M")


def tile_stats_work(a):
    tiles_x, tiles_y = math.ceil(a.height / a.BLOCK_N), math.ceil(a.width / a.BLOCK_M)
    tiles = tiles_of_programs(tiles_x, tiles_y, a.tiles_per_program, 1, False)
    return Work(tiles, "mma", 1, a.height + a.width, a.RESIDENT)


def one_tile_work(a, mirrored=False):
    programs = a.tiles_x * (a.tiles_x + 1) // 2 if mirrored else a.programs
    return Work((1,) * programs, "mma", 1, a.tiles_x * a.BLOCK_N + a.tiles_y * a.BLOCK_M, False)


def frozen_keys_work(a):
    tiles = (math.ceil(min(a.split_columns, a.M - y * a.split_columns) / a.BLOCK_M)
             for y in range(a.y) for _ in range(a.x))
    return Work(tuple(tiles), "mma", 2, a.N + a.M)


def equal_work(a, tiles=1, *more):
    """All programs have the same number of tiles, rounded up; more: further fields of Work."""
    return Work((math.ceil(tiles),) * a.programs, *more)


WORK = {
    "bounded_sums_kernel": bounded_sums_work, "tile_stats_kernel": tile_stats_work,
    "frozen_keys_kernel": frozen_keys_work,
    "weights_kernel": lambda a: one_tile_work(a, a.MIRROR), "sigmoid_kernel": one_tile_work,
    "small_d_kernel": lambda a: equal_work(a, a.M / a.BLOCK_M, "mma", 2, a.N + a.M, a.RESIDENT),
    "strip_kernel": lambda a: equal_work(a, 1, "mma", 1, a.height + a.M, False),
    "merge_stats_kernel": lambda a: equal_work(a, a.tiles / a.TILES_AT_ONCE, "loops"),
    "add_sums_kernel": lambda a: equal_work(a, a.tiles / 32, "loops"),
    "merge_splits_kernel": lambda a: equal_work(a, a.splits, "loops"),
    "bound_kernel": lambda a: equal_work(a, a.N / a.BLOCK, "loops"),
    "scale_strip_kernel": lambda a: equal_work(a) if a.BOUND is None else Work(()),  # with a bound: no work
    "finish_sums_kernel": equal_work, "finish_gradient_kernel": equal_work,
    "scale_queries_kernel": equal_work, "factors_kernel": equal_work, "copy_kernel": equal_work,
}
analyse = functools.cache(analyse_sass)


@functools.cache
def busiest_sm(tiles, multiprocessors):
    """Return (programs, tiles) of the SM with the most tiles; tiles: number of tiles of each program."""
    loads = [(0, 0, i) for i in range(multiprocessors)]
    for of_program in tiles:
        load, programs, i = loads[0]
        heapq.heapreplace(loads, (load + of_program, programs + 1, i))
    load, programs, _ = max(loads)
    return programs, load


class Operands(NamedTuple):
    """What the matrix products of a kernel need; all 0 for a kernel without products."""
    steps: int = 0            # iterations of the loop over blocks of features, per tile; 0: no such loop
    flop: int = 0             # per tile
    tile_bytes: int = 0       # of q and k, loaded to shared memory for each tile
    program_bytes: int = 0    # of q and k, loaded to shared memory once for each program
    operand_bytes: int = 0    # of q and k, read from shared memory by the products of a tile


def operands(a, work, size):
    """Return the Operands of a launch; size: bytes per feature."""
    if not work.products:
        return Operands()
    steps = 0 if work.resident else math.ceil(a.SHAPE.D / a.BLOCK_D)
    features, again = a.BLOCK_D * max(steps, 1), a.BLOCK_D * (work.products - 1)
    sides, weighted = (a.BLOCK_N + a.BLOCK_M) * features * size, a.BLOCK_M * again * size
    once = 0 if steps else getattr(a, work.own_block) * features * size
    per_tile = sides + weighted if steps else sides - once
    flop = a.BLOCK_N * a.BLOCK_M * (features + again) * size    # a float32 FLOP counts as two bf16 FLOP
    return Operands(steps, flop, per_tile, once, sides + weighted)


def split_counts(path, steps):
    """Return (what a warp does once, what it does per tile), Counters as in sass.count_block.

    steps    iterations of the loop over features, which is the innermost loop; 0: there is none
    """
    once, tile = Counter(), Counter()
    tile_loops = path.loops - (steps > 0)      # loops around a tile's code; 0: the program has one tile
    for count, depth in path.blocks:
        times = steps if steps and depth > tile_loops else 1
        (tile if depth or not tile_loops else once).update({what: times * x for what, x in count.items()})
    return once, tile


def kernel_cost(name, a, metadata, binary, chip, size):
    """Return what is counted of a launch, for the output, and its cycles by resource.

    a           the kernel's arguments by name, and the grid
    metadata    what Triton knows of the compiled kernel: warps, shared memory
    binary      the compiled kernel
    size        bytes per feature
    """
    work = WORK[name](a)
    if not work.tiles:
        return dict(bytes=0, cycles={"latency": LOAD_CLOCKS})
    path, fetch, warps = analyse(binary, work.prefer), operands(a, work, size), metadata.num_warps
    once, tile = split_counts(path, fetch.steps)
    tiles_of = tuple(tiles for tiles in work.tiles if tiles) or work.tiles
    programs, tiles = busiest_sm(tiles_of, chip.multiprocessors)
    busy, total = Counter(), Counter()                          # of the busiest SM; of all programs
    for what in {*once, *tile}:
        busy[what] = (programs * once[what] + tiles * tile[what]) * warps
        total[what] = (len(tiles_of) * once[what] + sum(tiles_of) * tile[what]) * warps
    if busy["tensor"] not in (0, tiles * fetch.flop):
        raise RuntimeError(f"{name}: {busy['tensor']} FLOP in the SASS, expected {tiles * fetch.flop}")
    if not busy["tensor"]:                                      # on sm_100 the SASS does not show the shapes
        busy.update(tensor=tiles * fetch.flop, shared=tiles * fetch.operand_bytes)
    per_sm = min(REGISTERS // (math.ceil(path.registers / 8) * 256 * warps),
                 chip.shared // (metadata.shared + 1024), THREADS_PER_SM // (32 * warps), PROGRAMS_PER_SM)
    waves = len(tiles_of) / per_sm / chip.multiprocessors
    loaded = tiles * fetch.tile_bytes + programs * fetch.program_bytes
    hbm_read, has_latency = (work.rows * a.SHAPE.D * size, 0) if fetch.flop else (total["read"], 1)
    l2_bytes = (sum(tiles_of) * fetch.tile_bytes + len(tiles_of) * fetch.program_bytes
                + total["read"] + total["written"])
    cycles = {"tensor": busy["tensor"] / chip.tensor, "MUFU": busy["mufu"] / MUFU_RESULTS,
              "issue": busy["instructions"] / WARP_INSTRUCTIONS,
              "shared": (busy["shared"] + loaded) / SHARED_BYTES,
              "L2": l2_bytes / chip.l2, "HBM": (hbm_read + total["written"]) / chip.hbm_bytes(),
              "latency": LOAD_CLOCKS * max(1, *tiles_of) * math.ceil(waves) * has_latency}
    return dict(registers=path.registers, spills=path.spills, shared=metadata.shared, programs=per_sm,
                waves=round(waves, 2), tiles=tiles, instructions=tile["instructions"], mma=tile["mma"],
                mufu=tile["mufu"] // 32, bytes=hbm_read + total["written"], cycles=cycles)
