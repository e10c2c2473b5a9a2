"""similarity_lse, similarity_topk and the shared softmax loss: check arguments and choose the implementation.

Every softmax loss of similarities compares a log-sum-exp, its only O(N·M) part, with one positive.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from . import eager, ops  # ops registers the operations of torch.ops.tencl
from .checks import (
    FLOATS,
    check_dense,
    check_flag,
    check_integer,
    check_not_meta,
    check_temperature,
    describe,
)
from .heuristics import TOPK_SLOTS, choose_impl, uses_frozen_keys_op
from .masks import is_symmetric, make_mask


def similarity_lse(q, k=None, temperature=1.0, *, exclude=None, within=None, similar=None, offset=0,
                   normalize=False, impl="auto"):
    """Return log Σ_j exp(q_i·k_j / τ) for each row i; the (N, M) matrix is never stored.

    q            (N, D) float64 | float32 | float16 | bfloat16, any strides (no float64 in Triton)
    k            (M, D) same dtype and device as q; None: compare the rows of q with each other
    temperature  float > 0, from 1e-38 to 1e38, so that float32 can hold τ and 1/τ; or a 0-dim tensor, which
                 then receives a gradient and whose value is not checked
    exclude      columns left out of each row's sum: None | "diagonal" (j = i + offset)
                 | "pair" (the two columns j = i and j = i ± N/2; k is None)
                 | (row ids (N,), column ids (M,)) integers: columns with the row's id
                 | ("diagonal", row ids, column ids): both
    within       (row ids, column ids) integers: each row keeps only columns with its id. If both are sorted
                 (packed sequences), the cost is proportional to the pairs that are kept; this saving exists
                 in Triton for half types, and in blockwise on the CPU
    similar      (f_q (N, E), f_k (M, E), phi): exclude columns with f_q_i·f_k_j ≥ phi; f gets no gradient
    offset       this rank's first row in the gathered batch, own_rows(batch_size).start; 0 in one process
    normalize    True: divide the rows of q and k by their norms first, as F.normalize does, in float32
                 (float64 for float64); the features of similar are not normalised. The products are computed
                 in the same dtype as without normalize. A zero row has cosine 0 with every row. As in
                 F.normalize, a norm below 1e-12 counts as 1e-12, so the gradient of a zero row is about
                 1e12 (infinite in float16). A norm above 1.8e19 overflows, so that the row becomes a zero row
    impl         "auto" (Triton on CUDA if N·M > 2²², else blockwise) | "triton" | "blockwise" | "eager"
    returns      (N,) float32 (float64 for float64), differentiable in q, k, temperature; -inf with gradient 0
                 for a row without columns
    raises       RuntimeError for a second derivative, forward mode and torch.func; impl="eager" supports them
    precision    products of half types are exact; float32 follows torch.get_float32_matmul_precision(); sums
                 are in float32. Gradients are as accurate as those of eager for logits of any size (in Triton
                 up to 1e9), because a row's maximum and its sum of exponentials are kept as two numbers. A
                 NaN in a query does not reach the gradients of other queries. Under torch.autocast, float32
                 rows are multiplied in autocast's dtype, and their gradients stay in float32
    memory       beside inputs and gradients, at most float32 copies of them, O((N + M)·D), and 160 MiB, or
                 544 MiB if a loss computes its gradient in forward; WEIGHT_BUFFER_BYTES and STRIP_BYTES in
                 kernels.heuristics may be set lower. blockwise: 64 MiB, or 32 rows of logits if more;
                 eager: O(N·M). A small matrix is stored, in at most 64 MiB: N·M ≤ 2²² on CUDA, 2¹⁸ elsewhere
    source       van den Oord et al. 2018, eq. 4
    """
    self_similarity = k is None
    q, k, temperature, product_dtype = prepare_inputs(q, q if self_similarity else k, temperature)
    check_flag("normalize", normalize)
    mask = make_mask(q, k, self_similarity, exclude, within, similar, offset)
    impl = choose_impl(impl, q, q.shape[0], k.shape[0])
    if normalize:
        q, k, product_dtype = normalize_rows(q, k, product_dtype)
    if impl == "eager":
        return eager.similarity_lse(*cast_rows(product_dtype, q, k), temperature, mask)
    k = None if self_similarity and is_symmetric(mask) else k
    return fused_lse(q, k, temperature, mask, impl, product_dtype)


def fused_lse(q, k, temperature, mask, impl, product_dtype):
    """Return similarity_lse of checked arguments; k None: self-similarity under a symmetric mask.

    Keys that need no gradient (a queue, a frozen tower) use a cheaper operation.
    """
    frozen_keys = torch.is_grad_enabled() and (q.requires_grad or temperature.requires_grad)
    frozen_keys = frozen_keys and k is not None and not k.requires_grad
    if frozen_keys and uses_frozen_keys_op(q, impl, product_dtype):
        return ops.call_op(ops.frozen_keys, q, k, temperature, *mask, impl, product_dtype)[0]
    return ops.call_op(ops.lse, q, k, temperature, *mask, impl, product_dtype)[0]


@torch.no_grad()
def similarity_topk(q, k, n, *, exclude=None, within=None, similar=None, offset=0, normalize=False,
                    impl="auto"):
    """Return the n columns with the largest q_i·k_j for each row i, largest first, without the (N, M) matrix.

    q, k         as in similarity_lse; k None: compare the rows of q with each other (each row is its own
                 neighbour unless exclude="diagonal")
    n            1 ≤ n ≤ M; the Triton kernel has slots for 64 columns, so above that blockwise is used
    exclude, within, similar, offset, normalize    as in similarity_lse; normalize=True: nearest by cosine
    impl         as in similarity_lse
    returns      (products (N, n) float32, or float64 for float64; columns (N, n) int64), without gradient.
                 If a row has fewer than n columns, the rest is (-inf, -1). Equal products come in any order.
                 A NaN product, from a NaN in a row or a column, counts as the largest
    memory       O(N·n + M) beside the inputs, and a constant buffer; eager O(N·M)
    """
    self_similarity = k is None
    q, k, one, product_dtype = prepare_inputs(q, q if self_similarity else k, 1.0)
    check_flag("normalize", normalize)
    mask = make_mask(q, k, self_similarity, exclude, within, similar, offset)
    check_integer("n", n, 1, len(k), f"from 1 to the {len(k)} rows of k")
    impl = choose_impl(impl, q, q.shape[0], k.shape[0])
    if normalize:
        q, k, product_dtype = normalize_rows(q, k, product_dtype)
    if impl == "eager":
        return eager.similarity_topk(*cast_rows(product_dtype, q, k), one, n, mask)
    if n > TOPK_SLOTS:
        impl = "blockwise"
    return ops.call_op(ops.topk, q, k, one, n, *mask, impl, product_dtype)


def softmax_loss(q, k, temperature, mask, impl, product_dtype, both=False, weights=None):
    """Return the cross entropy Σ_i w_i softplus(lse_i − q_i·k_p/τ), a scalar, for checked arguments.

    k        None: self-similarity under a symmetric mask
    mask     excludes the positive p of each row from lse. This costs nothing and keeps the gradient accurate
             when the loss is small: its coefficient is σ(lse − positive), not a difference such as 1 − 0.999
    both     True: the mean of the row-softmax loss (one softmax per row i, dim=1) and the column-softmax loss
             (one per column j, dim=0), as in CLIP
    weights  w (N,) in [0, 1]; None: 1/N
    """
    grad = torch.is_grad_enabled()
    needs = [grad and x is not None and x.requires_grad for x in (q, k, temperature)]
    arguments = q, k, temperature, weights, both, *mask, impl, product_dtype, *needs
    return ops.call_op(ops.softmax_loss, *arguments)[0]


def prepare_inputs(q, k, temperature, names=("q", "k")):
    """Return (q, k, temperature as a 0-dim tensor, product_dtype); raise ValueError if they do not fit.

    product_dtype is autocast's dtype if autocast would cast the operands of a matrix product. Else it is
    None, which means the dtype of the rows. The operations cast the rows, so that gradients come back in
    float32. Rows that already have autocast's dtype, such as a queue, may be combined with float32 rows.
    """
    product_dtype = None
    for name, x in zip(names, (q, k)):
        expected = "a tensor of two dimensions (rows, features)"
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: found {describe(x)}, expected {expected}")
        check_dense(name, x)
        shape = x.shape
        if len(shape) != 2:
            raise ValueError(f"{name}: found {tuple(shape)}, expected {expected}")
        if x.dtype not in FLOATS:
            raise ValueError(f"{name}: found {x.dtype}, expected float64, float32, float16 or bfloat16")
        if min(shape) == 0:
            raise ValueError(f"{name}: found shape {tuple(shape)}, expected at least one row and one feature")
    check_not_meta(names[0], q)
    if torch.float32 in (q.dtype, k.dtype) and torch.is_autocast_enabled(q.device.type):
        product_dtype = torch.get_autocast_dtype(q.device.type)
        q, k = (x.float() if x.dtype == product_dtype and (x is q or x.requires_grad) else x for x in (q, k))
    if k.device != q.device:
        raise ValueError(f"{names[1]}: device {k.device}, expected {q.device} like {names[0]}")
    if k.dtype != q.dtype and k.dtype != product_dtype:
        raise ValueError(f"{names[1]}: dtype {k.dtype}, expected {q.dtype} like {names[0]}")
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"{names[1]}: {k.shape[1]} features per row, expected {q.shape[1]} like {names[0]}")
    accumulation_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    check_temperature(temperature, q.device)
    return q, k, as_scalar(temperature, accumulation_dtype), product_dtype


def normalize_rows(q, k, product_dtype):
    """Return (q, k, product_dtype) for normalize=True, with unit rows in float32 (float64 for float64).

    The operations cast them for the products, as under autocast. So half rows are still multiplied in their
    own dtype, while the gradient through the division by the norms is float32.
    """
    if product_dtype is None and q.dtype.itemsize == 2:
        product_dtype = q.dtype
    unit_q = unit_rows(q)
    return unit_q, unit_q if k is q else unit_rows(k), product_dtype


def unit_rows(x):
    """Return the rows of x divided by their norms, in float32 (float64 for float64)."""
    return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=1)


def cast_rows(product_dtype, *rows):
    """Cast the rows to product_dtype for the eager implementation; None leaves them unchanged."""
    return rows if product_dtype is None else [x.to(product_dtype) for x in rows]


def as_scalar(x, dtype):
    """Return x as a 0-dim tensor: a tensor stays on its device, a number becomes a tensor on the CPU.

    Kernels read a tensor on the GPU without a synchronisation.
    """
    if isinstance(x, Tensor):
        return x.to(dtype)
    return torch.full((), x, dtype=dtype)  # on the CPU: passed to a kernel as a number, without a launch
