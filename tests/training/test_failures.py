"""Failures: runs that cannot be restarted, a closed pipe, a full disk or memory, names with control
characters."""
import contextlib
import re
import resource
import shutil
import signal
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import simcse
from kernels.training import plot
from kernels.training.errors import UserError, command, fail, one_line
from kernels.training.out import check_out
from kernels.training.papers import cline_triples as triples
from kernels.training.papers import selfguided_layers as layer_study
from running import DATA, KEPT, SMALL, metrics, rejects

FLAGS = [*KEPT, "--steps", "3", "--eval-every", "2"]


def test_ignored_sighup_stays_ignored():
    """nohup ignores SIGHUP."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with pytest.raises(SystemExit):
        command(lambda argv=None: (signal.raise_signal(signal.SIGHUP), fail("it went on")))()
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


@pytest.mark.parametrize("flag", ["data", "model", "test"])
def test_out_inside_an_input_is_rejected(flag, cwd):
    Path("images").mkdir()
    args = SimpleNamespace(inputs=[flag], resume=False, **{flag: ["images"] if flag == "test" else "images"})
    for out in ("images", "images/a/out"):
        with pytest.raises(UserError, match=f"--out {out}: inside --{flag} images; choose another folder"):
            check_out(SimpleNamespace(out=out, **vars(args)))
    check_out(SimpleNamespace(out="images-out", **vars(args)))


def test_resume_accepts_other_paths_to_the_same_files(cwd, finished):
    shutil.copytree(finished, "out")
    Path("link.csv").symlink_to("good.csv")
    flags = [flag.replace("good.csv", "link.csv") for flag in map(str, SMALL)]
    simcse.main([*flags, "--out", "../" + Path().absolute().name + "/out", "--resume"])
    assert len(metrics(Path("out"))) == 1


# ── the machine ──


def run_and_get_error(main, capfd):
    """Run main as a command, which must fail; return its line on stderr."""
    with pytest.raises(SystemExit, match="2"):
        command(main)()
    out, errors = capfd.readouterr()
    assert out == "" and errors.count("\n") == 1
    return errors


def test_full_memory(capfd):
    wanted = "test_failures.py: the machine's memory is full; lower --batch-size, .*\n"
    assert re.fullmatch(wanted, run_and_get_error(lambda argv=None: torch.empty(2**45), capfd))
    assert re.fullmatch(wanted, run_and_get_error(lambda argv=None: bytearray(2**62), capfd))


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
    (write_empty_layer_study, "full.json")])
def test_full_disk_for_other_files(write, path, cwd, capsys):
    with full_disk(20), pytest.raises(SystemExit, match="2"):
        command(lambda argv=None: write())()
    assert capsys.readouterr().err == f"test_failures.py: {path}: File too large\n"


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
    ("moco", "--queue-size", []),
    ("moco", "--projection-dim", ["--queue-size", 96])])
def test_flag_that_needs_too_much_memory(name, flag, more, cwd, capfd):
    flags = ["--data", DATA / "shapes.npz", "--model", "resnet-small", "--batch-size", 96]
    wanted = f"--.*{12 * 10**12}.* would need .* GB of memory, this machine has .* GB"
    rejects(name, capfd, wanted, *flags, *more, flag, 12 * 10**12)
