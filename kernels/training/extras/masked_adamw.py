"""AdamW for gradients that reach only a part of the weights, as childtuning.py's do, and random masks.

Both are fast on a CPU too, where the obvious operations take several times as long.
"""
import torch
from torch.compiler import is_compiling

BLOCK = 2**18                                                  # weights: temporaries stay in a CPU's cache
INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}     # of as many bytes


class MaskedAdamW(torch.optim.Optimizer):
    """AdamW as in early versions of transformers, where weight decay follows the step:

        m ← β1 m + (1 − β1) g            v ← β2 v + (1 − β2) g²
        w ← w − a m / (√v + eps)         a = lr √(1 − β2^t) / (1 − β1^t), t from 1; without correct_bias, lr
        w ← w − lr · weight_decay · w

    A subclass says which part of a gradient arrives, by before_step, masks_of and mask_gradients. Groups have
    lr, betas, eps, weight_decay and correct_bias. torch.compile takes step(), with lr as a tensor.
    """

    def before_step(self):
        """For masks that are new at every step."""

    def masks_of(self, weights, group):
        """A bool tensor for each weight, or None."""
        raise NotImplementedError

    def mask_gradients(self, gradients, masks, group):
        """The gradients g of the rule above; all have a mask."""
        raise NotImplementedError

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["step"] = state["step"].cpu()                # torch.load may have moved it

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.before_step()
        for group in self.param_groups:
            weights = with_gradient(group)
            if any(w.grad.is_sparse for w in weights):
                raise RuntimeError("sparse gradients are not supported")
            rows = [self.row(w, mask, group) for w, mask in zip(weights, self.masks_of(weights, group))]
            if is_compiling() or any(w.is_cuda for w in weights):      # in one go, with masks and without
                for masked in (False, True):
                    if part := [row for row in rows if (row[4] is not None) == masked]:
                        self.update(*map(list, zip(*part)), group)
            else:                                              # in blocks: half the time
                for *tensors, rate in rows:
                    for block in in_blocks(tensors):
                        self.update(*([x] for x in block), [rate], group)
        return loss

    def row(self, w, mask, group):
        """(w, gradient, m, v, mask, a) of a weight, one step further."""
        state = self.state[w]
        if not state:
            state |= dict(step=torch.zeros((), dtype=torch.float64), exp_avg=torch.zeros_like(w),
                          exp_avg_sq=torch.zeros_like(w))
        state["step"] += 1
        (beta1, beta2), rate, t = group["betas"], group["lr"], state["step"]
        if not is_compiling():                                 # there they may be tensors
            rate, t = float(rate), t.item()
        if group["correct_bias"]:
            rate = rate * (1 - beta2 ** t) ** 0.5 / (1 - beta1 ** t)
        return w, w.grad, state["exp_avg"], state["exp_avg_sq"], mask, rate

    def update(self, weights, gradients, m, v, masks, rates, group):
        """The rule above for lists of tensors; all have a mask, or none has."""
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        if masks[0] is not None:
            gradients = self.mask_gradients(gradients, masks, group)
        torch._foreach_lerp_(m, gradients, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, gradients, gradients, 1 - beta2)
        roots = torch._foreach_rsqrt(v)  # a CPU's sqrt takes ten times as long for 0, most of v behind a mask
        torch._foreach_reciprocal_(roots)
        torch._foreach_add_(roots, group["eps"])
        if is_compiling():                                     # lr and rates may be tensors
            torch._foreach_sub_(weights, torch._foreach_mul(torch._foreach_div(m, roots), rates))
            torch._foreach_sub_(weights, torch._foreach_mul(weights, group["lr"] * decay))
        else:
            torch._foreach_addcdiv_(weights, m, roots, [-rate for rate in rates])
            torch._foreach_add_(weights, weights, alpha=-float(group["lr"]) * decay)


def with_gradient(group):
    """The weights of a group that have a gradient."""
    return [w for w in group["params"] if w.grad is not None and w.numel()]


def in_blocks(tensors):
    """Yield the tensors, all of one shape, in blocks of about BLOCK elements, one of each; a None stays."""
    first = torch.atleast_1d(tensors[0])
    size = max(1, BLOCK * len(first) // first.numel())         # rows
    for start in range(0, len(first), size):
        yield [None if x is None else torch.atleast_1d(x)[start : start + size] for x in tensors]


def multiply(gradients, masks):
    """[g ⊙ M]: the gradients' bits times 1 or 0, so NaN becomes 0, too. where() takes a CPU longer."""
    bits = [gradient.view(INTEGER[gradient.element_size()]) for gradient in gradients]
    bits = torch._foreach_mul(bits, masks)
    return [child.view(gradient.dtype) for child, gradient in zip(bits, gradients)]


def draw_masks(weights, masks, p, generator):
    """Draw each weight's mask anew: True with probability p, exact to 2^-32.

    masks   {weight: bool tensor of its shape}, filled in place; a missing one is added
    """
    bound = min(round(p * 2**32) - 2**31, 2**31 - 1)
    for w in weights:
        if w not in masks:
            masks[w] = torch.empty(w.shape, dtype=torch.bool, device=w.device)
        for part in masks[w].view(-1).split(w.numel() if w.is_cuda else BLOCK):
            # two int32 from each int64; bernoulli_ takes a CPU five times as long
            pairs = torch.empty((len(part) + 1) // 2, dtype=torch.int64, device=generator.device)
            pairs.random_(-2**63, None, generator=generator)
            part.copy_(pairs.view(torch.int32)[: len(part)] < bound)
