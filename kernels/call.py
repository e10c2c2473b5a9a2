"""prepare(): check, cast and normalise the arguments of an operation, and choose its implementation.

The losses call prepare(), which returns a Call. They pass it to the module Call.ops: eager.py, fused.py or
ring.py. The last two get values and gradients from blockwise.py or gpu/. This file also has similarity_lse
and similarity_topk. These two check the arguments of their masks, and then call make_call().
"""
import importlib.util
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import blockwise, eager, fused, ring
from .checks import IMPLS, check_choice, check_flag, check_inputs, check_integer, describe
from .eager import cast
from .masks import Mask, make_mask
from .ring import RingRows

HAS_TRITON = importlib.util.find_spec("triton") is not None
# For at most this many logits (N·M), "auto" selects "eager". On a GPU, launching kernels then takes longer
# than computing. The GPU limit is an estimate; it was not measured.
EAGER_LOGITS, EAGER_LOGITS_ON_GPU = 2 ** 18, 2 ** 24


class Call(NamedTuple):
    """The checked arguments of an operation."""
    q: Any               # (N, D) queries
    k: Any               # (M, D) keys; None: the keys are the rows of q, and the mask is symmetric
    temperature: Any     # 0-dim tensor, float32 (float64 for float64 rows); on the CPU if given as a number
    mask: Mask
    impl: str            # "triton", "blockwise" or "eager"
    product_dtype: Any   # dtype to which q and k are cast before q·kᵀ: autocast's dtype or the dtype of q
    ring: Any = None     # RingRows if the keys lie on all processes; k then has only this process's keys

    @property
    def keys(self):
        """The rows that q is compared with: k, or q if k is None."""
        return self.q if self.k is None else self.k

    @property
    def needs(self):
        """Three flags: whether q, k and temperature need a gradient."""
        grad = torch.is_grad_enabled()
        return [grad and x is not None and x.requires_grad for x in (self.q, self.k, self.temperature)]

    @property
    def rounded(self):
        """This call with q and k in product_dtype.

        resolve_neg() copies lazily negated views such as x.conj().imag, because kernels read raw memory.
        """
        q, k = cast(self.q.resolve_neg(), self.product_dtype), self.k
        if k is not None:
            k = cast(k.resolve_neg(), self.product_dtype)
        return self if q is self.q and k is self.k else self._replace(q=q, k=k)

    @property
    def ops(self):
        """The module that computes this call with autograd: ring, eager or fused."""
        if self.ring:
            return ring
        return eager if self.impl == "eager" else fused

    @property
    def compute(self):
        """The module that computes values and gradients for fused.py and ring.py: blockwise or gpu."""
        if self.impl == "blockwise":
            return blockwise
        from . import gpu  # this import needs Triton
        gpu.check_device(self.q)
        return gpu


def prepare(q, k, temperature, mask, *, positives=False, names=("q", "k"), normalize=False, impl="auto",
            columns=None, others=()):
    """Return the Call for the arguments of a public function; raise ValueError for an invalid argument.

    k          (M, D) keys; None: the keys are the rows of q. With positives=True, None is invalid
    mask       the Mask. Its offset is checked here if positives=True and mask.exclude is "diagonal"
    positives  True: the positive of query i is key i + offset, and this key must exist
    names      names of q and k in error messages
    columns    number of columns of the logits; None: the number of keys
    others     (RingRows,) if k may be an object of this class
    """
    check_inputs(q, q if k is None and not positives else k, names, temperature,
                 mask.offset if positives and mask.exclude == "diagonal" else None, others)
    return make_call(q, k, temperature, mask, normalize, impl, columns)


def make_call(q, k, temperature, mask, normalize, impl, columns=None):
    """Return the Call for arguments that are checked, except for normalize and impl."""
    check_flag("normalize", normalize)
    for x in mask:
        if isinstance(x, Tensor) and x.device != q.device:
            raise ValueError(f"exclude, within, similar: found a tensor on {x.device}, expected {q.device}")
    self_similarity, of_all = k is None, k if isinstance(k, RingRows) else None
    k, product_dtype = q if self_similarity else of_all.own if of_all else k, q.dtype
    if torch.float32 in (q.dtype, k.dtype) and torch.is_autocast_enabled(q.device.type):
        product_dtype = torch.get_autocast_dtype(q.device.type)
        # Cast half rows to float32, so that gradients are float32. A half k without gradient stays half.
        q, k = (x.float() if x.dtype == product_dtype and (x is q or x.requires_grad) else x for x in (q, k))
    impl = choose_impl(impl, q, *() if of_all else (len(q), columns or len(k)))
    if of_all and impl == "eager":
        raise ValueError("impl: found 'eager', which needs all keys; with ring_rows, use 'auto'")
    accumulation_dtype = torch.promote_types(q.dtype, torch.float32)
    if normalize:
        q, k = unit_rows(q), k if self_similarity else unit_rows(k)
    if self_similarity:
        k = None if mask.is_symmetric else q
    return Call(q, k, as_scalar(temperature, accumulation_dtype), mask, impl, product_dtype,
                of_all and replace(of_all, own=k.new_empty(0)))       # the rows are in k, so own can be empty


def choose_impl(impl, x, n=None, m=None):
    """Return the implementation for the tensor x: the choice of "auto", or impl itself if it is not "auto".

    "auto" selects "eager" for a matrix of at most 2²⁴ logits on a GPU (4096 × 4096) and 2¹⁸ on a CPU. For a
    larger matrix it selects "triton" on a GPU with Triton, except for float64, and "blockwise" otherwise.
    n, m    shape of the matrix of logits; None: a large matrix
    """
    check_choice("impl", impl, *IMPLS)
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"x: found {describe(x)}, expected a tensor")
    if impl == "auto":
        if n is not None and n * m <= (EAGER_LOGITS_ON_GPU if x.is_cuda else EAGER_LOGITS):
            return "eager"
        return "triton" if x.is_cuda and HAS_TRITON and x.dtype != torch.float64 else "blockwise"
    if impl == "triton":
        if not HAS_TRITON:
            raise ValueError("impl: 'triton' needs the package triton, which is not installed; "
                             "use 'blockwise'")
        if x.dtype == torch.float64:
            raise ValueError("impl: 'triton' does not support float64; use 'blockwise' or 'eager'")
    return impl


def unit_rows(x):
    """Divide each row of x by its norm; the result is float32 (float64 for float64 rows)."""
    return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=1)


def as_scalar(x, dtype):
    """Return x as a 0-dim tensor: a tensor stays on its device, a number becomes a tensor on the CPU.

    Triton kernels read a tensor on the GPU themselves, so the host does not wait for its value.
    """
    return x.to(dtype) if isinstance(x, Tensor) else torch.full((), float(x), dtype=dtype, device="cpu")


def similarity_lse(q, k=None, temperature=1.0, *, exclude=None, within=None, similar=None, offset=0,
                   normalize=False, impl="auto"):
    """Return log Σ_j exp(q_i·k_j / τ) for each query i; only "eager" stores a large (N, M) matrix.

    q            (N, D) queries, float64 | float32 | float16 | bfloat16, any strides; Triton takes no float64
    k            (M, D) keys (dtype and device as q), or from ring_rows; None: the keys are the rows of q
    temperature  τ: float from 1e-38 to 1e38, so that float32 can hold τ and 1/τ; or a 0-dim tensor, which
                 then receives a gradient. The value of a tensor on a GPU is not checked
    exclude      keys left out of the sum of query i, one of: None | "diagonal" (key i + offset)
                 | "pair" (keys i and i ± N/2; only if k is None)
                 | (query ids (N,), key ids (M,)) integers: keys with the id of query i
                 | ("diagonal", query ids, key ids): key i + offset, and keys with the id of query i
    within       (query ids (N,), key ids (M,)) integers: sum only over keys with the id of query i
    similar      (features f_q (N, E), features f_k (M, E), threshold phi): query i leaves out key j if
                 f_q_i·f_k_j ≥ phi. The features get no gradient
    offset       index of this rank's first row in the batch of all ranks, own_rows(batch_size).start
    normalize    True: first divide the rows of q and k (not of f_q and f_k) by their norms, in float32
                 (float64 for float64 rows). The dtype of the products stays the same. As in F.normalize, a
                 norm below 1e-12 counts as 1e-12: a zero row has cosine 0 with every row, and a gradient of
                 about 1e12. A float32 norm above 1.8e19 overflows: the row becomes 0
    impl         "auto" (see choose_impl) | "triton" | "blockwise" | "eager"
    returns      (N,) float32 (float64 for float64 rows), differentiable with respect to q, k and temperature.
                 A query for which all keys are left out gets -inf, with gradient 0
    raises       RuntimeError for second derivatives (create_graph=True), forward mode and torch.func. "eager"
                 supports all three, but with half-type products only second derivatives. torch.compile
                 traces only "eager"; the others cause a graph break
    precision    float32 products follow torch.get_float32_matmul_precision(). Products of half-type rows are
                 exact; in backward, GPUs round softmax weights to the half type. Sums are float32 (for
                 float64 rows float64). For logits of any size (Triton: up to 1e9), gradients are as accurate
                 as in "eager". If k is given, a NaN in a query does not reach the gradients of other queries.
                 Under torch.autocast, float32 rows are multiplied in autocast's dtype; gradients are float32
    memory       inputs and gradients, at most one float32 copy of each, and buffers. In Triton, buffers take
                 160 MiB, or 544 MiB if a loss computes its gradient in forward. To use less, lower
                 WEIGHT_BUFFER_BYTES and STRIP_BYTES in kernels.gpu.heuristics. In "blockwise", float32
                 buffers take up to 144 MiB, or 288 rows of logits if more (with similar: 224 MiB, 448 rows).
                 "eager" stores 3 to 5 (N, M) matrices: 200 to 310 MB for 4096 × 4096 float32 logits
    source       van den Oord et al. 2018, eq. 4
    """
    keys = q if k is None else k
    check_inputs(q, keys, ("q", "k"), temperature, others=(RingRows,))
    if isinstance(k, RingRows) and similar is not None:
        raise ValueError("similar: not supported with ring_rows; gather the keys with gather_rows")
    mask = make_mask(len(q), len(keys), k is None, exclude, within, similar, offset)
    call = make_call(q, k, temperature, mask, normalize, impl)
    return call.ops.similarity_lse(call)


@torch.no_grad()
def similarity_topk(q, k, n, *, exclude=None, within=None, similar=None, offset=0, normalize=False,
                    impl="auto"):
    """Return the n keys with the largest q_i·k_j for each query i; only "eager" stores a large (N, M) matrix.

    q, k         as in similarity_lse; with k=None, each row is also compared with itself, unless excluded
    n            number of keys, from 1 to M. For n > 64 (slots of the kernel), "triton" runs "blockwise"
    exclude, within, similar, offset    as in similarity_lse
    normalize    as in similarity_lse; True finds the keys with the largest cosine
    impl         as in similarity_lse
    returns      two (N, n) tensors without gradient: dot products, float32 (float64 for float64 rows), and
                 indices of keys, int64. The largest comes first; NaN counts as the largest. Equal products
                 come in any order. If a query has fewer than n keys, other entries are -inf with index -1
    memory       inputs, at most a float32 copy of each, O(N·n + M) numbers, a constant buffer; "eager" O(N·M)
    """
    keys = q if k is None else k
    check_inputs(q, keys, ("q", "k"))
    mask = make_mask(len(q), len(keys), k is None, exclude, within, similar, offset)
    call = make_call(q, k, 1.0, mask, normalize, impl)
    check_integer("n", n, 1, len(keys), f"from 1 to the {len(keys)} rows of k")
    return call.ops.similarity_topk(call, n)
