"""AdamW without bias correction, the optimizer of consert.py, declutr.py and cil.py."""
import torch


class UncorrectedAdamW(torch.optim.AdamW):
    """AdamW that does not divide the averages of gradients and squared gradients by 1 − β^step, as in the
    original code of BERT: for the step number 1e6, torch's AdamW computes 1 − β^step = 1."""

    def __init__(self, params, lr, eps=1e-8, weight_decay=0.0):
        super().__init__(params, lr, eps=eps, weight_decay=weight_decay)
        for weight in (weight for group in self.param_groups for weight in group["params"]):
            self.state[weight] = dict(step=torch.tensor(1e6), exp_avg=torch.zeros_like(weight),
                                      exp_avg_sq=torch.zeros_like(weight))
