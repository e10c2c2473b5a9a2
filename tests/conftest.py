"""Fixtures and settings of all tests: no downloads, and Triton's interpreter if there is no GPU."""
import functools
import importlib.util
import os
import platform
import shutil
import signal
import sys
from pathlib import Path

# Triton's interpreter multiplies with NumPy, whose OpenBLAS reads this variable on import. OpenBLAS code for
# Haswell and Zen CPUs rounds a product and its transpose differently, so tests of extreme logits would fail.
if platform.machine() == "x86_64":
    os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"
os.environ.setdefault("OMP_NUM_THREADS", "1")           # each worker of pytest-xdist has one thread

import pytest
import torch

# Started with nohup, or in the background of a shell, this process ignores signals that some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"                # Triton reads this when the kernels are imported
    torch.set_num_threads(1)                            # with one thread, equal runs are bitwise equal
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.fsync = lambda file: None                            # files of tests need not survive a power failure
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    from interpreter import make_interpreter_faster
    make_interpreter_faster()
ON_THE_GPU = {f"test_{name}" for name in
              "kernels rounding fuzz autocast ops checks compile kernel_losses paper_losses".split()}


@pytest.fixture(autouse=True)
def scripts_stay_on_the_cpu(request, monkeypatch):
    """Hide the GPU from the tests of all modules except those in ON_THE_GPU."""
    if request.module.__name__ not in ON_THE_GPU:       # on a GPU, other tests would need other tolerances
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def restore_signal_handlers():
    """Restore the signal handlers after each test, so that no script's handler catches a later Ctrl-C."""
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for kind, handler in before.items():
        signal.signal(kind, handler)


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    """Return the folder of a BERT with 3 layers, one token per character, random weights and no dropout."""
    from running import small_bert
    return small_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def cwd(tmp_path, monkeypatch):
    """Change to a temporary folder with a valid data file, good.csv, so that messages show short paths."""
    from running import GOOD
    monkeypatch.chdir(tmp_path)
    Path("good.csv").write_text(GOOD)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """Return a function: folder_of("Bert") is the folder of a small random model of this architecture."""
    from families import small_model
    return functools.cache(lambda family: small_model(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="session")
def good_files(bert, tmp_path_factory):
    """Return a folder with small valid inputs of every kind, which good.py writes."""
    from good import write_good_files
    return write_good_files(tmp_path_factory.mktemp("good"), bert)


@pytest.fixture
def here(good_files, tmp_path):
    """Return a new copy of the folder `good_files`."""
    return shutil.copytree(good_files, tmp_path / "here")


@pytest.fixture(scope="session")
def documents(tmp_path_factory):
    """Return two files of documents, for training and for evaluation. Blank lines separate the documents."""
    from running import SENTENCES
    folder = tmp_path_factory.mktemp("documents")
    lines = [f"{line}\n" for line, in SENTENCES]
    for name, first, count in (("train.txt", 0, 8), ("held-out.txt", 500, 4)):
        parts = ["".join(lines[i:i + 5]) for i in range(first, first + 5 * count, 5)]
        parts += [f"{line[:9]}.\n{line[9:18]}.\n" for line in lines[first:first + count]]   # short documents
        Path(folder, name).write_text("I\n" + "\n".join(parts), "utf-8")      # the first sentence is only "I"
    return folder / "train.txt", folder / "held-out.txt"
