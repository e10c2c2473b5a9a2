"""Fixtures. Tests run without the model hub and, on a machine without a GPU, with Triton's interpreter."""
import functools
import importlib.util
import os
import platform
import signal
import sys
from pathlib import Path

# Triton's interpreter multiplies with NumPy. OpenBLAS's code for Haswell and Zen CPUs rounds a product and
# its transpose differently, so tests of extreme logits would fail. NumPy reads this variable on import.
if platform.machine() == "x86_64":
    os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"
os.environ.setdefault("OMP_NUM_THREADS", "1")           # one thread per worker of pytest-xdist, also in NumPy

import pytest
import torch

# nohup, and a shell that runs tests in the background, make them ignore signals that some tests send
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"                # Triton reads this when the kernels are imported
    torch.set_num_threads(1)                            # makes runs bitwise reproducible
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.fsync = lambda file: None                            # tests need no files that survive a power failure
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    from interpreter import make_interpreter_faster
    make_interpreter_faster()
ON_THE_GPU = {f"test_{name}" for name in
              "kernels rounding fuzz autocast ops checks replay compile".split()}


@pytest.fixture(autouse=True)
def scripts_stay_on_the_cpu(request, monkeypatch):
    """Hide the GPU from all tests but those of the kernels."""
    if request.module.__name__ not in ON_THE_GPU:       # others would need other tolerances
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def restore_signal_handlers():
    """Restore signal handlers after each test. Otherwise a script's handler would catch Ctrl-C later."""
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for kind, handler in before.items():
        signal.signal(kind, handler)


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    """Return a folder with a BERT: 3 layers, one token per character, large random weights, no dropout."""
    from running import small_bert
    return small_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def cwd(tmp_path, monkeypatch):
    """Change to a temporary folder with a valid data file, good.csv, so that messages show short paths."""
    from running import GOOD
    monkeypatch.chdir(tmp_path)
    Path("good.csv").write_text(GOOD)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Return the --out of a finished run of simcse.py on good.csv, to pass to --model or --resume."""
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
    """Return a function: folder_of(family) is a folder with a small random model of this architecture."""
    from families import small_model
    return functools.cache(lambda family: small_model(family, tmp_path_factory.mktemp(family)))
