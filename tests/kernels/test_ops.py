"""The fused operations, except their values: torch.compile, second derivatives, errors for bad input."""
import os
import subprocess
import sys

import pytest
import torch
from test_kernels import DEVICE, both_impls, differentiate, unit_rows

import kernels
from kernels import (
    info_nce,
    linear_cross_entropy,
    nt_xent,
    queue_loss,
    sigmoid_loss,
    similarity_lse,
    similarity_topk,
)


@pytest.mark.parametrize("impl", ["eager", "blockwise", "triton"])
@pytest.mark.parametrize("loss", [info_nce, kernels.clip_loss, nt_xent, sigmoid_loss],
                         ids=lambda loss: loss.__name__)
def test_compile_breaks_the_graph_once(impl, loss):
    """torch.compile does not look inside a loss, but into eager; results are equal."""
    q, k, t = *(unit_rows(37, 8, torch.float32, seed) for seed in (24, 25)), torch.tensor(0.2, device=DEVICE)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def f(q, k, t):
        return loss(2 * q, 2 * k, t, impl=impl).exp()

    torch.compiler.reset()
    compiled = torch.compile(f, backend=backend)
    for a, b in zip(differentiate(compiled, q, k, t), differentiate(f, q, k, t)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert len(graphs) == (1 if impl == "eager" else 2)


@both_impls
@pytest.mark.parametrize("f", [lambda q, impl: info_nce(q, q.detach(), 0.1, impl=impl),
                               lambda q, impl: similarity_lse(q, None, 0.1, impl=impl).sum(),
                               lambda q, impl: sigmoid_loss(q, q.detach(), 0.1, impl=impl),
                               lambda q, impl: sigmoid_loss(q.detach(), q, 0.1, impl=impl)])
def test_second_derivative_raises(impl, f):
    q = unit_rows(5, 4, torch.float32, 28).requires_grad_()
    with pytest.raises(RuntimeError, match="second derivatives need; use impl='eager'"):
        torch.autograd.grad(f(q, impl), q, create_graph=True)
    gradient, = torch.autograd.grad(f(q, "eager"), q, create_graph=True)
    torch.autograd.grad(gradient.norm(), q)


@both_impls
def test_a_queue_may_change_before_backward(impl):
    """Backward does not read the queue, so MoCo can enqueue its keys at once."""
    q, k, queue = (unit_rows(n, 16, torch.float16, 28) for n in (5, 5, 9))
    loss = queue_loss(q.requires_grad_(), k, queue, 0.2, impl=impl)
    queue.zero_()
    loss.backward()
    assert q.grad.any()


# ── bad input ───────────────────────────────────────────────────────────────────────────────────────────────

Q, K = torch.randn(4, 3), torch.randn(5, 3)
FOUR, FIVE = torch.arange(4), torch.arange(5)
lse = similarity_lse


@pytest.mark.parametrize("call, message", [
    (lambda: lse(torch.randn(4)), r"q: found \(4,\), expected \(N, D\)"),
    (lambda: lse(Q, torch.randn(5, 3, 1)), r"k: found \(5, 3, 1\), expected"),
    (lambda: lse(Q, torch.randn(5, 4)), r"k: found \(5, 4\), expected \(K, 3\)"),
    (lambda: lse(Q, K.double()), "k: dtype torch.float64, expected torch.float32 like q"),
    (lambda: lse(Q, K.to("meta")), "k: on meta, expected cpu like the other tensors"),
    (lambda: lse(Q, K[:0]), r"k: found \(0, 3\), expected \(K, 3\), not empty"),
    (lambda: lse(Q, K, exclude="pair"), r'exclude: "pair" needs k=None .* found a k'),
    (lambda: lse(torch.randn(3, 2), exclude="pair"), "found 3 rows"),
    (lambda: lse(Q, K, exclude=(FOUR, FOUR)), r"exclude: column ids: found \(4,\), expected \(5,\)"),
    (lambda: lse(Q, K, similar=(K, K, 0.5)), r"similar: row features: found \(5, 3\), expected \(4, E\)"),
    (lambda: lse(Q, K, similar=(Q, K[:, :2], 0.5)), r"column features: found \(5, 2\), expected \(5, 3\)"),
    (lambda: lse(Q.double(), K.double(), impl="triton"), "impl: 'triton' does not support float64"),
    (lambda: similarity_topk(Q, K, 6), "n: 6, expected an integer from 1 to the 5 rows of k"),
    (lambda: info_nce(K, Q), r"k: 4 rows, expected at least 5 \+ offset 0"),
    (lambda: info_nce(Q, K, offset=-1), "offset: -1, expected this rank's first row among the 5 of k"),
    (lambda: info_nce(Q, K, symmetric=True), "k: 5 rows, expected 4 like q"),
    (lambda: nt_xent(Q, K), "z2: 5 rows, expected 4 like z1"),
    (lambda: linear_cross_entropy(Q, K, FIVE), r"targets: found \(5,\), expected \(4,\)"),
])
def test_bad_input_names_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@both_impls
def test_negated_views(impl):
    """x.conj().imag is x.imag's memory with a flag for the sign, which a Triton kernel would not see."""
    x, k = torch.randn(6, 16, dtype=torch.complex64, device=DEVICE), unit_rows(6, 16, torch.float32, 3)
    for f in (lambda q, k: info_nce(q, k, 0.5, impl=impl), lambda q, k: sigmoid_loss(k, q, impl=impl),
              lambda q, k: queue_loss(q, q, q, 0.5, impl=impl),
              lambda q, k: similarity_lse(k, k, similar=(q, q, 1.0), impl=impl).sum(),
              lambda q, k: similarity_topk(k, q, 2, impl=impl)[0].sum()):
        torch.testing.assert_close(f(x.conj().imag, k), f(-x.imag, k))


@both_impls
def test_ids_of_two_dtypes(impl):
    q, k = unit_rows(4, 16, torch.float32, 3), unit_rows(5, 16, torch.float32, 4)
    ids = torch.tensor([-1, 0, 1, -128], device=DEVICE), torch.tensor([255, 0, 1, 128, 3], device=DEVICE)
    for what in ("exclude", "within"):
        in_int64, in_8_bits = (similarity_lse(q, k, impl=impl, **{what: pair})
                               for pair in (ids, (ids[0].to(torch.int8), ids[1].to(torch.uint8))))
        assert torch.equal(in_int64, in_8_bits)


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("f", [
    lambda q: similarity_lse(q, K, impl="triton"),
    lambda q: queue_loss(q.half(), q.half(), K.half(), impl="triton"),
    lambda q: sigmoid_loss(q, K, impl="triton"), lambda q: similarity_topk(q, K, 1, impl="triton")])
def test_triton_on_the_cpu_needs_the_interpreter(f, needs_gradient, monkeypatch):
    """The error is raised before anything is launched."""
    monkeypatch.setattr("kernels.gpu.launch.INTERPRETED", False)
    monkeypatch.setattr("triton.runtime.jit.KernelInterface.__getitem__", None)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        f(Q.clone().requires_grad_(needs_gradient))


def test_without_triton():
    """On macOS and Windows, all but impl='triton' works, also without transformers."""
    code = """if True:
        import sys
        sys.modules |= dict.fromkeys(["triton", "transformers"])
        import torch, kernels
        q = torch.eye(3, requires_grad=True)
        kernels.nt_xent(q, q, 1.0).backward()
        print(kernels.choose_impl("auto", q))
        kernels.nt_xent(q, q, 1.0, impl="triton")
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=os.path.dirname(__file__) + '/../..',
                          capture_output=True, text=True)
    assert done.stdout == "blockwise\n"
    assert "ValueError: impl: 'triton' needs the package triton, which is not installed" in done.stderr
