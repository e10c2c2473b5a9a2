"""Run one case of the attack: one command with bad input or under bad conditions, and check its outcome.

A case runs its script in a new folder with good data (make_good_files) and with the bad input that the case's
`make` adds. The process is forked from one that has already imported everything. A case with `shell` starts
its own Python, which takes seconds. Only for Linux.
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
from running import DATA, NLI, equal, fork_context, small_bert  # noqa: E402, F401

TEXT = "--model scratch --batch-size 4 --steps 1"
IMAGES = "--data few.npz --model resnet-small --batch-size 8 --steps 1 --probe-epochs 0"
SCRIPTS = {name: flags.split() for name, flags in {
    "simclr": IMAGES,
    "moco": f"{IMAGES} --queue-size 16 --bn-splits 2",
    "simcse": f"--data few.csv {TEXT}",
    "selfguided": f"--data few.txt {TEXT} --projection-dim 16 --view-pooling mean",
    "cline": f"--data few.txt --wordnet {DATA / 'wordnet'} --tagger lexicon {TEXT} --held-out-rows 2",
    "tacl": f"--data documents.txt --dev documents.txt {TEXT} --max-length 32",
    "ease": f"--data entities.tsv {TEXT}",
    "vascl": f"--data few.txt {TEXT} --neighbours 2 --radius 0.2",
    "dclr": f"--data few.txt --guide bert {TEXT} --phi 0.994",
    "childtuning": f"--data topics.tsv --mode F {TEXT}"}.items()}
# Not ROOT itself, because a .venv may be inside it.
OUR_FILES = *(str(ROOT / f"{name}.py") for name in SCRIPTS), str(ROOT / "kernels")
SECONDS, MEMORY, LINE = 60, 4 * 2**30, 2000        # limits: seconds and bytes per case, characters per line


@dataclass
class Case:
    """One command of a script, and the outcome that it must have.

    argv                flags after the script's own flags in SCRIPTS and --out out; they override those
    make                function that writes the bad input into the case's folder; None: only good input
    expected            "one line" (refused with one line and exit code 2), "accepted", "either" of these,
                        "stopped" by a signal that the run handles, or "killed" by one that it cannot handle
    may_leave_out       whether a refused run may leave an unfinished --out
    same_as             argv of a command on good input, which must give the same weights
    at                  (function names separated by spaces, action): the process runs the action when our
                        functions of these names have been called in this order; "": when it starts
    later_faults        one fault for each of the next runs, which --resume: a tuple as in at, or a number:
                        kill -9 after this share of the seconds that an uninterrupted run takes
    resume_flags        flags of a last run that resumes; its files must then equal, bit for bit, those of an
                        uninterrupted run; None: no such run
    limit               (resource, number) for setrlimit; RLIMIT_AS: bytes on top of those in use at the start
    stdin               bytes that the command can read from standard input
    enforce_permissions whether root gives up its right to read and write every file
    shell               redirections that follow the command in a shell; "|": a pipe that nobody reads
    signal_in_imports   signal that the process gets during its imports (only with shell); 0: none
    concurrent_run      whether a run of the same command is already writing --out
    unchanged           names of files that the command must not change
    files_left          names of all files that --out must hold in the end; None: not checked
    message             regular expression for the refusal, or for the last line of a stopped run
    env                 environment variables of the process; value None: remove the variable
    data                function that returns the rows to pass to main(data=...), instead of --data
    in_every_run        whether every test run tries this case; see test_attack.select_cases
    """
    category: str
    name: str
    script: str
    argv: list = field(default_factory=list)
    make: Callable = None
    expected: str = "either"
    may_leave_out: bool = False
    same_as: list | None = None
    at: tuple | None = None
    later_faults: tuple = ()
    resume_flags: tuple | None = None
    limit: tuple | None = None
    stdin: bytes = b""
    enforce_permissions: bool = False
    shell: str | None = None
    signal_in_imports: int = 0
    concurrent_run: bool = False
    unchanged: tuple = ()
    files_left: set | None = None
    message: str = ""
    env: dict = field(default_factory=dict)
    data: Callable = None
    in_every_run: bool = False


# ── processes ──


def start(script, argv, folder, log_path, **more):
    """Start the script in a forked process, in this folder.

    log_path  the process reads and writes files whose names begin with this path (.in, .out, .err, ...)
    more      keyword arguments of run_in_fork
    """
    argv = [*SCRIPTS[script][2 if more.get("data") else 0 :], "--out", "out", *map(str, argv)]
    process = fork_context().Process(target=run_in_fork, args=(script, argv, folder, log_path), kwargs=more)
    process.start()
    return process


def run_in_fork(script, argv, folder, log_path, at=None, limit=None, enforce_permissions=False, env=(),
                data=None):
    """Set up this forked process (streams, signals, limits, environment) and run the script in it."""
    os.setpgrp()                                               # `kill` ends the whole group
    change_environment(os.environ, dict(env))
    os.chdir(folder)
    multiprocessing.set_start_method(None, force=True)         # scripts choose their own start method
    for number, (name, mode) in enumerate([("in", os.O_RDONLY | os.O_CREAT), *[
            (name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in ("out", "err")]]):
        os.dup2(os.open(f"{log_path}.{name}", mode), number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for kind in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, signal.SIG_DFL)
    torch.cuda.is_available = lambda: False
    torch.set_num_threads(1)                                   # for equal bits in equal runs
    limits = {resource.RLIMIT_AS: MEMORY, **dict([limit] if limit else [])}
    for kind, value in limits.items():
        if kind == resource.RLIMIT_AS:                         # on top of the memory inherited by the fork
            value += resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(kind, (value, value))
    if enforce_permissions and os.geteuid() == 0:              # drop all capabilities of root
        ctypes.CDLL(None).capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
    if at:
        watch(*at, f"{log_path}.reached")
    sys.argv = [f"{script}.py", *argv]
    try:
        found = runpy.run_path(str(ROOT / f"{script}.py"), run_name="handed" if data else "__main__")
        if data:
            found["main"](argv, data=data())
    finally:
        used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        Path(f"{log_path}.kB").write_text(str(max(use.ru_maxrss for use in used)))


def change_environment(variables, env):
    """Update the dict of environment variables with env; a value of None removes the variable."""
    for name, value in env.items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = value


def watch(names, action, reached):
    """Run the action once our functions of these names have been called in this order.

    names    function names, separated by spaces; "": run the action now
    reached  path of an empty file that is created just before the action
    """
    remaining = names.split()

    def call(frame, event, _):
        code = frame.f_code
        if code.co_name == remaining[0] and code.co_filename.startswith(OUR_FILES):
            del remaining[0]
            if not remaining:
                act()

    def act():
        sys.settrace(None)
        Path(reached).touch()
        action()

    if remaining:
        sys.settrace(call)                                     # slows the run less than sys.setprofile
    else:
        act()


def start_alone(case, folder, log_path):
    """Start the case in its own Python process, from a shell."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    change_environment(env, case.env)
    script = [sys.executable, ROOT / f"{case.script}.py", *SCRIPTS[case.script], "--out", "out", *case.argv]
    command = ["sh", "-c", f'exec "$@" {case.shell.strip("|")}', "sh", *map(str, script)]
    with open(f"{log_path}.out", "w") as out, open(f"{log_path}.err", "w") as err:
        process = subprocess.Popen(command, cwd=folder, env=env, start_new_session=True, stderr=err,
                                   stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE if case.shell == "|" else out)
    if case.shell == "|":
        process.stdout.close()
    if case.signal_in_imports:                                 # wait for PyTorch's import
        wait_until(lambda: b"libtorch_cpu" in Path(f"/proc/{process.pid}/maps").read_bytes())
        process.send_signal(case.signal_in_imports)
    return process


def wait_until(condition, seconds=SECONDS):
    """Wait until condition() is true or the time is over; return its last value."""
    deadline = time.time() + seconds
    while not (result := condition()) and time.time() < deadline:
        time.sleep(0.01)
    return result


def end(process, seconds=SECONDS, go_on=False):
    """Wait for the process to end, kill what is left of its group, and return its exit code.

    go_on    resume the process first, because it was suspended
    returns  the exit code; "hangs": the process did not end within `seconds`; "left": processes that it had
             started were still alive four seconds after its end
    """
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
    """Return the ids of the processes in the leader's group whose state (see proc(5)) is one of `states`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = path.read_text().rpartition(") ")[2].split()[:3]
            if int(pgrp) == leader and state in states:
                found.append(int(path.parent.name))
    return found


def kill(process):
    """Kill the process and its group. A process that has just started has no group yet."""
    process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    (process.wait if isinstance(process, subprocess.Popen) else process.join)()


# ── folders ──


def make_good_files(here):
    """Write small good files: data of every kind, a BERT, and runs for --resume and --model."""
    files = {"nli.csv": "few.csv", "sentences.txt": "few.txt", "sts.tsv": "sts.tsv",
             "entities.tsv": "entities.tsv", "topics.tsv": "topics.tsv"}
    for name, new in files.items():
        lines = (DATA / name).read_bytes().splitlines(True)[: 9 if name == "sts.tsv" else 25]
        (here / new).write_bytes(b"".join(lines))
    lines = (here / "few.txt").read_text("utf-8").splitlines(True)
    (here / "documents.txt").write_text("\n".join("".join(lines[i : i + 4]) for i in range(0, 24, 4)),
                                        "utf-8")
    with np.load(DATA / "shapes.npz") as file:
        counts = {"images": 24, "labels": 24, "test_images": 8, "test_labels": 8}
        np.savez(here / "few.npz", **{name: file[name][:count] for name, count in counts.items()})
    small_bert(here / "bert")
    for script, out in (("simcse", "half"), ("moco", "net")):
        log_path, flags = here.with_name(out), ["--out", out, "--keep-state", "always"]
        assert end(start(script, flags, here, log_path)) == 0, Path(f"{log_path}.err").read_text()
    flags = json.loads((here / "half" / "args.json").read_text())
    longer = {"steps": 2, "command": [*flags["command"], "--steps", "2"]}      # one step remains for --resume
    (here / "half" / "args.json").write_text(json.dumps(flags | longer))
    shutil.copytree(here / "half", here / "twin")
    return here


class GoodFiles:
    """Cache the good files, made once per process, and the results of uninterrupted runs on them."""
    made = None                                                # a TemporaryDirectory
    lock = threading.RLock()
    runs = {}

    @classmethod
    def copy(cls, folder):
        """Copy the good files to a new folder, and return its path."""
        with cls.lock:
            if cls.made is None:
                cls.made = tempfile.TemporaryDirectory()
                os.mkdir(f"{cls.made.name}/made")
                make_good_files(Path(cls.made.name, "made"))
        return shutil.copytree(Path(cls.made.name, "made"), folder)

    @classmethod
    def uninterrupted(cls, case):
        """Run the case's command without faults; return (seconds, read_run of its --out)."""
        command = case.script, case.make, *map(str, case.argv)
        with cls.lock, tempfile.TemporaryDirectory() as place:
            if command not in cls.runs:
                here, log_path = cls.copy(Path(place, "work")), Path(place, "log")
                if case.make:
                    case.make(here)
                began = time.time()
                assert end(start(case.script, case.argv, here, log_path)) == 0, read_output(log_path)
                cls.runs[command] = time.time() - began, read_run(here / "out")
        return cls.runs[command]


def write_file(name, content=None):
    """Return a `make` that writes this file, or deletes it if content is None."""
    def make(here):
        path = here / name
        path.unlink(missing_ok=True)
        if content is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return make


def all_of(*makes):
    """Return a `make` that calls all of these in turn."""
    return lambda here: [make(here) for make in makes]


def change_file(name, edit):
    """Return a `make` that replaces the bytes of a file by edit(bytes)."""
    return lambda here: (here / name).write_bytes(edit((here / name).read_bytes()))


# ── outcomes ──


def run_case(case):
    """Run the case and return (verdict, text): "one line" and the line, "accepted" and the end of its output,
    or "failed" and the reason."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        here, log_path = GoodFiles.copy(Path(place, "work")), Path(place, "log")
        first = None                                           # the concurrent run
        if case.make:
            case.make(here)
        Path(f"{log_path}.in").write_bytes(case.stdin)
        before, kept = snapshot(here), [(here / name).read_bytes() for name in case.unchanged]
        if case.concurrent_run:
            argv = [flag for flag in case.argv if flag != "--resume"]
            at = "steps", functools.partial(signal.raise_signal, signal.SIGSTOP)       # resumed in `end`
            first = start(case.script, argv, here, Path(place, "first"), at=at)
            wait_until(lambda: first.pid in group(first.pid, "T"))
        if case.shell is not None:
            process = start_alone(case, here, log_path)
        else:
            process = start(case.script, case.argv, here, log_path, at=case.at, limit=case.limit,
                            enforce_permissions=case.enforce_permissions, env=case.env, data=case.data)
        code, first_code, (out, err) = end(process), first and end(first, go_on=True), read_output(log_path)
        fault = (find_problem(case, code, out, err, here, before)
                 or kept != [(here / name).read_bytes() for name in case.unchanged] and "it changes a file"
                 or first_code and f"the other run in --out fails: {read_output(place + '/first')}"
                 or peak_memory(log_path) > MEMORY / 2 and f"it takes {peak_memory(log_path) / 2**30:.1f} GB"
                 or case.at and not Path(f"{log_path}.reached").exists() and f"no {case.at[0]} was called"
                 or case.same_as and code == 0 and weights_problem(case, here, Path(place, "like"))
                 or case.resume_flags is not None and resume_problem(case, here, log_path))
        if fault:
            return "failed", f"{fault} (exit code {code}, stdout ends {out[-80:]!r}, stderr {err[-400:]!r})"
        return ("one line", err.strip()) if code == 2 else ("accepted", out[-80:])


def resume_problem(case, here, log_path):
    """Resume the run after each fault; return why its end differs from an uninterrupted run's, or None."""
    seconds, expected = GoodFiles.uninterrupted(case)
    for at in case.later_faults:
        if isinstance(at, float):                              # SIGALRM ends it like kill -9
            at = "", functools.partial(signal.setitimer, signal.ITIMER_REAL, at * seconds)
        code = end(start(case.script, [*case.argv, "--resume"], here, log_path, at=at))
        if code not in (0, 130, -signal.SIGKILL, -signal.SIGALRM):
            return f"another fault ends in {code}: {read_output(log_path)}"
    code = end(start(case.script, [*case.argv, "--resume", *case.resume_flags], here, log_path))
    if code != 0:
        return f"--resume ends in {code}: {read_output(log_path)}"
    found = read_run(here / "out")
    names = found.keys() | expected.keys()
    other = [name for name in names if not equal(found.get(name), expected.get(name))]
    return f"after --resume, not as in an uninterrupted run: {sorted(other)}" if other else None


def read_run(out):
    """Return {file name: content} of weights, state.pt, metrics and settings, {name: None} of other files."""
    files = {str(path.relative_to(out)): path for path in out.rglob("*") if path.is_file()}
    read = [name for name, path in files.items() if path.suffix in READERS and path.name != "args.json"]
    return dict.fromkeys(files) | {name: READERS[files[name].suffix](files[name]) for name in read}


def read_metrics(path):
    """Return the rows of metrics.jsonl without their times."""
    return [json.loads(row) | {"seconds": 0} for row in path.read_text().splitlines()]


READERS = {".safetensors": load_file, ".jsonl": read_metrics,
           ".json": lambda path: json.loads(path.read_text()),
           ".pt": lambda path: torch.load(path, weights_only=True)}


def read_output(log_path):
    """Return [standard output, standard error] of a process."""
    return [Path(f"{log_path}.{name}").read_bytes().decode("utf-8", "replace") for name in ("out", "err")]


def peak_memory(log_path):
    """Return the peak memory of a process in bytes; 0 if it was killed before it could write that."""
    file = Path(f"{log_path}.kB")
    return 1024 * int(file.read_text() or 0) if file.exists() else 0


def snapshot(folder):
    """Return {path: (mode, inode, size, time)}; it changes if any file is written."""
    found = {path: path.lstat() for path in folder.rglob("*")}
    return {path: (about.st_mode, about.st_ino, about.st_size, about.st_mtime_ns)
            for path, about in found.items() if not path.is_dir()}


def find_problem(case, code, out, err, here, before):
    """Return why the outcome of the case is wrong, or None if it is as expected."""
    err = re.sub("\n*libgomp: [^\n]*\n", "", err)              # for a bad OMP_NUM_THREADS
    after, folder = snapshot(here), here / out_flag(case.argv)
    written = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    whole = all(is_whole(path) for path in written if folder in path.parents)
    if any(path.name.startswith("pwned") for path in after):
        return "it runs code from the data"
    if code == "hangs":
        return "it hangs"
    if code == "left":
        return "processes that it started are still alive"
    if case.files_left is not None:
        files = {str(path.relative_to(folder)) for path in folder.rglob("*")}
        if files != case.files_left:
            return f"--out holds {sorted(files)}"
    if any(letter != one_line(letter) for letter in (out + err).replace("\n", "")):
        return "control characters in its output"
    full = re.search("File too large|No space left", err)
    if full and not re.match(r"\w+\.py: (out|half|standard output|triples\.csv)\b", err):
        return "the message does not name the file that could not be written"
    if case.expected == "stopped":
        last = (["", *out.splitlines()][-1] + err) if case.shell != "|" else err
        right = re.fullmatch("stopped [^\n]+|[^\n]+: standard output is closed; stopping\n", last) and whole
        right = right and re.search(case.message, last)
        in_a_step = "stopped  at step" in out
        announced = out.count("stopping after this step is saved") == in_a_step or case.shell == "|"
        return None if right and announced and code == 130 else "no message about the stop"
    if case.expected == "killed":
        killed = code in (-signal.SIGKILL, -signal.SIGXFSZ)
        return None if killed and whole and not err else "it is not killed, or leaves an incomplete file"
    if code not in {"one line": [2], "accepted": [0], "either": [0, 2]}[case.expected]:
        return f"expected {case.expected}"
    if code == 2:
        if not re.fullmatch(rf"{case.script}\.py: [^\x00-\x1f\x7f]{{5,{LINE}}}\n", err):
            return "not one clear line"
        if not re.search(case.message, err):
            return f"expected a line about {case.message}"
        if written and not case.may_leave_out:
            return f"refused, and wrote {[str(path.relative_to(here)) for path in written[:3]]}"
        return None if whole else "refused, and left an incomplete file"
    if err:
        return "output on stderr"
    if {"--evaluate", "--profile"} & set(case.argv):           # these write no files
        return None if re.search(r"\d", out) and "nan" not in out else "no numbers"
    if [*folder.rglob(".running")]:
        return "it left the file .running"
    return None if whole and is_good_run(folder) else "no model with finite weights"


def out_flag(argv):
    """Return the value of the last --out."""
    argv = ["--out", "out", *map(str, argv)]
    return [value for flag, value in zip(argv, argv[1:]) if flag == "--out"][-1]


def is_whole(path):
    """Return whether a file can be read; True for a file that neither --resume nor --model reads."""
    if path.suffix in READERS.keys() - {".jsonl"} and path.is_file() and ".saving" not in path.parts:
        try:
            READERS[path.suffix](path)
        except Exception:
            return False
    return True


def is_good_run(folder):
    """Return whether a run left finite weights and finite losses."""
    try:
        weights = [load_file(path) for path in folder.rglob("*.safetensors")]
        rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError, SafetensorError):
        return False
    rows = [row for row in rows if row["step"]]                # step 0 has scores but no loss
    return bool(weights) and bool(rows) and all(math.isfinite(row["loss"]) for row in rows) and all(
        x.isfinite().all() for tensors in weights for x in tensors.values())


def weights_problem(case, here, log_path):
    """Run the command in case.same_as; return why its weights and the case's differ, or None."""
    if end(start(case.script, case.same_as, here, log_path)) != 0:
        return f"the command in same_as fails: {read_output(log_path)}"
    one, two = (load_file(here / out_flag(argv) / "model.safetensors") for argv in (case.argv, case.same_as))
    return None if equal(one, two) else "accepted, but the weights differ from those on good input"
