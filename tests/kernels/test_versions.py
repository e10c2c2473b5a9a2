"""Scripts and `import kernels` report a package that is too old in one line."""
import importlib.metadata
import subprocess
import sys

import pytest

from kernels import versions
from running import ROOT


def problem_with(monkeypatch, installed):
    """Return versions.version_problem as on a machine with these versions {package: version}."""
    def version(package):
        if package in installed:
            return installed[package]
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(versions, "OLDEST", versions.OLDEST | {"torch": "2.9", "triton": "3.4.0"})
    versions.version_problem.cache_clear()
    try:
        return versions.version_problem("python", "torch", "triton")
    finally:
        versions.version_problem.cache_clear()


@pytest.mark.parametrize("text", ["2.9.0", "2.9", "2.10.0+cu128", "2.9.0a0+gitabc", "2.16.0.dev2026",
                                  "3.0.0rc1", "3", "unknown", None])
def test_new_or_unknown_versions_are_accepted(monkeypatch, text):
    assert problem_with(monkeypatch, {"torch": text}) is None


@pytest.mark.parametrize("text", ["2.8.1", "2.8.1+cpu", "2.0.0.dev20230101", "1.13", "2"])
def test_old_versions_are_reported(monkeypatch, text):
    message = f"torch {text} is installed, expected 2.9 or newer: pip install -U torch"
    assert problem_with(monkeypatch, {"torch": text}) == message


def test_missing_packages_old_triton_old_python(monkeypatch):
    assert problem_with(monkeypatch, {}) is None        # torch can be imported, without metadata
    triton = problem_with(monkeypatch, {"torch": "2.9", "triton": "3.3.1"})
    assert triton == "triton 3.3.1 is installed, expected 3.4.0 or newer: pip install -U triton"
    assert problem_with(monkeypatch, {"torch": "2.9", "triton": "3.4"}) is None
    monkeypatch.setitem(sys.modules, "torch", None)            # torch is missing
    missing = problem_with(monkeypatch, {})
    assert missing == "torch is not installed, expected 2.9 or newer: pip install -U torch"
    monkeypatch.setattr(versions.platform, "python_version", lambda: "3.9.2")
    assert problem_with(monkeypatch, {}) == "python 3.9.2 is installed, expected 3.10 or newer"


def run(folder, *command):
    """Run Python in a new process that finds only the packages in this folder, and our files."""
    return subprocess.run([sys.executable, "-S", *command], cwd=ROOT, env={"PYTHONPATH": f"{folder}:{ROOT}"},
                          capture_output=True, text=True)


def test_scripts_and_library_report_an_old_torch(tmp_path):
    for package, version in (versions.OLDEST | {"torch": "1.0"}).items():
        (tmp_path / f"{package}-1.dist-info").mkdir()
        (tmp_path / f"{package}-1.dist-info/METADATA").write_text(f"Name: {package}\nVersion: {version}\n")
    line = f"torch 1.0 is installed, expected {versions.OLDEST['torch']} or newer: pip install -U torch\n"
    for name, command in {"simcse.py": ["simcse.py"], "mine.py": ["-m", "kernels.training.mine"]}.items():
        done = run(tmp_path, *command, "--help")
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{name}: {line}")
    done = run(tmp_path, "-c", "from kernels import info_nce")
    assert done.returncode == 1 and done.stderr.endswith(f"\nImportError: kernels: {line}")


def test_only_scripts_need_transformers(tmp_path):
    (tmp_path / "torch.py").write_text("")                     # found, but importing the losses will fail
    for package in ("torch", "numpy"):
        (tmp_path / f"{package}-1.dist-info").mkdir()
        (tmp_path / f"{package}-1.dist-info/METADATA").write_text(f"Name: {package}\nVersion: 99\n")
    done = run(tmp_path, "simcse.py", "--help")
    assert done.stderr.startswith("simcse.py: transformers is not installed, expected ")
    done = run(tmp_path, "-c", "from kernels import info_nce")
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'torch.nn'; 'torch' is not a package\n")
