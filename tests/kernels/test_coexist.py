"""Our package works beside another installed package called `kernels`, which the test makes up."""
import os
import subprocess
import sys

from running import ROOT

INSTALLED = {
    "kernels-9.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: kernels\nVersion: 9.1\n",
    "kernels/__init__.py": """
import os, sys
sys.loads = getattr(sys, "loads", 0) + 1
from kernels.benchmark import Benchmark
from kernels.masks import RULE
from . import device
from .layer import Layer
""",
    "kernels/device.py": "class Device: pass",
    "kernels/masks.py": "RULE = 'other package'",              # our package has `masks` and `benchmark`, too
    "kernels/benchmark.py": "class Benchmark: pass",
    "kernels/layer/__init__.py": "from .layer import Layer",
    "kernels/layer/layer.py": "from ..device import Device\nclass Layer(Device): pass",
    "kernels/late.py": "from kernels import Layer, __version__"}


CODE = """if True:
        import sys, kernels, kernels.layer
        before = {name: module for name, module in sys.modules.items() if name.startswith("kernels")}
        assert not hasattr(kernels, "__wrapped__") and kernels.__version__ == "9.1"
        from kernels import benchmark
        assert not hasattr(sys, "loads")                       # nothing has asked for the other package
        from kernels import Layer, RULE, device
        import kernels.late, kernels.training.ranks
        assert sys.loads == 1 and RULE == "other package" and kernels.late.Layer is Layer
        assert kernels.layer.Layer is Layer and kernels.Benchmark and issubclass(Layer, device.Device)
        assert all(sys.modules[name] is module for name, module in before.items())
        assert kernels.benchmark.measure and kernels.masks.make_mask
        assert not hasattr(kernels, "nothing")
"""


def test_names_and_modules_of_both_are_found(tmp_path):
    """In sys.path, the repository comes before the folder of the other package."""
    for name, text in INSTALLED.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
