"""The operations of blockwise.py and gpu/ as autograd Functions. `call` has the checked arguments (call.py).

call.compute is the module blockwise or gpu. Both have functions with the same names, but blockwise has no
softmax_loss_forward and softmax_loss_backward, a softmax loss in two passes. There are two Functions:

    GradientInForward   computes the gradients together with the loss; backward only multiplies the gradients
                        by the upstream gradient
    TwoPasses           stores a few numbers per row, which are more precise than the log-sum-exp alone.
                        backward computes each logit again

Second derivatives (create_graph=True), forward mode and torch.func are not supported and raise RuntimeError.
torch.compile does not trace this file.
"""
import functools

import torch
import torch.nn.functional as F

from .blockwise import add_rows
from .checks import refuse_second_derivative
from .eager import cast, round_forward
from .masks import Mask


def outside_autocast(function):
    """Decorate forward(ctx, x, ...) or backward(ctx, x, ...) to run on x's device, with autocast off."""
    @functools.wraps(function)
    def run(ctx, x, *rest):
        is_elsewhere = x.is_cuda and x.get_device() != torch.cuda.current_device()
        if not is_elsewhere and not torch.is_autocast_enabled(x.device.type):
            return function(ctx, x, *rest)
        with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
            return function(ctx, x, *rest)
    return run


def first_order(backward):
    """Decorate backward(ctx, grad, ...) as outside_autocast does; a second derivative raises RuntimeError."""
    @functools.wraps(backward)
    def run(ctx, grad, *rest):
        refuse_second_derivative("kernels")
        return backward(ctx, grad.resolve_neg(), *rest)   # kernels read raw memory, without the lazy negation
    return outside_autocast(run)


class TwoPasses(torch.autograd.Function):
    """A result whose backward pass computes the logits again.

    q, k, temperature  inputs, passed only to register them with autograd; call has these tensors
    forward            function (call) → (result, tensors for backward...)
    backward           function (call, upstream gradient, tensors..., needs) → gradients of these inputs
    bias               one more input, for sigmoid_loss in ring.py; else absent
    """

    @staticmethod
    @outside_autocast
    def forward(ctx, q, k, temperature, call, forward, backward, *bias):
        result, *tensors = forward(call)
        # Because these are saved, autograd raises an error if one is changed in place before backward.
        vectors = [x for x in call.mask if isinstance(x, torch.Tensor)]
        ctx.save_for_backward(*tensors, q, k, temperature, *bias, *vectors)
        ctx.call, ctx.differentiate, ctx.count = call._replace(q=None, k=None), backward, len(tensors)
        return result

    @staticmethod
    @first_order
    def backward(ctx, grad):
        tensors, inputs = ctx.saved_tensors[:ctx.count], ctx.saved_tensors[ctx.count:]
        call, needs = ctx.call._replace(q=inputs[0], k=inputs[1]), ctx.needs_input_grad
        needs = *needs[:3], *needs[6:]
        gradients = ctx.differentiate(call, grad, *tensors, needs)
        gradients = [gradient.to(x.dtype) if needed else None
                     for needed, gradient, x in zip(needs, gradients, inputs)]
        return *gradients[:3], None, None, None, *gradients[3:]


class GradientInForward(torch.autograd.Function):
    """A loss whose gradients are computed along with it.

    q, k, temperature, bias  passed only because autograd must know the inputs; compute has these tensors
    compute                  function that returns (loss, gradients of q, k, temperature and, if given, bias).
                             It must not read call.needs, because grad mode is off while forward runs compute
    """

    @staticmethod
    @outside_autocast
    def forward(ctx, q, k, temperature, bias, compute):
        loss, *gradients = compute()
        ctx.dtypes = [None if x is None else x.dtype for x in (q, k)]
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @first_order
    def backward(ctx, grad):
        needs = ctx.needs_input_grad
        dq, dk, dt, *db = ctx.saved_tensors                        # only sigmoid_loss has db
        dq, dk = (scaled(x, grad, dtype) if needed else None
                  for x, dtype, needed in zip((dq, dk), ctx.dtypes, needs))
        return dq, dk, dt * grad if needs[2] else None, db[0] * grad if needs[3] else None, None


def scaled(x, factor, dtype):
    """Return factor · x in the given dtype, without an intermediate copy in the dtype of x."""
    return x * factor if x.dtype == dtype else torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))


# ── the operations ──────────────────────────────────────────────────────────────────────────────────────────


@torch.compiler.disable
def similarity_lse(call):
    """Return the log-sum-exp of each row (N,)."""
    compute = call.compute
    return TwoPasses.apply(*call[:3], call, compute.similarity_lse, compute.similarity_lse_backward)


@torch.compiler.disable
def similarity_topk(call, n):
    """Return (products (N, n), their columns (N, n)), largest first; see call.similarity_topk."""
    with torch.cuda.device_of(call.q), torch.autocast(call.q.device.type, enabled=False):
        return call.compute.similarity_topk(call, n)


@torch.compiler.disable
def softmax_loss(call, both=False, weights=None):
    """Return the cross entropy Σ_i w_i softplus(lse_i − q_i·k_p/τ), where p is the positive of row i.

    The mask excludes p from lse_i. So the gradient of row i has the factor σ(lse_i − q_i·k_p/τ). For a small
    loss this is more accurate than the usual factor 1 − softmax, which loses digits (such as 1 − 0.999).

    both     True: the mean of the row-softmax loss (one softmax per row i, dim=1) and the column-softmax loss
             (one per column j, dim=0), as in CLIP. The mask then excludes only the positives
    weights  w (N,), weights of the rows in [0, 1]; None: all are 1/N
    """
    compute, needs = call.compute, call.needs
    if compute.fuses_backward(call, both, needs):
        loss = functools.partial(compute.softmax_loss, call, both, weights, needs)
        return GradientInForward.apply(*call[:3], None, loss)
    forward = functools.partial(compute.softmax_loss_forward, both=both, weights=weights)
    backward = functools.partial(compute.softmax_loss_backward, weighted=weights is not None)
    return TwoPasses.apply(*call[:3], call, forward, backward)


@torch.compiler.disable
def queue_loss(call, queue):
    """Return the mean of softplus(lse_i − q_i·k_i/τ); lse_i sums over the queue, which gets no gradient."""
    loss = functools.partial(call.compute.queue_loss, call, queue.to(call.product_dtype), call.needs)
    return GradientInForward.apply(*call[:3], None, loss)


@torch.compiler.disable
def sigmoid_loss(call, bias):
    """Return 1/N Σ_ij softplus(∓(q_i·k_j/τ + bias)): − for positives (excluded by the mask), else +."""
    needs = *call.needs, torch.is_grad_enabled() and bias.requires_grad
    loss = functools.partial(call.compute.sigmoid_loss, call, bias, needs)
    return GradientInForward.apply(*call[:3], bias, loss)


@torch.compiler.disable
def sup_con_loss(call, views, labels, offset):
    """Return the value of eager.sup_con_loss, without storing a large matrix of pairs of views.

    A view with one positive p has the loss softplus(lse − s_p), as in other losses: lse sums over negatives
    only. A view with several positives has the loss lse − (mean of s_p): lse sums over all other views.
    """
    # Gradients are float32 and are not rounded, because those of lse and s_p nearly cancel.
    q, k = (None if x is None else round_forward(cast(x, call.temperature.dtype), call.product_dtype)
            for x in call[:2])
    call, own = call._replace(q=q, k=k), slice(offset, offset + len(q) // views)
    # A label's number is its first position in the sorted labels. torch.unique would wait for the GPU.
    ordered = labels.sort().values
    number = torch.searchsorted(ordered, labels, out_int32=True)
    count = torch.searchsorted(ordered, labels, right=True, out_int32=True) - number
    # Each view excludes the views with its id: itself and, if it has only one positive, this positive.
    unique = torch.arange(-1, -1 - len(labels) * views, -1, dtype=torch.int32, device=labels.device)
    ids = torch.where((count * views == 2)[:, None], number[:, None], unique.view(-1, views))
    column_ids = ids.flatten()
    mask = Mask("none", column_ids if k is None else ids[own].flatten(), column_ids)
    rows, positives = q.unflatten(0, (-1, views)), (count * views - 1)[own, None]
    keys = rows if k is None else k.unflatten(0, (-1, views))
    sums = keys.new_zeros(len(labels), keys.shape[2])
    add_rows(sums, number.long(), keys.sum(1))
    # others is the sum of a view's positives. Unlike indexing, F.embedding has a deterministic backward pass.
    others = F.embedding(number[own], sums)[:, None] - keys[own]
    near = (rows * others).sum(2) / (positives.clamp(min=1) * call.temperature)
    gap = similarity_lse(call._replace(mask=mask)).view_as(near) - near
    loss = torch.where(positives == 1, F.softplus(gap, threshold=40), gap)
    return loss.masked_fill(positives == 0, 0).mean()
