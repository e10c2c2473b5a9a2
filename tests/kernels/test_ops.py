"""The losses with torch.compile, second derivatives and subsets of gradients. Other tests measure the memory
of the papers' losses, or run the losses without Triton."""
import itertools
import subprocess
import sys

import pytest
import torch
from comparing import DEVICE, GPU, LOSSES, both_impls, differentiate, every_impl, positive_pairs, unit_rows

import vascl
from dclr import dclr_loss, noise_negatives
from ease import ease_loss
from kernels import queue_loss, sigmoid_loss
from running import ROOT, Memory
from selfguided import selfguided_loss
from simcse import simcse_loss

# ── derivatives ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss, impl", [
    *itertools.product(["nt_xent", "queue_loss", "linear", "sup_con_loss"], ["auto"]),
    *itertools.product(["info_nce", "sigmoid_loss"], ["eager", "blockwise", "triton"])])
def test_compile_breaks_the_graph_at_a_fused_loss(loss, impl, dtype):
    """torch.compile breaks the graph at a fused loss, but not in eager, which auto selects for few logits."""
    if impl == "triton" and dtype == torch.bfloat16 and not GPU:
        pytest.skip("Triton's interpreter computes wrong products in bfloat16")
    q, k, t = *(unit_rows(38, 8, dtype, seed) for seed in (24, 25)), torch.tensor(0.2, device=DEVICE)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def f(q, k, t):
        return LOSSES[loss](2 * q, 2 * k, t, impl).exp()

    torch.compiler.reset()
    compiled = torch.compile(f, backend=backend)
    for a, b in zip(differentiate(compiled, q, k, t), differentiate(f, q, k, t)):
        torch.testing.assert_close(a, b, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-6)
    assert (len(graphs) == 1) == (impl in ("auto", "eager"))


@both_impls
@pytest.mark.parametrize("loss", ["info_nce", "self_similarity", "sigmoid_loss", "queue_loss"])
def test_fused_losses_have_no_second_derivatives(impl, loss):
    q, k = (x.requires_grad_() for x in positive_pairs(12, 4, torch.float32))
    with pytest.raises(RuntimeError, match="second derivatives need; use impl='eager'"):
        torch.autograd.grad(LOSSES[loss](q, k, 0.1, impl).sum(), q, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", ["info_nce", "nt_xent", "sigmoid_loss", "queue_loss", "sup_con_loss"])
def test_eager_has_second_derivatives(loss, dtype):
    def second_derivative(q, k):
        q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
        gradient, = torch.autograd.grad(LOSSES[loss](q, k, 0.5, "eager"), q, create_graph=True)
        return torch.autograd.grad(gradient.norm(), q)[0].double()

    q, k = positive_pairs(12, 4, dtype)
    exact = second_derivative(q.double(), k.double())
    assert (second_derivative(q, k) - exact).norm() < 8 * torch.finfo(dtype).eps * exact.norm()


@every_impl
@pytest.mark.parametrize("loss", ["info_nce", "clip_loss", "queue_loss", "sigmoid_loss"])
def test_lazily_negated_upstream_gradient(impl, loss):
    """PyTorch may store the negative of a tensor, such as the imaginary part of a complex conjugate."""
    q, k = (x.requires_grad_() for x in positive_pairs(12, 4, torch.float32))
    negated, value = torch.tensor(3j, device=DEVICE).conj().imag, LOSSES[loss](q, k, 0.1, impl)
    assert negated.is_neg()
    found, expected = (torch.autograd.grad(value, (q, k), g, retain_graph=True)
                       for g in (negated, negated + 0))
    assert all(map(torch.equal, found, expected))


@both_impls
@pytest.mark.parametrize("loss", LOSSES)
def test_default_device(impl, loss):
    """The device of the rows counts, not the default device."""
    q, k = positive_pairs(12, 4, torch.float32)
    expected = LOSSES[loss](q, k, 0.1, impl)
    torch.set_default_device("meta")
    try:
        assert torch.equal(LOSSES[loss](q, k, 0.1, impl), expected)
    finally:
        torch.set_default_device(None)


@both_impls
def test_any_subset_of_gradients(impl):
    """sigmoid_loss computes any of the 16 subsets of the gradients of q, k, temperature and bias."""
    x = *positive_pairs(9, 6, torch.float32), *torch.tensor([0.2, -1.0], device=DEVICE).unbind()
    leaves = [y.clone().requires_grad_() for y in x]
    expected = torch.autograd.grad(sigmoid_loss(*leaves, impl="eager"), leaves)
    for needed in range(16):
        inputs = [y.detach().requires_grad_(bool(needed >> i & 1)) for i, y in enumerate(x)]
        loss = sigmoid_loss(*inputs, impl=impl)
        assert loss.requires_grad == bool(needed)
        if needed:
            loss.backward()
        for y, gradient in zip(inputs, expected):
            assert (y.grad is not None) == y.requires_grad
            if y.grad is not None:
                torch.testing.assert_close(y.grad, gradient, rtol=1e-4, atol=1e-5)


@both_impls
def test_a_queue_may_change_before_backward(impl):
    """Backward does not read the queue, so MoCo can enqueue its keys before backward."""
    q, k, queue = (unit_rows(n, 16, torch.float16, n) for n in (5, 5, 9))
    before, after = (queue_loss(q.requires_grad_(), k, queue, 0.2, impl=impl) for _ in range(2))
    expected = torch.autograd.grad(before, q)
    queue.zero_()
    assert torch.equal(*torch.autograd.grad(after, q), *expected)


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────


def dclr_from_rows(z, y, impl, form="paper"):
    noise = noise_negatives(z, y, z[:9] - y[:9], 1, form=form, impl=impl)
    return dclr_loss(z, y, noise, y, z, 0.9, form=form, impl=impl)


def vascl_from_rows(z, y, impl):
    neighbours = vascl.nearest_neighbours(z, 4, impl=impl)
    delta = vascl.virtual_augmentation(z, torch.tanh, neighbours, y, 3.0, 0.05)
    return vascl.neighbourhood_loss(z, z + delta, torch.tanh, neighbours, 0.004)


SENTENCE_LOSSES = {
    "simcse": lambda z, y, impl: simcse_loss(z, y, z - y, 0.05, impl=impl),
    "ease": lambda z, y, impl: ease_loss(z, y, torch.stack([y.flip(0), z.flip(0)], 1), 0.1, impl=impl),
    "selfguided": lambda z, y, impl: selfguided_loss(z, torch.stack([y, z * y], 1), 0.05, impl=impl),
    "dclr": dclr_from_rows, "dclr code": lambda z, y, impl: dclr_from_rows(z, y, impl, "code"),
    "vascl": vascl_from_rows}


@pytest.mark.parametrize("name", SENTENCE_LOSSES)
def test_no_loss_of_a_paper_stores_all_pairs(name):
    """2,500 × 2,500 logits take 23.8 MiB. A loss takes less, except DCLR's form="code", with large blocks."""
    rows = torch.randn(2, 2500, 6, generator=torch.Generator().manual_seed(17)).unbind()
    with Memory() as memory:
        SENTENCE_LOSSES[name](*(x.requires_grad_() for x in rows), "auto").backward()
    assert memory.peak < (150 if name == "dclr code" else 23.8), memory.peak


# ── without Triton, or without its interpreter ──────────────────────────────────────────────────────────────

def test_triton_on_the_cpu_needs_the_interpreter(monkeypatch):
    """The error is raised before any kernel is launched."""
    monkeypatch.setattr("kernels.gpu.launch.INTERPRETED", False)
    monkeypatch.setattr("triton.runtime.jit.KernelInterface.__getitem__", None)
    q, k = (x.cpu().requires_grad_() for x in positive_pairs(12, 4, torch.float16))
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        LOSSES["clip_loss"](q, k, 0.1, "triton")


def test_without_triton():
    """Without Triton, as on macOS and Windows, all but impl="triton" works, also without transformers."""
    code = """if True:
        import sys
        sys.modules |= dict.fromkeys(["triton", "transformers"])
        import torch, kernels
        q = torch.eye(3, requires_grad=True)
        kernels.nt_xent(q, q, 1.0).backward()
        print(kernels.choose_impl("auto", q))
        kernels.nt_xent(q, q, 1.0, impl="triton")
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "blockwise\n"
    assert "ValueError: impl: 'triton' needs the package triton, which is not installed" in done.stderr
