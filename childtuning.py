"""Child-Tuning: Raise a Child in Large Language Model: Towards Effective and Generalizable Fine-tuning.
Xu, Luo, Zhang, Tan, Chang, Huang, Huang, EMNLP 2021, arXiv 2109.05687.

A pretrained classifier is fine-tuned with AdamW, but the gradient g reaches a part of its weights, the child:

    F (task-free)    g ← g ⊙ M / p,   M ~ Bernoulli(p), drawn for every weight at every step
    D (task-driven)  g ← g ⊙ M,       M = 1 for the share p of weights with the largest Fisher information F,
                                      for good; F_i = 1/N Σ_n (∂ log P(y_n | x_n) / ∂w_i)²

--mode none is plain AdamW. --rdrop α is R-Drop (Liang, Wu et al., NeurIPS 2021, arXiv 2106.14448): every row
passes through the network twice, with different dropout (P1, P2), and the loss is, in means over the batch,

    CE1 + CE2 + α · ( KL(P1‖P2) + KL(P2‖P1) ) / 2         regression: squares of differences for CE and KL

--supcon λ makes it (1 − λ) CE + λ SCL, a contrastive loss of what the classifier reads (Gunel et al., ICLR
2021, arXiv 2011.01403). --ood FILE has texts of no class of the data: after each trial they are told from
--dev's by maximum softmax, local outlier factor and Mahalanobis distance. --ood-epochs come first, for these
(Zeng et al., ACL 2021, arXiv 2105.14289): ood_contrastive_loss alone, of each text and its adversarial view;
optimizer and rate go on from there.

Data: .csv .tsv .json .jsonl with one or two columns of text and one of labels: by header (sentence, or
sentence1 and sentence2; label or score), by --text and --label, or all columns, the label last. Labels are
any texts; numbers with a point are regression.

    python childtuning.py --model scratch --data tests/data/topics.tsv --dev tests/data/topics_dev.tsv
    python childtuning.py --data rte.tsv --dev rte_dev.tsv --form code --mode none F D --seeds 10
    python childtuning.py --model out/cline --mode none --data imdb.tsv --contrast-set test.tsv edited.tsv
    torchrun --nproc-per-node 4 childtuning.py --data cola.tsv --dev cola_dev.tsv --metric matthews

The third fine-tunes what cline.py wrote (or tacl.py), and scores it on a contrast set: texts, and minimal
edits of them that change the label, in two files, row by row.

Expected, of runs like the second for CoLA, RTE, MRPC and STS-B of GLUE: in the paper the mean of their dev
scores is 1.5 to 8.6 points above plain AdamW's (--mode none), by the large model, and D at least as F. The
authors ran --form code, with --reserve-p 0.2 for CoLA and STS-B, 0.3 for RTE, 0.4 (F) and 0.1 (D) for MRPC;
other defaults are their script's, for RTE and bert-large-cased. A trial, one mode with one seed, scores what
its last step does, as theirs: nothing is chosen within it. --out keeps the best trial.

--form code is the released code: Fisher information from the gradients of whole batches, each clipped to norm
1 tensor by tensor, with dropout, for the weights named "layer" alone; no warm-up in modes F and D; R-Drop's
readme: the mean of both CE, and KL summed over the batch, so that α is comparable under one form only; and
the released ood_contrastive_loss. Departures from both: processes share their draws (F) and Fisher
information (D), where each had its own; a step whose gradient is not finite is skipped; Zeng et al. had a GRU
on frozen embeddings.
"""
from kernels.training.cli import Flags, answer_early, at_least, command, fail, fill, ratio, say

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────

METRICS = {"classification": ("accuracy", "f1", "matthews"), "regression": ("spearman", "pearson")}


def make_parser():
    parser = Flags(__doc__)
    add, common = parser.add_argument, parser.common
    parser.set_defaults(labels=None)                           # load_data fills it
    add("--mode", nargs="+", choices=("none", "F", "D"), default=["D"], help="one or several; default D")
    add("--seeds", type=at_least(1, int), default=1, help="trials a mode, from --seed upwards; default 1")
    add("--reserve-p", type=float, default=0.3, help="p, the child's share; default 0.3 (released script)")
    common("--form", "paper")
    add("--fisher-samples", type=at_least(1, int), help="rows of the Fisher information; default all (paper)")
    add("--fisher-batch-size", type=at_least(1, int), help="rows a gradient; default 1 (paper), code 16")
    add("--fisher-clip", type=at_least(0), help="a tensor's largest norm; default 0: any (paper), code 1")
    add("--child", help="what D's weights have in their names; default all but the head (paper), code layer")
    add("--rdrop", type=at_least(0), help="α of R-Drop; default off; GLUE: 0.1 to 1 (its paper; form paper)")
    add("--supcon", type=ratio, default=0.0, help="λ, the share of SCL; default 0: none")
    add("--ood-epochs", type=at_least(0, int), default=0, help="that come first; default 0, released code 20")
    common("--adversarial", 0.1, "0.1 (released code)")
    common("--temperature", said="0.3 for --supcon (ours), 0.1 for --ood-epochs (released code)")
    add("--warmup-share", type=ratio, help="of steps with a rising rate; default 0.1 (paper), code F, D 0")
    common("--weight-decay", 0.01, "0.01, biases and norms 0 (released script)")
    add("--text", nargs="+", help="the columns of text, one or two; default see above")
    add("--label", help="the column of labels; default see above")
    add("--task", choices=tuple(METRICS), help="default by the labels, see above")
    add("--metric", choices=sum(METRICS.values(), ()),
        help="compares trials; f1 of label 1 for labels 0, 1, else macro f1; default accuracy or spearman")
    parser.plain("--evaluate", "--data", "--dev")
    add("--contrast-set", reads="held-out data", nargs=2, metavar=("ORIGINAL", "EDITED"),
        help="test texts, and the same edited so that their labels change, row by row")
    add("--ood", reads="held-out data",
        help="texts of other classes than --data's, to be told from --dev's; labels are not read")
    common("--model", "bert-large-cased")
    common("--out", "out/childtuning")
    common("--batch-size", 16, "16 (released script)")
    common("--epochs", said="3 (released script), scratch 12")
    common("--steps", said="by --epochs")
    common("--lr", said="4e-5 (released script), scratch 2e-3, falling linearly to 0")
    common("--max-length", 128, "128 (released script), of a pair in all")
    common("--seed", 42)
    common("--eval-every", said="an epoch")
    parser.plain("--resume", "--keep-state", "--log", "--precision")
    return parser


if __name__ == "__main__":
    answer_early(make_parser)  # --help, and wrong flags, before the seconds that torch takes

import argparse
import itertools
import math
import re
from collections import Counter

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification

from kernels import check_rows, checks, gather_rows, own_rows, sup_con_loss
from kernels.training.extras.adversarial import adversarial_views
from kernels.training.loop import batches, epoch_steps, set_lr, sum_gradients, warmup_linear
from kernels.training.progress import progress
from kernels.training.run import Run
from kernels.training.tables import empty_cell, texts_of
from kernels.training.text import classifier
from kernels.training.text.classifier import (
    classify,
    classify_vectors,
    evaluate,
    make_batch,
    mask_of,
    tokenise_texts,
)
from kernels.training.text.classifier import (
    confusion_scores as confusion_scores,  # for those who want it from here
)
from kernels.training.text.labelled import find_columns
from kernels.training.text.models import load_text_model, longest_input

# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """[(texts, label)]: one text or two, and the label's place in args.labels, or a number in regression.

    The first file, the training data, decides the task, the labels and the flags that were not given.
    """
    table, texts, label = find_columns(path, args)
    rows = [(place, tuple(cells[i] for i in texts), cells[label].strip()) for place, cells in table]
    for place, sentences, answer in rows:
        if fault := empty_cell((*sentences, answer)):
            fail(f"{path} {place}: {fault}")
    counts = Counter(answer for *_, answer in rows)
    if args.labels is None:
        decide_flags(counts, args)
        if len(counts) == 1:
            fail(f"{path}: every label is {rows[0][2]!r}; wanted at least two")
        if args.batch_size > len(rows):
            fail(f"{path}: {len(rows)} rows, wanted at least --batch-size, which is {args.batch_size}")
    values = {answer: i for i, answer in enumerate(args.labels)}
    wanted = f"one of {args.data or args.model}, which are {', '.join(args.labels)}"[:300]
    if args.task == "regression":
        values = {text: float(text) for text in counts if re.fullmatch(NUMBER, text)}
        values, wanted = {text: x for text, x in values.items() if abs(x) < 1e18}, "a number below 1e18"
    for place, _, answer in rows:
        if answer not in values:
            fail(f"{path} {place}: label {answer[:40]!r}, wanted {wanted}")
    usual, kind = max(counts, key=counts.get), "pairs" if len(texts) == 2 else "texts"
    say("data", f"{args.task}: {len(rows):,} {kind} from {path}, {len(counts)} labels, "
                f"{100 * counts[usual] / len(rows):.1f} % {usual}")
    return [(sentences, values[answer]) for _, sentences, answer in rows]


NUMBER, WHOLE = r"[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d\d?)?", r"-?\d{1,18}"


def decide_flags(labels, args):
    """Fills the flags that were not given, by the labels of the training data, --form and --model."""
    numbers = all(re.fullmatch(NUMBER, label) for label in labels) and any("." in label for label in labels)
    code, scratch = args.form == "code", args.model == "scratch"
    fill(args, dict(task="regression" if numbers else "classification", epochs=12 if scratch else 3,
                    lr=2e-3 if scratch else 4e-5, fisher_batch_size=16 if code else 1,
                    fisher_clip=1.0 if code else 0.0))
    fill(args, dict(metric=METRICS[args.task][0]))
    by_value = all(re.fullmatch(WHOLE, label) for label in labels)
    order = (lambda label: (int(label), label)) if by_value else None
    args.labels = sorted(labels, key=order) if args.task == "classification" else []
    if args.metric not in METRICS[args.task]:
        fail(f"--metric {args.metric}: this is {args.task}, wanted {', '.join(METRICS[args.task])}")
    if args.task == "regression" and (args.supcon or args.ood_epochs):
        fail("--supcon and --ood-epochs: this is regression, wanted classes")
    if not 0 < args.reserve_p <= 1:
        fail(f"--reserve-p {args.reserve_p}: wanted a share above 0, up to 1")


def build_model(args, run):
    """The classifier with its tokenizer; --seed draws its head."""
    torch.manual_seed(args.seed)
    head = dict(problem_type="regression", num_labels=1)
    if args.labels:
        names, numbers = dict(enumerate(args.labels)), {label: i for i, label in enumerate(args.labels)}
        head = dict(problem_type="single_label_classification", id2label=names, label2id=numbers)
    auto = AutoModelForSequenceClassification
    model, tokenizer = load_text_model(args.model, texts_of(args.data), auto, **head)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    if args.max_length > (longest := longest_input(model.base_model, tokenizer)):
        fail(f"--max-length {args.max_length}: {args.model} reads at most {longest} tokens")
    names = [name for name, _ in model.named_parameters()]
    model.child = args.child or ("layer" if args.form == "code" else f"{model.base_model_prefix}.")
    if "D" in args.mode and not any(model.child in name for name in names):
        fail(f"--child {model.child}: in no name of the weights of {args.model}, which are like "
             f"{names[len(names) // 2]}")
    model.tokenizer, model.bf16 = tokenizer, run.bf16
    return model.to(run.device).train()


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def compute_loss(model, batch, rows, args):
    """This rank's part of the task's loss of a batch of `rows` rows, with --rdrop of two passes."""
    inputs, labels = batch
    share = len(labels) / rows
    read = classify_vectors if args.supcon else lambda *x: (classify(*x), None)
    logits, vectors = zip(*(read(model, inputs) for _ in range(1 if args.rdrop is None else 2)))
    if args.rdrop is None:
        loss = task_loss(*logits, labels)
    else:
        alpha = args.rdrop / (share if args.form == "code" else 1)  # a sum over rows is whole as it is
        loss = rdrop_loss(*logits, labels, alpha, args.form)
    if args.supcon:
        z = gather_rows(torch.stack(vectors, 1), rows)         # two passes are two views
        contrast = supcon_loss(z, gather_rows(labels, rows), args.temperature or 0.3)
        loss = (1 - args.supcon) * loss + args.supcon * contrast
    loss = loss * share
    return loss, {"loss": loss.detach()}


def compute_ood_loss(model, batch, rows, args):
    """The same of --ood-epochs; the adversarial view's word embeddings go up the cross entropy's gradient."""
    inputs, labels = batch
    (logits, z), (_, z_adv) = adversarial_views(
        model, lambda: classify_vectors(model, inputs), mask_of(inputs), args.adversarial,
        lambda found: F.cross_entropy(found[0], labels, reduction="sum"))
    gathered = [gather_rows(x, rows) for x in (z, z_adv, labels)]
    loss = ood_contrastive_loss(*gathered, args.temperature or 0.1, args.form) * (len(labels) / rows)
    loss = loss + 0 * logits.sum()  # the classifier's gradient is zeros, as sum_gradients makes it of None
    return loss, {"loss": loss.detach()}


def task_loss(logits, labels):
    """Mean cross entropy of logits (N, C), int64 labels (N,), or squared error of (N, 1) and float (N,)."""
    checks.check_dense("labels", labels)
    one = {"C": 1} if torch.is_tensor(labels) and labels.dtype in checks.FLOATS else {}       # in regression
    check_rows(logits=(logits, "N C"), labels=(labels, "N", float if one else int), **one)
    checks.check_index("labels", labels, logits.shape[1], -100)
    return F.mse_loss(logits[:, 0], labels) if one else F.cross_entropy(logits, labels.long())


def rdrop_loss(logits1, logits2, labels, alpha, form="paper"):
    """R-Drop: the task's losses of two passes of the same rows, and how far their predictions are apart.

    logits1, logits2   (N, C), or (N, 1) in regression; every term gives both of them gradient
    labels             (N,) int64, or float in regression, which has (logits − label)² for CE and
                       (logits1 − logits2)² for KL
    form               "paper": CE1 + CE2 + α · mean over rows of (KL(P1‖P2) + KL(P2‖P1)) / 2
                       "code": (CE1 + CE2) / 2 + α · their sum over rows, as the readme of the released code
    raises             ValueError naming the argument, what it was and what is wanted
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
    """SCL: mean of SupCon over those of raw vectors z (N, V, D), V views of N texts with integer labels (N,),
    that have another of their label; 0 if none has.

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
    raises       ValueError naming the argument, what it was and what is wanted
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


class ChildTuningAdamW(torch.optim.Optimizer):
    """AdamW whose gradient reaches the child alone: g ← g ⊙ M / p in mode F, g ⊙ M in mode D; then

        m ← β1 m + (1 − β1) g            v ← β2 v + (1 − β2) g²
        w ← w − a m / (√v + eps)         a = lr √(1 − β2^t) / (1 − β1^t), t from 1; without correct_bias, lr
        w ← w − lr · weight_decay · w    every weight decays, masked or not

    mode        "none"; "F": M ~ Bernoulli(p) anew at every step; "D": the given masks, without 1 / p
    reserve_p   p of mode F, in (0, 1]; 1 draws nothing. A group may have its own of this and of all above
    masks       {parameter: bool tensor}, or a function from a parameter to one that is asked at every step;
                in mode F instead of the draws; a parameter without a mask (None) gets its whole gradient
    generator   of the draws; None: one with seed 0, so ranks draw alike. state_dict() has it, and the masks
    raises      ValueError naming the argument; RuntimeError for sparse gradients, or masks that mode D lacks
    source      Xu et al. 2021, with the released optimizer's rule

    .grad is left as it is. torch.compile takes step(), with lr as a tensor; mode F breaks the graph to draw.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, correct_bias=True,
                 mode="none", reserve_p=1.0, masks=None, generator=None):
        mode = (mode or "none").removeprefix("ChildTuning-")   # the released names
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, correct_bias=correct_bias,
                        mode=mode, reserve_p=reserve_p)
        fits = dict(lr=lr >= 0, betas=all(0 <= beta < 1 for beta in betas), eps=eps >= 0,
                    weight_decay=weight_decay >= 0, mode=mode in ("none", "F", "D"),
                    reserve_p=0 < reserve_p <= 1)
        for name in fits:
            if not fits[name]:
                raise ValueError(f"{name} is {defaults[name]!r}")
        self.mask_function, self.masks = (masks, None) if callable(masks) else (None, masks)
        self.drawn = {}
        for w, mask in (self.masks or {}).items():
            if not torch.is_tensor(w) or mask.dtype != torch.bool or mask.shape != w.shape:
                raise ValueError("masks: wanted {parameter: bool tensor of its shape}")
        super().__init__(params, defaults)
        self.generator = generator or torch.Generator(self.weights()[0].device).manual_seed(0)

    def weights(self):
        return [w for group in self.param_groups for w in group["params"]]

    def state_dict(self):
        masks = None if self.masks is None else [self.masks.get(w) for w in self.weights()]
        return super().state_dict() | {"masks": masks, "generator": self.generator.get_state()}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.generator.set_state(state_dict["generator"].cpu())
        for state in self.state.values():
            state["step"] = state["step"].cpu()                # torch.load may have moved it
        if state_dict["masks"] is not None:
            pairs = zip(self.weights(), state_dict["masks"])
            self.masks = {w: m.to(w.device, torch.bool).view(w.shape) for w, m in pairs if m is not None}

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(group["mode"] == "F" and group["reserve_p"] < 1 for group in self.param_groups):
            self.draw()
        for group in self.param_groups:
            self.step_group(group)
        return loss

    def step_group(self, group):
        weights = [w for w in group["params"] if w.grad is not None and w.numel()]
        states, compiled = [self.state[w] for w in weights], torch.compiler.is_compiling()
        for w, state in zip(weights, states):
            if not state:
                state |= dict(step=torch.zeros((), dtype=torch.float64), exp_avg=torch.zeros_like(w),
                              exp_avg_sq=torch.zeros_like(w))
            state["step"] += 1
        (beta1, beta2), lr = group["betas"], group["lr"] if compiled else float(group["lr"])
        times = [state["step"] if compiled else state["step"].item() for state in states]
        rates = [lr] * len(times)
        if group["correct_bias"]:
            rates = [lr * (1 - beta2 ** t) ** 0.5 / (1 - beta1 ** t) for t in times]
        rows = [(w, w.grad, state["exp_avg"], state["exp_avg_sq"], mask, rate)
                for w, state, mask, rate in zip(weights, states, self.masks_of(weights, group), rates)]
        if compiled or any(w.is_cuda for w in weights):        # in one go, with masks and without
            for masked in (False, True):
                if part := [row for row in rows if (row[4] is not None) == masked]:
                    self.update(*map(list, zip(*part)), lr, group)
        else:  # in blocks, whose temporaries stay in a CPU's cache: half the time
            for row in rows:
                for block in blocks(row):
                    self.update(*([x] for x in block), lr, group)

    def masks_of(self, weights, group):
        """A bool tensor for each weight, or None for all of it."""
        if any(w.grad.is_sparse for w in weights):
            raise RuntimeError("sparse gradients are not supported")
        if group["mode"] == "D" and group["reserve_p"] < 1 and self.mask_function is self.masks is None:
            raise RuntimeError("mode D has no masks: give them, or load a state_dict that has them")
        find = self.mask_function or (self.drawn if self.masks is None else self.masks).get
        return [None if group["mode"] == "none" else find(w) for w in weights]

    @torch.compiler.disable
    def draw(self):
        """Masks of mode F: integers under a bound, p to 2^-32; bernoulli_ takes a CPU five times as long."""
        if self.mask_function is not None or self.masks is not None:
            return
        for group in self.param_groups:
            bound = min(round(group["reserve_p"] * 2**32) - 2**31, 2**31 - 1)
            draws = group["mode"] == "F" and group["reserve_p"] < 1
            for w in (w for w in group["params"] if draws and w.grad is not None and w.numel()):
                if w not in self.drawn:
                    self.drawn[w] = torch.empty(w.shape, dtype=torch.bool, device=w.device)
                for part in self.drawn[w].view(-1).split(w.numel() if w.is_cuda else BLOCK):
                    pairs = torch.empty((len(part) + 1) // 2, dtype=torch.int64, device=self.generator.device)
                    pairs.random_(-2**63, None, generator=self.generator)
                    part.copy_(pairs.view(torch.int32)[: len(part)] < bound)

    def update(self, weights, gradients, m, v, masks, rates, lr, group):
        """The rule above for lists of tensors; all have a mask, or none has."""
        beta1, beta2 = group["betas"]
        if masks[0] is not None:  # bits times 0 or 1: NaN is 0, and where() takes a CPU longer
            bits = [gradient.view(INTEGER[gradient.element_size()]) for gradient in gradients]
            bits = torch._foreach_mul(bits, masks)
            gradients = [child.view(gradient.dtype) for child, gradient in zip(bits, gradients)]
            if group["mode"] == "F":
                torch._foreach_mul_(gradients, 1 / group["reserve_p"])
        torch._foreach_lerp_(m, gradients, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, gradients, gradients, 1 - beta2)
        roots = torch._foreach_rsqrt(v)  # a CPU's sqrt takes ten times as long for 0, most of v in mode D
        torch._foreach_reciprocal_(roots)
        torch._foreach_add_(roots, group["eps"])
        if torch.compiler.is_compiling():                      # lr and rates may be tensors
            torch._foreach_sub_(weights, torch._foreach_mul(torch._foreach_div(m, roots), rates))
            torch._foreach_sub_(weights, torch._foreach_mul(weights, lr * group["weight_decay"]))
        else:
            torch._foreach_addcdiv_(weights, m, roots, [-rate for rate in rates])
            torch._foreach_add_(weights, weights, alpha=-lr * group["weight_decay"])


BLOCK = 2**18                                                  # weights
INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}     # of as many bytes


def blocks(row):
    """The same blocks, of some BLOCK weights, of all tensors in the row; what is no tensor is repeated."""
    size = max(1, BLOCK * len(torch.atleast_1d(row[0])) // row[0].numel())
    return zip(*(torch.atleast_1d(x).split(size) if torch.is_tensor(x) else itertools.repeat(x) for x in row))


def fisher_mask(model, batches, loss, reserve_p, max_grad_norm=None, name_filter=None):
    """The child of mode D: the share p of the weights with the largest Fisher information.

    batches, loss, max_grad_norm, name_filter    see fisher_information
    reserve_p    p in (0, 1]
    returns      ({name: bool tensor}, threshold): F ≥ threshold, numpy's percentile 100 (1 − p) of all F
                 together, linearly interpolated; ties stay, so a threshold of 0 keeps all (released code)
    raises       ValueError for p, and as fisher_information
    memory       F goes to the host, once
    """
    if not 0 < reserve_p <= 1:
        raise ValueError(f"reserve_p: {reserve_p}, wanted a share in (0, 1]")
    fisher = fisher_information(model, batches, loss, max_grad_norm, name_filter)
    values = torch.cat([x.flatten().cpu() for x in fisher.values()]).numpy()
    threshold = float(np.percentile(values, np.float64(100 * (1 - reserve_p)), overwrite_input=True))
    return {name: x >= threshold for name, x in fisher.items()}, threshold


def fisher_information(model, batches, loss, max_grad_norm=None, name_filter=None):
    """{name: F}, F = 1/N Σ (∂ loss(model, batch) / ∂w)² over N batches, shaped as w, in float32 or float64.

    The labels are the data's: the empirical Fisher information. Batches of one row are the paper's; in larger
    ones, as the released code's of 16, cross terms enter. The model stays in its mode, and .grad as it is.

    batches        what loss takes, one after the other; under torchrun a share a rank, which gets F of all
    loss           loss(model, batch) → scalar
    max_grad_norm  clips each tensor's gradient, alone, before it is squared (released code: 1.0); None: not
    name_filter    a function of the name, or what it has in it (released code: "layer"); None: all weights
    raises         ValueError where no trained weight has such a name, or no batch a finite gradient; one
                   without is left out
    source         Xu et al. 2021; weights without gradient, frozen or unused, have F = 0
    """
    fits = name_filter if callable(name_filter) else lambda name: (name_filter or "") in name
    weights = {name: w for name, w in model.named_parameters() if fits(name)}
    trained = {name: w for name, w in weights.items() if w.requires_grad}
    if not trained:
        last = [name for name, _ in model.named_parameters()][-1:]
        raise ValueError(f"name_filter: no trained weight has such a name; the last is {last}")
    fisher = {name: torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32))
              for name, w in weights.items()}
    used = left_out = 0
    for batch in progress(batches, "Fisher information", " batches"):
        gradients = torch.autograd.grad(loss(model, batch), list(trained.values()), materialize_grads=True)
        gradients = [gradient.detach().to(fisher[name].dtype)      # zeros of torch 2.9 require a gradient
                     for name, gradient in zip(trained, gradients)]
        norms = torch._foreach_norm(gradients)
        if not torch.stack(norms).isfinite().all():
            left_out += 1
            continue
        used += 1
        for name, gradient, norm in zip(trained, gradients, norms):
            if max_grad_norm is not None:
                gradient = gradient * (max_grad_norm / (norm + 1e-6)).clamp(max=1)
            fisher[name].addcmul_(gradient, gradient)
    if dist.is_initialized():
        counts = torch.tensor([used, left_out], device=fisher[min(trained)].device)
        for total in (counts, *fisher.values()):
            dist.all_reduce(total)
        used, left_out = counts.tolist()
    if left_out:
        say("note", f"{left_out} of {used + left_out} batches of the Fisher information have no finite "
                    "gradient and are left out")
    if not used:
        raise ValueError("batches: none has a finite gradient")
    torch._foreach_div_(list(fisher.values()), used)
    return fisher


def find_child(model, rows, args):
    """{weight: mask} of mode D, from --fisher-samples rows; without dropout, or with it in --form code."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(args.seed)).tolist()
    order, size = order[: args.fisher_samples], args.fisher_batch_size
    chunks = [order[i : i + size] for i in range(0, len(order), size)]
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def loss(model, chunk):
        inputs, labels = make_batch([rows[i] for i in chunk], model)
        return task_loss(classify(model, inputs), labels)

    model.train(args.form == "code")
    try:
        masks, threshold = fisher_mask(model, chunks[rank::world], loss, args.reserve_p,
                                       args.fisher_clip or None, model.child)
    except ValueError as error:
        fail(f"Fisher information: {error}")
    model.train()
    kept = sum(mask.sum().item() for mask in masks.values())
    total = sum(mask.numel() for mask in masks.values())
    say("child", f"{100 * kept / total:.2f} % of {total / 1e6:.1f} M weights, Fisher information from "
                 f"{threshold:.1e}{', which all have' if threshold == 0 else ''}")
    return {w: masks[name] for name, w in model.named_parameters() if name in masks}


def make_optimizer(model, args, masks=None):
    """Of a trial, in one mode; biases and norms do not decay."""
    weights = [w for w in model.parameters() if w.requires_grad]
    groups = [dict(params=[w for w in weights if w.dim() > 1], weight_decay=args.weight_decay),
              dict(params=[w for w in weights if w.dim() <= 1], weight_decay=0.0)]
    generator = torch.Generator(model.device).manual_seed(args.seed)
    return ChildTuningAdamW(groups, args.lr, eps=1e-8, mode=args.mode, reserve_p=args.reserve_p, masks=masks,
                            generator=generator)


# ── evaluation ──────────────────────────────────────────────────────────────────────────────────────────────


def judge(model, dev, contrast, ood_rows, trial, run, total):
    """Evaluates, and saves the model: in the first trial the newest, then the last one of the best trial."""
    first, last = run.step <= total, run.step % total == 0
    scores, best = evaluate(model, dev, trial) if dev else {}, run.progress["saved"]
    better = not dev or best is None or scores[trial.metric] > best[trial.metric]
    run.values["saved"] = first or last and better
    run.values |= {f"dev_{name}": score for name, score in scores.items()}
    if run.values["saved"]:
        run.progress["saved"] = {"mode": trial.mode, "seed": trial.seed, **scores}
        classifier.save(model, trial, run)
    if last and contrast:
        scores |= classifier.contrast_scores(model, *contrast)
    if last:
        run.progress["scores"].append(scores)
    if scores:
        found = classifier.mean_and_spread([scores], trial.labels)
        say("dev", f"step {run.step:,}, mode {trial.mode}, seed {trial.seed}: {found}")
    if last and ood_rows:
        classifier.judge_unseen(model, ood_rows, trial, run)


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


def order_of(trials, total, rows, least):
    """A function of a step: the row numbers of each batch after it, trial after trial of `total` steps."""
    def after(step):
        for number in range(step // total, len(trials)):
            done, trial = max(0, step - number * total), trials[number]
            order = batches(rows, trial.batch_size, trial.seed, done, least)
            yield from itertools.islice(order, total - done)
    return after


def warmup_steps(trial, total):
    """Of total steps, with a rising rate. Released F and D have a scheduler of their own, which has none."""
    default = 0.0 if trial.form == "code" and trial.mode != "none" else 0.1
    return math.ceil((default if trial.warmup_share is None else trial.warmup_share) * total)


def begin_trial(trials, number, rows, run):
    """(a new model, its optimizer, which in mode D has the model's child) of trials[number]"""
    trial, masks = trials[number], None
    model = build_model(trial, run)
    if trial.mode == "D" and trial.reserve_p < 1:
        with run.clock.apart(again=sum(other.mode == "D" for other in trials[number + 1 :])):
            masks = find_child(model, rows, trial)
    torch.manual_seed(trial.seed + run.rank)  # ranks have equal weights and different dropout
    return model, make_optimizer(model, trial, masks)


def sum_up(trials, run):
    """Says the scores of each mode, of the trial that is kept, and how to load it."""
    args, best, chosen = run.args, run.progress["saved"], ""
    if args.dev or args.contrast_set:
        classifier.say_modes(trials, run)
    if args.dev:
        metric = classifier.metric_name(args.metric, args.labels)
        chosen = f"{metric} {best[args.metric]:.2f} of mode {best['mode']}, seed {best['seed']}, "
    if run.progress["skipped"]:
        chosen += f"{run.progress['skipped']} steps skipped, "
    run.done(chosen)
    say("load", classifier.load_line(run))


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    if args.evaluate:
        return classifier.score(args, __file__, load_data)
    train = load_data(args.data, args)
    dev = load_data(args.dev, args) if args.dev else []
    contrast, unseen = classifier.load_contrast_set(args, load_data), classifier.load_unseen(args)
    run = Run(args, __file__)
    trials = [argparse.Namespace(**vars(args) | dict(mode=mode, seed=seed))
              for mode in args.mode for seed in range(args.seed, args.seed + args.seeds)]
    model = build_model(args, run)  # for what it refuses, and for --resume: a new trial builds its own
    parts = (tokenise_texts(part, model, args.max_length) for part in (train, dev, unseen, *contrast))
    (rows, cut), (dev, _), (unseen, _), *contrast = parts
    contrast, ood_rows = [part for part, _ in contrast], unseen and [rows, dev, unseen]
    epoch = epoch_steps(len(rows), args.batch_size, run.world)
    contrastive = args.ood_epochs * epoch                      # steps that come first
    total = contrastive + (args.steps or args.epochs * epoch)  # of each trial
    args.eval_every = args.eval_every or epoch
    say("data", f"{cut:,} of {len(rows):,} training rows cut to {args.max_length} tokens")
    say("model", f"{args.model}, {sum(w.numel() for w in model.parameters()) / 1e6:.1f} M parameters")
    say("trials", f"{', '.join(args.mode)}, p {args.reserve_p:g}, {args.seeds} × seed {args.seed}, "
                  f"{total:,} steps each" + f", the first {contrastive:,} contrastive" * (contrastive > 0))
    loss_of, first = compute_ood_loss if contrastive else compute_loss, rows[:1]
    classifier.try_out(args.model, lambda: loss_of(model, make_batch(first, model), run.world, args))
    optimizer = make_optimizer(model, trials[0])
    run.progress |= {"skipped": 0, "scores": []} | ({"ood": []} if args.ood else {})
    run.begin(model, optimizer, total * len(trials))
    for group in optimizer.param_groups:                       # of the trial that goes on
        group["mode"] = trials[min(run.step // total, len(trials) - 1)].mode
    values = {"loss": math.nan}                                # the last that were finite
    for step, batch in run.steps(total * len(trials), order_of(trials, total, len(rows), run.world)):
        trial, at = trials[(step - 1) // total], (step - 1) % total
        if at == 0:
            run.model, run.optimizer = model, optimizer = begin_trial(trials, (step - 1) // total, rows, run)
            values = {"loss": math.nan}
        run.due = (at + 1) % args.eval_every == 0 or at + 1 == total
        set_lr(optimizer, warmup_linear(at, total, warmup_steps(trial, total), args.lr))
        own = [rows[i] for i in batch[own_rows(len(batch))]]
        loss_of = compute_ood_loss if at < contrastive else compute_loss
        loss, now = loss_of(model, make_batch(own, model), len(batch), args)
        optimizer.zero_grad()
        loss.backward()
        sum_gradients(model)
        finite = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite().item()
        if finite:
            optimizer.step()
        else:
            run.progress["skipped"] += 1
            say("note", f"mode {trial.mode}, seed {trial.seed}, step {at + 1}: the gradient is not finite, "
                        "the step is skipped")
        if finite or run.due:
            run.note(now if finite else values, lr=optimizer.param_groups[0]["lr"], mode=trial.mode,
                     seed=trial.seed, skipped=run.progress["skipped"])
            values = run.values
        if run.due:
            judge(model, dev, contrast, ood_rows, trial, run, total)
    sum_up(trials, run)


if __name__ == "__main__":
    main()
