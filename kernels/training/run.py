"""A run: ranks, --out, progress, resume, signals, metrics.

    run = Run(args, __file__)                        rank, world, device; an --out that cannot be is refused
    run.begin(model, optimizer, total)               a new folder, or --resume
    for step, rows in run.steps(total, len(data)):
        ...                                          forward, backward, sum_gradients, clip, optimizer.step()
        run.note(values)                             the numbers of the step
        if run.due and run.keeps(scores): ...        evaluate, and save the model
    run.done(text)

A rank's loss is its part of the global loss, so that the gradient, and every number that is noted, is a sum
over ranks. Ranks evaluate alike; the first one writes and speaks. torchrun starts them; without it nothing
distributed happens.
"""
import itertools
import json
import logging
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from kernels import choose_impl, similarity_lse

from . import output_dir, ranks, state
from .cli import STOPPED, Fault, clear_bar, fail, handle_signals, has_checkpoint, put, say, written
from .files import stamp
from .loop import batches
from .pretrained import first_not_finite
from .progress import Clock, peak_gb, step_line
from .trackers import open_tracker


class Run:
    """One training of one script. What is public: rank, world, device, out, script, bf16, step, due,
    progress.

    device     where the models of this rank live
    out        Path of --out
    bf16       whether encoders run under autocast to bfloat16, and losses multiply unit rows in float16
    step       the step at work, from 1; before the first the one that --resume goes on from, else 0
    due        whether an evaluation is due at this step
    progress   what state.pt keeps beside weights and optimizer; a script may put more into it
    known      {flag: checksum} of inputs that a script has read whole; others are read for it by begin
    clock      times training and evaluations; a script may say how long other work to come will take
    """

    def __init__(self, args, script):
        self.args, self.script, self.out = args, Path(script), Path(args.out)
        self.rank, self.world, self.device = ranks.rank(), ranks.world(), ranks.own_device()
        gpu = self.device.type == "cuda"
        args.precision = args.precision or ("bf16" if gpu else "fp32")
        self.bf16, self.step, self.due = args.precision == "bf16", 0, False
        self.impl = getattr(args, "impl", "auto")
        self.known = {}
        self.progress = {"step": 0, "before": None, "saved": None}
        self.clock, self.tracker = Clock(), open_tracker(args)
        transformers.utils.logging.set_verbosity(logging.CRITICAL)
        transformers.utils.logging.disable_progress_bar()
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        if not args.evaluate:
            self.prepare(args)
        if gpu and self.bf16:  # tensor cores also for what autocast leaves in float32
            torch.set_float32_matmul_precision("high")
        torch.manual_seed(args.seed)
        try:                                                   # before anything is read or written
            similarity_lse(torch.zeros(1, 16, device=self.device), impl=self.impl)
        except ValueError as error:
            fail(f"--{error}")

    def prepare(self, args):
        """What training wants and --evaluate does not: an --out that can be, and the other ranks."""
        self.was = stamp(str(args.data))
        if args.batch_size < self.world:
            fail(f"--batch-size {args.batch_size} is less than a row for each of {self.world} processes")
        output_dir.check_out(self.out, args.resume, args.data)
        ranks.join(self.device)

    def begin(self, model, optimizer, total, warmup=0):
        """Starts a folder with the flags and the code that runs, or continues the run that is there.

        total, warmup   steps of the run, and how many of them the learning rate rises for
        """
        self.model, self.optimizer, self.total, args = model, optimizer, total, self.args
        if os.path.isfile(str(args.data)) and stamp(str(args.data)) != self.was:
            fail(f"{args.data}: changed while it was read; leave it as it is, and start again")
        self.inputs = output_dir.fingerprints(args, self.known)
        kernels = ""
        if hasattr(args, "impl"):                              # not every loss compares rows with each other
            kernels = f"kernels {choose_impl(args.impl, torch.empty(0, device=self.device))}, "
        say("run", f"seed {args.seed}, {self.world} × {self.device.type}, {args.precision}, "
                   f"{kernels}{total:,} steps of {args.batch_size}, writing {args.out}")
        if warmup >= total:
            say("note", f"the learning rate rises for {warmup:,} steps, but the run has {total:,}: it never "
                        "reaches --lr; shorten the warm-up, or train longer (--epochs, --steps)")
        torch.manual_seed(args.seed + self.rank)  # ranks have equal weights and different dropout
        with output_dir.locked(self.out, args.resume, self.rank) as self.lock:
            rows = self.load_state() if args.resume and output_dir.has_run(self.out) else []
        if args.resume and not self.step:
            say("resume", f"no checkpoint in {args.out} yet: from the beginning")
        if self.rank == 0:
            output_dir.write_whole(self.out / "metrics.jsonl", "".join(rows))
            if not self.step:
                output_dir.write_code(self.out, self.script, self.flags())
            if self.tracker:
                self.tracker.begin(self.out, self.flags(), self.progress)

    def flags(self):
        """What --resume wants to be as it was, and the command, from which --resume takes flags."""
        free = "resume", "out", "keep_state", "workers", "log"
        kept = {name: value for name, value in vars(self.args).items() if name not in free}
        return kept | dict(data=str(self.args.data), world=self.world, inputs=self.inputs)

    def steps(self, total, rows=None, least=None):
        """Yields (step, row numbers of the global batch) for each step that is left; between two of them it
        writes metrics and state, and stops where it was asked to.

        rows    how many there are to draw from, or their numbers; None: the script draws its own
        least   an epoch's last batch is left out where it has fewer rows; default one for each rank
        """
        args = self.args
        self.order = lambda step: itertools.repeat(None)
        if rows is not None:
            self.order = lambda step: batches(rows, args.batch_size, args.seed, step, least or self.world)
        self.signals = []
        handle_signals(self.hear)
        self.clock.start(self.step)
        self.first_bad = torch.zeros((), dtype=torch.int64, device=self.device)  # the step of such a loss
        for step, batch in zip(range(self.step + 1, total + 1), self.order(self.step)):
            self.step, self.values, self.shown = step, None, ""
            self.due = step % args.eval_every == 0 or step == total
            yield step, batch
            if self.due and self.values:
                self.clock.evaluated(self.clock.seconds() - self.noted)
            stop = self.asked_to_stop()
            if self.values and (self.due or stop or step % (1 + total // 40) == 0):
                if not self.due:                               # else note has looked
                    self.refuse_nan()
                self.report()
            if self.due or stop:
                self.progress["step"], began = step, self.clock.seconds()
                with written(self.out / "state.pt"):
                    self.save_state()
                self.clock.evaluated(self.clock.seconds() - began, count=0)
            if stop:
                kept = "saved; --resume continues" if args.keep_state != "never" else "--keep-state never"
                say("stopped", f"at step {step}, {kept}")
                sys.exit(STOPPED)
        heard, self.signals = self.signals, [None]             # what is still to come stops at once
        if heard:
            self.hear(heard[0], None)

    def note_before(self, scores):
        """Take the scores before the first step: row 0 of metrics.jsonl."""
        self.progress["before"] = scores
        if self.rank == 0:
            self.write_metrics({"step": 0, **{f"dev_{name}": value for name, value in scores.items()}})

    def note(self, values, **more):
        """Takes the numbers of this step, "loss" among them. Tensors are this rank's parts of sums over
        ranks."""
        self.values = values | more
        if torch.is_tensor(values["loss"]):
            bad = (self.first_bad == 0) & ~values["loss"].isfinite()
            self.first_bad = torch.where(bad, self.step, self.first_bad)
        if self.due:
            self.refuse_nan()
        self.noted = self.clock.seconds()

    def keeps(self, scores, by=None, shown=""):
        """Takes the scores of an evaluation; returns whether to save the model: if scores[by] is the best so
        far, and without `by` always, so that the last checkpoint is kept.

        scores   {name: number}, which metrics.jsonl gets as dev_name
        shown    the score that the progress line shows, as a text
        """
        saved = self.progress["saved"]
        better = not scores or by is None or saved is None or scores[by] > saved[by]
        word, self.shown = "saved" if by is None else "best", shown
        self.values |= {f"dev_{name}": value for name, value in scores.items()} | {word: better}
        if better:
            self.progress["saved"] = {"step": self.step, **scores}
        return better

    def done(self, text):
        """Ends a run: removes what only an unfinished one needs, and says how long it took."""
        if self.rank == 0:
            (self.out / output_dir.RUNNING).unlink(missing_ok=True)
        if self.rank == 0 and self.args.keep_state == "running":
            (self.out / "state.pt").unlink(missing_ok=True)
        minutes, seconds = divmod(round(self.clock.seconds()), 60)
        say("done", f"{text}{minutes} min {seconds} s, peak {peak_gb(self.device):.1f} GB")

    def hear(self, number, _):
        """A signal waits for the end of a step; a second one, and one behind the last step, does not."""
        text = b"stopping when this step is done and saved; once more, and at once\n"
        if self.signals == [None]:
            text = b"stopped  behind the last step; the checkpoint is whole\n"
        elif self.signals:
            text = b""
        if self.rank == 0:                                     # print is not reentrant
            os.write(1, b"\n" * sys.stdout.isatty() + text)
        if self.signals:
            sys.exit(STOPPED)
        self.signals.append(number)

    def asked_to_stop(self):
        """Whether a signal came on any rank; ranks agree every tenth step."""
        if self.world == 1 or self.step % 10:
            return bool(self.signals) and self.world == 1
        asked = torch.tensor(float(bool(self.signals)), device=self.device)
        dist.all_reduce(asked)
        return asked.item() > 0

    def where(self, step):
        """What a message calls the data of a step; a script with an order of its own replaces it."""
        return f"rows {', '.join(str(row + 1) for row in next(self.order(step - 1))[:20])}, ..."

    def refuse_nan(self):
        """Ends the run if a loss was not finite, or a weight is not now: at which step, in which data, and
        what is left."""
        if self.world > 1:
            dist.all_reduce(self.first_bad, dist.ReduceOp.MAX)
        step, what = int(self.first_bad), "the loss is not finite"
        if not step:
            name = first_not_finite(self.model)
            what = name and f"{name} holds NaN or infinity"
        if what:
            left, saved = "there is no checkpoint", self.progress["step"]
            if saved and self.args.keep_state != "never":
                left = f"the checkpoint of step {saved} in {self.args.out} is whole"
            step = step or self.step
            fail(f"step {step}: {what}; {self.where(step)} of --data; {left}; try a lower --lr")

    def report(self):
        """A row of metrics.jsonl, and a bar on a terminal or a line in a log."""
        values, step, total = self.values, self.step, self.total
        for name in values:
            if torch.is_tensor(values[name]):
                if self.world > 1:
                    dist.all_reduce(values[name])
                values[name] = values[name].item()
        if self.rank == 0:
            row = {"step": step, **values, "seconds": round(self.clock.seconds(), 3)}
            self.write_metrics(row)
            line = step_line(self.clock, row, total, self.args, self.shown)
            evaluated = {"best", "saved"} & values.keys()
            put(clear_bar(sys.stdout) + line, end="" if sys.stdout.isatty() and not evaluated else "\n")

    def write_metrics(self, row):
        """Appends a row to metrics.jsonl and sends it to --log."""
        output_dir.check_lock(self.out, self.lock)
        with written(self.out / "metrics.jsonl"), open(self.out / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
            output_dir.sync(file)
        if self.tracker:
            with written(self.out):
                self.tracker.log(row)

    def save_state(self):
        """state.pt: see module state."""
        cuda = self.device.type == "cuda"
        self.random = [[torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None]] * self.world
        if self.world > 1:
            dist.all_gather_object(self.random, self.random[0])
        if self.rank == 0 and self.args.keep_state != "never":
            output_dir.check_lock(self.out, self.lock)
            state.write_state(self.out / "state.pt", self)
            has_checkpoint(True)

    def load_state(self):
        """Continues from state.pt, where it is there; other flags than it had are refused. Returns the rows
        of metrics.jsonl up to its step."""
        there, rows = (self.out / "state.pt").is_file(), []
        output_dir.check_files(self.out, f"--out {self.out}")
        try:
            was = json.loads((self.out / "args.json").read_text())
            output_dir.refuse_changes(was, self.flags(), self.out)
            if there:
                state.read_state(self.out / "state.pt", self)
                self.step = self.progress["step"]
                rows = state.read_rows(self.out / "metrics.jsonl", self.step)
        except Fault:
            raise
        except Exception as error:                             # a damaged file has many ways to fail
            what = f": {error}".splitlines()[0] if type(error) is ValueError else ""
            fail(f"--resume: {self.out} holds a damaged state.pt, model, args.json or metrics.jsonl "
                 f"({type(error).__name__}{what}); start a new run in another folder")
        has_checkpoint(there)
        return rows
