"""Progress: lines in a log, the time that is left, and --log."""
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import simcse
from kernels.training import progress as module
from kernels.training.progress import Clock, Log, progress, step_line
from running import KEPT, metrics, refuse


@pytest.fixture
def time(monkeypatch):
    """A clock that stands still until a test moves it."""
    now = SimpleNamespace(seconds=100.0)
    read = lambda: now.seconds
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=read, perf_counter=read))
    return now


def test_a_log_has_ever_fewer_lines(time, capsys):
    log, said_at = Log(), []
    for second in range(100):
        time.seconds = 100.0 + second
        log.write(f"\rlinear probe: {second} of 100 steps, 0:10 left")
        log.write("\r          \r")                            # how tqdm clears its bar
        if capsys.readouterr().out:
            said_at.append(second)
    assert said_at == [2, 12, 22, 32, 42, 53, 67, 84]


def test_work_of_more_than_two_seconds_is_told_in_a_log(monkeypatch, capsys):
    """By tqdm itself: a line with what is done and what is left, nothing on stderr."""
    monkeypatch.setattr(module, "QUIET", 0)
    assert list(progress(range(3), "linear probe", " steps")) == [0, 1, 2]
    assert list(progress(iter("ab"), "replacing words", " texts")) == ["a", "b"]
    said, errors = capsys.readouterr()
    first, second = said.splitlines()[0], said.splitlines()[-1]
    assert first.startswith("working  linear probe: ") and " of 3 steps, " in first
    assert first.endswith(" left")
    assert second.startswith("working  replacing words: ") and " texts so far, " in second and not errors
    monkeypatch.setattr(module, "QUIET", 60)
    assert list(progress(range(3), "linear probe")) == [0, 1, 2] and capsys.readouterr().out == ""


def test_what_is_left_has_the_evaluations_and_what_follows(time):
    """10 steps of 2 s, evaluations of 5 s after steps 4, 8 and 10, then a probe of 30 s; a pause counts for
    none of them."""
    clock, line = Clock(), {"loss": 1.0, "lr": 0.1, "saved": True}
    args = SimpleNamespace(eval_every=4, batch_size=6)
    clock.start(0)
    with clock.apart(evaluation=True):
        time.seconds += 7
    time.seconds += 2
    assert clock.left(1, 10, 4) == 18 + 3 * 7                  # as the one before the first step
    with clock.apart(again=10):
        time.seconds += 3
    time.seconds += 6
    clock.evaluated(4.0)
    clock.evaluated(1.0, count=0)
    time.seconds += 5
    assert (clock.pace(4), clock.left(4, 10, 4)) == (2, 12 + 10 + 30)
    shown = step_line(clock, line | {"step": 4}, 10, args, "20.00")
    assert shown.endswith("  3 rows/s  left 0:52  dev 20.00 saved")
    time.seconds += 12 + 10
    clock.evaluated(10.0, count=2)
    assert clock.left(10, 10, 4) == 30


def fake_tracker(monkeypatch, name):
    """A made-up package; gives the list of what it was told."""
    told = []
    package = ModuleType(name)
    if name == "wandb":
        start = lambda **more: told.append(more) or SimpleNamespace(
            log=lambda row, step: told.append((step, row)))
        package.init = start
    else:
        class SummaryWriter:
            def __init__(self, folder, purge_step):
                told.append((str(folder), purge_step))

            def add_scalar(self, name, value, step):
                told.append((step, {name: value}))

            def flush(self):
                pass
        package.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, {"tensorboard": "torch.utils.tensorboard"}.get(name, name), package)
    return told


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_trackers_get_the_numbers_of_metrics(name, here, monkeypatch):
    """--resume goes on with the same run of wandb, and replaces later rows of TensorBoard."""
    told = fake_tracker(monkeypatch, name)
    flags = [*KEPT, "--log", name, "--out", "out"]
    simcse.main(flags)
    (row,) = metrics(Path("out"))
    numbers = {key: value for key, value in row.items() if key not in ("step", "best")}
    logged = {key: value for step, values in told[1:] for key, value in values.items() if step == 1}
    assert logged == numbers and set(numbers) == {"loss", "lr", "seconds"}
    first = told[0]
    simcse.main([*flags, "--resume"])
    if name == "wandb":
        assert (first["name"], first["resume"]) == ("out", "allow")
        assert first["id"] == told[-1]["id"] and len(first["id"]) == 32
        assert first["config"]["batch_size"] == 2
    else:
        assert (first, told[-1]) == (("out/tensorboard", 1), ("out/tensorboard", 2))


def test_a_tracker_that_is_missing_or_fails(here, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "wandb", None)
    wanted = "--log wandb: the package wandb is not installed; pip install wandb, or leave --log out"
    refuse("simcse", capfd, wanted, *KEPT, "--log", "wandb")
    package = ModuleType("wandb")

    def init(**more):
        raise RuntimeError("No API key configured.\nUse `wandb login`")
    package.init = init
    monkeypatch.setitem(sys.modules, "wandb", package)
    with pytest.raises(SystemExit):
        simcse.main([*KEPT, "--log", "wandb", "--out", "out"])
    assert capfd.readouterr().err == "simcse.py: --log wandb: RuntimeError: No API key configured.\n"
