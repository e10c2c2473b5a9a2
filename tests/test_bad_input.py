"""Bad input: one line that names the place, what was found, what is wanted; exit code 2; no traceback, nothing written."""
import contextlib
import importlib
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig, BertModel, CanineTokenizer

import simcse

GOOD = "A man eats.,He eats.\nA dog runs.,It runs.\nThe sun is up.,It is day.\n"
STS = "sentence1\tsentence2\tscore\nA man eats.\tHe eats.\t5\n"
RUN = ["--data", "good.csv", "--model", "scratch", "--batch-size", "2", "--steps", "1"]
HOLDS = r"--resume: out holds a damaged state\.pt, model, args\.json or metrics\.jsonl \(\w+\)"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with one good file, so that messages hold short names."""
    monkeypatch.chdir(tmp_path)
    Path("good.csv").write_text(GOOD)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder that is good for --model and for --resume."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("good.csv").write_text(GOOD)
        simcse.main([*RUN, "--out", "out"])
    return folder / "out"


def damage(path, change):
    path.write_bytes(change(path.read_bytes())) if change else path.unlink()


def files():
    return {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}


def refuse(capfd, wanted, *argv, run=RUN):
    """The run ends with exit code 2 and one line on stderr that fits; every file is as it was."""
    before = files()
    with pytest.raises(SystemExit) as end:                     # of a flag given twice, the last counts
        simcse.main([*run, *argv])
    check(end.value.code, capfd.readouterr().err, wanted)
    assert files() == before


def check(code, err, wanted):
    assert code == 2
    assert re.fullmatch(rf"simcse\.py: {wanted}\n", err), err  # . fits no newline: one line


@pytest.mark.parametrize("name, content, wanted", [
    ("nli.csv", None, r"nli\.csv: No such file or directory"),
    ("nli.csv", "", r"nli\.csv: no rows"),
    ("nli.csv", "sent0,sent1,hard_neg\n", r"nli\.csv: no rows"),
    ("nli.csv", "sent0,sent1\nA,b\n\nA,b\n", r"nli\.csv line 3: 0 columns, wanted 2"),
    ("nli.tsv", "A\tb\nA\n", r"nli\.tsv line 2: 1 columns, wanted 2"),
    ("nli.jsonl", '["A", "b"]\n["A", "b", "c"]\n', r"nli\.jsonl line 2: 3 columns, wanted 2"),
    ("nli.csv", "A,b,c,d\n", r"nli\.csv line 1: 4 columns, wanted 1 \(sentence\), 2 \(.*\) or 3 \(.*\)"),
    ("nli.csv", "A,b\nA, \n", r"nli\.csv line 2: an empty cell; .*"),
    ("nli.csv", 'A,"b\nb\nb"\nA,b\nA,""\n', r"nli\.csv line 5: an empty cell; .*"),
    ("wiki.txt", "A\n\nB\n", r"wiki\.txt line 2: an empty cell; .*"),
    ("nli.jsonl", '{"a": "A", "b": "B"}\n{"a": "A"}\n', r"nli\.jsonl line 2: an empty cell; .*"),
    ("nli.csv", b"A,b\nA,b\nA,\xff\n", r"nli\.csv line 3: not UTF-8; convert .*"),
    ("wiki.txt", b"\xef\xbb\xbfA\n\xff\n", r"wiki\.txt line 2: not UTF-8; convert .*"),           # after a byte order mark
    ("folder", "folder", r"folder: Is a directory"),
    ("nli.xlsx", "A,b\n", r"nli\.xlsx: wanted a name that ends in \.txt, \.csv, \.tsv, \.json or \.jsonl"),
    ("nli.json", '[["A", "b"],\n["A" "b"]]', r"nli\.json line 2: not JSON: Expecting ',' delimiter"),
    ("nli.jsonl", '["A"]\n["A"\n["A"]\n', r"nli\.jsonl line 2: not JSON: Expecting ',' delimiter"),
    ("nli.json", "[" * 100_000, r"nli\.json line 1: not JSON: .*"),
    ("nli.jsonl", '["A"]\n5\n', r"nli\.jsonl line 2: wanted a row of texts, found '5'"),
    ("nli.json", '["A b", "A b"]', r"nli\.json item 1: wanted a row of texts, found 'A b' \(1 more rows are wrong: item 2\)"),
    ("nli.jsonl", '{"a": null}\n', r"nli\.jsonl line 1: wanted a row of texts, found '\[None\]'"),
    ("nli.csv", 'A,b\nA,"b\nA,b\n', r"nli\.csv after line 1: unexpected end of data; close every \", .*"),
    ("nli.csv", "A,b\n", r"nli\.csv: 1 rows, wanted at least 2 and --batch-size, which is 1")])
def test_data(here, capfd, name, content, wanted):
    if content == name:
        Path(name).mkdir()
    elif content is not None:
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    refuse(capfd, wanted, "--batch-size", "1", "--data", name)


@pytest.mark.parametrize("flags, wanted", [
    ("--batch-size 4", r"good\.csv: 3 rows, wanted at least 2 and --batch-size, which is 4"),
    ("--temperature 0", r"argument --temperature: 0: wanted a number of at least 0\.0001"),
    ("--temperature nan", r"argument --temperature: nan: wanted a number of at least 0\.0001"),
    ("--temperature warm", r"argument --temperature: invalid float value: 'warm'"),
    ("--max-length 2", r"argument --max-length: 2: wanted a number of at least 3"),
    ("--max-length 513", r"--max-length 513: scratch reads at most 512 tokens"),
    ("--batch-size 0", r"argument --batch-size: 0: wanted a number of at least 1"),
    ("--lr nan", r"argument --lr: nan: wanted a number of at least 0"),
    ("--pooling best", r"argument --pooling: invalid choice: 'best' \(choose from .*cls_before_pooler.*\)"),
    ("--frobnicate", r"unrecognized arguments: --frobnicate"),
    ("--model none/such", r"--model none/such: no such folder, and the hub .*; name a local folder, or take scratch"),
    ("--out good.csv", r"--out good\.csv: /.*/good\.csv is no folder that can be written"),
    ("--out good.csv/out", r"--out good\.csv/out: /.*/good\.csv is no folder that can be written"),
    ("--out .", r"--out \. holds files but no checkpoint: empty it, or name another folder"),
    ("--resume --out new", r"--out new: no state\.pt to resume from")])
def test_flags(here, capfd, flags, wanted):
    refuse(capfd, wanted, *flags.split())


def test_data_is_required(here, capfd):
    refuse(capfd, r"the following arguments are required: --data", run=["--model", "scratch"])


@pytest.mark.parametrize("flags, wanted", [
    pytest.param("--impl triton", r"--impl: 'triton' .*(TRITON_INTERPRET=1|not installed).*",
                 marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU needs no interpreter")),
    ("--model model", r"--model model: 16 weights, such as encoder\.layer\.2\..*, are missing or do not fit its config.*")])
def test_in_a_process_of_its_own(here, finished, flags, wanted):
    """Where libraries write to the true stderr, and nothing has asked for Triton's interpreter."""
    shutil.copytree(finished, "model")
    damage(Path("model/config.json"), lambda old: old.replace(b'layers": 2', b'layers": 3'))
    environment, before = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}, files()
    run = subprocess.run([sys.executable, simcse.__file__, *RUN, *flags.split()], env=environment, capture_output=True)
    check(run.returncode, run.stderr.decode(), wanted)
    assert files() == before


@pytest.mark.parametrize("name", "simcse selfguided ease vascl dclr cline tacl childtuning".split())
def test_slow_tokenizer(name, tmp_path):
    """One without words in a file, in a folder whose weights fit."""
    BertModel(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16, vocab_size=16)).save_pretrained(tmp_path)
    CanineTokenizer().save_pretrained(tmp_path)
    args = SimpleNamespace(model=str(tmp_path), labels=["a", "b"], task="classification", head_seed=0, seed=0)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as end:
        script = importlib.import_module(name)
        script.load_pretraining("--model", args.model, args) if name == "tacl" else script.load_encoder(args)
    wanted = f"{name}.py: --model {tmp_path}: CanineTokenizer is a slow tokenizer; wanted one with a tokenizer.json\n"
    assert end.value.code == 2 and said.getvalue().endswith(wanted)   # behind transformers' progress bars


@pytest.mark.parametrize("flag", ["--dev", "--test"])
@pytest.mark.parametrize("content, wanted", [
    (None, r"sts\.tsv: No such file or directory"),
    ("sentence1\tsentence2\nA\tb\n", r"sts\.tsv: sentence1, sentence2; wanted sentence1, sentence2, score, or 3 columns.*"),
    (STS + "A\tb\tmany\n", r"sts\.tsv line 3: score 'many', wanted a number from 0 to 5"),
    (STS + "A\tb\t7\n", r"sts\.tsv line 3: score '7', wanted a number from 0 to 5"),
    (STS + "A\tb\tnan\n", r"sts\.tsv line 3: score 'nan', wanted a number from 0 to 5"),
    (STS + "A\t \t1\n", r"sts\.tsv line 3: an empty sentence"),
    (STS + "A\tb\t\n", r"sts\.tsv: 1 scored pairs, wanted at least 2")])
def test_scored_pairs(here, capfd, flag, content, wanted):
    if content is not None:
        Path("sts.tsv").write_text(content)
    refuse(capfd, wanted, flag, "sts.tsv")


@pytest.mark.parametrize("file, change, wanted", [
    ("config.json", None, r"no config\.json in this folder, so it is no transformers model"),
    ("config.json", lambda old: b"{", r".*config\.json.* not a valid JSON file.*"),
    ("config.json", lambda old: old.replace(b"128", b"64"), r"\d+ weights, such as .*, .* do not fit its config\.json"),
    ("model.safetensors", None, r".*no file named model\.safetensors.*"),
    ("model.safetensors", lambda old: old[:-9], r"SafetensorError: .*"),
    ("tokenizer.json", None, r"the words of its tokenizer are missing .*")])
def test_model_folder(here, capfd, finished, file, change, wanted):
    shutil.copytree(finished, "model")
    damage(Path("model", file), change)
    refuse(capfd, "--model model: " + wanted, "--model", "model")


@pytest.mark.parametrize("file, change, flags, wanted", [
    ("state.pt", None, "", r"--out out: no state\.pt to resume from"),
    ("state.pt", lambda old: old[:5000], "", HOLDS),
    ("state.pt", lambda old: b"", "", HOLDS),
    ("model.safetensors", lambda old: old[:-9], "", HOLDS),
    ("metrics.jsonl", lambda old: b"{\n", "", HOLDS),
    ("args.json", None, "", HOLDS),
    ("args.json", lambda old: old, "--lr 1", r"--resume: lr was 0\.002 in out, now it is 1\.0"),
    ("args.json", lambda old: old, "--pooling cls", r"--resume: pooling was avg in out, now it is cls")])
def test_resume(here, capfd, finished, file, change, flags, wanted):
    shutil.copytree(finished, "out")
    damage(Path("out", file), change)
    refuse(capfd, wanted, "--resume", "--out", "out", *flags.split())
