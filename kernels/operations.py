"""The fused operations as PyTorch knows them: opaque to torch.compile, with fake tensors, autograd and autocast off inside.

One operation forward, one backward, whatever the implementation; the rule travels as its fields. Each backward is an
operation of its own so that asking for a second derivative is an error and not silently zero.
"""
from typing import Optional, Tuple

import torch
from torch import Tensor, library

from . import blockwise
from .rules import Rule


@library.custom_op("tencl::similarity_lse", mutates_args=())
def _lse(q: Tensor, k: Tensor, temperature: Tensor, exclude: str, row_ids: Optional[Tensor], column_ids: Optional[Tensor],
         row_groups: Optional[Tensor], column_groups: Optional[Tensor], row_features: Optional[Tensor], column_features: Optional[Tensor], offset: int, phi: float, impl: str) -> Tensor:
    rule = Rule(exclude, row_ids, column_ids, row_groups, column_groups, row_features, column_features, offset, phi)
    with torch.autocast(q.device.type, enabled=False), torch.cuda.device_of(q):
        if impl == "blockwise":
            return blockwise.similarity_lse(q, k, temperature, rule)
        from . import lse_forward
        return lse_forward.similarity_lse(q, k, temperature, rule)


@_lse.register_fake
def _(q, k, temperature, *rule_and_impl):
    return temperature.new_empty(q.shape[0])


@library.custom_op("tencl::similarity_lse_backward", mutates_args=())
def _lse_backward(grad: Tensor, lse: Tensor, q: Tensor, k: Tensor, temperature: Tensor, exclude: str,
                  row_ids: Optional[Tensor], column_ids: Optional[Tensor], row_groups: Optional[Tensor],
                  column_groups: Optional[Tensor], row_features: Optional[Tensor], column_features: Optional[Tensor], offset: int, phi: float, impl: str, needs_q: bool, needs_k: bool,
                  needs_temperature: bool) -> Tuple[Tensor, Tensor, Tensor]:
    rule = Rule(exclude, row_ids, column_ids, row_groups, column_groups, row_features, column_features, offset, phi)
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
    q, k, temperature, ctx.exclude, *rule, ctx.offset, ctx.phi, ctx.impl = inputs
    ctx.save_for_backward(q, k, temperature, output, *rule)


def _differentiate(ctx, grad):
    q, k, temperature, lse, *rule = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    grads = torch.ops.tencl.similarity_lse_backward(
        grad, lse, q, k, temperature, ctx.exclude, *rule, ctx.offset, ctx.phi, ctx.impl, needs[0], needs[1], needs[2])
    return *(g if needed else None for g, needed in zip(grads, needs)), *[None] * 10


def _no_second_derivative(ctx, *grads):
    raise RuntimeError("kernels: the fused operations have no second derivative; use impl='eager', which has all of them")


_lse.register_autograd(_differentiate, setup_context=_save)
_lse_backward.register_autograd(_no_second_derivative)


@library.custom_op("tencl::similarity_lse_fixed_keys", mutates_args=())
def _lse_fixed_keys(q: Tensor, k: Tensor, temperature: Tensor, exclude: str, row_ids: Optional[Tensor],
                    column_ids: Optional[Tensor], row_groups: Optional[Tensor], column_groups: Optional[Tensor], row_features: Optional[Tensor], column_features: Optional[Tensor], offset: int, phi: float,
                    impl: str) -> Tuple[Tensor, Tensor]:
    """(lse (N,), o (N, D)) with o_i = Σ_j p_ij k_j, from which the gradient of q follows without the keys."""
    rule = Rule(exclude, row_ids, column_ids, row_groups, column_groups, row_features, column_features, offset, phi)
    with torch.autocast(q.device.type, enabled=False), torch.cuda.device_of(q):
        if impl == "blockwise":
            return blockwise.similarity_lse_fixed_keys(q, k, temperature, rule)
        from . import lse_fixed_keys
        return lse_fixed_keys.similarity_lse(q, k, temperature, rule)


@_lse_fixed_keys.register_fake
def _(q, k, temperature, *rule_and_impl):
    return temperature.new_empty(q.shape[0]), temperature.new_empty(q.shape)


@library.custom_op("tencl::similarity_lse_fixed_keys_backward", mutates_args=())
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
    return dq if ctx.needs_input_grad[0] else None, None, dt if ctx.needs_input_grad[2] else None, *[None] * 10


_lse_fixed_keys.register_autograd(_differentiate_fixed_keys, setup_context=_save_o)
_lse_fixed_keys_backward.register_autograd(_no_second_derivative)


@library.custom_op("tencl::softmax_loss", mutates_args=())
def _softmax_loss(q: Tensor, k: Tensor, targets: Tensor, weights: Tensor, temperature: Tensor, exclude: str,
                  row_ids: Optional[Tensor], column_ids: Optional[Tensor], row_groups: Optional[Tensor],
                  column_groups: Optional[Tensor], row_features: Optional[Tensor], column_features: Optional[Tensor], offset: int, phi: float, needs_q: bool, needs_k: bool
                  ) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Blockwise only: the loss and, while each strip is at hand, its gradients in q, k and temperature."""
    rule = Rule(exclude, row_ids, column_ids, row_groups, column_groups, row_features, column_features, offset, phi)
    with torch.autocast(q.device.type, enabled=False):
        loss, dq, dk = blockwise.softmax_loss(q, k, targets, weights, temperature, rule, needs_q, needs_k)
        dt = temperature_gradient(q, dq, temperature) if needs_q else temperature.new_zeros(())
        return loss, dq, dk, dt                         # float32 even for half rows, until the loss's own gradient is known


@_softmax_loss.register_fake
def _(q, k, targets, weights, temperature, *rest):
    shapes = (x.shape if needed else (0, x.shape[1]) for x, needed in zip((q, k), rest[-2:]))
    return tuple(temperature.new_empty(shape) for shape in ((), *shapes, ()))


@library.custom_op("tencl::softmax_loss_backward", mutates_args=())
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
    return dq if needs[0] else None, dk if needs[1] else None, None, None, dt if needs[4] else None, *[None] * 11


_softmax_loss.register_autograd(_scale_gradients, setup_context=_save_gradients)
_softmax_loss_backward.register_autograd(_no_second_derivative)


@library.custom_op("tencl::similarity_topk", mutates_args=())
def _topk(q: Tensor, k: Tensor, temperature: Tensor, n: int, exclude: str, row_ids: Optional[Tensor],
          column_ids: Optional[Tensor], row_groups: Optional[Tensor], column_groups: Optional[Tensor], row_features: Optional[Tensor], column_features: Optional[Tensor], offset: int, phi: float,
          impl: str) -> Tuple[Tensor, Tensor]:
    rule = Rule(exclude, row_ids, column_ids, row_groups, column_groups, row_features, column_features, offset, phi)
    with torch.autocast(q.device.type, enabled=False), torch.cuda.device_of(q):
        if impl == "blockwise":
            return blockwise.similarity_topk(q, k, temperature, n, rule)
        from . import topk
        return topk.similarity_topk(q, k, temperature, n, rule)


@_topk.register_fake
def _(q, k, temperature, n, *rest):
    return temperature.new_empty(q.shape[0], n), q.new_empty(q.shape[0], n, dtype=torch.int64)
