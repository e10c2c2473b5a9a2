"""The cases of the benchmark: inputs, and each loss as a function, in this package and in other packages."""
import math
import os

import torch
import torch.nn.functional as F

import kernels

TAU = 0.05
# FLOP of the fewest matrix products that are known to suffice for a loss and its gradients, in units of N·M·D
# (the dot products of all pairs take 2). nt_xent and sup_con_loss need fewer: their logits are symmetric.
MIN_FLOP = {"nt_xent": 4, "clip_loss": 6, "info_nce": 6, "queue_loss": 4, "linear_cross_entropy": 6,
            "sigmoid_loss": 6, "sup_con_loss": 4}
# implementation of another package → its name on PyPI
PEERS = {"memeff": "memeff", "Inf-CL": "inf-cl", "CCE": "cut-cross-entropy", "Liger": "liger-kernel",
         "siglip-kernel": "siglip-kernel", "Liger-scaled": "liger-kernel", "QuACK": "quack-kernels"}
OURS = ["eager", "blockwise", "triton", "auto"]                # values of the argument impl
IMPLS = ["eager", "compile", "blockwise", "triton", "torch", *PEERS, "auto"]


def make_inputs(loss, size, dtype, device, trained):
    """Return (q, k, targets) of a case. q (N, D) and k (M, D) are unit vectors and require a gradient. For
    queue_loss, k is the queue followed by the N positives, and requires no gradient.

    size       (N, M, D)
    trained    make row i of q and its positive so similar that the mean loss is about 5e-3; False: random
               rows
    """
    n, m, d = size

    def seeded(seed):
        return dict(device=device, generator=torch.Generator(device).manual_seed(seed))

    def unit_rows(count, seed):
        return F.normalize(torch.randn(count, d, **seeded(seed)), dim=1)

    q, extra = unit_rows(n, 0), n if loss == "queue_loss" else 0
    k = unit_rows(m + extra, 1)
    if trained:  # the cosine for which (log Σ exp over M random rows) − positive logit = log 5e-3
        cosine = TAU * (math.log(m) + 1 / (2 * d * TAU ** 2) - math.log(5e-3))
        noise = k[-n:] - (k[-n:] * q).sum(1, keepdim=True) * q
        k[-n:] = cosine * q + (1 - cosine ** 2) ** 0.5 * F.normalize(noise, dim=1)
    targets = torch.randint(m, (n,), **seeded(2))
    if loss != "linear_cross_entropy":
        targets = torch.arange(n, device=device)
    return q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_(loss != "queue_loss"), targets


def loss_function(loss, impl):
    """Return the loss as a function (q, k, targets) → scalar; None if the implementation does not have it."""
    if impl == "compile":
        return torch.compile(our_loss(loss, "eager"), dynamic=False)
    return our_loss(loss, impl) if impl in OURS else peer_loss(loss, impl)


def our_loss(loss, impl):
    """Return a loss of this package as a function (q, k, targets) → scalar."""
    f = getattr(kernels, loss)
    if loss == "linear_cross_entropy":
        return lambda q, k, targets: f(q, k, targets, impl=impl)
    if loss == "queue_loss":  # k is the queue, followed by the positives
        return lambda q, k, targets: f(q, k[-len(q):], k[:-len(q)], TAU, impl=impl)
    if loss == "nt_xent":
        return lambda q, k, targets: f(q[:len(q) // 2], k[:len(q) // 2], TAU, impl=impl)
    if loss == "sup_con_loss":  # two samples for each label
        def supervised(q, k, targets):
            z = stack_views(q, k).unflatten(0, (2, -1)).transpose(0, 1)
            return f(z, torch.arange(len(z), device=z.device) // 2, TAU, TAU, impl=impl)
        return supervised
    return lambda q, k, targets: f(q, k, TAU, impl=impl)


def peer_loss(loss, impl):
    """Return a loss of another package, called as its documentation says, as a function (q, k, targets) →
    scalar; None if the package does not have this loss."""
    if impl == "memeff" and loss in ("clip_loss", "nt_xent"):
        from memeff import MemoryEfficientCLIPLoss
        f = MemoryEfficientCLIPLoss(temperature=TAU, normalized_inputs=True, stable=False)
        if loss == "clip_loss":
            return lambda q, k, targets: f(q, k)

        def of_views(q, k, targets):
            z = stack_views(q, k)
            return f(z, z.roll(len(z) // 2, 0))
        return of_views
    if impl == "siglip-kernel" and loss in ("clip_loss", "sigmoid_loss"):
        from siglip_kernel import fused_siglip_loss
        device = "cuda" if torch.cuda.is_available() else "cpu"
        scale, bias = (torch.tensor(x, device=device) for x in (math.log(1 / TAU), -10.0))
        return lambda q, k, targets: fused_siglip_loss(q, k, scale, bias)
    one_sided = peer_cross_entropy(loss, impl)
    if one_sided is None or loss in ("queue_loss", "sigmoid_loss", "sup_con_loss"):
        return None
    if loss == "clip_loss":
        return lambda q, k, targets: (one_sided(q, k, targets) + one_sided(k, q, targets)) / 2
    if loss == "nt_xent":
        def self_similarity(q, k, targets):
            z = stack_views(q, k)
            return one_sided(z, z, targets.roll(len(z) // 2))
        return self_similarity
    return one_sided


def peer_cross_entropy(loss, impl):
    """Return another package's cross entropy of q·kᵀ / τ over rows, (q, k, targets) → scalar, or None. τ is
    1 for linear_cross_entropy, else TAU."""
    tau = 1.0 if loss == "linear_cross_entropy" else TAU
    if impl == "torch" and hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions()
        return lambda q, k, targets: F.linear_cross_entropy(q / tau, k, targets, options=options)
    if impl == "CCE":
        from cut_cross_entropy import linear_cross_entropy
        return lambda q, k, targets: linear_cross_entropy(q / tau, k, targets, filter_eps=None)
    if impl == "Inf-CL":
        from inf_cl import cal_flash_loss

        def inf_cl_loss(q, k, targets):
            return cal_flash_loss(q, k, targets, 1 / tau, head_dim=min(256, q.shape[1])).mean()
        return inf_cl_loss
    if impl == "QuACK":  # from Hopper on; it needs NVIDIA's CUTLASS DSL
        from quack.linear_cross_entropy import chunked_linear_cross_entropy
        return lambda q, k, targets: chunked_linear_cross_entropy(q / tau, k, targets)
    if impl == "Liger-scaled":  # for bfloat16 on Hopper only; it needs NVIDIA's CUTLASS DSL
        from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Liger
        return lambda q, k, targets: Liger.apply(q, k, targets, tau).mean()
    if impl == "Liger":
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
        return lambda q, k, targets: LigerFusedLinearCrossEntropyLoss()(k, q / tau, targets)
    return None


def stack_views(q, k):
    """Return the N rows that nt_xent and sup_con_loss compare with each other: two views of N / 2 samples."""
    return torch.cat([q[:len(q) // 2], k[:len(q) // 2]])


def is_interpreted(impl):
    """Return whether Triton's interpreter replaces the GPU: results are correct, times are meaningless."""
    return impl in ("triton", *PEERS) and os.environ.get("TRITON_INTERPRET") == "1"


def is_related_loss(loss, impl):
    """Return whether the implementation computes a slightly different loss with as many products, so that
    only its time is comparable. For nt_xent, other packages do not exclude a row's similarity to itself."""
    return impl == "siglip-kernel" and loss == "clip_loss" or loss == "nt_xent" and impl in ("torch", *PEERS)
