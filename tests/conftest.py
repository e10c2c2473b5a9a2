"""Without a GPU the Triton kernels run in Triton's interpreter, which has to be asked for before they are imported."""
import os
import pathlib
import sys

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")            # tests have no hub
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
