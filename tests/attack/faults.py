"""What happens to a run on its way: signals, full disks, little memory, what disappears, a second run."""
import itertools
import os
import re
import resource
import shutil
import signal
from functools import partial

from cases import SCRIPTS, Case
from pictures import photos

case = partial(Case, "faults")

# Functions by the stage that they begin.
STAGES = {"reading": "read_table", "tokenising": "write_tokens", "before the first step": "steps",
          "in a step": "compute_loss", "evaluating": "judge", "saving": "save_state",
          "behind the last step": "done"}
OTHERS = {"cline": {"tokenising": "tokenise_triples"}, "childtuning": {"tokenising": "tokenise_texts"},
          "tacl": {"reading": "load_data", "tokenising": "load_dev", "evaluating": "evaluate"},
          "simclr": {"reading": "read_pictures", "tokenising": "build_model"},
          "moco": {"reading": "read_pictures", "tokenising": "build_model"}}
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
HALF = ["--steps", "2", "--resume", "--out", "half"]


def of_signals():
    scripts = itertools.cycle(SCRIPTS)
    for (stage, function), kind in itertools.product(STAGES.items(), SIGNALS):
        script = next(scripts)
        at = OTHERS.get(script, {}).get(stage, function), partial(signal.raise_signal, kind)
        yield case(f"{kind.name} {stage}", script, ["--steps", 3], at=at, wanted="stopped")
    for script, kind in zip(scripts, SIGNALS):
        yield case(f"{kind.name} in its imports", script, wanted="stopped", shell="", asked=kind)


def of_machines():
    sizes = [500, 3_000, 12_000, 30_000, 100_000, 400_000, 1_000_000, 2_000_000, 4_000_000]
    for size, (script, argv) in itertools.product(sizes,
                                                  [("simcse", HALF), ("moco", []), ("childtuning", [])]):
        yield case(f"files of {size:,} bytes", script, argv, late=True,
                   limit=(resource.RLIMIT_FSIZE, size))
    wide = [("simclr", "--width"), ("selfguided", "--width"), ("moco", "--queue"), ("moco", "--width")]
    for size, (script, flag) in itertools.product((300, 600), wide):           # what PyTorch cannot have then
        yield case(f"{size} MB of memory, {flag}", script, [flag, 8 * 10**5], late=True,
                   limit=(resource.RLIMIT_AS, size * 2**20))
    for script in ("moco", "cline"):
        yield case("20 files open", script, late=True, limit=(resource.RLIMIT_NOFILE, 20))


def of_losses():
    """What a run has, or reads, is taken away, or changes."""
    data = {"simcse": "few.csv", "vascl": "few.txt", "ease": "entities.tsv", "tacl": "documents.txt",
            "childtuning": "topics.tsv", "cline": "few.txt"}
    for name, script in zip(("steps", "compute_loss", "report", "save_state"), SCRIPTS):
        yield case(f"--out is gone: {name}", script, at=(name, partial(shutil.rmtree, "out")), late=True)
    for (script, path), how in itertools.product(data.items(), (os.unlink, halve, blot)):
        yield case(f"--data: {how.__name__}", script, ["--data", f"its-{path}"], late=True,
                   make=lambda here, path=path: shutil.copy(here / path, here / f"its-{path}"),
                   at=("build_model", partial(how, f"its-{path}")), like=["--data", path, "--out", "like"])
    for script, name, how, what, argv in [
            ("tacl", "compute_loss", empty, "documents.txt", []),
            ("simcse", "build_model", os.unlink, "sts.tsv", ["--dev", "sts.tsv"]),
            ("vascl", "build_model", shutil.rmtree, "bert", ["--model", "bert"]),
            ("ease", "compute_loss", shutil.rmtree, ".", [])]:
        yield case(f"{name}, {how.__name__} {what}", script, argv, at=(name, partial(how, what)), late=True)
    for script, how in itertools.product(("simclr", "moco"), (os.unlink, empty, to_pipe)):
        yield case(f"a picture: {how.__name__}", script, ["--data", "photos"], photos(), "one line",
                   late=True, at=("build_model", partial(how, "photos/3.png")))
    for script in ("simclr", "moco"):
        argv = ["--data", "photos", "--steps", 200, "--eval-every", 300]
        yield case("a worker is killed", script, argv, photos(), "one line", late=True,
                   at=("compute_loss", kill_worker))


def to_pipe(path):
    os.unlink(path)
    os.mkfifo(path)


def kill_worker():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        os.kill(int(file.read().split()[-1]), signal.SIGKILL)


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


def of_streams():
    for shell, script in zip(("</dev/null", "<&-", ">&-", ">/dev/full", "|", "<&- >&-"), SCRIPTS):
        yield case(f"in a shell: {shell}", script, shell=shell, late=True,
                   wanted="stopped" if shell == "|" else "either")
    for script, argv in [("simcse", []), ("moco", []), ("tacl", []), ("simcse", ["--resume"])]:
        yield case(f"the same run is there {argv}", script, ["--steps", "12", *argv], wanted="one line",
                   beside=True, late=True)


def cases():
    for part in (of_signals, of_machines, of_losses, of_streams):
        yield from part()
