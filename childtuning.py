"""Child-Tuning: Raise a Child in Large Language Model: Towards Effective and Generalizable Fine-tuning.
Xu, Luo, Zhang, Tan, Chang, Huang, Huang, EMNLP 2021, arXiv 2109.05687.

A pretrained classifier is fine-tuned with AdamW, but the gradient g reaches only a part of its weights, the
child:

    F (task-free)    g ← g ⊙ M / p,   M ~ Bernoulli(p), drawn for every weight at every step
    D (task-driven)  g ← g ⊙ M,       M = 1 for the share p of weights with the largest Fisher information F,
                                      for good; F_i = 1/N Σ_n (∂ log P(y_n | x_n) / ∂w_i)²

--mode none is plain AdamW. With several modes or --seeds, each trial is an ordinary run in OUT/MODE-SEED, one
after the other, which keeps its model; then a table gives each mode's mean scores, and OUT gets a copy of the
best trial's model.

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
other defaults are their script's, for RTE and bert-large-cased. A trial scores its last step, as theirs.

--form code is the released code: Fisher information from the gradients of whole batches, each clipped to norm
1 tensor by tensor, with dropout, for the weights named "layer" alone; no warm-up in modes F and D. Departures
from both: processes share their draws (F) and Fisher information (D), where each had its own; a step whose
gradient is not finite is skipped.

Flags from other papers, whose losses are in kernels/training/extras/classifier_losses.py:
--rdrop α     R-Drop (Liang, Wu et al., NeurIPS 2021, arXiv 2106.14448): two passes with different dropout,
              CE1 + CE2 + α (KL(P1‖P2) + KL(P2‖P1)) / 2. --form code: its readme's, where KL is a sum over the
              batch, so that α is comparable under one form only
--supcon λ    (1 − λ) CE + λ SCL (Gunel et al., ICLR 2021, arXiv 2011.01403)
--ood FILE    texts of no class of the data, told from --dev's by three detectors (Zeng et al., ACL 2021,
              arXiv 2105.14289); --ood-epochs of their contrastive loss come first
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
    add("--ood", reads="held-out data", help="texts of classes that --data lacks; labels are not read")
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

import functools
import math

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForSequenceClassification

from kernels import own_rows
from kernels.training.extras import classifier_losses, held_out
from kernels.training.extras.classifier_losses import ood_contrastive_loss, rdrop_loss, supcon_loss  # noqa
from kernels.training.extras.masked_adamw import MaskedAdamW, draw_masks, multiply, with_gradient
from kernels.training.extras.trials import run_trials
from kernels.training.loop import epoch_steps, set_lr, sum_gradients, warmup_linear
from kernels.training.progress import progress
from kernels.training.run import Run
from kernels.training.tables import texts_of
from kernels.training.text import classifier
from kernels.training.text.classifier import classify, evaluate, make_batch, task_loss
from kernels.training.text.models import load_text_model, longest_input

# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """[(texts, label)]: one text or two, and the label's place in args.labels, or a number in regression.

    The first file, the training data, decides the task, the labels and the flags that were not given.
    """
    rows = classifier.read_labelled(path, args)
    if args.labels is None:
        labels = {label for *_, label in rows}
        decide_flags(labels, args)
        if len(labels) == 1:
            fail(f"{path}: every label is {min(labels)!r}; wanted at least two")
        if args.batch_size > len(rows):
            fail(f"{path}: {len(rows)} rows, wanted at least --batch-size, which is {args.batch_size}")
    return classifier.number_labels(rows, path, args)


def decide_flags(labels, args):
    """Fill the flags that were not given."""
    classifier.decide_task(labels, args)
    code, scratch = args.form == "code", args.model == "scratch"
    fill(args, dict(metric=METRICS[args.task][0], epochs=12 if scratch else 3, lr=2e-3 if scratch else 4e-5,
                    fisher_batch_size=16 if code else 1, fisher_clip=1.0 if code else 0.0))
    if args.metric not in METRICS[args.task]:
        fail(f"--metric {args.metric}: this is {args.task}, wanted {', '.join(METRICS[args.task])}")
    if args.task == "regression" and (args.supcon or args.ood_epochs):
        fail("--supcon and --ood-epochs: this is regression, wanted classes")
    if not 0 < args.reserve_p <= 1:
        fail(f"--reserve-p {args.reserve_p}: wanted a share above 0, up to 1")


def build_model(args, run, modes):
    """The classifier with its tokenizer; --seed draws its head. modes: of all trials, so that what D lacks is
    told before the first one."""
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
    if "D" in modes and not any(model.child in name for name in names):
        fail(f"--child {model.child}: in no name of the weights of {args.model}, which are like "
             f"{names[len(names) // 2]}")
    model.tokenizer, model.bf16 = tokenizer, run.bf16
    return model.to(run.device).train()


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def child_gradients(gradients, masks, mode, p):
    """The child's gradients, for lists of tensors: g ⊙ M / p in mode F, g ⊙ M in mode D."""
    child = multiply(gradients, masks)                         # g ⊙ M
    if mode == "F":
        torch._foreach_mul_(child, 1 / p)                      # g ⊙ M / p
    return child


class ChildTuningAdamW(MaskedAdamW):
    """AdamW whose gradient reaches only the child, see child_gradients. Every weight decays, masked or not.

    mode        "none"; "F": M ~ Bernoulli(p) anew at every step; "D": the given masks
    reserve_p   p of mode F, in (0, 1]; 1 draws nothing. A group may have its own mode, reserve_p, lr, ...
    masks       {parameter: bool tensor}, or a function from a parameter to one that is called at every step;
                in mode F instead of the draws; a parameter without a mask (None) gets its whole gradient
    generator   of the draws; None: one with seed 0, so ranks draw alike. state_dict() has it, and the masks
    source      Xu et al. 2021; the rule of MaskedAdamW is the released optimizer's

    .grad is left as it is. torch.compile takes step(); mode F breaks the graph to draw.
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

    def mask_gradients(self, gradients, masks, group):
        return child_gradients(gradients, masks, group["mode"], group["reserve_p"])

    def before_step(self):
        drawing = [group for group in self.param_groups if group["mode"] == "F" and group["reserve_p"] < 1]
        if drawing and self.mask_function is self.masks is None:
            self.draw(drawing)

    @torch.compiler.disable
    def draw(self, groups):
        for group in groups:                                   # M ~ Bernoulli(p)
            draw_masks(with_gradient(group), self.drawn, group["reserve_p"], self.generator)

    def masks_of(self, weights, group):
        """The child M: a bool tensor for each weight, or None for all of it."""
        if group["mode"] == "D" and group["reserve_p"] < 1 and self.mask_function is self.masks is None:
            raise RuntimeError("mode D has no masks: give them, or load a state_dict that has them")
        if group["mode"] == "none":
            return [None] * len(weights)
        find = self.mask_function or (self.drawn if self.masks is None else self.masks).get
        return [find(w) for w in weights]

    def weights(self):
        return [w for group in self.param_groups for w in group["params"]]

    def state_dict(self):
        masks = None if self.masks is None else [self.masks.get(w) for w in self.weights()]
        return super().state_dict() | {"masks": masks, "generator": self.generator.get_state()}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.generator.set_state(state_dict["generator"].cpu())
        if state_dict["masks"] is not None:
            pairs = zip(self.weights(), state_dict["masks"])
            self.masks = {w: m.to(w.device, torch.bool).view(w.shape) for w, m in pairs if m is not None}


def fisher_mask(model, batches, loss, reserve_p, max_grad_norm=None, name_filter=None):
    """The child of mode D: the share p of the weights with the largest Fisher information.

    batches, loss, max_grad_norm, name_filter    see fisher_information
    reserve_p    p in (0, 1]
    returns      ({name: bool tensor}, threshold): F ≥ threshold, numpy's percentile 100 (1 − p) of all F
                 together, linearly interpolated; ties stay, so a threshold of 0 keeps all (released code)
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
    source         Xu et al. 2021; weights without gradient have F = 0, batches without a finite one no part
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
    every = ", which all have" if threshold == 0 else ""
    say("child", f"{100 * kept / total:.2f} % of {total / 1e6:.1f} M weights, Fisher information from "
                 f"{threshold:.1e}{every}")
    return {w: masks[name] for name, w in model.named_parameters() if name in masks}


def make_optimizer(model, args):
    """For one mode; biases and norms do not decay. Mode D's child is not known yet."""
    weights = [w for w in model.parameters() if w.requires_grad]
    groups = [dict(params=[w for w in weights if w.dim() > 1], weight_decay=args.weight_decay),
              dict(params=[w for w in weights if w.dim() <= 1], weight_decay=0.0)]
    generator = torch.Generator(model.device).manual_seed(args.seed)
    return ChildTuningAdamW(groups, args.lr, eps=1e-8, mode=args.mode, reserve_p=args.reserve_p,
                            masks={} if args.mode == "D" else None, generator=generator)


def warmup_steps(args, total):
    """How many of total steps have a rising rate. Released F and D have a scheduler of their own, without."""
    share = args.warmup_share
    if share is None:
        share = 0.0 if args.form == "code" and args.mode != "none" else 0.1
    return math.ceil(share * total)


def compute_loss(model, batch, rows, args):
    """This rank's part of the task's loss of a batch of `rows` rows."""
    inputs, labels = batch
    if args.rdrop is not None or args.supcon:
        loss = classifier_losses.regularised_loss(model, inputs, labels, rows, args)
    else:
        loss = task_loss(classify(model, inputs), labels)
    loss = loss * (len(labels) / rows)
    return loss, {"loss": loss.detach()}


def compute_ood_loss(model, batch, rows, args):
    """The same in --ood-epochs."""
    inputs, labels = batch
    loss = classifier_losses.adversarial_contrast(model, inputs, labels, rows, args) * (len(labels) / rows)
    return loss, {"loss": loss.detach()}


# ── evaluation ──────────────────────────────────────────────────────────────────────────────────────────────


def evaluate_and_save(model, data, args, run):
    """Score and save the model; at the last step also score it on --contrast-set and --ood."""
    scores = evaluate(model, data["dev"], args) if data["dev"] else {}
    run.keeps(scores)                                          # always the newest: nothing is chosen
    classifier.save(model, args, run)
    if scores:
        found = classifier.describe_scores(scores, args.labels)
        say("dev", f"step {run.step:,}, mode {args.mode}, seed {args.seed}: {found}")
    if run.step == run.total and (args.contrast_set or args.ood):
        found = held_out.more_scores(model, data)
        run.values |= found
        held_out.say_more(found, "test", args.contrast_set)


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


def train(args, run, data, modes):
    """One trial: an ordinary run of one mode with one seed. modes: of all trials, see build_model."""
    model = build_model(args, run, modes)
    drawn = torch.get_rng_state()                              # dropout of the Fisher pass goes on from here
    data = classifier.tokenise_data(data, model, args.max_length)
    rows = data["train"]
    epoch = epoch_steps(len(rows), args.batch_size, run.world)
    contrastive = args.ood_epochs * epoch                      # steps that come first
    total = contrastive + (args.steps or args.epochs * epoch)
    args.eval_every = args.eval_every or epoch
    say("model", f"{args.model}, {sum(w.numel() for w in model.parameters()) / 1e6:.1f} M parameters")
    loss_of, first = compute_ood_loss if contrastive else compute_loss, rows[:1]
    classifier.try_out(args.model, lambda: loss_of(model, make_batch(first, model), run.world, args))
    optimizer = make_optimizer(model, args)
    run.progress["skipped"] = 0
    run.begin(model, optimizer, total)
    if args.mode == "D" and args.reserve_p < 1 and not run.step:               # else state.pt has the child
        torch.manual_seed(args.seed)
        torch.set_rng_state(drawn)
        optimizer.masks = find_child(model, rows, args)
        torch.manual_seed(args.seed + run.rank)  # ranks have equal weights and different dropout
    values = {"loss": math.nan}                                # the last that were finite
    for step, batch in run.steps(total, len(rows)):
        set_lr(optimizer, warmup_linear(step - 1, total, warmup_steps(args, total), args.lr))
        own = [rows[i] for i in batch[own_rows(len(batch))]]
        loss_of = compute_ood_loss if step <= contrastive else compute_loss
        loss, now = loss_of(model, make_batch(own, model), len(batch), args)
        optimizer.zero_grad()
        loss.backward()
        sum_gradients(model)
        finite = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite().item()
        if finite:
            optimizer.step()
        else:
            run.progress["skipped"] += 1
            say("note", f"step {step}: the gradient is not finite, the step is skipped")
        if finite or run.due:
            run.note(now if finite else values, lr=optimizer.param_groups[0]["lr"], mode=args.mode,
                     seed=args.seed, skipped=run.progress["skipped"])
            values = run.values
        if run.due:
            evaluate_and_save(model, data, args, run)
    classifier.finish(run, args, run.progress["saved"], run.progress["skipped"])


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    if args.evaluate:
        return classifier.score(args, __file__, load_data)
    data = {"train": load_data(args.data, args), "dev": load_data(args.dev, args) if args.dev else []}
    if args.contrast_set or args.ood:
        data |= held_out.load_more(args, load_data)
    modes = list(dict.fromkeys(args.mode))
    if len(modes) > 1 or args.seeds > 1:
        return run_trials(args, modes, __file__, functools.partial(train, data=data, modes=modes))
    args.mode, = modes
    train(args, Run(args, __file__), data, modes)


if __name__ == "__main__":
    main()
