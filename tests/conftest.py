"""All tests run without a hub and, where there is no GPU, with Triton's interpreter; two processes share
them."""
import fcntl
import functools
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

# The interpreter multiplies by NumPy. Its Haswell and Zen kernels round a product and its transpose in two
# ways, which no GPU does: tests of extreme logits would fail on AMD CPUs. NumPy reads this when imported.
if platform.machine() == "x86_64":
    os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"                # has to be asked for before the kernels are imported
    torch.set_num_threads(1)                            # equal runs are equal to the bit
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# a test's processes are forks of one that imported all
multiprocessing.set_forkserver_preload(["simcse", "running"])
ON_THE_GPU = """test_kernels test_operations test_fuzz test_extremes test_losses test_pair_losses test_chunks
    test_compile""".split()


def pytest_configure(config):
    # in the interpreter NumPy warns of what a GPU computes in silence: log2(0) = −inf for a row without
    # columns
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.fixture(autouse=True)
def scripts_stay_on_the_cpu(request, monkeypatch):
    if request.module.__name__ not in ON_THE_GPU:       # a GPU would need other tolerances
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    """A folder with a BERT of three layers, one token a letter, large random weights and no dropout."""
    from running import small_bert
    return small_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with one good file, good.csv, so that messages hold short names."""
    from running import GOOD
    monkeypatch.chdir(tmp_path)
    Path("good.csv").write_text(GOOD)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The --out of a run of simcse.py on it: good for --model and for --resume."""
    import simcse
    from running import GOOD, KEPT
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("good.csv").write_text(GOOD)
        simcse.main([*KEPT, "--out", "out"])
    return folder / "out"


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """folder_of(family): a folder with a small random model of the family."""
    from families import small_model
    return functools.cache(lambda family: small_model(family, tmp_path_factory.mktemp(family)))


@pytest.fixture
def alarm():
    """What hangs fails."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# ── two processes ──
# pytest-xdist does it better where it is asked for (-n 2); without, the first process starts a second one,
# and both take the next test from a counter in a file.


def pytest_runtestloop(session):
    counter = os.environ.get("TENCL_COUNTER")
    asked = session.config.option
    if counter is None:
        alone = torch.cuda.is_available() or len(os.sched_getaffinity(0)) < 2 or len(session.items) < 100
        xdist = getattr(asked, "numprocesses", None) or hasattr(session.config, "workerinput")
        if alone or asked.collectonly or xdist or session.testsfailed:
            return None                                 # pytest's own loop
        counter = tempfile.mkstemp()[1]
        session.config.output = tempfile.TemporaryFile("w+")
        command = [sys.executable, "-m", "pytest", *session.config.invocation_params.args]
        session.config.second = subprocess.Popen(command, env=os.environ | {"TENCL_COUNTER": counter},
                                                 stdout=session.config.output, stderr=subprocess.STDOUT)
    second = getattr(session.config, "second", None)
    try:
        run_tests(session, next_of(session.items, counter))
        if second:
            session.testsfailed += second.wait() != 0
    finally:
        if second:
            second.kill()
            os.unlink(counter)
    return True


def run_tests(session, queue):
    item = next(queue, None)
    while item:
        following = next(queue, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following


def next_of(items, counter):
    """Those that this process is the first to take."""
    while True:
        with open(counter, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            place = int(file.read() or 0)
            file.seek(0)
            file.write(str(place + 1))
        if place >= len(items):
            return
        yield items[place]


def pytest_terminal_summary(terminalreporter, config):
    if output := getattr(config, "output", None):
        output.seek(0)
        terminalreporter.section("the second process")
        terminalreporter.write(output.read())
