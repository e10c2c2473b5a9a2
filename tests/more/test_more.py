"""Test that the scripts of further papers find the package kernels, and test their optimizer."""
import runpy
import sys
from pathlib import Path

import pytest
import torch

from kernels.training.loop import decay_groups
from running import MORE, ROOT
from uncorrected_adamw import UncorrectedAdamW


@pytest.mark.parametrize("name", [Path(name).name for name in MORE])
def test_the_script_finds_kernels(name, monkeypatch):
    """`python docs/more/NAME.py` adds the folder that contains kernels/ to Python's search path."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path or ".").resolve() != ROOT])
    runpy.run_path(str(ROOT / "docs/more" / f"{name}.py"))
    assert any(Path(path).resolve() == ROOT for path in sys.path)


def test_uncorrected_adamw_matches_the_formula():
    """Biases and norms get no weight decay. Frozen weights and weights without a gradient do not change."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(5, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3), torch.nn.Linear(2, 2)
    model, lr, eps, decay = torch.nn.Sequential(*layers).double(), 0.01, 1e-6, 0.1
    model[3].requires_grad_(False)
    optimizer = UncorrectedAdamW(decay_groups(model, decay), lr, eps)
    expected = [weight.detach().clone() for weight in model.parameters()]
    m, v = ([torch.zeros_like(weight) for weight in expected] for _ in range(2))
    for _ in range(4):
        for i, weight in enumerate([*model.parameters()][:4]):
            weight.grad = torch.randn_like(weight)
            m[i] = 0.9 * m[i] + 0.1 * weight.grad
            v[i] = 0.999 * v[i] + 0.001 * weight.grad**2
            kept = 1 - lr * decay if weight.dim() > 1 else 1
            expected[i] = kept * expected[i] - lr * m[i] / (v[i].sqrt() + eps)
        optimizer.step()
    torch.testing.assert_close([w.detach() for w in model.parameters()], expected, rtol=1e-12, atol=1e-14)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]       # without frozen weights
