"""What happens to runs: --out, --resume, Ctrl-C, SIGTERM, kill -9, a full disk, a dead rank, a loss that is
no number."""
import json
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

import simcse
from kernels.training.command import command, fail, say
from running import DATA, ROOT, SMALL, equal, free_port, metrics, refuse, run, start

TEXT = ["--model", "scratch", "--data", DATA / "nli.csv", "--dev", DATA / "sts.tsv", "--batch-size", 8]
PICTURES = ["--model", "resnet-small", "--data", DATA / "shapes.npz", "--batch-size", 16, "--probe-epochs", 0]
SCRIPTS = {"simcse": TEXT, "moco": [*PICTURES, "--queue", 64, "--bn-splits", 2]}
every_script = pytest.mark.parametrize("name", SCRIPTS)


def wait_for_step(process, out, step):
    deadline = time.time() + 120
    while time.time() < deadline and process.poll() is None:
        if (out / "metrics.jsonl").is_file() and (out / "metrics.jsonl").read_text().count("\n") >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"no step {step}: {process.communicate()}")


def last_step(out):
    return torch.load(out / "state.pt", weights_only=True)["progress"]["step"]


@every_script
def test_a_signal_saves_and_a_kill_loses_nothing(name, tmp_path):
    """Ctrl-C or SIGTERM, then kill -9 at random moments while every step is evaluated and saved, so that most
    hit a file being written: --resume ends in the bits of the unbroken run. TENCL_KILLS=50 is the whole
    test."""
    kills, out, draw = int(os.environ.get("TENCL_KILLS", 1)), tmp_path / "out", random.Random(name)
    flags = [*SCRIPTS[name], "--steps", 8 + 4 * kills, "--eval-every", 1]
    whole, process = start(name, tmp_path / "whole", *flags), start(name, out, *flags)
    wait_for_step(process, out, 2)
    process.send_signal(signal.SIGINT if name == "moco" else signal.SIGTERM)
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 130 and errors == "" and said.splitlines()[-1].startswith("stopped ")
    step = last_step(out)
    assert said.count("\nstopping when this step is done") == 1 and 2 <= step < 8 + 4 * kills
    process = start(name, out, *flags, "--resume")
    for _ in range(kills):
        wait_for_step(process, out, step + 2)
        time.sleep(draw.uniform(0, 0.3))
        process.kill()
        process.communicate()
        step = last_step(out)
        process = start(name, out, *flags, "--resume")
    assert process.wait(600) == whole.wait(600) == 0, process.stderr.read()
    assert [row["step"] for row in metrics(out)] == list(range(1, 9 + 4 * kills))
    assert equal(*(load_file(folder / "model.safetensors") for folder in (tmp_path / "whole", out)))
    one, two = (torch.load(folder / "state.pt", weights_only=True) for folder in (tmp_path / "whole", out))
    assert one["progress"] == two["progress"] and equal(dict(one["model"]), dict(two["model"]))


@pytest.mark.parametrize("name", ["simcse"])
def test_interrupted_before_the_first_step(name, tmp_path):
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # in the background it may be deaf
    process = start(name, tmp_path / "out", *SCRIPTS[name], before=heard)
    for line in process.stdout:                                # which it says before it evaluates
        if line.startswith("run "):
            process.send_signal(signal.SIGINT)
            break
    said, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (130, "") and said.splitlines()[-1].startswith("stopped ")


def test_a_signal_ends_the_probe_behind_the_last_step(tmp_path):
    """In which there is nothing to save: the checkpoint is."""
    flags = [*SCRIPTS["moco"], "--probe-epochs", 10**6, "--steps", 1, "--eval-every", 1]
    process = start("moco", tmp_path / "out", *flags)
    while not (tmp_path / "out" / "state.pt").is_file() and process.poll() is None:
        time.sleep(0.02)
    time.sleep(0.5)
    process.terminate()
    try:
        said, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, errors) == (130, "") and "\nstopped  behind the last step" in said


@pytest.mark.parametrize("keep, left", [("always", True), ("running", False), ("never", False)])
def test_keep_state(keep, left, tmp_path, monkeypatch):
    """While it runs state.pt is there, but for never; and a flag that may change on the way."""
    flags, seen = [*TEXT, "--steps", 2, "--eval-every", 1], []
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr("simcse.sum_gradients", Mock(side_effect=[None, KeyboardInterrupt]))
        run("simcse", tmp_path / "out", *flags, "--keep-state", keep)
    seen = (tmp_path / "out" / "state.pt").is_file()
    assert seen == (keep != "never")
    if seen:
        run("simcse", tmp_path / "out", *flags, "--keep-state", "always", "--resume")
    simcse.main([*map(str, flags), "--keep-state", keep, "--out", str(tmp_path / "whole")])
    assert (tmp_path / "whole" / "state.pt").is_file() == left
    assert (tmp_path / "whole" / "model.safetensors").is_file()


def test_state_is_on_the_disk_before_it_takes_the_old_ones_place(tmp_path, monkeypatch):
    """Which no kill shows: only a power cut would."""
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *x, name=name, real=real: calls.append((name, *x)) or real(*x))
    run("simcse", tmp_path / "out", *TEXT, "--steps", 1)
    places = [i for i, call in enumerate(calls) if str(call[-1]).endswith("state.pt")]
    assert len(places) == 1 and calls[places[0] - 1][0] == "fsync"


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A run of two steps, of which four are wanted."""
    out = tmp_path_factory.mktemp("half") / "out"
    run("simcse", out, *TEXT, "--steps", 2, "--eval-every", 2)
    flags = json.loads((out / "args.json").read_text())
    (out / "args.json").write_text(json.dumps(flags | {"steps": 4}))
    return out


@pytest.mark.parametrize("whole", ["nothing", "the model"])
def test_full_disk_is_one_line_and_keeps_the_checkpoint(whole, tmp_path, half):
    """A limit on the size of a file is what a test can set; it fails as a full disk does, at once or in the
    middle of state.pt."""
    out = shutil.copytree(half, tmp_path / "out")
    before = {name: (out / name).read_bytes() for name in ("model.safetensors", "state.pt")}
    most = 100_000 if whole == "nothing" else sum(map(len, before.values())) // 2
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    full = start("simcse", out, *TEXT, "--steps", 4, "--eval-every", 2, "--resume", before=limit)
    _, errors = full.communicate(timeout=120)
    assert full.returncode == 2 and errors.count("\n") == 1, errors
    assert "a checkpoint that --out holds is whole" in errors
    kept = before if whole == "nothing" else {"state.pt": before["state.pt"]}
    assert kept == {name: (out / name).read_bytes() for name in kept} and last_step(out) == 2


def test_full_disk_before_training_leaves_no_half_of_the_tokens(tmp_path):
    copied = [ROOT / "simcse.py", *(ROOT / "kernels/training").glob("*.py")]
    most = max(file.stat().st_size for file in copied) + 500
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    full = start("simcse", tmp_path / "out", *TEXT, before=limit)
    _, errors = full.communicate(timeout=120)
    assert full.returncode == 2 and errors.count("\n") == 1
    assert errors == "simcse.py: File too large\n"             # and no checkpoint, which there is not
    assert (tmp_path / "out" / "simcse.py").is_file() and not (tmp_path / "out" / "tokens").exists()


def test_a_dead_rank_ends_the_others(tmp_path):
    group = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    flags = [*TEXT, "--steps", 500]
    ranks = [start("simcse", tmp_path / "out", *flags, RANK=rank, LOCAL_RANK=rank, **group) for rank in "01"]
    wait_for_step(ranks[0], tmp_path / "out", 2)
    ranks[1].kill()
    _, errors = ranks[0].communicate(timeout=60)
    assert ranks[0].returncode == 2 and "another process of this run has died or hangs" in errors


@every_script
def test_a_loss_that_is_no_number_names_step_rows_and_checkpoint(name, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    flags = [*SCRIPTS[name], "--steps", 60, "--eval-every", 2, "--lr", 1e15]
    with pytest.raises(SystemExit) as end:
        run(name, tmp_path / "out", *flags)
    errors = capfd.readouterr().err
    assert end.value.code == 2 and "the loss is not finite; rows " in errors and "checkpoint" in errors


def test_messages_take_the_place_of_a_bar(monkeypatch, capsys):
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    say("stopped", "at step 3")
    with pytest.raises(SystemExit):
        command(lambda argv=None: fail("no"))()
    assert capsys.readouterr() == ("\r\x1b[Kstopped  at step 3\n", "\r\x1b[Ktest_run.py: no\n")


# ── folders ──


@pytest.mark.parametrize("flags, wanted", [
    ("--out good.csv", r"--out good\.csv: /.*/good\.csv is no folder that can be written"),
    ("--out good.csv/out", r"--out good\.csv/out: /.*/good\.csv is no folder that can be written"),
    ("--out .", r"--out \. holds files but no checkpoint: empty it, or name another folder"),
    ("--out nothing/out", r"--out nothing/out: /.*/nothing is no folder that can be written"),
    ("--resume --out .", r"--out \.: no state\.pt to resume from")])
def test_wrong_out(here, capfd, flags, wanted):
    Path("nothing").symlink_to("gone")
    refuse("simcse", capfd, wanted, *SMALL, *flags.split())


HOLDS = r"--resume: out holds a damaged state\.pt, model, args\.json or metrics\.jsonl \(\w+\)"


@pytest.mark.parametrize("file, change, flags, wanted", [
    ("state.pt", None, "", r"--out out: no state\.pt to resume from"),
    ("state.pt", lambda old: old[:5000], "", HOLDS),
    ("state.pt", lambda old: b"", "", HOLDS),
    ("model.safetensors", lambda old: old[:-9], "", HOLDS),
    ("metrics.jsonl", lambda old: b"{\n", "", HOLDS),
    ("args.json", None, "", HOLDS),
    ("args.json", bytes, "--lr 1", r"--resume: lr was 0\.002 in out, now it is 1\.0"),
    ("args.json", bytes, "--pooling cls", r"--resume: pooling was avg in out, now it is cls"),
    ("../good.csv", lambda old: old.replace(b"a", b"e", 1), "",
     r"--resume: the content of --data, by its checksum, was \w+ in out, now it is \w+"),
    ("args.json", bytes, None, r"--out out holds another run: continue it with --resume, or name .*")])
def test_resume_refuses(here, capfd, finished, file, change, flags, wanted):
    shutil.copytree(finished, "out")
    path = Path("out", file)
    path.write_bytes(change(path.read_bytes())) if change else path.unlink()
    more = ["--resume", *flags.split()] if flags is not None else []
    refuse("simcse", capfd, wanted, *SMALL, "--out", "out", *more)
