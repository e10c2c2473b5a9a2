"""The custom ops, except their values: tracing, number of launches, errors for bad input."""
import os
import subprocess
import sys

import pytest
import torch
from packaging.version import parse
from test_kernels import DEVICE, GPU, LOSSES, both_impls, differentiate, mask_arguments, unit_rows
from torch import library
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

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
from kernels.masks import Mask, make_mask


@both_impls
@pytest.mark.parametrize("name", ["all", "ids within", "diagonal similar within"])
def test_opcheck(impl, name):
    """opcheck passes for a mask without tensors, and for masks with every kind of tensor."""
    q, k = (unit_rows(n, 5, torch.float32, 23).requires_grad_() for n in (6, 9))
    t = torch.tensor(0.3, device=DEVICE, requires_grad=True)
    selected = make_mask(q, k, False, **mask_arguments(name, 6, 9))
    rest, detached = (*selected, impl, None), (q.detach(), k.detach(), t.detach())
    library.opcheck(torch.ops.tencl.similarity_lse.default, (q, k, t, *rest))
    library.opcheck(torch.ops.tencl.similarity_lse_frozen_keys.default, (q, detached[1], t, *rest))
    library.opcheck(torch.ops.tencl.similarity_topk.default, (*detached, 2, *rest))


@pytest.mark.parametrize("impl, dtype", [
    ("blockwise", torch.float32), ("triton", torch.float32), ("triton", torch.float16)], ids=str)
def test_opcheck_losses(impl, dtype):
    """In Triton, float32 uses the fused forward and backward, float16 separate ones."""
    q, k = (unit_rows(6, 5, dtype, 23).requires_grad_() for _ in range(2))
    t, needs = torch.tensor(0.3, device=DEVICE, requires_grad=True), (True, True, True)
    targets, weights = torch.tensor([0, 2, 2, 1, 5, 0], device=DEVICE), torch.ones(6, device=DEVICE)
    for case in ((k, t, None, False, *Mask("diagonal")), (k, t, None, True, *Mask("diagonal")),
                 (None, t, None, False, *Mask("pair")), (k, t, weights, False, *Mask("target", targets))):
        library.opcheck(torch.ops.tencl.softmax_loss.default, (q, *case, impl, None, *needs))
    library.opcheck(torch.ops.tencl.similarity_lse.default, (q, None, t, *Mask("pair"), impl, None))
    library.opcheck(torch.ops.tencl.queue_loss.default, (q, k, t, k.detach(), *Mask(), impl, None, *needs))
    arguments = q, k, t, t.detach().clone().requires_grad_(), *Mask("diagonal"), impl, None
    for needs in ([True] * 4, [False, True, False, False], [False] * 4):
        leaves = [x if needed else x.detach() for x, needed in zip(arguments, needs)]
        library.opcheck(torch.ops.tencl.sigmoid_loss.default, (*leaves, *arguments[4:], *needs))


@pytest.mark.parametrize("impl, loss", [
    ("eager", "nt_xent"), ("blockwise", "clip_loss"), ("blockwise", "linear"), ("triton", "nt_xent"),
    ("triton", "linear"), ("blockwise", "sup_con_loss"), ("blockwise", "sigmoid_loss"),
    ("triton", "sigmoid_loss")])
def test_compiles_in_one_graph(impl, loss):
    q, k, t = *(unit_rows(37, 8, torch.float32, seed) for seed in (24, 25)), torch.tensor(0.2, device=DEVICE)
    options = {} if loss in ("linear", "nt_xent") else {"normalize": True}

    def f(q, k, t):
        return LOSSES[loss](q, k, t, impl, **options)

    torch.compiler.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for a, b in zip(differentiate(compiled, q, k, t), differentiate(f, q, k, t)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@both_impls
@pytest.mark.parametrize("f", [lambda q, impl: info_nce(q, q.detach(), 0.1, impl=impl),
                               lambda q, impl: similarity_lse(q, None, 0.1, impl=impl).sum(),
                               lambda q, impl: sigmoid_loss(q, q.detach(), 0.1, impl=impl),
                               lambda q, impl: sigmoid_loss(q.detach(), q, 0.1, impl=impl)])
def test_second_derivative_raises(impl, f):
    q = unit_rows(5, 4, torch.float32, 28).requires_grad_()
    gradient, = torch.autograd.grad(f(q, impl), q, create_graph=True)
    with pytest.raises(RuntimeError, match="do not support second derivatives; use impl='eager'"):
        (f(q, impl) + gradient.norm()).backward()
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


class Launches(TorchDispatchMode):
    """Record what a GPU would launch: our kernels, and all PyTorch operations but allocations and views."""
    WITHOUT_LAUNCH = {"empty", "new_empty", "empty_like", "view", "slice", "select", "split",
                      "split_with_sizes", "detach", "t", "alias", "_to_copy"}
    ran = []

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        is_temperature = f is torch.ops.aten.full.default and not out.dim() and out.device.type == "cpu"
        launches = f.namespace == "aten" and f._schema.name.split("::")[1] not in self.WITHOUT_LAUNCH
        if launches and not is_temperature:
            self.ran.append(f._schema.name)
        return out


@pytest.mark.parametrize("n", [64, 1024] if GPU else [64])
@pytest.mark.parametrize("loss", ["info_nce", "clip_loss", "nt_xent"])
def test_small_batches_take_two_launches(loss, n, monkeypatch):
    """Forward and backward take at most two each, because a launch costs more than such a batch.
    The forward of nt_xent takes one more, a cat of its two views."""
    from kernels.gpu.lse_forward import tile_stats_kernel
    kernel_class = type(tile_stats_kernel)        # Triton's class of compiled or of interpreted kernels
    launch, ran = kernel_class.__getitem__, []

    def recorded(kernel, grid):
        def run(*arguments, **named):
            ran.append(kernel.fn.__name__)
            with _disable_current_modes():  # do not record the interpreter's operations
                launch(kernel, grid)(*arguments, **named)
        return run

    # call_op now skips the dispatcher, so Launches sees what the op launches
    monkeypatch.setattr("kernels.custom_op.is_in_torch_dispatch_mode", lambda: False)
    monkeypatch.setattr(Launches, "ran", ran)
    monkeypatch.setattr(kernel_class, "__getitem__", recorded)
    q, k = (unit_rows(n, 128, torch.float16, seed).requires_grad_() for seed in (49, 50))
    with Launches():
        value = LOSSES[loss](q, k, 0.07, "triton")
    joined = ["aten::cat"] if loss == "nt_xent" else []
    assert ran == [*joined, "tile_stats_kernel", "merge_stats_kernel"]
    ran.clear()
    one = torch.ones_like(value)
    with Launches():
        torch.autograd.grad(value, (q, k), one)
    assert ran == ["small_d_kernel"] * (1 if loss == "nt_xent" else 2)


# ── bad input ───────────────────────────────────────────────────────────────────────────────────────────────

Q, K = torch.randn(4, 3), torch.randn(5, 3)
FOUR, FIVE = torch.arange(4), torch.arange(5)
lse = similarity_lse


@pytest.mark.parametrize("call, message", [
    (lambda: lse(torch.randn(4)), r"q: found \(4,\), expected a tensor of two dimensions"),
    (lambda: lse(Q, torch.randn(5, 3, 1)), r"k: found \(5, 3, 1\), expected"),
    (lambda: lse(Q, torch.randn(5, 4)), "k: 4 features per row, expected 3 like q"),
    (lambda: lse(Q, K.double()), "k: dtype torch.float64, expected torch.float32 like q"),
    (lambda: lse(Q, K.to("meta")), "k: device meta, expected cpu like q"),
    (lambda: lse(Q, K[:0]), r"k: found shape \(0, 3\), expected at least one row"),
    (lambda: lse(Q, K[:, :0]), r"k: found shape \(5, 0\), expected at least one row and one feature"),
    (lambda: lse(Q, K, exclude="pair"), r'exclude: "pair" needs k=None .* found a k'),
    (lambda: lse(torch.randn(3, 2), exclude="pair"), "found 3 rows"),
    (lambda: lse(Q, K, exclude=(FOUR, FOUR)), r"exclude: column ids: found \(4,\), expected \(5,\)"),
    (lambda: lse(Q, K, similar=(K, K, 0.5)), r"similar: row features: found \(5, 3\), expected \(4, E\)"),
    (lambda: lse(Q, K, similar=(Q, K[:, :2], 0.5)), r"column features: found \(5, 2\), expected \(5, 3\)"),
    (lambda: lse(Q.double(), K.double(), impl="triton"), "impl: 'triton' does not support float64"),
    (lambda: similarity_topk(Q, K, 6), "n: 6, expected an integer from 1 to the 5 rows of k"),
    (lambda: info_nce(K, Q), r"k: 4 rows, expected at least 5 \+ offset 0"),
    (lambda: info_nce(Q, K, offset=-1), "offset: -1, expected this rank's first row among the 5 of k"),
    (lambda: info_nce(Q, K, symmetric=True), "k: 5 rows, expected 4 like q, because both are anchors"),
    (lambda: sigmoid_loss(K, Q), r"k: 4 rows, expected at least 5 \+ offset 0"),
    (lambda: sigmoid_loss(Q, K, offset=2), r"k: 5 rows, expected at least 4 \+ offset 2"),
    (lambda: nt_xent(Q, K), "z2: 5 rows, expected 4 like z1"),
    (lambda: linear_cross_entropy(Q, K, FIVE), r"targets: .* of shape \(5,\), expected int64 \(4,\)"),
])
def test_bad_input_names_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@both_impls
def test_negated_views(impl):
    """x.conj().imag is x.imag's memory with a flag for the sign, which a Triton kernel would not see."""
    x, k = torch.randn(6, 16, dtype=torch.complex64, device=DEVICE), unit_rows(6, 16, torch.float32, 3)
    for f in (lambda q, k: info_nce(q, k, 0.5, impl=impl), lambda q, k: info_nce(k, q, 0.5, impl=impl),
              lambda q, k: nt_xent(q, q, 0.5, impl=impl), lambda q, k: sigmoid_loss(q, k, impl=impl),
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
    lambda q: similarity_lse(q, impl="triton"), lambda q: similarity_lse(q, K, impl="triton"),
    lambda q: info_nce(q, K, impl="triton"), lambda q: nt_xent(q, q, impl="triton"),
    lambda q: linear_cross_entropy(q, K, FOUR, impl="triton"), lambda q: queue_loss(q, q, K, impl="triton"),
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


def test_package_has_a_version():
    """transformers reads kernels.__version__, because it takes our folder for the package of that name."""
    assert parse(kernels.__version__)
