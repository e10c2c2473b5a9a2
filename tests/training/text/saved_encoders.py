"""Helpers that build a SentenceEncoder from a folder, or save one to a folder, without a run."""
from types import SimpleNamespace

import torch

from kernels.training.text import checkpoint
from kernels.training.text.encoders import build_encoder


def make_encoder(folder, use="keep", **flags):
    """Return the SentenceEncoder of a folder, as simcse.py with these flags builds it. use: of a new head."""
    args = SimpleNamespace(**dict(model=str(folder), max_length=60) | flags)
    run = SimpleNamespace(args=args, device=torch.device("cpu"), bf16=False)
    return build_encoder(args, run, "cls", use, texts=[], columns=2)


def save(model, folder):
    """Save a SentenceEncoder to a folder."""
    folder.mkdir(exist_ok=True)
    checkpoint.save(model, SimpleNamespace(rank=0, out=folder))
