"""What many GPUs cost a loss over all their rows: arithmetic, see python -m kernels.cost --ranks.

N rows of D features are shared by R ranks, n = N / R each. A step of a rank, in bytes and seconds:

    gather_rows    receives (R − 1) n rows of keys, and sends as many of their float32 gradients to be summed;
                   holds all N keys and their gradients beside its own: (N + n) D (size + 4) bytes
    loss           n·N pairs of 8 D FLOP, forward, recomputed and two gradients, at LIBRARY of the tensor peak
    encoder        n rows of --encoder-tflop, forward and backward, at ENCODER of the peak
    ring           keys pass by in forward and again in backward, their gradients travel with them:
                   (R − 1) n D (2 size + 4) bytes, hidden while the loss is longer; holds three shares of keys
                   and three of gradients, own, arriving and leaving

clip_loss gathers both sides and has twice the bytes, pairs and memory. Gathering fits while it holds at most
ROOM of the GPU's memory, the rest is the encoder's, and pays while it takes at most PAYS of the step. Nothing
of a gather is taken to overlap. size is the bytes of a feature: 2 of a half type, 4 of the float32 rows that
the scripts gather; gather_rows sums gradients in the type of the rows.
"""
from typing import NamedTuple

ENCODER, ROOM, PAYS = 0.4, 0.5, 0.1
SIDES = {"info_nce": 1, "nt_xent": 1, "clip_loss": 2}          # that are gathered
RANKS, BATCHES = [4 ** i for i in range(6)], [4 ** i for i in range(6, 13)]           # to 1,024 and 16 M


class Step(NamedTuple):
    """Of a rank."""
    own: int             # rows
    gathered: float      # bytes of keys received
    summed: float        # bytes of gradients sent
    memory: float        # bytes
    gather: float        # seconds
    loss: float
    encoder: float
    ring_memory: float
    ring: float          # seconds that the loss does not hide


def step(rows, ranks, d, size, sides, link, tflop, peak, library):
    """The Step of a batch; link in bytes, peak in FLOP a second, tflop of the encoder a row."""
    own = rows / ranks
    passing = sides * (rows - own) * d                          # features of the others' keys
    gathered, summed = passing * size, passing * 4
    loss = sides * own * rows * d * 8 / (peak * library)
    of_ring = passing * (2 * size + 4) / link
    held = sides * d * (size + 4)
    return Step(own, gathered, summed, (rows + own * (ranks > 1)) * held, (gathered + summed) / link, loss,
                own * tflop * 1e12 / (peak * ENCODER), 3 * own * held, max(0.0, of_ring - loss))


def lines(rows, ranks, case, chip):
    """Tables: all of one number of ranks, and shares of a step of many numbers. case: the rest of step's."""
    batches, numbers = sorted({*BATCHES, rows}), sorted({*RANKS, ranks})
    about = f"{case['sides']} × {case['d']} features, {case['link'] / 1e9:g} GB/s a rank, encoder"
    yield f"{ranks} ranks of {chip.name}, {about} {case['tflop']:g} TFLOP a row at {ENCODER:.0%} of the peak"
    for head in (("batch", "rows", "keys", "grads", "memory", "gather", "loss", "encoder", "ring", "ring"),
                 ("", "a rank", "MB", "MB", "GB", "ms", "ms", "ms", "GB", "ms more")):
        yield "".join(f"{title:>9}" for title in head)
    for rows in batches:
        at = step(rows, ranks, **case)
        if at.own >= 1:
            cells = (at.gathered / 1e6, at.summed / 1e6, at.memory / 1e9, 1e3 * at.gather, 1e3 * at.loss,
                     1e3 * at.encoder, at.ring_memory / 1e9, 1e3 * at.ring)
            yield "".join(f"{x:>9}" for x in (named(rows), named(int(at.own)), *map(short, cells)))
    yield (f"% of a step: gathering + loss; ! gathering is more than {PAYS:.0%}; full: more than "
           f"{ROOM * chip.memory:g} GB")
    yield f"{'batch':>9}" + "".join(f"{ranks:>11,}" for ranks in numbers) + " ranks"
    for rows in batches:
        verdicts = (verdict(step(rows, ranks, **case), chip) for ranks in numbers)
        yield f"{named(rows):>9}" + "".join(f"{x:>11}" for x in verdicts)


def verdict(at, chip):
    """Of gathering, in a cell."""
    if at.own < 1:
        return "-"
    if at.memory > ROOM * chip.memory * 1e9:
        return "full"
    whole = (at.gather + at.loss + at.encoder) / 100
    return f"{at.gather / whole:.1f}+{at.loss / whole:.1f}" + "!" * (at.gather > 100 * PAYS * whole)


def named(rows):
    """A power of two as people say it."""
    for unit, size in (("M", 2 ** 20), ("k", 2 ** 10)):
        if rows >= size and rows % size == 0:
            return f"{rows // size}{unit}"
    return str(rows)


def short(x):
    """Three digits."""
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}" if x >= 0.01 or not x else f"{x:.1g}"
