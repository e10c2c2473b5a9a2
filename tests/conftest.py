"""All tests run without a model hub and, on a machine without a GPU, with Triton's interpreter."""
import functools
import os
import platform
import signal
import sys
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
ON_THE_GPU = """test_kernels test_operations test_fuzz test_losses test_pair_losses test_chunks
    test_compile""".split()


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

