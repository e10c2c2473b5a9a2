"""Progress of long work: a bar on a terminal, lines in a log, and the time that is left."""
import contextlib
import math
import sys
import time

from ..printing import one_line
from .cli import is_first_rank, say

QUIET = 2                                                      # seconds without a bar or a line
KNOWN = "{desc}: {n_fmt} of {total_fmt}{unit}, {remaining} left"
UNKNOWN = "{desc}: {n_fmt}{unit} so far, {elapsed}"


def progress(items, name, unit="", **more):
    """Iterate over items and show how far the work is, once it takes more than two seconds.

    items   an iterable, or None: then call update(n) of what this returns, and give a total
    name    what the bar or the line calls the work
    more    arguments of tqdm, for example total=
    """
    from tqdm import tqdm  # comes with transformers
    if not sys.stderr.isatty():
        total = more.get("total", len(items) if hasattr(items, "__len__") else None)
        more |= dict(file=Log(), bar_format=UNKNOWN if total is None else KNOWN, mininterval=QUIET)
    shown = dict(leave=False, disable=not is_first_rank(), unit=unit, delay=QUIET)
    return tqdm(items, one_line(name), **shown, **more)


class Log:
    """What tqdm writes to where there is no terminal: one line after two seconds, then fewer and fewer."""

    def __init__(self):
        self.began, self.wait = time.monotonic(), QUIET

    def write(self, text):
        seconds = time.monotonic() - self.began
        if text.strip() and seconds >= self.wait:
            self.wait = seconds + max(10, seconds / 4)
            say("working", text.strip())

    def flush(self):
        pass


class Clock:
    """Times a run. Evaluations and other work inside the loop do not count as training.

    later   expected seconds of work beside steps and evaluations, for example of test sets
    """

    def __init__(self):
        self.began, self.first, self.later = time.perf_counter(), 0, 0.0
        self.evaluations, self.evaluating, self.elsewhere = 0, 0.0, 0.0
        self.expected = 0.0                                    # seconds of an evaluation, before there is one

    def start(self, step):
        """Start timing: the loop begins after this step."""
        self.began, self.first, self.elsewhere = time.perf_counter(), step, 0.0

    def seconds(self):
        return time.perf_counter() - self.began

    def evaluated(self, seconds, count=1):
        """Add the seconds of an evaluation; with count=0 of work that belongs to the last one."""
        self.evaluations += count
        self.evaluating += seconds

    @contextlib.contextmanager
    def apart(self, again=0.0, evaluation=False):
        """Work within the block is not training; it will be done again so many times, besides evaluations if
        it is an evaluation."""
        began = self.seconds()
        yield
        seconds = self.seconds() - began
        self.elsewhere += seconds
        self.later = again * seconds
        if evaluation:
            self.expected = seconds

    def pace(self, step):
        """Seconds per training step."""
        return (self.seconds() - self.evaluating - self.elsewhere) / (step - self.first)

    def left(self, step, total, every):
        """Expected seconds until the run is done, with an evaluation every so many steps and at the end."""
        evaluations = total // every - step // every
        if total % every and step < total:
            evaluations += 1
        mean = self.evaluating / self.evaluations if self.evaluations else self.expected
        return self.pace(step) * (total - step) + mean * evaluations + self.later


def step_line(clock, row, total, args, score=""):
    """The line of a step: a bar, loss and learning rate of its row of metrics, the speed of training, the
    time that is left, and the score of an evaluation."""
    step, done = row["step"], 16 * row["step"] // total
    left, speed = round(clock.left(step, total, args.eval_every)), args.batch_size / clock.pace(step)
    line = (f"{step:7,}/{total:,} {'━' * done}{'─' * (16 - done)}  loss {row['loss']:.4f}  "
            f"lr {row['lr']:.1e}  {speed:,.0f} rows/s  left {left // 60}:{left % 60:02}")
    if score:
        kept = [word for word in ("best", "saved") if row.get(word)]
        line += " ".join([f"  dev {score}", *kept])
    return line


def peak_gb(device):
    """The most memory that was in use: of the GPU, else of this process."""
    if device.type == "cuda":
        import torch
        return torch.cuda.max_memory_allocated() / 2**30
    try:
        import resource
    except ImportError:                                        # Windows
        return math.nan
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
