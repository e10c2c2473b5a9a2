"""The operations as in a textbook, with the (N, M) matrix of logits stored.

impl="auto" uses this file for small matrices. Tests and benchmarks compare the fused operations with it. Only
this file supports higher derivatives. `call` holds the checked arguments (call.py).
"""
import torch
import torch.nn.functional as F

from .masks import excluded, own_columns, positive_columns


class Product(torch.autograd.Function):
    """a·b for rows that are rounded to a half type. Forward products are exact; sums and result are float32.

    PyTorch's a @ b would round the result to the half type, and has no derivative with out_dtype=float32.
    """

    @staticmethod
    def forward(ctx, a, b, dtype):
        ctx.save_for_backward(a, b)
        ctx.dtype = dtype
        return multiply(cast(a, dtype), cast(b, dtype), torch.float32)

    @staticmethod
    def backward(ctx, gradient):
        (a, b), (needs_a, needs_b, _), scale = ctx.saved_tensors, ctx.needs_input_grad, None
        dtype = ctx.dtype if gradient.is_cuda else torch.float32
        if dtype == torch.float16:                             # small gradients would underflow
            scale = gradient.detach().nan_to_num(0, 0, 0).abs().amax().clamp(min=1e-30) / 2 ** 14
            gradient = gradient / scale
        if torch.is_grad_enabled():                 # with create_graph=True, gradients must be differentiable
            da = Product.apply(gradient, b.T, dtype) if needs_a else None
            db = Product.apply(a.T, gradient, dtype) if needs_b else None
        else:
            gradient, a_dtype, b_dtype = cast(gradient, dtype), a.dtype, b.dtype
            if scale is not None:
                a_dtype = b_dtype = torch.float32          # autograd casts da and db to the dtypes of a and b
            da = multiply(gradient, cast(b, ctx.dtype, dtype).T, a_dtype) if needs_a else None
            db = multiply(cast(a, ctx.dtype, dtype).T, gradient, b_dtype) if needs_b else None
        if scale is not None:
            da, db = (x if x is None else x * scale for x in (da, db))
        return da, db, None


def cast(x, *dtypes):
    """Cast x to each dtype in turn. If x has this dtype, avoid Tensor.to: the call takes microseconds."""
    for dtype in dtypes:
        if x.dtype != dtype:
            x = x.to(dtype)
    return x


def multiply(a, b, dtype):
    """Return a·b in the given dtype, with exact products and float32 sums, also under autocast."""
    if a.is_cuda and a.dtype.itemsize == 2:
        return torch.mm(a, b, out_dtype=dtype)
    out = a.new_empty(len(a), b.shape[1], dtype=torch.float32)     # autocast does not cast if out is given
    return cast(torch.mm(a.float(), b.float(), out=out), dtype)


def logits_of(call):
    """Return the logits q·kᵀ/τ, (N, M), in float32 (float64 for float64 rows)."""
    if call.product_dtype.itemsize == 2:
        return Product.apply(call.q, call.keys.T, call.product_dtype) / call.temperature
    return (call.q / call.temperature) @ call.keys.T


def exclude_diagonal(logits, offset):
    """Set the logits (i, i + offset) to −∞. Their gradient is 0 anyway, so autograd need not see this."""
    logits.detach().diagonal(offset).fill_(-torch.inf)


def masked_logits(call):
    """Return (logits with −∞ where excluded, None or a bool (N,) that is True for rows of only −∞)."""
    s, mask = logits_of(call), call.mask
    if mask.exclude == "diagonal" and not mask.has_vectors and s.shape[1] > 1:
        exclude_diagonal(s, mask.offset)
        return s, None
    out = excluded(mask, torch.arange(len(s), device=s.device), *s.shape)
    return (s, None) if out is None else (s.masked_fill(out, -torch.inf), out.all(1))


def similarity_lse(call):
    """Return (N,): the log-sum-exp of each row's logits, without the columns that the mask excludes."""
    s, empty = masked_logits(call)
    if empty is None:
        return s.logsumexp(1)
    # logsumexp would give NaN gradients for a row of only -inf; such a row gets the constant -inf instead
    return s.masked_fill(empty[:, None], 0).logsumexp(1).masked_fill(empty, -torch.inf)


def similarity_topk(call, n):
    """Return (values, columns) of the n largest logits of each row; column −1 for a value of −∞."""
    values, columns = masked_logits(call)[0].topk(n, 1)
    return values, columns.masked_fill(values.isneginf(), -1)


def softmax_loss(call, both=False, weights=None):
    """Return the mean cross entropy of all rows. The target of a row is the positive that its mask excludes.

    With the mask "pair" (SimCLR's algorithm 1), the logit of a view with itself is −∞.
    both     True: the mean cross entropy of all rows and of all columns (CLIP)
    weights  (N,): return the sum of the rows' cross entropies with these weights; None: all are 1/N
    """
    logits = logits_of(call)
    n, m = logits.shape
    if call.mask.exclude == "pair" and n == m:
        exclude_diagonal(logits, 0)
    elif call.mask.exclude == "pair":                          # m is the number of views of all ranks
        own = own_columns(call.mask, torch.arange(n, device=logits.device), n, m)
        logits.detach().scatter_(1, own[:, None], -torch.inf)
    targets = positive_columns(call.mask, n, m, logits.device)
    if weights is not None:
        return (F.cross_entropy(logits, targets, reduction="none") * weights).sum()
    loss = F.cross_entropy(logits, targets)
    return (loss + F.cross_entropy(logits.T, targets)) / 2 if both else loss


def queue_loss(call, queue):
    """Return MoCo's cross entropy (algorithm 1): column 0 is the positive, other columns are the queue."""
    q, k = (round_forward(x, call.product_dtype).to(call.temperature.dtype) for x in (call.q, call.k))
    is_half = call.product_dtype.itemsize == 2
    negatives = Product.apply(call.q, queue.T, call.product_dtype) if is_half else q @ queue.T
    logits = torch.cat([(q * k).sum(1, keepdim=True), negatives], 1) / call.temperature
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=q.device))


def sigmoid_loss(call, bias):
    """Return 1/N Σ_i Σ_j softplus(∓logit_ij), with − for positives (j = i + offset), else +."""
    logits = logits_of(call).add_(bias)
    sign = torch.ones_like(logits)
    sign.diagonal(call.mask.offset).fill_(-1)
    return F.softplus(logits.mul_(sign), threshold=40).sum() / len(logits)


def sup_con_loss(call, views, labels, offset):
    """Return the mean loss of all rows: the mean −log softmax over a row's positives (0 if there are none).

    The positives of a row are the other rows with its label; the softmax is over all other rows.
    views   number of views of a sample, which are consecutive rows of call.q and of call.keys
    labels  (M,) integers, the labels of the M samples of all ranks
    offset  index of this rank's first sample
    """
    s, first = logits_of(call), offset * views
    columns = labels.repeat_interleave(views)
    positive = columns[first:first + len(s), None] == columns
    positive.diagonal(first).fill_(False)
    s.detach().diagonal(first).fill_(torch.finfo(s.dtype).min)      # with −∞, cross_entropy gives 0 · ∞ = NaN
    return F.cross_entropy(s, positive.to(s.dtype) / positive.sum(1, keepdim=True).clamp(min=1))


def round_forward(x, dtype):
    """Return x rounded to a half type, in the dtype of x; its gradient is not rounded."""
    return x if x.dtype == dtype else x + (x.to(dtype).to(x.dtype) - x).detach()
