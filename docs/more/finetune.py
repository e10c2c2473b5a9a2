"""Fine-tuning of a text classifier with AdamW, and with the losses of two papers. CE is the mean cross
entropy, z_i the input of the last layer for text i, and J_i are the other texts with the label of i:
    --rdrop-weight α      R-Drop (Liang, Wu et al., NeurIPS 2021, arXiv 2106.14448). Two passes with different
                          dropout predict P1 and P2.  L = CE1 + CE2 + α/2 (KL(P1‖P2) + KL(P2‖P1))
    --supcon-weight λ     supervised contrastive loss (Gunel et al., ICLR 2021, arXiv 2011.01403)
                          L = (1 − λ) CE + λ SCL,  s_ij = cos(z_i, z_j) / τ
                          SCL = mean over i of −1/|J_i| Σ_{j in J_i} log( exp s_ij / Σ_{k ≠ i} exp s_ik )

    python docs/more/finetune.py --rdrop-weight 1 --data rte.tsv --dev rte-dev.tsv
    python docs/more/finetune.py --supcon-weight 0.9 --data sst2.tsv --dev sst2-dev.tsv
    python docs/more/finetune.py --evaluate --model out/finetune --data sst2-dev.tsv

Data and defaults are those of childtuning.py.
Expected: the score on --dev rises. docs/results.md lists scores of our runs.
--form code is R-Drop's released code: L = (CE1 + CE2) / 2 + α/2 (KL(P1‖P2) + KL(P2‖P1)), with KL summed over
the batch.
Departure in both forms: SCL is a mean, not a sum, over the texts with a positive.
"""
import math
import os
import sys

import torch

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))  # where kernels/ is
from kernels import check_rows, checks, gather_rows, own_rows, sup_con_loss
from kernels.training.errors import command, fail
from kernels.training.flags import ScriptParser, at_least, fill_defaults, ratio, run_flags
from kernels.training.loop import all_reduce_gradients, decay_groups, set_lr, steps_per_epoch, warmup_linear
from kernels.training.run import Run
from kernels.training.text import classifier
from kernels.training.text.classifier import classify, make_batch, task_loss, tokenise_texts

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = ScriptParser(__doc__)
    add = parser.add_argument
    run_flags(
        parser, model="bert-large-cased", dev=None, out="out/finetune", form="paper",
        max_length=(128, "128, for both texts of a pair together, also of --dev"),
        temperature=(0.3, "0.3 (ours); only used by --supcon-weight"),
        batch_size=16, epochs=(None, "3, or 12 with --model scratch"),
        lr=(None, "4e-5, or 2e-3 with --model scratch; warm-up over a tenth of the steps, then linear "
                  "decay to 0"),
        weight_decay=(0.01, "0.01; always 0 for biases and norms"), eval_every=(None, "one epoch"))
    classifier.classifier_flags(parser)
    add("--rdrop-weight", type=at_least(0),
        help="α, weight of R-Drop's penalty for different predictions of two passes; default: one pass")
    add("--supcon-weight", type=ratio, default=0.0,
        help="λ, weight of the supervised contrastive loss; default 0")
    return parser


# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """Return a file's rows [(texts, label)] (classifier.load_rows). Set the defaults of flags not given."""
    fill_defaults(args, dict(epochs=12, lr=2e-3) if args.model == "scratch" else dict(epochs=3, lr=4e-5))
    rows = classifier.load_rows(path, args)
    if args.task == "regression" and args.supcon_weight:
        fail(f"{path}: the task is regression, but the contrastive loss needs classes as labels")
    return rows


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
        penalty = ((log1.exp() - log2.exp()) * (log1 - log2)).sum(1) / 2       # = (KL(P1‖P2) + KL(P2‖P1)) / 2
    return tasks + alpha * penalty.mean() if form == "paper" else tasks / 2 + alpha * penalty.sum()


def supcon_loss(z, labels, temperature=0.3, *, gathered=None, offset=0):
    """Return SCL, the mean supervised contrastive loss of views with a positive; 0 if no view has a positive.

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
    share = (sizes[group] * z.shape[1] > 1).to(z.dtype).mean()             # fraction of texts with a positive
    return loss / share.clamp(min=1 / len(all_labels))


def classify_with_features(model, inputs):
    """Classify texts. Return (logits (n, labels), features (n, H)), both float32. The features are the input
    of the last linear layer. In training, dropout changes them."""
    labels, seen = model.config.num_labels, []
    linear = [part for part in model.modules() if isinstance(part, torch.nn.Linear)]
    hooks = [part.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
             for part in [part for part in linear if part.out_features == labels][-1:]]
    logits = classify(model, inputs)
    for hook in hooks:
        hook.remove()
    if len(seen) != 1:
        fail(f"{type(model).__name__}: a forward pass must call the last linear layer with {labels} outputs "
             f"once, but calls it {len(seen)} times; use another --model", every_rank=True)
    features, = seen
    if features.dim() == 3:                                    # (n, L, H) in GPT-2; take the last real token
        places = torch.arange(1, features.shape[1] + 1, device=model.device)
        last = (places * inputs["attention_mask"]).argmax(1)
        features = features[torch.arange(len(last), device=model.device), last]
    return logits, features.float()


def gathered_rows(z, labels, rows):
    """Return the arguments `gathered` and `offset` of supcon_loss; {} with one rank."""
    if len(z) == rows:
        return {}
    return dict(gathered=(gather_rows(z, rows), gather_rows(labels, rows)), offset=own_rows(rows).start)


def compute_loss(model, batch, rows, args):
    """Return this rank's part of the loss of the global batch (`rows` rows), and the values to log."""
    inputs, labels = batch
    count = 1 if args.rdrop_weight is None else 2              # each pass has its own dropout
    logits, features = zip(*(classify_with_features(model, inputs) for _ in range(count)))
    if args.rdrop_weight is None:
        loss = task_loss(*logits, labels)
    else:
        # --form code: KL is a sum over rows, so cancel the factor len(labels) / rows that the loss gets below
        alpha = args.rdrop_weight * (rows / len(labels) if args.form == "code" else 1)
        loss = rdrop_loss(*logits, labels, alpha, args.form)
    if args.supcon_weight:
        z = torch.stack(features, 1)                           # two passes are two views
        contrast = supcon_loss(z, labels, args.temperature, **gathered_rows(z, labels, rows))
        loss = (1 - args.supcon_weight) * loss + args.supcon_weight * contrast
    loss = loss * (len(labels) / rows)
    return loss, {"loss": loss.detach()}


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    if args.evaluate:
        return classifier.evaluate_model(args, __file__)
    train, dev = load_data(args.data, args), load_data(args.dev, args) if args.dev else []
    run = Run(args, __file__)
    model = classifier.load_model(args, run)
    train = tokenise_texts(train, model, args.max_length, training=True)
    dev = tokenise_texts(dev, model, args.max_length)
    epoch = steps_per_epoch(len(train), args.batch_size)
    total = args.steps or args.epochs * epoch
    warmup = math.ceil(total / 10)
    args.eval_every = args.eval_every or epoch
    optimizer = torch.optim.AdamW(decay_groups(model, args.weight_decay), args.lr)
    run.begin(model, optimizer, total, warmup)
    for step, batch in run.steps(total, len(train)):
        set_lr(optimizer, warmup_linear(step - 1, total, warmup, args.lr))
        rows = [train[i] for i in batch[own_rows(len(batch))]]
        loss, values = compute_loss(model, make_batch(rows, model), len(batch), args)
        optimizer.zero_grad()
        loss.backward()
        all_reduce_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.log_metrics(values, lr=optimizer.param_groups[0]["lr"])
        if run.eval_due:
            classifier.evaluate_and_save(model, dev, args, run)
    classifier.finish_run(run, args)


if __name__ == "__main__":
    main()
