"""The class Run manages a training run: ranks, --out, steps, metrics, checkpoints, --resume, signals.

    run = Run(args, __file__)                            check --out, set up rank, world_size, device
    run.begin(model, optimizer, total)                   start a new folder, or continue with --resume
    for step, rows in run.steps(total, len(data)):
        ...                                              forward, backward, all_reduce_gradients, clip, step
        run.log_metrics(values)                          record this step's numbers, which include "loss"
        if run.eval_due and run.should_save(scores):     scores: the results of an evaluation
            ...                                          save the model
    run.finish(text)                                     end the run; print text, duration, peak memory

Each rank computes its share of the global loss. Gradients and logged numbers are therefore summed over ranks.
All ranks evaluate, but only rank 0 prints and writes files. Without torchrun there is one process, which does
not use torch.distributed.
"""
import contextlib
import functools
import itertools
import json
import logging
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from kernels import VERSION, choose_impl, similarity_lse

from . import out, ranks
from .errors import EXIT_STOPPED, UserError, clear_bar, fail, log, signals_handled_by, write
from .loop import batches
from .progress import Clock, peak_gb, step_line

MAY_CHANGE = "resume out keep_state workers probe_epochs command given".split()  # --resume may change these


class Run:
    """One training run of a script.

    rank, world_size   index of this process, and number of processes
    device             torch.device of this rank's models
    out                Path of --out
    bf16               whether encoders run under bfloat16 autocast, and losses multiply unit rows in float16
    impl               --impl, the implementation of the loss
    step               current step, counted from 1; before the loop: 0, or the step of the loaded state.pt
    eval_due           whether to evaluate at this step
    extra_state        dict saved in state.pt in addition to weights and optimizer; scripts may add entries
    clock              progress.Clock, which times training and evaluations
    """

    def __init__(self, args, script):
        self.args, self.script, self.out = args, Path(script), Path(args.out)
        self.rank, self.world_size, self.device = ranks.rank(), ranks.world_size(), ranks.local_device()
        gpu = self.device.type == "cuda"
        args.precision = args.precision or ("bf16" if gpu else "fp32")
        self.bf16, self.step, self.eval_due = args.precision == "bf16", 0, False
        self.impl = getattr(args, "impl", "auto")
        self.extra_state = {"step": 0, "before": None, "saved": None}
        self.clock, self.lock = Clock(), None
        transformers.utils.logging.set_verbosity(logging.CRITICAL)
        transformers.utils.logging.disable_progress_bar()
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        if not args.evaluate:                                  # --evaluate needs no --out and no other ranks
            if args.batch_size < self.world_size:
                fail(f"--batch-size {args.batch_size}: expected at least {self.world_size}, one row per "
                     "process")
            out.check_out(args)
            ranks.join_group(self.device)
        if gpu and self.bf16:                                  # float32 products outside autocast use TF32
            torch.set_float32_matmul_precision("high")
        torch.manual_seed(args.seed)
        try:                                                   # fail now if --impl cannot run here
            similarity_lse(torch.zeros(1, 16, device=self.device), impl=self.impl)
        except ValueError as error:
            fail(f"--{error}")                                 # the error begins with "impl", the flag's name

    def begin(self, model, optimizer, total, warmup=0, then=""):
        """Start a new run in --out, with a copy of its flags and script; or, with --resume, continue the run.

        total    number of training steps
        warmup   number of steps of learning-rate warm-up
        then     what follows the training steps, for the printed line, such as ", then a linear probe"
        """
        self.model, self.optimizer, self.total, args = model, optimizer, total, self.args
        if "eval_every" not in args.given:                     # evaluate at least four times, if possible
            args.eval_every = max(1, min(args.eval_every, total // 4))
        ranks.check_agreement({name: value for name, value in self.settings().items() if name != "data"})
        impl = choose_impl(self.impl, torch.empty(0, device=self.device))      # the choice for a large batch
        where = "PyTorch" if impl != "triton" else "Triton" if self.impl == impl else "PyTorch or Triton"
        losses = f"losses in {where}, " if hasattr(args, "impl") else ""
        log("run", f"seed {args.seed}, {self.world_size} × {self.device.type}, {args.precision}, "
                   f"{losses}{total:,} steps of {args.batch_size}{then}, writing {args.out}")
        if warmup >= total:
            log("note", f"the warm-up has {warmup:,} steps, but the run has only {total:,}: the learning "
                        "rate never reaches --lr; shorten the warm-up, or train longer (--epochs, --steps)")
        torch.manual_seed(args.seed + self.rank)               # from now on, random numbers differ by rank
        has_run = any((self.out / name).is_file() for name in ("args.json", "state.pt"))
        if args.resume and has_run and self.rank == 0:
            self.lock = out.lock(self.out)
        rows = self.load_state() if args.resume and has_run else []
        if args.resume and not self.step:
            log("resume", f"no checkpoint in {args.out} yet: starting from the beginning")
        if self.rank == 0:
            if not self.step:
                self.start_folder()
            with out.atomic_file(self.out / "metrics.jsonl") as file:
                file.writelines(rows)

    @functools.cached_property
    def inputs(self):
        """{flag: checksum of its inputs}, computed only once."""
        return out.fingerprints(self.args)

    def settings(self):
        """Return the settings that --resume must not change: flags, number of processes, input checksums."""
        fixed = {name: value for name, value in vars(self.args).items() if name not in MAY_CHANGE}
        return fixed | dict(world=self.world_size, inputs=self.inputs)

    def start_folder(self):
        """Mark the run in --out as unfinished, and write args.json and a copy of the script.

        args.json contains the settings, the version of the package kernels, and the command line. --resume
        uses the flags of this command line, unless they are given again.
        """
        with out.writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
            self.lock = self.lock or out.lock(self.out, create=True)
            for file in self.script.parent.glob(f"{self.script.stem}*.py"):   # such as cil.py and cil_bags.py
                (self.out / file.name).write_bytes(file.read_bytes())
        with out.atomic_file(self.out / "args.json") as file:
            more = dict(command=self.args.command, kernels=VERSION)
            json.dump(self.settings() | more, file, indent=1)

    def steps(self, total, rows=None, min_rows=2):
        """Yield (step, row indices of the global batch) for each remaining step.

        After each step, write metrics and state if they are due, and stop if a signal came.

        rows       number of rows to sample from. None: yield None as row indices
        min_rows   skip the last batch of an epoch if it has fewer rows than this
        """
        args, order = self.args, itertools.repeat(None)
        if rows is not None:
            order = batches(rows, args.batch_size, args.seed, self.step, min_rows)
        self.signals = []
        self.clock.start(self.step)
        # First step whose loss is not finite; 0: none. It is on the device, so no step waits for the GPU.
        self.first_bad_step = torch.zeros((), dtype=torch.int64, device=self.device)
        with signals_handled_by(self.on_signal):
            for step, batch in zip(range(self.step + 1, total + 1), order):
                self.step, self.values, self.shown_score = step, None, ""
                self.eval_due = step % args.eval_every == 0 or step == total
                yield step, batch
                self.end_step(self.asked_to_stop())

    def end_step(self, stop):
        """Write the metrics and the state of this step if they are due, and exit if `stop` is true."""
        if self.eval_due:
            self.clock.paused_seconds += self.clock.seconds() - self.logged_at
        if self.eval_due or stop or self.step % (1 + self.total // 40) == 0:
            if not self.eval_due:                              # else log_metrics has called check_finite
                self.check_finite()
            self.report()
        if self.eval_due or stop:
            self.extra_state["step"] = self.step
            self.save_state()
        if stop:
            kept = "saved; --resume continues" if self.args.keep_state != "never" else "--keep-state never"
            log("stopped", f"at step {self.step}, {kept}")
            sys.exit(EXIT_STOPPED)

    def log_initial_scores(self, scores):
        """Record the scores before the first step, as the row of step 0 in metrics.jsonl."""
        self.extra_state["before"] = scores
        if self.rank == 0:
            self.write_metrics({"step": 0, **{f"dev_{name}": value for name, value in scores.items()}})

    def log_metrics(self, values, **more):
        """Record the numbers of this step.

        values   {name: number or tensor}, which must contain "loss". A tensor is this rank's share: the
                 shares of all ranks are summed. A number must be equal on all ranks
        more     further values, such as lr=...
        """
        self.values = values | more
        if torch.is_tensor(values["loss"]):
            is_first = (self.first_bad_step == 0) & ~values["loss"].isfinite()
            self.first_bad_step = torch.where(is_first, self.step, self.first_bad_step)
        if self.eval_due:
            self.check_finite()
        self.logged_at = self.clock.seconds()

    def should_save(self, scores, by=None, shown=""):
        """Record the scores of an evaluation, and return whether to save the model now.

        scores    {name: number}, written to metrics.jsonl as dev_NAME
        by        name of a score: save only if this score is the highest so far. None: always save
        shown     the score as text for the progress line
        """
        saved = self.extra_state["saved"]
        better = not scores or by is None or saved is None or scores[by] > saved[by]
        self.shown_score = shown
        word = "best" if by and scores else "saved"
        self.values |= {f"dev_{name}": value for name, value in scores.items()} | {word: better}
        if better:
            self.extra_state["saved"] = {"step": self.step, **scores}
        return better

    def finish(self, text):
        """End the run: delete what only an unfinished run needs; print `text`, duration and peak memory."""
        if self.rank == 0:
            (self.out / out.UNFINISHED).unlink(missing_ok=True)
            for name in ("tokens", "guide-tokens"):            # tokenise_table wrote these folders
                shutil.rmtree(self.out / name, ignore_errors=True)
            if self.args.keep_state == "running":
                (self.out / "state.pt").unlink(missing_ok=True)
        minutes, seconds = divmod(round(self.clock.seconds()), 60)
        log("done", f"{text}{minutes} min {seconds} s, peak {peak_gb(self.device):.1f} GB")

    def on_signal(self, number, _):
        """Signal handler. First signal: stop after a step (see asked_to_stop). Second signal: exit now."""
        if self.signals:
            sys.exit(EXIT_STOPPED)
        self.signals.append(number)
        if self.rank == 0:                                     # unlike print, os.write is safe in a handler
            with contextlib.suppress(OSError):                 # stdout may be a closed pipe
                os.write(1, b"\nstopping soon, at the end of a step; press Ctrl-C again to stop now\n")

    def asked_to_stop(self):
        """Return whether any rank received a signal. With several ranks, check only at every tenth step."""
        if self.world_size == 1:
            return bool(self.signals)
        if self.step % 10:
            return False
        asked = torch.tensor(float(bool(self.signals)), device=self.device)
        dist.all_reduce(asked)
        return asked.item() > 0

    def check_finite(self):
        """Fail if a weight, or the loss of any step so far, is NaN or infinite, and name the step."""
        if self.world_size > 1:
            dist.all_reduce(self.first_bad_step, dist.ReduceOp.MAX)
        step, problem = int(self.first_bad_step), "the loss is not finite"
        if not step:
            tensors = self.model.state_dict()
            name = next((name for name, x in tensors.items() if not x.isfinite().all()), None)
            step, problem = self.step, name and f"{name} contains NaN or infinity"
        if problem:
            checkpoint, saved = "there is no checkpoint", self.extra_state["step"]
            if saved and self.args.keep_state != "never":
                checkpoint = f"the checkpoint of step {saved} in {self.args.out} is complete"
            fail(f"step {step}: {problem}; {checkpoint}; try a lower --lr")

    def report(self):
        """Write this step's row of metrics.jsonl. Print a progress bar on a terminal, or a line in a log."""
        values, step, total = self.values, self.step, self.total
        for name in values:
            if torch.is_tensor(values[name]):
                if self.world_size > 1:
                    dist.all_reduce(values[name])
                values[name] = values[name].item()
        if self.rank == 0:
            row = {"step": step, **values, "seconds": round(self.clock.seconds(), 3)}
            self.write_metrics(row)
            line = step_line(self.clock, row, total, self.args, self.shown_score)
            on_bar = sys.stdout.isatty() and not self.eval_due
            write(clear_bar(sys.stdout) + line + ("" if on_bar else "\n"), sys.stdout)

    def write_metrics(self, row):
        """Append a row to metrics.jsonl."""
        with out.writing(self.out / "metrics.jsonl"), open(self.out / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")

    def save_state(self):
        """Write state.pt: all that the next step depends on, including the random states of all ranks."""
        on_gpu = self.device.type == "cuda"
        own = [torch.get_rng_state(), torch.cuda.get_rng_state() if on_gpu else None]
        rng_states = [own] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(rng_states, own)
        if self.rank == 0 and self.args.keep_state != "never":
            with out.atomic_file(self.out / "state.pt", "wb") as file:
                torch.save(dict(progress=self.extra_state, random=rng_states, model=self.model.state_dict(),
                                optimizer=self.optimizer.state_dict()), file)

    def load_state(self):
        """Load state.pt if it exists, and return the rows of metrics.jsonl up to the step of this state. Fail
        if a flag or an input differs from the saved run, or if a file is damaged."""
        try:
            self.refuse_changes(json.loads((self.out / "args.json").read_text(encoding="utf-8")))
            if not (self.out / "state.pt").is_file():
                return []
            state = torch.load(self.out / "state.pt", map_location=self.device, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["random"][self.rank][0].cpu())
            if self.device.type == "cuda":
                torch.cuda.set_rng_state(state["random"][self.rank][1].cpu())
            self.extra_state |= state["progress"]
            self.step = self.extra_state["step"]
            with open(self.out / "metrics.jsonl", encoding="utf-8") as file:
                rows = [row for row in file if row.endswith("\n")]         # a kill may cut the last row
            return [row for row in rows if json.loads(row)["step"] <= self.step]
        except UserError:
            raise
        except Exception as error:                             # damaged files raise errors of many types
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            fail(f"--resume: args.json, state.pt or metrics.jsonl in {self.out} cannot be read ({reason}); "
                 "start a new run in another folder")

    def refuse_changes(self, saved):
        """Fail if a setting, or the content of an input, differs from `saved`, the dict in args.json."""
        now = json.loads(json.dumps(self.settings()))
        # --data is compared by its checksum; the default of --eval-every depends on the number of steps
        ignored = {"data", "inputs"} | ({"eval_every"} - {*self.args.given})
        for name in now:
            if name not in ignored and saved.get(name) != now[name]:
                hint = ""
                if name in ("steps", "epochs"):                # past learning rates depend on these flags
                    has_model = (self.out / "config.json").is_file()
                    hint = (f"; to train its model further, start a new run with --model {self.out} --out NEW"
                            if has_model else "; start a new run in another folder")
                fail(f"--resume: {name} was {saved.get(name)} in {self.out}, now it is {now[name]}{hint}")
        for name, checksum in now["inputs"].items():
            if saved["inputs"].get(name) != checksum:
                fail(f"--resume: the content of --{name.replace('_', '-')} {getattr(self.args, name)} has "
                     f"changed since the run in {self.out} was started; restore it, or start a new run in "
                     "another folder")
