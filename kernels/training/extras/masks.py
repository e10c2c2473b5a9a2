"""Bool masks over weights: random ones, gradients outside a mask set to 0, and work in small blocks. Each is
written for a CPU, where the obvious operations take several times as long."""
import torch

BLOCK = 2**18                                                  # weights; temporaries of so many stay in the cache
INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}     # of as many bytes


@torch.compiler.disable
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


def masked(gradients, masks):
    """[gradient where its mask is True, else 0], also for NaN: the bits times 1 or 0. where() takes longer."""
    bits = [gradient.view(INTEGER[gradient.element_size()]) for gradient in gradients]
    bits = torch._foreach_mul(bits, masks)
    return [child.view(gradient.dtype) for child, gradient in zip(bits, gradients)]


def in_blocks(tensors):
    """Yield the tensors, all of one shape, in blocks of about BLOCK elements: [block of each]. A None stays."""
    first = torch.atleast_1d(tensors[0])
    size = max(1, BLOCK * len(first) // first.numel())         # rows
    for start in range(0, len(first), size):
        yield [None if x is None else torch.atleast_1d(x)[start : start + size] for x in tensors]
