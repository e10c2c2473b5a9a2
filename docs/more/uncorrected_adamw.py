"""AdamW without bias correction, the optimizer of consert.py, declutr.py and cil.py."""
import torch


class UncorrectedAdamW(torch.optim.Optimizer):
    """AdamW with β1 = 0.9 and β2 = 0.999 that does not divide the averages of gradients and squared gradients
    by 1 − β^step, as in the original code of BERT. Weights decay before the update, as in torch's AdamW."""

    def __init__(self, params, lr, eps=1e-8, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                if not self.state[weight]:
                    self.state[weight] = dict(exp_avg=torch.zeros_like(weight),
                                              exp_avg_sq=torch.zeros_like(weight))
                average, squares = self.state[weight]["exp_avg"], self.state[weight]["exp_avg_sq"]
                average.lerp_(weight.grad, 0.1)
                squares.mul_(0.999).addcmul_(weight.grad, weight.grad, value=0.001)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.addcdiv_(average, squares.sqrt().add_(group["eps"]), value=-group["lr"])
