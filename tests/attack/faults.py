"""What happens to a run on its way: signals, full disks, little memory, what disappears, a second run."""
import itertools
import os
import re
import resource
import shutil
import signal
import socket
from functools import partial
from pathlib import Path

from cases import DATA, SCRIPTS, Case, both, put
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


GROUP = dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
NO_NUMBERS = ["", "x", "-1", " 0", "0 ", "0\n", "+1", "1.0", "1e3", "0x1", "1_0", "٣", "９", "\udcff",
              "\u202e1", "9" * 5000]
BUSY = socket.create_server(("", 0))                          # for as long as this process lives
RANKS = {
    "RANK alone": dict(RANK="0"), "RANK 1 alone": dict(RANK="1"), "WORLD_SIZE alone": dict(WORLD_SIZE="2"),
    "RANK is WORLD_SIZE": GROUP | dict(RANK="2"), "a large RANK": GROUP | dict(RANK="9" * 18),
    "WORLD_SIZE 0": GROUP | dict(WORLD_SIZE="0"), "WORLD_SIZE 10^9": GROUP | dict(WORLD_SIZE="1000000000"),
    "WORLD_SIZE 2^31": GROUP | dict(WORLD_SIZE=str(2**31)), "LOCAL_RANK 99 alone": dict(LOCAL_RANK="99"),
    "LOCAL_WORLD_SIZE 0": dict(LOCAL_WORLD_SIZE="0"),
    "no MASTER_ADDR": GROUP | dict(MASTER_ADDR=None), "no MASTER_PORT": GROUP | dict(MASTER_PORT=None),
    "MASTER_PORT 0": GROUP | dict(MASTER_PORT="0"), "MASTER_PORT 65536": GROUP | dict(MASTER_PORT="65536"),
    "a busy port": GROUP | dict(MASTER_PORT=str(BUSY.getsockname()[1])),
    "one process": dict(RANK="0", WORLD_SIZE="1"), "00 of 01": dict(RANK="00", WORLD_SIZE="01"),
    "one process, bad master": GROUP | dict(WORLD_SIZE="1", MASTER_ADDR="no..host", MASTER_PORT="-1")}
HOSTS = ["", " ", "no..host", "no.such.invalid", "256.256.256.256", "\udcff", "\u202ehost", "a" * 300,
         "http://127.0.0.1"]


def of_ranks():
    """Variables of torchrun's that cannot be: before --out is touched."""
    scripts = itertools.cycle(SCRIPTS)
    for name, env in RANKS.items():
        fine = "alone" in name and "LOCAL" in name or "one process" in name or name.startswith("00")
        yield case(f"ranks: {name}", next(scripts), env=env, wanted="accepted" if fine else "one line")
    numbers = itertools.cycle(["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "LOCAL_WORLD_SIZE"])
    for text, variable in zip(NO_NUMBERS * 2, numbers):
        yield case(f"ranks: {variable} {text[:9]!a}", next(scripts), env=GROUP | {variable: text},
                   wanted="one line")
    for host in HOSTS:
        yield case(f"ranks: MASTER_ADDR {host[:20]!a}", next(scripts), env=GROUP | dict(MASTER_ADDR=host),
                   wanted="one line")
    for env in (GROUP | dict(RANK="x"), dict(WORLD_SIZE="2"), GROUP | dict(MASTER_PORT="")):
        yield case(f"ranks: {env}, in a shell", next(scripts), env=env, wanted="one line", shell="")


ENVIRONMENTS = [
    dict(OMP_NUM_THREADS="x"), dict(OMP_NUM_THREADS="-1"), dict(OMP_NUM_THREADS="1000000000"),
    dict(TERM="nonsense", COLUMNS="x", LINES="-1"), dict(COLUMNS="1"), dict(PYTHONIOENCODING="ascii"),
    dict(LANG="C", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"), dict(LC_ALL="x", TZ="nonsense"),
    dict(HOME=None), dict(HOME="/proc/none", XDG_CACHE_HOME="/proc/none"), dict(HF_HOME="/proc/none"),
    dict(TMPDIR="/proc/none"), dict(PATH=None, USER=None, LOGNAME=None), dict(CUDA_VISIBLE_DEVICES="x"),
    dict(TOKENIZERS_PARALLELISM="x", HF_HUB_OFFLINE="x"), dict(TRITON_CACHE_DIR="/proc/none"),
    dict(PYTHONOPTIMIZE="1"), dict(PYTHONOPTIMIZE="2")]


def of_environments():
    for env, script in zip(ENVIRONMENTS, itertools.cycle(SCRIPTS)):
        yield case(f"environment: {env}", script, env=env, shell="",
                   wanted="one line" if "2" in env.values() else "accepted")


TURNED = "a\u202eb\u2066c\u061cd\ufeffe\U000e0041f\xadg\x9bh"                 # bidi controls, a tag, others


def of_letters():
    """What would turn or hide letters on a terminal; joiners, which Persian wants, stay."""
    few, out, sts = (DATA / "nli.csv").read_text("utf-8"), f"{TURNED}.csv", f"1\t{TURNED}\tb\n2\tc\td\n"
    for script, argv, make, wanted in [
            ("simcse", ["--data", out], None, "one line"),
            ("simcse", ["--data", out], put(out, few), "accepted"),
            ("vascl", ["--out", TURNED], None, "accepted"), ("ease", ["--model", TURNED], None, "one line"),
            ("dclr", ["--guide", TURNED], None, "one line"),
            ("selfguided", [f"--{TURNED}"], None, "one line"),
            ("simcse", ["--columns", TURNED], None, "one line"), ("tacl", ["--lr", TURNED], None, "one line"),
            ("simcse", ["--data", "a.csv"], put("a.csv", few.replace("sent0", TURNED)), "either"),
            ("simcse", ["--data", "a.csv"], put("a.csv", few + f"{TURNED}\n"), "one line"),
            ("vascl", ["--dev", "a.tsv"], put("a.tsv", sts + f"{TURNED}\ta\tb\n"), "one line"),
            ("childtuning", ["--data", "a.tsv"],
             put("a.tsv", "".join(f"text {i}\t{'xy'[i % 2]}{TURNED}\n" for i in range(24))), "accepted"),
            ("simclr", ["--data", "photos"], both(photos(), put(f"photos/{TURNED}.png", "none")), "one line"),
            ("moco", ["--data", f"{TURNED}.npz"], put(f"{TURNED}.npz", "none"), "one line"),
            ("cline", ["--wordnet", TURNED], None, "one line"), ("tacl", ["--dev", TURNED], None, "one line"),
            ("simcse", ["--prompt", TURNED], None, "accepted"),
            ("simcse", ["--data", "a\u200c\u200db.csv"], put("a\u200c\u200db.csv", few), "accepted")]:
        yield case(f"letters: {' '.join(argv)!a}, {wanted}", script, argv, make, wanted)


def of_folders():
    """Another run is begun in --out while this one is starting, or nothing but a file comes."""
    for name, wanted in [("args.json", "one line"), ("metrics.jsonl", "accepted")]:
        yield case(f"meanwhile in --out: {name}", "simcse", wanted=wanted, late=True,
                   at=("begin", partial(appear, f"out/{name}")))


def appear(path):
    Path(path).parent.mkdir()
    Path(path).write_text('{"seed": 1}')


def cases():
    for part in (of_signals, of_machines, of_losses, of_streams, of_ranks, of_environments, of_letters,
                 of_folders):
        yield from part()
