"""Checks of whole runs: a resumed run, and a run in several processes, equal an uninterrupted run in one."""
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from running import equal, metrics, run


def check_resume(name, folder, flags, others, done, evaluations, *more):
    """Check that a run stopped after `done` steps and resumed equals an uninterrupted run, bit by bit.

    A second run, with the flags `others`, evaluates less often. It must have the same losses, weights and
    random states: evaluating must not change the training.

    evaluations   [number of evaluations of the uninterrupted run, of the second run]
    more          flags of the stopped run only
    returns       the uninterrupted run
    """
    whole, parts = run(name, folder / "whole", *flags), folder / "parts"
    interrupted = Mock(side_effect=[None] * done + [KeyboardInterrupt])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(whole.script, "all_reduce_gradients", interrupted)
        run(name, parts, *flags, *more)
    assert len(metrics(parts)) == done
    resumed, other = run(name, parts, *flags, *more, "--resume"), run(name, folder / "other", *others)
    assert [row | {"seconds": 0} for row in resumed.steps] == [row | {"seconds": 0} for row in whole.steps]
    assert equal(resumed.state, whole.state) and other.losses == whole.losses
    files = [sorted(out.glob("*.safetensors")) for out in (parts, folder / "whole")]   # models, adapters
    assert files[0] and equal(*([load_file(file) for file in found] for found in files))
    for part in ("model", "optimizer", "random"):
        assert equal(other.state[part], whole.state[part]), part
    found = [sum(any(key.startswith("dev_") for key in step) for step in x.steps) for x in (whole, other)]
    assert found == evaluations
    return whole


def check_processes(one, out, norms, loose=1):
    """Check that the run of several processes in `out` equals the run `one` of a single process.

    norms   its gradient norms, compared because clipping and Adam hide that a gradient is wrongly scaled
    loose   factor on the tolerances
    """
    assert norms == pytest.approx(one.norms, rel=1e-4 * loose)
    several = metrics(out)
    for name in one.steps[0].keys() - {"seconds"}:             # the loss and its terms
        wanted = [step[name] for step in one.steps]
        assert [step[name] for step in several] == pytest.approx(wanted, rel=1e-5, abs=1e-5 * loose), name
    for key, weight in torch.load(out / "state.pt", weights_only=True)["model"].items():
        # softmax does not depend on a key's bias: its gradient is rounding noise, which Adam amplifies
        if not key.endswith("key.bias"):
            torch.testing.assert_close(weight, one.state["model"][key], atol=2e-4, rtol=0, msg=key)
