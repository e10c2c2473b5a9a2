"""Our package works next to another installed package called `kernels`: here a made-up one."""
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kernels import benchmark, hf_kernels
from running import ROOT

INSTALLED = {
    "kernels-9.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: kernels\nVersion: 9.1\n",
    "kernels/__init__.py": """
        import os, sys
        sys.loads = getattr(sys, "loads", 0) + 1
        import kernels.device
        if os.environ.pop("BROKEN", None):
            import missing_dependency
        from kernels.masks import RULE
        from . import masks, device
        from .layer import layer, Layer
        """,
    "kernels/device.py": "class Device: pass",
    "kernels/masks.py": "RULE = 'other package'",              # our package has a module of this name
    "kernels/layer/__init__.py": "from .mode import Mode\nfrom .layer import Layer\nlayer = 'a function'",
    "kernels/layer/mode.py": "from kernels.device import Device\nclass Mode(Device): pass",
    "kernels/layer/layer.py": "from ..device import Device\nclass Layer(Device): pass",
    "kernels/late.py": "from kernels import Layer, __version__\nimport kernels\nkernels.layer.upper()"}


@pytest.fixture
def installed(tmp_path):
    for name, text in INSTALLED.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("\n        ", "\n"))
    return tmp_path


def run(code, folder, **variables):
    """Run the code in a new process whose sys.path has the repository first, then `folder`."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", **variables}
    command = [sys.executable, "-S", "-c", code]               # -S: no other installed packages
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_names_and_submodules_of_both_are_found(installed):
    run("""if True:
        import sys, pickle, inspect, types, kernels, kernels.training.recipes
        sys.modules["kernels.masks"] = kernels.masks = types.ModuleType("kernels.masks")      # our module
        before = {name: module for name, module in sys.modules.items() if name.startswith("kernels")}
        assert not hasattr(kernels, "__wrapped__") and inspect.unwrap(kernels) is kernels and dir(kernels)
        assert kernels.__version__ == "9.1" and not hasattr(sys, "loads")      # nothing is loaded so far

        from kernels import Layer, device
        from kernels.layer.mode import Mode
        import kernels.device, kernels.layer, kernels.late
        assert sys.loads == 1 and kernels.Layer is Layer and Layer.__module__ == "kernels.layer.layer"
        assert issubclass(Mode, device.Device) and issubclass(Layer, kernels.device.Device)
        assert pickle.loads(pickle.dumps(Layer())).__class__ is Layer
        assert kernels.layer == "a function" and sys.modules["kernels.layer"].Mode is Mode

        assert kernels.RULE == "other package" and kernels.masks is before["kernels.masks"]
        assert all(sys.modules[name] is module for name, module in before.items())
        files = [getattr(module, "__file__", None) for module in sys.modules.values()]
        files = [file for file in files if file and "kernels" in file]
        assert len(files) == len(set(files)) >= 10, files

        for name in ("nothing", "__nothing__"):
            assert not hasattr(kernels, name)
            try:
                exec(f"from kernels import {name}")
            except ImportError as error:
                assert "cannot import name" in str(error)
        """, folder=installed)


def test_a_package_that_fails_to_load_can_be_loaded_again(installed):
    run("""if True:
        import sys, kernels
        for _ in range(2):
            try:
                from kernels.device import Device
            except ModuleNotFoundError as error:
                assert error.name == "missing_dependency" and "kernels.device" not in sys.modules
        assert sys.loads == 2 and kernels.device.Device is Device and kernels.Layer.__mro__[1] is Device
        assert type(kernels.device.__spec__.loader).__name__ == "SourceFileLoader"
        assert "kernels.masks" not in sys.modules                  # so the next import finds our module
        """, folder=installed, BROKEN="once")


def test_nothing_installed(tmp_path):
    """A second copy of our package, or a folder named kernels, does not count as an installed package."""
    (tmp_path / "kernels").symlink_to(ROOT / "kernels")
    run("""if True:
        import sys, kernels
        sys.path[:0] = ["", ".", "tests", sys.path[-1]]
        assert kernels.__version__ == kernels.VERSION and not hasattr(kernels, "CUDAProperties")
        for line in ("import kernels.layer", "from kernels import get_kernel", "from kernels.layer import x"):
            try:
                exec(line)
            except ImportError as error:
                assert "kernels" in str(error)
            else:
                raise AssertionError(line)
        """, folder=tmp_path)


def test_benchmark_has_names_of_both(monkeypatch):
    """Hugging Face's kernels 0.17 has a module `benchmark` too, and imports names from it."""
    other_package = SimpleNamespace(benchmark=SimpleNamespace(Benchmark="a class", measure="not ours"))
    monkeypatch.setattr(hf_kernels, "package", other_package)
    assert benchmark.Benchmark == "a class" and callable(benchmark.measure)
    assert not hasattr(benchmark, "nothing")
