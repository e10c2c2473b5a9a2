"""AdamW for gradients that reach only a part of the weights, as in childtuning.py, and random masks.

Both are written to be fast on a CPU, too, where the obvious operations take several times as long.
"""
import torch
from torch.compiler import is_compiling

BLOCK = 2**18                          # weights to update at a time, so that temporaries fit in a CPU's cache
INT_DTYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by number of bytes


class MaskedAdamW(torch.optim.Optimizer):
    """AdamW as in early versions of transformers, where weight decay follows the step:

        m ← β1 m + (1 − β1) g            v ← β2 v + (1 − β2) g²
        w ← w − a m / (√v + eps)         a = lr √(1 − β2^t) / (1 − β1^t), with t from 1 on
        w ← w − lr · weight_decay · w    without correct_bias: a = lr

    Subclasses define which part of a gradient is used: they override get_masks and mask_gradients, and
    before_step if the masks change with every step. Parameter groups have lr, betas, eps, weight_decay and
    correct_bias. step() can be compiled with torch.compile if lr is a tensor.
    """

    def before_step(self):
        """Hook that step() calls first, for instance to sample new masks."""

    def get_masks(self, weights, group):
        """Return a bool tensor for each weight, or None for a weight without a mask."""
        raise NotImplementedError

    def mask_gradients(self, gradients, masks, group):
        """Return the masked gradients, g in the update above, of weights that all have a mask."""
        raise NotImplementedError

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["step"] = state["step"].cpu()                # torch.load may have moved it to the GPU

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.before_step()
        for group in self.param_groups:
            weights = params_with_grad(group)
            if any(w.grad.is_sparse for w in weights):
                raise RuntimeError("sparse gradients are not supported")
            rows = [self.advance(w, mask, group) for w, mask in zip(weights, self.get_masks(weights, group))]
            if is_compiling() or any(w.is_cuda for w in weights):
                without_mask = [row for row in rows if row[4] is None]
                with_mask = [row for row in rows if row[4] is not None]
                for part in (without_mask, with_mask):         # each at once
                    if part:
                        self.update(*map(list, zip(*part)), group)
            else:                                              # blocks halve the time on a CPU
                for *tensors, rate in rows:
                    for block in in_blocks(tensors):
                        self.update(*([x] for x in block), [rate], group)
        return loss

    def advance(self, w, mask, group):
        """Count one more step of a weight. Return (w, its gradient, m, v, mask, a), see the update above."""
        state = self.state[w]
        if not state:
            state |= dict(step=torch.zeros((), dtype=torch.float64), exp_avg=torch.zeros_like(w),
                          exp_avg_sq=torch.zeros_like(w))
        state["step"] += 1
        beta1, beta2 = group["betas"]
        rate, t = group["lr"], state["step"]
        if not is_compiling():                                 # compiled code keeps them as tensors
            rate, t = float(rate), t.item()
        if group["correct_bias"]:
            rate = rate * (1 - beta2 ** t) ** 0.5 / (1 - beta1 ** t)
        return w, w.grad, state["exp_avg"], state["exp_avg_sq"], mask, rate

    def update(self, weights, gradients, m, v, masks, rates, group):
        """Apply the update above to lists of tensors. Either all have a mask, or none has."""
        beta1, beta2 = group["betas"]
        decay = group["weight_decay"]
        if masks[0] is not None:
            gradients = self.mask_gradients(gradients, masks, group)
        torch._foreach_lerp_(m, gradients, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, gradients, gradients, 1 - beta2)
        # not sqrt: a CPU takes ten times as long for its zeros, and with a mask v is mostly zeros
        roots = torch._foreach_rsqrt(v)
        torch._foreach_reciprocal_(roots)
        torch._foreach_add_(roots, group["eps"])
        if is_compiling():                                     # lr and rates may be tensors
            torch._foreach_sub_(weights, torch._foreach_mul(torch._foreach_div(m, roots), rates))
            torch._foreach_sub_(weights, torch._foreach_mul(weights, group["lr"] * decay))
        else:
            torch._foreach_addcdiv_(weights, m, roots, [-rate for rate in rates])
            torch._foreach_add_(weights, weights, alpha=-float(group["lr"]) * decay)


def params_with_grad(group):
    """Return the weights of a parameter group that have a gradient."""
    return [w for w in group["params"] if w.grad is not None and w.numel()]


def in_blocks(tensors):
    """Split tensors of one shape into blocks of about BLOCK elements. Yield lists of one block per tensor. A
    None among the tensors stays None."""
    first = torch.atleast_1d(tensors[0])
    size = max(1, BLOCK * len(first) // first.numel())         # rows of a block
    for start in range(0, len(first), size):
        yield [None if x is None else torch.atleast_1d(x)[start : start + size] for x in tensors]


def apply_masks(gradients, masks):
    """Return gradients that are 0 where the mask is False, even if they were NaN. The bits of the gradients
    are multiplied by 1 or 0: torch.where takes longer on a CPU."""
    bits = [gradient.view(INT_DTYPES[gradient.element_size()]) for gradient in gradients]
    bits = torch._foreach_mul(bits, masks)
    return [child.view(gradient.dtype) for child, gradient in zip(bits, gradients)]


def draw_masks(weights, masks, p, generator):
    """Sample a new mask for each weight: True with probability p, exact to 2^-32.

    masks   {weight: bool tensor of its shape}, filled in place; a missing one is added
    """
    bound = min(round(p * 2**32) - 2**31, 2**31 - 1)
    for w in weights:
        if w not in masks:
            masks[w] = torch.empty(w.shape, dtype=torch.bool, device=w.device)
        for part in masks[w].view(-1).split(w.numel() if w.is_cuda else BLOCK):
            # two int32 from each random int64: bernoulli_ takes five times as long on a CPU
            pairs = torch.empty((len(part) + 1) // 2, dtype=torch.int64, device=generator.device)
            pairs.random_(-2**63, None, generator=generator)
            part.copy_(pairs.view(torch.int32)[: len(part)] < bound)
