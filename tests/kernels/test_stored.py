"""Small matrices (kernels/stored.py): what a GPU would compute, here on the CPU, and when they are chosen."""
import pytest
import torch
from test_kernels import DEVICE, LOSSES, LSE_CALLS, MASKS, compare, mask_arguments, positive_pairs, unit_rows
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import choose_impl, info_nce, nt_xent, stored
from kernels.similarity import similarity_lse


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Keep half rows for the products, and the temperature as a tensor that is not read."""
    monkeypatch.setattr(stored, "operands", lambda q, k, temperature: (q, q if k is None else k))
    monkeypatch.setattr(stored, "reciprocal", lambda temperature, count=1: (temperature * count).reciprocal())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", LOSSES | LSE_CALLS)
def test_losses_as_on_a_gpu(loss, dtype, as_on_a_gpu):
    q, k = positive_pairs(38, 24, dtype)
    compare((LOSSES | LSE_CALLS)[loss], q, k, impl="blockwise", units=32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks_as_on_a_gpu(name, dtype, as_on_a_gpu):
    q, k = unit_rows(37, 20, dtype, 0), unit_rows(53, 20, dtype, 1)
    arguments = mask_arguments(name, 37, 53)
    for keys in (lambda k: k, lambda k: k.detach()):
        compare(lambda q, k, t, impl: similarity_lse(q, keys(k), t, impl=impl, **arguments) + 0 * k.sum(),
                q, k, impl="blockwise")


@pytest.mark.parametrize("f", [
    lambda q, k, impl: 1e-12 * similarity_lse(q, k, 0.07, impl=impl).sum(),
    lambda q, k, impl: nt_xent(q, k, 0.03, impl=impl)], ids=["upstream gradient", "weights"])
def test_gradients_of_float16_do_not_underflow(f, as_on_a_gpu):
    """The upstream gradient is 1e-12, or the softmax weights are 1e-9: both are 0 in float16."""
    q = positive_pairs(38, 24, torch.float16)[0].float()
    exact_q = q.double().requires_grad_()
    exact, = torch.autograd.grad(f(exact_q, q.double(), "eager"), exact_q)
    q = q.requires_grad_()
    with torch.autocast(DEVICE, torch.float16):             # float16 products of float32 rows
        value = f(q, q.detach().requires_grad_(), "blockwise")
    found, = torch.autograd.grad(value, q)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-2 * exact.abs().max().item())


@pytest.mark.parametrize("logit", [0.0, 20.0, 60.0])
def test_small_losses_are_exact(logit):
    """The positive's softmax is 1 − 6e-9 or 1 − 3e-26: in float32 its difference to 1 would be 0."""
    q, k = torch.eye(4).requires_grad_(), torch.eye(4) * logit
    loss = info_nce(q, k, 1.0, impl="blockwise")
    others = 3 / (3 + torch.tensor(logit, dtype=torch.float64).exp())      # 1 − softmax of the positive
    torch.testing.assert_close(loss.double(), -torch.log1p(-others), rtol=1e-5, atol=0)
    gradient, = torch.autograd.grad(loss, q)
    exact = (-others * logit / 4).expand(4)
    torch.testing.assert_close(gradient.diagonal().double(), exact, rtol=1e-5, atol=0)


def test_auto_chooses_by_size():
    with FakeTensorMode():
        x = torch.empty(2, 2, device="cuda", dtype=torch.bfloat16)
        assert choose_impl("auto", x, 2048, 2048) == "blockwise"
        assert choose_impl("auto", x, 2048, 2049) == choose_impl("auto", x) == "triton"
        assert choose_impl("triton", x, 1, 1) == "triton"
        x = x.double()
        assert choose_impl("auto", x, 4096, 4096) == "blockwise"
