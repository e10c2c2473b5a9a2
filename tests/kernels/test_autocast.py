"""Every loss for every dtype of rows under every autocast: values, dtypes, and no synchronisation on CUDA.

Autocast on CUDA and on the CPU casts the arguments of different operations. On a machine without a GPU, fake
CUDA tensors follow CUDA's rules. They have shapes, dtypes and devices, but no data: reading a value, which on
a GPU would synchronise, raises an error, and so does combining the devices of two tensors.
"""
import ctypes
import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from test_kernels import mask_arguments, positive_pairs
from torch._subclasses.fake_tensor import FakeTensorMode

import kernels
from kernels import ops
from kernels.masks import make_mask

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
TEMPERATURE = 0.2


def with_targets(q, k, t, impl):
    targets = torch.arange(len(q), device=q.device) * 5 % len(k)
    return kernels.linear_cross_entropy(q, k, targets, ignore_index=0, temperature=t, impl=impl)


SOFTMAX = {                             # functions of (q, k, temperature), and keyword arguments
    "info_nce": kernels.info_nce,
    "clip_loss": kernels.clip_loss,
    "nt_xent": kernels.nt_xent,
    "queue_loss": lambda q, k, t, **options: kernels.queue_loss(q, k, k.detach().flip(0), t, **options),
    "sigmoid_loss": lambda q, k, t, **options: kernels.sigmoid_loss(q, k, t, -4.0, **options),
    "sup_con_loss": lambda q, k, t, **options: kernels.sup_con_loss(
        q.unflatten(0, (-1, 2)), None, t, **options),
    "labels": lambda q, k, t, **options: kernels.sup_con_loss(
        q.unflatten(0, (-1, 2)), torch.arange(len(q) // 2, device=q.device) // 2, t, **options),
    "linear_cross_entropy": with_targets,
    "similarity_lse": lambda q, k, t, **options: kernels.similarity_lse(q, k, t, **options).sum(),
    "frozen_keys": lambda q, k, t, **options: kernels.similarity_lse(q, k.detach(), t, **options).sum(),
    "self": lambda q, k, t, **options: kernels.similarity_lse(q, None, t, exclude="pair", **options).sum(),
    "similarity_topk": lambda q, k, t, **options: kernels.similarity_topk(q, k, 3, **options)[0].sum()}
DISTANCES = {                           # functions of (q, k)
    "hard": kernels.triplet_loss,
    "semi-hard": lambda q, k: kernels.triplet_loss(q, k, mining="semi-hard"),
    "triplet": lambda q, k: kernels.triplet_loss(q, k, k.flip(0)),
    "margin": lambda q, k: kernels.margin_loss(q, k, torch.arange(len(q), device=q.device) % 2)}
DTYPES = [*((dtype, dtype, autocast) for dtype in (F64, F32, F16, BF16) for autocast in (F16, BF16)),
          *((a, b, half) for half in (F16, BF16) for a, b in ((F32, half), (half, F32)))]
all_dtypes = pytest.mark.parametrize("q_dtype, k_dtype, autocast", DTYPES, ids=str)


def dtype_of_products(impl, q_dtype, k_dtype, autocast):
    """Float32 rows are multiplied in autocast's dtype; half rows in their own, except by eager."""
    half = F32 in (q_dtype, k_dtype) or impl == "eager" and q_dtype != F64
    return autocast if half else q_dtype


@pytest.fixture(autouse=True)
def rows_on_the_cpu(monkeypatch):
    """These tests use autocast on the CPU. The rows of test_kernels would be on a GPU if there is one."""
    monkeypatch.setattr("test_kernels.DEVICE", "cpu")


# no float64 in Triton; its interpreter, which is off if there is a GPU, computes wrong products in bfloat16
IMPLS = ["eager", "blockwise", *(["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else [])]
CASES = [(impl, *dtypes) for impl in IMPLS for dtypes in DTYPES
         if impl != "triton" or dtype_of_products(impl, *dtypes) in (F32, F16)]


def check(f, q, k, autocast, reference, tolerance):
    """Compare f under autocast with the reference, a float64 value and its gradients, and check dtypes.

    The backward pass runs outside autocast, as it should, and inside.
    """
    leaves, (expected, *gradients) = [x.clone().requires_grad_() for x in (q, k)], reference
    with torch.autocast("cpu", autocast):
        value = f(*leaves)
    assert value.dtype == (F64 if F64 in (q.dtype, k.dtype) else F32)
    torch.testing.assert_close(value.double(), expected, rtol=tolerance, atol=tolerance)
    for inside in (False, True) if value.requires_grad else ():
        with torch.autocast("cpu", autocast, enabled=inside):
            found = torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True)
        for x, ours, exact in zip(leaves, found, gradients):
            assert (ours is None) == (exact is None)
            if ours is not None:
                assert ours.dtype == x.dtype
                assert (ours - exact).norm() <= 4 * tolerance * exact.norm()


def float64_reference(f, *rows):
    """Return [value, gradients...] of f in float64; the gradient is None if there is none."""
    leaves = [x.double().requires_grad_() for x in rows]
    value = f(*leaves)
    gradients = torch.autograd.grad(value, leaves, allow_unused=True) if value.requires_grad else ()
    return [value.detach(), *gradients]


@pytest.mark.parametrize("impl, q_dtype, k_dtype, autocast", CASES, ids=str)
@pytest.mark.parametrize("loss", SOFTMAX)
def test_softmax_losses(loss, impl, q_dtype, k_dtype, autocast):
    product_dtype = dtype_of_products(impl, q_dtype, k_dtype, autocast)
    pairs = positive_pairs(12, 16, F64)
    q, k = (x.to(dtype) for x, dtype in zip(pairs, (q_dtype, k_dtype)))
    rounded = [x.to(product_dtype) for x in (q, k)]
    reference = float64_reference(lambda q, k: SOFTMAX[loss](q, k, TEMPERATURE, impl="eager"), *rounded)
    tolerance = max(torch.finfo(product_dtype).eps, 1e-12)
    if impl == "eager":                                        # it rounds the products too
        tolerance *= 2 / TEMPERATURE
    check(lambda q, k: SOFTMAX[loss](q, k, TEMPERATURE, impl=impl), q, k, autocast, reference, tolerance)


@all_dtypes
@pytest.mark.parametrize("loss", DISTANCES)
def test_losses_of_distances(loss, q_dtype, k_dtype, autocast):
    """Autocast does not round them."""
    q, k = (x.to(dtype) for x, dtype in zip(positive_pairs(12, 16, F64), (q_dtype, k_dtype)))
    tolerance = max(1e-12, *(torch.finfo(dtype).eps for dtype in (q_dtype, k_dtype)))
    check(DISTANCES[loss], q, k, autocast, float64_reference(DISTANCES[loss], q, k), tolerance)


@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=str)
@pytest.mark.parametrize("autocast", [F16, BF16], ids=str)
def test_embed_in_chunks(dtype, autocast):
    """Autocast does not change embeddings that are products of single numbers."""
    weight, x = torch.nn.Parameter(torch.tensor([2.0, 3.0], dtype=dtype)), torch.ones(5, 2, dtype=dtype)
    for module in (None, torch.nn.ParameterList([weight])):
        with torch.autocast("cpu", autocast):
            z = kernels.embed_in_chunks(lambda chunk: chunk * weight, x.split(2), module)
        assert z.dtype == dtype and torch.equal(z, x * weight)
        weight.grad = None
        z.sum().backward()
        assert torch.equal(weight.grad, torch.full_like(weight, 5))
    with torch.autocast("cpu", autocast):
        assert kernels.gather_rows(x, 5) is x


# ── CUDA's rules, without a GPU ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def device_guard():
    """Let views of fake CUDA tensors work in a build of PyTorch without CUDA.

    C++ code looks up a guard, which would switch to the tensor's GPU, in an array with one entry per type of
    device. A build without CUDA has none for CUDA, so this fixture takes the one of meta tensors, which does
    nothing. In a build with CUDA, FakeTensorMode does the same.
    """
    if torch.backends.cuda.is_built():
        yield
        return
    cuda, meta, count = 1, 14, 21                              # c10::DeviceType
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
        guards = (ctypes.c_void_p * count).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    except (OSError, ValueError):
        pytest.skip("only on Linux or in a build with CUDA")
    guards[cuda] = guards[meta]
    yield
    guards[cuda] = None


@contextmanager
def fake_cuda(autocast):
    """Make tensors fake, with autocast on CUDA; torch.autocast would refuse to turn it on without a GPU."""
    before = torch.get_autocast_dtype("cuda")
    with FakeTensorMode(), torch.no_grad():
        torch.set_autocast_enabled("cuda", autocast is not None)
        torch.set_autocast_dtype("cuda", autocast or before)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_dtype("cuda", before)


class Context:
    """The parts of autograd's ctx that the operations use. Autograd itself needs a CUDA build of PyTorch."""

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors):
        pass

    def set_materialize_grads(self, value):
        pass


def run_with_gradient(op, q, *arguments):
    """Run an operation and its gradient, with their code instead of their fake functions.

    All inputs need a gradient that can have one: not a number, which is a tensor on the CPU, and not keys in
    autocast's dtype for float32 queries, which losses cast if they need a gradient.
    """
    names = [argument.name for argument in op._opoverload._schema.arguments]
    values = dict(zip(names, (q, *arguments)))
    if op.with_gradient is None:
        return op.run(*values.values())
    needs = {name: x is not None and x.is_cuda for name, x in values.items()
             if name in ("q", "k", "temperature", "bias")}
    needs["k"] = needs["k"] and values["k"].dtype == q.dtype and op is not ops.frozen_keys
    values |= {f"needs_{name}": needed for name, needed in needs.items() if f"needs_{name}" in names}
    output, ctx = op.run(*values.values()), Context()
    ctx.needs_input_grad = [needs.get(name, False) for name in names]
    op._setup_context_fn(ctx, tuple(values.values()), output)
    gradients = op._backward_fn(ctx, torch.ones_like(output[0]), *[None] * (len(output) - 1))
    for (name, x), gradient in zip(values.items(), gradients):
        assert needs.get(name, False) == (gradient is not None)
        if gradient is not None:
            assert (gradient.shape, gradient.dtype, gradient.device) == (x.shape, x.dtype, x.device)
    return output


@pytest.fixture(params=[("eager", 8), ("blockwise", 8), ("blockwise", 2400), ("triton", 8)], ids=str)
def impl_and_size(request, monkeypatch, device_guard):
    """Return an implementation for fake tensors and a number of rows; 2400 rows need several strips.

    Triton's kernels cannot run on fake tensors, so its fake functions do. A temperature that is a number is a
    tensor on the CPU, which may be read; as a fake tensor, it has no value, so it is read as 1.
    """
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda x: 1.0 if x.is_cpu else item(x))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("test_kernels.DEVICE", "cuda")
    if request.param[0] == "blockwise":
        monkeypatch.setattr("kernels.heuristics.HAS_TRITON", False)     # triplet_loss has no argument impl
        monkeypatch.setattr("kernels.ops.call_op", run_with_gradient)
    return request.param


def fake_rows(n, *dtypes):
    return [torch.empty(n, 16, dtype=dtype, device="cuda", requires_grad=True) for dtype in dtypes]


ON_CUDA = [(F32, F32, None), (F64, F64, F16), (F32, F32, F16), (F16, F16, BF16), (BF16, BF16, F16),
           (BF16, BF16, BF16), (F32, BF16, BF16), (F16, F32, F16)]


def on_cuda(impl, n):
    """Return the (dtype of q, dtype of k, autocast's dtype or None) that impl supports.

    2400 rows get every second case: with several strips there are many operations, each slow on fake tensors.
    """
    return [case for case in ON_CUDA[::2 if n == 2400 else 1] if impl != "triton" or F64 not in case]


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("loss", SOFTMAX | DISTANCES)
def test_losses_on_cuda(loss, learned, impl_and_size):
    """No loss and no gradient reads a value or combines devices, and the loss has the documented dtype."""
    impl, n = impl_and_size
    options = {"impl": impl, "normalize": learned}
    if loss == "linear_cross_entropy":
        del options["normalize"]
    for *dtypes, autocast in on_cuda(impl, n):
        with fake_cuda(autocast):
            t = torch.full((), TEMPERATURE, device="cuda") if learned else TEMPERATURE
            q, k = fake_rows(n, *dtypes)
            value = SOFTMAX[loss](q, k, t, **options) if loss in SOFTMAX else DISTANCES[loss](q, k)
        assert (value.dtype, value.device.type) == (F64 if F64 in dtypes else F32, "cuda")


def test_learned_bias_and_offset_on_cuda(impl_and_size):
    impl, n = impl_and_size
    for *dtypes, autocast in on_cuda(impl, n):
        with fake_cuda(autocast):
            q, k = fake_rows(n, *dtypes)
            t, bias = (torch.full((), x, device="cuda") for x in (TEMPERATURE, -4.0))
            kernels.sigmoid_loss(q[:-3], k, t, bias, offset=2, impl=impl)
            kernels.info_nce(q[:-3], k, t, offset=2, impl=impl)


@pytest.mark.parametrize("name", ["all", "diagonal", "shifted", "ids", "within", "ids within", "similar",
                                  "diagonal similar within"])
def test_masks_on_cuda(name, impl_and_size):
    impl, n = impl_and_size
    for *dtypes, autocast in on_cuda(impl, n):
        with fake_cuda(autocast):
            q, k = fake_rows(n, *dtypes)
            arguments = mask_arguments(name, n, n)
            kernels.similarity_lse(q, k, TEMPERATURE, impl=impl, **arguments)
            kernels.similarity_lse(q, None, TEMPERATURE, impl=impl, **arguments)
            kernels.similarity_topk(q, k, 3, impl=impl, **arguments)
            if impl == "blockwise":
                mask = make_mask(q, k, False, **arguments)
                product_dtype = autocast if F32 in dtypes else None
                t = torch.full((), TEMPERATURE, dtype=F64 if F64 in dtypes else F32, device="cuda")
                run_with_gradient(ops.frozen_keys, q, k, t, *mask, impl, product_dtype)
