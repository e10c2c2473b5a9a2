"""The surroundings of a run: variables of torchrun's and of others, letters that steer a terminal."""
import itertools
import socket
from functools import partial

from cases import DATA, SCRIPTS, Case, both, put
from pictures import photos

case = partial(Case, "surroundings")

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


def cases():
    for part in (of_ranks, of_environments, of_letters):
        yield from part()
