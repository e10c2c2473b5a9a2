"""Child-Tuning: Raise a Child in Large Language Model: Towards Effective and Generalizable Fine-tuning. Xu, Luo, Zhang, Tan,
Chang, Huang, Huang, EMNLP 2021, arXiv 2109.05687; R-Drop, Liang, Wu et al., NeurIPS 2021, arXiv 2106.14448.

A pretrained classifier is fine-tuned with AdamW, but the gradient g reaches only a part of the weights w, the child:

    F (task-free)      g ← g ⊙ M / p,   M ~ Bernoulli(p), drawn for every weight at every step
    D (task-driven)    g ← g ⊙ M,       M = 1 for the share p of the weights with the largest Fisher information, for good;
                                        F_i = 1/N Σ_n (∂ log P(y_n | x_n) / ∂w_i)²

--mode none is plain AdamW. --rdrop α passes every row through the network twice, with different dropout (P1, P2), and trains on

    CE1 + CE2 + α · ( KL(P1‖P2) + KL(P2‖P1) ) / 2,      means over the batch; regression: the squared difference instead of KL

Data: .csv .tsv .json .jsonl with one or two columns of text and one of labels: by header (sentence, or sentence1 and sentence2;
label or score), by --text and --label, or all columns, the label last. Labels are any texts; numbers with a point are regression.

    python childtuning.py --model scratch --mode F --data tests/data/topics.tsv --dev tests/data/topics_dev.tsv
    python childtuning.py --data rte_train.tsv --dev rte_dev.tsv --mode none F D --seeds 10 --out out/rte
    torchrun --nproc-per-node 4 childtuning.py --data cola_train.tsv --dev cola_dev.tsv --metric matthews --reserve-p 0.2

Expected: 1.5 to 8.6 points above plain AdamW in the mean of CoLA, RTE, MRPC and STS-B, by the large model; D at least as F.
The authors' p: CoLA and STS-B 0.2, RTE 0.3, MRPC 0.4 (F) and 0.1 (D). A run's score is that of its last step, as in the released
code: nothing is chosen within a run. --out keeps the best run.

--form code is the released code: Fisher information from the gradients of whole batches, each tensor's clipped to norm 1, with
dropout, for the weights named "layer" alone; no warm-up; and R-Drop's readme: the mean of the two CE, and KL summed over the
batch, so that α is comparable under one form only. Departures from both: processes share their draws (F) and Fisher information
(D), where each had its own; a step whose gradient is not finite is skipped.
"""
import argparse, csv, datetime, functools, hashlib, inspect, itertools, json, logging, math, os, re, shutil, signal, sys, time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file                        # comes with transformers
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tqdm import tqdm                                          # comes with transformers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertTokenizer

from kernels import own_rows, similarity_lse

# ── flags ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error, add = fail, parser.add_argument
    parser.set_defaults(impl="auto", labels=None)              # start() asks for impl; no loss here has kernels
    add("--mode", nargs="+", choices=("none", "F", "D"), default=["D"], help="one, or several to compare; default D")
    add("--seeds", type=at_least(1, int), default=1, help="runs of each mode, with --seed and the numbers after it; default 1")
    add("--reserve-p", type=float, default=0.3, help="p, the child's share of the weights; default 0.3 (released script)")
    add("--form", choices=("paper", "code"), default="paper", help="default paper; code: see above")
    add("--fisher-batch-size", type=at_least(1, int), help="rows whose mean gradient is squared; default 1 (paper), code 16")
    add("--fisher-samples", type=at_least(1, int), help="rows that the Fisher information is taken from; default all (paper)")
    add("--fisher-clip", type=at_least(0), help="clips each tensor's gradient there to this norm, 0: not; default 0, code 1")
    add("--child", help="part of the names of the weights that D masks; default the encoder's prefix (paper), code layer")
    add("--rdrop", type=at_least(0), help="α, weight of the R-Drop regulariser; default none; its paper has 0.1 to 1 on GLUE")
    add("--warmup-share", type=at_least(0), help="share of the steps in which the rate rises; default 0.1 (paper), code 0")
    add("--weight-decay", type=at_least(0), default=0.01, help="default 0.01, biases and norms 0 (released script)")
    add("--text", nargs="+", help="the columns of text, one or two; default see above")
    add("--label", help="the column of labels; default see above")
    add("--task", choices=tuple(METRICS), help="default by the labels, see above")
    add("--metric", choices=sum(METRICS.values(), ()), help="compares runs; default accuracy, regression spearman")
    add("--data", required=True, help="training data; see above")
    add("--dev", help="labelled rows to evaluate on; none: no evaluation")
    add("--model", default="bert-large-cased", help="hub name, local folder, or from scratch; default bert-large-cased, from scratch: scratch")
    add("--out", default="out/childtuning", help="folder to write; default out/childtuning")
    add("--batch-size", type=at_least(1, int), default=16, help="over all GPUs; default 16 (released script)")
    add("--epochs", type=at_least(1, int), help="default 3 (released script), scratch 12")
    add("--steps", type=at_least(1, int), help="length of the training in steps instead of epochs")
    add("--lr", type=at_least(0), help="learning rate; default 4e-5 (released script), scratch 2e-3, falling linearly to 0")
    add("--max-length", type=at_least(3, int), default=128, help="tokens a training sentence keeps; default 128, of a pair in all")
    add("--seed", type=at_least(0, int), default=42, help="default 42")
    add("--eval-every", type=at_least(1, int), help="steps between evaluations; default an epoch")
    add("--resume", action="store_true", help="continue the run in --out from its last evaluation, with the same flags")
    add("--precision", choices=["bf16", "fp32"], help="of the encoder, by default bf16 on a GPU and fp32 on a CPU; newer CPUs are fast in bf16")
    return parser


METRICS = {"classification": ("accuracy", "f1", "matthews"), "regression": ("spearman", "pearson")}    # the first compares runs

# ── data ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """[(texts, label)]: one text or two, and the label's place in args.labels, or a number in regression.

    The first file, the training data, decides the task, the labels and the flags that were not given.
    """
    table, texts, label = find_columns(path, args)
    rows = [(place, tuple(cells[i] for i in texts), cells[label].strip()) for place, cells in table]
    for place, sentences, answer in rows:
        if not answer or not all(sentence.strip() for sentence in sentences):
            fail(f"{path} {place}: an empty cell; fill it or delete the row")
    counts = Counter(answer for *_, answer in rows)
    if args.labels is None:
        decide_flags(counts, args)
        if len(counts) == 1:
            fail(f"{path}: every label is {rows[0][2]!r}; wanted at least two")
        if args.batch_size > len(rows):
            fail(f"{path}: {len(rows)} rows, wanted at least --batch-size, which is {args.batch_size}")
    if args.task == "regression":
        values, wanted = {answer: float(answer) for answer in counts if re.fullmatch(NUMBER, answer)}, "a number"
    else:
        values = {answer: i for i, answer in enumerate(args.labels)}
        wanted = f"one of {args.data}, which are {', '.join(args.labels)}"[:300]
    for place, _, answer in rows:
        if answer not in values:
            fail(f"{path} {place}: label {answer!r}, wanted {wanted}")
    usual = max(counts, key=counts.get)
    say("data", f"{args.task}: {len(rows):,} {'pairs' if len(texts) == 2 else 'texts'} from {path}, {len(counts)} labels, "
                f"{100 * counts[usual] / len(rows):.1f} % {usual}")
    return [(sentences, values[answer]) for _, sentences, answer in rows]


def find_columns(path, args):
    """(rows of the table, places of its columns of text, place of its column of labels)"""
    header, table = read_table(path)
    names = header or [f"column {i + 1}" for i in range(len(next(iter(table))[1]))]
    label = args.label or next((name for name in ("label", "score") if name in names), names[-1])
    others = [name for name in names if name != label]
    texts = args.text or [name for name in ("sentence", "sentence1", "sentence2") if name in others] or others
    if not {label, *texts} <= set(names) or label in texts or len(texts) not in (1, 2):
        fail(f"{path}: columns {', '.join(names)}; wanted one or two of text (now {', '.join(texts)}) and one of labels "
             f"(now {label}); name them by --text and --label")
    args.text, args.label = texts, label                       # the same in --dev
    return table, [names.index(name) for name in texts], names.index(label)


NUMBER, WHOLE = r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d\d?)?", r"-?\d+"


def decide_flags(labels, args):
    """Fills the flags that were not given, by the labels of the training data, --form and --model."""
    numbers = all(re.fullmatch(NUMBER, label) for label in labels) and any("." in label for label in labels)
    args.task = args.task or ("regression" if numbers else "classification")
    code, scratch = args.form == "code", args.model == "scratch"
    for name, value in dict(metric=METRICS[args.task][0], epochs=12 if scratch else 3, lr=2e-3 if scratch else 4e-5,
                            warmup_share=0.0 if code else 0.1, fisher_batch_size=16 if code else 1,
                            fisher_clip=1.0 if code else 0.0).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    by_value = all(re.fullmatch(WHOLE, label) for label in labels)
    order = (lambda label: (int(label), label)) if by_value else None
    args.labels = sorted(labels, key=order) if args.task == "classification" else []
    if args.metric not in METRICS[args.task]:
        fail(f"--metric {args.metric}: this is {args.task}, wanted {', '.join(METRICS[args.task])}")
    if not 0 < args.reserve_p <= 1:
        fail(f"--reserve-p {args.reserve_p}: wanted a share above 0, up to 1")


def make_batch(rows, model, args):
    """({name: (n, L)}, labels (n,)): the inputs of the rows, padded to the longest, on the device."""
    inputs = model.tokenizer.pad({name: [row[name] for row, _ in rows] for name in rows[0][0]}, return_tensors="pt")
    labels = torch.tensor([label for _, label in rows], device=model.device)
    return {name: x.to(model.device) for name, x in inputs.items()}, labels


# ── model ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def build_model(args):
    """The classifier with its tokenizer; --seed draws its head."""
    torch.manual_seed(args.seed)
    model, tokenizer = load_encoder(args)
    if tokenizer.pad_token is None:                            # GPT-2
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    model.tokenizer, model.bf16 = tokenizer, args.precision == "bf16"
    table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    reserved = 0 if getattr(table, "padding_idx", None) is None else table.padding_idx + 1     # as RoBERTa's
    positions = getattr(model.config, "max_position_embeddings", -1)                           # XLNet and T5 have no limit
    longest = min(tokenizer.model_max_length, positions - reserved if positions > 0 else math.inf)
    if args.max_length > longest:
        fail(f"--max-length {args.max_length}: {args.model} reads at most {longest} tokens")
    names = [name for name, _ in model.named_parameters()]
    model.child = args.child or ("layer" if args.form == "code" else f"{model.base_model_prefix}.")
    if "D" in args.mode and not any(model.child in name for name in names):
        fail(f"--child {model.child}: in no name of the weights of {args.model}, which are like {names[len(names) // 2]}")
    return model.to(args.device)


def load_encoder(args):
    """(classifier, tokenizer) of a folder or a hub name; scratch is a small random BERT with word pieces of the data file."""
    head = dict(problem_type="regression", num_labels=1)
    if args.labels:
        head = dict(problem_type="single_label_classification", id2label=dict(enumerate(args.labels)),
                    label2id={label: i for i, label in enumerate(args.labels)})
    if args.model == "scratch":
        words = Counter()
        for _, cells in itertools.islice(Table(Path(args.data)), 100_000):
            words.update(word for word, _ in BertPreTokenizer().pre_tokenize_str(BertNormalizer().normalize_str("\n".join(cells))))
        letters = sorted(set("".join(words)))                  # tokenizers' own trainer breaks ties anew in every process
        pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + letter for letter in letters)]
        pieces += [word for word, times in words.most_common(8000) if times > 1 and len(word) > 1]
        tokenizer = BertTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, model_max_length=512)
        shape = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512)
        return AutoModelForSequenceClassification.from_config(BertConfig(vocab_size=len(tokenizer), **shape, **head)), tokenizer
    local = Path(args.model).is_dir()
    if local and not (Path(args.model) / "config.json").is_file():
        fail(f"--model {args.model}: no config.json in this folder, so it is no transformers model")
    if not local:
        say("hub", f"{args.model} is fetched, unless it is in the cache")
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model, info = AutoModelForSequenceClassification.from_pretrained(
            args.model, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True, **head)
    except Exception as error:                                 # whatever the network or a damaged file makes of it
        if local:
            fail(f"--model {args.model}: {type(error).__name__}: {str(error).strip()}".splitlines()[0])
        fail(f"--model {args.model}: no such folder, and the hub does not give it; name a local folder, or take scratch")
    if not tokenizer.is_fast:
        fail(f"--model {args.model}: {type(tokenizer).__name__} is a slow tokenizer; wanted one with a tokenizer.json")
    lost = [name for name in (*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"]))     # would be random
            if name.removeprefix(f"{model.base_model_prefix}.") in model.base_model.state_dict() and "pooler" not in name]
    what = f"{len(lost)} weights, such as {min(lost)}," if lost else "the words of its tokenizer"
    if lost or len(tokenizer) <= len(tokenizer.all_special_ids):
        fail(f"--model {args.model}: {what} are missing or do not fit its config.json")
    return model, tokenizer


def classify(model, inputs):
    """(n, labels) float32 logits: one path for training, Fisher information and evaluation."""
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
        return model(**inputs).logits.float()


# ── the paper ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def compute_loss(model, batch, args):
    """The task's loss of a batch, with --rdrop of two passes."""
    inputs, labels = batch
    if args.rdrop is None:
        loss = task_loss(classify(model, inputs), labels)
    else:                                                      # gradients are averaged over ranks: a sum over the batch is not
        alpha = args.rdrop * (args.rows / len(labels) if args.form == "code" else 1)
        loss = rdrop_loss(classify(model, inputs), classify(model, inputs), labels, alpha, args.form)
    loss = loss * (len(labels) * args.world / args.rows)
    return loss, {"loss": loss.detach()}


def task_loss(logits, labels):
    """Mean cross entropy of (N, C) logits and (N,) int64 labels, or squared error of (N, 1) and (N,) float."""
    return F.mse_loss(logits[:, 0], labels) if labels.is_floating_point() else F.cross_entropy(logits, labels)


def rdrop_loss(logits1, logits2, labels, alpha, form="paper"):
    """R-Drop: the task's losses of two passes of the same rows, and how far their predictions are apart.

    logits1, logits2   (N, C), or (N, 1) in regression; every term gives both of them gradient
    labels             (N,) int64, or float in regression, which has squared errors and (logits1 − logits2)² instead of CE and KL
    form               "paper": CE1 + CE2 + α · mean over rows of (KL(P1‖P2) + KL(P2‖P1)) / 2
                       "code": (CE1 + CE2) / 2 + α · their sum over rows, as the readme of the released code
    source             Liang, Wu et al. 2021
    """
    tasks = task_loss(logits1, labels) + task_loss(logits2, labels)
    if labels.is_floating_point():
        apart = (logits1 - logits2)[:, 0].square()
    else:
        log1, log2 = logits1.log_softmax(1), logits2.log_softmax(1)
        apart = ((log1.exp() - log2.exp()) * (log1 - log2)).sum(1) / 2                         # both KL in one sum
    return tasks + alpha * apart.mean() if form == "paper" else tasks / 2 + alpha * apart.sum()


class ChildTuningAdamW(torch.optim.Optimizer):
    """AdamW whose gradient reaches the child alone: g ← g ⊙ M / p in mode F, g ⊙ M in mode D; then, with t from 1,

        m ← β1 m + (1 − β1) g        v ← β2 v + (1 − β2) g²        a = lr √(1 − β2^t) / (1 − β1^t); without correct_bias, lr
        w ← w − a m / (√v + eps)     w ← w − lr · weight_decay · w                            every weight decays, masked or not

    mode        "none"; "F": M ~ Bernoulli(p) anew at every step, p = 1 draws nothing; "D": the given masks, without 1 / p
    reserve_p   p of mode F, in (0, 1]. Groups may have their own of this and of all numbers above
    masks       {parameter: bool tensor}, or a function from a parameter to one that is asked at every step; in mode F instead of
                the draws; a parameter without a mask (None) gets its whole gradient
    generator   of the draws; None: a new one with seed 0, so all ranks draw alike. state_dict() has its state and the masks
    raises      ValueError naming the argument; RuntimeError for sparse gradients, and in mode D with p < 1 for want of masks
    source      Xu et al. 2021, with the released optimizer's rule

    .grad is left as it is. torch.compile takes step(), in mode F with a break for the draws; pass lr as a tensor to it.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, correct_bias=True, mode="none",
                 reserve_p=1.0, masks=None, generator=None):
        mode = (mode or "none").removeprefix("ChildTuning-")   # the released names
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, correct_bias=correct_bias, mode=mode,
                        reserve_p=reserve_p)
        fits = dict(lr=lr >= 0, betas=all(0 <= beta < 1 for beta in betas), eps=eps >= 0, weight_decay=weight_decay >= 0,
                    mode=mode in ("none", "F", "D"), reserve_p=0 < reserve_p <= 1)
        for name in fits:
            if not fits[name]:
                raise ValueError(f"{name} is {defaults[name]!r}")
        self.mask_function, self.masks, self.drawn = (masks, None, {}) if callable(masks) else (None, masks, {})
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
            self.masks = {w: mask.to(w.device) for w, mask in zip(self.weights(), state_dict["masks"]) if mask is not None}

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(group["mode"] == "F" and group["reserve_p"] < 1 for group in self.param_groups):
            self.draw()
        for group in self.param_groups:
            weights = [w for w in group["params"] if w.grad is not None and w.numel()]
            states, compiled = [self.state[w] for w in weights], torch.compiler.is_compiling()
            for w, state in zip(weights, states):
                if not state:
                    state |= dict(step=torch.zeros((), dtype=torch.float64), exp_avg=torch.zeros_like(w),
                                  exp_avg_sq=torch.zeros_like(w))
                state["step"] += 1
            (beta1, beta2), lr = group["betas"], group["lr"] if compiled else float(group["lr"])
            steps = [state["step"] if compiled else state["step"].item() for state in states]  # compiled, a number is a constant
            rates = [lr * (1 - beta2 ** t) ** 0.5 / (1 - beta1 ** t) if group["correct_bias"] else lr for t in steps]
            rows = [(w, w.grad, state["exp_avg"], state["exp_avg_sq"], mask, rate)
                    for w, state, mask, rate in zip(weights, states, self.masks_of(weights, group), rates)]
            if compiled or any(w.is_cuda for w in weights):    # in one go, with masks and without
                for part in ([row for row in rows if row[4] is None], [row for row in rows if row[4] is not None]):
                    if part:
                        self.update(*map(list, zip(*part)), lr, group)
            else:                                              # in blocks, whose temporaries stay in a CPU's cache: half the time
                for row in rows:
                    for block in blocks(row):
                        self.update(*([x] for x in block), lr, group)
        return loss

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
        """Masks of mode F: integers under a bound, p to 2^-32, which take a CPU a fifth of bernoulli_'s time."""
        if self.mask_function is not None or self.masks is not None:
            return
        for group in (group for group in self.param_groups if group["mode"] == "F" and group["reserve_p"] < 1):
            bound = min(round(group["reserve_p"] * 2**32) - 2**31, 2**31 - 1)
            for w in (w for w in group["params"] if w.grad is not None and w.numel()):
                if w not in self.drawn:
                    self.drawn[w] = torch.empty(w.shape, dtype=torch.bool, device=w.device)
                for part in self.drawn[w].view(-1).split(w.numel() if w.is_cuda else BLOCK):
                    numbers = torch.empty((len(part) + 1) // 2, dtype=torch.int64, device=self.generator.device)
                    part.copy_(numbers.random_(-2**63, None, generator=self.generator).view(torch.int32)[: len(part)] < bound)

    def update(self, weights, gradients, m, v, masks, rates, lr, group):
        """The rule above for lists of tensors; all have a mask, or none has."""
        beta1, beta2 = group["betas"]
        if masks[0] is not None:                               # bits times 0 or 1: NaN is 0, and where() takes a CPU longer
            bits = torch._foreach_mul([gradient.view(INTEGER[gradient.element_size()]) for gradient in gradients], masks)
            gradients = [child.view(gradient.dtype) for child, gradient in zip(bits, gradients)]
            if group["mode"] == "F":
                torch._foreach_mul_(gradients, 1 / group["reserve_p"])
        torch._foreach_lerp_(m, gradients, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, gradients, gradients, 1 - beta2)
        roots = torch._foreach_rsqrt(v)                        # a CPU's sqrt takes ten times as long for 0, most of v in mode D
        torch._foreach_reciprocal_(roots)
        torch._foreach_add_(roots, group["eps"])
        if torch.compiler.is_compiling():                      # lr and rates may be tensors
            torch._foreach_sub_(weights, torch._foreach_mul(torch._foreach_div(m, roots), rates))
            torch._foreach_sub_(weights, torch._foreach_mul(weights, lr * group["weight_decay"]))
        else:
            torch._foreach_addcdiv_(weights, m, roots, [-rate for rate in rates])
            torch._foreach_add_(weights, weights, alpha=-lr * group["weight_decay"])


BLOCK, INTEGER = 2**18, {2: torch.int16, 4: torch.int32, 8: torch.int64}       # weights; types of as many bytes


def blocks(row):
    """The same blocks, of some BLOCK weights, of all tensors in the row; what is no tensor is repeated."""
    size = max(1, BLOCK * len(torch.atleast_1d(row[0])) // row[0].numel())
    return zip(*(torch.atleast_1d(x).split(size) if torch.is_tensor(x) else itertools.repeat(x) for x in row))


def fisher_mask(model, batches, loss, reserve_p, max_grad_norm=None, name_filter=None):
    """The child of mode D: the share p of the weights with the largest Fisher information.

    batches, loss, max_grad_norm, name_filter    see fisher_information
    reserve_p    p in (0, 1]
    returns      ({name: bool tensor}, threshold): F ≥ threshold, which is numpy's percentile 100 (1 − p) over all F together,
                 linearly interpolated; ties are kept, so a threshold of 0 keeps all (released code)
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
    """{name: F}, F = 1/N Σ (∂ loss(model, batch) / ∂w)² over N batches, float32 (float64 for float64), in a weight's shape.

    The labels are the data's: the empirical Fisher information. Batches of one row are the paper's; in larger ones, as the
    released code's of 16, cross terms enter. The model stays in its mode, and .grad is neither read nor written.

    batches        what loss takes, one after the other; under torchrun each rank has its share, and gets F of all
    loss           loss(model, batch) → scalar
    max_grad_norm  clips the gradient of each tensor, on its own, before it is squared (released code: 1.0); None: not (paper)
    name_filter    a function of the name, or what it has in it (released code: "layer"); None: all weights
    raises         ValueError where no trained weight has such a name, or no batch a finite gradient; one without is left out
    source         Xu et al. 2021; weights without gradient, frozen or unused, have F = 0
    """
    fits = name_filter if callable(name_filter) else lambda name: (name_filter or "") in name
    weights = {name: w for name, w in model.named_parameters() if fits(name)}
    trained = [name for name, w in weights.items() if w.requires_grad]
    if not trained:
        last = [name for name, _ in model.named_parameters()][-1:]
        raise ValueError(f"name_filter: no trained weight has such a name; the last is {last}")
    fisher = {name: torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) for name, w in weights.items()}
    used, left_out, quiet = 0, 0, None if os.environ.get("RANK", "0") == "0" else True         # None: a bar on a terminal only
    for batch in tqdm(batches, "Fisher information", leave=False, disable=quiet):
        gradients = torch.autograd.grad(loss(model, batch), [weights[name] for name in trained], materialize_grads=True)
        gradients = [gradient.to(fisher[name].dtype) for name, gradient in zip(trained, gradients)]
        norms = torch._foreach_norm(gradients)
        finite = torch.stack(norms).isfinite().all().item()
        used, left_out = used + finite, left_out + 1 - finite
        for name, gradient, norm in zip(trained if finite else (), gradients, norms):
            if max_grad_norm is not None:
                gradient = gradient * (max_grad_norm / (norm + 1e-6)).clamp(max=1)
            fisher[name].addcmul_(gradient, gradient)
    if dist.is_initialized():
        counts = torch.tensor([used, left_out], device=fisher[trained[0]].device)
        for total in (counts, *fisher.values()):
            dist.all_reduce(total)
        used, left_out = counts.tolist()
    if left_out:
        say("note", f"{left_out} of {used + left_out} batches of the Fisher information have no finite gradient and are left out")
    if not used:
        raise ValueError("batches: none has a finite gradient")
    torch._foreach_div_(list(fisher.values()), used)
    return fisher


def find_child(model, rows, args):
    """{weight: mask} of mode D, from --fisher-samples rows; without dropout, or with it in --form code."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(args.seed))[: args.fisher_samples].tolist()
    chunks = [order[i : i + args.fisher_batch_size] for i in range(0, len(order), args.fisher_batch_size)]

    def loss(model, chunk):
        inputs, labels = make_batch([rows[i] for i in chunk], model, args)
        return task_loss(classify(model, inputs), labels)

    model.train(args.form == "code")
    try:
        masks, threshold = fisher_mask(model, chunks[args.rank :: args.world], loss, args.reserve_p,
                                       args.fisher_clip or None, model.child)
    except ValueError as error:
        fail(f"Fisher information: {error}")
    kept, total = sum(mask.sum().item() for mask in masks.values()), sum(mask.numel() for mask in masks.values())
    say("child", f"{100 * kept / total:.2f} % of {total / 1e6:.1f} M weights, Fisher information from {threshold:.1e}"
                 f"{', which all have' if threshold == 0 else ''}")
    return {w: masks[name] for name, w in model.named_parameters() if name in masks}


def make_optimizer(model, args, masks=None):
    """Of a run in one mode; biases and norms do not decay."""
    groups = [dict(params=[w for w in model.parameters() if w.requires_grad and (w.dim() > 1) == decays],
                   weight_decay=args.weight_decay if decays else 0.0) for decays in (True, False)]
    generator = torch.Generator(model.device).manual_seed(args.seed)
    return ChildTuningAdamW(groups, args.lr, eps=1e-8, mode=args.mode, reserve_p=args.reserve_p, masks=masks, generator=generator)


# ── evaluation ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def spearman(a, b):
    """Pearson correlation of the ranks; equal values share their mean rank. 0 where one side is constant."""
    ranks = []
    for x in (a, b):
        _, group, sizes = np.unique(x, return_inverse=True, return_counts=True)
        ranks.append((sizes.cumsum() - (sizes - 1) / 2)[group])
    return 0.0 if min(np.ptp(r) for r in ranks) == 0 else float(np.corrcoef(*ranks)[0, 1])


def confusion_scores(truth, said, labels):
    """{"accuracy", "f1", "matthews"} of label numbers (n,), from 0 to 1 or −1 to 1.

    f1 is that of label 1 where labels are 0 and 1, else the mean over labels that occur. matthews is the correlation of truth and
    said for any number of labels (R_K, Gorodkin 2004), 0 where one side is constant.
    """
    table = np.zeros((len(labels), len(labels)))
    np.add.at(table, (truth, said), 1)
    right, true, found, n = table.diagonal(), table.sum(1), table.sum(0), table.sum()
    f1 = 2 * right / np.maximum(true + found, 1)
    spread = math.sqrt((n * n - true @ true) * (n * n - found @ found))
    return {"accuracy": right.sum() / n, "f1": f1[1] if list(labels) == ["0", "1"] else f1[true + found > 0].mean(),
            "matthews": (n * right.sum() - true @ found) / spread if spread else 0.0}


@torch.no_grad()
def evaluate(model, rows, args):
    """{metric: 100 times its value}: accuracy, F1 and Matthews' correlation, in regression Spearman's and Pearson's."""
    model.eval()
    rows = sorted(rows, key=lambda row: len(row[0]["input_ids"]))              # little padding
    logits = torch.cat([classify(model, make_batch(rows[i : i + 128], model, args)[0]) for i in range(0, len(rows), 128)]).cpu()
    model.train()
    truth = np.array([label for _, label in rows])
    if args.task == "classification":
        scores = confusion_scores(truth, logits.argmax(1).numpy(), args.labels)
    else:
        said = logits[:, 0].double().numpy()
        constant = min(np.ptp(truth), np.ptp(said)) == 0
        scores = {"spearman": spearman(truth, said), "pearson": 0.0 if constant else np.corrcoef(truth, said)[0, 1]}
    return {metric: 100 * float(score) for metric, score in scores.items()}


def mean_and_spread(runs):
    """One line: the scores of a run, or of several mean ± deviation and best."""
    columns = {metric: [scores[metric] for scores in runs] for metric in runs[0]}
    if len(runs) == 1:
        return ", ".join(f"{metric} {x[0]:.2f}" for metric, x in columns.items())
    return "; ".join(f"{metric} {np.mean(x):.2f} ± {np.std(x, ddof=1):.2f}, best {max(x):.2f}" for metric, x in columns.items())


# ── plumbing ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_table(path, check=None, lists=False):
    """(header or None, Table) of a data file. check(cells) says what is wrong with a row, or nothing; all wrong rows are counted.

    With lists, a list of texts in JSON is one cell, joined by |.
    """
    path, header, length, wrong = Path(path), None, 0, []
    if path.suffix.lower() not in (".txt", ".csv", ".tsv", ".json", ".jsonl") and not path.is_dir():
        fail(f"{path}: wanted a name that ends in .txt, .csv, .tsv, .json or .jsonl")
    try:
        for place, cells, fault in read_cells(path, lists):
            if place is None:
                header = cells
            elif fault := fault or check and check(cells):
                wrong.append(f"{place}: {fault}"[:300] if len(wrong) < 7 else None)         # of the others only how many
            else:
                length += 1
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    if wrong:
        more = ", ".join(text.split(":")[0] for text in wrong[1:6]) + ", ..." * (len(wrong) > 6)
        fail(f"{path} {wrong[0]}" + (f" ({len(wrong) - 1:,} more rows are wrong: {more})" if more else ""))
    if length == 0:
        fail(f"{path}: no rows")
    return header, Table(path, lists, length)


class Table:
    """The rows of a data file, (place, cells), place what a message calls the row: "line 7". They are read anew each time they are gone
    through, so that no file has to fit in memory."""

    def __init__(self, path, lists=False, length=None):
        self.path, self.lists, self.length = path, lists, length

    def __len__(self):
        return self.length

    def __iter__(self):
        return ((place, cells) for place, cells, _ in read_cells(self.path, self.lists) if place is not None)


def read_cells(path, lists):
    """Yields (place, cells, what is wrong with them) of a data file; a header comes first, its place None."""
    kind, header, width, place, number = path.suffix.lower(), None, None, "line 0", 0

    def lines():
        nonlocal number
        bar = tqdm(total=path.stat().st_size, desc=f"reading {path.name}", unit="B", unit_scale=True, leave=False, delay=1, disable=None)
        with open(path, "rb") as file, bar:
            for number, raw in enumerate(file, 1):
                bar.update(len(raw))
                yield raw.decode("utf-8-sig" if number == 1 else "utf-8")

    try:
        for place, row in read_rows(kind, lines()):
            names = row if place == "line 1" and kind in (".csv", ".tsv") else []
            if names and len(set(names)) == len(names) and all(re.fullmatch("[a-z][a-z0-9_]*", name) for name in names):
                header = names
                yield None, header, None
                continue
            if isinstance(row, dict):
                if header is None:
                    header = list(row)
                    yield None, header, None
                row = [row.pop(name, "") for name in header] + list(row.values())
            if lists and isinstance(row, list):
                row = ["|".join(x) if isinstance(x, list) and all(isinstance(text, str) for text in x) else x for x in row]
            if isinstance(row, Exception):
                fault = f"not JSON: {getattr(row, 'msg', row)}"
            elif not isinstance(row, list) or not all(isinstance(cell, (str, int, float)) for cell in row):
                fault = f"wanted a row of texts, found {str(row)[:60]!r}"
            else:
                row, width = [str(cell) for cell in row], width or len(header or row)
                fault = f"{len(row)} columns, wanted {width}" if len(row) != width else None
            yield place, row, fault
    except UnicodeDecodeError:
        fail(f"{path} line {number}: not UTF-8; convert it, for example with iconv")
    except csv.Error as error:
        fail(f'{path} after {place}: {error}; close every ", and write "" for one inside a cell')


def read_rows(kind, lines):
    """Yields (place, row) of lines; a row of JSON may be a dict, or the error in it."""
    def parse(text):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            return error

    if kind == ".txt":
        yield from ((f"line {i}", [line.rstrip("\r\n")]) for i, line in enumerate(lines, 1))
    elif kind == ".jsonl":
        yield from ((f"line {i}", parse(line)) for i, line in enumerate(lines, 1))
    elif kind == ".json":                                      # one list, or a row a line
        text = "".join(lines)
        whole = parse(text) if text.lstrip().startswith("[") else None
        if isinstance(whole, Exception):
            yield f"line {getattr(whole, 'lineno', 1)}", whole
        elif whole:
            yield from ((f"item {i}", row) for i, row in enumerate(whole, 1))
        else:
            yield from read_rows(".jsonl", text.split("\n")[: None if text[-1:] != "\n" else -1])
    else:
        rules = dict(strict=True) if kind == ".csv" else dict(delimiter="\t", quoting=csv.QUOTE_NONE)
        reader, line = csv.reader(lines, **rules), 1
        for cells in reader:
            yield f"line {line}", cells
            line = reader.line_num + 1                         # a quoted cell may hold newlines


def tokenise_texts(rows, model, longest):
    """([({name: int32 (L,)}, label)], how many were cut): one text or two, with special tokens and without padding."""
    done, cut, takes = [], 0, inspect.signature(model.forward).parameters
    names = [name for name in ("input_ids", "token_type_ids") if name in model.tokenizer.model_input_names and name in takes]
    for start in range(0, len(rows), 10_000):                  # a million at once would hold tens of gigabytes
        texts, labels = zip(*rows[start : start + 10_000])
        encoded = model.tokenizer(*map(list, zip(*texts)), truncation=True, max_length=longest)
        done += [({name: np.array(encoded[name][i], np.int32) for name in names}, label) for i, label in enumerate(labels)]
        cut += sum(bool(encoding.overflowing) for encoding in encoded.encodings)
    return done, cut


def start(args):
    """Rank, world and device; refuses an --out that cannot be, or must not be, written."""
    args.rank, args.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    args.device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    args.precision = args.precision or ("fp32" if args.device == "cpu" else "bf16")
    args.rows, args.fingerprint = args.batch_size, fingerprint(Path(args.data))
    if args.batch_size < args.world:
        fail(f"--batch-size {args.batch_size} is less than a row for each of {args.world} processes")
    out = Path(args.out).absolute()
    existing = next(folder for folder in (out, *out.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        fail(f"--out {args.out}: {existing} is no folder that can be written")
    if args.resume and not (out / "state.pt").is_file():
        fail(f"--out {args.out}: no state.pt to resume from")
    if not args.resume and existing == out and any(out.iterdir()):
        kept = "another run: continue it with --resume" if (out / "state.pt").is_file() else "files but no checkpoint: empty it"
        fail(f"--out {args.out} holds {kept}, or name another folder")
    if "RANK" in os.environ:
        if args.device != "cpu":
            torch.cuda.set_device(args.device)
        timeout = datetime.timedelta(minutes=30)               # rank 0 evaluates alone meanwhile
        dist.init_process_group("gloo" if args.device == "cpu" else "nccl", timeout=timeout)
    if args.device != "cpu" and args.precision == "bf16":             # tensor cores also for what autocast leaves in float32
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    try:                                                       # before anything is read or written
        similarity_lse(torch.zeros(1, 16, device=args.device), impl=args.impl)
    except ValueError as error:
        fail(f"--{error}")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def fingerprint(path):
    """Tells whether data changed between runs: of a file its size and up to 256 places in it, of a folder its names and sizes."""
    digest, size = hashlib.sha1(), path.stat().st_size
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        digest.update("".join(f"{file.relative_to(path)} {file.stat().st_size}\n" for file in files).encode())
    else:
        digest.update(str(size).encode())
        with open(path, "rb") as file:
            for place in range(0, size, max(2**16, size // 256)):
                file.seek(place)
                digest.update(file.read(2**16))
    return digest.hexdigest()


def begin_out(args):
    """The folder of a new run, with its flags and the code that ran."""
    if args.resume or args.rank:
        return
    flags = {name: value for name, value in vars(args).items() if name not in ("resume", "out", "rank", "rows", "device")}
    try:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        (Path(args.out) / "args.json").write_text(json.dumps(flags, indent=1))
        shutil.copy(__file__, args.out)
    except OSError as error:
        fail(f"--out {args.out}: {error.strerror}")


def average_gradients(model, args):
    """The mean over ranks; with gather_rows it is the gradient of the mean loss over the global batch."""
    if args.world > 1:
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= args.world


def warmup_linear(step, total, warmup, lr):
    """From 0 up to lr in `warmup` steps, then straight down to 0 at `total`; step counts from 0."""
    return lr * min(step / warmup if warmup else 1.0, (total - step) / max(1, total - warmup))


def epoch_steps(rows, args):
    """Steps of an epoch. Its last batch is short, and left out where it has less than a row for each rank."""
    return len(rows) // args.batch_size + (len(rows) % args.batch_size >= args.world)


def batches(rows, step, args):
    """This rank's rows of each step after `step`, endlessly. The order depends on the seed and the epoch alone."""
    epoch, done = divmod(step, epoch_steps(rows, args))
    while True:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(args.seed + 1_000_003 * epoch))
        for batch in order.split(args.batch_size)[done : epoch_steps(rows, args)]:
            args.rows = len(batch)
            yield [rows[i] for i in batch[own_rows(args.rows)].tolist()]
        epoch, done = epoch + 1, 0


SIGNALS = []                                                   # Ctrl-C and SIGTERM that came during a step


def command(main):
    """main, telling the faults of the machine in one line; during training Ctrl-C and SIGTERM wait for the end of a step."""
    @functools.wraps(main)
    def run(argv=None):
        kept = "; a checkpoint that --out holds is whole, and --resume continues from it"
        handlers = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            main(argv)
        except KeyboardInterrupt:                              # asked_to_stop takes it from then on
            say("stopped", "before the first step")
            sys.exit(130)
        except torch.OutOfMemoryError:
            flags = [flag for flag in ("--chunk-size", "--batch-size", "--max-length") if flag in make_parser().format_usage()]
            fail(f"the GPU's memory is full; lower {' or '.join(flags)}{kept}", every_rank=True)
        except (OSError, SafetensorError) as error:
            fail(f"{getattr(error, 'strerror', None) or error}" + kept, every_rank=True)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):         # what torch.save makes of a full disk
                fail(f"{error.__context__.strerror}{kept}", every_rank=True)
            if not dist.is_initialized() or not re.search("gloo|NCCL|[Cc]onnection|[Tt]imed? ?out", str(error)):
                raise
            fail(f"another process of this run has died or hangs ({str(error).splitlines()[0][:80]})" + kept, every_rank=True)
        finally:
            SIGNALS.clear()
            for kind, handler in handlers.items():
                signal.signal(kind, handler)
    return run


def asked_to_stop(step, args):
    """Whether Ctrl-C or SIGTERM came on any rank. Ranks agree every tenth step; a second signal ends the run at once."""
    def heard(number, _):
        if SIGNALS:
            sys.exit(128 + number)
        SIGNALS.append(number)
        if args.rank == 0:                                     # print is not reentrant
            os.write(1, b"\n" * sys.stdout.isatty() + b"stopping when this step is done and saved; once more, and at once\n")

    if step == 0:
        for kind in (signal.SIGINT, signal.SIGTERM):
            signal.signal(kind, heard)
    if args.world == 1 or step % 10:
        return bool(SIGNALS) and args.world == 1
    asked = torch.tensor(float(bool(SIGNALS)), device=args.device)
    dist.all_reduce(asked)
    return asked.item() > 0


def report(step, total, values, began, args):
    """A row of metrics.jsonl, and a bar on a terminal or a line in a log. Tensors become means over the ranks."""
    for name in values:
        if torch.is_tensor(values[name]):
            if args.world > 1:
                dist.all_reduce(values[name])
            values[name] = values[name].item() / args.world
    if args.rank == 0:
        first, clock = began
        seconds = time.perf_counter() - clock
        with open(Path(args.out) / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step, **values, "seconds": round(seconds, 3)}) + "\n")
        left, done = round(seconds / (step - first) * (total - step)), 16 * step // total
        line = (f"{step:7,}/{total:,} {'━' * done}{'─' * (16 - done)}  loss {values['loss']:.4f}  lr {values['lr']:.1e}  "
                f"{(step - first) * args.batch_size / seconds:,.0f} rows/s  left {left // 60}:{left % 60:02}")
        for score in (values[name] for name in ("dev_spearman", "dev_knn") if name in values):
            line += f"  dev {score:.2f}{' best' if values['best'] else ''}"
        bar = sys.stdout.isatty()
        print(f"\r\x1b[K{line}" if bar else line, end="" if bar and "best" not in values else "\n", flush=True)


def save_model(model, scores, args):
    """The classifier as transformers reads it: written aside, then renamed file by file."""
    out, aside = Path(args.out), Path(args.out) / ".saving"
    shutil.rmtree(aside, ignore_errors=True)
    model.save_pretrained(aside)
    model.tokenizer.backend_tokenizer.no_truncation()          # tokenise_texts', which would be saved
    model.tokenizer.save_pretrained(aside)
    (aside / "README.md").write_text(model_card(model, scores, args), encoding="utf-8")
    for file in [path for path in aside.rglob("*") if path.is_file()]:
        os.replace(file, out / file.relative_to(aside))
    shutil.rmtree(aside)


def model_card(model, scores, args):
    return f"""---
library_name: transformers
pipeline_tag: text-classification
---
# {Path(args.out).name}

{args.task.capitalize()} of text, trained by {Path(__file__).name} (mode {args.mode}, seed {args.seed}) from {args.model} on
{Path(args.data).name}: {", ".join(f"{name} {value:.4g}" for name, value in scores.items())}.
Every setting is in args.json, the course of the training in metrics.jsonl. A pair is {{"text": ..., "text_pair": ...}}.

    {load_line(model, args)}
"""


def load_line(model, args):
    """How others load the folder."""
    return f'pipeline("text-classification", "{args.out}")'


def load_best(model, args):
    """Puts the saved checkpoint back into the model; of tied weights it holds one."""
    model.load_state_dict(load_file(Path(args.out) / "model.safetensors"), strict=False)


def save_state(model, optimizer, progress, args):
    """All that the next step depends on, the random numbers of every rank included: written aside, then renamed."""
    cuda = model.device.type == "cuda"
    random = [[torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None]] * args.world
    if args.world > 1:
        dist.all_gather_object(random, random[0])
    if args.rank == 0:
        state = dict(progress=progress, random=random, model=model.state_dict(), optimizer=optimizer.state_dict())
        with open(Path(args.out) / "state.tmp", "wb") as file:
            torch.save(state, file)
            os.fsync(file.fileno())                            # whole on the disk before it takes the old one's place
        os.replace(Path(args.out) / "state.tmp", Path(args.out) / "state.pt")


def load_state(model, optimizer, args):
    """Continues the run in --out: its progress; metrics of later steps are dropped, other flags than it had refused."""
    out = Path(args.out)
    try:
        for name, value in json.loads((out / "args.json").read_text()).items():
            if getattr(args, name, None) != value:
                what = "the content of --data, by its checksum," if name == "fingerprint" else name
                fail(f"--resume: {what} was {value} in {out}, now it is {getattr(args, name, None)}")
        state = torch.load(out / "state.pt", map_location=model.device, weights_only=True)
        if state["progress"]["best"]:
            load_best(model, args)                             # would be missed at the end only
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"][args.rank][0].cpu())
        if model.device.type == "cuda":
            torch.cuda.set_rng_state(state["random"][args.rank][1].cpu())
        rows = [row for row in open(out / "metrics.jsonl") if row.endswith("\n") and json.loads(row)["step"] <= state["progress"]["step"]]
    except Exception as error:                                 # a damaged file has many ways to fail
        fail(f"--resume: {out} holds a damaged state.pt, model, args.json or metrics.jsonl ({type(error).__name__})")
    if args.rank == 0:
        (out / "metrics.jsonl").write_text("".join(rows))
    return state["progress"]


def peak_gb(device):
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    try:
        import resource
    except ImportError:                                        # Windows
        return math.nan
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def at_least(least, kind=float):
    """An argparse type: a finite number from least up."""
    def convert(text):
        value = kind(text)
        if not least <= value < 2**63:                         # no infinity, no NaN, no seed too long for PyTorch
            raise argparse.ArgumentTypeError(f"{text}: wanted a number of at least {least}")
        return value
    convert.__name__ = kind.__name__                           # argparse names it where the text is no number
    return convert


def say(label, text):
    if os.environ.get("RANK", "0") == "0":
        print("\r\x1b[K" * sys.stdout.isatty() + f"{label:<8} {text}", flush=True)          # in the place of a bar


def fail(message, every_rank=False):
    """Ends the run with one line for the person who started it; mostly the ranks of a run find the same fault."""
    if every_rank or os.environ.get("RANK", "0") == "0":
        print("\r\x1b[K" * sys.stderr.isatty() + f"{Path(__file__).name}: {message}", file=sys.stderr, flush=True)
    if dist.is_initialized():                                  # with another rank gone, a group makes an ordinary exit abort now and then
        sys.stdout.flush()
        os._exit(2)
    sys.exit(2)


# ── main ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    train = load_data(args.data, args)
    dev = load_data(args.dev, args) if args.dev else []
    start(args)
    runs = [argparse.Namespace(**vars(args) | dict(mode=mode, seed=seed))
            for mode in args.mode for seed in range(args.seed, args.seed + args.seeds)]
    model = build_model(args)
    (rows, cut), (dev, _) = (tokenise_texts(part, model, args.max_length) for part in (train, dev))
    epoch = epoch_steps(rows, args)
    total = args.steps or args.epochs * epoch
    args.eval_every = args.eval_every or epoch
    say("data", f"{cut:,} of {len(rows):,} training rows cut to {args.max_length} tokens")
    say("model", f"{args.model}, {sum(w.numel() for w in model.parameters()) / 1e6:.1f} M parameters")
    say("run", f"{', '.join(args.mode)}, p {args.reserve_p:g}, {args.seeds} × seed {args.seed}, {args.world} × {model.device.type}, "
               f"{args.precision}, {total:,} steps of {args.batch_size}, writing {args.out}")

    begin_out(args)
    progress = {"step": 0, "skipped": 0, "best": None, "scores": []}       # the steps of all runs, one after the other
    optimizer = make_optimizer(model, runs[0])
    if args.resume:
        progress = load_state(model, optimizer, args)
    asked_to_stop(0, args)
    began = progress["step"], time.perf_counter()
    for number in range(max(0, progress["step"] - 1) // total, len(runs)):
        run, done, values = runs[number], progress["step"] - number * total, None
        if done == 0:
            model = build_model(run) if number else model
            masks = find_child(model, rows, run) if run.mode == "D" and run.reserve_p < 1 else None
            optimizer = make_optimizer(model, run, masks)
            torch.manual_seed(run.seed + run.rank)             # ranks have equal weights and different dropout
        model.train()
        for step, batch in zip(range(done + 1, total + 1), batches(rows, done, run)):
            for group in optimizer.param_groups:
                group["lr"] = warmup_linear(step - 1, total, math.ceil(args.warmup_share * total), args.lr)
            loss, now = compute_loss(model, make_batch(batch, model, args), args)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model, args)
            finite = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite().item()
            if finite:
                optimizer.step()
            else:
                progress["skipped"] += 1
                say("note", f"mode {run.mode}, seed {run.seed}, step {step}: the gradient is not finite, the step is skipped")
            values = now if finite or values is None else values
            values |= dict(lr=optimizer.param_groups[0]["lr"], mode=run.mode, seed=run.seed, skipped=progress["skipped"])
            stop, due, overall = asked_to_stop(step, args), step % args.eval_every == 0 or step == total, number * total + step
            if due and args.rank == 0:
                scores = evaluate(model, dev, args) if dev else {}
                better = not dev or progress["best"] is None or scores[args.metric] > progress["best"][args.metric]
                values["best"] = number == 0 or step == total and better       # the last state of the best run
                values |= {f"dev_{name}": score for name, score in scores.items()}
                if values["best"]:
                    progress["best"] = {"mode": run.mode, "seed": run.seed, **scores}
                    save_model(model, scores, run)
                progress["scores"] += [scores] * (step == total)
            if due or finite and overall % (1 + len(runs) * total // 40) == 0:
                report(overall, len(runs) * total, values, began, args)
            if due and dev and args.rank == 0:
                say("dev", f"mode {run.mode}, seed {run.seed}: {mean_and_spread([scores])}")
            if due or stop:
                progress["step"] = overall
                save_state(model, optimizer, progress, args)
            if stop:
                say("stopped", f"at step {overall}, saved; --resume continues")
                sys.exit(130)

    if args.rank == 0:
        minutes, seconds = divmod(round(time.perf_counter() - began[1]), 60)
        best, skipped = progress["best"], progress["skipped"]
        for mode in args.mode if dev else ():
            say(mode, mean_and_spread([scores for scores, run in zip(progress["scores"], runs) if run.mode == mode]))
        chosen = f"{args.metric} {best[args.metric]:.2f} of mode {best['mode']}, seed {best['seed']}, " if dev else ""
        chosen += f"{skipped} steps skipped, " if skipped else ""
        say("done", f"{chosen}{minutes} min {seconds} s, peak {peak_gb(model.device):.1f} GB")
        say("load", load_line(model, args))
    if args.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
