"""The optimizers and learning rates of ConSERT, DeCLUTR and SimCLS, compared with plain references."""
from types import SimpleNamespace

import pytest
import torch

from kernels.training.extras.optimizers import clip_gradient, learning_rate, make_optimizer
from kernels.training.extras.sentence_flags import OPTIMIZERS


def model_of(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3)).double()


@pytest.mark.parametrize("name, eps, corrected, decay, clip", [
    ("simcse", 1e-8, True, 0.0, 1.0), ("consert", 1e-6, False, 0.01, 1.0), ("declutr", 1e-6, False, 0.1, 1.0),
    ("simcls", 1e-8, True, 0.0, None)])
def test_steps(name, eps, corrected, decay, clip):
    """Adam's update with or without bias correction, with weight decay for matrices only."""
    model, args = model_of(), SimpleNamespace(optimizer_recipe=name, lr=0.01)
    optimizer = make_optimizer(model, args)
    weights = [w.detach().clone() for w in model.parameters()]
    m, v = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    for step in range(1, 4):
        gradients = [3 * torch.randn_like(w) for w in weights]
        for w, gradient in zip(model.parameters(), gradients):
            w.grad = gradient.clone()
        clip_gradient(model, args)
        optimizer.step()
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        scale = min(1, clip / (norm + 1e-6)) if clip else 1
        for i, gradient in enumerate(gradients):
            m[i] = 0.9 * m[i] + 0.1 * scale * gradient
            v[i] = 0.999 * v[i] + 0.001 * (scale * gradient) ** 2
            up, down = (1 - 0.9**step, 1 - 0.999**step) if corrected else (1, 1)
            if weights[i].dim() > 1:
                weights[i] = weights[i] * (1 - 0.01 * decay)
            weights[i] = weights[i] - 0.01 * (m[i] / up) / ((v[i] / down).sqrt() + eps)
    torch.testing.assert_close([w.detach() for w in model.parameters()], weights, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name, expected", [
    ("simcse", [1, 0.95, 0.9, 0.5, 0.05]), ("consert", [0, 0.5, 1, 10 / 18, 1 / 18]),
    ("declutr", [1 / 32, (1 + 31 / 2) / 32, 1, (1 + 31 * 10 / 18) / 32, (1 + 31 / 18) / 32]),
    ("simcls", [1e-6, 2e-6, 3e-6, 11e-6, 2e-5])])
def test_learning_rates(name, expected):
    """Check steps 0, 1, 2, 10 and 19 of 20. SimCLS's rate peaks at step 10,000, then falls like 1/√step."""
    args = SimpleNamespace(optimizer_recipe=name, lr=2.0)
    assert [learning_rate(step, 20, args) / 2 for step in (0, 1, 2, 10, 19)] == pytest.approx(expected)
    if name == "simcls":
        assert learning_rate(9_999, 1, args) == pytest.approx(0.02)
        assert learning_rate(39_999, 1, args) == pytest.approx(0.01)


def test_flag_and_module_have_the_same_optimizers():
    from kernels.training.extras import optimizers
    assert {*OPTIMIZERS} == {*optimizers.OPTIMIZERS}
