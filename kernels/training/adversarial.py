"""Noise on an encoder's word embeddings, along the gradient of a loss: a text's adversarial view."""
import contextlib

import torch
import torch.nn.functional as F

from kernels import check_rows

from .command import fail


@contextlib.contextmanager
def changed(module, change):
    """While it is open, what the module returns is change(that): to add noise to
    model.get_input_embeddings(), or to look. It may be opened again, as where backward embeds anew."""
    hook = module.register_forward_hook(lambda _, given, out: change(out))
    try:
        yield
    finally:
        hook.remove()


def noise(gradient, mask, size):
    """(n, L, H), float32 or float64: for each token a step of length `size` along its gradient.

    gradient     (n, L, H) of a loss by the word embeddings, any float type; where it is 0, so is the step
    mask         (n, L) integers, 0 for padding, which gets none
    size         0.1 in the released code
    raises       ValueError naming the argument, what it was and what is wanted
    source       Zeng et al. 2021; a text's step has no length of its own, as in Miyato et al. 2017, eq. 5
    """
    check_rows(gradient=(gradient, "n L H"), mask=(mask, "n L", int))
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return size * F.normalize(wide, dim=2) * (mask != 0)[:, :, None]


def adversarial_views(model, forward, mask, size, loss):
    """(found, the same of the adversarial view) of forward(), which runs the model once: its noise goes along
    the gradient of loss(found). Two passes forward, and one back that stays out of .grad."""
    words, seen = model.get_input_embeddings(), []
    with changed(words, lambda out: seen.append(out) or out):
        found = forward()
    if [out.shape[:2] for out in seen] != [mask.shape]:        # T5 reads twice, XLNet column by column
        fail(f"{type(model).__name__} has no word embeddings that it reads once, a row a text; adversarial "
             "views want a model like BERT")
    gradient, = torch.autograd.grad(loss(found), seen, retain_graph=True)
    step = noise(gradient, mask, size)
    with changed(words, lambda out: out + step):
        return found, forward()
