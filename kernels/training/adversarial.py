"""Noise on an encoder's word embeddings, along the gradient of a loss: a text's adversarial view."""
import contextlib

import torch
import torch.nn.functional as F

from kernels import check_rows, checks

from .command import fail


@contextlib.contextmanager
def changed(model, mask, change):
    """While it is open, the model's word embeddings (n, L, H) of texts with this mask (n, L), which it reads
    once, are change(them). It may be opened again, as where backward embeds anew."""
    seen = []

    def refuse():
        fail(f"{type(model).__name__} has no word embeddings that it reads once, a row a text; noise and "
             "views of them want a model like BERT", every_rank=True)

    def look(_, given, words):
        seen.append(words)
        if len(seen) > 1 or not torch.is_tensor(words) or words.shape[:2] != mask.shape:
            refuse()                                           # T5 reads twice, XLNet column by column
        return change(words)

    try:
        hook = model.get_input_embeddings().register_forward_hook(look)
    except NotImplementedError:                                # CANINE hashes letters
        refuse()
    try:
        yield
    finally:
        hook.remove()
    if not seen:
        refuse()


def noise(gradient, mask, size):
    """(n, L, H), float32 or float64: for each token a step of length `size` along its gradient.

    gradient     (n, L, H) of a loss by the word embeddings, any float type; where it is 0, so is the step
    mask         (n, L) integers, 0 for padding, which gets none
    size         0.1 in the released code
    raises       ValueError naming the argument, what it was and what is wanted
    source       Zeng et al. 2021; a text's step has no length of its own, as in Miyato et al. 2017, eq. 5
    """
    check_rows(gradient=(gradient, "n L H"), mask=(mask, "n L", int))
    checks.check_number("size", size)
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return size * F.normalize(wide, dim=2) * (mask != 0)[:, :, None]


def adversarial_views(model, forward, mask, size, loss):
    """(found, the same of the adversarial view) of forward(), which runs the model once: its noise goes along
    the gradient of loss(found). Two passes forward, and one back that stays out of .grad."""
    words = []
    with changed(model, mask, lambda x: words.append(x) or x):
        found = forward()
    gradient, = torch.autograd.grad(loss(found), words, retain_graph=True)
    step = noise(gradient, mask, size)
    with changed(model, mask, lambda x: x + step):
        return found, forward()
