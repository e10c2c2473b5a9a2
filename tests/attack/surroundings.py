"""Bad values of torchrun's and other environment variables, and control characters in names and data."""
import itertools
import socket
from functools import partial

from cases import DATA, SCRIPTS, Case, all_of, write_file
from images import write_photos

case = partial(Case, "surroundings")

TORCHRUN = dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
NOT_NUMBERS = ["", "x", "-1", " 0", "0 ", "0\n", "+1", "1.0", "1e3", "0x1", "1_0", "٣", "９", "\udcff",
               "\u202e1", "9" * 5000]
BUSY_SOCKET = socket.create_server(("", 0))                   # busy while this process lives
RANKS = {
    "RANK alone": dict(RANK="0"), "RANK 1 alone": dict(RANK="1"), "WORLD_SIZE alone": dict(WORLD_SIZE="2"),
    "RANK is WORLD_SIZE": TORCHRUN | dict(RANK="2"), "a large RANK": TORCHRUN | dict(RANK="9" * 18),
    "WORLD_SIZE 0": TORCHRUN | dict(WORLD_SIZE="0"),
    "WORLD_SIZE 10^9": TORCHRUN | dict(WORLD_SIZE="1000000000"),
    "WORLD_SIZE 2^31": TORCHRUN | dict(WORLD_SIZE=str(2**31)), "LOCAL_RANK 99 alone": dict(LOCAL_RANK="99"),
    "LOCAL_WORLD_SIZE 0": dict(LOCAL_WORLD_SIZE="0"),
    "no MASTER_ADDR": TORCHRUN | dict(MASTER_ADDR=None), "no MASTER_PORT": TORCHRUN | dict(MASTER_PORT=None),
    "MASTER_PORT 0": TORCHRUN | dict(MASTER_PORT="0"),
    "MASTER_PORT 65536": TORCHRUN | dict(MASTER_PORT="65536"),
    "a busy port": TORCHRUN | dict(MASTER_PORT=str(BUSY_SOCKET.getsockname()[1])),
    "one process": dict(RANK="0", WORLD_SIZE="1"), "00 of 01": dict(RANK="00", WORLD_SIZE="01"),
    "one process, bad master": TORCHRUN | dict(WORLD_SIZE="1", MASTER_ADDR="no..host", MASTER_PORT="-1")}
HOSTS = ["", " ", "no..host", "no.such.invalid", "256.256.256.256", "\udcff", "\u202ehost", "a" * 300,
         "http://127.0.0.1"]


def rank_cases():
    """Yield cases with bad torchrun variables; a script must refuse them before it touches --out."""
    scripts = itertools.cycle(SCRIPTS)
    for name, env in RANKS.items():
        good = "alone" in name and "LOCAL" in name or "one process" in name or name.startswith("00")
        yield case(f"ranks: {name}", next(scripts), env=env, expected="accepted" if good else "one line")
    numbers = itertools.cycle(["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "LOCAL_WORLD_SIZE"])
    for text, variable in zip(NOT_NUMBERS * 2, numbers):
        yield case(f"ranks: {variable} {text[:9]!a}", next(scripts), env=TORCHRUN | {variable: text},
                   expected="one line")
    for host in HOSTS:
        yield case(f"ranks: MASTER_ADDR {host[:20]!a}", next(scripts), env=TORCHRUN | dict(MASTER_ADDR=host),
                   expected="one line")
    for env in (TORCHRUN | dict(RANK="x"), dict(WORLD_SIZE="2"), TORCHRUN | dict(MASTER_PORT="")):
        yield case(f"ranks: {env}, in a shell", next(scripts), env=env, expected="one line", shell="")


ENVIRONMENTS = [
    dict(OMP_NUM_THREADS="x"), dict(OMP_NUM_THREADS="-1"), dict(OMP_NUM_THREADS="1000000000"),
    dict(TERM="nonsense", COLUMNS="x", LINES="-1"), dict(COLUMNS="1"), dict(PYTHONIOENCODING="ascii"),
    dict(LANG="C", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"), dict(LC_ALL="x", TZ="nonsense"),
    dict(HOME=None), dict(HOME="/proc/none", XDG_CACHE_HOME="/proc/none"), dict(HF_HOME="/proc/none"),
    dict(TMPDIR="/proc/none"), dict(PATH=None, USER=None, LOGNAME=None), dict(CUDA_VISIBLE_DEVICES="x"),
    dict(TOKENIZERS_PARALLELISM="x", HF_HUB_OFFLINE="x"), dict(TRITON_CACHE_DIR="/proc/none"),
    dict(PYTHONOPTIMIZE="1"), dict(PYTHONOPTIMIZE="2")]


def environment_cases():
    for env, script in zip(ENVIRONMENTS, itertools.cycle(SCRIPTS)):
        yield case(f"environment: {env}", script, env=env, shell="",
                   expected="one line" if "2" in env.values() else "accepted")


HIDDEN = "a\u202eb\u2066c\u061cd\ufeffe\U000e0041f\xadg\x9bh"   # bidi controls, a tag character, others


def letter_cases():
    """Yield cases with characters that reorder or hide text on a terminal; joiners are allowed."""
    few, out, sts = (DATA / "nli.csv").read_text("utf-8"), f"{HIDDEN}.csv", f"1\t{HIDDEN}\tb\n2\tc\td\n"
    for script, argv, make, expected in [
            ("simcse", ["--data", out], None, "one line"),
            ("simcse", ["--data", out], write_file(out, few), "accepted"),
            ("vascl", ["--out", HIDDEN], None, "accepted"), ("ease", ["--model", HIDDEN], None, "one line"),
            ("dclr", ["--guide", HIDDEN], None, "one line"),
            ("selfguided", [f"--{HIDDEN}"], None, "one line"),
            ("simcse", ["--columns", HIDDEN], None, "one line"), ("tacl", ["--lr", HIDDEN], None, "one line"),
            ("simcse", ["--data", "a.csv"], write_file("a.csv", few.replace("sent0", HIDDEN)), "either"),
            ("simcse", ["--data", "a.csv"], write_file("a.csv", few + f"{HIDDEN}\n"), "one line"),
            ("vascl", ["--dev", "a.tsv"], write_file("a.tsv", sts + f"{HIDDEN}\ta\tb\n"), "one line"),
            ("childtuning", ["--data", "a.tsv"],
             write_file("a.tsv", "".join(f"text {i}\t{'xy'[i % 2]}{HIDDEN}\n" for i in range(24))),
             "accepted"),
            ("simclr", ["--data", "photos"],
             all_of(write_photos(), write_file(f"photos/{HIDDEN}.png", "none")), "one line"),
            ("moco", ["--data", f"{HIDDEN}.npz"], write_file(f"{HIDDEN}.npz", "none"), "one line"),
            ("cline", ["--wordnet", HIDDEN], None, "one line"), ("tacl", ["--dev", HIDDEN], None, "one line"),
            ("simcse", ["--prompt", HIDDEN], None, "accepted"),
            ("simcse", ["--data", "a\u200c\u200db.csv"], write_file("a\u200c\u200db.csv", few), "accepted")]:
        yield case(f"letters: {' '.join(argv)!a}, {expected}", script, argv, make, expected)


def cases():
    for part in (rank_cases, environment_cases, letter_cases):
        yield from part()
