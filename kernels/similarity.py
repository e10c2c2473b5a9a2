"""similarity_lse, similarity_topk and the loss under all mean losses: checks, choice of implementation.

Every softmax loss over similarities is a log-sum-exp, the only quadratic part, against one positive.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from . import eager, operations  # operations registers torch.ops.tencl
from .checks import (
    FLOATS,
    check_dense,
    check_flag,
    check_integer,
    check_is_somewhere,
    check_temperature,
    told,
)
from .paths import TOPK_SLOTS, choose_impl, keeps_keys
from .rules import is_symmetric, make_rule


def similarity_lse(q, k=None, temperature=1.0, *, exclude=None, within=None, similar=None, offset=0,
                   normalize=False, impl="auto"):
    """log Σ_j exp(q_i·k_j / τ) for each row i; the (N, M) matrix is never stored.

    q            (N, D) float64 | float32 | float16 | bfloat16, any strides (float64: blockwise and eager)
    k            (M, D) same dtype and device as q; None: the rows of q against each other
    temperature  float > 0, from 1e-38 to 1e38, so that float32 holds it and 1/τ; or a 0-dim tensor, which
                 then gets its gradient (its value is not checked)
    exclude      what each row leaves out: None | "diagonal" (j = i + offset)
                 | "pair" (j = i and j = i ± N/2; k is None)
                 | (row ids (N,), column ids (M,)) integers: columns of equal id
    within       (row ids, column ids) integers: only columns of equal id are kept; where both are sorted
                 (packed sequences) the cost follows the pairs that are kept: in Triton for half types, in
                 blockwise on the CPU
    similar      (f_q (N, E), f_k (M, E), phi): columns with f_q_i·f_k_j ≥ phi are left out; no gradient for f
    offset       this rank's first row among the gathered columns, own_rows(rows).start; 0 in one process
    normalize    True: divides the rows of q and k by their lengths first, as F.normalize does in float32
                 (float64 for float64); similar's features stay as they are. The products are still those of
                 the rows' dtype. A zero row has cosine 0 with every row. As in F.normalize, a length below
                 1e-12 counts as 1e-12, so the gradient of a zero row is about 1e12 (infinite in float16),
                 and a row longer than 1.8e19, whose length float32 cannot hold, becomes a zero row
    impl         "auto" (Triton on CUDA, blockwise elsewhere) | "triton" | "blockwise" | "eager"
    returns      (N,) float32 (float64 for float64), differentiable in q, k, temperature; no column left:
                 -inf, gradient 0
    raises       RuntimeError for a second derivative, forward mode and torch.func; impl="eager" has them
    precision    products of half types are exact, float32 obeys torch.get_float32_matmul_precision(); sums in
                 float32. Gradients are as exact as eager's for logits of any size (in Triton up to 1e9): a
                 row's largest logit and the sum beside it stay two numbers. A query with a NaN spoils no
                 other's gradient. Under torch.autocast float32 rows are multiplied in its dtype, and their
                 gradients stay in float32
    memory       beside inputs and gradients at most float32 copies of them, O((N + M)·D), and 160 MiB, or
                 544 MiB where a loss takes its gradient in one pass (kernels.paths.BUFFER and STRIP, bytes,
                 may be set lower; blockwise: 64 MiB, or 32 rows of logits where those are more); eager O(N·M)
    source       van den Oord et al. 2018, eq. 4
    """
    one_set = k is None
    q, k, temperature, products = check_inputs(q, q if one_set else k, temperature)
    check_flag("normalize", normalize)
    rule = make_rule(q, k, one_set, exclude, within, similar, offset)
    impl = choose_impl(impl, q)
    if normalize:
        q, k, products = normalized(q, k, products)
    if impl == "eager":
        return eager.similarity_lse(*in_dtype(products, q, k), temperature, rule)
    return fused_lse(q, None if one_set and is_symmetric(rule) else k, temperature, rule, impl, products)


def fused_lse(q, k, temperature, rule, impl, products):
    """similarity_lse of checked arguments; k None: one set of rows under a symmetric rule. Keys that need no
    gradient (a queue, a frozen tower) have a cheaper way."""
    needed = torch.is_grad_enabled() and (q.requires_grad or temperature.requires_grad)
    needed = needed and k is not None and not k.requires_grad
    if needed and keeps_keys(q, impl, products):
        return operations.call(operations.fixed_keys, q, k, temperature, *rule, impl, products)[0]
    return operations.call(operations.lse, q, k, temperature, *rule, impl, products)[0]


@torch.no_grad()
def similarity_topk(q, k, n, *, exclude=None, within=None, similar=None, offset=0, normalize=False,
                    impl="auto"):
    """The n columns of largest q_i·k_j for each row i, largest first; the (N, M) matrix is never stored.

    q, k         as in similarity_lse; k None: the rows of q against each other (a row is its own neighbour
                 unless exclude="diagonal")
    n            1 ≤ n ≤ M; beyond 64 the Triton kernel has no slots left and blockwise takes over
    exclude, within, similar, offset, normalize    as in similarity_lse; normalize=True: nearest by cosine
    returns      (products (N, n) float32, or float64 for float64; columns (N, n) int64), without gradient;
                 a row with fewer than n columns ends in (-inf, -1); equal products in any order. One that is
                 NaN, of a row or a column with a NaN, counts as the largest and is given as NaN
    memory       O(N·n + M) beside the inputs, and a constant buffer; eager O(N·M)
    """
    one_set = k is None
    q, k, one, products = check_inputs(q, q if one_set else k, 1.0)
    check_flag("normalize", normalize)
    rule = make_rule(q, k, one_set, exclude, within, similar, offset)
    check_integer("n", n, 1, len(k), f"from 1 to the {len(k)} rows of k")
    impl = choose_impl(impl, q)
    if normalize:
        q, k, products = normalized(q, k, products)
    if impl == "eager":
        return eager.similarity_topk(*in_dtype(products, q, k), one, n, rule)
    if n > TOPK_SLOTS:
        impl = "blockwise"
    return operations.call(operations.topk, q, k, one, n, *rule, impl, products)


def softmax_loss(q, k, temperature, rule, impl, products, both=False, weights=None):
    """Σ_i w_i softplus(lse_i − q_i·k_p/τ), scalar: a cross entropy; the rule leaves positives p out of lse.

    Arguments are checked ones; k None: one set under a symmetric rule. w is 1/N or weights (N,) in [0, 1];
    both: the mean of this and the same over columns. Taking the positive out of the sum costs nothing and
    keeps the gradient exact where training has succeeded: its coefficient is σ(lse − positive), never 1 −
    0.999.
    """
    grad = torch.is_grad_enabled()
    needs = [grad and x is not None and x.requires_grad for x in (q, k, temperature)]
    return operations.call(operations.softmax_loss, q, k, temperature, weights, both, *rule, impl, products,
                           *needs)[0]


def check_inputs(q, k, temperature, names=("q", "k")):
    """(q, k, temperature tensor, dtype of products or None: their own); ValueError where they do not fit.

    Products are in autocast's dtype where it would cast a matrix product's rows: inside the operations, so
    that gradients come back in float32, and beside rows that have that dtype already, a queue's for one.
    """
    products = None
    for name, x in zip(names, (q, k)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: found {told(x)}, wanted a tensor of two dimensions (rows, features)")
        check_dense(name, x)
        shape = x.shape
        if len(shape) != 2:
            wanted = "a tensor of two dimensions (rows, features)"
            raise ValueError(f"{name}: found {tuple(shape)}, wanted {wanted}")
        if x.dtype not in FLOATS:
            raise ValueError(f"{name}: found {x.dtype}, wanted float64, float32, float16 or bfloat16")
        if min(shape) == 0:
            raise ValueError(f"{name}: found shape {tuple(shape)}, wanted at least one row and one feature")
    check_is_somewhere(names[0], q)
    if torch.float32 in (q.dtype, k.dtype) and torch.is_autocast_enabled(q.device.type):
        products = torch.get_autocast_dtype(q.device.type)
        q, k = (x.float() if x.dtype == products and (x is q or x.requires_grad) else x for x in (q, k))
    if k.device != q.device:
        raise ValueError(f"{names[1]}: device {k.device}, wanted {q.device} as {names[0]}")
    if k.dtype != q.dtype and k.dtype != products:
        raise ValueError(f"{names[1]}: dtype {k.dtype}, wanted {q.dtype} as {names[0]}")
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"{names[1]}: {k.shape[1]} features a row, wanted {q.shape[1]} as {names[0]}")
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    check_temperature(temperature, q.device)
    return q, k, as_scalar(temperature, accumulate), products


def normalized(q, k, products):
    """(q, k, dtype of products) for normalize=True: unit rows in float32, or float64.

    The operations cast them for the products, as under autocast. So half rows are still multiplied in their
    own dtype, while the gradient that goes through the division by the lengths is float32.
    """
    if products is None and q.dtype.itemsize == 2:
        products = q.dtype
    unit_q = unit_rows(q)
    return unit_q, unit_q if k is q else unit_rows(k), products


def unit_rows(x):
    return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=1)


def in_dtype(products, *rows):
    """The rows as eager multiplies them."""
    return rows if products is None else [x.to(products) for x in rows]


def as_scalar(x, dtype):
    """A 0-dim tensor. A given one is on the device, read there: a learned one costs no synchronisation."""
    if isinstance(x, Tensor):
        return x.to(dtype)
    return torch.full((), x, dtype=dtype)  # on the CPU: a kernel takes it as a number, unlaunched
