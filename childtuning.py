"""Child-Tuning: Raise a Child in Large Language Model: Towards Effective and Generalizable Fine-tuning.
Xu, Luo, Zhang, Tan, Chang, Huang, Huang, EMNLP 2021, arXiv 2109.05687.

AdamW fine-tunes a pretrained text classifier, but only a part of the weights, the child network, gets its
gradient g. A mask M is 1 for the weights w of the child, 0 for all others, and ⊙ multiplies element-wise. The
data are N texts x_n with labels y_n, and p is --reserve-p. --mode none is plain AdamW; the other modes are:
    --mode F     task-free: M is sampled at every step.  g ← g ⊙ M / p,  M_i ~ Bernoulli(p)
    --mode D     task-driven: M is computed once, before training.  g ← g ⊙ M,  M_i = 1 for the fraction p of
                 the weights with the largest Fisher information  F_i = 1/N Σ_n (∂ log P(y_n | x_n) / ∂w_i)²

    python childtuning.py --model scratch --data tests/data/topics.tsv --dev tests/data/topics_dev.tsv
    python childtuning.py --data rte.tsv --dev rte_dev.tsv --form code --mode none F D --num-seeds 10
    torchrun --nproc-per-node 4 childtuning.py --data cola.tsv --dev cola_dev.tsv --metric matthews
    python childtuning.py --model out/cline --mode none --data imdb.tsv --contrast-set test.tsv edited.tsv

The second command runs a trial for each mode and seed, in the folder OUT/MODE-SEED. Then it prints the mean
scores of each mode, and copies the best model to OUT. The last command fine-tunes an encoder of cline.py, and
scores it on a contrast set: test texts and, row by row, edited copies whose labels have changed.

Data: .csv .tsv .json .jsonl with one or two columns of text and one column of labels:
    text     given by --text-columns, else named sentence, or sentence1 and sentence2, else all but the label
    label    given by --label-column, else named label or score, else the last column
A label may be any text. If all labels are numbers and one has a decimal point, the task is regression.

Published result: the mean dev score on CoLA, RTE, MRPC and STS-B (GLUE) is 1.5 to 8.6 points above that of
plain AdamW, depending on the model. D is at least as good as F. The authors used --form code with our other
defaults. Their --reserve-p is 0.2 for CoLA and STS-B, 0.3 for RTE, and for MRPC 0.4 (F) and 0.1 (D). As in
their code, the score of a trial is that of its last step.

With --form code the Fisher information has dropout, and --fisher-batch-size, --fisher-clip, --child-filter
and --warmup-ratio have other defaults. Further departures from the released code:
- In the released code each process has its own masks and Fisher information; this script shares them.
- This script skips a step whose gradient is not finite.

Other papers: --rdrop-weight is R-Drop (Liang, Wu et al., NeurIPS 2021, arXiv 2106.14448). --supcon-weight is
supervised contrastive loss (Gunel et al., ICLR 2021, arXiv 2011.01403). --ood and --ood-epochs are detection
of other domains (Zeng et al., ACL 2021, arXiv 2105.14289); its detectors are softmax, LOF and Mahalanobis.
"""
import functools
import math

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForSequenceClassification

from kernels import own_rows
from kernels.training.data import iter_texts
from kernels.training.errors import command, fail, log
from kernels.training.extras import classifier_losses, extra_test_sets
from kernels.training.extras.classifier_losses import ood_contrastive_loss, rdrop_loss, supcon_loss  # noqa
from kernels.training.extras.trials import run_trials
from kernels.training.flags import ScriptParser, at_least, fill_defaults, ratio, run_flags
from kernels.training.loop import all_reduce_gradients, set_lr, steps_per_epoch, warmup_linear
from kernels.training.papers.childtuning_adamw import MaskedAdamW, apply_masks, draw_masks, params_with_grad
from kernels.training.progress import progress
from kernels.training.run import Run
from kernels.training.text import classifier
from kernels.training.text.classifier import classify, evaluate, make_batch, task_loss
from kernels.training.text.models import load_text_model, longest_input

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────

METRICS = {"classification": ("accuracy", "f1", "matthews"), "regression": ("spearman", "pearson")}


def make_parser():
    parser = ScriptParser(__doc__)
    add = parser.add_argument
    run_flags(
        parser, model="bert-large-cased", dev=None, out="out/childtuning", form="paper",
        max_length=(128, "128 (released script), for both texts of a pair together"),
        temperature=(None, "0.3 with --supcon-weight (ours), 0.1 in --ood-epochs (released code)"),
        batch_size=(16, "16 (released script)"),
        epochs=(None, "3 (released script), or 12 with --model scratch"),
        lr=(None, "4e-5 (released script), or 2e-3 with --model scratch; linear decay to 0"),
        weight_decay=(0.01, "0.01 (released script); always 0 for biases and norms"),
        eval_every=(None, "one epoch"))
    parser.set_defaults(labels=None)                           # load_data sets it to the class names
    add("--text-columns", group="data", nargs="+", help="one or two columns of text; default see above")
    add("--label-column", group="data", help="column of labels; default see above")
    add("--task", group="data", choices=tuple(METRICS), help="type of task; default inferred from the labels")
    add("--mode", nargs="+", choices=("none", "F", "D"), default=["D"],
        help="none: plain AdamW; F, D: see above; several modes run as separate trials; default D")
    add("--reserve-p", type=float, default=0.3,
        help="p, the fraction of the weights in the child network; default 0.3 (released script)")
    add("--fisher-samples", type=at_least(1, int), help="rows for Fisher information; default all (paper)")
    add("--fisher-batch-size", type=at_least(1, int),
        help="rows per gradient in the Fisher information; default 1 (paper), or 16 with --form code")
    add("--fisher-clip", type=at_least(0),
        help="norm to which Fisher gradients are clipped; 0: off; default 0 (paper), or 1 with --form code")
    add("--child-filter",
        help="D masks only weights with NAME in their names, and trains the others in full; default all "
             "but the head, or layer with --form code")
    add("--rdrop-weight", group="other papers", type=at_least(0),
        help="α in R-Drop's loss CE1 + CE2 + α/2 (KL(P1‖P2) + KL(P2‖P1)) of two passes with different "
             "dropout. --form code halves CE1 + CE2, and sums KL over the batch; default off")
    add("--supcon-weight", group="other papers", type=ratio, default=0.0,
        help="λ in the loss (1 − λ) CE + λ SCL; SCL: supervised contrastive loss; default 0")
    add("--ood", group="other papers", reads="held-out data",
        help="texts of classes that --data lacks: measure how well three detectors separate them from --dev")
    add("--ood-epochs", group="other papers", type=at_least(0, int), default=0,
        help="epochs of supervised contrastive training before fine-tuning; default 0 (released code: 20)")
    parser.add_shared("--adversarial", 0.1, "0.1 (released code); only used by --ood-epochs",
                      group="other papers")
    add("--warmup-ratio", group="training", type=ratio,
        help="fraction of the steps for warm-up; default 0.1 (paper), or 0 for F and D with --form code")
    add("--num-seeds", group="training", type=at_least(1, int), default=1,
        help="trials per mode, with seeds --seed, --seed + 1, ...; default 1")
    add("--metric", group="evaluation", choices=[*METRICS["classification"], *METRICS["regression"]],
        help="dev score to compare trials by; f1: of label 1 if labels are 0 and 1, else macro F1; default "
             "accuracy, or spearman in regression")
    add("--contrast-set", group="evaluation", reads="held-out data", nargs=2, metavar=("ORIGINAL", "EDITED"),
        help="test texts, and edited copies of them with other labels, row by row")
    return parser


# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """Return [(texts, label)]: one text or two, and the label as an index into args.labels, or as a number in
    regression. The first file read, the training data, sets the flags that were not given."""
    rows = classifier.read_labelled(path, args)
    if args.labels is None:
        labels = {label for *_, label in rows}
        set_default_flags(labels, args)
        if len(labels) == 1:
            fail(f"{path}: every label is {min(labels)!r}; expected at least two different labels")
        if args.batch_size > len(rows):
            fail(f"{path}: {len(rows)} rows, expected at least --batch-size, which is {args.batch_size}")
    return classifier.encode_labels(rows, path, args)


def set_default_flags(labels, args):
    """Set the flags that were not given, from the labels of the training data, and check them."""
    classifier.infer_task(labels, args)
    defaults = dict(metric=METRICS[args.task][0], epochs=3, lr=4e-5, fisher_batch_size=1, fisher_clip=0.0)
    if args.model == "scratch":
        defaults |= dict(epochs=12, lr=2e-3)
    if args.form == "code":
        defaults |= dict(fisher_batch_size=16, fisher_clip=1.0)
    fill_defaults(args, defaults)
    if args.metric not in METRICS[args.task]:
        fail(f"--metric {args.metric}: the task is {args.task}, expected {', '.join(METRICS[args.task])}")
    if args.task == "regression" and (args.supcon_weight or args.ood_epochs):
        fail("--supcon-weight and --ood-epochs: the task is regression, expected classification")
    if not 0 < args.reserve_p <= 1:
        fail(f"--reserve-p {args.reserve_p}: expected a number above 0 and at most 1")


def build_model(args, run, modes):
    """Load the classifier and its tokenizer. `modes` are those of all trials: D needs a valid --child-filter,
    which is checked before the first trial."""
    torch.manual_seed(args.seed)                               # for the weights of a new head
    head = dict(problem_type="regression", num_labels=1)
    if args.labels:
        head = dict(problem_type="single_label_classification", id2label=dict(enumerate(args.labels)),
                    label2id={label: i for i, label in enumerate(args.labels)})
    auto = AutoModelForSequenceClassification
    model, tokenizer = load_text_model(args.model, iter_texts(args.data), auto, **head)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    longest = longest_input(model.base_model, tokenizer)
    if args.max_length > longest:
        fail(f"--max-length {args.max_length}: {args.model} reads at most {longest} tokens")
    names = [name for name, _ in model.named_parameters()]
    encoder = f"{model.base_model_prefix}."
    model.child_filter = args.child_filter or ("layer" if args.form == "code" else encoder)
    if "D" in modes and not any(model.child_filter in name for name in names):
        fail(f"--child-filter {model.child_filter}: found in no parameter name of {args.model}; "
             f"names are like {names[len(names) // 2]}")
    model.tokenizer, model.bf16 = tokenizer, run.bf16
    return model.to(run.device).train()


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def child_gradients(gradients, masks, mode, p):
    """Return the child's gradients, for lists of tensors: g ⊙ M / p in mode F, g ⊙ M in mode D."""
    child = apply_masks(gradients, masks)                      # g ⊙ M
    if mode == "F":
        torch._foreach_mul_(child, 1 / p)                      # g ⊙ M / p
    return child


class ChildTuningAdamW(MaskedAdamW):
    """AdamW that uses only the gradients of the child network, see child_gradients.

    mode        "none" | "F": M ~ Bernoulli(p), sampled at every step | "D": M is given by `masks`
    reserve_p   p of mode F, in (0, 1]; 1: no masks. Parameter groups may differ in mode, reserve_p, lr, ...
    masks       {parameter: bool tensor}, or a function from a parameter to its mask, called at every step.
                Mode F uses them instead of sampling. A parameter whose mask is None gets its full gradient
    generator   of mode F; None: one with seed 0, so that ranks sample alike. state_dict() holds its state
    source      Xu et al. 2021; the update rule is that of the released optimizer, see MaskedAdamW

    Weight decay applies to all weights. .grad is not changed. In mode F sampling breaks a compiled graph.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, correct_bias=True,
                 mode="none", reserve_p=1.0, masks=None, generator=None):
        mode = (mode or "none").removeprefix("ChildTuning-")   # the released code's names have this prefix
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, correct_bias=correct_bias,
                        mode=mode, reserve_p=reserve_p)
        for name in ("lr", "eps", "weight_decay"):
            if not defaults[name] >= 0:
                raise ValueError(f"{name}: found {defaults[name]}, expected at least 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas: found {betas}, expected numbers in [0, 1)")
        if mode not in ("none", "F", "D"):
            raise ValueError(f"mode: found {mode!r}, expected none, F or D")
        if not 0 < reserve_p <= 1:
            raise ValueError(f"reserve_p: found {reserve_p}, expected a number in (0, 1]")
        self.mask_function = masks if callable(masks) else None
        self.masks = None if callable(masks) else masks
        self.sampled_masks = {}
        for w, mask in (self.masks or {}).items():
            if not torch.is_tensor(w) or mask.dtype != torch.bool or mask.shape != w.shape:
                raise ValueError("masks: expected {parameter: bool tensor of the parameter's shape}")
        super().__init__(params, defaults)
        self.generator = generator or torch.Generator(self.weights()[0].device).manual_seed(0)

    def mask_gradients(self, gradients, masks, group):
        return child_gradients(gradients, masks, group["mode"], group["reserve_p"])

    def before_step(self):
        sampled = [group for group in self.param_groups if group["mode"] == "F" and group["reserve_p"] < 1]
        if sampled and self.mask_function is None and self.masks is None:
            self.sample_masks(sampled)

    @torch.compiler.disable
    def sample_masks(self, groups):
        for group in groups:                                   # M ~ Bernoulli(p)
            draw_masks(params_with_grad(group), self.sampled_masks, group["reserve_p"], self.generator)

    def get_masks(self, weights, group):
        """Return the mask M of each weight: a bool tensor, or None for its full gradient."""
        if group["mode"] == "none":
            return [None] * len(weights)
        if self.mask_function is not None:
            return [self.mask_function(w) for w in weights]
        if group["mode"] == "D" and group["reserve_p"] < 1 and self.masks is None:
            raise RuntimeError("mode D has no masks: pass masks, or load a state_dict that contains them")
        masks = self.sampled_masks if self.masks is None else self.masks
        return [masks.get(w) for w in weights]

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
    """Return the child network of mode D: the fraction reserve_p of the weights, those with the largest F.

    batches, loss, max_grad_norm, name_filter    as in fisher_information, which computes F
    returns    ({name: F ≥ threshold}, threshold). The threshold is the percentile 100 (1 − reserve_p) of all
               F together, as numpy interpolates it. If it is 0, all weights are kept (released code)
    """
    if not 0 < reserve_p <= 1:
        raise ValueError(f"reserve_p: found {reserve_p}, expected a number in (0, 1]")
    fisher = fisher_information(model, batches, loss, max_grad_norm, name_filter)
    values = torch.cat([x.flatten().cpu() for x in fisher.values()]).numpy()
    threshold = float(np.percentile(values, np.float64(100 * (1 - reserve_p)), overwrite_input=True))
    return {name: x >= threshold for name, x in fisher.items()}, threshold


def fisher_information(model, batches, loss, max_grad_norm=None, name_filter=None):
    """Return {name: F}, F = 1/N Σ (∂ loss(model, batch) / ∂w)² over N batches: w's shape, float32 or float64.

    It is the empirical Fisher information: labels come from the data. In the paper a batch is one row, in the
    released code 16 rows. The model stays in train or eval mode as it is, and .grad is not changed.

    batches        inputs of loss, one after the other. Under torchrun each rank passes its own share of them,
                   and gets F of all batches
    loss           loss(model, batch) → scalar
    max_grad_norm  clip each tensor's gradient to this norm before squaring (released code: 1.0); None: do not
    name_filter    function(name) → bool, or text that a name must contain (released code: "layer"); None: all
    source         Xu et al. 2021. Weights without gradient have F = 0; non-finite batches are skipped
    """
    def is_included(name):
        return name_filter(name) if callable(name_filter) else (name_filter or "") in name

    weights = {name: w for name, w in model.named_parameters() if is_included(name)}
    trained = {name: w for name, w in weights.items() if w.requires_grad}
    if not trained:
        last = [name for name, _ in model.named_parameters()][-1:]
        raise ValueError(f"name_filter: matches no trainable parameter; the last parameter is {last}")
    fisher = {name: torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32))
              for name, w in weights.items()}
    used, skipped = 0, 0
    for batch in progress(batches, "Fisher information", " batches"):
        gradients = torch.autograd.grad(loss(model, batch), list(trained.values()), materialize_grads=True)
        gradients = [gradient.detach().to(fisher[name].dtype)  # detach: zeros of torch 2.9 require a gradient
                     for name, gradient in zip(trained, gradients)]
        norms = torch._foreach_norm(gradients)
        if not torch.stack(norms).isfinite().all():
            skipped += 1
            continue
        used += 1
        for name, gradient, norm in zip(trained, gradients, norms):
            if max_grad_norm is not None:
                gradient = gradient * (max_grad_norm / (norm + 1e-6)).clamp(max=1)
            fisher[name].addcmul_(gradient, gradient)
    if dist.is_initialized():
        counts = torch.tensor([used, skipped], device=fisher[min(trained)].device)
        for total in (counts, *fisher.values()):
            dist.all_reduce(total)
        used, skipped = counts.tolist()
    if skipped:
        log("note", f"Fisher information: skipped {skipped} of {used + skipped} batches, whose gradients are "
                    "not finite")
    if not used:
        raise ValueError("batches: found no batch with a finite gradient")
    torch._foreach_div_(list(fisher.values()), used)
    return fisher


def find_child(model, rows, args):
    """Return {weight: mask} of mode D, from --fisher-samples rows. Dropout is on only with --form code."""
    generator = torch.Generator().manual_seed(args.seed)
    order = torch.randperm(len(rows), generator=generator)[: args.fisher_samples]
    batches = [part.tolist() for part in order.split(args.fisher_batch_size)]
    if dist.is_initialized():
        batches = batches[dist.get_rank() :: dist.get_world_size()]

    def loss(model, batch):
        inputs, labels = make_batch([rows[i] for i in batch], model)
        return task_loss(classify(model, inputs), labels)

    model.train(args.form == "code")
    try:
        masks, threshold = fisher_mask(model, batches, loss, args.reserve_p, args.fisher_clip or None,
                                       model.child_filter)
    except ValueError as error:
        fail(f"Fisher information: {error}")
    model.train()
    kept = sum(mask.sum().item() for mask in masks.values())
    total = sum(mask.numel() for mask in masks.values())
    note = ", so that no weight is masked" if threshold == 0 else ""
    log("child", f"{100 * kept / total:.2f} % of {total / 1e6:.1f} M weights, with Fisher information of at "
                 f"least {threshold:.1e}{note}")
    return {w: masks[name] for name, w in model.named_parameters() if name in masks}


def make_optimizer(model, args):
    """Return the optimizer for args.mode, without weight decay of biases and norms and without D's masks."""
    weights = [w for w in model.parameters() if w.requires_grad]
    groups = [dict(params=[w for w in weights if w.dim() > 1], weight_decay=args.weight_decay),
              dict(params=[w for w in weights if w.dim() <= 1], weight_decay=0.0)]
    generator = torch.Generator(model.device).manual_seed(args.seed)
    return ChildTuningAdamW(groups, args.lr, eps=1e-8, mode=args.mode, reserve_p=args.reserve_p,
                            masks={} if args.mode == "D" else None, generator=generator)


def warmup_steps(args, total):
    """Return the number of warm-up steps; by default 0 in modes F and D with --form code, as released."""
    fraction = args.warmup_ratio
    if fraction is None:
        fraction = 0.0 if args.form == "code" and args.mode != "none" else 0.1
    return math.ceil(fraction * total)


def compute_loss(model, batch, rows, args):
    """Return this rank's part of the task loss of a global batch of `rows` rows, and the values to log."""
    inputs, labels = batch
    if args.rdrop_weight is not None or args.supcon_weight:
        loss = classifier_losses.regularised_loss(model, inputs, labels, rows, args)
    else:
        loss = task_loss(classify(model, inputs), labels)
    loss = loss * (len(labels) / rows)
    return loss, {"loss": loss.detach()}


def compute_ood_loss(model, batch, rows, args):
    """Like compute_loss, for the contrastive loss of --ood-epochs."""
    inputs, labels = batch
    loss = classifier_losses.ood_stage_loss(model, inputs, labels, rows, args) * (len(labels) / rows)
    return loss, {"loss": loss.detach()}


# ── evaluation ──────────────────────────────────────────────────────────────────────────────────────────────


def evaluate_and_save(model, data, args, run):
    """Score and save the model; at the last step also score it on --contrast-set and --ood."""
    scores = evaluate(model, data["dev"], args) if data["dev"] else {}
    run.should_save(scores)                                    # records the scores; the latest model is saved
    classifier.save(model, args, run)
    if scores:
        found = classifier.describe_scores(scores, args.labels)
        log("dev", f"step {run.step:,}, mode {args.mode}, seed {args.seed}: {found}")
    if run.step == run.total and (args.contrast_set or args.ood):
        found = extra_test_sets.score_extra_sets(model, data)
        run.values |= found
        extra_test_sets.log_extra_scores(found, "test", args.contrast_set)


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


def train(args, run, data, modes):
    """Run one trial: train args.mode with args.seed. modes: the modes of all trials, for build_model."""
    model = build_model(args, run, modes)
    fisher_rng_state = torch.get_rng_state()                   # for dropout in the Fisher pass
    data = classifier.tokenise_data(data, model, args.max_length)
    rows = data["train"]
    epoch = steps_per_epoch(len(rows), args.batch_size)
    ood_steps = args.ood_epochs * epoch                        # the first steps, with compute_ood_loss
    total = ood_steps + (args.steps or args.epochs * epoch)
    args.eval_every = args.eval_every or epoch
    log("model", f"{args.model}, {sum(w.numel() for w in model.parameters()) / 1e6:.1f} M parameters")
    optimizer = make_optimizer(model, args)
    run.extra_state["skipped"] = 0
    run.begin(model, optimizer, total)
    if args.mode == "D" and args.reserve_p < 1 and not run.step:  # a resumed run has the masks from state.pt
        torch.manual_seed(args.seed)
        torch.set_rng_state(fisher_rng_state)
        optimizer.masks = find_child(model, rows, args)
        torch.manual_seed(args.seed + run.rank)  # different dropout on each rank
    last_finite = {"loss": math.nan}
    for step, batch in run.steps(total, len(rows)):
        set_lr(optimizer, warmup_linear(step - 1, total, warmup_steps(args, total), args.lr))
        own = [rows[i] for i in batch[own_rows(len(batch))]]
        loss_fn = compute_ood_loss if step <= ood_steps else compute_loss
        loss, values = loss_fn(model, make_batch(own, model), len(batch), args)
        optimizer.zero_grad()
        loss.backward()
        all_reduce_gradients(model)
        finite = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite().item()
        if finite:
            optimizer.step()
        else:
            run.extra_state["skipped"] += 1
            log("note", f"step {step}: the gradient is not finite; the step is skipped")
        if finite or run.eval_due:
            run.log_metrics(values if finite else last_finite, lr=optimizer.param_groups[0]["lr"],
                            mode=args.mode, seed=args.seed, skipped=run.extra_state["skipped"])
            last_finite = run.values
        if run.eval_due:
            evaluate_and_save(model, data, args, run)
    classifier.finish_run(run, args, run.extra_state["saved"], run.extra_state["skipped"])


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    if args.evaluate:
        return classifier.evaluate_model(args, __file__, load_data)
    data = {"train": load_data(args.data, args), "dev": load_data(args.dev, args) if args.dev else []}
    if args.contrast_set or args.ood:
        data |= extra_test_sets.load_extra_sets(args, load_data)
    modes = list(dict.fromkeys(args.mode))
    if len(modes) > 1 or args.num_seeds > 1:
        return run_trials(args, modes, __file__, functools.partial(train, data=data, modes=modes))
    args.mode = modes[0]
    train(args, Run(args, __file__), data, modes)


if __name__ == "__main__":
    main()
