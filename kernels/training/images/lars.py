"""LARS, the optimizer of SimCLR (You et al. 2017, arXiv 1708.03888), and those that may take its place."""
import functools

import torch


def make_optimizer(model, rate, args):
    """lars (paper); sgd, with momentum, all weights decay (SupCon's code); nesterov or adam, all but norms do
    (SimCLR's code)."""
    momentum = functools.partial(torch.optim.SGD, momentum=0.9)
    kinds = dict(lars=LARS, sgd=momentum, nesterov=functools.partial(momentum, nesterov=True),
                 adam=torch.optim.Adam)
    weights = [p for p in model.parameters() if p.requires_grad]
    apart, flags = set(), {}
    if args.optimizer in ("nesterov", "adam"):
        norms = (part for part in model.modules() if "BatchNorm" in type(part).__name__)
        apart, flags = {p for part in norms for p in part.parameters()}, dict(weight_decay=0.0)
    elif args.optimizer == "lars" and model.classes:
        apart, flags = {model.head[-1].weight}, dict(trust=None)
    groups = [dict(params=[p for p in weights if p not in apart]),
              dict(params=[p for p in weights if p in apart], **flags)]
    return kinds[args.optimizer](groups[: 1 + bool(apart)], lr=rate, weight_decay=args.weight_decay)


class LARS(torch.optim.Optimizer):
    """SGD, a weight matrix's step scaled by trust · |w| / |gradient|; norms and biases left out (paper).

    trust    None: the step as it is, which a classifier gets (released code). Its weights begin at 0, and
             steps in proportion to their length would hold them there
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
                    size, change = w.norm(), step.norm()
                    scaled = (size > 0) & (change > 0)
                    step = step * torch.where(scaled, group["trust"] * size / change, 1.0)
                v = self.state[w].setdefault("momentum", torch.zeros_like(w))
                v.mul_(group["momentum"]).add_(step, alpha=group["lr"])  # SGD's has not the rate in it
                w.sub_(v)
