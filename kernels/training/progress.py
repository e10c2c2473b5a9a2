"""Progress of long work: a bar on a terminal, lines in a log, and the remaining time."""
import resource
import sys
import time
from types import SimpleNamespace

import torch
from tqdm import tqdm

from .errors import is_first_rank, one_line, write

QUIET_SECONDS = 2                                              # on a terminal, shorter work shows no progress
LOG_SECONDS = 30                                               # time between two lines in a log
LOG_FORMAT = "{desc}: {n_fmt} of {total_fmt}{unit}, {remaining} left\n"     # tqdm's format of a line in a log


def progress(items, name, unit="", **more):
    """Return a tqdm iterator over items, which shows progress after 2 seconds (in a log, every 30 seconds).

    items   an iterable. None: the caller passes total=, and calls update(n) on the result
    name    name of the work in the bar or line
    more    arguments of tqdm, such as total=
    """
    is_terminal = sys.stderr.isatty()
    log_file = SimpleNamespace(write=lambda text: write(text, sys.stderr), flush=lambda: None)
    return tqdm(items, one_line(name), unit=unit, disable=not is_first_rank(), delay=QUIET_SECONDS,
                file=None if is_terminal else log_file,
                leave=not is_terminal, mininterval=0.1 if is_terminal else LOG_SECONDS,
                bar_format=None if is_terminal else LOG_FORMAT, **more)


class Clock:
    """Measures the time of a training loop. Evaluations are pauses: they do not count as training time. Run
    adds their time to paused_seconds."""

    def __init__(self):
        self.start(0)

    def start(self, step):
        """Start to measure a loop, whose first step is the one after `step`."""
        self.began, self.first_step, self.paused_seconds = time.perf_counter(), step, 0.0

    def seconds(self):
        """Return the seconds since start() was called."""
        return time.perf_counter() - self.began

    def seconds_per_step(self, step):
        """Return the mean time in seconds of the training steps up to `step`, without pauses."""
        return max(1e-9, (self.seconds() - self.paused_seconds) / (step - self.first_step))

    def seconds_left(self, step, total):
        """Return the expected seconds until the end of the run, from the mean speed so far (pauses count)."""
        return self.seconds() * (total - step) / (step - self.first_step)


def step_line(clock, row, total, args, score=""):
    """Return the progress line of a step: bar, loss, learning rate, rows per second, remaining time, score.

    row     the step's row of metrics.jsonl
    score   the evaluation's score as text; "" at a step without evaluation
    """
    step, done = row["step"], 16 * row["step"] // total
    left = round(clock.seconds_left(step, total))
    speed = args.batch_size / clock.seconds_per_step(step)
    line = (f"{step:7,}/{total:,} {'━' * done}{'─' * (16 - done)}  loss {row['loss']:.4f}  "
            f"lr {row['lr']:.1e}  {speed:,.0f} rows/s  left {left // 60}:{left % 60:02}")
    if score:
        words = [word for word in ("best", "saved") if row.get(word)]
        line += " ".join([f"  dev {score}", *words])
    return line


def peak_gb(device):
    """Return the peak memory use so far in GB: of the GPU, or of this process if `device` is not a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
