"""similarity_lse: checks, choice of implementation, autograd and registration with PyTorch.

Every softmax loss over similarities is a log-sum-exp against one positive, and only the log-sum-exp is quadratic. The
operations below hide the implementations from autograd and torch.compile, so that each may use whatever path is best.
"""
import importlib.util
import math
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import blockwise, eager
from .rules import Rule, make_rule

IMPLS = ("auto", "triton", "blockwise", "eager")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
FIXED_KEYS_WIDEST = {torch.float32: 64, torch.float16: 256, torch.bfloat16: 256}    # D that lse_fixed_keys keeps in registers
TOPK_SLOTS = 64                                                  # columns a row that topk keeps in registers
HAS_TRITON = importlib.util.find_spec("triton") is not None


def similarity_lse(q, k=None, temperature=1.0, *, exclude=None, within=None, offset=0, impl="auto"):
    """log Σ_j exp(q_i·k_j / τ) for each row i; the (N, M) matrix is never stored.

    q            (N, D) float64 | float32 | float16 | bfloat16, any strides (float64: blockwise and eager)
    k            (M, D) same dtype and device as q; None: the rows of q against each other
    temperature  float > 0, or a 0-dim tensor, which then gets its gradient (its value is not checked)
    exclude      what each row leaves out: None | "diagonal" (j = i + offset) | "pair" (j = i and j = i ± N/2; k is None)
                 | (row ids (N,), column ids (M,)) integers: columns of equal id
    within       (row ids, column ids) integers: only columns of equal id are kept
    offset       this rank's first row among the gathered columns
    impl         "auto" (Triton on CUDA, blockwise elsewhere) | "triton" | "blockwise" | "eager"
    returns      (N,) float32 (float64 for float64), differentiable in q, k, temperature; no column left: -inf, gradient 0
    raises       ValueError naming the argument, what it was and what is wanted
    precision    products of half types are exact, float32 obeys torch.get_float32_matmul_precision(); sums in float32.
                 Under torch.autocast float32 rows are cast as a matrix product would cast them
    memory       O(N + M) beside the inputs and gradients, and a constant buffer (at most 128 MiB); eager O(N·M)
    source       van den Oord et al. 2018, eq. 4
    """
    q, k, temperature, one_set = check_inputs(q, k, temperature)
    rule = make_rule(q, k, one_set, exclude, within, offset)
    impl = choose_impl(impl, q)
    if impl == "eager":
        return eager.similarity_lse(q, k, temperature, rule)
    return fused_lse(q, k, temperature, rule, impl)


def fused_lse(q, k, temperature, rule, impl):
    """similarity_lse of checked arguments: keys that need no gradient (a queue, a frozen tower) have a cheaper way."""
    needed = torch.is_grad_enabled() and (q.requires_grad or temperature.requires_grad) and not k.requires_grad
    if needed and (impl == "blockwise" or q.shape[1] <= FIXED_KEYS_WIDEST[q.dtype]):
        return torch.ops.tencl.similarity_lse_fixed_keys(q, k, temperature, *rule, impl)[0]
    return torch.ops.tencl.similarity_lse(q, k, temperature, *rule, impl)


@torch.no_grad()
def similarity_topk(q, k, n, *, exclude=None, within=None, offset=0, impl="auto"):
    """The n columns of largest q_i·k_j for each row i, largest first; the (N, M) matrix is never stored.

    q, k                     as in similarity_lse; k None: the rows of q against each other (a row is its own neighbour
                             unless exclude="diagonal")
    n                        1 ≤ n ≤ M; beyond 64 the Triton kernel has no slots left and blockwise takes over
    exclude, within, offset  as in similarity_lse
    returns                  (products (N, n) float32, or float64 for float64; columns (N, n) int64), without gradient;
                             a row with fewer than n columns ends in (-inf, -1); equal products in any order
    raises                   ValueError naming the argument, what it was and what is wanted
    memory                   O(N·n + M) beside the inputs, and a constant buffer; eager O(N·M)
    """
    q, k, one, one_set = check_inputs(q, k, 1.0)
    rule = make_rule(q, k, one_set, exclude, within, offset)
    if not isinstance(n, int) or not 1 <= n <= len(k):
        raise ValueError(f"n: {n}, wanted an integer from 1 to the {len(k)} rows of k")
    impl = choose_impl(impl, q)
    if impl == "eager":
        return eager.similarity_topk(q, k, one, n, rule)
    if n > TOPK_SLOTS:
        impl = "blockwise"
    return torch.ops.tencl.similarity_topk(q, k, one, n, *rule, impl)


def softmax_loss(q, k, targets, weights, temperature, rule, impl):
    """Σ_i w_i softplus(lse_i − q_i·k_target/τ), scalar: a cross entropy whose positives the rule leaves out of lse.

    Arguments are checked ones; targets (N,) rows of k, weights (N,). Taking the positive out of the sum costs nothing and
    keeps the gradient exact where training has succeeded: its coefficient is σ(lse − positive), never 1 − 0.999.
    """
    if impl == "blockwise":
        needs_q, needs_k = (torch.is_grad_enabled() and (x.requires_grad or temperature.requires_grad and x is q) for x in (q, k))
        return torch.ops.tencl.softmax_loss(q, k, targets, weights, temperature, *rule, needs_q, needs_k)[0]
    lse = fused_lse(q, k, temperature, rule, impl)
    # in float32, product and sum, also under autocast
    positive = (q.to(temperature.dtype) * k[targets].to(temperature.dtype)).sum(1) / temperature
    return -(weights * F.logsigmoid(positive - lse)).sum()


def check_inputs(q, k, temperature, names=("q", "k")):
    """(q, k, temperature tensor, k was None), cast as autocast would; ValueError where they do not fit together."""
    one_set, k = k is None, q if k is None else k
    for name, x in zip(names, (q, k)):
        if not isinstance(x, Tensor) or x.dim() != 2:
            found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name}: found {found}, wanted a tensor of two dimensions (rows, features)")
        if x.dtype not in DTYPES:
            raise ValueError(f"{name}: found {x.dtype}, wanted float64, float32, float16 or bfloat16")
        if min(x.shape) == 0:
            raise ValueError(f"{name}: found shape {tuple(x.shape)}, wanted at least one row and one feature")
    for what in ("device", "dtype"):
        if getattr(q, what) != getattr(k, what):
            raise ValueError(f"{names[1]}: {what} {getattr(k, what)} differs from {names[0]}'s, {getattr(q, what)}")
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"{names[1]}: {k.shape[1]} features a row, {names[0]} has {q.shape[1]}")
    device = q.device.type
    if q.dtype == torch.float32 and torch.is_autocast_enabled(device):
        q, k = (x.to(torch.get_autocast_dtype(device)) for x in (q, k))
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q, k, check_temperature(temperature, accumulate, q.device), one_set


def check_temperature(temperature, dtype, device):
    """A 0-dim tensor on the device: a kernel reads it there, so a learned one costs no synchronisation."""
    if isinstance(temperature, Tensor):
        if temperature.dim() or not temperature.dtype.is_floating_point:
            raise ValueError(f"temperature: found {temperature.dtype} of shape {tuple(temperature.shape)}, "
                             "wanted a number or a floating-point tensor of no dimensions")
        if temperature.device != device:
            raise ValueError(f"temperature: on {temperature.device}, wanted {device}")
        return temperature.to(dtype)
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise ValueError(f"temperature: found {type(temperature).__name__}, wanted a number or a 0-dim tensor")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature: {temperature}, wanted a number above 0")
    return torch.full((), temperature, dtype=dtype, device=device)


def choose_impl(impl, x):
    """The implementation that impl means for the tensor x (see similarity_lse)."""
    if impl not in IMPLS:
        raise ValueError(f"impl: {impl!r}, wanted one of {', '.join(IMPLS)}")
    if impl == "auto":
        return "triton" if x.is_cuda and HAS_TRITON and x.dtype != torch.float64 else "blockwise"
    if impl == "triton":
        if not HAS_TRITON:
            raise ValueError("impl: 'triton' wants the package triton, which is not installed; use 'blockwise'")
        if x.dtype == torch.float64:
            raise ValueError("impl: 'triton' has no float64; use 'blockwise' or 'eager'")
    return impl


# ── registration with PyTorch ────────────────────────────────────────────────────────────────────────────────────────
# One operation forward, one backward, each opaque to torch.compile; the rule travels as its six fields.

@torch.library.custom_op("tencl::similarity_lse", mutates_args=())
def _lse(q: Tensor, k: Tensor, temperature: Tensor, exclude: str, row_ids: Optional[Tensor], column_ids: Optional[Tensor],
         row_groups: Optional[Tensor], column_groups: Optional[Tensor], offset: int, impl: str) -> Tensor:
    rule = Rule(exclude, row_ids, column_ids, row_groups, column_groups, offset)
    with torch.autocast(q.device.type, enabled=False), torch.cuda.device_of(q):
        if impl == "blockwise":
            return blockwise.similarity_lse(q, k, temperature, rule)
        from . import lse_forward
        return lse_forward.similarity_lse(q, k, temperature, rule)


@_lse.register_fake
def _(q, k, temperature, *rule_and_impl):
    return temperature.new_empty(q.shape[0])


@torch.library.custom_op("tencl::similarity_lse_backward", mutates_args=())
def _lse_backward(grad: Tensor, lse: Tensor, q: Tensor, k: Tensor, temperature: Tensor, exclude: str,
                  row_ids: Optional[Tensor], column_ids: Optional[Tensor], row_groups: Optional[Tensor],
                  column_groups: Optional[Tensor], offset: int, impl: str, needs_q: bool, needs_k: bool,
                  needs_temperature: bool) -> Tuple[Tensor, Tensor, Tensor]:
    rule = Rule(exclude, row_ids, column_ids, row_groups, column_groups, offset)
    with torch.autocast(q.device.type, enabled=False), torch.cuda.device_of(q):
        if impl == "blockwise":
            path = blockwise
        else:
            from . import lse_gradient as path
        dq, dk = path.similarity_lse_backward(grad, lse, q, k, temperature, rule, needs_q or needs_temperature, needs_k)
        dt = temperature_gradient(q, dq, temperature) if needs_temperature else temperature.new_zeros(())
        return dq.to(q.dtype), dk.to(k.dtype), dt


@_lse_backward.register_fake
def _(grad, lse, q, k, temperature, *rest):
    needs_q, needs_k, needs_temperature = rest[-3:]
    return (q.new_empty(q.shape if needs_q or needs_temperature else (0, q.shape[1])),
            k.new_empty(k.shape if needs_k else (0, k.shape[1])), temperature.new_empty(()))


def temperature_gradient(q, dq, temperature):
    """dL/dτ = −(1/τ) Σ_ij g_i p_ij q_i·k_j/τ = −⟨q, dq⟩/τ: a product of (N, D) tensors that are there anyway."""
    return -torch.linalg.vecdot(q.to(dq.dtype), dq).sum() / temperature


def _save(ctx, inputs, output):
    q, k, temperature, ctx.exclude, *ids, ctx.offset, ctx.impl = inputs
    ctx.save_for_backward(q, k, temperature, output, *ids)


def _differentiate(ctx, grad):
    q, k, temperature, lse, *ids = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    grads = torch.ops.tencl.similarity_lse_backward(
        grad, lse, q, k, temperature, ctx.exclude, *ids, ctx.offset, ctx.impl, needs[0], needs[1], needs[2])
    return *(g if needed else None for g, needed in zip(grads, needs)), *[None] * 7


def _no_second_derivative(ctx, *grads):
    raise RuntimeError("kernels: the fused operations have no second derivative; use impl='eager', which has all of them")


_lse.register_autograd(_differentiate, setup_context=_save)
_lse_backward.register_autograd(_no_second_derivative)


@torch.library.custom_op("tencl::similarity_lse_fixed_keys", mutates_args=())
def _lse_fixed_keys(q: Tensor, k: Tensor, temperature: Tensor, exclude: str, row_ids: Optional[Tensor],
                    column_ids: Optional[Tensor], row_groups: Optional[Tensor], column_groups: Optional[Tensor], offset: int,
                    impl: str) -> Tuple[Tensor, Tensor]:
    """(lse (N,), o (N, D)) with o_i = Σ_j p_ij k_j, from which the gradient of q follows without the keys."""
    rule = Rule(exclude, row_ids, column_ids, row_groups, column_groups, offset)
    with torch.autocast(q.device.type, enabled=False), torch.cuda.device_of(q):
        if impl == "blockwise":
            return blockwise.similarity_lse_fixed_keys(q, k, temperature, rule)
        from . import lse_fixed_keys
        return lse_fixed_keys.similarity_lse(q, k, temperature, rule)


@_lse_fixed_keys.register_fake
def _(q, k, temperature, *rule_and_impl):
    return temperature.new_empty(q.shape[0]), temperature.new_empty(q.shape)


@torch.library.custom_op("tencl::similarity_lse_fixed_keys_backward", mutates_args=())
def _lse_fixed_keys_backward(grad: Tensor, q: Tensor, temperature: Tensor, o: Tensor) -> Tuple[Tensor, Tensor]:
    dq = o * (grad / temperature)[:, None]
    return dq.to(q.dtype), temperature_gradient(q, dq, temperature)


@_lse_fixed_keys_backward.register_fake
def _(grad, q, temperature, o):
    return torch.empty_like(q), torch.empty_like(temperature)


def _save_o(ctx, inputs, output):
    q, _, temperature, *_ = inputs
    ctx.save_for_backward(q, temperature, output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate_fixed_keys(ctx, grad, _):
    dq, dt = torch.ops.tencl.similarity_lse_fixed_keys_backward(grad, *ctx.saved_tensors)
    return dq if ctx.needs_input_grad[0] else None, None, dt if ctx.needs_input_grad[2] else None, *[None] * 7


_lse_fixed_keys.register_autograd(_differentiate_fixed_keys, setup_context=_save_o)
_lse_fixed_keys_backward.register_autograd(_no_second_derivative)


@torch.library.custom_op("tencl::softmax_loss", mutates_args=())
def _softmax_loss(q: Tensor, k: Tensor, targets: Tensor, weights: Tensor, temperature: Tensor, exclude: str,
                  row_ids: Optional[Tensor], column_ids: Optional[Tensor], row_groups: Optional[Tensor],
                  column_groups: Optional[Tensor], offset: int, needs_q: bool, needs_k: bool
                  ) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Blockwise only: the loss and, while each strip is at hand, its gradients in q, k and temperature."""
    rule = Rule(exclude, row_ids, column_ids, row_groups, column_groups, offset)
    with torch.autocast(q.device.type, enabled=False):
        loss, dq, dk = blockwise.softmax_loss(q, k, targets, weights, temperature, rule, needs_q, needs_k)
        dt = temperature_gradient(q, dq, temperature) if needs_q else temperature.new_zeros(())
        return loss, dq, dk, dt                         # float32 even for half rows, until the loss's own gradient is known


@_softmax_loss.register_fake
def _(q, k, targets, weights, temperature, *rest):
    shapes = (x.shape if needed else (0, x.shape[1]) for x, needed in zip((q, k), rest[-2:]))
    return tuple(temperature.new_empty(shape) for shape in ((), *shapes, ()))


@torch.library.custom_op("tencl::softmax_loss_backward", mutates_args=())
def _softmax_loss_backward(grad: Tensor, q: Tensor, k: Tensor, temperature: Tensor, dq: Tensor, dk: Tensor, dt: Tensor
                           ) -> Tuple[Tensor, Tensor, Tensor]:
    """The gradients (empty ones stay so) times the scalar that reached the loss; the inputs tell autograd what they hang on."""
    return (grad * dq).to(q.dtype), (grad * dk).to(k.dtype), grad * dt


@_softmax_loss_backward.register_fake
def _(grad, q, k, temperature, dq, dk, dt):
    return q.new_empty(dq.shape), k.new_empty(dk.shape), torch.empty_like(dt)


def _save_gradients(ctx, inputs, output):
    q, k, _, _, temperature, *_ = inputs
    ctx.save_for_backward(q, k, temperature, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _scale_gradients(ctx, grad, *_):
    dq, dk, dt = torch.ops.tencl.softmax_loss_backward(grad, *ctx.saved_tensors)
    needs = ctx.needs_input_grad
    return dq if needs[0] else None, dk if needs[1] else None, None, None, dt if needs[4] else None, *[None] * 8


_softmax_loss.register_autograd(_scale_gradients, setup_context=_save_gradients)
_softmax_loss_backward.register_autograd(_no_second_derivative)


@torch.library.custom_op("tencl::similarity_topk", mutates_args=())
def _topk(q: Tensor, k: Tensor, temperature: Tensor, n: int, exclude: str, row_ids: Optional[Tensor],
          column_ids: Optional[Tensor], row_groups: Optional[Tensor], column_groups: Optional[Tensor], offset: int,
          impl: str) -> Tuple[Tensor, Tensor]:
    rule = Rule(exclude, row_ids, column_ids, row_groups, column_groups, offset)
    with torch.autocast(q.device.type, enabled=False), torch.cuda.device_of(q):
        if impl == "blockwise":
            return blockwise.similarity_topk(q, k, temperature, n, rule)
        from . import topk
        return topk.similarity_topk(q, k, temperature, n, rule)


@_topk.register_fake
def _(q, k, temperature, n, *rest):
    return temperature.new_empty(q.shape[0], n), q.new_empty(q.shape[0], n, dtype=torch.int64)
