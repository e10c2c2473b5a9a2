"""Failures: runs that cannot be restarted, a closed pipe, a full disk or memory, names with control
characters."""
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
from kernels.training import output_dir
from kernels.training.cli import ScriptParser, UserError, command, fail, handle_signals, one_line, write
from kernels.training.extras import layer_study, plot, triples
from running import DATA, KEPT, ROOT, SMALL, metrics, rejects

FLAGS = [*KEPT, "--steps", "3", "--eval-every", "2"]


@pytest.mark.parametrize("kind", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signal_while_transformers_is_imported(kind, tmp_path):
    code = f"import os, signal, time\nos.kill(os.getpid(), signal.{kind})\ntime.sleep(9)"
    (tmp_path / "transformers.py").write_text(code)
    done = subprocess.run([sys.executable, ROOT / "simcse.py", "--data", "x.csv"], text=True, timeout=8,
                          env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "stopped  before anything was saved\n", "")


def test_ignored_sighup_stays_ignored():
    """nohup ignores SIGHUP."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with pytest.raises(SystemExit):
        command(lambda argv=None: (signal.raise_signal(signal.SIGHUP), fail("it went on")))()
    handle_signals(signal.SIG_DFL)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_run_without_checkpoint_needs_resume_and_the_same_flags(cwd, monkeypatch, capfd):
    monkeypatch.setattr("simcse.Evaluator.evaluate_before", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit, match="130"):
        simcse.main([*FLAGS, "--out", "out"])
    capfd.readouterr()
    wanted = "--out out contains a run without a checkpoint; start it again with --resume, or choose .*"
    rejects("simcse", capfd, wanted, *FLAGS, "--out", "out")
    wanted = r"--resume: lr was 0\.002 in out, now it is 1\.0"
    rejects("simcse", capfd, wanted, *FLAGS, "--out", "out", "--resume", "--lr", "1")


def test_finished_run_is_not_started_again(cwd, capfd):
    for keep in ("running", "never"):
        simcse.main([*FLAGS, "--out", keep, "--keep-state", keep])
        capfd.readouterr()
        wanted = rf"--out {keep} contains a finished run; .* start a new run with --model {keep} --out NEW"
        rejects("simcse", capfd, wanted, *FLAGS, "--out", keep, "--resume")
        wanted = wanted.replace("run; ", "run; choose another folder, or ")
        rejects("simcse", capfd, wanted, *FLAGS, "--out", keep)


def test_out_inside_the_images_is_rejected(cwd):
    Path("images").mkdir()
    for out in ("images", "images/a/out"):
        with pytest.raises(UserError, match="inside --data images, where it would be read as data"):
            output_dir.check_out(Path(out), False, "images")
    output_dir.check_out(Path("images-out"), False, "images")


def test_resume_accepts_other_paths_to_the_same_files(cwd, finished):
    shutil.copytree(finished, "out")
    Path("link.csv").symlink_to("good.csv")
    flags = [flag.replace("good.csv", "link.csv") for flag in map(str, SMALL)]
    simcse.main([*flags, "--out", "../" + Path().absolute().name + "/out", "--resume"])
    assert len(metrics(Path("out"))) == 1


# ── the machine ──


def test_writing_to_a_closed_pipe_raises_sigterm_once(monkeypatch, capfd):
    received = []
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        signal.signal(signal.SIGTERM, lambda *_: received.append(1))
        write("one")
        write("two")                                           # stdout is /dev/null by now
    assert received == [1] and capfd.readouterr().err.endswith(": standard output is closed; stopping\n")


def run_and_get_error(main, capfd):
    """Run main as a command, which must fail; return its line on stderr."""
    with pytest.raises(SystemExit, match="2"):
        command(main)()
    out, errors = capfd.readouterr()
    assert out == "" and errors.count("\n") == 1
    return errors


def make_parser():
    """Return a parser for cli.describe_out_of_memory, which looks for make_parser in the module of main."""
    return simcse.make_parser()


def test_full_memory(capfd):
    flags = "--chunk-size or --chunk-tokens or --batch-size or --max-length"
    wanted = f"test_failures.py: the machine's memory is full; lower {flags}\n"
    assert run_and_get_error(lambda argv=None: torch.empty(2**45), capfd) == wanted
    assert run_and_get_error(lambda argv=None: bytearray(2**62), capfd) == wanted


def test_full_memory_without_flags_to_lower(monkeypatch, capfd):
    monkeypatch.setitem(globals(), "make_parser", lambda: ScriptParser("none"))
    wanted = "test_failures.py: the machine's memory is full; close other programs, or use a larger machine\n"
    assert run_and_get_error(lambda argv=None: torch.empty(2**45), capfd) == wanted


@contextlib.contextmanager
def full_disk(size):
    """Limit the size of files, which fails like a full disk: the OSError has no file name."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_empty_layer_study():
    layer_study.log_tables({}, SimpleNamespace(pooling="avg"), [], "full.json")


@pytest.mark.parametrize("write, path", [
    (lambda: triples.write_triples([("a", "b", "c")] * 9, Path("full.csv")), "full.csv"),
    (write_empty_layer_study, "full.json"), (lambda: write("A line of a log. " * 9), "standard output")])
def test_full_disk_for_other_files(write, path, cwd, monkeypatch, capsys):
    with open("log", "w") as log, full_disk(20), pytest.raises(SystemExit, match="2"):
        if path == "standard output":
            monkeypatch.setattr(sys, "stdout", log)
        command(lambda argv=None: write())()
    monkeypatch.undo()
    assert capsys.readouterr().err == f"test_failures.py: {path}: File too large\n"


def test_full_disk_for_a_tokenizer(bert, tmp_path, capfd):
    tokenizer = AutoTokenizer.from_pretrained(bert)
    with pytest.raises(Exception) as end:
        tokenizer.backend_tokenizer.save("/dev/full")
    assert "os error" in str(end.value)

    def save_to_full_disk(argv=None):
        tokenizer.backend_tokenizer.save("/dev/full")
    errors = run_and_get_error(save_to_full_disk, capfd)
    assert re.fullmatch(r"test_failures\.py: No space left on device \(os error 28\)\n", errors)


def test_warnings_of_libraries_are_not_printed(monkeypatch, capfd):
    def warn_and_fail(argv=None):
        warnings.warn("Corrupt EXIF data", stacklevel=1)
        fail("the error")
    monkeypatch.setattr(warnings, "showwarning", lambda text, *_: print(text, file=sys.stderr))
    with warnings.catch_warnings():
        warnings.simplefilter("always")                        # no other filter hides the warning
        assert run_and_get_error(warn_and_fail, capfd) == "test_failures.py: the error\n"


# characters that reverse or hide text, control the terminal, or break the line
CONTROL_CHARACTERS = "\u202e\u2066\u061c\u200f\ufeff\xad\U000e0041\x1b\x9b\u2028\udcff"


def test_control_characters_are_escaped(cwd, capfd):
    """Joiners and the wide space are not escaped: Persian, emoji and Japanese texts have them."""
    for character in CONTROL_CHARACTERS:
        assert one_line(f"a{character}b") == f"a{character!r}b".replace("'", "")
    assert one_line("می\u200cخواهم 👩\u200d💻 é é　中") == "می\u200cخواهم 👩\u200d💻 é é　中"
    rejects("simcse", capfd, r"a\\u202eb\.csv: .*", *SMALL, "--data", "a\u202eb.csv")
    with pytest.raises(SystemExit, match="2"):
        plot.main(["a\u202e\n", "--save", "a.png"])
    assert capfd.readouterr().err.count("a\\u202e\\n/metrics.jsonl: No such file") == 1


@pytest.mark.parametrize("name, flag, more", [
    ("simclr", "--projection-dim", []), ("moco", "--queue-size", []),
    ("moco", "--projection-dim", ["--queue-size", 96])])
def test_flag_that_needs_too_much_memory(name, flag, more, cwd, capfd):
    flags = ["--data", DATA / "shapes.npz", "--model", "resnet-small", "--batch-size", 96]
    wanted = f"--.*{12 * 10**12}.* would need .* GB of memory, this machine has .* GB"
    rejects(name, capfd, wanted, *flags, *more, flag, 12 * 10**12)


def test_module_path_outside_the_model_folder_is_rejected(cwd, bert, capfd):
    shutil.copytree(bert, "model")
    modules = [dict(type="sentence_transformers.models.Pooling", path="../1_Pooling")]
    Path("model/modules.json").write_text(json.dumps(modules))
    wanted = r"--model model: modules\.json: \.\./1_Pooling is outside the model folder"
    rejects("simcse", capfd, wanted, *SMALL, "--model", "model")
