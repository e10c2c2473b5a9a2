"""Run every kernel, as compiled for sm_80 and sm_90, in the emulator, and check that it notices faults."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, str(Path(__file__).parent)]


def run(*flags):
    """Return the finished process of the emulator's command, in which Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([*COMMAND, *flags], env=environment, capture_output=True, text=True)


@pytest.mark.skipif(sys.platform != "linux", reason="triton exists on Linux only")
@pytest.mark.parametrize("chip", ["80", "90"])
def test_sample_on(chip):
    """All kernels give the results of eager without findings; each planted fault changes that."""
    done = run(chip, "--sample")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "kernels without a case: []" in done.stdout and "missed: []" in done.stdout


@pytest.mark.parametrize("flags", [[], ["75"], ["90", "--minutes", "0"], ["90", "--sections", "none"]])
def test_wrong_flags(flags):
    done = run(*flags)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "tests/emulator: " in done.stderr
