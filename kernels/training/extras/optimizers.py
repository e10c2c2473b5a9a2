"""Whose optimizer, learning-rate schedule and clipping simcse.py has (--optimizer-of), as in their code.

simcse    AdamW without decay; the rate falls linearly from the first step on
consert   AdamW without bias correction, decay 0.01; the rate rises for a tenth of the steps from 0, and falls
declutr   the same with decay 0.1; the rate is never below a 32nd of --lr
simcls    Adam; the rate of step t is --lr · min(t^-½, t · 10,000^-1½), gradients are not clipped

Biases and norms do not decay. A gradient is clipped to norm 1.
"""
import math
from typing import NamedTuple

import torch

from ..loop import warmup_linear


class Optimizer(NamedTuple):
    eps: float = 1e-8
    corrected: bool = True                                     # for the zeros that its averages begin with
    decay: float = 0.0
    clip: float = 1.0                                          # largest norm of the gradient; 0: any


OPTIMIZERS = {"simcse": Optimizer(), "simcls": Optimizer(clip=0.0),
              "consert": Optimizer(1e-6, corrected=False, decay=0.01),
              "declutr": Optimizer(1e-6, corrected=False, decay=0.1)}
MANY = 1e6                                                     # steps after which no correction is left


class UncorrectedAdamW(torch.optim.AdamW):
    """PyTorch's, without the division by 1 − β^step, which corrects averages that begin at zero."""

    def step(self):
        weights = [w for group in self.param_groups for w in group["params"] if w.grad is not None]
        for w in weights:
            if not self.state[w]:
                self.state[w] = {"step": torch.zeros((), device=w.device),
                                 "exp_avg": torch.zeros_like(w), "exp_avg_sq": torch.zeros_like(w)}
        steps = [self.state[w]["step"] for w in weights]
        torch._foreach_add_(steps, MANY)
        super().step()
        torch._foreach_sub_(steps, MANY)


def make_optimizer(model, args):
    kind = OPTIMIZERS[args.optimizer_of]
    weights = [w for w in model.parameters() if w.requires_grad]
    groups = [dict(params=[w for w in weights if w.dim() > 1], weight_decay=kind.decay),
              dict(params=[w for w in weights if w.dim() <= 1], weight_decay=0.0)]
    adam = torch.optim.AdamW if kind.corrected else UncorrectedAdamW
    return adam(groups, lr=args.lr, eps=kind.eps, fused=True)


def rate_of(step, total, args):
    """The learning rate of a step, which counts from 0."""
    if args.optimizer_of == "consert":
        return warmup_linear(step, total, math.ceil(total / 10), args.lr)
    if args.optimizer_of == "declutr":                         # AllenNLP's slanted triangle
        return (args.lr + 31 * warmup_linear(step, total, total // 10, args.lr)) / 32
    if args.optimizer_of == "simcls":
        return args.lr * min((step + 1) ** -0.5, (step + 1) * 10_000**-1.5)
    return warmup_linear(step, total, 0, args.lr)


def clip_gradient(model, args):
    if clip := OPTIMIZERS[args.optimizer_of].clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
