"""Fine-tuning of a text classifier with AdamW, and with the losses and tests of four papers. CE is the mean
cross entropy, z_i the input of the last layer for text i, and J_i are the other texts with the label of i:
    --rdrop-weight α      R-Drop (Liang, Wu et al., NeurIPS 2021, arXiv 2106.14448). Two passes with different
                          dropout predict P1 and P2.  L = CE1 + CE2 + α/2 (KL(P1‖P2) + KL(P2‖P1))
    --supcon-weight λ     supervised contrastive loss (Gunel et al., ICLR 2021, arXiv 2011.01403)
                          L = (1 − λ) CE + λ SCL,  s_ij = cos(z_i, z_j) / τ
                          SCL = mean over i of −1/|J_i| Σ_{j in J_i} log( exp s_ij / Σ_{k ≠ i} exp s_ik )
    --ood-epochs, --ood   out-of-domain detection (Zeng et al., ACL 2021, arXiv 2105.14289). A first stage
                          minimises SCL of the texts and their adversarial views. In these, a word embedding x
                          becomes x + ε g / ‖g‖; g is the gradient of CE at x. After training, three detectors
                          separate the texts of --ood (whose classes are not in --data) from those of --dev
    --contrast-set        accuracy on test texts and on edited copies with other labels (Gardner et al. 2020)

    python docs/more/finetune.py --rdrop-weight 1 --data rte.tsv --dev rte-dev.tsv
    python docs/more/finetune.py --supcon-weight 0.9 --data sst2.tsv --dev sst2-dev.tsv
    python docs/more/finetune.py --ood-epochs 20 --epochs 20 --data intents.tsv --dev dev.tsv --ood unseen.tsv
    python docs/more/finetune.py --model out/cline --data imdb.tsv --contrast-set test.tsv edited.tsv

Data and defaults are those of childtuning.py. --contrast-set has the columns of --data, --ood only the text
columns of --data.
Expected: the score on --dev rises. docs/results.md lists scores of our runs.
--form code follows the released code where it differs from the papers:
    R-Drop    L = (CE1 + CE2) / 2 + α/2 (KL(P1‖P2) + KL(P2‖P1)), with KL summed over the batch
    Zeng      SCL of the first stage adds both views of a text inside one logarithm; see ood_contrastive_loss
Departures in both forms: SCL is a mean, not a sum, over the texts with a positive. --steps does not count
--ood-epochs, but the learning-rate schedule does. Steps whose gradient is not finite are skipped.
"""
import math
import os
import sys

import torch
import torch.nn.functional as F

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))  # where kernels/ is

from finetune_detectors import attention_mask_of, classify_with_features, detector_scores, load_unseen
from kernels import check_rows, checks, gather_rows, own_rows, sup_con_loss
from kernels.training.errors import command, fail, log
from kernels.training.flags import ScriptParser, at_least, fill_defaults, ratio, run_flags
from kernels.training.loop import all_reduce_gradients, decay_groups, set_lr, steps_per_epoch, warmup_linear
from kernels.training.run import Run
from kernels.training.text import classifier
from kernels.training.text.classifier import classify, describe_scores, make_batch, task_loss, tokenise_texts

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = ScriptParser(__doc__)
    add = parser.add_argument
    run_flags(
        parser, model="bert-large-cased", dev=None, out="out/finetune", form="paper",
        max_length=(128, "128, for both texts of a pair together, also of --dev"),
        temperature=(None, "0.3 with --supcon-weight (ours), 0.1 in --ood-epochs (released code); else none"),
        batch_size=16, epochs=(None, "3, or 12 with --model scratch"),
        lr=(None, "4e-5, or 2e-3 with --model scratch; linear decay to 0"),
        weight_decay=(0.01, "0.01; always 0 for biases and norms"), eval_every=(None, "one epoch"))
    classifier.classifier_flags(parser)
    add("--rdrop-weight", type=at_least(0),
        help="α in R-Drop's loss CE1 + CE2 + α/2 (KL(P1‖P2) + KL(P2‖P1)) of two passes with different "
             "dropout. --form code halves CE1 + CE2, and sums KL over the batch; default off")
    add("--supcon-weight", type=ratio, default=0.0,
        help="λ in the loss (1 − λ) CE + λ SCL, with the supervised contrastive loss SCL; default 0")
    add("--ood-epochs", type=at_least(0, int), default=0,
        help="epochs of supervised contrastive training before fine-tuning; default 0 (released code: 20)")
    parser.add_shared("--adversarial", 0.1, "0.1 (released code); only used by --ood-epochs")
    add("--warmup-ratio", group="training", type=ratio, default=0.1,
        help="fraction of the steps for warm-up; default 0.1")
    add("--ood", group="evaluation", reads="held-out data",
        help="texts of classes that --data lacks: measure how well three detectors separate them from --dev")
    add("--contrast-set", group="evaluation", reads="held-out data", nargs=2, metavar=("ORIGINAL", "EDITED"),
        help="test texts, and edited copies of them with other labels, row by row")
    return parser


# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """Return a file's rows [(texts, label)] (classifier.load_rows). Set the defaults of flags not given."""
    fill_defaults(args, dict(epochs=12, lr=2e-3) if args.model == "scratch" else dict(epochs=3, lr=4e-5))
    rows = classifier.load_rows(path, args)
    if args.task == "regression" and (args.supcon_weight or args.ood_epochs or args.ood or args.contrast_set):
        fail("--supcon-weight, --ood-epochs, --ood and --contrast-set: the task is regression, expected "
             "classification")
    return rows


def load_test_sets(args):
    """Return {"unseen": --ood, "original" and "edited": --contrast-set} as rows; [] for a missing flag."""
    found = dict(unseen=load_unseen(args) if args.ood else [], original=[], edited=[])
    if args.contrast_set:
        found["original"], found["edited"] = (load_data(path, args) for path in args.contrast_set)
        if len(found["original"]) != len(found["edited"]):
            fail(f"--contrast-set {' '.join(args.contrast_set)}: {len(found['original'])} and "
                 f"{len(found['edited'])} rows; expected an edited text for each original, in the same order")
    return found


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def rdrop_loss(logits1, logits2, labels, alpha, form="paper"):
    """Return R-Drop's loss: task losses of two passes over the same rows, plus a penalty for differences.

    logits1, logits2   (N, C) logits of the two passes; (N, 1) in regression. Gradients flow into both
    labels             (N,) int64, or float in regression
    alpha              weight α of the penalty
    form               "paper": CE1 + CE2 + α · mean over rows of K
                       "code": (CE1 + CE2) / 2 + α · sum over rows of K (README of the released code)
                       CE1 and CE2 are the cross entropies of the passes, K = (KL(P1‖P2) + KL(P2‖P1)) / 2. In
                       regression CE1 and CE2 are mean squared errors, and K = (logits1 − logits2)²
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
        penalty = ((log1.exp() - log2.exp()) * (log1 - log2)).sum(1) / 2       # both KL divergences
    return tasks + alpha * penalty.mean() if form == "paper" else tasks / 2 + alpha * penalty.sum()


def supcon_loss(z, labels, temperature=0.3, *, gathered=None, offset=0):
    """Return SCL, the mean supervised contrastive loss of the views that have a positive; 0 if none has one.

    z         (N, V, D) features, V views of N texts; this function normalises them
    labels    (N,) integers
    gathered  on several ranks: the pair (z, labels) of all ranks, both from gather_rows; on one rank None
    offset    index of this rank's first row in `gathered`
    source    Gunel et al. 2021, eq. 3, where SCL is a sum over views, so that λ weighs more in larger batches
    """
    check_rows(z=(z, "N V D"), labels=(labels, "N", int))
    loss = sup_con_loss(z, labels, temperature, gathered=gathered, offset=offset, normalize=True)
    all_labels = labels if gathered is None else gathered[1]
    _, group, sizes = all_labels.unique(return_inverse=True, return_counts=True)
    share = (sizes[group] * z.shape[1] > 1).to(z.dtype).mean()                 # fraction with a positive
    return loss / share.clamp(min=1 / len(all_labels))


def ood_contrastive_loss(z, z_adv, labels, temperature=0.1, form="paper", *, gathered=None, offset=0):
    """Return the supervised contrastive loss of N texts and their adversarial views.

    z, z_adv     (N, D) features z_i of the texts and z'_i of their adversarial views, float32 or float64;
                 normalised here
    labels       (N,) integers
    form         "paper": SupCon's mean over all 2N views
                 "code": the mean over i of −1/|C_i| Σ_{j in C_i} log(a_ij / Σ_l a_il), plus the same with
                 z and z' swapped. a_ij = [j ≠ i] e^{z_i·z_j/τ} + e^{z_i·z'_j/τ}; [j ≠ i] is 0 for j = i,
                 else 1; C_i are the texts with the label of text i
    gathered     (pairs (z_i, z'_i) as (M, 2, D), labels) of all ranks, from gather_rows; None on one rank
    offset       index of this rank's first row in `gathered`
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


def adversarial_noise(gradient, mask, size):
    """Return noise (n, L, H), float32 or float64: for each token, a step of length `size` along its gradient.

    gradient   (n, L, H) gradient of a loss at the word embeddings, any float type; no step where it is 0
    mask       (n, L) integers, 0 for padding, which gets no step
    source     Zeng et al. 2021; the released code uses size 0.1
    """
    check_rows(gradient=(gradient, "n L H"), mask=(mask, "n L", int))
    checks.check_number("size", size)
    upcast = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return size * F.normalize(upcast, dim=2) * (mask != 0)[:, :, None]


def adversarial_views(model, inputs, labels, size):
    """Return (logits, features z of the texts, features z' of their adversarial views). Adversarial views add
    steps of length `size` to the word embeddings, along the gradient of the cross entropy."""
    words, mask = [], attention_mask_of(inputs)
    try:
        layer = model.get_input_embeddings()
    except NotImplementedError:
        fail(f"{type(model).__name__} has no word embeddings; --ood-epochs needs a model like BERT")
    hook = layer.register_forward_hook(lambda layer, ids, x: words.append(x))
    logits, z = classify_with_features(model, inputs)
    hook.remove()
    if len(words) != 1 or words[0].shape[:2] != mask.shape:    # T5: two calls; XLNet: length before batch
        fail(f"{type(model).__name__} does not embed the words of a batch in one call, one text per row; "
             "--ood-epochs needs a model like BERT", every_rank=True)
    task = F.cross_entropy(logits, labels, reduction="sum")
    gradient, = torch.autograd.grad(task, words, retain_graph=True)
    step = adversarial_noise(gradient, mask, size)
    hook = layer.register_forward_hook(lambda layer, ids, x: x + step)
    z_adv = classify_with_features(model, inputs)[1]
    hook.remove()
    return logits, z, z_adv


def gathered_rows(z, labels, rows):
    """Return the arguments gathered and offset of supcon_loss and ood_contrastive_loss; {} with one rank."""
    if len(z) == rows:
        return {}
    return dict(gathered=(gather_rows(z, rows), gather_rows(labels, rows)), offset=own_rows(rows).start)


def compute_loss(model, batch, rows, args):
    """Return this rank's part of the loss of the global batch (`rows` rows), and the values to log."""
    inputs, labels = batch
    passes = [classify_with_features(model, inputs) if args.supcon_weight else (classify(model, inputs), None)
              for _ in range(1 if args.rdrop_weight is None else 2)]           # each pass has its own dropout
    logits, features = zip(*passes)
    if args.rdrop_weight is None:
        loss = task_loss(*logits, labels)
    else:
        # --form code: KL is a sum over rows, so cancel the factor len(labels) / rows that the loss gets below
        alpha = args.rdrop_weight * (rows / len(labels) if args.form == "code" else 1)
        loss = rdrop_loss(*logits, labels, alpha, args.form)
    if args.supcon_weight:
        z = torch.stack(features, 1)                           # two passes are two views
        contrast = supcon_loss(z, labels, args.temperature or 0.3, **gathered_rows(z, labels, rows))
        loss = (1 - args.supcon_weight) * loss + args.supcon_weight * contrast
    loss = loss * (len(labels) / rows)
    return loss, {"loss": loss.detach()}


def compute_ood_loss(model, batch, rows, args):
    """Do the same as compute_loss for the contrastive loss of --ood-epochs."""
    inputs, labels = batch
    logits, z, z_adv = adversarial_views(model, inputs, labels, args.adversarial)
    loss = ood_contrastive_loss(z, z_adv, labels, args.temperature or 0.1, args.form,
                                **gathered_rows(torch.stack([z, z_adv], 1), labels, rows))
    # 0 · logits: the last layer's gradient is 0, not None, so AdamW steps as on several ranks
    loss = (loss + 0 * logits.sum()) * (len(labels) / rows)
    return loss, {"loss": loss.detach()}


# ── evaluation ──────────────────────────────────────────────────────────────────────────────────────────────


def score_test_sets(model, data, args):
    """Score --contrast-set and --ood. Print and return {"contrast": scores, "ood": {detector: scores}}.
    data: {name: tokenised rows}, with the names "train", "dev", "unseen", "original" and "edited"."""
    found = {}
    if args.contrast_set:
        pairs = [(classifier.predict(model, rows).argmax(1), torch.tensor([label for _, label in rows]))
                 for rows in (data["original"], data["edited"])]
        right = torch.stack([predicted == labels for predicted, labels in pairs]).double()
        shares = {"original": right[0], "edited": right[1], "consistency": right.prod(0)}
        found["contrast"] = {name: 100 * share.mean().item() for name, share in shares.items()}
        log("test", f"{describe_scores(found['contrast'])}  {' '.join(args.contrast_set)}")
    if args.ood:
        parts = [classifier.forward_rows(model, data[name], classify_with_features)
                 for name in ("dev", "unseen", "train")]
        found["ood"] = detector_scores(*parts, torch.tensor([label for _, label in data["train"]]))
        for detector, scores in found["ood"].items():
            log("ood", f"{detector}: {describe_scores(scores)}")
    return found


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    if args.evaluate:
        model, dev = classifier.evaluate_model(args, __file__)
        data = load_test_sets(args) | {"train": load_data(args.data, args) if args.ood else []}
        data = {name: tokenise_texts(rows, model, args.max_length) for name, rows in data.items()}
        return score_test_sets(model, data | {"dev": dev}, args)
    data = {"train": load_data(args.data, args), "dev": load_data(args.dev, args) if args.dev else []}
    data |= load_test_sets(args)
    run = Run(args, __file__)
    model = classifier.load_model(args, run)
    data = {name: tokenise_texts(rows, model, args.max_length, training=name == "train")
            for name, rows in data.items()}
    epoch = steps_per_epoch(len(data["train"]), args.batch_size)
    ood_steps = args.ood_epochs * epoch                        # the first steps use compute_ood_loss
    total = ood_steps + (args.steps or args.epochs * epoch)
    warmup = math.ceil(args.warmup_ratio * total)
    args.eval_every = args.eval_every or epoch
    optimizer = torch.optim.AdamW(decay_groups(model, args.weight_decay), args.lr)
    run.extra_state["skipped"] = 0
    run.begin(model, optimizer, total)
    logged = {"loss": math.nan}
    for step, batch in run.steps(total, len(data["train"])):
        set_lr(optimizer, warmup_linear(step - 1, total, warmup, args.lr))
        rows = [data["train"][i] for i in batch[own_rows(len(batch))]]
        loss_of = compute_ood_loss if step <= ood_steps else compute_loss
        loss, values = loss_of(model, make_batch(rows, model), len(batch), args)
        optimizer.zero_grad()
        loss.backward()
        all_reduce_gradients(model)
        if torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            optimizer.step()
        else:
            run.extra_state["skipped"] += 1
            values = logged                                    # the loss may be NaN: log the previous values
            log("note", f"step {step}: the gradient is not finite; the step is skipped")
        if step == total:
            values = values | score_test_sets(model, data, args)
        run.log_metrics(values, lr=optimizer.param_groups[0]["lr"], skipped=run.extra_state["skipped"])
        logged = run.values
        if run.eval_due:
            classifier.evaluate_and_save(model, data["dev"], args, run)
    classifier.finish_run(run, args)


if __name__ == "__main__":
    main()
