"""Change token embeddings inside an encoder by hooks, and perturb them along the gradient of a loss."""
import contextlib
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels import check_rows, checks

from ..errors import fail


@contextlib.contextmanager
def patched_word_embeddings(model, mask, change):
    """Within this context, replace the model's word embeddings x (n, L, H) by change(x), of the same shape.

    Raises UserError if the model does not call its word-embedding layer exactly once in the context.

    mask    (n, L) attention mask of the model's input in this context
    """
    seen = []

    def fail_unsupported():
        fail(f"{type(model).__name__} does not embed the words of a batch in one call, one text per row; "
             "adversarial noise and --views shuffle need a model like BERT", every_rank=True)

    def replace_output(_, inputs, words):
        seen.append(words)
        if len(seen) > 1 or not torch.is_tensor(words) or words.shape[:2] != mask.shape:
            fail_unsupported()                                 # T5 embeds twice; XLNet has the batch second
        return change(words)

    try:
        hook = model.get_input_embeddings().register_forward_hook(replace_output)
    except NotImplementedError:                                # CANINE hashes characters
        fail_unsupported()
    try:
        yield
    finally:
        hook.remove()
    if not seen:
        fail_unsupported()


class EmbeddingHookPoint(NamedTuple):
    """The module at which to change the output (n, L, width) of a model's embedding layer.

    is_input  True: change the input of the module. False: change the output of the module, which is needed if
              the layers also receive the embeddings as another argument
    """
    module: torch.nn.Module
    is_input: bool
    width: int


@contextlib.contextmanager
def patched_embedding_output(point, change):
    """Within this context, replace the output x (n, L, width) of the embedding layer by change(x), of the
    same shape, at an EmbeddingHookPoint. Only the module's first call is changed: it may run once per
    layer."""
    seen = []

    def replace_input(_, args, kwargs):
        if seen:
            return None
        x = hidden_states_arg(args, kwargs)
        seen.append(True)
        if args:
            return (change(x), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": change(x)}

    def replace_output(_, __, x):
        if not seen:
            seen.append(True)
            return change(x)

    if point.is_input:
        hook = point.module.register_forward_pre_hook(replace_input, with_kwargs=True)
    else:
        hook = point.module.register_forward_hook(replace_output)
    try:
        yield
    finally:
        hook.remove()


def hidden_states_arg(args, kwargs):
    """Return the hidden states that a transformer layer was called with, as a first or a named argument."""
    return args[0] if args else kwargs.get("hidden_states")


@torch.no_grad()
def find_hook_point(model, ids):
    """Return the model's EmbeddingHookPoint; raise UserError if it has none.

    A point is accepted if zeros at this point make the model's outputs equal for two texts with different
    tokens.

    ids   (2, L) token ids of two such texts, without padding
    """
    lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]
    # also the owners of lists of layers: BERT's encoder is called before its layers are
    owners = [part for part in model.modules()
              if part is not model and any(child in lists for child in part.children())]
    found, last_output, training, mask = [], [], model.training, torch.ones_like(ids)

    def is_hidden_states(x):
        return torch.is_tensor(x) and x.is_floating_point() and x.dim() == 3 and x.shape[:2] == ids.shape

    def record_input(part, args, kwargs):
        x = hidden_states_arg(args, kwargs)
        if not found and is_hidden_states(x):
            found.extend([EmbeddingHookPoint(part, True, x.shape[2]), *last_output[-1:]])

    def record_output(part, _, x):
        if not found and is_hidden_states(x):
            last_output.append(EmbeddingHookPoint(part, False, x.shape[2]))

    def run():
        return model(input_ids=ids, attention_mask=mask).last_hidden_state.float()

    hooks = [part.register_forward_pre_hook(record_input, with_kwargs=True)
             for part in (*owners, *(layer for part in lists for layer in part))]
    hooks += [part.register_forward_hook(record_output) for part in model.modules()]
    model.eval()
    run()                                                      # the hooks record the candidates
    for hook in hooks:
        hook.remove()
    for point in found:
        with patched_embedding_output(point, torch.zeros_like):
            first, second = run()
        if (first - second).norm() <= 1e-5 * first.norm():
            model.train(training)
            return point
    fail(f"{type(model).__name__} has no layers that take the output of an embedding layer, one text per "
         "row; --adversarial, and cutoffs or embedding_dropout in --views, need a model like BERT")


def adversarial_noise(gradient, mask, size):
    """Return a step of length `size` along its gradient for each token: (n, L, H), float32 or float64.

    gradient     (n, L, H) gradient of a loss in the token embeddings, any float type; 0 gives a step of 0
    mask         (n, L) integers, 0 for padding, whose step is 0
    size         length of each token's step; 0.1 in the released code
    source       Zeng et al. 2021; in Miyato et al. 2017, eq. 5, the steps of all tokens of a text together
                 have a fixed length
    """
    check_rows(gradient=(gradient, "n L H"), mask=(mask, "n L", int))
    checks.check_number("size", size)
    upcast = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return size * F.normalize(upcast, dim=2) * (mask != 0)[:, :, None]


def adversarial_views(model, forward, mask, size, loss):
    """Return (forward() on the clean texts, forward() on their adversarial views).

    These have noise on the word embeddings, along the gradient of loss(forward() on the clean texts). This
    takes two forward passes, and a backward pass that leaves .grad alone.

    forward     function without arguments that runs the model once
    mask, size  see adversarial_noise
    """
    words = []

    def keep(x):
        words.append(x)
        return x

    with patched_word_embeddings(model, mask, keep):
        found = forward()
    gradient, = torch.autograd.grad(loss(found), words, retain_graph=True)
    step = adversarial_noise(gradient, mask, size)
    with patched_word_embeddings(model, mask, lambda x: x + step):
        return found, forward()
