"""The fused operations as torch.autograd.Functions, which call blockwise.py or gpu/.

`call` holds the checked arguments (call.py). There are two kinds of Function:

    GradientInForward           computes the gradients together with the loss; backward only multiplies the
                                gradients by the upstream gradient
    LogSumExp, SoftmaxLoss      store two numbers per row, more precise than the log-sum-exp alone: LogSumExp
                                the maximum and the sum of exponentials, SoftmaxLoss the maximum and g / sum,
                                besides g = dloss/dlse. Backward computes each logit again

Second derivatives (create_graph=True), forward mode and torch.func are not supported and raise RuntimeError.
"""
import functools

import torch

from . import blockwise
from .checks import refuse_second_derivative
from .heuristics import fuses_backward, has_queue_kernel
from .masks import Mask


def outside_autocast(function):
    """Decorate forward(ctx, x, ...) or backward(ctx, x, ...) to run on x's device, with autocast off."""
    @functools.wraps(function)
    def run(ctx, x, *rest):
        with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
            return function(ctx, x, *rest)
    return run


def first_order(backward):
    """Decorate backward(ctx, grad, ...) as outside_autocast does; a second derivative raises RuntimeError."""
    @functools.wraps(backward)
    def run(ctx, grad, *rest):
        refuse_second_derivative("kernels")
        return backward(ctx, grad.resolve_neg(), *rest)        # kernels read memory, which is not negated
    return outside_autocast(run)


def save(ctx, call, *others):
    """Save the call and other tensors for backward; changing one of them in place then raises an error."""
    mask = call.mask
    ctx.vectors = [name for name in Mask._fields if isinstance(getattr(mask, name), torch.Tensor)]
    vectors = [getattr(mask, name) for name in ctx.vectors]
    ctx.save_for_backward(call.q, call.k, call.temperature, *vectors, *others)
    mask = mask._replace(**dict.fromkeys(ctx.vectors))
    ctx.call = call._replace(q=None, k=None, temperature=None, mask=mask)


def restore(ctx):
    """Return (the call, the other tensors) that save() has saved."""
    q, k, temperature, *tensors = ctx.saved_tensors
    count = len(ctx.vectors)
    mask = ctx.call.mask._replace(**dict(zip(ctx.vectors, tensors[:count])))
    return ctx.call._replace(q=q, k=k, temperature=temperature, mask=mask), tensors[count:]


def only_needed(ctx, gradients, inputs):
    """Return the gradients that autograd needs, each in its input's dtype, and None for the others."""
    needed = zip(ctx.needs_input_grad, gradients, inputs)
    return [gradient.to(x.dtype) if is_needed else None for is_needed, gradient, x in needed]


# ── the log-sum-exp of each row ────────────────────────────────────────────────────────────────────────────


def similarity_lse(call):
    """Return the log-sum-exp of each row (N,)."""
    return LogSumExp.apply(call.q, call.k, call.temperature, call)


class LogSumExp(torch.autograd.Function):
    """The log-sum-exp of each row; backward computes the logits again."""

    @staticmethod
    @outside_autocast
    def forward(ctx, q, k, temperature, call):
        if call.impl == "blockwise":
            lse, stats = blockwise.similarity_lse(*call.operands, temperature, call.mask)
            save(ctx, call, stats)
            return lse
        from .gpu import lse_forward
        found = lse_forward.forward(*call.operands, temperature, call.mask)
        save(ctx, call, found.stats, found.common_m)
        return found.lse

    @staticmethod
    @first_order
    def backward(ctx, grad):
        call, (stats, *common_m) = restore(ctx)
        needs = ctx.needs_input_grad[:3]
        operands = *call.operands, call.temperature, call.mask
        if call.impl == "blockwise":
            gradients = blockwise.similarity_lse_backward(*operands, grad, stats, *needs)
        else:
            from .gpu import gradient, shift
            largest = largest_finite(grad)      # divide by it: the kernels expect |dloss/dlse| ≤ 1
            rows = shift.make_side(stats, (grad / largest).contiguous())
            columns = rows if call.k is None else None
            gradients = gradient.gradients(*operands, rows, columns, *common_m, largest, 1.0, *needs,
                                           call.q.dtype)
        return *only_needed(ctx, gradients, call[:3]), None


def largest_finite(grad):
    """Return the largest finite |grad|, but never 0: NaN and ∞ must not change the scale of other rows."""
    finite = grad.nan_to_num(0, 0, 0)
    return torch.linalg.vector_norm(finite, torch.inf).clamp(min=torch.finfo(torch.float32).tiny)


# ── losses ─────────────────────────────────────────────────────────────────────────────────────────────────


class GradientInForward(torch.autograd.Function):
    """A loss whose gradients are computed along with it.

    q, k, temperature, bias  inputs, passed only to register them with autograd; compute has these tensors
    compute                  function that returns (loss, gradients of q, k, temperature and, if given, bias).
                             Read call.needs outside compute, which runs in forward, where grad mode is off
    """

    @staticmethod
    @outside_autocast
    def forward(ctx, q, k, temperature, bias, impl, compute):
        loss, *gradients = compute()
        ctx.scale, ctx.dtypes = scaled_copies, [x.dtype for x in (q, k) if x is not None]
        if impl == "triton":
            from .gpu.launch import scaled_copies as scale
            ctx.scale = scale
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @first_order
    def backward(ctx, grad):
        needs = ctx.needs_input_grad
        dq, dk, dt, *db = ctx.saved_tensors                        # only sigmoid_loss has db
        rows = [(x, dtype) for x, dtype, needed in zip((dq, dk), ctx.dtypes, needs) if needed]
        copies = iter(ctx.scale(rows, grad))
        dq, dk = (next(copies) if needed else None for needed in needs[:2])
        return dq, dk, dt * grad if needs[2] else None, db[0] * grad if needs[3] else None, None, None


def scaled_copies(rows, factor):
    """Return factor · x in dtype for each (x, dtype), without an intermediate copy in the dtype of x."""
    return [x * factor if x.dtype == dtype else torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))
            for x, dtype in rows]


def softmax_loss(call, both=False, weights=None):
    """Return the cross entropy Σ_i w_i softplus(lse_i − q_i·k_p/τ), where p is the positive of row i.

    The mask excludes p from lse_i. So the gradient of row i has the factor σ(lse_i − q_i·k_p/τ). For a small
    loss this is more accurate than the usual factor 1 − softmax, which loses digits (such as 1 − 0.999).

    both     True: the mean of the row-softmax loss (one softmax per row i, dim=1) and the column-softmax loss
             (one per column j, dim=0), as in CLIP
    weights  w (N,), weights of the rows in [0, 1]; None: all are 1/N
    """
    inputs, needs = call[:3], call.needs
    if call.impl == "triton" and not fuses_backward(call, both, needs):
        return SoftmaxLoss.apply(*inputs, call, both, weights)

    def compute():
        operands = *call.operands, call.temperature, call.mask, weights
        if call.impl == "blockwise":
            return blockwise.softmax_loss(*operands, both, *needs)
        from .gpu import fused_forward_backward
        return fused_forward_backward.softmax_loss(*operands, *needs, call.q.dtype)
    return GradientInForward.apply(*inputs, None, call.impl, compute)


class SoftmaxLoss(torch.autograd.Function):
    """softmax_loss in Triton; backward computes the logits again."""

    @staticmethod
    @outside_autocast
    def forward(ctx, q, k, temperature, call, both, weights):
        from .gpu import lse_forward
        found = lse_forward.forward(*call.operands, temperature, call.mask, both, True, weights)
        save(ctx, call, found.sides, found.common_m)
        ctx.unit = 1 / len(q) if weights is None else 1.0
        return found.loss

    @staticmethod
    @first_order
    def backward(ctx, grad):
        from .gpu import gradient
        call, (sides, common_m) = restore(ctx)
        rows = columns = sides[0]
        if call.k is not None:
            columns = sides[1] if len(sides) == 2 else None
        needs = ctx.needs_input_grad[:3]
        gradients = gradient.gradients(*call.operands, call.temperature, call.mask, rows, columns, common_m,
                                       grad, ctx.unit / len(sides), *needs, call.q.dtype, True)
        return *only_needed(ctx, gradients, call[:3]), None, None, None


def queue_loss(call, queue):
    """Return the mean of softplus(lse_i − q_i·k_i/τ); lse_i sums over the queue, which gets no gradient."""
    needs = call.needs

    def compute():
        (q, k), negatives = call.operands, queue.to(call.product_dtype)
        if call.impl == "triton" and has_queue_kernel(q.element_size(), q.shape[1]):
            from .gpu.queue_loss import queue_loss as compute_loss
            loss, dq, dk = compute_loss(q, k, negatives, call.temperature, call.mask)
        else:
            loss, dq, dk = blockwise.queue_loss(q, k, negatives, call.temperature, call.mask, any(needs))
        dt = blockwise.gradient_of_temperature(q.to(loss.dtype), dq, call.temperature, needs[2])
        return loss, dq, dk, dt
    return GradientInForward.apply(*call[:3], None, call.impl, compute)


def sigmoid_loss(call, bias):
    """Return 1/N Σ_ij softplus(∓(q_i·k_j/τ + bias)): − for positives (excluded by the mask), else +."""
    needs = *call.needs, torch.is_grad_enabled() and bias.requires_grad

    def compute():
        arguments = *call.operands, call.temperature, bias, call.mask, *needs
        if call.impl == "blockwise":
            return blockwise.sigmoid_loss(*arguments)
        from .gpu import sigmoid
        return sigmoid.sigmoid_loss(*arguments, call.q.dtype)
    return GradientInForward.apply(*call[:3], bias, call.impl, compute)


# ── the nearest columns ────────────────────────────────────────────────────────────────────────────────────


def similarity_topk(call, n):
    """Return (products (N, n), their columns (N, n)), largest first; see call.similarity_topk."""
    compute = blockwise.similarity_topk
    if call.impl == "triton":
        from .gpu.topk import similarity_topk as compute
    q, k = call.operands
    with torch.cuda.device_of(q), torch.autocast(q.device.type, enabled=False):
        return compute(q, q if k is None else k, call.temperature, n, call.mask)
