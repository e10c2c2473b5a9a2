"""The optimizers of simclr.py: LARS (You et al. 2017, arXiv 1708.03888), SGD and Adam."""
import functools

import torch


def make_optimizer(model, lr, args):
    """Make the optimizer that --optimizer names, for an ImageEncoder. All but adam have momentum 0.9.

    lars              weight decay for weight matrices only (paper)
    sgd               weight decay for all weights (SupCon's code)
    nesterov, adam    weight decay for all weights except those of batch norms (SimCLR's code)
    """
    momentum = functools.partial(torch.optim.SGD, momentum=0.9)
    kinds = dict(lars=LARS, sgd=momentum, nesterov=functools.partial(momentum, nesterov=True),
                 adam=torch.optim.Adam)
    weights = [p for p in model.parameters() if p.requires_grad]
    special, options = set(), {}                               # `special` weights get other `options`
    if args.optimizer in ("nesterov", "adam"):
        norms = (part for part in model.modules() if "BatchNorm" in type(part).__name__)
        special = {p for part in norms for p in part.parameters()}
        options = dict(weight_decay=0.0)
    groups = [dict(params=[p for p in weights if p not in special])]
    if special:
        groups.append(dict(params=[p for p in weights if p in special], **options))
    return kinds[args.optimizer](groups, lr=lr, weight_decay=args.weight_decay)


class LARS(torch.optim.Optimizer):
    """SGD with momentum and layer-wise learning rates: the step of a weight matrix w is scaled by
    trust · |w| / |gradient|. Batch norms and biases get unscaled steps, without weight decay (paper).

    trust    the trust coefficient, or None: steps are not scaled
    """

    def __init__(self, parameters, lr, weight_decay, momentum=0.9, trust=0.001):
        defaults = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, trust=trust)
        super().__init__(list(parameters), defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for w in (w for w in group["params"] if w.grad is not None):
                step = w.grad
                if w.dim() > 1:
                    step = step + group["weight_decay"] * w
                if w.dim() > 1 and group["trust"]:
                    w_norm, step_norm = w.norm(), step.norm()
                    is_scaled = (w_norm > 0) & (step_norm > 0)
                    step = step * torch.where(is_scaled, group["trust"] * w_norm / step_norm, 1.0)
                v = self.state[w].setdefault("momentum", torch.zeros_like(w))
                v.mul_(group["momentum"]).add_(step, alpha=group["lr"])
                w.sub_(v)                      # v already has the factor lr; torch's SGD multiplies here
