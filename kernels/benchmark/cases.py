"""What the benchmark runs: the rows of a case, and each loss by this package and by its peers."""
import math
import os

import torch
import torch.nn.functional as F

import kernels

TAU = 0.05
# multiplications of the fewest products known, in N·M·D (one product of all pairs is 2); nt_xent's two views
# are one set, and so are sup_con_loss's
PRODUCTS = {"nt_xent": 4, "clip_loss": 6, "info_nce": 6, "queue_loss": 4, "linear_cross_entropy": 6,
            "sigmoid_loss": 6, "sup_con_loss": 4}
PEERS = {"memeff": "memeff", "Inf-CL": "inf-cl", "CCE": "cut-cross-entropy", "Liger": "liger-kernel",
         "siglip-kernel": "siglip-kernel", "Liger-scaled": "liger-kernel"}
IMPLS = ["eager", "compile", "blockwise", "triton", "torch", *PEERS]


def rows(loss, size, dtype, device, trained):
    """(q, k, targets) of a case: q and k require a gradient, a queue's rows do not."""
    n, m, d = size
    seeded = lambda seed: dict(device=device, generator=torch.Generator(device).manual_seed(seed))
    draw = lambda count, seed: F.normalize(torch.randn(count, d, **seeded(seed)), dim=1)
    q, extra = draw(n, 0), n if loss == "queue_loss" else 0
    k = draw(m + extra, 1)
    if trained:  # cosine at which log Σ over random rows − positive is log 5e-3
        cosine = TAU * (math.log(m) + 1 / (2 * d * TAU ** 2) - math.log(5e-3))
        noise = k[-n:] - (k[-n:] * q).sum(1, keepdim=True) * q
        k[-n:] = cosine * q + (1 - cosine ** 2) ** 0.5 * F.normalize(noise, dim=1)
    targets = torch.randint(m, (n,), **seeded(2))
    if loss != "linear_cross_entropy":
        targets = torch.arange(n, device=device)
    return q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_(loss != "queue_loss"), targets


def function(loss, impl):
    """loss(q, k, targets) by impl, None where it has none."""
    if impl == "compile":
        return torch.compile(ours(loss, "eager"), dynamic=False)
    return ours(loss, impl) if impl in ("eager", "blockwise", "triton") else peer(loss, impl)


def ours(loss, impl):
    """loss(q, k, targets) by this package."""
    f = getattr(kernels, loss)
    if loss == "linear_cross_entropy":
        return lambda q, k, targets: f(q, k, targets, impl=impl)
    if loss == "queue_loss":  # the positives are the rows after the queue
        return lambda q, k, targets: f(q, k[-len(q):], k[:-len(q)], TAU, impl=impl)
    if loss == "nt_xent":
        return lambda q, k, targets: f(q[:len(q) // 2], k[:len(q) // 2], TAU, impl=impl)
    if loss == "sup_con_loss":  # labels of two things each
        def of_views(q, k, targets):
            z = views(q, k).unflatten(0, (2, -1)).transpose(0, 1)
            return f(z, torch.arange(len(z), device=z.device) // 2, TAU, TAU, impl=impl)
        return of_views
    return lambda q, k, targets: f(q, k, TAU, impl=impl)


def peer(loss, impl):
    """loss(q, k, targets) by another package, as its documentation calls it; None where it has none."""
    tau, both = 1.0 if loss == "linear_cross_entropy" else TAU, loss == "clip_loss"
    one_sided = None
    if impl == "torch" and hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions()
        one_sided = lambda q, k, targets: F.linear_cross_entropy(q / tau, k, targets, options=options)
    elif impl == "CCE":
        from cut_cross_entropy import linear_cross_entropy
        one_sided = lambda q, k, targets: linear_cross_entropy(q / tau, k, targets, filter_eps=None)
    elif impl == "Inf-CL":
        from inf_cl import cal_flash_loss
        def one_sided(q, k, targets):
            return cal_flash_loss(q, k, targets, 1 / tau, head_dim=min(256, q.shape[1])).mean()
    elif impl == "Liger-scaled":  # its kernel is for bfloat16 on Hopper and wants NVIDIA's CUTLASS DSL
        from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Liger
        one_sided = lambda q, k, targets: Liger.apply(q, k, targets, tau).mean()
    elif impl == "Liger":
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
        one_sided = lambda q, k, targets: LigerFusedLinearCrossEntropyLoss()(k, q / tau, targets)
    elif impl == "memeff" and loss in ("clip_loss", "nt_xent"):
        from memeff import MemoryEfficientCLIPLoss
        f = MemoryEfficientCLIPLoss(temperature=TAU, normalized_inputs=True, stable=False)
        return lambda q, k, targets: f(q, k) if both else f(z := views(q, k), z.roll(len(z) // 2, 0))
    elif impl == "siglip-kernel" and loss in ("clip_loss", "sigmoid_loss"):
        from siglip_kernel import fused_siglip_loss
        device = "cuda" if torch.cuda.is_available() else "cpu"
        scale, bias = (torch.tensor(x, device=device) for x in (math.log(1 / TAU), -10.0))
        return lambda q, k, targets: fused_siglip_loss(q, k, scale, bias)
    if one_sided is None or loss in ("queue_loss", "sigmoid_loss", "sup_con_loss"):
        return None
    if both:
        return lambda q, k, targets: (one_sided(q, k, targets) + one_sided(k, q, targets)) / 2
    if loss == "nt_xent":
        return lambda q, k, targets: one_sided(z := views(q, k), z, targets.roll(len(z) // 2))
    return one_sided


def views(q, k):
    """The one set of nt_xent and sup_con_loss: N points are two views of N / 2 things."""
    return torch.cat([q[:len(q) // 2], k[:len(q) // 2]])


def is_interpreted(impl):
    """Whether Triton's interpreter stands in for the GPU: its numbers are right, its times say nothing."""
    return impl in ("triton", *PEERS) and os.environ.get("TRITON_INTERPRET") == "1"


def is_marker(loss, impl):
    """Whether impl computes another loss from as many products: over one set only ours leave a row out."""
    return impl == "siglip-kernel" and loss == "clip_loss" or loss == "nt_xent" and impl in ("torch", *PEERS)
