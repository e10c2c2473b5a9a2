"""Faults at each stage of a run: signals, kill -9, full disks, little memory, data and folders that vanish, a
second run, workers that die.

A row says at which stage what happens and what must come of it. `at` names the functions of ours that are
called until the stage begins (cases.watch). With again=() the run then resumes, and must end in the bits of a
run that was left alone.
"""
import itertools
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
from cases import SCRIPTS, Case
from pictures import photos

case = partial(Case, "faults", late=True)
usual = partial(case, usual=True)
FLAGS = ["--steps", 3, "--eval-every", 2, "--keep-state", "always"]
SENTENCES = ["simcse", "selfguided", "ease", "vascl", "dclr"]
MORE = {"childtuning": ["--dev", "topics.tsv", "--mode", "D", "--fisher-samples", "4"],
        **{script: ["--dev", "sts.tsv"] for script in SENTENCES}}
SIMCSE = [*FLAGS, *MORE["simcse"]]
PHOTOS = photos()


# ── signals ──

FIRST, LAST = "before anything was saved", "behind the last step; the checkpoint is whole"
STEP = "at step {}, saved; --resume continues"
# stage: (names for `at`, what a run says that a signal stops there)
STAGES = {
    "reading data": ("load_data", FIRST), "reading held-out data": ("load_sts", FIRST),
    "building the model": ("build_model", FIRST), "copying code": ("write_code", FIRST),
    "tokenising": ("tokenise_table", FIRST), "the first evaluation": ("note_before", FIRST),
    "a step": ("sum_gradients", STEP.format(1)), "an evaluation": ("keeps", STEP.format(2)),
    "saving weights": ("new_files", STEP.format(2)), "saving state.pt": ("write_state", STEP.format(3)),
    "the end": ("done", LAST)}
LACKING = {script: ("load_sts", "tokenise_table") for script in SCRIPTS if script not in SENTENCES}
LACKING["childtuning"] += ("note_before",)
SIGNALS = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT]


def send(kind, group=False):
    """A signal to this process, or to all that it started too, as a terminal does."""
    os.killpg(0, kind) if group else signal.raise_signal(kind)


kill = partial(send, signal.SIGKILL)


def of_signals():
    for script, shift in zip(SCRIPTS, itertools.cycle(range(3))):
        kinds = itertools.islice(itertools.cycle(SIGNALS), shift, None)
        for (stage, (names, said)), kind in zip(STAGES.items(), kinds):
            if names not in LACKING.get(script, ()):
                yield case(f"{kind.name}: {stage}", script, [*FLAGS, *MORE.get(script, [])], wanted="stopped",
                           says=said, at=(names, partial(send, kind, kind != signal.SIGTERM)), again=(),
                           usual=script == "simcse")
    for script, kind in zip(SCRIPTS, SIGNALS):
        yield case(f"{kind.name}: its imports", script, wanted="stopped", says=FIRST, shell="", asked=kind)


KILLS = {"before there is a checkpoint": "write_code", "half of args.json": "write_code write_whole sync",
         "half of the tokens": "write_tokens tokenise", "metrics without a checkpoint": "write_metrics sync",
         "weights without state.pt": "new_files write_state", "state.pt is written": "write_state sync",
         "the end": "done"}
HALVES = {"half of the weights": ("new_files", 10_000), "half of state.pt": ("write_state", 5_000),
          "half of a second state.pt": ("write_state write_state", 5_000)}


def kill_while_writing(size):
    """The signal of a file that grows too large ends the process as kill -9 does, within its write."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    full_disk(size)


def half_a_row():
    with open("out/metrics.jsonl", "a") as file:
        file.write('{"step": 3}\n{"st')
    kill()


def of_kills():
    stopped = partial(usual, script="simcse", argv=SIMCSE, wanted="killed", again=())
    for stage, names in KILLS.items():
        yield stopped(f"kill -9: {stage}", at=(names, kill))
    for stage, (names, size) in HALVES.items():
        yield stopped(f"kill -9: {stage}", at=(names, partial(kill_while_writing, size)))
    yield stopped("kill -9: a row of metrics.jsonl", at=("write_state sum_gradients", half_a_row))
    yield stopped("kill -9: --resume begins", at=("write_state sum_gradients", kill),
                  then=[("begin write_whole sync", kill)])
    for script, kills in [("simcse", 3), ("moco", 3), *((script, 20) for script in SCRIPTS)]:
        draw = random.Random(f"{script} {kills}")
        argv = [*FLAGS, *MORE.get(script, []), "--steps", 2 * kills, "--eval-every", 1]
        yield case(f"kill -9: {kills} random moments", script, argv, wanted="killed", at=("load_data", kill),
                   then=[draw.uniform(0, 0.7) for _ in range(kills)], again=(), usual=kills == 3)


# ── processes that decode pictures ──


def busy(kind, group):
    """In a worker: the others get a signal while it is busy, with a library that speaks."""
    print("a library speaks", file=sys.stderr, flush=True)
    os.killpg(0, kind) if group else os.kill(os.getppid(), kind)
    time.sleep(30)


def kill_worker():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        os.kill(int(file.read().split()[-1]), signal.SIGKILL)


def of_workers():
    argv = ["--data", "photos", "--workers", 2, "--batch-size", 4, *FLAGS]     # an epoch is two steps
    stopped = partial(usual, make=PHOTOS, again=["--workers", 1])
    for group, to in ((True, "to all"), (False, "to the first")):
        yield stopped(f"SIGINT {to}, workers check pictures", "simclr", argv, wanted="stopped", says=FIRST,
                      at=("measured", partial(busy, signal.SIGINT, group)))
    for script, kind, group in [("simclr", signal.SIGINT, True), ("simclr", signal.SIGTERM, True),
                                ("simclr", signal.SIGTERM, False), ("moco", signal.SIGTERM, False)]:
        to = "to all" if group else "to the first"
        yield stopped(f"{kind.name} {to}, workers in a step", script, argv, wanted="stopped",
                      says=STEP.format(1), at=("compute_loss", partial(send, kind, group)))
    yield stopped("kill -9 of the first", "simclr", argv, wanted="killed", at=("compute_loss", kill))
    yield stopped("a worker is killed", "simclr", [*argv, "--steps", 60, "--eval-every", 20],
                  wanted="one line", at=("write_state compute_loss", kill_worker),
                  says="a process that decoded pictures was killed, perhaps for want of memory; "
                       "try fewer --workers; a checkpoint that --out holds is whole")


# ── the machine ──


def full_disk(size, file=None):
    """No file can grow beyond this size from now on. This fails as a full disk does, without naming the file,
    which is made that long where it would be the last to be."""
    if file:
        os.truncate(file, size)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


# where a full disk is noticed: (names for `at`, a size, the file that is to be named)
FULL = {"args.json": ("write_code write_whole", 600, "out/args.json"),
        "code": ("write_code", 600, "out/simcse.py"), "tokens": ("write_tokens", 600, "out/tokens"),
        "metrics.jsonl": ("write_metrics", 9_000, "out/metrics.jsonl"),
        "state.pt": ("write_state", 5_000, "out/state.pt"), "settings": ("new_files", 900, "out"),
        "weights": ("new_files", 10_000, "out")}


def of_machines():
    for stage, (names, size, named) in FULL.items():
        padded = named if stage == "metrics.jsonl" else None
        yield usual(f"a full disk: {stage}", "simcse", SIMCSE, wanted="one line",
                    again=() if stage in ("metrics.jsonl", "state.pt", "weights") else None,
                    at=(names, partial(full_disk, size, padded)), says=f": {named}: .*File too large")
    yield usual("a full disk: triples", "cline", ["--save-triples", "triples.csv"], wanted="one line",
                at=("save_triples", partial(full_disk, 600)), says=": triples.csv: File too large")
    sizes = [500, 3_000, 12_000, 30_000, 100_000, 400_000, 1_000_000, 2_000_000, 4_000_000]
    half = ["--steps", "2", "--resume", "--out", "half"]
    for size, (script, argv) in itertools.product(sizes,
                                                  [("simcse", half), ("moco", []), ("childtuning", [])]):
        yield case(f"files of {size:,} bytes", script, argv, limit=(resource.RLIMIT_FSIZE, size))
    wide = [("simclr", "--width"), ("selfguided", "--width"), ("moco", "--queue"), ("moco", "--width")]
    for size, (script, flag) in itertools.product((300, 600), wide):           # what PyTorch cannot have then
        yield case(f"{size} MB of memory, {flag}", script, [flag, 8 * 10**5],
                   limit=(resource.RLIMIT_AS, size * 2**20))
    for script in ("moco", "cline"):
        yield case("20 files open", script, limit=(resource.RLIMIT_NOFILE, 20))
    for shell, script in zip(("</dev/null", "<&-", ">&-", ">/dev/full", "|", "<&- >&-"), SCRIPTS):
        wanted = "stopped" if shell == "|" else "either"
        yield case(f"in a shell: {shell}", script, shell=shell, wanted=wanted)
    yield usual("power fails", "simcse", SIMCSE, wanted="accepted", at=("begin", power_fails))


def power_fails():
    """From now on a file that is renamed before it is on the disk ends the run. Tokens, a folder, need not be
    there: --resume writes them anew."""
    synced, sync, rename = {}, os.fsync, os.replace

    def note(number):
        sync(number)
        about = os.fstat(number)
        synced[about.st_ino] = about.st_size

    def check(path, to):
        about = os.stat(path)
        if os.path.isfile(path) and synced.get(about.st_ino) != about.st_size:
            sys.exit(f"{path} is renamed before it is on the disk")
        rename(path, to)
    os.fsync, os.replace = note, check


# ── data and folders ──


def rewrite(path, how):
    data = open(path, "rb").read()
    with open(path, "wb") as file:
        file.write(how(data))


def halve(path):
    rewrite(path, lambda data: b"".join(data.splitlines(True)[::2]))


def blot(path):
    """Rows lose a cell or a word, the file keeps its length."""
    rewrite(path, lambda data: re.sub(b'","|\t| the ', lambda found: b" " * len(found[0]), data))


def empty(path):
    rewrite(path, lambda data: b"")


def to_pipe(path):
    os.unlink(path)
    os.mkfifo(path)


def of_data():
    """What a run reads is taken away, or changes."""
    data = {"simcse": "few.csv", "vascl": "few.txt", "ease": "entities.tsv", "tacl": "documents.txt",
            "childtuning": "topics.tsv", "cline": "few.txt"}
    for (script, path), how in itertools.product(data.items(), (os.unlink, halve, blot)):
        yield case(f"--data: {how.__name__}", script, ["--data", f"its-{path}"],
                   make=lambda here, path=path: shutil.copy(here / path, here / f"its-{path}"),
                   at=("build_model", partial(how, f"its-{path}")), like=["--data", path, "--out", "like"])
    yield usual("--data: upper case", "simcse", SIMCSE, wanted="one line", left=set(),
                at=("build_model", partial(rewrite, "few.csv", bytes.upper)),
                says=r": few\.csv: changed while it was read; leave it as it is, and start again$")
    for script, name, how, what, argv in [
            ("tacl", "compute_loss", empty, "documents.txt", []),
            ("simcse", "build_model", os.unlink, "sts.tsv", ["--dev", "sts.tsv"]),
            ("vascl", "build_model", shutil.rmtree, "bert", ["--model", "bert"]),
            ("ease", "compute_loss", shutil.rmtree, ".", [])]:
        yield case(f"{name}, {how.__name__} {what}", script, argv, at=(name, partial(how, what)))
    for script, how in itertools.product(("simclr", "moco"), (os.unlink, empty, to_pipe)):
        yield case(f"a picture: {how.__name__}", script, ["--data", "photos"], PHOTOS, "one line",
                   at=("build_model", partial(how, "photos/3.png")))


def replace_folder(name):
    shutil.rmtree(name, ignore_errors=True)
    os.mkdir(name)


HOLD = """import fcntl, sys
file = open("out/.running", "r+")
fcntl.lockf(file, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()"""


def another_run(names, alive=False):
    """Files of a run come into --out; alive: its process is at work there until this one ends."""
    os.mkdir("out")
    for name in names:
        if name == "state.pt":
            torch.save({}, "out/state.pt")
        else:
            Path("out", name).write_text('{"seed": 1}')
    if alive:
        process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, start_new_session=True)
        process.stdout.readline()


def of_folders():
    """--out is gone, or another run works in it."""
    gone = partial(usual, wanted="one line", left=set(),
                   says=r": --out out was removed while this run was writing it; .*")
    for script, name in zip(SCRIPTS, ("steps", "compute_loss", "report", "save_state")):
        yield gone(f"--out is gone: {name}", script, FLAGS, at=(name, partial(shutil.rmtree, "out")))
    replaced = "sum_gradients", partial(replace_folder, "out")
    yield gone("--out is another folder", "simcse", FLAGS, at=replaced)
    for argv in ([], ["--resume"]):
        yield usual(f"another run is at work {argv}", "simcse", [*SIMCSE, *argv], wanted="one line",
                    at=("build_model", partial(another_run, [".running", "args.json"], alive=True)),
                    left={".running", "args.json"}, says=r": --out out: another process is at work in it; ")
    for names in (["args.json"], ["args.json", ".running"], ["state.pt"]):
        yield usual(f"another run began: {names}", "simcse", SIMCSE, wanted="one line", left={*names},
                    at=("build_model", partial(another_run, names)),
                    says=": --out out: another run was begun in it while this one was starting; name ")
    yield usual("not a run: metrics.jsonl", "simcse", SIMCSE, wanted="accepted",
                at=("begin", partial(another_run, ["metrics.jsonl"])))
    for script, argv in [("simcse", []), ("moco", []), ("tacl", []), ("simcse", ["--resume"])]:
        yield case(f"the same run is there {argv}", script, ["--steps", 3, *argv], wanted="one line",
                   beside=True, usual="--resume" in argv, says="another process is at work in it|holds a run")


def cases():
    for part in (of_signals, of_kills, of_workers, of_machines, of_data, of_folders):
        yield from part()
