"""LARS, the optimizer of SimCLR (You et al. 2017, arXiv 1708.03888)."""
import torch


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
