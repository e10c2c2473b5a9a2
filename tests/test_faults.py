"""What happens to runs: Ctrl-C, SIGTERM, kill -9, a full disk, a dead rank, a loss that is no number."""
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import simcse

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
TEXT = ["--model", "scratch", "--data", DATA / "nli.csv", "--dev", DATA / "sts.tsv", "--batch-size", 16]
PICTURES = ["--model", "resnet-small", "--data", DATA / "shapes.npz", "--batch-size", 16, "--probe-epochs", 0]
SCRIPTS = {"simcse": TEXT, "moco": [*PICTURES, "--queue", 64, "--bn-splits", 2]}
every_script = pytest.mark.parametrize("name", SCRIPTS)


def start(name, out, *flags, before=None, **variables):
    """The script in a process of its own."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | variables
    command = [sys.executable, "-u", f"{name}.py", *SCRIPTS[name], "--out", out, *flags]
    return subprocess.Popen([*map(str, command)], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=before)


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
def test_signals_save_and_resume_to_the_same_end(name, tmp_path):
    whole = start(name, tmp_path / "whole", "--steps", 16)
    parts = start(name, tmp_path / "parts", "--steps", 16)
    wait_for_step(parts, tmp_path / "parts", 2)
    parts.send_signal(signal.SIGINT if name == "moco" else signal.SIGTERM)
    said, errors = parts.communicate(timeout=120)
    assert parts.returncode == 130 and errors == "" and "stopped" in said.splitlines()[-1] and said.count("\nstopping when this step is done") == 1
    assert 2 <= last_step(tmp_path / "parts") < 16
    again = start(name, tmp_path / "parts", "--steps", 16, "--resume")
    assert again.wait(120) == whole.wait(120) == 0, again.stderr.read()
    one, two = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "parts"))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_messages_take_the_place_of_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    simcse.say("stopped", "at step 3")
    with pytest.raises(SystemExit):
        simcse.fail("no")
    assert capsys.readouterr() == ("\r\x1b[Kstopped  at step 3\n", "\r\x1b[Ksimcse.py: no\n")


@every_script
def test_interrupted_before_the_first_step(name, tmp_path):
    process = start(name, tmp_path / "out")
    for line in process.stdout:                                # which it says before it evaluates
        if line.startswith("run "):
            process.send_signal(signal.SIGINT)
            break
    said, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (130, "") and said.splitlines()[-1].startswith("stopped ")


@every_script
def test_killed_at_random_moments_resumes_to_the_same_bits(name, tmp_path):
    """Every step is evaluated and saved, so most kills hit a file being written. TENCL_KILLS=50 is the whole test."""
    kills, out, draw = int(os.environ.get("TENCL_KILLS", 2 if name == "simcse" else 1)), tmp_path / "out", random.Random(name)
    flags = ["--steps", 6 + 4 * kills, "--eval-every", 1]
    whole = start(name, tmp_path / "whole", *flags)
    process, step = start(name, out, *flags), 0
    for _ in range(kills):
        wait_for_step(process, out, step + 2)
        time.sleep(draw.uniform(0, 0.5))
        process.kill()
        process.communicate()
        step = last_step(out)
        process = start(name, out, *flags, "--resume")
    assert process.wait(600) == whole.wait(600) == 0, process.stderr.read()
    rows = [json.loads(row) for row in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 7 + 4 * kills))
    one, two = (load_file(folder / "model.safetensors") for folder in (tmp_path / "whole", out))
    assert all(torch.equal(one[key], two[key]) for key in one)
    one, two = (torch.load(folder / "state.pt", weights_only=True) for folder in (tmp_path / "whole", out))
    assert one["progress"] == two["progress"] and all(torch.equal(one["model"][key], two["model"][key]) for key in one["model"])


@every_script
@pytest.mark.parametrize("whole", ["nothing", "the model"])
def test_full_disk_is_one_line_and_keeps_the_checkpoint(name, whole, tmp_path):
    """A limit on the size of a file is what a test can set; it fails as a full disk does, at once or in the middle of state.pt."""
    first = start(name, tmp_path / "out", "--steps", 2, "--eval-every", 2)
    assert first.wait(120) == 0
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir() if file.suffix in (".pt", ".safetensors")}
    (tmp_path / "out" / "args.json").write_text((tmp_path / "out" / "args.json").read_text().replace('"steps": 2', '"steps": 4'))
    most = 100_000 if whole == "nothing" else (len(before["model.safetensors"]) + len(before["state.pt"])) // 2
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    full = start(name, tmp_path / "out", "--steps", 4, "--eval-every", 2, "--resume", before=limit)
    _, errors = full.communicate(timeout=120)
    assert full.returncode == 2 and errors.count("\n") == 1 and "a checkpoint that --out holds is whole" in errors, errors
    kept = before if whole == "nothing" else {"state.pt": before["state.pt"]}
    assert kept == {name: (tmp_path / "out" / name).read_bytes() for name in kept} and last_step(tmp_path / "out") == 2


def test_full_disk_before_training_leaves_no_half_of_the_tokens(tmp_path):
    most = (ROOT / "simcse.py").stat().st_size + 1000           # the copy of the script fits, the tokens do not
    full = start("simcse", tmp_path / "out", before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)))
    _, errors = full.communicate(timeout=120)
    assert full.returncode == 2 and errors.startswith("simcse.py: File too large; ") and errors.count("\n") == 1, errors
    assert not (tmp_path / "out" / "tokens").exists()


def test_a_dead_rank_ends_the_others(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = [start("simcse", tmp_path / "out", "--steps", 500, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                   MASTER_PORT=port) for rank in (0, 1)]
    wait_for_step(ranks[0], tmp_path / "out", 2)
    ranks[1].kill()
    _, errors = ranks[0].communicate(timeout=60)
    assert ranks[0].returncode == 2 and "another process of this run has died or hangs" in errors


@every_script
def test_a_loss_that_is_no_number_names_step_rows_and_checkpoint(name, tmp_path):
    run = start(name, tmp_path / "out", "--steps", 60, "--eval-every", 2, "--lr", 1e15, *["--optimizer", "sgd", "--warmup", 0][: 4 * (name == "simclr")])
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 2 and errors.count("\n") == 1 and "the loss is not finite; rows " in errors and "checkpoint" in errors, errors
