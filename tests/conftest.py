"""Without a GPU the Triton kernels run in Triton's interpreter, which has to be asked for before they are imported."""
import multiprocessing
import os
import pathlib
import sys

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")            # tests have no hub
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
multiprocessing.set_forkserver_preload(["simcse"])      # a test's processes are forks of one that has imported everything


def pytest_configure(config):
    # in the interpreter NumPy warns of what a GPU computes in silence: log2(0) = −inf for a row without columns
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")
