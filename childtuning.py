"""Child-Tuning: Raise a Child in Large Language Model: Towards Effective and Generalizable Fine-tuning.
Xu, Luo, Zhang, Tan, Chang, Huang, Huang, EMNLP 2021, arXiv 2109.05687.

AdamW fine-tunes a pretrained text classifier, but uses only the gradients g of a part of the weights, the
child network. The mask M is 1 for weights of the child network, else 0, and ⊙ multiplies element-wise. The
data are N texts x_n with labels y_n. p is --reserve-p. --mode none is plain AdamW. The modes with masks are:
    --mode F     task-free: M is sampled at every step.  g ← g ⊙ M / p,  M_i ~ Bernoulli(p)
    --mode D     task-driven: M is computed once, before training.  g ← g ⊙ M,  M_i = 1 for the fraction p of
                 the weights with the largest Fisher information  F_i = 1/N Σ_n (∂ log P(y_n | x_n) / ∂w_i)²

    python childtuning.py --model scratch --data tests/data/topics.tsv --dev tests/data/topics_dev.tsv
    torchrun --nproc-per-node 4 childtuning.py --data cola.tsv --dev cola_dev.tsv
    python childtuning.py --evaluate --model out/childtuning --data cola_dev.tsv

The paper trains each mode with ten seeds, as these commands do. docs/results.md has code for the means:
    for mode in none F D; do for seed in 42 43 44 45 46 47 48 49 50 51; do
      python childtuning.py --data rte.tsv --dev dev.tsv --mode $mode --seed $seed --out out/rte/$mode-$seed
    done; done

Data: .csv .tsv .json .jsonl .parquet with one or two columns of texts, and one column of labels. --columns
names these columns in this order; see --help for its default. A label may be any text. If all labels are
numbers, and some of them have a decimal point, the task is regression.

Published result: the mean dev score on CoLA, RTE, MRPC and STS-B (GLUE) is 1.5 to 8.6 points above that of
plain AdamW, depending on the model. In general, mode D is at least as good as mode F. The authors' settings
are those of --form code, with --reserve-p 0.2 for CoLA and STS-B, 0.3 for RTE, and for MRPC 0.4 (mode F) or
0.1 (mode D). The score of a run is the score after its last step, as in the released code.

--form code computes the Fisher information with dropout, and changes the defaults of --fisher-batch-size,
--fisher-clip, --child-filter and --warmup-ratio. Departures from the released code: all processes share the
masks and the Fisher information, and a step whose gradient is not finite is skipped.
"""
import math

import numpy as np
import torch
import torch.distributed as dist

from kernels import own_rows
from kernels.training.errors import command, fail, log
from kernels.training.flags import ScriptParser, at_least, fill_defaults, ratio, run_flags
from kernels.training.loop import all_reduce_gradients, decay_groups, set_lr, steps_per_epoch, warmup_linear
from kernels.training.progress import progress
from kernels.training.run import Run
from kernels.training.text import classifier
from kernels.training.text.classifier import classify, make_batch, task_loss, tokenise_texts

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────

RELEASED = dict(epochs=3, lr=4e-5)                      # flags have these defaults, as in the released script
SCRATCH = dict(epochs=12, lr=2e-3)
FISHER = {"paper": dict(fisher_batch_size=1, fisher_clip=0.0),
          "code": dict(fisher_batch_size=16, fisher_clip=1.0)}


def make_parser():
    parser = ScriptParser(__doc__)
    add = parser.add_argument
    run_flags(
        parser, model="bert-large-cased", dev=None, out="out/childtuning", form="paper",
        max_length=(128, "128 (released script), for both texts of a pair together, also of --dev"),
        batch_size=(16, "16 (released script)"),
        epochs=(None, "3 (released script), or 12 with --model scratch"),
        lr=(None, "4e-5 (released script), or 2e-3 with --model scratch; linear decay to 0"),
        weight_decay=(0.01, "0.01 (released script); always 0 for biases and norms"),
        eval_every=(None, "one epoch"))
    classifier.classifier_flags(parser)
    add("--mode", choices=("none", "F", "D"), default="D",
        help="none: plain AdamW; F: random masks; D: masks from the Fisher information; default D")
    add("--reserve-p", type=float, default=0.3,
        help="p, the fraction of the weights in the child network; default 0.3 (released script)")
    add("--fisher-samples", type=at_least(1, int), help="rows for Fisher information; default all (paper)")
    add("--fisher-batch-size", type=at_least(1, int),
        help="rows per gradient in the Fisher information; default 1 (paper), or 16 with --form code")
    add("--fisher-clip", type=at_least(0),
        help="norm to which Fisher gradients are clipped; 0: off; default 0 (paper), or 1 with --form code")
    add("--child-filter",
        help="in mode D, mask only the weights whose names contain NAME; train all other weights fully; "
             "default all weights except the head's; with --form code, the default NAME is layer")
    add("--warmup-ratio", group="training", type=ratio,
        help="fraction of the steps for warm-up; default 0.1 (paper), or 0 for F and D with --form code")
    return parser


# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """Return the rows [(texts, label)] of a file, and set the flags whose defaults depend on other flags."""
    fill_defaults(args, (SCRATCH if args.model == "scratch" else RELEASED) | FISHER[args.form])
    if not 0 < args.reserve_p <= 1:
        fail(f"--reserve-p {args.reserve_p}: expected a number above 0 and at most 1")
    return classifier.load_rows(path, args)


def build_model(args, run):
    """Return the classifier. Its attribute child_filter is the value or default of --child-filter."""
    model = classifier.load_model(args, run)
    names = [name for name, _ in model.named_parameters()]
    released = "layer" if args.form == "code" else None
    model.child_filter = args.child_filter or released or f"{model.base_model_prefix}."
    if args.mode == "D" and not any(model.child_filter in name for name in names):
        fail(f"--child-filter {model.child_filter}: no parameter name of {args.model} contains it; "
             f"a typical name is {names[len(names) // 2]}")
    return model


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def child_gradients(gradients, masks, mode, p):
    """Return the list of the child network's gradients: g ⊙ M / p in mode F, g ⊙ M in mode D. Where M is 0,
    the result is 0, even if g is NaN. If a mask in the list is None, its g is returned unchanged."""
    return [g if M is None else torch.where(M, g * (1 / p) if mode == "F" else g, 0)
            for g, M in zip(gradients, masks)]


class ChildTuningAdamW(torch.optim.Optimizer):
    """AdamW that uses the gradients g of child_gradients, not the full gradients. It does not change .grad.

        m ← β1 m + (1 − β1) g            v ← β2 v + (1 − β2) g²
        w ← w − a m / (√v + eps)         a = lr √(1 − β2^t) / (1 − β1^t) in step t = 1, 2, ...
        w ← w − lr · weight_decay · w    if correct_bias is False: a = lr

    mode        "none" | "F": M ~ Bernoulli(p), sampled at every step | "D": M is given by `masks`
    reserve_p   p of mode F, in (0, 1]; 1: no masks. Parameter groups may differ in mode, reserve_p, lr etc.
    masks       {parameter: bool tensor}, or a function from a parameter to its mask, called at every step.
                If given, mode F samples no masks. A parameter without a mask gets its full gradient
    generator   torch.Generator for mode F, saved by state_dict(); None: a new one with seed 0 on all ranks
    source      Xu et al. 2021, released code. As in early versions of transformers, weights decay after the
                Adam step; weights with M = 0 decay, too
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, correct_bias=True,
                 mode="none", reserve_p=1.0, masks=None, generator=None):
        mode = (mode or "none").removeprefix("ChildTuning-")   # the released code's modes have this prefix
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
        self.masks = masks
        for w, mask in ({} if callable(masks) else masks or {}).items():
            if not torch.is_tensor(w) or mask.dtype != torch.bool or mask.shape != w.shape:
                raise ValueError("masks: expected {parameter: bool tensor of the parameter's shape}")
        super().__init__(params, defaults)
        self.generator = generator or torch.Generator(self.weights()[0].device).manual_seed(0)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if weights := [w for w in group["params"] if w.grad is not None]:
                self.update(weights, group)
        return loss

    def update(self, weights, group):
        """Apply the formulas in the docstring of the class to the weights of one parameter group."""
        lr, (beta1, beta2) = group["lr"], group["betas"]
        for w in weights:
            if not self.state[w]:
                self.state[w] |= dict(step=0, exp_avg=torch.zeros_like(w), exp_avg_sq=torch.zeros_like(w))
            self.state[w]["step"] += 1
        t, m, v = ([self.state[w][name] for w in weights] for name in ("step", "exp_avg", "exp_avg_sq"))
        g = [w.grad for w in weights]
        if group["mode"] != "none":
            masks = [self.get_mask(w, group) for w in weights]
            g = child_gradients(g, masks, group["mode"], group["reserve_p"])
        a = [lr * (1 - beta2 ** i) ** 0.5 / (1 - beta1 ** i) if group["correct_bias"] else lr for i in t]
        torch._foreach_lerp_(m, g, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, g, g, 1 - beta2)
        roots = torch._foreach_rsqrt(v)     # √v is computed as 1 / rsqrt(v), because sqrt(0) is slow on a CPU
        torch._foreach_reciprocal_(roots)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_addcdiv_(weights, m, roots, [-x for x in a])
        torch._foreach_add_(weights, weights, alpha=-lr * group["weight_decay"])

    def get_mask(self, w, group):
        """Return the mask M of the weight w in mode F or D: a bool tensor, or None for the full gradient."""
        if callable(self.masks):
            return self.masks(w)
        if self.masks is not None:
            return self.masks.get(w)
        if group["reserve_p"] == 1:
            return None
        if group["mode"] == "D":
            raise RuntimeError("mode D has no masks: pass masks, or load a state_dict that contains them")
        return sample_mask(w, group["reserve_p"], self.generator)

    def weights(self):
        return [w for group in self.param_groups for w in group["params"]]

    def state_dict(self):
        masks = [self.masks.get(w) for w in self.weights()] if isinstance(self.masks, dict) else None
        return super().state_dict() | {"masks": masks, "generator": self.generator.get_state()}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.generator.set_state(state_dict["generator"].cpu())
        if state_dict["masks"] is not None:
            pairs = zip(self.weights(), state_dict["masks"])
            self.masks = {w: m.to(w.device, torch.bool).view(w.shape) for w, m in pairs if m is not None}


def sample_mask(w, p, generator):
    """Return a random bool tensor of w's shape. An entry is True with probability p, to within 2^-32."""
    # Each random int64 is read as two int32. On a CPU, this is faster than bernoulli_.
    pairs = torch.empty((w.numel() + 1) // 2, dtype=torch.int64, device=generator.device)
    pairs.random_(-2**63, None, generator=generator)
    bound = min(round(p * 2**32) - 2**31, 2**31 - 1)
    return (pairs.view(torch.int32)[: w.numel()] < bound).view(w.shape).to(w.device)


def fisher_mask(model, batches, loss, reserve_p, max_grad_norm=None, name_filter=None):
    """Return mode D's masks: True for the fraction reserve_p of weights with largest Fisher information F.

    batches, loss, max_grad_norm, name_filter    arguments of fisher_information, which computes F
    returns    ({name of a weight: mask, True where F ≥ threshold}, threshold). The threshold is numpy's
               percentile 100 (1 − reserve_p) of all F. If it is 0, all masks are True (released code)
    """
    if not 0 < reserve_p <= 1:
        raise ValueError(f"reserve_p: found {reserve_p}, expected a number in (0, 1]")
    fisher = fisher_information(model, batches, loss, max_grad_norm, name_filter)
    values = torch.cat([x.flatten().cpu() for x in fisher.values()]).numpy()
    threshold = float(np.percentile(values, np.float64(100 * (1 - reserve_p)), overwrite_input=True))
    return {name: x >= threshold for name, x in fisher.items()}, threshold


def fisher_information(model, batches, loss, max_grad_norm=None, name_filter=None):
    """Return {name of a weight w: F}, where F = 1/N Σ (∂ loss(model, batch) / ∂w)² over N batches.

    F is the empirical Fisher information: labels come from the data. In the paper a batch is one row, in the
    released code 16 rows. F has the shape of w, and is float32 or float64. F is 0 for frozen and unused
    weights. Batches with a gradient that is not finite are skipped. .grad and the model's mode do not change.

    batches        iterable. Under torchrun each rank passes a share of the batches, and gets F of all batches
    loss           function(model, batch) → scalar
    max_grad_norm  norm to which each tensor's gradient is clipped (released code: 1.0); None: no clipping
    name_filter    function(name) → bool, or text that a name must contain (released code: "layer"); None: all
    source         Xu et al. 2021
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
        gradients = [gradient.detach().to(fisher[name].dtype)  # in torch 2.9, zeros of unused w require grad
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
        log("note", f"Fisher information: skipped {skipped} of {used + skipped} batches, those with "
                    "gradients that are not finite")
    if not used:
        raise ValueError("batches: found no batch with a finite gradient")
    torch._foreach_div_(list(fisher.values()), used)
    return fisher


def find_child(model, rows, args):
    """Return {weight: mask} of mode D. Only --form code computes the Fisher information with dropout."""
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
    log("child", f"trains {100 * kept / total:.2f} % of {total / 1e6:.1f} M weights: those with Fisher "
                 f"information of at least {threshold:.1e}{note}")
    return {w: masks[name] for name, w in model.named_parameters() if name in masks}


def make_optimizer(model, args):
    """Return the optimizer of --mode. In mode D, it has no masks: main later adds the masks of find_child."""
    generator = torch.Generator(model.device).manual_seed(args.seed)
    return ChildTuningAdamW(decay_groups(model, args.weight_decay), args.lr, eps=1e-8, mode=args.mode,
                            reserve_p=args.reserve_p, masks={} if args.mode == "D" else None,
                            generator=generator)


def warmup_steps(args, total):
    """Return the number of warm-up steps: by default 1/10 of all, or 0 with --form code and mode F or D."""
    fraction = args.warmup_ratio
    if fraction is None:
        fraction = 0.0 if args.form == "code" and args.mode != "none" else 0.1
    return math.ceil(fraction * total)


def compute_loss(model, batch, rows, args):
    """Return this rank's part of the loss of a global batch of `rows` rows, and the values to log."""
    inputs, labels = batch
    loss = task_loss(classify(model, inputs), labels) * (len(labels) / rows)
    return loss, {"loss": loss.detach()}


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    if args.evaluate:
        return classifier.evaluate_model(args, __file__)
    train, dev = load_data(args.data, args), load_data(args.dev, args) if args.dev else []
    run = Run(args, __file__)
    model = build_model(args, run)
    train = tokenise_texts(train, model, args.max_length, training=True)
    dev = tokenise_texts(dev, model, args.max_length)
    epoch = steps_per_epoch(len(train), args.batch_size)
    total = args.steps or args.epochs * epoch
    args.eval_every = args.eval_every or epoch
    optimizer = make_optimizer(model, args)
    run.extra_state["skipped"] = 0
    run.begin(model, optimizer, total)
    if args.mode == "D" and args.reserve_p < 1 and not run.step:  # a resumed run loads its masks
        torch.manual_seed(args.seed)
        optimizer.masks = find_child(model, train, args)
        torch.manual_seed(args.seed + run.rank)                # each rank must sample different dropout masks
    logged = {"loss": math.nan}         # a skipped step logs the values of the last step that was not skipped
    for step, batch in run.steps(total, len(train)):
        set_lr(optimizer, warmup_linear(step - 1, total, warmup_steps(args, total), args.lr))
        rows = [train[i] for i in batch[own_rows(len(batch))]]
        loss, values = compute_loss(model, make_batch(rows, model), len(batch), args)
        optimizer.zero_grad()
        loss.backward()
        all_reduce_gradients(model)
        if torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            optimizer.step()
            logged = values
        else:
            run.extra_state["skipped"] += 1
            log("note", f"step {step}: the gradient is not finite; the step is skipped")
        run.log_metrics(logged, lr=optimizer.param_groups[0]["lr"], skipped=run.extra_state["skipped"])
        if run.eval_due:
            classifier.evaluate_and_save(model, dev, args, run)
    skipped = run.extra_state["skipped"]
    classifier.finish_run(run, args, f"{skipped} steps skipped, " if skipped else "")


if __name__ == "__main__":
    main()
