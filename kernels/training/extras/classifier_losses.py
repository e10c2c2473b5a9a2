"""Losses of other papers for fine-tuning a classifier: R-Drop, SupCon, and the contrastive stage for
out-of-domain detection. childtuning.py uses them with --rdrop-weight, --supcon-weight or --ood-epochs."""
import torch
import torch.nn.functional as F

from kernels import check_rows, checks, gather_rows, own_rows, sup_con_loss

from ..errors import fail
from ..text.classifier import classify, task_loss
from .adversarial import adversarial_views


def regularised_loss(model, inputs, labels, rows, args):
    """Return the mean over this rank's rows of the task loss with --rdrop-weight, --supcon-weight or both.

    inputs, labels   this rank's part of the global batch
    rows             number of rows of the global batch, by which sums over rows are scaled
    """
    passes, features = [], []
    for _ in range(1 if args.rdrop_weight is None else 2):     # R-Drop: two passes with different dropout
        if args.supcon_weight:
            logits, z = classify_with_features(model, inputs)
            features.append(z)
        else:
            logits = classify(model, inputs)
        passes.append(logits)
    if args.rdrop_weight is None:
        loss = task_loss(*passes, labels)
    else:
        alpha = args.rdrop_weight
        if args.form == "code":
            # here KL is a sum over rows: cancel the factor by which the caller scales a mean
            alpha = args.rdrop_weight / (len(labels) / rows)
        loss = rdrop_loss(*passes, labels, alpha, args.form)
    if args.supcon_weight:
        z = torch.stack(features, 1)                           # two passes are two views
        contrast = supcon_loss(z, labels, args.temperature or 0.3, **gathered_rows(z, labels, rows))
        loss = (1 - args.supcon_weight) * loss + args.supcon_weight * contrast
    return loss


def ood_stage_loss(model, inputs, labels, rows, args):
    """Return the loss of --ood-epochs: SupCon of texts and their adversarial views. The word embeddings of an
    adversarial view are moved along the gradient of the cross entropy. For the arguments see
    regularised_loss."""
    clean, adversarial = adversarial_views(
        model, lambda: classify_with_features(model, inputs), attention_mask_of(inputs), args.adversarial,
        lambda found: F.cross_entropy(found[0], labels, reduction="sum"))
    logits, z = clean
    z_adv = adversarial[1]
    loss = ood_contrastive_loss(z, z_adv, labels, args.temperature or 0.1, args.form,
                                **gathered_rows(torch.stack([z, z_adv], 1), labels, rows))
    # With several ranks all_reduce_gradients turns a gradient of None into zeros; 0 · logits does so on one.
    return loss + 0 * logits.sum()


def rdrop_loss(logits1, logits2, labels, alpha, form="paper"):
    """R-Drop: the task losses of two passes over the same rows, plus a penalty for differing predictions.

    logits1, logits2   (N, C), or (N, 1) in regression; every term is differentiable in both
    labels             (N,) int64, or float in regression
    alpha              weight α of the penalty
    form               "paper": CE1 + CE2 + α · mean over rows of K
                       "code": (CE1 + CE2) / 2 + α · sum over rows of K (README of the released code)
                       CE1 and CE2 are the cross entropies of the passes, K = (KL(P1‖P2) + KL(P2‖P1)) / 2; in
                       regression squared errors replace CE1 and CE2, and K = (logits1 − logits2)²
    source             Liang, Wu et al. 2021
    """
    check_rows(logits1=(logits1, "N C"), logits2=(logits2, "N C"))
    checks.check_number("alpha", alpha, device=logits1.device)
    checks.check_choice("form", form, "paper", "code")
    tasks = task_loss(logits1, labels) + task_loss(logits2, labels)
    if labels.is_floating_point():
        penalty = (logits1 - logits2)[:, 0].square()
    else:
        log1, log2 = logits1.log_softmax(1), logits2.log_softmax(1)
        penalty = ((log1.exp() - log2.exp()) * (log1 - log2)).sum(1) / 2       # both KL in one sum
    return tasks + alpha * penalty.mean() if form == "paper" else tasks / 2 + alpha * penalty.sum()


def gathered_rows(z, labels, rows):
    """Return the arguments gathered and offset of the losses below, for rows z and their labels."""
    if len(z) == rows:
        return {}
    return dict(gathered=(gather_rows(z, rows), gather_rows(labels, rows)), offset=own_rows(rows).start)


def supcon_loss(z, labels, temperature=0.3, *, gathered=None, offset=0):
    """SCL: the mean SupCon loss over the views that have a positive; 0 if none has.

    z         (N, V, D) features, V views of N texts; normalised here
    labels    (N,) integers
    gathered  (z, labels) of all ranks, with gradient; None: one process. The loss is then the sum over this
              rank's views, times all / own texts, divided by the number of all ranks' views with a positive
    offset    this rank's first row in `gathered`
    source    Gunel et al. 2021, eq. 3. Their loss is a sum over views, so that their λ depends on the batch
              size; this one is a mean
    """
    check_rows(z=(z, "N V D"), labels=(labels, "N", int))
    loss = sup_con_loss(z, labels, temperature, gathered=gathered, offset=offset, normalize=True)
    all_labels = labels if gathered is None else gathered[1]
    _, group, sizes = all_labels.unique(return_inverse=True, return_counts=True)
    share = (sizes[group] * z.shape[1] > 1).to(z.dtype).mean()                 # the others add 0 to the mean
    return loss / share.clamp(min=1 / len(all_labels))


def ood_contrastive_loss(z, z_adv, labels, temperature=0.1, form="paper", *, gathered=None, offset=0):
    """SupCon of N texts and their adversarial views.

    z, z_adv     (N, D) features z_i of the texts and z'_i of their adversarial views, float32 or float64;
                 normalised here
    labels       (N,) integers
    form         "paper": the mean over all 2N views
                 "code": the mean over i of −1/|C_i| Σ_{j in C_i} log(a_ij / Σ_l a_il), plus the same with
                 z and z' swapped; a_ij = [j ≠ i] e^{z_i·z_j/τ} + e^{z_i·z'_j/τ}, and C_i are the texts with
                 the label of text i
    gathered     ((z, z') stacked (M, 2, D), labels) of all ranks, with gradient; None: one process
    offset       this rank's first row in `gathered`
    source       Zeng et al. 2021
    """
    check_rows(z=(z, "N D"), z_adv=(z_adv, "N D"), labels=(labels, "N", int))
    checks.check_same_dtype(z=z, z_adv=z_adv)
    checks.check_temperature(temperature, z.device)
    checks.check_choice("form", form, "paper", "code")
    views = torch.stack([z, z_adv], 1)
    if form == "paper":
        return sup_con_loss(views, labels, temperature, gathered=gathered, offset=offset, normalize=True)
    all_views, all_labels = (views, labels) if gathered is None else checks.check_pair(
        "gathered", gathered, "(views, labels) of all ranks")
    check_rows(offset, views=(views, "N v D"), **{
        "gathered: views": (all_views, "M v D"), "gathered: labels": (all_labels, "M", int)})
    (z, z_adv), (all_z, all_z_adv) = (F.normalize(x, dim=2).unbind(1) for x in (views, all_views))
    same_label = labels[:, None] == all_labels
    own = torch.zeros_like(same_label)
    own.diagonal(offset).fill_(True)
    loss = 0
    for anchors, alike, others in ((z, all_z, all_z_adv), (z_adv, all_z_adv, all_z)):
        across = anchors @ others.T / temperature
        both = torch.where(own, across, torch.logaddexp(anchors @ alike.T / temperature, across))
        log_p = both - both.logsumexp(1, keepdim=True)
        loss = loss - ((log_p * same_label).sum(1) / same_label.sum(1)).mean()
    return loss


def attention_mask_of(inputs):
    """Return the attention mask (n, L), 0 for padding; all ones if the tokenizer gives none, as FNet's."""
    return inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))


def classify_with_features(model, inputs):
    """Return (logits (n, labels), features (n, H)), both float32. The features are the input of the last
    linear layer; in training the model's dropout has been applied."""
    linear = [part for part in model.modules() if isinstance(part, torch.nn.Linear)]
    linear = [part for part in linear if part.out_features == model.config.num_labels]
    seen = []
    if not linear:
        fail(f"{type(model).__name__} has no linear layer from a text's features to its "
             f"{model.config.num_labels} labels; use another --model")
    hook = linear[-1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        logits = classify(model, inputs)
    finally:
        hook.remove()
    if len(seen) != 1:
        fail(f"{type(model).__name__} calls its last linear layer with {model.config.num_labels} outputs "
             f"{len(seen)} times per pass, expected once; use another --model", every_rank=True)
    features, = seen
    if features.dim() == 3:                                    # GPT-2: of all tokens; keep the last real one
        places = torch.arange(1, features.shape[1] + 1, device=model.device)
        last = (places * attention_mask_of(inputs)).argmax(1)
        features = features[torch.arange(len(last), device=model.device), last]
    return logits, features.float()
