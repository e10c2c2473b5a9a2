"""prepare(): check, cast, normalise and mask the arguments of an operation, and choose who computes it.

Every public function of similarities calls prepare(). The Call that it returns flows down unchanged.
similarity_lse and similarity_topk are here; the losses are in losses.py.
"""
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import eager, fused
from .checks import check_flag, check_inputs, check_integer
from .heuristics import TOPK_SLOTS, choose_impl
from .masks import Mask, is_symmetric, make_mask
from .replay import replayed, without_compile


class Call(NamedTuple):
    """The checked arguments of an operation."""
    q: Any               # (N, D) rows
    k: Any               # (M, D) rows; None: compare the rows of q with each other, under a symmetric mask
    temperature: Any     # 0-dim tensor, float32 (float64 for float64); on the CPU if it was a number
    mask: Mask
    impl: str            # "triton", "blockwise" or "eager"
    product_dtype: Any   # dtype in which q·k is computed: autocast's dtype, or that of the rows

    @property
    def keys(self):
        """The rows that q is compared with: k, or q itself."""
        return self.q if self.k is None else self.k

    @property
    def needs(self):
        """Whether q, k and temperature need a gradient."""
        grad = torch.is_grad_enabled()
        return [grad and x is not None and x.requires_grad for x in (self.q, self.k, self.temperature)]

    @property
    def operands(self):
        """q and k in product_dtype; k stays None for self-similarity.

        Views that PyTorch negates as it reads them are written out, because kernels read raw memory.
        """
        return [None if x is None else x.resolve_neg().to(self.product_dtype) for x in (self.q, self.k)]


def prepare(q, k, temperature, *, mask=None, exclude=None, within=None, similar=None, offset=0,
            positives=False, names=("q", "k"), normalize=False, impl="auto"):
    """Return the Call for the arguments of a public function; raise ValueError if one does not fit.

    k          None, which a loss with positives does not take: compare the rows of q with each other
    mask       a Mask that the loss has made; None: made from exclude, within, similar and offset
    positives  True: row i of q has the positive k_{i + offset}, which must exist
    names      names of q and k in messages
    """
    self_similarity = k is None and not positives
    k = q if self_similarity else k
    check_inputs(q, k, names, temperature, offset if exclude == "diagonal" else None, positives)
    check_flag("normalize", normalize)
    if mask is None:
        mask = make_mask(len(q), len(k), self_similarity, exclude, within, similar, offset)
    product_dtype = q.dtype
    if torch.float32 in (q.dtype, k.dtype) and torch.is_autocast_enabled(q.device.type):
        product_dtype = torch.get_autocast_dtype(q.device.type)
        # half rows with a gradient become float32, so that their gradient does too
        q, k = (x.float() if x.dtype == product_dtype and (x is q or x.requires_grad) else x for x in (q, k))
    impl = choose_impl(impl, q, len(q), len(k), product_dtype)
    accumulation_dtype = torch.promote_types(q.dtype, torch.float32)
    if normalize:
        q, k = unit_rows(q), q if self_similarity else unit_rows(k)
    k = None if self_similarity and is_symmetric(mask) else q if self_similarity else k
    return Call(q, k, as_scalar(temperature, accumulation_dtype), mask, impl, product_dtype)


def unit_rows(x):
    """Return the rows of x divided by their norms, in float32 (float64 for float64)."""
    return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=1)


def as_scalar(x, dtype):
    """Return x as a 0-dim tensor: a tensor stays on its device, a number becomes a tensor on the CPU.

    Kernels read a tensor on the GPU without a synchronisation.
    """
    return x.to(dtype) if isinstance(x, Tensor) else torch.full((), float(x), dtype=dtype)


@replayed
def similarity_lse(q, k=None, temperature=1.0, *, exclude=None, within=None, similar=None, offset=0,
                   normalize=False, impl="auto"):
    """Return log Σ_j exp(q_i·k_j / τ) for each row i; the (N, M) matrix is never stored.

    q            (N, D) float64 | float32 | float16 | bfloat16, any strides (no float64 in Triton)
    k            (M, D) same dtype and device as q; None: compare the rows of q with each other
    temperature  float > 0, from 1e-38 to 1e38, so that float32 can hold τ and 1/τ; or a 0-dim tensor, which
                 then receives a gradient. The value of a tensor on a GPU is not checked
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
    impl         "auto" (choose_impl) | "triton" | "blockwise" | "eager"
    returns      (N,) float32 (float64 for float64), differentiable in q, k, temperature; -inf with gradient 0
                 for a row without columns
    raises       RuntimeError for create_graph=True (second derivatives), forward mode and torch.func;
                 impl="eager" supports them. torch.compile breaks the graph here unless impl="eager", so
                 fullgraph=True fails
    precision    products of half types are exact; float32 follows torch.get_float32_matmul_precision(); sums
                 are in float32. Gradients are as accurate as those of eager for logits of any size (in Triton
                 up to 1e9), because a row's maximum and its sum of exponentials are kept as two numbers. A
                 NaN in a query does not reach the gradients of other queries. Under torch.autocast, float32
                 rows are multiplied in autocast's dtype, and their gradients stay in float32
    memory       beside inputs and gradients, at most float32 copies of them, O((N + M)·D), and 160 MiB, or
                 544 MiB if a loss computes its gradient in forward; WEIGHT_BUFFER_BYTES and STRIP_BYTES in
                 kernels.heuristics may be set lower. On a GPU, the first call of a loss with new shapes takes
                 up to 512 MiB more for a moment (replay.py). blockwise: 64 MiB, or 32 rows of logits if more;
                 eager: O(N·M)
    source       van den Oord et al. 2018, eq. 4
    """
    call = prepare(q, k, temperature, exclude=exclude, within=within, similar=similar, offset=offset,
                   normalize=normalize, impl=impl)
    return eager.similarity_lse(call) if call.impl == "eager" else fused.similarity_lse(call)


@without_compile
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
    call = prepare(q, k, 1.0, exclude=exclude, within=within, similar=similar, offset=offset,
                   normalize=normalize, impl=impl)
    check_integer("n", n, 1, len(call.keys), f"from 1 to the {len(call.keys)} rows of k")
    if call.impl == "eager":
        return eager.similarity_topk(call, n)
    if n > TOPK_SLOTS:
        call = call._replace(impl="blockwise")
    return fused.similarity_topk(call, n)
