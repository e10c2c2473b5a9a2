"""Register the fused operations with PyTorch: schemas, fake tensors (register_fake) and gradients.

Each forward and each backward function is one PyTorch operation for all implementations. The backward
functions are operations too, so that asking for a second derivative raises an error instead of returning
zeros. save_... and differentiate_... are the functions that register_gradient expects.

A mask is passed as its fields. k is None for self-similarity under a symmetric mask: the rows of q are
compared with each other, and dq is the whole gradient. product_dtype is the dtype in which q·k is computed;
None is the dtype of the rows. stats (2, N) are the maximum and the sum of exponentials of each row (in
Triton, the maximum is in log2 units); backward uses them because they are more precise than lse. A gradient
that is not needed is a tensor without elements.
"""
import functools

import torch

from . import blockwise, stored
from .custom_op import call_op, check_not_transformed, is_traced, register_gradient, register_op
from .heuristics import fuses_backward, gradient_dtype
from .masks import Mask

MASK_SCHEMA = ("str exclude, Tensor? row_ids, Tensor? column_ids, Tensor? row_groups, Tensor? column_groups, "
               "Tensor? row_features, Tensor? column_features, SymInt offset, float phi, str impl, "
               "ScalarType? product_dtype")
NEEDS_SCHEMA = "bool needs_q, bool needs_k, bool needs_temperature"
MASK_ARGUMENTS = len(Mask._fields) + 2  # the number of arguments in MASK_SCHEMA


def unpack(arguments):
    """Return (Mask, impl, product_dtype, needs_... flags) from arguments as in MASK_SCHEMA, NEEDS_SCHEMA."""
    *mask, impl, product_dtype = arguments[:MASK_ARGUMENTS]
    return Mask(*mask), impl, product_dtype, arguments[MASK_ARGUMENTS:]


def cast_for_products(impl, product_dtype, *rows):
    """Cast the rows to product_dtype; None stays None.

    Triton reads raw memory, so resolve_neg() materialises lazily negated views such as x.conj().imag.
    """
    if impl == "triton":
        rows = [x.resolve_neg() if x is not None and x.is_neg() else x for x in rows]
    return rows if product_dtype is None else [x if x is None else x.to(product_dtype) for x in rows]


def without_triton(q, k):
    """Return the module that computes an operation if impl is "blockwise"."""
    return stored if blockwise.is_stored(q, k) else blockwise


# ── the log-sum-exp of each row ────────────────────────────────────────────────────────────────────────────


@register_op("similarity_lse",
             f"(Tensor q, Tensor? k, Tensor temperature, {MASK_SCHEMA}) -> (Tensor, Tensor)")
def lse(q, k, temperature, *mask):
    """Return (lse (N,), stats (2, N)); the softmax (N, M) in place of stats if the matrix is stored."""
    mask, impl, product_dtype, _ = unpack(mask)
    q, k = cast_for_products(impl, product_dtype, q, k)
    if impl == "blockwise":
        return without_triton(q, k).similarity_lse(q, k, temperature, mask)
    from .gpu import lse_forward
    found = lse_forward.forward(q, k, temperature, mask)
    return found.lse, found.stats[0]


@lse.register_fake
def _(q, k, temperature, *mask):
    n, (_, impl, _, _) = q.shape[0], unpack(mask)
    is_stored = impl == "blockwise" and blockwise.is_stored(q, k)
    stats = (n, n if k is None else k.shape[0]) if is_stored else (2, n)
    return tuple(q.new_empty(shape, dtype=temperature.dtype) for shape in ((n,), stats))


@register_op("similarity_lse_backward",
             f"(Tensor q, Tensor? k, Tensor temperature, Tensor grad, Tensor stats, {MASK_SCHEMA}, "
             f"{NEEDS_SCHEMA}) -> (Tensor, Tensor, Tensor)")
def lse_backward(q, k, temperature, grad, stats, *rest):
    """Return (dq, dk, dτ) for the upstream gradient grad (N,) of lse."""
    mask, impl, product_dtype, needs = unpack(rest)
    dtype = q.dtype
    q, k = cast_for_products(impl, product_dtype, q, k)
    if impl == "blockwise":
        backward = without_triton(q, k).similarity_lse_backward
        dq, dk, dt = backward(q, k, temperature, mask, grad, stats, *needs)
        return dq.to(dtype), dk.to(dtype), dt
    from .gpu import gradient
    # the kernels expect |dloss/dlse| ≤ 1
    largest = stored.largest_finite(grad)
    rows = stats, (grad / largest).contiguous()
    columns = rows if k is None else None
    return gradient.gradients(q, k, temperature, mask, rows, columns, largest, 1.0, *needs, dtype)


@lse_backward.register_fake
def empty_gradients(q, k, temperature, *rest):
    """Return uninitialised (dq, dk, dτ); the last three arguments are the needs_... flags."""
    needs_q, needs_k, needs_temperature = rest[-3:]
    k, needs_k = (q, False) if k is None else (k, needs_k)
    return (q.new_empty(q.shape if needs_q or needs_temperature else (0, q.shape[1])),
            k.new_empty(k.shape if needs_k else (0, k.shape[1])),
            q.new_empty(() if needs_temperature else 0, dtype=temperature.dtype))


def scaled_copy(x, factor, dtype):
    """Return factor · x in dtype, without an intermediate copy in the dtype of x."""
    if x.dtype == dtype:
        return x * factor
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))


def only_needed(needs, gradients):
    """Return the gradients that autograd needs, and None for the others."""
    return [gradient if needed else None for needed, gradient in zip(needs, gradients)]


def save_lse(ctx, inputs, output):
    q, k, temperature, ctx.exclude, *tensors = inputs[:-4]
    ctx.rest = inputs[-4:]  # offset, phi, impl, product_dtype
    ctx.save_for_backward(q, k, temperature, output[1], *tensors)


def differentiate_lse(ctx, grad, _):
    q, k, temperature, stats, *tensors = ctx.saved_tensors
    needs, mask = ctx.needs_input_grad[:3], (ctx.exclude, *tensors, *ctx.rest)
    gradients = call_op(lse_backward, q, k, temperature, grad, stats, *mask, *needs)
    return *only_needed(needs, gradients), None


register_gradient(lse, lse_backward, save_lse, differentiate_lse)

# ── the log-sum-exp if the keys need no gradient ───────────────────────────────────────────────────────────


@register_op("similarity_lse_frozen_keys",
             f"(Tensor q, Tensor k, Tensor temperature, {MASK_SCHEMA}) -> (Tensor, Tensor)")
def frozen_keys(q, k, temperature, *mask):
    """Return (lse (N,), o (N, D)) with o_i = Σ_j p_ij k_j, which gives dq without the keys."""
    mask, impl, product_dtype, _ = unpack(mask)
    q, k = cast_for_products(impl, product_dtype, q, k)
    if impl == "blockwise":
        return without_triton(q, k).similarity_lse_frozen_keys(q, k, temperature, mask)
    from .gpu import lse_frozen_keys
    return lse_frozen_keys.similarity_lse(q, k, temperature, mask)


@frozen_keys.register_fake
def _(q, k, temperature, *mask):
    return q.new_empty(q.shape[0], dtype=temperature.dtype), q.new_empty(q.shape, dtype=temperature.dtype)


@register_op("similarity_lse_frozen_keys_backward",
             "(Tensor q, Tensor temperature, Tensor grad, Tensor o, ScalarType? product_dtype) "
             "-> (Tensor, Tensor)")
def frozen_keys_backward(q, temperature, grad, o, product_dtype):
    """Return (dq, dτ)."""
    dq = o * (grad / temperature)[:, None]
    dtype = q.dtype
    q, = cast_for_products("triton", product_dtype, q)
    return dq.to(dtype), -torch.linalg.vecdot(q.to(dq.dtype), dq).sum() / temperature


@frozen_keys_backward.register_fake
def _(q, temperature, grad, o, product_dtype):
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    return dq, q.new_empty((), dtype=temperature.dtype)


def save_mean_keys(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], inputs[2], output[1])
    ctx.product_dtype = inputs[-1]


def differentiate_frozen_keys(ctx, grad, _):
    q, temperature, o = ctx.saved_tensors
    dq, dt = call_op(frozen_keys_backward, q, temperature, grad, o, ctx.product_dtype)
    return *only_needed(ctx.needs_input_grad[:3], (dq, None, dt)), None


register_gradient(frozen_keys, frozen_keys_backward, save_mean_keys, differentiate_frozen_keys)

# ── backward of losses that compute their gradients in forward ─────────────────────────────────────────────


@register_op("loss_backward",
             "(Tensor q, Tensor? k, Tensor temperature, Tensor? bias, Tensor grad, Tensor dq, Tensor dk, "
             "Tensor dt, Tensor? db) -> (Tensor, Tensor, Tensor, Tensor)")
def loss_backward(q, k, temperature, bias, grad, dq, dk, dt, db):
    """Return the gradients that forward computed times grad, with dq and dk in the dtype of the rows."""
    rows = (scaled_copy(x, grad, q.dtype) for x in (dq, dk))
    return *rows, grad * dt, dt.new_empty(0) if db is None else grad * db


@loss_backward.register_fake
def _(q, k, temperature, bias, grad, dq, dk, dt, db):
    rows = (torch.empty_like(x, dtype=q.dtype) for x in (dq, dk))
    return *rows, torch.empty_like(dt), dt.new_empty(0) if db is None else torch.empty_like(db)


def save_gradients(ctx, inputs, output):
    """Save the gradients. inputs[3] is sigmoid_loss's bias, or queue_loss's queue, which is not needed."""
    _, dq, dk, dt, db = (*output, None)[:5]
    bias = None if db is None else inputs[3]
    ctx.save_for_backward(*inputs[:3], bias, dq, dk, dt, db)


def scale_saved_gradients(ctx, grad, *_):
    q, k, temperature, bias, *gradients = ctx.saved_tensors
    needs = ctx.needs_input_grad
    if torch.is_grad_enabled() or is_traced(grad):
        return only_needed(needs[:4], call_op(loss_backward, q, k, temperature, bias, grad, *gradients))
    check_not_transformed(grad)
    dq, dk, dt, db = gradients                    # the usual case; calling an operation would take longer
    return (scaled_copy(dq, grad, q.dtype) if needs[0] else None,
            scaled_copy(dk, grad, q.dtype) if needs[1] else None,
            dt * grad if needs[2] else None, db * grad if needs[3] else None)


# ── cross entropies whose mask excludes the positives ──────────────────────────────────────────────────────


def without_ignored(q, weights):
    """Return q with 0 in the rows of weight 0: NaN in one of them would reach the gradient of every key."""
    return q if weights is None else q.where((weights != 0)[:, None], 0)


@register_op("softmax_loss",
             f"(Tensor q, Tensor? k, Tensor temperature, Tensor? weights, bool both, {MASK_SCHEMA}, "
             f"{NEEDS_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
def softmax_loss(q, k, temperature, weights, both, *rest):
    """Return (loss, dq, dk, dτ, stats (sides, 2, N), dloss_dlse (sides, N)).

    There are two cases. Either the gradients are computed in forward: then stats and dloss_dlse have no
    elements. Or backward computes the gradients from stats and dloss_dlse: then dq, dk and dτ have no
    elements.

    both     True: the mean of the row-softmax loss (dim=1) and the column-softmax loss (dim=0), and sides is
             2; False: only the row-softmax loss, and sides is 1
    weights  (N,) row weights; a row of q with weight 0 is ignored and may contain NaN
    """
    mask, impl, product_dtype, needs = unpack(rest)
    dtype, q = q.dtype, without_ignored(q, weights)
    q, k = cast_for_products(impl, product_dtype, q, k)
    new = functools.partial(q.new_empty, dtype=temperature.dtype)
    if impl == "blockwise":
        found = without_triton(q, k).softmax_loss(q, k, temperature, mask, weights, both, *needs)
        return *found, new(0), new(0)
    if fuses_backward(q, k, both, mask, impl, needs):
        from .gpu import fused_forward_backward
        found = fused_forward_backward.softmax_loss(q, k, temperature, mask, weights, *needs, dtype)
        return *found, new(0), new(0)
    from .gpu import lse_forward
    found = lse_forward.forward(q, k, temperature, mask, both, True, weights)
    return found.loss, new(0), new(0), new(0), found.stats, found.dloss_dlse


@softmax_loss.register_fake
def _(q, k, temperature, weights, both, *rest):
    new = functools.partial(q.new_empty, dtype=temperature.dtype)
    mask, impl, product_dtype, needs = unpack(rest)
    if fuses_backward(*cast_for_products(impl, product_dtype, q, k), both, mask, impl, needs):
        dq, dk, dt = empty_gradients(q, k, temperature, *needs)
        stored_dtype = gradient_dtype(q.dtype, temperature, impl)
        return new(()), dq.to(stored_dtype), dk.to(stored_dtype), dt, new(0), new(0)
    sides, n = 2 if both else 1, q.shape[0]
    return new(()), new(0), new(0), new(0), new((sides, 2, n)), new((sides, n))


@register_op("softmax_loss_backward",
             "(Tensor q, Tensor? k, Tensor temperature, Tensor? weights, bool both, Tensor grad, "
             f"Tensor stats, Tensor dloss_dlse, {MASK_SCHEMA}, {NEEDS_SCHEMA}) -> (Tensor, Tensor, Tensor)")
def softmax_loss_backward(q, k, temperature, weights, both, grad, stats, dloss_dlse, *rest):
    """Return (dq, dk, dτ) from the outputs of softmax_loss and its upstream gradient grad, a scalar."""
    from .gpu import gradient
    mask, impl, product_dtype, needs = unpack(rest)
    dtype, q = q.dtype, without_ignored(q, weights)
    q, k = cast_for_products(impl, product_dtype, q, k)
    dloss_dlse, unit = (dloss_dlse, 1 / len(q)) if weights is None else (dloss_dlse * weights, 1.0)
    rows = stats[0], dloss_dlse[0]
    columns = (stats[1], dloss_dlse[1]) if both else rows if k is None else None
    return gradient.gradients(q, k, temperature, mask, rows, columns, grad, unit / len(stats), *needs, dtype,
                              True)


softmax_loss_backward.register_fake(empty_gradients)


def save_loss(ctx, inputs, output):
    q, k, temperature, weights, ctx.both, ctx.exclude, *tensors = inputs[:-7]
    *gradients, stats, dloss_dlse = output[1:]
    ctx.in_forward = stats.shape[0] == 0
    if ctx.in_forward:
        ctx.save_for_backward(q, k, temperature, None, *gradients, None)
    else:
        ctx.rest = inputs[-7:-3]  # offset, phi, impl, product_dtype
        ctx.save_for_backward(q, k, temperature, weights, stats, dloss_dlse, *tensors)


def differentiate_loss(ctx, grad, *_):
    if ctx.in_forward:
        return scale_saved_gradients(ctx, grad)
    q, k, temperature, weights, stats, dloss_dlse, *tensors = ctx.saved_tensors
    needs, mask = ctx.needs_input_grad[:3], (ctx.exclude, *tensors, *ctx.rest)
    arguments = q, k, temperature, weights, ctx.both, grad, stats, dloss_dlse, *mask, *needs
    gradients = call_op(softmax_loss_backward, *arguments)
    return *only_needed(needs, gradients), None


register_gradient(softmax_loss, softmax_loss_backward, save_loss, differentiate_loss)

# ── losses that always compute their gradients in forward ──────────────────────────────────────────────────


@register_op("queue_loss",
             f"(Tensor q, Tensor k, Tensor temperature, Tensor queue, {MASK_SCHEMA}, {NEEDS_SCHEMA}) "
             "-> (Tensor, Tensor, Tensor, Tensor)")
def queue_loss(q, k, temperature, queue, *rest):
    """Return (loss, dq, dk, dτ), with dq and dk in the dtype of temperature."""
    mask, impl, product_dtype, (_, _, needs_temperature) = unpack(rest)
    q, k, queue = cast_for_products(impl, product_dtype, q, k, queue)
    if impl == "blockwise":
        loss, dq, dk = without_triton(q, queue).queue_loss(q, k, queue, temperature, mask)
    else:
        from .gpu import lse_frozen_keys
        loss, dq, dk = lse_frozen_keys.queue_loss(q, k, queue, temperature, mask)
    dt = loss.new_empty(0)
    if needs_temperature:
        dt = -torch.linalg.vecdot(q.to(dq.dtype), dq).sum() / temperature
    return loss, dq, dk, dt


@queue_loss.register_fake
def _(q, k, temperature, queue, *rest):
    shapes = (), q.shape, k.shape, () if rest[-1] else 0
    return tuple(q.new_empty(shape, dtype=temperature.dtype) for shape in shapes)


@register_op("sigmoid_loss",
             f"(Tensor q, Tensor k, Tensor temperature, Tensor bias, {MASK_SCHEMA}, {NEEDS_SCHEMA}, "
             "bool needs_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
def sigmoid_loss(q, k, temperature, bias, *rest):
    """Return (loss, dq, dk, dτ, db)."""
    mask, impl, product_dtype, needs = unpack(rest)
    dtype = q.dtype
    q, k = cast_for_products(impl, product_dtype, q, k)
    if impl == "blockwise":
        return without_triton(q, k).sigmoid_loss(q, k, temperature, bias, mask, *needs)
    from .gpu import sigmoid
    return sigmoid.sigmoid_loss(q, k, temperature, bias, mask, *needs, dtype)


@sigmoid_loss.register_fake
def _(q, k, temperature, bias, *rest):
    _, impl, _, needs = unpack(rest)
    dq, dk, dt = empty_gradients(q, k, temperature, *needs[:3])
    stored_dtype = gradient_dtype(q.dtype, temperature, impl)
    db = dt.new_empty(() if needs[3] else 0)
    return dt.new_empty(()), dq.to(stored_dtype), dk.to(stored_dtype), dt, db


for loss_op in (queue_loss, sigmoid_loss):
    register_gradient(loss_op, loss_backward, save_gradients, scale_saved_gradients)

# ── the nearest columns ────────────────────────────────────────────────────────────────────────────────────


@register_op("similarity_topk",
             f"(Tensor q, Tensor k, Tensor temperature, int n, {MASK_SCHEMA}) -> (Tensor, Tensor)")
def topk(q, k, temperature, n, *mask):
    """Return (values (N, n), columns (N, n)); see kernels.similarity_topk."""
    mask, impl, product_dtype, _ = unpack(mask)
    q, k = cast_for_products(impl, product_dtype, q, k)
    if impl == "blockwise":
        return without_triton(q, k).similarity_topk(q, k, temperature, n, mask)
    from .gpu import topk
    return topk.similarity_topk(q, k, temperature, n, mask)


@topk.register_fake
def _(q, k, temperature, n, *mask):
    return q.new_empty(q.shape[0], n, dtype=temperature.dtype), q.new_empty(q.shape[0], n, dtype=torch.int64)
