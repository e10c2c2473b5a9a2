"""Progress: lines in a log, the remaining time, and trackers (--log)."""
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import simcse
from kernels.training import progress as module
from kernels.training.progress import Clock, LogFile, progress, step_line
from running import KEPT, ROOT, SMALL, metrics, rejects


@pytest.fixture
def now(monkeypatch):
    """Return a fake clock: now.seconds changes only when a test changes it."""
    now = SimpleNamespace(seconds=100.0)

    def read():
        return now.seconds

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=read, perf_counter=read))
    return now


def test_log_lines_become_rarer(now, capsys):
    log, printed_at = LogFile(), []
    for second in range(100):
        now.seconds = 100.0 + second
        log.write(f"\rlinear probe: {second} of 100 steps, 0:10 left")
        log.write("\r          \r")                            # how tqdm clears its bar
        if capsys.readouterr().out:
            printed_at.append(second)
    assert printed_at == [2, 12, 22, 32, 42, 53, 67, 84]


def test_long_work_is_logged_without_a_terminal(monkeypatch, capsys):
    """A line on stdout has the finished and the remaining work; nothing goes to stderr."""
    monkeypatch.setattr(module, "QUIET_SECONDS", 0)
    assert list(progress(range(3), "linear probe", " steps")) == [0, 1, 2]
    assert list(progress(iter("ab"), "replacing words", " texts")) == ["a", "b"]
    out, errors = capsys.readouterr()
    first, second = out.splitlines()[0], out.splitlines()[-1]
    assert first.startswith("working  linear probe: ") and " of 3 steps, " in first
    assert first.endswith(" left")
    assert second.startswith("working  replacing words: ") and " texts so far, " in second and not errors
    monkeypatch.setattr(module, "QUIET_SECONDS", 60)
    assert list(progress(range(3), "linear probe")) == [0, 1, 2] and capsys.readouterr().out == ""


COMPILE = """
import torch
from triton.runtime import driver
from compiling_driver import compiling_driver
from kernels.gpu import launch
from kernels.training import progress
progress.QUIET_SECONDS = 0
driver.set_active(compiling_driver("sm_90"))
with progress.announce_compilation():
    for features in 17, 33:
        launch.aligned_rows(torch.zeros(3, features))
launch.aligned_rows(torch.zeros(3, 1, dtype=torch.float16))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="triton exists on Linux only")
def test_compilation_is_announced_once_unless_it_is_cached(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{ROOT}:{ROOT}/tests/gpu"}
    printed = [subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)
               for _ in range(2)]
    assert [done.stderr for done in printed] == ["", ""]
    line = "working  first step: compiling kernels for this GPU; later runs will find them in a cache\n"
    assert [done.stdout for done in printed] == [line, ""]


@pytest.mark.skipif(sys.platform != "linux", reason="triton exists on Linux only")
def test_only_the_first_step_announces_compilation(cwd, monkeypatch, capsys):
    """A stand-in for Triton reports a compiled kernel at each of two steps."""
    from triton import knobs
    heard, loss = [], simcse.simcse_loss

    def compile_and_compute(*arguments, **named):
        heard.append(knobs.compilation.listener)
        if heard[-1]:
            heard[-1](cache_hit=False, src=None)
        return loss(*arguments, **named)

    monkeypatch.setattr(simcse, "simcse_loss", compile_and_compute)
    monkeypatch.setattr(module, "QUIET_SECONDS", 0)
    simcse.main([*SMALL, "--steps", "2", "--impl", "triton", "--out", "out"])
    assert [listener is None for listener in heard] == [False, True]
    assert capsys.readouterr().out.count("compiling kernels for this GPU") == 1


def test_remaining_time_includes_evaluations_and_later_work(now):
    """An evaluation of 7 s; 10 steps of 2 s, evaluations of 5 s after steps 4, 8, 10; a probe of 30 s."""
    clock, line = Clock(), {"loss": 1.0, "lr": 0.1, "saved": True}
    args = SimpleNamespace(eval_every=4, batch_size=6)
    clock.start(0)
    with clock.exclude(evaluation=True):
        now.seconds += 7
    now.seconds += 2
    assert clock.seconds_left(1, 10, 4) == 18 + 3 * 7          # 7 s: as long as the first evaluation
    with clock.exclude(repeats=10):
        now.seconds += 3
    now.seconds += 6
    clock.evaluated(4.0)
    clock.evaluated(1.0, count=0)
    now.seconds += 5
    assert (clock.seconds_per_step(4), clock.seconds_left(4, 10, 4)) == (2, 12 + 10 + 30)
    shown = step_line(clock, line | {"step": 4}, 10, args, "20.00")
    assert shown.endswith("  3 rows/s  left 0:52  dev 20.00 saved")
    now.seconds += 12 + 10
    clock.evaluated(10.0, count=2)
    assert clock.seconds_left(10, 10, 4) == 30


def fake_tracker(monkeypatch, name):
    """Install a fake package; return the list of its calls."""
    calls = []
    package = ModuleType(name)
    if name == "wandb":
        def init(**options):
            calls.append(options)
            return SimpleNamespace(log=lambda row, step: calls.append((step, row)))
        package.init = init
    else:
        class SummaryWriter:
            def __init__(self, folder, purge_step):
                calls.append((str(folder), purge_step))

            def add_scalar(self, name, value, step):
                calls.append((step, {name: value}))

            def flush(self):
                pass
        package.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, {"tensorboard": "torch.utils.tensorboard"}.get(name, name), package)
    return calls


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_trackers_get_the_numbers_of_metrics(name, cwd, monkeypatch):
    """--resume continues the same run of wandb, and replaces the rows of TensorBoard after the checkpoint."""
    calls = fake_tracker(monkeypatch, name)
    flags = [*KEPT, "--log", name, "--out", "out"]
    simcse.main(flags)
    (row,) = metrics(Path("out"))
    numbers = {key: value for key, value in row.items() if key not in ("step", "best")}
    logged = {key: value for step, values in calls[1:] for key, value in values.items() if step == 1}
    assert logged == numbers and set(numbers) == {"loss", "lr", "seconds"}
    first = calls[0]
    simcse.main([*flags, "--resume"])
    if name == "wandb":
        assert (first["name"], first["resume"]) == ("out", "allow")
        assert first["id"] == calls[-1]["id"] and len(first["id"]) == 32
        assert first["config"]["batch_size"] == 2
    else:
        assert (first, calls[-1]) == (("out/tensorboard", 1), ("out/tensorboard", 2))


def test_tracker_that_is_missing_or_fails(cwd, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "wandb", None)
    wanted = "--log wandb: the package wandb is not installed; pip install wandb, or leave --log out"
    rejects("simcse", capfd, wanted, *KEPT, "--log", "wandb")
    package = ModuleType("wandb")

    def init(**more):
        raise RuntimeError("No API key configured.\nUse `wandb login`")
    package.init = init
    monkeypatch.setitem(sys.modules, "wandb", package)
    with pytest.raises(SystemExit):
        simcse.main([*KEPT, "--log", "wandb", "--out", "out"])
    assert capfd.readouterr().err == "simcse.py: --log wandb: RuntimeError: No API key configured.\n"
