"""Checks of whole runs: resumed ones, and those of several processes, give what one undisturbed run gives."""
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from running import equal, metrics, run


def check_resume(name, folder, flags, others, done, evaluations, *more):
    """A run that is stopped after `done` steps and resumed is the whole run to the bit. A run with other
    flags, which evaluates less often, has the same losses, weights and random numbers.

    evaluations   how many the whole run makes, and the other one
    more          flags of the run that is stopped
    returns       the whole run
    """
    whole, parts = run(name, folder / "whole", *flags), folder / "parts"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(whole.script, "sum_gradients", Mock(side_effect=[None] * done + [KeyboardInterrupt]))
        run(name, parts, *flags, *more)
    assert len(metrics(parts)) == done
    resumed, other = run(name, parts, *flags, *more, "--resume"), run(name, folder / "other", *others)
    assert [row | {"seconds": 0} for row in resumed.steps] == [row | {"seconds": 0} for row in whole.steps]
    assert equal(resumed.state, whole.state) and other.losses == whole.losses
    assert equal(*(load_file(out / "model.safetensors") for out in (parts, folder / "whole")))
    for part in ("model", "optimizer", "random"):
        assert equal(other.state[part], whole.state[part]), part
    found = [sum(any(key.startswith("dev_") for key in step) for step in x.steps) for x in (whole, other)]
    assert found == evaluations
    return whole


def check_processes(one, out, norms, loose=1):
    """The run of several processes in `out` equals the run `one`. Clipping and Adam hide a gradient that is
    too large, so its norms are compared too. loose: how many times more rounding is allowed."""
    assert norms == pytest.approx(one.norms, rel=1e-4 * loose)
    several = metrics(out)
    for name in one.steps[0].keys() - {"seconds"}:             # the terms of a loss too
        wanted = [step[name] for step in one.steps]
        assert [step[name] for step in several] == pytest.approx(wanted, rel=1e-5, abs=1e-5 * loose), name
    for key, weight in torch.load(out / "state.pt", weights_only=True)["model"].items():
        if not key.endswith("key.bias"):   # softmax ignores it: Adam makes the rounding of its gradient large
            torch.testing.assert_close(weight, one.state["model"][key], atol=2e-4, rtol=0, msg=key)
