"""Estimate the time and memory of a training step on many GPUs. The loss compares the rows of all GPUs. See
python -m kernels.cost --ranks.

N rows of D features are split over R ranks: n = N / R rows each. The estimate is arithmetic, without compiled
kernels. For a step of one rank:

    gather_rows    receives (R − 1) n rows of keys, and sends as many rows of gradients to be summed. In
                   memory are all N keys, the n local rows, and the gradients of both: (N + n) D (size + 4)
                   bytes
    loss           n N pairs of 8 D FLOP (forward, recomputation in backward, two gradients), at the share of
                   the tensor core peak that cuBLAS is assumed to reach
    encoder        n rows of --encoder-tflop, forward and backward, at ENCODER_EFFICIENCY of the peak
    ring           an alternative to gather_rows, which is not implemented: keys pass from rank to rank, once
                   in forward and once in backward, where their gradients travel with them. This sends
                   (R − 1) n D (2 size + 4) bytes while the loss is computed. In memory are n rows of keys and
                   gradients three times: the local, the arriving and the leaving ones

size is the bytes per feature of the keys: 2 for --dtype bfloat16 and float16, 4 for float32. Gradients are
float32, 4 bytes, as with gather_rows(x, rows, dtype=torch.float16), which the scripts use with --precision
bf16. It keeps the gathered rows in float32 too, 2 bytes per feature more memory than estimated here.

clip_loss gathers both sides, which doubles bytes, pairs and memory. Gathering is assumed not to overlap with
computation. The second table shows "full" if gathering takes more than MAX_MEMORY_SHARE of the GPU's memory,
because the encoder needs the rest, and "!" if gathering takes more than MAX_TIME_SHARE of the step.
"""
from typing import NamedTuple

ENCODER_EFFICIENCY = 0.4
MAX_MEMORY_SHARE = 0.5
MAX_TIME_SHARE = 0.1
GATHERED_SIDES = {"info_nce": 1, "nt_xent": 1, "clip_loss": 2}
RANK_COUNTS = [4 ** i for i in range(6)]                       # 1 to 1,024
BATCH_SIZES = [4 ** i for i in range(6, 13)]                   # 4 k to 16 M


class Step(NamedTuple):
    """The costs of one step of a rank."""
    local_rows: float
    key_bytes: float               # received
    gradient_bytes: float          # sent
    memory_bytes: float
    gather_seconds: float
    loss_seconds: float
    encoder_seconds: float
    ring_memory_bytes: float
    ring_extra_seconds: float      # communication of a ring that is not hidden by the loss


def step_costs(rows, ranks, d, size, sides, link, tflop, peak, library):
    """Return the Step of a batch.

    rows, ranks    N and R
    d, size        features of a row, and their size in bytes
    sides          1, or 2 if queries are gathered as well as keys
    link           network bandwidth of a rank, in bytes per second
    tflop          TFLOP of the encoder for one row
    peak           FLOP/s of the GPU
    library        share of the peak that matrix products reach
    """
    local = rows / ranks
    features = sides * (rows - local) * d                       # of the other ranks' keys
    key_bytes, gradient_bytes = features * size, features * 4
    loss = sides * local * rows * d * 8 / (peak * library)
    ring = features * (2 * size + 4) / link
    row_bytes = sides * d * (size + 4)                          # of a key and its gradient
    rows_in_memory = rows + local if ranks > 1 else rows
    return Step(local, key_bytes, gradient_bytes, rows_in_memory * row_bytes,
                (key_bytes + gradient_bytes) / link, loss, local * tflop * 1e12 / (peak * ENCODER_EFFICIENCY),
                3 * local * row_bytes, max(0.0, ring - loss))


def report(rows, ranks, case, chip):
    """Yield the lines of two tables: costs for this number of ranks and many batch sizes, and the shares of
    gathering and loss in a step for many numbers of ranks.

    case    the other arguments of step_costs
    """
    batches, rank_counts = sorted({*BATCH_SIZES, rows}), sorted({*RANK_COUNTS, ranks})
    sides = "1 gathered side" if case["sides"] == 1 else "2 gathered sides"
    link = case["link"] / 1e9
    yield f"{ranks} ranks of {chip.name}, {link:g} GB/s per rank; {sides} of {case['d']} features"
    yield f"encoder: {case['tflop']:g} TFLOP per row at {ENCODER_EFFICIENCY:.0%} of the tensor core peak"
    for head in (("batch", "rows", "keys", "grads", "memory", "gather", "loss", "encoder", "ring", "ring"),
                 ("", "per rank", "MB", "MB", "GB", "ms", "ms", "ms", "GB", "extra ms")):
        yield "".join(f"{title:>9}" for title in head)
    for rows in batches:
        step = step_costs(rows, ranks, **case)
        if step.local_rows >= 1:
            cells = (step.key_bytes / 1e6, step.gradient_bytes / 1e6, step.memory_bytes / 1e9,
                     1e3 * step.gather_seconds, 1e3 * step.loss_seconds, 1e3 * step.encoder_seconds,
                     step.ring_memory_bytes / 1e9, 1e3 * step.ring_extra_seconds)
            texts = format_count(rows), format_count(int(step.local_rows)), *map(three_digits, cells)
            yield "".join(f"{text:>9}" for text in texts)
    yield (f"% of a step: gathering + loss; !: gathering takes more than {MAX_TIME_SHARE:.0%}; "
           f"full: it needs more than {MAX_MEMORY_SHARE * chip.memory:g} GB")
    yield f"{'batch':>9}" + "".join(f"{ranks:>11,}" for ranks in rank_counts) + " ranks"
    for rows in batches:
        cells = (format_shares(step_costs(rows, ranks, **case), chip) for ranks in rank_counts)
        yield f"{format_count(rows):>9}" + "".join(f"{cell:>11}" for cell in cells)


def format_shares(step, chip):
    """Return a cell of the second table; "-" if there are more ranks than rows."""
    if step.local_rows < 1:
        return "-"
    if step.memory_bytes > MAX_MEMORY_SHARE * chip.memory * 1e9:
        return "full"
    percent = (step.gather_seconds + step.loss_seconds + step.encoder_seconds) / 100
    text = f"{step.gather_seconds / percent:.1f}+{step.loss_seconds / percent:.1f}"
    return text + "!" if step.gather_seconds > 100 * MAX_TIME_SHARE * percent else text


def format_count(rows):
    """Return for example "64k" for 65,536 and "1M" for 1,048,576."""
    for unit, size in (("M", 2 ** 20), ("k", 2 ** 10)):
        if rows >= size and rows % size == 0:
            return f"{rows // size}{unit}"
    return str(rows)


def three_digits(x):
    """Return x as text: three significant digits, one digit below 0.01, a whole number from 100 on."""
    if x >= 100:
        return f"{x:.0f}"
    return f"{x:.3g}" if x >= 0.01 or not x else f"{x:.1g}"
