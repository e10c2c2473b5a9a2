"""Progress of long work: a bar on a terminal, lines in a log, and the remaining time."""
import contextlib
import math
import sys
import time

import torch

from .cli import is_first_rank, log, one_line

QUIET_SECONDS = 2                                              # work that takes less shows nothing
LINE_WITH_TOTAL = "{desc}: {n_fmt} of {total_fmt}{unit}, {remaining} left"     # format of tqdm
LINE_WITHOUT_TOTAL = "{desc}: {n_fmt}{unit} so far, {elapsed}"


def progress(items, name, unit="", **more):
    """Return a tqdm iterator over items, which shows progress once the work takes more than two seconds.

    items   an iterable; None: call update(n) on the returned object, and pass total=
    name    name of the work in the bar or line
    more    arguments of tqdm, such as total=
    """
    from tqdm import tqdm  # a dependency of transformers
    if not sys.stderr.isatty():
        total = more.get("total", len(items) if hasattr(items, "__len__") else None)
        more |= dict(file=LogFile(), mininterval=QUIET_SECONDS,
                     bar_format=LINE_WITHOUT_TOTAL if total is None else LINE_WITH_TOTAL)
    shown = dict(leave=False, disable=not is_first_rank(), unit=unit, delay=QUIET_SECONDS)
    return tqdm(items, one_line(name), **shown, **more)


class LogFile:
    """Replaces the terminal for tqdm: logs a line after two seconds, then more and more rarely."""

    def __init__(self):
        self.began, self.wait = time.monotonic(), QUIET_SECONDS

    def write(self, text):
        seconds = time.monotonic() - self.began
        if text.strip() and seconds >= self.wait:
            self.wait = seconds + max(10, seconds / 4)
            log("working", text.strip())

    def flush(self):
        pass


@contextlib.contextmanager
def announce_compilation():
    """Context manager: log a line if Triton is still compiling kernels after two seconds.

    Kernels that an earlier run has compiled are in Triton's cache on disk; loading them is not announced.
    """
    from triton import knobs
    began, previous, announced = time.monotonic(), knobs.compilation.listener, False

    def on_compiled(*, cache_hit, **more):
        nonlocal announced
        if previous is not None:
            previous(cache_hit=cache_hit, **more)
        if not cache_hit and not announced and time.monotonic() - began >= QUIET_SECONDS:
            announced = True
            log("working", "first step: compiling kernels for this GPU; later runs will find them in a cache")

    knobs.compilation.listener = on_compiled
    yield
    knobs.compilation.listener = previous


class Clock:
    """Times a run. Evaluations and other work do not count as training.

    first_step            the loop starts after this step
    evaluations           number of evaluations, which took eval_seconds together
    excluded_seconds      seconds of other work
    expected_eval         expected seconds of an evaluation, used before the first one
    expected_other        expected seconds of later work that is neither a step nor an evaluation
    """

    def __init__(self):
        self.began, self.first_step = time.perf_counter(), 0
        self.evaluations, self.eval_seconds, self.excluded_seconds = 0, 0.0, 0.0
        self.expected_eval, self.expected_other = 0.0, 0.0

    def start(self, step):
        """Start timing: the loop begins after this step."""
        self.began, self.first_step, self.excluded_seconds = time.perf_counter(), step, 0.0

    def seconds(self):
        """Return the seconds since start."""
        return time.perf_counter() - self.began

    def evaluated(self, seconds, count=1):
        """Add the seconds of an evaluation; with count=0, add them to the last evaluation."""
        self.evaluations += count
        self.eval_seconds += seconds

    @contextlib.contextmanager
    def exclude(self, repeats=0.0, evaluation=False):
        """Context manager: do not count the time of the block as training time.

        repeats      number of later blocks of about this duration, for the remaining time; the evaluations
                     during training do not count
        evaluation   whether the block is an evaluation; its time then predicts the time of later evaluations
        """
        began = self.seconds()
        yield
        seconds = self.seconds() - began
        self.excluded_seconds += seconds
        self.expected_other = repeats * seconds
        if evaluation:
            self.expected_eval = seconds

    def seconds_per_step(self, step):
        """Return the mean seconds of a training step, up to this step."""
        return (self.seconds() - self.eval_seconds - self.excluded_seconds) / (step - self.first_step)

    def seconds_left(self, step, total, eval_every):
        """Return the expected seconds until the end of the run.

        eval_every   steps between evaluations; there is one at the end, too
        """
        evaluations = total // eval_every - step // eval_every
        if total % eval_every and step < total:
            evaluations += 1
        mean = self.eval_seconds / self.evaluations if self.evaluations else self.expected_eval
        return self.seconds_per_step(step) * (total - step) + mean * evaluations + self.expected_other


def step_line(clock, row, total, args, score=""):
    """Return the progress line of a step: bar, loss, learning rate, rows per second, remaining time, score.

    row     the step's row of metrics.jsonl
    score   text of the score of an evaluation
    """
    step, done = row["step"], 16 * row["step"] // total
    left = round(clock.seconds_left(step, total, args.eval_every))
    speed = args.batch_size / clock.seconds_per_step(step)
    line = (f"{step:7,}/{total:,} {'━' * done}{'─' * (16 - done)}  loss {row['loss']:.4f}  "
            f"lr {row['lr']:.1e}  {speed:,.0f} rows/s  left {left // 60}:{left % 60:02}")
    if score:
        words = [word for word in ("best", "saved") if row.get(word)]
        line += " ".join([f"  dev {score}", *words])
    return line


def peak_gb(device):
    """Return the largest memory in use so far, in GB: of the GPU, or of this process without a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    try:
        import resource
    except ImportError:                                        # Windows
        return math.nan
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
