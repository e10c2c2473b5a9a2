"""Faults at each stage of a run: signals, kill -9, full disks, little memory, data and folders that vanish,
a second run in --out, workers that die.

Each case gives the stage, the fault and the expected outcome. `at` names our functions that have been called
when the stage begins (cases.watch). With resume_flags=() the run then resumes, and its files must equal those
of an uninterrupted run bit for bit.
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
from images import write_photos

case = partial(Case, "faults", may_leave_out=True)
core_case = partial(case, in_every_run=True)
FLAGS = ["--steps", 3, "--eval-every", 2, "--keep-state", "always"]
SENTENCES = ["simcse", "selfguided", "ease", "vascl", "dclr"]
EVALUATION_FLAGS = {"childtuning": ["--dev", "topics.tsv", "--mode", "D", "--fisher-samples", "4"],
                    **{script: ["--dev", "sts.tsv"] for script in SENTENCES}}
SIMCSE = [*FLAGS, *EVALUATION_FLAGS["simcse"]]
PHOTOS = write_photos()


# ── signals ──

FIRST, LAST = "before anything was saved", "after the last step; the checkpoint is complete"
STEP = "at step {}, saved; --resume continues"
# stage: (names for `at`, message of a run that a signal stops there)
STAGES = {
    "reading data": ("load_data", FIRST), "reading held-out data": ("load_sts", FIRST),
    "building the model": ("build_model", FIRST), "copying code": ("write_code", FIRST),
    "tokenising": ("tokenise_table", FIRST), "the first evaluation": ("log_initial_scores", FIRST),
    "a step": ("all_reduce_gradients", STEP.format(1)), "an evaluation": ("should_save", STEP.format(2)),
    "saving weights": ("atomic_output", STEP.format(2)), "saving state.pt": ("write_state", STEP.format(3)),
    "the end": ("finish", LAST)}
# {script: the functions in STAGES that it does not call}
MISSING_STAGES = {script: ("load_sts", "tokenise_table") for script in SCRIPTS if script not in SENTENCES}
MISSING_STAGES["childtuning"] += ("log_initial_scores",)
SIGNALS = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT]


def send(kind, group=False):
    """Send a signal to this process; group: also to all processes that it started, as a terminal does."""
    os.killpg(0, kind) if group else signal.raise_signal(kind)


kill = partial(send, signal.SIGKILL)


def signal_cases():
    for script, shift in zip(SCRIPTS, itertools.cycle(range(3))):
        kinds = itertools.islice(itertools.cycle(SIGNALS), shift, None)
        for (stage, (names, message)), kind in zip(STAGES.items(), kinds):
            if names not in MISSING_STAGES.get(script, ()):
                yield case(f"{kind.name}: {stage}", script, [*FLAGS, *EVALUATION_FLAGS.get(script, [])],
                           expected="stopped", message=message, resume_flags=(),
                           at=(names, partial(send, kind, kind != signal.SIGTERM)),
                           in_every_run=script == "simcse")
    for script, kind in zip(SCRIPTS, SIGNALS):
        yield case(f"{kind.name}: its imports", script, expected="stopped", message=FIRST, shell="",
                   signal_in_imports=kind)


KILLS = {"before there is a checkpoint": "write_code",
         "half of args.json": "write_code write_atomically flush_to_disk",
         "half of the tokens": "write_tokens tokenise",
         "metrics without a checkpoint": "write_metrics flush_to_disk",
         "weights without state.pt": "atomic_output write_state",
         "state.pt is written": "write_state flush_to_disk",
         "the end": "finish"}
PARTIAL_WRITES = {"half of the weights": ("atomic_output", 10_000),
                  "half of state.pt": ("write_state", 5_000),
                  "half of a second state.pt": ("write_state write_state", 5_000)}


def kill_while_writing(size):
    """Let the process die within a write, like with kill -9, as soon as a file exceeds `size` bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    full_disk(size)


def kill_within_row():
    """Append a row and a half to metrics.jsonl, and die."""
    with open("out/metrics.jsonl", "a") as file:
        file.write('{"step": 3}\n{"st')
    kill()


def kill_cases():
    killed = partial(core_case, script="simcse", argv=SIMCSE, expected="killed", resume_flags=())
    for stage, names in KILLS.items():
        yield killed(f"kill -9: {stage}", at=(names, kill))
    for stage, (names, size) in PARTIAL_WRITES.items():
        yield killed(f"kill -9: {stage}", at=(names, partial(kill_while_writing, size)))
    yield killed("kill -9: a row of metrics.jsonl", at=("write_state all_reduce_gradients", kill_within_row))
    yield killed("kill -9: --resume begins", at=("write_state all_reduce_gradients", kill),
                 later_faults=[("begin write_atomically flush_to_disk", kill)])
    for script, kills in [("simcse", 3), ("moco", 3), *((script, 20) for script in SCRIPTS)]:
        draw = random.Random(f"{script} {kills}")
        argv = [*FLAGS, *EVALUATION_FLAGS.get(script, []), "--steps", 2 * kills, "--eval-every", 1]
        yield case(f"kill -9: {kills} random moments", script, argv, expected="killed", resume_flags=(),
                   at=("load_data", kill), later_faults=[draw.uniform(0, 0.7) for _ in range(kills)],
                   in_every_run=kills == 3)


# ── processes that decode images ──


def signal_while_busy(kind, group):
    """In a worker: print as a library may do, signal the parent (group: the whole group), and stay busy."""
    print("output of a library", file=sys.stderr, flush=True)
    os.killpg(0, kind) if group else os.kill(os.getppid(), kind)
    time.sleep(30)


def kill_worker():
    """Kill the worker that was started last."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        os.kill(int(file.read().split()[-1]), signal.SIGKILL)


def worker_cases():
    argv = ["--data", "photos", "--workers", 2, "--batch-size", 4, *FLAGS]     # an epoch is two steps
    stopped = partial(core_case, make=PHOTOS, resume_flags=["--workers", 1])
    for group, to in ((True, "to all"), (False, "to the first")):
        yield stopped(f"SIGINT {to}, workers check images", "simclr", argv, expected="stopped", message=FIRST,
                      at=("inspect_image", partial(signal_while_busy, signal.SIGINT, group)))
    for script, kind, group in [("simclr", signal.SIGINT, True), ("simclr", signal.SIGTERM, True),
                                ("simclr", signal.SIGTERM, False), ("moco", signal.SIGTERM, False)]:
        to = "to all" if group else "to the first"
        yield stopped(f"{kind.name} {to}, workers in a step", script, argv, expected="stopped",
                      message=STEP.format(1), at=("compute_loss", partial(send, kind, group)))
    yield stopped("kill -9 of the first", "simclr", argv, expected="killed", at=("compute_loss", kill))
    yield stopped("a worker is killed", "simclr", [*argv, "--steps", 20, "--eval-every", 5],
                  expected="one line", at=("write_state compute_loss", kill_worker),
                  message="a process that decoded images was killed, perhaps by lack of memory; "
                          "try fewer --workers; the checkpoint in --out is complete")


# ── the machine ──


def full_disk(size, file=None):
    """Let every write beyond `size` bytes in a file fail from now on, as on a full disk.

    file  make this file `size` bytes long, so that the next write to it fails; None: no file
    """
    if file:
        os.truncate(file, size)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


# stage: (names for `at`, size at which writes fail, file that the message must name)
FULL_DISKS = {"args.json": ("write_code write_atomically", 600, "out/args.json"),
              "code": ("write_code", 600, "out/simcse.py"), "tokens": ("write_tokens", 600, "out/tokens"),
              "metrics.jsonl": ("write_metrics", 9_000, "out/metrics.jsonl"),
              "state.pt": ("write_state", 5_000, "out/state.pt"), "settings": ("atomic_output", 900, "out"),
              "weights": ("atomic_output", 10_000, "out")}


def machine_cases():
    """Yield cases with full disks, little memory, few open files, closed streams or a power failure."""
    for stage, (names, size, named) in FULL_DISKS.items():
        padded = named if stage == "metrics.jsonl" else None
        yield core_case(f"a full disk: {stage}", "simcse", SIMCSE, expected="one line",
                        resume_flags=() if stage in ("metrics.jsonl", "state.pt", "weights") else None,
                        at=(names, partial(full_disk, size, padded)), message=f": {named}: .*File too large")
    yield core_case("a full disk: triples", "cline", ["--save-triples", "triples.csv"], expected="one line",
                    at=("save_triples", partial(full_disk, 600)), message=": triples.csv: File too large")
    sizes = [500, 3_000, 12_000, 30_000, 100_000, 400_000, 1_000_000, 2_000_000, 4_000_000]
    half = ["--steps", "2", "--resume", "--out", "half"]
    for size, (script, argv) in itertools.product(sizes,
                                                  [("simcse", half), ("moco", []), ("childtuning", [])]):
        yield case(f"files of {size:,} bytes", script, argv, limit=(resource.RLIMIT_FSIZE, size))
    large = [("simclr", "--projection-dim"), ("selfguided", "--projection-dim"), ("moco", "--queue-size"),
             ("moco", "--projection-dim")]
    for size, (script, flag) in itertools.product((300, 600), large):          # too little for these flags
        yield case(f"{size} MB of memory, {flag}", script, [flag, 8 * 10**5],
                   limit=(resource.RLIMIT_AS, size * 2**20))
    for script in ("moco", "cline"):
        yield case("20 files open", script, limit=(resource.RLIMIT_NOFILE, 20))
    for shell, script in zip(("</dev/null", "<&-", ">&-", ">/dev/full", "|", "<&- >&-"), SCRIPTS):
        expected = "stopped" if shell == "|" else "either"
        yield case(f"in a shell: {shell}", script, shell=shell, expected=expected)
    yield core_case("power fails", "simcse", SIMCSE, expected="accepted", at=("begin", check_syncs))


def check_syncs():
    """Exit if the run renames a file before it has synced it to disk.
    The rename of the folder tokens/ is not checked: after a power failure --resume writes it again."""
    synced, sync, rename = {}, os.fsync, os.replace

    def record_sync(number):
        sync(number)
        status = os.fstat(number)
        synced[status.st_ino] = status.st_size

    def check_rename(path, to):
        status = os.stat(path)
        if os.path.isfile(path) and synced.get(status.st_ino) != status.st_size:
            sys.exit(f"{path} is renamed before it is on the disk")
        rename(path, to)
    os.fsync, os.replace = record_sync, check_rename


# ── data and folders ──


def rewrite(path, edit):
    """Replace the bytes of a file by edit(bytes), in place."""
    data = open(path, "rb").read()
    with open(path, "wb") as file:
        file.write(edit(data))


def halve(path):
    """Remove every second line."""
    rewrite(path, lambda data: b"".join(data.splitlines(True)[::2]))


def blot(path):
    """Blank out separators and words, so that rows lose cells or words but the file keeps its length."""
    rewrite(path, lambda data: re.sub(b'","|\t| the ', lambda found: b" " * len(found[0]), data))


def empty(path):
    rewrite(path, lambda data: b"")


def to_pipe(path):
    os.unlink(path)
    os.mkfifo(path)


def data_cases():
    """Yield cases in which a file that the run reads is deleted or changed during the run."""
    data = {"simcse": "few.csv", "vascl": "few.txt", "ease": "entities.tsv", "tacl": "documents.txt",
            "childtuning": "topics.tsv", "cline": "few.txt"}
    for (script, path), edit in itertools.product(data.items(), (os.unlink, halve, blot)):
        yield case(f"--data: {edit.__name__}", script, ["--data", f"its-{path}"],
                   make=lambda here, path=path: shutil.copy(here / path, here / f"its-{path}"),
                   at=("build_model", partial(edit, f"its-{path}")),
                   same_as=["--data", path, "--out", "like"])
    yield core_case("--data: upper case", "simcse", SIMCSE, expected="one line", files_left=set(),
                    at=("build_model", partial(rewrite, "few.csv", bytes.upper)),
                    message=r": few\.csv: changed while it was read; start again, and do not change it .*$")
    for script, name, edit, what, argv in [
            ("tacl", "compute_loss", empty, "documents.txt", []),
            ("simcse", "build_model", os.unlink, "sts.tsv", ["--dev", "sts.tsv"]),
            ("vascl", "build_model", shutil.rmtree, "bert", ["--model", "bert"]),
            ("ease", "compute_loss", shutil.rmtree, ".", [])]:
        yield case(f"{name}, {edit.__name__} {what}", script, argv, at=(name, partial(edit, what)))
    for script, edit in itertools.product(("simclr", "moco"), (os.unlink, empty, to_pipe)):
        yield case(f"an image: {edit.__name__}", script, ["--data", "photos"], PHOTOS, "one line",
                   at=("build_model", partial(edit, "photos/3.png")))


def replace_folder(name):
    """Replace the folder by an empty one."""
    shutil.rmtree(name, ignore_errors=True)
    os.mkdir(name)


HOLD_LOCK = """import fcntl, sys
file = open("out/.running", "r+")
fcntl.lockf(file, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()"""


def write_another_run(names, alive=False):
    """Write files of another run into --out; alive: another process holds the lock of --out."""
    os.mkdir("out")
    for name in names:
        if name == "state.pt":
            torch.save({}, "out/state.pt")
        else:
            Path("out", name).write_text('{"seed": 1}')
    if alive:
        process = subprocess.Popen([sys.executable, "-c", HOLD_LOCK], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, start_new_session=True)
        process.stdout.readline()


def folder_cases():
    """Yield cases in which --out is removed, or another run writes it."""
    removed = partial(core_case, expected="one line", files_left=set(),
                      message=r": --out out was removed while this run was writing it; .*")
    for script, name in zip(SCRIPTS, ("steps", "compute_loss", "report", "save_state")):
        yield removed(f"--out is gone: {name}", script, FLAGS, at=(name, partial(shutil.rmtree, "out")))
    replaced = "all_reduce_gradients", partial(replace_folder, "out")
    yield removed("--out is another folder", "simcse", FLAGS, at=replaced)
    for argv in ([], ["--resume"]):
        yield core_case(f"another run is at work {argv}", "simcse", [*SIMCSE, *argv], expected="one line",
                        at=("build_model", partial(write_another_run, [".running", "args.json"], alive=True)),
                        files_left={".running", "args.json"},
                        message=r": --out out: another process is writing it; ")
    for names in (["args.json"], ["args.json", ".running"], ["state.pt"]):
        yield core_case(f"another run began: {names}", "simcse", SIMCSE, expected="one line",
                        files_left={*names},
                        at=("build_model", partial(write_another_run, names)),
                        message=": --out out: another run was started in it at the same time; ")
    yield core_case("not a run: metrics.jsonl", "simcse", SIMCSE, expected="accepted",
                    at=("begin", partial(write_another_run, ["metrics.jsonl"])))
    for script, argv in [("simcse", []), ("moco", []), ("tacl", []), ("simcse", ["--resume"])]:
        yield case(f"the same run is there {argv}", script, ["--steps", 3, *argv], expected="one line",
                   concurrent_run=True, in_every_run="--resume" in argv,
                   message="another process is writing it|contains a run")


def cases():
    for part in (signal_cases, kill_cases, worker_cases, machine_cases, data_cases, folder_cases):
        yield from part()
