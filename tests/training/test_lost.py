"""Runs that cannot begin again, tokens that are cut, closed streams, a disk and a memory that are full, names
that steer a terminal. Faults at each stage of a run: tests/attack/faults.py."""
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoTokenizer

import simcse
from kernels.benchmark import measure as benchmark
from kernels.printing import one_line
from kernels.training import output_dir
from kernels.training.cli import Fault, Flags, command, fail, handle_signals, put
from kernels.training.extras import layer_study, plot, triples
from kernels.training.progress import progress
from kernels.training.text.tokens import tokenise_table
from running import DATA, GOOD, KEPT, ROOT, SMALL, metrics, refuse, run

FLAGS = [*KEPT, "--steps", "3", "--eval-every", "2"]


@pytest.mark.parametrize("kind", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_while_torch_is_imported(kind, tmp_path):
    code = f"import os, signal, time\nos.kill(os.getpid(), signal.{kind})\ntime.sleep(9)"
    (tmp_path / "torch.py").write_text(code)
    done = subprocess.run([sys.executable, ROOT / "simcse.py", "--data", "x.csv"], text=True, timeout=8,
                          env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "stopped  before anything was saved\n", "")


def test_nohup_is_obeyed():
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with pytest.raises(SystemExit):
            command(lambda argv=None: (signal.raise_signal(signal.SIGHUP), fail("it went on")))()
        handle_signals(signal.SIG_DFL)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_begun_again_with_other_flags(here, monkeypatch, capfd):
    """A run without a checkpoint is another run too: --resume is needed, and its flags."""
    monkeypatch.setattr("simcse.HeldOut.before", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit, match="130"):
        simcse.main([*FLAGS, "--out", "out"])
    capfd.readouterr()
    wanted = "--out out holds a run that has no checkpoint yet: begin it again with --resume, or name .*"
    refuse("simcse", capfd, wanted, *FLAGS, "--out", "out")
    wanted = r"--resume: lr was 0\.002 in out, now it is 1\.0"
    refuse("simcse", capfd, wanted, *FLAGS, "--out", "out", "--resume", "--lr", "1")


def test_a_run_that_is_done_is_not_begun_again(here, capfd):
    for keep in ("running", "never"):
        simcse.main([*FLAGS, "--out", keep, "--keep-state", keep])
        capfd.readouterr()
        wanted = rf"--out {keep} holds a finished run: .* start a new run with --model {keep} --out NEW"
        refuse("simcse", capfd, wanted, *FLAGS, "--out", keep, "--resume")
        wanted = wanted.replace("run: ", "run: name another folder, or ")
        refuse("simcse", capfd, wanted, *FLAGS, "--out", keep)


def test_out_within_the_pictures(here):
    Path("pictures").mkdir()
    for out in ("pictures", "pictures/a/out"):
        with pytest.raises(Fault, match="lies in --data pictures, where it would be taken for data"):
            output_dir.check_out(Path(out), False, "pictures")
    output_dir.check_out(Path("pictures-out"), False, "pictures")


def test_a_file_spelt_otherwise_is_the_same(here, finished):
    shutil.copytree(finished, "out")
    Path("link.csv").symlink_to("good.csv")
    flags = [flag.replace("good.csv", "link.csv") for flag in map(str, SMALL)]
    simcse.main([*flags, "--out", "../" + Path().absolute().name + "/out", "--resume"])
    assert len(metrics(Path("out"))) == 1


# ── tokens ──


def made(tmp_path, bert, texts):
    model = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(bert), longest=512, prompted=list,
                            encoder=SimpleNamespace(get_input_embeddings=lambda: None))
    run = SimpleNamespace(out=tmp_path, rank=0, world=1, args=SimpleNamespace(max_length=8))
    return tokenise_table([(None, (text,)) for text in texts], model, run)


DAMAGES = {"zeroed": lambda path: (path / "ids").write_bytes(bytes((path / "ids").stat().st_size)),
           "a bit": lambda path: (path / "ends").write_bytes(b"\1" + (path / "ends").read_bytes()[1:]),
           "cut": lambda path: os.truncate(path / "ends", (path / "ends").stat().st_size - 8),
           "longer": lambda path: (path / "ids").open("ab").write(b"more"),
           "empty": lambda path: os.truncate(path / "ids", 0),
           "ids gone": lambda path: (path / "ids").unlink(),
           "all gone": lambda path: [file.unlink() for file in path.iterdir()],
           "of other data": lambda path: made(path.parent, path.parents[1] / "bert", ["Two.", "Rows."])}


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_tokens_are_made_anew(how, tmp_path, bert):
    shutil.copytree(bert, tmp_path / "bert")
    texts, out = ["A man eats.", "No.", "The sun is up.", "Yes."], tmp_path / "out"
    out.mkdir()
    wanted = [ids.tolist() for row in made(out, bert, texts) for ids in row]
    DAMAGES[how](out / "tokens")
    found = [ids.tolist() for row in made(out, bert, texts) for ids in row]
    assert found == wanted


def test_tokens_that_are_cut_while_they_are_read(tmp_path, bert):
    """Of a map a bus error would kill the process."""
    rows = made(tmp_path, bert, ["A man eats."] * 5000)
    os.truncate(tmp_path / "tokens" / "ids", 5)
    with pytest.raises(Fault, match="tokens: was cut while it was read; --resume makes it anew"):
        rows[4999]


# ── the machine ──


def test_a_closed_pipe_stops_as_a_signal_does(monkeypatch, capfd):
    heard, before = [], signal.getsignal(signal.SIGTERM)
    end, start = os.pipe()
    os.close(end)
    with open(start, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
        try:
            put("one")
            put("two")                                         # into nothing
        finally:
            signal.signal(signal.SIGTERM, before)
    assert heard == [1] and capfd.readouterr().err.endswith(": standard output is closed; stopping\n")


def test_closed_streams_get_no_data(tmp_path):
    """The next file to be opened would have their numbers, and be printed into."""
    code = "import kernels.training.cli; f = open('f', 'w'); print(f.fileno(), file=f)"
    done = subprocess.run(f'{sys.executable} -c "{code}" <&- >&- 2>&-', shell=True, cwd=tmp_path,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and int((tmp_path / "f").read_text()) > 2


def faults(main, capfd):
    with pytest.raises(SystemExit, match="2"):
        command(main)()
    said, errors = capfd.readouterr()
    assert said == "" and errors.count("\n") == 1
    return errors


def make_parser():
    return simcse.make_parser()


def test_a_full_memory(capfd):
    flags = "--chunk-size or --batch-size or --max-length"
    wanted = f"test_lost.py: the machine's memory is full; lower {flags}\n"
    assert faults(lambda argv=None: torch.empty(2**45), capfd) == wanted
    assert faults(lambda argv=None: bytearray(2**62), capfd) == wanted


def no_flags(argv=None):
    torch.empty(2**45)


def test_a_full_memory_without_a_flag_that_helps(monkeypatch, capfd):
    monkeypatch.setitem(globals(), "make_parser", lambda: Flags("none"))
    wanted = "test_lost.py: the machine's memory is full; end other programs, or take a machine with more\n"
    assert faults(no_flags, capfd) == wanted


@contextlib.contextmanager
def full_disk(size):
    """No file may be larger: this fails as a full disk does, without a name."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def study_of_nothing():
    layer_study.study({}, SimpleNamespace(pooling="avg"), [], "full.json")


@pytest.mark.parametrize("write, path", [
    (lambda: triples.write_triples([("a", "b", "c")] * 9, Path("full.csv")), "full.csv"),
    (study_of_nothing, "full.json"), (lambda: put("A line of a log. " * 9), "standard output")])
def test_a_full_disk_elsewhere(write, path, here, monkeypatch, capsys):
    with open("log", "w") as log, full_disk(20), pytest.raises(SystemExit, match="2"):
        if path == "standard output":
            monkeypatch.setattr(sys, "stdout", log)
        command(lambda argv=None: write())()
    monkeypatch.undo()
    assert capsys.readouterr().err == f"test_lost.py: {path}: File too large\n"


def test_a_full_disk_under_the_benchmark(here, capsys):
    with full_disk(20), pytest.raises(SystemExit, match="2"):
        benchmark.write(dict(rows=["a row" * 9]), "full.json")
    assert capsys.readouterr().err.endswith(": --json full.json: File too large\n")


def test_a_full_disk_under_a_tokenizer(bert, tmp_path, capfd):
    tokenizer = AutoTokenizer.from_pretrained(bert)
    with pytest.raises(Exception) as end:
        tokenizer.backend_tokenizer.save("/dev/full")
    assert "os error" in str(end.value)

    def full(argv=None):
        tokenizer.backend_tokenizer.save("/dev/full")
    assert re.fullmatch(r"test_lost\.py: No space left on device \(os error 28\)\n", faults(full, capfd))


def test_warnings_of_libraries_do_not_precede_the_line(monkeypatch, capfd):
    def warn(argv=None):
        warnings.warn("Corrupt EXIF data", stacklevel=1)
        fail("what matters")
    monkeypatch.setattr(warnings, "showwarning", lambda text, *_: print(text, file=sys.stderr))
    with warnings.catch_warnings():
        warnings.simplefilter("always")                        # pytest would keep them
        assert faults(warn, capfd) == "test_lost.py: what matters\n"


def test_a_name_that_is_no_utf_8(here, capfd):
    """Of data: printed, trained on, and in the folder's README."""
    name = os.fsdecode(b"caf\xe9.csv")
    Path(name).write_text(GOOD)
    result = run("simcse", Path("out"), "--data", name, *SMALL[2:])
    assert "caf\\udce9.csv" in Path("out/README.md").read_text() and len(result.losses) == 1
    refuse("simcse", capfd, r"--out caf.*csv: not UTF-8.*", *SMALL, "--out", name)


LETTERS = "\u202e\u2066\u061c\u200f\ufeff\xad\U000e0041\x1b\x9b\u2028\udcff"    # turn, hide, steer, break


def test_letters_that_turn_or_hide_others(here, capfd):
    """Joiners stay, which Persian and emoji need."""
    for letter in LETTERS:
        assert one_line(f"a{letter}b") == f"a{letter!r}b".replace("'", "")
    assert one_line("می\u200cخواهم 👩\u200d💻 é é　中") == "می\u200cخواهم 👩\u200d💻 é é　中"
    refuse("simcse", capfd, r"a\\u202eb\.csv: .*", *SMALL, "--data", "a\u202eb.csv")
    with pytest.raises(SystemExit, match="2"):
        plot.main(["a\u202e\n", "--save", "a.png"])
    assert capfd.readouterr().err.count("a\\u202e\\n/metrics.jsonl: No such file") == 1


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_steers_no_terminal(terminal, monkeypatch, capsys):
    monkeypatch.setattr("kernels.training.progress.QUIET", 0)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: terminal)
    list(progress(range(3), "reading a\u202eb.csv", mininterval=0))
    said = "".join(capsys.readouterr())
    assert "\u202e" not in said and r"reading a\u202eb.csv" in said


def test_names_do_not_break_the_line(here, capfd):
    refuse("simcse", capfd, r"a\\nb\.csv: .*", *SMALL, "--data", "a\nb.csv")
    refuse("simcse", capfd, r"a\\x00b: holds a NUL character.*", *SMALL, "--data", "a\0b")
    refuse("simcse", capfd, r"--transfer: an empty name.*", *SMALL, "--transfer", "")


@pytest.mark.parametrize("name, flag, more", [
    ("simclr", "--width", []), ("moco", "--queue", []), ("moco", "--width", ["--queue", 96])])
def test_what_no_memory_holds(name, flag, more, here, capfd):
    flags = ["--data", DATA / "shapes.npz", "--model", "resnet-small", "--batch-size", 96]
    wanted = f"--.*{12 * 10**12}.* would need .* GB of memory, this machine has .* GB"
    refuse(name, capfd, wanted, *flags, *more, flag, 12 * 10**12)


@pytest.mark.parametrize("change, wanted", [
    (dict(num_hidden_layers=10**9), "config.json has num_hidden_layers 1000000000; wanted at most 1,000,000"),
    (dict(hidden_size=10**9, num_attention_heads=1), ".* describes a model of more than .* weights .*"),
    (dict(vocab_size=10**12), ".* describes a model of more than .*, its weight files have .* bytes; .*")])
def test_a_config_that_no_memory_holds(change, wanted, here, bert, capfd):
    shutil.copytree(bert, "model")
    config = json.loads(Path("model/config.json").read_text()) | change
    Path("model/config.json").write_text(json.dumps(config))
    refuse("simcse", capfd, f"--model model: {wanted}", *SMALL, "--model", "model")


def test_a_module_outside_the_folder(here, bert, capfd):
    shutil.copytree(bert, "model")
    modules = [dict(type="sentence_transformers.models.Pooling", path="../1_Pooling")]
    Path("model/modules.json").write_text(json.dumps(modules))
    refuse("simcse", capfd, r"--model model: modules\.json: \.\./1_Pooling lies outside", *SMALL, "--model",
           "model")
