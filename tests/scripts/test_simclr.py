"""Test simclr.py: LARS and projection heads. Other tests of simclr.py are in tests/training/images."""
from types import SimpleNamespace

import pytest
import torch

import simclr
from kernels.training.images import encoders
from kernels.training.papers import simclr_lars
from running import equal


def test_lars_steps():
    """Three steps equal the formula, for a matrix, a bias, and a zero matrix with an unscaled first step."""
    weights = [torch.randn(3, 4).double(), torch.randn(3).double(), torch.zeros(2, 2).double()]
    tensors, momenta = [torch.nn.Parameter(w.clone()) for w in weights], [0, 0, 0]
    optimizer = simclr_lars.LARS(tensors, lr=0.5, weight_decay=0.01)
    for lr in (0.5, 0.2, 0.1):
        optimizer.param_groups[0]["lr"] = lr
        for i, w in enumerate(weights):
            g = tensors[i].grad = torch.randn(w.shape).double()
            if w.dim() > 1:
                g = g + 0.01 * w
                g = g * (0.001 * w.norm() / g.norm() if w.norm() > 0 else 1)
            momenta[i] = 0.9 * momenta[i] + lr * g
            weights[i] = w - momenta[i]
        optimizer.step()
    torch.testing.assert_close([w.detach() for w in tensors], weights, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("layers", [0, 3])
@pytest.mark.parametrize("form, norm, norms", [
    ("paper", None, False), ("code", None, True), ("paper", True, True)])
def test_layers_of_projection_heads(form, norm, norms, layers):
    """With batch norms, linear layers have no bias, and the bias of the last batch norm is not trained."""
    args = SimpleNamespace(head_layers=layers, projection_dim=4, form=form, head_norm=norm)
    head = simclr.projection_head(8, args)
    inner = ["Linear", "BatchNorm1d", "ReLU"] if norms else ["Linear", "ReLU"]
    assert [type(part).__name__ for part in head] == (layers * inner)[:-1]
    assert head(torch.randn(6, 8)).shape == (6, 4 if layers else 8)
    if layers:
        assert head[-1].bias.requires_grad != norms and (head[0].bias is None) == norms


def test_batch_norms_are_synchronised_and_saved_as_plain_ones(tmp_path):
    """On several GPUs, batch norms see the whole batch. A head trained on several GPUs loads on one."""
    args = simclr.make_parser().parse_args("--data x --model resnet-small --form code".split())
    run = SimpleNamespace(world_size=2, device=torch.device("meta"), bf16=False, args=args)
    model = simclr.build_model(args, SimpleNamespace(is_small=True), run)
    norms = [part for part in model.modules() if "BatchNorm" in type(part).__name__]
    assert len(norms) > 5 and {type(norm) for norm in norms} == {torch.nn.SyncBatchNorm}
    head = simclr.projection_head(8, args)
    encoders.save_head(torch.nn.SyncBatchNorm.convert_sync_batchnorm(head), tmp_path)
    loaded = encoders.load_head(tmp_path)
    assert type(loaded[1]) is torch.nn.BatchNorm1d
    assert equal(loaded.state_dict(), head.state_dict())
