"""Embedded tokens that change on their way through an encoder, and noise along the gradient of a loss: a
text's adversarial view."""
import contextlib
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels import check_rows, checks

from ..cli import fail


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


class Place(NamedTuple):
    """Where the output (n, L, width) of a model's embedding layer (words, positions, norm) can be changed: on
    its way into a module, or, where the layers have it from elsewhere too, out of one."""
    module: torch.nn.Module
    is_input: bool
    width: int


@contextlib.contextmanager
def changed_at(place, mask, change):
    """While it is open, the output (n, L, H) of the embedding layer is change(it), for texts with this mask
    (n, L). It may be opened again, as where backward embeds anew."""
    seen = []

    def into(_, given, named):
        if seen:
            return None
        found, seen[:] = hidden_of(given, named), [True]
        if given:
            return (change(found), *given[1:]), named
        return given, named | {"hidden_states": change(found)}

    def out_of(_, __, found):
        if not seen:
            seen.append(True)
            return change(found)

    if place.is_input:
        hook = place.module.register_forward_pre_hook(into, with_kwargs=True)
    else:
        hook = place.module.register_forward_hook(out_of)
    try:
        yield
    finally:
        hook.remove()


def hidden_of(given, named):
    """The hidden states among what a module is called with, as all of transformers' layers are."""
    return given[0] if given else named.get("hidden_states")


@torch.no_grad()
def find_place(model, ids):
    """The Place of a model at which zeros make texts (2, L) of other tokens one; refuses one without."""
    lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]
    owners = [part for part in model.modules()                 # BERT's encoder is called before its layers
              if part is not model and any(child in lists for child in part.children())]
    found, last, training, mask = [], [], model.training, torch.ones_like(ids)

    def states(x):
        return torch.is_tensor(x) and x.is_floating_point() and x.dim() == 3 and x.shape[:2] == ids.shape

    def note(part, given, named):
        x = hidden_of(given, named)
        if not found and states(x):
            found.extend([Place(part, True, x.shape[2]), *last[-1:]])

    def pass_by(part, _, x):
        if not found and states(x):
            last.append(Place(part, False, x.shape[2]))

    hooks = [part.register_forward_pre_hook(note, with_kwargs=True)
             for part in (*owners, *(layer for part in lists for layer in part))]
    hooks += [part.register_forward_hook(pass_by) for part in model.modules()]
    run = lambda: model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
    model.eval()                                               # a pass in which both of them look
    run()
    for hook in hooks:
        hook.remove()
    for place in found:
        with changed_at(place, mask, torch.zeros_like):
            first, second = run()
        if (first - second).norm() <= 1e-5 * first.norm():
            model.train(training)
            return place
    fail(f"{type(model).__name__} has no layers that read the output of an embedding layer, a row a text; "
         "cutoffs and noise want a model like BERT")


def noise(gradient, mask, size):
    """(n, L, H), float32 or float64: for each token a step of length `size` along its gradient.

    gradient     (n, L, H) of a loss by the embedded tokens, any float type; where it is 0, so is the step
    mask         (n, L) integers, 0 for padding, which gets none
    size         0.1 in the released code
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
