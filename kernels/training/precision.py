"""--precision bf16: losses multiply in float16, and ranks send embeddings to each other in float16."""
import dataclasses

import torch
import torch.nn.functional as F

from kernels import RingRows, gather_rows, ring_rows

# Losses multiply unit rows. Their numbers fit the range of float16, which rounds 8x finer than bfloat16.
LOSS_DTYPE = torch.float16


def unit_rows(z, eps=1e-8):
    """Return the rows of z (..., D) divided by their norms. A row of zeros stays zero, also in float16."""
    if isinstance(z, RingRows):
        return dataclasses.replace(z, own=unit_rows(z.own, eps))
    return F.normalize(z, dim=-1, eps=max(eps, torch.finfo(z.dtype).tiny))


def loss_autocast(x, args):
    """Return a torch.autocast context for a loss on the device of x. With --precision bf16, kernels multiply
    in LOSS_DTYPE inside the context, and return float32 gradients. Use the context only around losses of unit
    rows: in float16, layers and rows of other norms may overflow or lose precision."""
    return torch.autocast(x.device.type, LOSS_DTYPE, enabled=args.precision == "bf16")


def gather_keys(z, rows, args):
    """Return the rows z (n, ..., D) float32 of all ranks, or RingRows with --ring, for a loss that normalises
    them. With --precision bf16, ranks send unit rows in LOSS_DTYPE, because the loss rounds unit rows to this
    dtype anyway. rows: number of rows of all ranks together."""
    if getattr(args, "ring", False):                           # some scripts do not have this flag
        return ring_rows(z, rows)
    if args.precision != "bf16" or len(z) == rows:
        return gather_rows(z, rows)
    return gather_rows(unit_rows(z), rows, dtype=LOSS_DTYPE)
