"""Losses of other papers for fine-tuning a classifier: R-Drop, SupCon, and the contrastive stage for
out-of-domain detection. childtuning.py uses them when --rdrop, --supcon or --ood-epochs is given."""
import torch
import torch.nn.functional as F

from kernels import check_rows, checks, gather_rows, sup_con_loss

from ..cli import fail
from ..text.classifier import classify, task_loss
from .adversarial import adversarial_views


def regularised_loss(model, inputs, labels, rows, args):
    """This rank's mean task loss with --rdrop, --supcon or both.

    inputs, labels   this rank's part of a batch of `rows` rows
    """
    passes, vectors = [], []
    for _ in range(1 if args.rdrop is None else 2):            # R-Drop: twice, with different dropout
        if args.supcon:
            logits, z = classify_vectors(model, inputs)
            vectors.append(z)
        else:
            logits = classify(model, inputs)
        passes.append(logits)
    if args.rdrop is None:
        loss = task_loss(*passes, labels)
    else:
        alpha = args.rdrop
        if args.form == "code":                                # KL is a sum over rows, and the caller's scale
            alpha = args.rdrop / (len(labels) / rows)          # is for means
        loss = rdrop_loss(*passes, labels, alpha, args.form)
    if args.supcon:
        z = gather_rows(torch.stack(vectors, 1), rows)         # two passes are two views
        contrast = supcon_loss(z, gather_rows(labels, rows), args.temperature or 0.3)
        loss = (1 - args.supcon) * loss + args.supcon * contrast
    return loss


def adversarial_contrast(model, inputs, labels, rows, args):
    """The loss of --ood-epochs: SupCon of texts and their adversarial views, whose word embeddings are moved
    along the gradient of the cross entropy. Arguments as in regularised_loss."""
    (logits, z), (_, z_adv) = adversarial_views(
        model, lambda: classify_vectors(model, inputs), mask_of(inputs), args.adversarial,
        lambda found: F.cross_entropy(found[0], labels, reduction="sum"))
    gathered = [gather_rows(x, rows) for x in (z, z_adv, labels)]
    loss = ood_contrastive_loss(*gathered, args.temperature or 0.1, args.form)
    # the classifier's gradient is zeros, not None: on several ranks sum_gradients makes it zeros, too
    return loss + 0 * logits.sum()


def rdrop_loss(logits1, logits2, labels, alpha, form="paper"):
    """R-Drop: the task losses of two passes of the same rows, plus a penalty for differing predictions.

    logits1, logits2   (N, C), or (N, 1) in regression; every term is differentiable in both
    labels             (N,) int64, or float in regression, where squared errors replace CE and
                       (logits1 − logits2)² replaces KL
    form               "paper": CE1 + CE2 + α · mean over rows of (KL(P1‖P2) + KL(P2‖P1)) / 2
                       "code": (CE1 + CE2) / 2 + α · their sum over rows, as the readme of the released code
    source             Liang, Wu et al. 2021
    """
    check_rows(logits1=(logits1, "N C"), logits2=(logits2, "N C"))
    checks.check_number("alpha", alpha, device=logits1.device)
    checks.check_choice("form", form, "paper", "code")
    tasks = task_loss(logits1, labels) + task_loss(logits2, labels)
    if labels.is_floating_point():
        apart = (logits1 - logits2)[:, 0].square()
    else:
        log1, log2 = logits1.log_softmax(1), logits2.log_softmax(1)
        apart = ((log1.exp() - log2.exp()) * (log1 - log2)).sum(1) / 2         # both KL in one sum
    return tasks + alpha * apart.mean() if form == "paper" else tasks / 2 + alpha * apart.sum()


def supcon_loss(z, labels, temperature=0.3):
    """SCL: the mean SupCon loss over the views that have a positive; 0 if none has.

    z         (N, V, D) raw vectors, V views of N texts
    labels    (N,) integers
    source    Gunel et al. 2021, eq. 3, where it is a sum over views: their λ depends on the batch size
    """
    check_rows(z=(z, "N V D"), labels=(labels, "N", int))
    _, group, sizes = labels.unique(return_inverse=True, return_counts=True)
    share = (sizes[group] * z.shape[1] > 1).to(z.dtype).mean()                 # the others add 0 to the mean
    return sup_con_loss(F.normalize(z, dim=2), labels, temperature, temperature) / share.clamp(min=1 / len(z))


def ood_contrastive_loss(z, z_adv, labels, temperature=0.1, form="paper"):
    """SupCon of N texts and their adversarial views.

    z, z_adv     (N, D) raw vectors, float32 or float64; normalised here
    labels       (N,) integers
    form         "paper": the mean over all 2N views; "code": the mean over i of −1/|its class| Σ_{j of it}
                 log( (e^{z_i·z_j/τ} [j ≠ i] + e^{z_i·z'_j/τ}) / Z_i ), Z_i the sum over all j, plus the same
                 with z and z' swapped
    source       Zeng et al. 2021
    """
    check_rows(z=(z, "N D"), z_adv=(z_adv, "N D"), labels=(labels, "N", int))
    checks.check_alike(z=z, z_adv=z_adv)
    checks.check_temperature(temperature, z.device)
    checks.check_choice("form", form, "paper", "code")
    z, z_adv = F.normalize(z, dim=1), F.normalize(z_adv, dim=1)
    if form == "paper":
        return sup_con_loss(torch.stack([z, z_adv], 1), labels, temperature, temperature)
    own, same, loss = torch.eye(len(z), device=z.device) > 0, labels[:, None] == labels, 0
    for one, other in ((z, z_adv), (z_adv, z)):
        across = one @ other.T / temperature
        both = torch.where(own, across, torch.logaddexp(one @ one.T / temperature, across))
        log = both - both.logsumexp(1, keepdim=True)
        loss = loss - ((log * same).sum(1) / same.sum(1)).mean()
    return loss


def mask_of(inputs):
    """(n, L), 0 for padding; FNet's tokenizer gives none."""
    return inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))


def classify_vectors(model, inputs):
    """(n, labels) float32 logits, and (n, H) float32 vectors: the input of the last linear layer, in training
    after the model's own dropout."""
    linear = [part for part in model.modules() if isinstance(part, torch.nn.Linear)]
    linear, seen = [part for part in linear if part.out_features == model.config.num_labels], []
    if not linear:
        fail(f"{type(model).__name__} has no linear layer of {model.config.num_labels} labels, which reads a "
             "text's vector; take another --model")
    hook = linear[-1].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        logits = classify(model, inputs)
    finally:
        hook.remove()
    if len(seen) != 1:
        fail(f"{type(model).__name__} does not read a text's vector by its last linear layer of "
             f"{model.config.num_labels} labels; take another --model", every_rank=True)
    vectors, = seen
    if vectors.dim() == 3:                                     # GPT-2's of all tokens: the last real one's
        last = (torch.arange(1, vectors.shape[1] + 1, device=model.device) * mask_of(inputs)).argmax(1)
        vectors = vectors[torch.arange(len(last), device=model.device), last]
    return logits, vectors.float()
