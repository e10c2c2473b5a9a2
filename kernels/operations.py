"""The fused operations as PyTorch knows them: what they take and return, their fake tensors, their gradients.

One operation forward, one backward, whatever the implementation; the rule travels as its fields. k is None
where the rows of q meet each other under a symmetric rule: then all of the gradient is dq. Each backward is
an operation of its own so that asking for a second derivative is an error and not silently zero.
"""
import torch

from . import blockwise
from .dispatch import call, differentiable, operation
from .paths import gradient_dtype, in_one_pass
from .rules import Rule

RULE = ("str exclude, Tensor? row_ids, Tensor? column_ids, Tensor? row_groups, Tensor? column_groups, "
        "Tensor? row_features, Tensor? column_features, SymInt offset, float phi, str impl, "
        "ScalarType? products")
NEEDS = "bool needs_q, bool needs_k, bool needs_temperature"
FIELDS = len(Rule._fields) + 2  # of RULE


def unpack(rest):
    """(Rule, impl, products, what needs a gradient, if it is there) of the arguments that RULE names."""
    *rule, impl, products = rest[:FIELDS]
    return Rule(*rule), impl, products, rest[FIELDS:]


def multiplied(impl, products, *rows):
    """The rows in the dtype that their products are of, None as None; blockwise keeps float32 around it.

    Triton reads memory, where a view such as x.conj().imag has the other sign.
    """
    if impl == "triton":
        rows = [x.resolve_neg() if x is not None and x.is_neg() else x for x in rows]
    if products is None:
        return rows
    held = products if impl == "triton" else torch.float32
    return [x if x is None else x.to(products).to(held) for x in rows]


# ── the log-sum-exp of each row ─────────────────────────────────────────────────────────────────────────────


@operation("similarity_lse", f"(Tensor q, Tensor? k, Tensor temperature, {RULE}) -> (Tensor, Tensor)")
def lse(q, k, temperature, *rule):
    """(lse (N,), sums (2, N)): what lse is the logarithm of, to all digits; for the backward pass."""
    rule, impl, products, _ = unpack(rule)
    q, k = multiplied(impl, products, q, k)
    if impl == "blockwise":
        return blockwise.similarity_lse(q, k, temperature, rule)
    from .gpu import lse_forward
    found = lse_forward.log_sums(q, k, temperature, rule)
    return found.lse, found.sums[0]


@lse.register_fake
def _(q, k, temperature, *rule):
    return tuple(q.new_empty(shape, dtype=temperature.dtype) for shape in (q.shape[:1], (2, q.shape[0])))


@operation("similarity_lse_backward",
           f"(Tensor q, Tensor? k, Tensor temperature, Tensor grad, Tensor sums, {RULE}, {NEEDS}) "
           "-> (Tensor, Tensor, Tensor)")
def lse_backward(q, k, temperature, grad, sums, *rest):
    rule, impl, products, needs = unpack(rest)
    dtype, (q, k) = q.dtype, multiplied(impl, products, q, k)
    if impl == "blockwise":
        return blockwise.similarity_lse_backward(q, k, temperature, rule, grad, sums, *needs)
    from .gpu import gradient
    size = grad.abs()
    # one row's NaN or infinity is no measure for the others
    largest = size.where(size < torch.inf, 0).amax().clamp(min=torch.finfo(torch.float32).tiny)
    rows = sums, (grad / largest).contiguous()
    columns = rows if k is None else None
    return gradient.gradients(q, k, temperature, rule, rows, columns, largest, 1.0, *needs, dtype)


@lse_backward.register_fake
def empty_gradients(q, k, temperature, *rest):
    needs_q, needs_k, needs_temperature = rest[-3:]
    k, needs_k = (q, False) if k is None else (k, needs_k)
    return (q.new_empty(q.shape if needs_q or needs_temperature else (0, q.shape[1])),
            k.new_empty(k.shape if needs_k else (0, k.shape[1])),
            q.new_empty(() if needs_temperature else 0, dtype=temperature.dtype))


def scaled(x, factor, dtype):
    """factor · x in dtype, without a copy of x in its own."""
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))


def given(needs, gradients):
    """The gradients that autograd asked for, None for the others."""
    return [gradient if needed else None for needed, gradient in zip(needs, gradients)]


def save_lse(ctx, inputs, output):
    q, k, temperature, ctx.exclude, *tensors = inputs[:-4]
    ctx.rest = inputs[-4:]  # offset, phi, impl, products
    ctx.save_for_backward(q, k, temperature, output[1], *tensors)
    ctx.mark_non_differentiable(output[1])


def differentiate_lse(ctx, grad, _):
    q, k, temperature, sums, *tensors = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    gradients = call(lse_backward, q, k, temperature, grad, sums, ctx.exclude, *tensors, *ctx.rest, *needs)
    return *given(needs, gradients), *[None] * FIELDS


differentiable(lse, lse_backward, save_lse, differentiate_lse)

# ── the same where the keys need no gradient ────────────────────────────────────────────────────────────────


@operation("similarity_lse_fixed_keys",
           f"(Tensor q, Tensor k, Tensor temperature, {RULE}) -> (Tensor, Tensor)")
def fixed_keys(q, k, temperature, *rule):
    """(lse (N,), o (N, D)) with o_i = Σ_j p_ij k_j, from which the gradient of q follows without the keys."""
    rule, impl, products, _ = unpack(rule)
    q, k = multiplied(impl, products, q, k)
    if impl == "blockwise":
        return blockwise.similarity_lse_fixed_keys(q, k, temperature, rule)
    from .gpu import lse_fixed_keys
    return lse_fixed_keys.similarity_lse(q, k, temperature, rule)


@fixed_keys.register_fake
def _(q, k, temperature, *rule):
    return q.new_empty(q.shape[0], dtype=temperature.dtype), q.new_empty(q.shape, dtype=temperature.dtype)


@operation("similarity_lse_fixed_keys_backward",
           "(Tensor q, Tensor temperature, Tensor grad, Tensor o, ScalarType? products) -> (Tensor, Tensor)")
def fixed_keys_backward(q, temperature, grad, o, products):
    dq = o * (grad / temperature)[:, None]
    dtype, (q,) = q.dtype, multiplied("triton", products, q)
    return dq.to(dtype), -torch.linalg.vecdot(q.to(dq.dtype), dq).sum() / temperature


@fixed_keys_backward.register_fake
def _(q, temperature, grad, o, products):
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    return dq, q.new_empty((), dtype=temperature.dtype)


def save_o(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], inputs[2], output[1])
    ctx.products = inputs[-1]
    ctx.mark_non_differentiable(output[1])


def differentiate_fixed_keys(ctx, grad, _):
    q, temperature, o = ctx.saved_tensors
    dq, dt = call(fixed_keys_backward, q, temperature, grad, o, ctx.products)
    return *given(ctx.needs_input_grad[:3], (dq, None, dt)), *[None] * FIELDS


differentiable(fixed_keys, fixed_keys_backward, save_o, differentiate_fixed_keys)

# ── cross entropies, positives left out by the rule ─────────────────────────────────────────────────────────


@operation("softmax_loss",
           f"(Tensor q, Tensor? k, Tensor temperature, Tensor? weights, bool both, {RULE}, {NEEDS}) "
           "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
def softmax_loss(q, k, temperature, weights, both, *rest):
    """(loss, dq, dk, dτ, sums, slope): either the gradients, taken on the way, and the last two empty; or
    what the backward kernels need, and the gradients empty."""
    rule, impl, products, needs = unpack(rest)
    dtype, (q, k) = q.dtype, multiplied(impl, products, q, k)
    new = lambda *shape: q.new_empty(shape, dtype=temperature.dtype)
    if impl == "blockwise":
        return *blockwise.softmax_loss(q, k, temperature, rule, weights, both, *needs), new(0), new(0)
    if in_one_pass(q, k, both, rule, impl, needs):
        from .gpu import one_pass
        return *one_pass.softmax_loss(q, k, temperature, rule, weights, *needs, dtype), new(0), new(0)
    from .gpu import lse_forward
    found = lse_forward.log_sums(q, k, temperature, rule, both, True, weights)
    return found.loss, new(0), new(0), new(0), found.sums, found.slope


@softmax_loss.register_fake
def _(q, k, temperature, weights, both, *rest):
    new = lambda *shape: q.new_empty(shape, dtype=temperature.dtype)
    rule, impl, products, needs = unpack(rest)
    if in_one_pass(*multiplied(impl, products, q, k), both, rule, impl, needs):
        dq, dk, dt = empty_gradients(q, k, temperature, *needs)
        waiting = gradient_dtype(q.dtype, temperature, impl)
        return new(), dq.to(waiting), dk.to(waiting), dt, new(0), new(0)
    sides, n = 2 if both else 1, q.shape[0]
    return new(), new(0), new(0), new(0), new(sides, 2, n), new(sides, n)


@operation("softmax_loss_backward",
           "(Tensor q, Tensor? k, Tensor temperature, Tensor? weights, bool both, Tensor grad, "
           f"Tensor dq, Tensor dk, Tensor dt, Tensor sums, Tensor slope, {RULE}, {NEEDS}) "
           "-> (Tensor, Tensor, Tensor)")
def softmax_loss_backward(q, k, temperature, weights, both, grad, dq, dk, dt, sums, slope, *rest):
    rule, impl, products, needs = unpack(rest)
    if not len(sums):  # the gradients were taken in one pass
        return scaled(dq, grad, q.dtype), scaled(dk, grad, q.dtype), grad * dt
    from .gpu import gradient
    dtype, (q, k) = q.dtype, multiplied(impl, products, q, k)
    slope, unit = (slope, 1 / len(q)) if weights is None else (slope * weights, 1.0)
    rows = sums[0], slope[0]
    columns = (sums[1], slope[1]) if both else rows if k is None else None
    return gradient.gradients(q, k, temperature, rule, rows, columns, grad, unit / len(sums), *needs, dtype,
                              True)


softmax_loss_backward.register_fake(empty_gradients)


def save_loss(ctx, inputs, output):
    q, k, temperature, weights, ctx.both, ctx.exclude, *tensors = inputs[:-7]
    ctx.rest = inputs[-7:-3]  # offset, phi, impl, products
    ctx.save_for_backward(q, k, temperature, weights, *output[1:], *tensors)
    ctx.mark_non_differentiable(*output[1:])


def differentiate_loss(ctx, grad, *_):
    q, k, temperature, weights, dq, dk, dt, sums, slope, *tensors = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    rule, found = (ctx.exclude, *tensors, *ctx.rest), (dq, dk, dt, sums, slope)
    gradients = call(softmax_loss_backward, q, k, temperature, weights, ctx.both, grad, *found, *rule, *needs)
    return *given(needs, gradients), *[None] * (2 + FIELDS + 3)


differentiable(softmax_loss, softmax_loss_backward, save_loss, differentiate_loss)

# ── losses that always take their gradients on the way: a queue without gradient, each pair for itself ──────


@operation("queue_loss", f"(Tensor q, Tensor k, Tensor temperature, Tensor queue, {RULE}, {NEEDS}) "
           "-> (Tensor, Tensor, Tensor, Tensor)")
def queue_loss(q, k, temperature, queue, *rest):
    """(loss, dq, dk, dτ), the gradients in the dtype that sums have."""
    rule, impl, products, (_, _, needs_temperature) = unpack(rest)
    q, k, queue = multiplied(impl, products, q, k, queue)
    if impl == "blockwise":
        loss, dq, dk = blockwise.queue_loss(q, k, queue, temperature, rule)
    else:
        from .gpu import lse_fixed_keys
        loss, dq, dk = lse_fixed_keys.queue_loss(q, k, queue, temperature, rule)
    dt = loss.new_empty(0)
    if needs_temperature:
        dt = -torch.linalg.vecdot(q.to(dq.dtype), dq).sum() / temperature
    return loss, dq, dk, dt


@queue_loss.register_fake
def _(q, k, temperature, queue, *rest):
    shapes = (), q.shape, k.shape, () if rest[-1] else 0
    return tuple(q.new_empty(shape, dtype=temperature.dtype) for shape in shapes)


@operation("sigmoid_loss", f"(Tensor q, Tensor k, Tensor temperature, Tensor bias, {RULE}, {NEEDS}, "
           "bool needs_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
def sigmoid_loss(q, k, temperature, bias, *rest):
    """(loss, dq, dk, dτ, db): the gradients, or empty."""
    rule, impl, products, needs = unpack(rest)
    dtype, (q, k) = q.dtype, multiplied(impl, products, q, k)
    if impl == "blockwise":
        return blockwise.sigmoid_loss(q, k, temperature, bias, rule, *needs)
    from .gpu import sigmoid
    return sigmoid.sigmoid_loss(q, k, temperature, bias, rule, *needs, dtype)


@sigmoid_loss.register_fake
def _(q, k, temperature, bias, *rest):
    _, impl, _, needs = unpack(rest)
    dq, dk, dt = empty_gradients(q, k, temperature, *needs[:3])
    waiting = gradient_dtype(q.dtype, temperature, impl)
    db = dt.new_empty(() if needs[3] else 0)
    return dt.new_empty(()), dq.to(waiting), dk.to(waiting), dt, db


@operation("loss_backward",
           "(Tensor q, Tensor k, Tensor temperature, Tensor? bias, Tensor grad, Tensor dq, Tensor dk, "
           "Tensor dt, Tensor? db) -> (Tensor, Tensor, Tensor, Tensor)")
def loss_backward(q, k, temperature, bias, grad, dq, dk, dt, db):
    """grad times the gradients that forward took, rows' in the dtype of the rows."""
    rows = (scaled(x, grad, q.dtype) for x in (dq, dk))
    return *rows, grad * dt, dt.new_empty(0) if db is None else grad * db


@loss_backward.register_fake
def _(q, k, temperature, bias, grad, dq, dk, dt, db):
    rows = (torch.empty_like(x, dtype=q.dtype) for x in (dq, dk))
    return *rows, torch.empty_like(dt), dt.new_empty(0) if db is None else torch.empty_like(db)


def save_gradients(ctx, inputs, output):
    """The fourth input is a bias, if there is a db, or a queue, which needs no gradient and is not kept."""
    _, dq, dk, dt, db = (*output, None)[:5]
    bias = None if db is None else inputs[3]
    ctx.others = len(inputs) - 4
    ctx.save_for_backward(*inputs[:3], bias, dq, dk, dt, db)
    ctx.mark_non_differentiable(*output[1:])


def differentiate_taken(ctx, grad, *_):
    q, k, temperature, bias, *gradients = ctx.saved_tensors
    gradients = call(loss_backward, q, k, temperature, bias, grad, *gradients)
    return *given(ctx.needs_input_grad[:4], gradients), *[None] * ctx.others


for taken in (queue_loss, sigmoid_loss):
    differentiable(taken, loss_backward, save_gradients, differentiate_taken)

# ── the nearest columns ─────────────────────────────────────────────────────────────────────────────────────


@operation("similarity_topk", f"(Tensor q, Tensor k, Tensor temperature, int n, {RULE}) -> (Tensor, Tensor)")
def topk(q, k, temperature, n, *rule):
    rule, impl, products, _ = unpack(rule)
    q, k = multiplied(impl, products, q, k)
    if impl == "blockwise":
        return blockwise.similarity_topk(q, k, temperature, n, rule)
    from .gpu import topk
    return topk.similarity_topk(q, k, temperature, n, rule)


@topk.register_fake
def _(q, k, temperature, n, *rule):
    return q.new_empty(q.shape[0], n, dtype=temperature.dtype), q.new_empty(q.shape[0], n, dtype=torch.int64)
