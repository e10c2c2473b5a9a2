"""The optimizers of simclr.py: LARS (You et al. 2017, arXiv 1708.03888) and SGD."""
import torch


def make_optimizer(model, lr, args):
    """Make the optimizer that --optimizer names, with momentum 0.9. sgd has weight decay for all weights
    (SupCon's code); lars has weight decay only for weight matrices (paper)."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if args.optimizer == "lars":
        return LARS(weights, lr, args.weight_decay)
    return torch.optim.SGD(weights, lr, momentum=0.9, weight_decay=args.weight_decay)


class LARS(torch.optim.Optimizer):
    """SGD with momentum and layer-wise learning rates. With g = gradient + weight_decay · w, the step of a
    weight matrix w is trust · |w| / |g| · g. Batch norms and biases have no decay: their step is g (paper).

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
                w.sub_(v)                      # v already contains lr; torch.optim.SGD multiplies by lr here
