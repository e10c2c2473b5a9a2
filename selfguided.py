"""Self-Guided Contrastive Learning for BERT Sentence Representations. Kim, Yoo, Lee, ACL 2021, arXiv
2106.07345.

A pretrained encoder is its own teacher. There are two copies of it: T is tuned, except for its embedding
layer, and F stays fixed. View h_ik of sentence i is the output of layer k of F, pooled over tokens. Training
pulls T's [CLS] vector c_i of sentence i towards the views of this sentence, and pushes it away from the views
of other sentences. All vectors go through a projection head, which is dropped after training. θ_T and θ_F are
the weights of T and F, λ is the weight of a regulariser, τ is the temperature, φ(u, v) = exp(cos(u, v) / τ):

    L = mean over i, k of −log( φ(c_i, h_ik) / ( φ(c_i, h_ik) + Σ_{j≠i} Σ_n φ(c_i, h_jn) ) ) + λ ‖θ_T − θ_F‖²

This is --objective opt3. Other objectives use one view h_i per sentence, from a layer sampled at each step:
    opt2    the negatives of c_i are the views h_j of all other sentences j
    opt1    the negatives of c_i are h_j and c_j of all other sentences j
    base    opt1's loss, and the same loss with the anchors h_i and the positives c_i (together: NT-Xent)

    python selfguided.py --data stsb-all.tsv --dev stsb-dev.tsv --test stsb-test.tsv
    torchrun --nproc-per-node 4 selfguided.py --data wiki.txt --dev stsb-dev.tsv --batch-size 64
    python selfguided.py --evaluate --model out/selfguided --test stsb-test.tsv

Data: a .txt file with one sentence per line, or a .csv .tsv .json .jsonl .parquet file with one sentence per
cell. The script reads --columns, else sentence1 and sentence2, else all columns except numbers, ids and
labels. Scores of sentence pairs are ignored. The authors train on all sentences of STS-B, including its test
sentences. Do not use --model scratch: an untrained encoder has nothing to teach.
--dev and --test: sentence pairs with scores (sentence1, sentence2, score) or retrieval data (query, positive,
optional hard negatives; MRR@10). The best checkpoint on --dev is kept; without --dev, the last checkpoint.

Published Spearman correlation (times 100) of BERT-base with the first command: 77.23 on STS-B test, and 74.62
on average over seven STS test sets.

Departures from the released code:
  - In the released code, --objective base crashes; this script follows the paper.
  - In the released code, --objective opt2 omits one negative; this script uses all negatives.
  - The released code scores the model of the last step; this script scores the best checkpoint on --dev.
  - The released code may stop early; this script does not.
  - The released code has weight decay, which shrinks weights by 0.03 % in total; this script has none.
--form code follows the released code in two other points: views are pooled by mean, and F has dropout.
"""
import copy
import math
import re

import torch
import torch.nn.functional as F

from kernels import check_rows, checks, own_rows, similarity_lse
from kernels.training.data import IDENTIFIER, NO_TEXTS, header_note, normalise_name, read_table, show_cells
from kernels.training.errors import command, fail, log
from kernels.training.flags import ScriptParser, at_least, check_batch_size, text_flags
from kernels.training.loop import all_reduce_gradients, set_lr, steps_per_epoch, warmup_linear
from kernels.training.precision import gather_keys, loss_autocast, unit_rows
from kernels.training.run import Run
from kernels.training.text.encoders import build_encoder, describe_model, init_linear
from kernels.training.text.evaluation import Evaluator, evaluate_model
from kernels.training.text.tokens import restore_order, tokenise_table

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────

OBJECTIVES = "base", "opt1", "opt2", "opt3"


def make_parser():
    parser = ScriptParser(__doc__)
    add = parser.add_argument
    text_flags(
        parser, model="bert-base-uncased", out="out/selfguided", form="paper", seed=1,
        temperature=(0.01, "0.01 (paper)"), columns=(None, "as described above"),
        eval_every=(50, "50 (released script)"), max_length=(128, "128 (released script)"),
        pooling=(None, "as saved with --model, else cls (paper), or last for a decoder"),
        batch_size=(16, "16 (paper)"), epochs=(1, "1 (paper)"),
        lr=(5e-5, "5e-5 (paper); linear warm-up over a tenth of the steps, then linear decay to 0"))
    add("--objective", choices=OBJECTIVES, default="opt3",
        help="loss to train with (see above); default opt3 (paper)")
    add("--layers", type=at_least(0, int), nargs="+",
        help="layers of the frozen copy whose outputs are views; 0: the embedding layer; default all (paper)")
    add("--view-pooling", choices=("max", "mean", "sum"),
        help="how a layer's token states are pooled into a view; default max (paper), mean with --form code")
    add("--regulariser-weight", type=at_least(0), default=0.1,
        help="λ, weight of the squared distance ‖θ_T − θ_F‖²; default 0.1 (paper)")
    add("--projection-dim", type=at_least(1, int), default=4096, group="model",
        help="output dimension of the projection head; default 4096 (paper)")
    return parser


# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """Return [(place, (sentence,))], one entry per sentence; a place is, for example, "line 3"."""
    names = "sentence1", "sentence2"
    roles = {"sentence": names} if args.columns else None
    header, table = read_table(path, names=names, roles=roles, columns=args.columns)
    rows = list(table)
    width = len(rows[0][1])
    columns = [i for i, name in enumerate(header or []) if normalise_name(name) in names]
    if args.columns:
        columns = range(width)
    elif len(columns) < 2:                                  # leave out columns of numbers, ids and labels
        columns = [i for i, name in enumerate(header or [""] * width) if normalise_name(name) not in NO_TEXTS
                   and not all(re.fullmatch(IDENTIFIER, cells[i].strip()) for _, cells in rows)]
    for place, cells in rows:
        if not all(cells[i].strip() for i in columns):
            fail(f"{path} {place}: an empty cell; fill it or delete the row")
    sentences = [(place, (cells[i],)) for place, cells in rows for i in columns]
    check_batch_size(len(sentences), path, args.batch_size, "sentences")
    if args.view_pooling is None:
        args.view_pooling = "mean" if args.form == "code" else "max"
    distinct = len({cells for _, cells in sentences})
    log("selfguided", f"{args.objective}: {len(sentences):,} sentences, {distinct:,} distinct, "
                      f"in {len(columns)} columns of {path}")
    log("first", show_cells(["sentence"] * len(columns), [rows[0][1][i] for i in columns])
        + header_note(table))
    return sentences


def build_model(args, run):
    """Return (T, F): T is a SentenceEncoder with a projection head, F the fixed copy of T's transformer."""
    model = build_encoder(args, run)
    encoder, config = model.encoder, model.encoder.config
    model.layers = args.layers or range(config.num_hidden_layers + 1)
    if max(model.layers) > config.num_hidden_layers:
        fail(f"--layers {max(model.layers)}: {args.model} has layers 0 (the embedding layer) "
             f"to {config.num_hidden_layers}")
    size = args.projection_dim
    linears = [torch.nn.Linear(model.width, size), torch.nn.Linear(size, size)]
    for linear in linears:
        init_linear(linear, config)
    model.projection = torch.nn.Sequential(linears[0], torch.nn.GELU(), linears[1], torch.nn.GELU())
    model.to(run.device)
    embeddings = getattr(encoder, "embeddings", encoder.get_input_embeddings()).requires_grad_(False)
    not_copied = {id(table): table for table in embeddings.parameters()}   # T and F share the embeddings
    fixed = copy.deepcopy(encoder, not_copied).requires_grad_(False).train(args.form == "code")
    log("model", f"{describe_model(model, args)}; {len(model.layers)} layers, {args.view_pooling} of tokens")
    return model, fixed


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def selfguided_loss(c, h, temperature=0.01, objective="opt3", *, gathered=None, offset=0, impl="auto"):
    """Return the contrastive loss, without the regulariser: a mean over all pairs (anchor, positive).

    c            (B, D) projected [CLS] vectors, any norm, float type of h; cosines of a zero vector are 0
    h            (B, D) or (B, L, D) projected views, one or L per sentence; L > 1 is only allowed for opt3
    objective    "base"  anchors c_i (positive h_i) and h_i (positive c_i), negatives c_j and h_j, j ≠ i
                 "opt1"  anchors c_i, positives h_i, negatives c_j and h_j
                 "opt2"  anchors c_i, positives h_i, negatives h_j
                 "opt3"  anchors c_i, positives h_ik of the layers k, negatives h_jn of all layers n
    gathered     (c, h) of all ranks, with gradient; None: there is one process
    offset       index in `gathered` of this rank's first row
    returns      scalar: float64 for float64 inputs, else float32; 0 for a single sentence
    source       Kim et al. 2021, the objectives of SG and SG-OPT
    """
    checks.check_choice("objective", objective, *OBJECTIVES)
    pair = (c, h) if gathered is None else checks.check_pair("gathered", gathered, "(c, h) of all ranks")
    all_c, all_h = pair
    view = "L D" if getattr(h, "ndim", 2) == 3 else "D"
    check_rows(offset, c=(c, "N D"), h=(h, f"N {view}"), gathered_c=(all_c, "M D"),
               gathered_h=(all_h, f"M {view}"))
    checks.check_same_dtype(c=c, h=h, gathered_c=all_c, gathered_h=all_h)
    if h.ndim == 3 and h.shape[1] > 1 and objective != "opt3":
        raise ValueError(f"h: found {tuple(h.shape)}, expected ({len(c)}, D) or for opt3 ({len(c)}, L, D)")
    h = h.view(len(h), -1, h.shape[-1])                        # (B, L, D)
    c, h = unit_rows(c), unit_rows(h)
    if gathered is None:
        all_c, all_h = c, h
    else:
        all_c, all_h = [unit_rows(z) for z in gathered]
    sentences = torch.arange(len(all_c), device=c.device)    # keys of the anchor's sentence are not negatives
    anchors, anchor_ids = c, torch.arange(len(c), device=c.device) + offset
    keys, key_ids = all_h.flatten(0, -2), sentences.repeat_interleave(h.shape[1])
    if objective in ("base", "opt1"):
        keys, key_ids = torch.cat([keys, all_c]), torch.cat([key_ids, sentences])
    if objective == "base":                                    # h_i is an anchor too, with the positive c_i
        anchors, anchor_ids = torch.cat([c, h[:, 0]]), anchor_ids.repeat(2)
        h = torch.cat([h, c[:, None]])                         # now h[i] are the positives of anchors[i]
    # negatives[i] is the log-sum-exp of the logits of the negatives of anchors[i].
    negatives = similarity_lse(anchors, keys, temperature, exclude=(anchor_ids, key_ids), impl=impl)
    positives = (anchors[:, None].to(negatives.dtype) * h).sum(2) / temperature          # (anchors, L)
    # = log(exp positive + exp negatives) − positive
    return -F.logsigmoid(positives - negatives[:, None]).mean()


@torch.no_grad()
def add_regulariser_gradient(model, fixed, args):
    """Add the gradient of λ ‖θ_T − θ_F‖² to T's gradients. Return ‖θ_T − θ_F‖²."""
    pairs = zip(model.encoder.parameters(), fixed.parameters())
    tuned, start = zip(*((w, start) for w, start in pairs if w.grad is not None))
    differences = torch._foreach_sub(tuned, start)
    torch._foreach_add_([w.grad for w in tuned], differences, alpha=2 * args.regulariser_weight)
    return torch.stack(torch._foreach_norm(differences)).square().sum()


@torch.no_grad()
def pool_layers(model, fixed, batch, layers, pooling):
    """Return the views (rows, layers, H) float32: the token states of some layers of F, pooled by "max",
    "mean" or "sum". Layer 0 is the embedding layer. batch: from model.batch."""
    pieces = []
    for _, ids, mask in batch:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
            output = fixed(input_ids=ids, attention_mask=mask, output_hidden_states=True, **model.no_cache)
        views = []
        for state in (output.hidden_states[layer].float() for layer in layers):
            if pooling == "max":
                views.append(state.masked_fill(mask[:, :, None] == 0, -1e9).amax(1))
            else:
                total = (state * mask[:, :, None]).sum(1)
                views.append(total / mask.sum(1, keepdim=True) if pooling == "mean" else total)
        pieces.append(torch.stack(views, 1))
    return restore_order(torch.cat(pieces), batch)


def compute_loss(model, batch, rows, args):
    """Return this rank's part of the contrastive loss of a global batch of `rows` rows, and the values to
    log. batch: (tokens, views) of this rank's rows, from model.batch and pool_layers. The regulariser is
    not in this loss: add_regulariser_gradient adds its gradient after the backward pass."""
    tokens, views = batch
    if args.objective != "opt3":                               # sample one layer for each sentence
        layer = torch.randint(views.shape[1], (len(views), 1, 1), device=views.device)
        views = views.take_along_dim(layer, 1)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
        z = model.projection(torch.cat([model(tokens)[:, None], views], 1)).float()
    c, h = z[:, 0], z[:, 1:]                                   # (n, D), (n, layers, D)
    gathered = None
    if len(c) < rows:                                          # other ranks have the other rows
        gathered = gather_keys(c, rows, args), gather_keys(h, rows, args)
    with loss_autocast(c, args):
        loss = selfguided_loss(c, h, args.temperature, args.objective, gathered=gathered,
                               offset=own_rows(rows).start, impl=args.impl) * (len(c) / rows)
    return loss, {"loss": loss.detach()}


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    if args.evaluate:
        return evaluate_model(Evaluator(args), __file__)
    sentences = load_data(args.data, args)
    evaluator = Evaluator(args)
    run = Run(args, __file__)
    model, fixed = build_model(args, run)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.9), eps=1e-6,
                                  weight_decay=0.0, fused=True)
    total = args.steps or args.epochs * steps_per_epoch(len(sentences), args.batch_size)
    run.begin(model, optimizer, total)
    tokens = tokenise_table(sentences, model, run)
    evaluator.evaluate_before(model, run)
    model.train()
    for step, picked in run.steps(total, len(tokens)):
        set_lr(optimizer, warmup_linear(step - 1, total, math.ceil(total / 10), args.lr))
        own = picked[own_rows(len(picked))]
        batch = model.batch(*tokens.views(own, 1))
        views = pool_layers(model, fixed, batch, model.layers, args.view_pooling)
        loss, values = compute_loss(model, (batch, views), len(picked), args)
        optimizer.zero_grad()
        loss.backward()
        all_reduce_gradients(model)
        # Each rank adds the full gradient. It logs its share of the distance, as logs are summed over ranks.
        values["distance"] = add_regulariser_gradient(model, fixed, args) * (len(own) / len(picked))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.log_metrics(values, lr=optimizer.param_groups[0]["lr"])
        if run.eval_due:
            evaluator.evaluate_and_save(model, run)
    evaluator.finish(model, run)


if __name__ == "__main__":
    main()
