"""After a mistake of the user or a failure of the machine, a command prints one line, which names what is
wrong, and ends with exit code 2. It writes and changes no file."""
import ctypes
import json
import os
import re
import resource
import struct
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from good import change_files, with_settings, words
from running import run_command

# ── functions that set a condition in the process of a command, before the command runs ──


def limit_memory(megabytes):
    """Limit the memory of this process to its present size plus `megabytes`."""
    size = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (size + megabytes * 2**20,) * 2)


def close(path, mode):
    """Change the permissions of a path. If this process is root, give up the right to ignore permissions."""
    os.chmod(path, mode)
    if os.geteuid() == 0:
        ctypes.CDLL(None).capset(struct.pack("Ii", 0x20080522, 0), bytes(24))


# ── files that are written before a command runs ──


def add_token(old):
    content = json.loads(old)
    content["added_tokens"].append(content["added_tokens"][0] | dict(id=11, content="cat", special=False))
    return json.dumps(content).encode()


NAN = {"bert/model.safetensors": lambda old: save({name: x * torch.nan for name, x in load(old).items()})}
OTHER_DATA = {"few.csv": lambda old: old.replace(b" a ", b" the ")}
SHORTER = {"bert/model.safetensors": lambda old: old[:-9]}

# (script and flags, files written before, "PART | PART ..." of the message, function that sets a condition)
MISTAKES = [
    # ── flags ──
    ("simclr --no-such-flag", {}, "--no-such-flag"),
    ("dclr --batch-size -4", {}, "--batch-size | -4 | at least 1"),
    ("simcse --lr nan", {}, "--lr | nan | a number of at least 0"),
    ("simcse --batch-size 1", {}, "--batch-size 1 | at least 2"),
    ("simcse --batch-size 13", {}, "few.csv | 12 rows | --batch-size | smaller"),
    ("simcse --max-length 513", {}, "--max-length 513 | scratch | at most 512 tokens"),
    ("simcse --columns sent0 nothing", {}, "few.csv | --columns | nothing | sent0, sent1, hard_neg"),
    ("simcse --evaluate --model bert", {}, "--evaluate | nothing to evaluate | --dev"),
    ("selfguided --evaluate --dev sts.tsv", {}, "--model scratch | untrained"),
    ("simcse --model few.csv", {}, "--model few.csv | a file, expected a folder"),
    # ── data ──
    ("simcse --data none.csv", {}, "none.csv | No such file"),
    ("vascl --data a.txt", {"a.txt": ""}, "a.txt | no rows"),
    ("simcse --data a.csv", {"a.csv": "a,b\nA,B\nC,\n"}, "a.csv line 3 | empty"),
    ("ease --data a.tsv", {"a.tsv": "text\tpositive_entity\nA\tB\nC\n"}, "a.tsv line 3 | 1 col | expected 2"),
    ("selfguided --data a.jsonl", {"a.jsonl": '{"text": "A"}\n{"text": \n'}, "a.jsonl line 2 | JSON"),
    ("cline --data a.txt", {"a.txt": b"A\nB\xe9\n"}, "a.txt line 2 | UTF-8"),
    ("cline --wordnet none", {}, "--wordnet none | data.noun"),
    ("cline --data a.csv", {"a.csv": "A,B,C\n" * 9}, "--wordnet | a.csv | triples"),
    ("moco --v1 --blur 1", {}, "--blur 1 | --v1"),
    ("moco --queue-size 30", {}, "--queue-size 30 | multiple of 8 | try 24"),
    ("simclr --supervised --ring", {}, "--ring does not support --supervised"),
    ("simclr --supervised --data photos", {}, "--supervised | photos has none"),
    ("tacl --data few.txt", {}, "few.txt | 1 documents | at least 2"),
    ("simcse --dev a.tsv", {"a.tsv": "a\tb\t1\nA\tB\tfive\n"}, "a.tsv line 2 | five | from 0 to 5"),
    ("simcse --dev a.csv", {"a.csv": "query,neg\nA,B\n"}, "no positive | query, neg | --dev-columns"),
    ("simcse --dev a.jsonl", {"a.jsonl": '{"query": "A", "pos": []}\n'}, "a.jsonl line 1 | an empty list"),
    ("simcse --dev few.csv --dev-columns sent0", {}, "few.csv | 1 column | query, positive | --dev-columns"),
    ("simcse --dev a.csv", {"a.csv": "query,positive\nA,B\nC,B\n"}, "a.csv | the same text | 2 different"),
    ("childtuning --dev a.tsv", {"a.tsv": "sentence\tlabel\nA\tkitchen\nB\tgarden\n"},
     "a.tsv line 3 | garden | topics.tsv | kitchen"),
    ("vascl --data a.tsv", {"a.tsv": "".join(f"q{i}\tText {i}.\n" for i in range(9))},
     "a.tsv | column 1 | q0 | --columns"),
    ("childtuning --data a.csv", {"a.csv": "id,text,label\nx1,A,b\nx2,C,d\n"}, "a.csv | x1 | --columns"),
    ("childtuning --data a.csv", {"a.csv": "text,label,label_text\nA,0,yes\nB,1,no\n"},
     "label or in label_text | --columns"),
    ("childtuning --data a.csv", {"a.csv": "".join(f"the topic,Text {i}.\n" for i in range(21))},
     "a.csv | 21 different labels in 21 rows | --columns"),
    ("simcse --data a.csv", {"a.csv": "".join(f"A {i}.,B {i}.,neutral\n" for i in range(20))},
     "a.csv | column 3 | neutral | --columns"),
    ("vascl --data a.txt", {"a.txt": "A man.\tHe eats.\n" * 9}, "a.txt | tabs | .tsv"),
    ("selfguided --columns text --data a.jsonl", {"a.jsonl": '{"text": ["A", "B"]}\n'}, "line 1 | texts"),
    ("docs/more/consert --data few.csv", {}, "few.csv | 3 columns, expected 1 (sentences) or 2"),
    ("docs/more/declutr --data few.txt --max-length 32", {}, "few.txt | 0 long documents | --batch-size"),
    ("docs/more/simcls --columns sent0 sent1", {}, "2 columns, expected text, reference and candidates"),
    ("docs/more/cil --evaluate --model .", {}, "--model . | no heads.safetensors"),
    ("ease --entity-vectors a.txt", {"a.txt": "1 2\nENTITY/A 1 2\n"}, "a.txt | entities | ENTITY/"),
    ("ease --data a.csv", {"a.csv": "sent0,sent1\nA,b\n"}, "a.csv | columns sent0, sent1 | text"),
    ("ease --data a.csv", {"a.csv": "text,entity,negative_entity\n" + "A,B,C\n" * 4 + "D,E,E\n"},
     "a.csv line 6 | 0 hard"),
    ("childtuning --data a.tsv", {"a.tsv": "sentence\tlabel\n" + "A\tx\n" * 5}, "a.tsv | every label is 'x'"),
    ("childtuning --task regression --data a.tsv", {"a.tsv": "A\t1\n" * 4 + "B\tx\n"},
     "a.tsv line 5 | label 'x'"),
    ("childtuning --mode D --child-filter h.0", {}, "--child-filter h.0 | no parameter name"),
    ("moco --data photos", {"photos/3.png": "no image"}, "photos | 3.png | --skip-damaged"),
    ("simclr --data few.npz", {"few.npz": lambda old: old[:-99]}, "few.npz"),
    # ── models ──
    ("childtuning --model bert", {"bert/model.safetensors": None}, "--model bert | model.safetensors"),
    ("vascl --model bert", SHORTER, "--model bert"),
    ("ease --model bert", {"bert/config.json": with_settings(hidden_size=64)},
     "--model bert | weights | config.json"),
    ("tacl --teacher bert --model bert", {"bert/tokenizer.json": add_token}, "bert | cat | 81 | embeddings"),
    ("dclr --guide bert", NAN, "--guide bert | NaN"),
    ("selfguided --model net", {}, "--model net"),
    ("moco --model bert", {}, "--model bert | image encoder"),
    ("docs/more/simclr_v2 --teacher net", {}, "--teacher net | no classifier"),
    ("docs/more/simclr_v2 --from-layer 3", {}, "--from-layer 3 | --model net | 2 linear layers"),
    ("dclr --guide their/model", {}, "--guide their/model | no such folder | download failed"),
    # ── output folder, --resume ──
    ("moco --out net", {}, "--out net | finished run"),
    ("simcse --out half", {}, "--out half | another run | --resume"),
    ("vascl --out few.txt", {}, "--out few.txt"),
    ("moco --data photos --out photos/new/out", {}, "--out photos/new/out: inside --data photos"),
    ("simcse --out bert --resume", {}, "--out bert | files but no run | empty it"),
    ("simcse --out half --resume --lr 1", {}, "--resume | lr was 0.002 | now it is 1"),
    ("simcse --out half --resume", OTHER_DATA, "--resume | --data few.csv | changed"),
    ("simcse --out half --resume", {"half/state.pt": lambda old: old[:-99]}, "state.pt"),
    ("simcse --out half --resume", {"half/state.pt": None}, "half | finished run | --model half --out NEW"),
    ("simcse --out half --resume", {"half/metrics.jsonl": "{\n"}, "metrics.jsonl in half cannot be read"),
    ("simcse --out half --resume", {"half/args.json": None}, "args.json | in half cannot be read"),
    ("simcse --out half --resume --steps 9", {}, "steps was 1 in half, now it is 9; to train | --out NEW"),
    ("simcse --out half --resume --steps 9", {"half/config.json": None}, "now it is 9; start a new run"),
    ("simcse --out ../half --resume", {}, "few.csv | No such file", partial(os.chdir, "bert")),
    # ── machine ──
    ("cline", {}, "--out out | writable", partial(close, ".", 0o500)),
    ("vascl", {}, "few.txt | Permission denied", partial(close, "few.txt", 0)),
    ("moco --queue-size 5000000", {}, "memory is full | lower | --batch-size", partial(limit_memory, 1000))]


def files_in(folder):
    """Return {path: (size, time, inode) of a file, True for a folder}, without files of stdout and stderr."""
    found = {path: path.lstat() for path in folder.rglob("*") if path.name not in ("printed", "errors")}
    return {path: path.is_dir() or (about.st_size, about.st_mtime_ns, about.st_ino)
            for path, about in found.items()}


def check_refusal(done, script, message):
    """Check for exit code 2, and a line "SCRIPT.py: ..." on stderr with all parts of "PART | PART"."""
    assert done.code == 2, done.errors
    assert re.fullmatch(rf"{Path(script).name}\.py: [^\x00-\x1f\x7f]+\n", done.errors), done.errors
    assert [part for part in message.split(" | ") if part not in done.errors] == [], done.errors


@pytest.mark.parametrize("command, made, message, condition", [
    pytest.param(*row, *[None] * (4 - len(row)), id=row[0] + ": " + row[2]) for row in MISTAKES])
def test_mistakes(command, made, message, condition, here):
    change_files(here, made)
    before = files_in(here)
    done = run_command(words(command), here, setup=condition)
    check_refusal(done, command.split()[0], message)
    assert files_in(here) == before


@pytest.mark.parametrize("script, keep, message", [
    ("simcse --ignore-equal --data a.csv", set(), "--ignore-equal | no negatives"),
    ("simcse --eval-every 3", set(), "step 2 | not finite | no checkpoint | --lr"),
    ("moco --eval-every 1", {"state.pt", "model.safetensors"}, "finite | checkpoint of step 1 | --lr")])
def test_runs_that_fail(script, keep, message, here):
    """The run ends with exit code 2 and one line. If it has saved a checkpoint, the checkpoint remains."""
    change_files(here, {"a.csv": "A dog,A cat\n" * 9})
    done = run_command(words(f"{script} --lr 1e18 --steps 3"), here)
    check_refusal(done, script.split()[0], message)
    assert keep == {path.name for path in (here / "out").iterdir()} & {"state.pt", "model.safetensors"}
