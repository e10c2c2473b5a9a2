"""Optimizer, learning-rate schedule and gradient clipping of the papers' released code, selected by simcse.py
--optimizer-recipe:

simcse    AdamW without weight decay; linear decay of the learning rate from the first step on
consert   AdamW without bias correction, weight decay 0.01; linear warm-up from 0 over the first 10 % of the
          steps, then linear decay
declutr   as consert, with weight decay 0.1, and a learning rate of at least 1/32 of --lr
simcls    Adam; the learning rate of step t is --lr · min(t^-½, t · 10,000^-1½); no gradient clipping

Weight decay applies to matrices only, not to biases and norms. Gradients are clipped to norm 1, except for
simcls.
"""
import math
from typing import NamedTuple

import torch

from ..loop import warmup_linear


class OptimizerSettings(NamedTuple):
    eps: float = 1e-8
    bias_correction: bool = True
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0                                 # 0: no clipping


OPTIMIZERS = {"simcse": OptimizerSettings(), "simcls": OptimizerSettings(max_grad_norm=0.0),
              "consert": OptimizerSettings(1e-6, bias_correction=False, weight_decay=0.01),
              "declutr": OptimizerSettings(1e-6, bias_correction=False, weight_decay=0.1)}
LATE_STEP = 1e6                                # by then the bias correction is 1 up to rounding


class UncorrectedAdamW(torch.optim.AdamW):
    """PyTorch's AdamW without bias correction (the division of its averages by 1 − β^step)."""

    def step(self):
        weights = [w for group in self.param_groups for w in group["params"] if w.grad is not None]
        for w in weights:
            if not self.state[w]:
                self.state[w] = {"step": torch.zeros((), device=w.device),
                                 "exp_avg": torch.zeros_like(w), "exp_avg_sq": torch.zeros_like(w)}
        steps = [self.state[w]["step"] for w in weights]
        torch._foreach_add_(steps, LATE_STEP)
        super().step()
        torch._foreach_sub_(steps, LATE_STEP)


def make_optimizer(model, args):
    """Return the optimizer of --optimizer-recipe for the trainable weights of the model."""
    return adamw(model, args.lr, OPTIMIZERS[args.optimizer_recipe])


def adamw(model, lr, settings):
    """Return AdamW with these OptimizerSettings for the trainable weights of the model."""
    weights = [w for w in model.parameters() if w.requires_grad]
    groups = [dict(params=[w for w in weights if w.dim() > 1], weight_decay=settings.weight_decay),
              dict(params=[w for w in weights if w.dim() <= 1], weight_decay=0.0)]
    adam = torch.optim.AdamW if settings.bias_correction else UncorrectedAdamW
    return adam(groups, lr=lr, eps=settings.eps, fused=True)


def learning_rate(step, total, args):
    """Return the learning rate of a step, counted from 0, of `total` steps."""
    if args.optimizer_recipe == "consert":
        return warmup_linear(step, total, math.ceil(total / 10), args.lr)
    if args.optimizer_recipe == "declutr":                     # AllenNLP's slanted triangular schedule
        return (args.lr + 31 * warmup_linear(step, total, total // 10, args.lr)) / 32
    if args.optimizer_recipe == "simcls":
        return args.lr * min((step + 1) ** -0.5, (step + 1) * 10_000**-1.5)
    return warmup_linear(step, total, 0, args.lr)


def clip_gradient(model, args):
    """Clip the gradient of all weights together, as --optimizer-recipe does."""
    max_grad_norm = OPTIMIZERS[args.optimizer_recipe].max_grad_norm
    if max_grad_norm:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
