"""A case of an attack: one command on bad input or in bad circumstances, and what came of it.

A case runs its script in a fresh folder that holds good data (furnish) and what `make` wrote into it, in a
process forked from one that has imported everything; with `shell` in a process of its own, which takes
seconds. For Linux.
"""
import contextlib
import ctypes
import functools
import json
import math
import multiprocessing
import os
import re
import resource
import runpy
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [folder for folder in map(str, (ROOT, ROOT / "tests")) if folder not in sys.path]

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from kernels.printing import one_line  # noqa: E402
from running import DATA, NLI, equal, forks, small_bert  # noqa: E402, F401

TEXT = "--model scratch --batch-size 4 --steps 1"
PICTURES = "--data few.npz --model resnet-small --batch-size 8 --steps 1 --probe-epochs 0"
SCRIPTS = {name: flags.split() for name, flags in {
    "simclr": PICTURES,
    "moco": f"{PICTURES} --queue 16 --bn-splits 2",
    "simcse": f"--data few.csv {TEXT}",
    "selfguided": f"--data few.txt {TEXT} --width 16 --view-pooling mean",
    "cline": f"--data few.txt --wordnet {DATA / 'wordnet'} --tagger lexicon {TEXT} --held-out 2",
    "tacl": f"--data documents.txt --dev documents.txt {TEXT} --max-length 32",
    "ease": f"--data entities.tsv {TEXT}",
    "vascl": f"--data few.txt {TEXT} --neighbours 2 --radius 0.2",
    "dclr": f"--data few.txt --guide bert {TEXT} --phi 0.994",
    "childtuning": f"--data topics.tsv --mode F {TEXT}"}.items()}
OURS = *(str(ROOT / f"{name}.py") for name in SCRIPTS), str(ROOT / "kernels")       # a .venv may lie in ROOT
SECONDS, MEMORY, LINE = 60, 4 * 2**30, 2000                    # what a case may take; characters of a line


@dataclass
class Case:
    """What is tried, and what must come of it.

    argv      flags after the script's own in SCRIPTS and --out out, which they override
    make      a function of the working folder that writes what is bad
    wanted    "one line"; "accepted"; "either"; "stopped" by a signal; "killed" by one that nobody can handle
    says      a regular expression for the refusal, or for the last line of a run that was stopped
    late      whether a refusal may leave a begun --out
    like      a command's argv, on good input: the weights must be the same
    at        (names, action): the process does this when our functions of these names, separated by spaces,
              have been called in this order; "": at its beginning
    then      more of them, one for each of the next runs, which --resume; a number: kill -9 after this share
              of the time that an unbroken run takes
    again     flags of a last run that resumes: it must end in the bits of an unbroken run; None: no such run
    limit     (resource, number) for setrlimit; RLIMIT_AS: beside what is taken
    bound     whether rights on files count for root too
    shell     what follows the command in a shell; "|": a pipe that nobody reads
    asked     the signal that it gets in its imports
    beside    whether the same command is at work there already
    kept      names of files that must stay as they are
    left      names of all that --out holds in the end; None: not checked
    env       variables of its environment; None: one that it lacks
    data      a function that returns what main gets in place of the script's --data
    usual     whether every test run tries it, not just the whole attack
    """
    category: str
    name: str
    script: str
    argv: list = field(default_factory=list)
    make: Callable = None
    wanted: str = "either"
    late: bool = False
    like: list | None = None
    at: tuple | None = None
    then: tuple = ()
    again: tuple | None = None
    limit: tuple | None = None
    stdin: bytes = b""
    bound: bool = False
    shell: str | None = None
    asked: int = 0
    beside: bool = False
    kept: tuple = ()
    left: set | None = None
    says: str = ""
    env: dict = field(default_factory=dict)
    data: Callable = None
    usual: bool = False


# ── processes ──


def start(script, argv, folder, said, **more):
    """The script in a fork, in this folder; it writes to files whose names begin with said. more: of play."""
    argv = [*SCRIPTS[script][2 if more.get("data") else 0 :], "--out", "out", *map(str, argv)]
    process = forks().Process(target=play, args=(script, argv, folder, said), kwargs=more)
    process.start()
    return process


def play(script, argv, folder, said, at=None, limit=None, bound=False, env=(), data=None):
    os.setpgrp()                                               # with the processes that it starts
    change_environment(os.environ, dict(env))
    os.chdir(folder)
    multiprocessing.set_start_method(None, force=True)         # what a script's own processes start by
    for number, (name, how) in enumerate([("in", os.O_RDONLY | os.O_CREAT), *[
            (name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in ("out", "err")]]):
        os.dup2(os.open(f"{said}.{name}", how), number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for kind in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, signal.SIG_DFL)
    torch.cuda.is_available = lambda: False
    torch.set_num_threads(1)                                   # equal runs are equal to the bit
    for kind, most in {resource.RLIMIT_AS: MEMORY, **dict([limit] if limit else [])}.items():
        if kind == resource.RLIMIT_AS:                         # beside what it has of the one it is a fork of
            most += resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(kind, (most, most))
    if bound and os.geteuid() == 0:                            # root may read what nobody may
        ctypes.CDLL(None).capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
    if at:
        watch(*at, f"{said}.reached")
    sys.argv = [f"{script}.py", *argv]
    try:
        found = runpy.run_path(str(ROOT / f"{script}.py"), run_name="handed" if data else "__main__")
        if data:
            found["main"](argv, data=data())
    finally:
        used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        Path(f"{said}.kB").write_text(str(max(use.ru_maxrss for use in used)))


def change_environment(there, env):
    for name, value in env.items():
        there.pop(name, None)
        if value is not None:
            there[name] = value


def watch(names, action, reached):
    """Does the action once functions of ours of these names have been called in this order."""
    left = names.split()

    def call(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_name == left[0] and code.co_filename.startswith(OURS):
            del left[0]
            if not left:
                act()

    def act():
        sys.setprofile(None)
        Path(reached).touch()
        action()

    if left:
        sys.setprofile(call)
    else:
        act()


def start_alone(case, folder, said):
    """In a process of its own, from the shell."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    change_environment(env, case.env)
    script = [sys.executable, ROOT / f"{case.script}.py", *SCRIPTS[case.script], "--out", "out", *case.argv]
    command = ["sh", "-c", f'exec "$@" {case.shell.strip("|")}', "sh", *map(str, script)]
    with open(f"{said}.out", "w") as out, open(f"{said}.err", "w") as err:
        process = subprocess.Popen(command, cwd=folder, env=env, start_new_session=True, stderr=err,
                                   stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE if case.shell == "|" else out)
    if case.shell == "|":
        process.stdout.close()
    if case.asked:                                             # in the midst of its imports
        wait_until(lambda: b"libtorch_cpu" in Path(f"/proc/{process.pid}/maps").read_bytes())
        process.send_signal(case.asked)
    return process


def wait_until(there, seconds=SECONDS):
    end = time.time() + seconds
    while not (found := there()) and time.time() < end:
        time.sleep(0.01)
    return found


def end(process, seconds=SECONDS, go_on=False):
    """Its exit code; "hangs": it did, and was killed with all that it started; "left": processes that it
    started outlived it by seconds. go_on: it was suspended."""
    if go_on:
        os.kill(process.pid, signal.SIGCONT)
    if isinstance(process, subprocess.Popen):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        code = process.returncode
    else:
        process.join(seconds)
        code = process.exitcode
    if code is None:
        code = "hangs"
    elif not wait_until(lambda: not group(process.pid), 4):
        code = "left"
    kill(process)
    return code


def group(leader, states="RSDTIt"):
    """Ids of the processes of its group that are in one of these states: living ones."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = path.read_text().rpartition(") ")[2].split()[:3]
            if int(pgrp) == leader and state in states:
                found.append(int(path.parent.name))
    return found


def kill(process):
    """With all that it started, and before it is the leader of a group too."""
    process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    (process.wait if isinstance(process, subprocess.Popen) else process.join)()


# ── folders ──


def furnish(here):
    """Good data of every kind, few rows each, a small BERT, and the runs that --resume and --model read."""
    files = {"nli.csv": "few.csv", "sentences.txt": "few.txt", "sts.tsv": "sts.tsv",
             "entities.tsv": "entities.tsv", "topics.tsv": "topics.tsv"}
    for name, new in files.items():
        (here / new).write_bytes(b"".join((DATA / name).read_bytes().splitlines(True)[:25]))
    lines = (here / "few.txt").read_text("utf-8").splitlines(True)
    (here / "documents.txt").write_text("\n".join("".join(lines[i : i + 4]) for i in range(0, 24, 4)),
                                        "utf-8")
    with np.load(DATA / "shapes.npz") as file:
        most = {"images": 24, "labels": 24, "test_images": 8, "test_labels": 8}
        np.savez(here / "few.npz", **{name: file[name][:count] for name, count in most.items()})
    small_bert(here / "bert")
    for script, out in (("simcse", "half"), ("moco", "net")):
        said, flags = here.with_name(out), ["--out", out, "--keep-state", "always"]
        assert end(start(script, flags, here, said)) == 0, Path(f"{said}.err").read_text()
    flags = json.loads((here / "half" / "args.json").read_text())
    longer = {"steps": 2, "command": [*flags["command"], "--steps", "2"]}          # it has done one of them
    (here / "half" / "args.json").write_text(json.dumps(flags | longer))
    shutil.copytree(here / "half", here / "twin")
    return here


class Furniture:
    """Good data, made once per process; and unbroken runs on it, to compare others with."""
    kept, lock, runs = None, threading.RLock(), {}

    @classmethod
    def copy(cls, folder):
        with cls.lock:
            if cls.kept is None:
                cls.kept = tempfile.TemporaryDirectory()
                os.mkdir(f"{cls.kept.name}/made")
                furnish(Path(cls.kept.name, "made"))
        return shutil.copytree(Path(cls.kept.name, "made"), folder)

    @classmethod
    def unbroken(cls, case):
        """(seconds that the case's command takes when left alone, what it leaves)"""
        command = case.script, case.make, *map(str, case.argv)
        with cls.lock, tempfile.TemporaryDirectory() as place:
            if command not in cls.runs:
                here, said = cls.copy(Path(place, "work")), Path(place, "said")
                if case.make:
                    case.make(here)
                began = time.time()
                assert end(start(case.script, case.argv, here, said)) == 0, texts(said)
                cls.runs[command] = time.time() - began, contents(here / "out")
        return cls.runs[command]


def put(name, content=None):
    """A `make` that writes this file; None: that takes it away."""
    def make(here):
        path = here / name
        path.unlink(missing_ok=True)
        if content is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return make


def both(*makes):
    return lambda here: [make(here) for make in makes]


def change(name, how):
    """A `make` that puts how(its bytes) in the place of a file's."""
    return lambda here: (here / name).write_bytes(how((here / name).read_bytes()))


# ── outcomes ──


def outcome(case):
    """("one line" or "accepted" or "failed", what it said or why)"""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        here, said, first = Furniture.copy(Path(place, "work")), Path(place, "said"), None
        if case.make:
            case.make(here)
        Path(f"{said}.in").write_bytes(case.stdin)
        before, kept = listing(here), [(here / name).read_bytes() for name in case.kept]
        if case.beside:
            argv = [flag for flag in case.argv if flag != "--resume"]
            at = "steps", functools.partial(signal.raise_signal, signal.SIGSTOP)       # until `end`
            first = start(case.script, argv, here, Path(place, "first"), at=at)
            wait_until(lambda: first.pid in group(first.pid, "T"))
        if case.shell is not None:
            process = start_alone(case, here, said)
        else:
            process = start(case.script, case.argv, here, said, at=case.at, limit=case.limit,
                            bound=case.bound, env=case.env, data=case.data)
        code, first_code, (out, err) = end(process), first and end(first, go_on=True), texts(said)
        fault = (judged(case, code, out, err, here, before)
                 or kept != [(here / name).read_bytes() for name in case.kept] and "it changes a kept file"
                 or first_code and f"the run that was there fails: {texts(place + '/first')}"
                 or taken(said) > MEMORY / 2 and f"it takes {taken(said) / 2**30:.1f} GB"
                 or case.at and not Path(f"{said}.reached").exists() and f"no {case.at[0]} was called"
                 or case.like and code == 0 and differs(case, here, Path(place, "like"))
                 or case.again is not None and goes_wrong(case, here, said))
        if fault:
            return "failed", f"{fault} (exit code {code}, stdout ends {out[-80:]!r}, stderr {err[-400:]!r})"
        return ("one line", err.strip()) if code == 2 else ("accepted", out[-80:])


def goes_wrong(case, here, said):
    """Why the run does not go on after its faults as if there had been none, or None."""
    seconds, wanted = Furniture.unbroken(case)
    for at in case.then:
        if isinstance(at, float):                              # the alarm kills as kill -9 does
            at = "", functools.partial(signal.setitimer, signal.ITIMER_REAL, at * seconds)
        code = end(start(case.script, [*case.argv, "--resume"], here, said, at=at))
        if code not in (0, 130, -signal.SIGKILL, -signal.SIGALRM):
            return f"another fault ends in {code}: {texts(said)}"
    code = end(start(case.script, [*case.argv, "--resume", *case.again], here, said))
    if code != 0:
        return f"--resume ends in {code}: {texts(said)}"
    found = contents(here / "out")
    other = [name for name in found.keys() | wanted.keys() if not equal(found.get(name), wanted.get(name))]
    return f"after --resume, not as in an unbroken run: {sorted(other)}" if other else None


def contents(out):
    """{name: content} of a run's files: weights, state.pt, metrics, settings; of others the name alone."""
    files = {str(path.relative_to(out)): path for path in out.rglob("*") if path.is_file()}
    read = [name for name, path in files.items() if path.suffix in READERS and path.name != "args.json"]
    return dict.fromkeys(files) | {name: READERS[files[name].suffix](files[name]) for name in read}


def rows_of(path):
    """Of metrics.jsonl, without what a clock says."""
    return [json.loads(row) | {"seconds": 0} for row in path.read_text().splitlines()]


READERS = {".safetensors": load_file, ".jsonl": rows_of, ".json": lambda path: json.loads(path.read_text()),
           ".pt": lambda path: torch.load(path, weights_only=True)}


def texts(said):
    return [Path(f"{said}.{name}").read_bytes().decode("utf-8", "replace") for name in ("out", "err")]


def taken(said):
    """The bytes of memory that it held at most, where it could say so."""
    file = Path(f"{said}.kB")
    return 1024 * int(file.read_text() or 0) if file.exists() else 0


def listing(folder):
    """What tells whether something was written."""
    found = {path: path.lstat() for path in folder.rglob("*")}
    return {path: (about.st_mode, about.st_ino, about.st_size, about.st_mtime_ns)
            for path, about in found.items() if not path.is_dir()}


def judged(case, code, out, err, here, before):
    """Why it is neither a refusal in one line, with nothing written, nor a right result; or None."""
    err = re.sub("\n*libgomp: [^\n]*\n", "", err)              # of OMP_NUM_THREADS, before Python begins
    after, folder = listing(here), here / out_of(case.argv)
    written = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    whole = all(is_whole(path) for path in written if folder in path.parents)
    if any(path.name.startswith("pwned") for path in after):
        return "it runs what lies in the data"
    if code == "hangs":
        return "it hangs"
    if code == "left":
        return "processes that it started outlive it"
    if case.left is not None and case.left != {str(path.relative_to(folder)) for path in folder.rglob("*")}:
        return f"--out holds {[*folder.rglob('*')]}"
    if any(letter != one_line(letter) for letter in (out + err).replace("\n", "")):
        return "letters that steer a terminal"
    full = re.search("File too large|No space left", err)
    if full and not re.match(r"\w+\.py: (out|half|standard output|triples\.csv)\b", err):
        return "no word of what could not be written"
    if case.wanted == "stopped":
        last = (["", *out.splitlines()][-1] + err) if case.shell != "|" else err
        right = re.fullmatch("stopped [^\n]+|[^\n]+: standard output is closed; stopping\n", last) and whole
        right = right and re.search(case.says, last)
        in_a_step = "stopped  at step" in out
        announced = out.count("stopping when this step is done and saved") == in_a_step or case.shell == "|"
        return None if right and announced and code == 130 else "no word of a stop"
    if case.wanted == "killed":
        killed = code in (-signal.SIGKILL, -signal.SIGXFSZ)
        return None if killed and whole and not err else "it is not killed, or leaves half a file"
    if code not in {"one line": [2], "accepted": [0], "either": [0, 2]}[case.wanted]:
        return f"wanted {case.wanted}"
    if code == 2:
        if not re.fullmatch(rf"{case.script}\.py: [^\x00-\x1f\x7f]{{5,{LINE}}}\n", err):
            return "not one clear line"
        if not re.search(case.says, err):
            return f"wanted a line about {case.says}"
        if written and not case.late:
            return f"refused, and wrote {[str(path.relative_to(here)) for path in written[:3]]}"
        return None if whole else "refused, and left half a file"
    if err:
        return "words on stderr"
    if {"--evaluate", "--profile"} & set(case.argv):           # which write nothing
        return None if re.search(r"\d", out) and "nan" not in out else "no numbers"
    if [*folder.rglob(".running")]:
        return "it shows as running"
    return None if whole and is_right(folder) else "no model with finite weights"


def out_of(argv):
    argv = ["--out", "out", *map(str, argv)]
    return [value for flag, value in zip(argv, argv[1:]) if flag == "--out"][-1]


def is_whole(path):
    """Whether a file with a name that counts can be read."""
    if path.suffix in READERS.keys() - {".jsonl"} and path.is_file() and ".saving" not in path.parts:
        try:
            READERS[path.suffix](path)
        except Exception:
            return False
    return True


def is_right(folder):
    """Whether a run left what it should: weights and a loss that are finite."""
    try:
        weights = [load_file(path) for path in folder.rglob("*.safetensors")]
        rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError, SafetensorError):
        return False
    rows = [row for row in rows if row["step"]]                # step 0 has scores alone
    return bool(weights) and bool(rows) and all(math.isfinite(row["loss"]) for row in rows) and all(
        x.isfinite().all() for tensors in weights for x in tensors.values())


def differs(case, here, said):
    if end(start(case.script, case.like, here, said)) != 0:
        return f"the command that it is compared with fails: {texts(said)}"
    one, two = (load_file(here / out_of(argv) / "model.safetensors") for argv in (case.argv, case.like))
    return None if equal(one, two) else "accepted, and other weights than on good input"
