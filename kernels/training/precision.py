"""Half precision in losses, with --precision bf16: autocast, and gathering rows of all ranks."""
import torch
import torch.nn.functional as F

from kernels import gather_rows

# Losses multiply rows of unit length: float16 has enough range, and 1/8 of bfloat16's rounding error.
LOSS_DTYPE = torch.float16


def unit_rows(z, eps=1e-8):
    """Return the rows of z (..., D) divided by their norms. A zero row stays zero, in float16 too."""
    return F.normalize(z, dim=-1, eps=max(eps, torch.finfo(z.dtype).tiny))


def loss_autocast(x, args):
    """Return the torch.autocast context for a loss on x's device, which --precision bf16 turns on.

    Kernels then multiply in LOSS_DTYPE and return float32 gradients. Do not run layers, matrix products in
    PyTorch or rows that are not normalised inside: they would overflow or lose precision.
    """
    return torch.autocast(x.device.type, LOSS_DTYPE, enabled=args.precision == "bf16")


def gather_keys(z, rows, args):
    """Return gather_rows(z, rows) for a loss that normalises its rows; z is (n, ..., D), float32.

    With --precision bf16 the loss rounds unit rows to LOSS_DTYPE, so unit rows are sent in this dtype.
    """
    if args.precision != "bf16" or len(z) == rows:
        return gather_rows(z, rows)
    return gather_rows(unit_rows(z), rows, dtype=LOSS_DTYPE)
