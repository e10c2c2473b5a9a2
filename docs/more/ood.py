"""Modeling Discriminative Representations for Out-of-Domain Detection with Supervised Contrastive Learning.
Zeng et al., ACL 2021, arXiv 2105.14289.

A classifier of texts is trained in two stages: first with a supervised contrastive loss, then with the cross
entropy CE. After training, three detectors separate the texts of --ood, whose classes are not in --data, from
those of --dev. z_i is the input of the last layer for text i. Each text has two views: the text itself, and
an adversarial view, in which a word embedding x becomes x + ε g / ‖g‖; g is the gradient of CE at x. J_i are
the other views with the label of view i. With s_ij = cos(z_i, z_j) / τ, the loss of the first stage is

    L = mean over views i of −1/|J_i| Σ_{j in J_i} log( exp s_ij / Σ_{k ≠ i} exp s_ik )

    python docs/more/ood.py --data intents.tsv --dev dev.tsv --ood out-of-scope.tsv --out out/ood
    python docs/more/ood.py --form code --data intents.tsv --dev dev.tsv --ood out-of-scope.tsv
    python docs/more/ood.py --evaluate --model out/ood --data intents.tsv --dev dev.tsv --ood other.tsv

Data: as for childtuning.py, with labels that are classes. --ood has the text columns of --data.
Expected: texts of unseen classes get lower scores than texts of known classes, so AUROC is above 50.
--form code follows the released code, which adds both views of a text inside one logarithm: see
ood_contrastive_loss. Departures in both forms: the encoder is a pretrained model, not a GRU on frozen word
vectors. --steps counts the second stage only; the learning-rate schedule covers both stages.
"""
import math
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))  # where kernels/ is
from childtuning import compute_loss
from finetune import classify_with_features, gathered_rows, load_data
from kernels import check_rows, checks, own_rows, sup_con_loss
from kernels.training.data import empty_cell, read_table
from kernels.training.errors import command, fail, log
from kernels.training.flags import ScriptParser, at_least, run_flags
from kernels.training.loop import all_reduce_gradients, decay_groups, set_lr, steps_per_epoch, warmup_linear
from kernels.training.run import Run
from kernels.training.text import classifier
from kernels.training.text.classifier import describe_scores, make_batch, tokenise_texts

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = ScriptParser(__doc__)
    add = parser.add_argument
    run_flags(
        parser, model="bert-large-cased", dev=None, out="out/ood", form="paper",
        max_length=(128, "128, for both texts of a pair together, also of --dev"),
        temperature=(0.1, "0.1 (released code)"), batch_size=16, epochs=(20, "20 (released code)"),
        lr=(None, "4e-5, or 2e-3 with --model scratch; warm-up over a tenth of the steps, then linear "
                  "decay to 0"),
        weight_decay=(0.01, "0.01; always 0 for biases and norms"), eval_every=(None, "one epoch"))
    classifier.classifier_flags(parser)
    add("--ood-epochs", type=at_least(0, int), default=20,
        help="epochs of the first stage, with the contrastive loss; default 20 (released code)")
    parser.add_shared("--adversarial", 0.1, "0.1 (released code)")
    add("--ood", group="evaluation", reads="held-out data",
        help="texts of classes that are not in --data; three detectors separate these texts from --dev")
    parser.set_defaults(supcon_weight=1.0)                     # load_data of finetune.py reads this value
    return parser


# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_unseen(args):
    """Read --ood into [(texts, 0)], where 0 replaces a label. A file without a header has only the text
    columns of --data. Fail if scikit-learn, which detector_scores needs, is not installed."""
    if not args.data or not args.dev:
        fail(f"--ood {args.ood}: requires --data (training texts) and --dev (other texts of these classes)")
    try:
        import sklearn.neighbors  # noqa: F401
    except ImportError:
        fail("--ood needs the package scikit-learn; run pip install scikit-learn")
    count, columns = args.widths[0] - 1, (args.columns or ())[:-1]     # args.columns is None without a header
    header, _ = read_table(args.ood, names=columns)
    _, table = read_table(args.ood, empty_cell, columns=columns if header else None)
    rows = [(tuple(texts), 0) for _, texts in table]
    if len(rows[0][0]) != count:
        fail(f"{args.ood}: {len(rows[0][0])} columns, expected {count}, the texts per row of {args.data}")
    log("data", f"{len(rows):,} texts of unseen classes from {args.ood}")
    return rows


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


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
    all_views, all_labels = (views, labels) if gathered is None else gathered
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


def adversarial_views(model, inputs, labels, size):
    """Return (logits, features z of the texts, features z' of their adversarial views). An adversarial view
    moves each word embedding by a step of length `size`, along the gradient of the summed cross entropy."""
    words, layer = [], model.get_input_embeddings()
    hook = layer.register_forward_hook(lambda layer, ids, x: words.append(x))
    logits, z = classify_with_features(model, inputs)
    hook.remove()
    task = F.cross_entropy(logits, labels, reduction="sum")
    gradient, = torch.autograd.grad(task, words, retain_graph=True)
    step = size * F.normalize(gradient, dim=2) * inputs["attention_mask"][:, :, None]
    hook = layer.register_forward_hook(lambda layer, ids, x: x + step)
    z_adv = classify_with_features(model, inputs)[1]
    hook.remove()
    return logits, z, z_adv


def compute_ood_loss(model, batch, rows, args):
    """Return the loss of the first stage and the values to log, as compute_loss does for the second stage."""
    inputs, labels = batch
    logits, z, z_adv = adversarial_views(model, inputs, labels, args.adversarial)
    loss = ood_contrastive_loss(z, z_adv, labels, args.temperature, args.form,
                                **gathered_rows(torch.stack([z, z_adv], 1), labels, rows))
    # Without 0 · logits, the last layer has no gradient if there is one rank. AdamW skips such layers.
    loss = (loss + 0 * logits.sum()) * (len(labels) / rows)
    return loss, {"loss": loss.detach()}


# ── evaluation ──────────────────────────────────────────────────────────────────────────────────────────────


def detect(model, data, args):
    """Score the texts of --dev and --ood with each detector. Print and return {"ood": {name of the detector:
    result of ood_metrics}}; {} without --ood. data: {"train", "dev", "unseen": tokenised rows}."""
    if not args.ood:
        return {}
    labels = torch.tensor([label for _, label in data["train"]])
    outputs = {name: classifier.forward_rows(model, rows, classify_with_features)
               for name, rows in data.items()}
    _, train = outputs["train"]
    known, unseen = (detector_scores(*outputs[name], train, labels) for name in ("dev", "unseen"))
    found = {name: ood_metrics(known[name], unseen[name]) for name in known}
    for name, metrics in found.items():
        log("ood", f"{name}: {describe_scores(metrics)}")
    return {"ood": found}


def detector_scores(logits, z, train, labels):
    """Return {name of the detector: scores (n,)}, which should be higher for texts of known classes.

    logits, z       (n, C) logits and (n, H) features of the texts
    train, labels   (N, H) features of the training texts, and their classes (N,)
    """
    from sklearn.neighbors import LocalOutlierFactor

    # LOF compares the density around z with that around its 20 nearest training texts (20: released code)
    factor = LocalOutlierFactor(n_neighbors=min(20, len(train) - 1), novelty=True).fit(train.double().numpy())
    return {"maximum softmax": logits.double().softmax(1).amax(1).numpy(),
            "local outlier factor": factor.score_samples(z.double().numpy()),
            "Mahalanobis": mahalanobis(train.double().numpy(), labels.numpy(), z.double().numpy())}


def mahalanobis(train, labels, x):
    """Return (n,) −(z − μ)ᵀ Σ⁺ (z − μ) for each row z of x (n, H), where μ is the nearest class mean.

    train, labels   (N, H) training features, and the class of each, (N,) integers
    source          Lee et al. 2018: Σ = 1/N Σ_i (z_i − μ_i)(z_i − μ_i)ᵀ over all classes, where μ_i is the
                    mean of the class of z_i; Σ⁺ is its pseudo-inverse
    """
    classes, group = np.unique(labels, return_inverse=True)
    means = np.stack([train[labels == label].mean(0) for label in classes])
    apart, rounding = train - means[group], np.finfo(np.float32).eps           # features are float32
    inverse = np.linalg.pinv(apart.T @ apart / len(train), rcond=rounding, hermitian=True)
    return -np.min([((x - mean) @ inverse * (x - mean)).sum(1) for mean in means], axis=0)


def ood_metrics(known, unseen):
    """Return {"AUROC", "FPR95", "F1"} in percent for scores of known rows (n,) and of unseen rows (m,).

    AUROC   probability that a known row scores higher than an unseen row; ties count half
    FPR95   fraction of unseen rows that are accepted by the threshold that accepts 95 % of the known rows
    F1      F1 of detecting unseen rows with the threshold of FPR95
    """
    from sklearn.metrics import f1_score, roc_auc_score

    scores = np.concatenate([known, unseen])
    is_unseen = np.arange(len(scores)) >= len(known)
    threshold = np.sort(known)[len(known) // 20]               # at most 5 % of known rows score lower
    return {"AUROC": 100 * float(roc_auc_score(~is_unseen, scores)),
            "FPR95": 100 * float((unseen >= threshold).mean()),
            "F1": 100 * float(f1_score(is_unseen, scores < threshold))}


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    if args.evaluate:
        model, dev = classifier.evaluate_model(args, __file__)
        data = {"unseen": load_unseen(args), "train": load_data(args.data, args)} if args.ood else {}
        data = {name: tokenise_texts(rows, model, args.max_length) for name, rows in data.items()}
        return detect(model, data | {"dev": dev}, args)
    data = {"train": load_data(args.data, args), "dev": load_data(args.dev, args) if args.dev else []}
    data["unseen"] = load_unseen(args) if args.ood else []
    run = Run(args, __file__)
    model = classifier.load_model(args, run)
    data = {name: tokenise_texts(rows, model, args.max_length, training=name == "train")
            for name, rows in data.items()}
    epoch = steps_per_epoch(len(data["train"]), args.batch_size)
    first_stage = args.ood_epochs * epoch                      # number of steps of the first stage
    total = first_stage + (args.steps or args.epochs * epoch)
    warmup = math.ceil(total / 10)
    args.eval_every = args.eval_every or epoch
    optimizer = torch.optim.AdamW(decay_groups(model, args.weight_decay), args.lr)
    run.begin(model, optimizer, total, warmup)
    for step, picked in run.steps(total, len(data["train"])):
        set_lr(optimizer, warmup_linear(step - 1, total, warmup, args.lr))
        batch = make_batch([data["train"][i] for i in picked[own_rows(len(picked))]], model)
        if step <= first_stage:
            loss, values = compute_ood_loss(model, batch, len(picked), args)
        else:
            loss, values = compute_loss(model, batch, len(picked), args)
        optimizer.zero_grad()
        loss.backward()
        all_reduce_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step == total:
            values |= detect(model, data, args)
        run.log_metrics(values, lr=optimizer.param_groups[0]["lr"])
        if run.eval_due:
            classifier.evaluate_and_save(model, data["dev"], args, run)
    classifier.finish_run(run, args)


if __name__ == "__main__":
    main()
