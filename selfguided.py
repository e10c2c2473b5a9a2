"""Self-Guided Contrastive Learning for BERT Sentence Representations. Kim, Yoo, Lee, ACL 2021, arXiv
2106.07345.

A pretrained encoder is its own teacher. Of two copies, T is tuned, except its word embeddings, and F stays
fixed. T's [CLS] vector c_i of a sentence is pulled to the sentence's views h_ik, which are F's hidden states
of every layer k pooled over tokens, and pushed from the views of other sentences. Both go through one
projection head, which is dropped after training. φ(u, v) = exp(cos(u, v) / τ):

    L = mean over i, k of −log( φ(c_i, h_ik) / ( φ(c_i, h_ik) + Σ_{j≠i} Σ_n φ(c_i, h_jn) ) ) + λ ‖θ_T − θ_F‖²

This is opt3. The other objectives draw one layer for each sentence and step: opt2 has the view of this layer
only, opt1 has also the φ(c_i, c_j) among its negatives, and base is NT-Xent, in which every h_i is an anchor
as well.

Data: sentences, one per line (.txt) or one per cell (.csv .tsv .json .jsonl .parquet), in the columns
sentence1 and sentence2, by --columns, or else in all columns but those of numbers. Scored pairs will do (the
authors took all of STS-B); their scores are not read.
Scored pairs for --dev, which chooses the best checkpoint (without it the last one is kept), and for --test:
columns sentence1, sentence2, score (0 to 5), by header, or the score first or last.

    python selfguided.py --data stsb-all.tsv --dev stsb-dev.tsv --test stsb-test.tsv
    torchrun --nproc-per-node 4 selfguided.py --data wiki.txt --dev stsb-dev.tsv --batch-size 64

Expected of the first command: the paper's BERT-base has 77.23 Spearman on STS-B test, 74.62 as the mean of
seven test sets. --model scratch has nothing to teach.

Departures from the released code: its base crashes, its opt2 loses a negative, its last step is scored
instead of the best. Left out are its early stop and its weight decay, which shrinks weights by 0.03 % in all.
What else differs is --form code: mean views instead of max, and F has dropout.
"""
from kernels.training.cli import Flags, afford, answer_early, at_least, command, fail, say

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────

OBJECTIVES = "base", "opt1", "opt2", "opt3"


def make_parser():
    parser = Flags(__doc__)
    add, common = parser.add_argument, parser.common
    add("--objective", choices=OBJECTIVES, default="opt3", help="see above; default opt3 (paper)")
    common("--form", "paper")
    add("--layers", type=at_least(0, int), nargs="+",
        help="of F that give views, 0 is the word embeddings; default all (paper)")
    add("--view-pooling", choices=("max", "mean", "sum"),
        help="of a layer's tokens; default max (paper), with --form code mean")
    common("--pooling", said="its folder's, else cls (paper), a decoder's last")
    common("--prompt", said="its folder's, else none")
    add("--width", type=at_least(1, int), default=4096, help="of the projection; default 4096 (paper)")
    add("--regulariser-weight", type=at_least(0), default=0.1, help="λ; default 0.1 (paper)")
    add("--study", nargs="?", const="", metavar="FILE",
        help="table of layers × poolings on --dev; its numbers go to FILE, a .json; default of a training "
             "study.json in --out, of --evaluate nowhere")
    parser.plain("--evaluate", "--data", "--dev", "--test", "--transfer", "--cluster")
    common("--columns", said="see above")
    common("--model", "bert-base-uncased")
    common("--out", "out/selfguided")
    common("--batch-size", 16, "16 (paper)")
    common("--chunk-size", said="the batch")
    common("--epochs", 1, "1 (paper)")
    common("--steps", said="by --epochs")
    common("--lr", 5e-5, "5e-5 (paper), after a warm-up falling linearly to 0")
    common("--temperature", 0.01, "0.01 (paper)")
    common("--max-length", 128, "128 (released script)")
    common("--seed", 1)
    common("--eval-every", 50, "50 (released script)")
    common("--impl", "auto")
    parser.plain("--resume", "--keep-state", "--log", "--precision")
    return parser


if __name__ == "__main__":
    answer_early(make_parser)  # --help, and wrong flags, before the seconds that torch takes

import copy
import math
import re

import torch
import torch.nn.functional as F

from kernels import check_rows, checks, gather_rows, own_rows, similarity_lse
from kernels.training.columns import unlike_texts
from kernels.training.extras.layer_study import check_study, study_copies, study_model
from kernels.training.loop import epoch_steps, half_products, set_lr, sum_gradients, warmup_linear
from kernels.training.run import Run
from kernels.training.tables import plain, read_table
from kernels.training.text.encoders import begin_linear, build_encoder, describe_model
from kernels.training.text.evaluation import HeldOut, score
from kernels.training.text.layers import pool_layers
from kernels.training.text.sts import load_sts, spearman  # noqa: F401 - also called from here
from kernels.training.text.tokens import tokenise_table

# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """[(place, (sentence,))], one for each cell of the columns that hold sentences."""
    check_study(args)
    names = "sentence1", "sentence2"
    roles = {"sentence": names} if args.columns else None
    header, table = read_table(path, names=names, roles=roles, columns=args.columns)
    sample, table = table.sample, list(table)
    columns = [i for i, name in enumerate(header or []) if plain(name) in names]
    if args.columns:
        columns = range(len(table[0][1]))
    elif len(columns) < 2:                                     # all but numbers
        columns = [i for i in range(len(table[0][1]))
                   if not all(re.fullmatch(r"[\d.]+", cells[i].strip()) for _, cells in table)]
        if fault := unlike_texts(sample, columns):
            fail(f"{path}: {fault}")
    for place, cells in table:
        if not all(cells[i].strip() for i in columns):
            fail(f"{path} {place}: an empty cell; fill it or delete the row")
    sentences = [(place, (cells[i],)) for place, cells in table for i in columns]
    if not 2 <= args.batch_size <= len(sentences):
        fail(f"{path}: {len(sentences)} sentences, wanted at least --batch-size, and that at least 2; "
             f"it is {args.batch_size}")
    args.view_pooling = args.view_pooling or {"paper": "max", "code": "mean"}[args.form]
    distinct = len({cells for _, cells in sentences})
    say("selfguided", f"{args.objective}: {len(sentences):,} sentences, {distinct:,} distinct, "
                      f"in {len(columns)} columns of {path}")
    return sentences


def build_model(args, run):
    """The tuned copy T without its pretrained pooler, its projection head, and the fixed copy F."""
    model = build_encoder(args, run)
    encoder, config = model.encoder, model.encoder.config
    model.layers = args.layers or range(config.num_hidden_layers + 1)
    if max(model.layers) > config.num_hidden_layers:
        fail(f"--layers {max(model.layers)}: {args.model} has layers 0, the word embeddings, "
             f"to {config.num_hidden_layers}")
    afford(f"--width {args.width}", 16 * (model.width + args.width) * args.width)      # Adam's, too
    linears = [torch.nn.Linear(size, args.width) for size in (model.width, args.width)]
    for linear in linears:
        begin_linear(linear, config)
    model.projection = torch.nn.Sequential(linears[0], torch.nn.GELU(), linears[1], torch.nn.GELU())
    embeddings = getattr(model.to(run.device).encoder, "embeddings", encoder.get_input_embeddings())
    frozen = embeddings.requires_grad_(False)
    shared = {id(table): table for table in frozen.parameters()}                 # both copies have the same
    fixed = copy.deepcopy(encoder, shared).requires_grad_(False).train(args.form == "code")
    model.fixed = [fixed]  # a list hides it from train(), optimizer and state.pt
    say("model", f"{describe_model(model, args)}; {args.view_pooling} views of {len(model.layers)} layers")
    return model


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def selfguided_loss(c, h, temperature=0.01, objective="opt3", *, gathered=None, offset=0, impl="auto"):
    """Mean loss of B sentences: [CLS] vectors c against views h, both after the projection head.

    c            (B, D) raw vectors, any float type; normalised here, a zero vector has cosine 0 with all
    h            (B, D) or (B, L, D) views, likewise; L > 1 is for opt3
    objective    "base"  anchors c_i and h_i, negatives c_j and h_j of other sentences: NT-Xent, mean over 2B
                 "opt1"  anchors c_i, negatives c_j and h_j
                 "opt2"  anchors c_i, negatives h_j
                 "opt3"  anchors c_i, negatives h_jn of all layers n; mean over the B · L positives h_ik
    gathered     (c, h) of all ranks, with gradient; None: one process
    offset       this rank's first row in gathered
    returns      scalar float32, float64 for float64, without the regulariser; one sentence: 0
    source       Kim et al. 2021, the objectives of SG and SG-OPT
    """
    checks.check_choice("objective", objective, *OBJECTIVES)
    pair = (c, h) if gathered is None else checks.check_pair("gathered", gathered, "(c, h) of all ranks")
    all_c, all_h = pair
    view = "L D" if getattr(h, "ndim", 2) == 3 else "D"
    check_rows(offset, c=(c, "N D"), h=(h, f"N {view}"), gathered_c=(all_c, "M D"),
               gathered_h=(all_h, f"M {view}"))
    checks.check_alike(c=c, h=h, gathered_c=all_c, gathered_h=all_h)
    if h.ndim == 3 and h.shape[1] > 1 and objective != "opt3":
        raise ValueError(f"h: found {tuple(h.shape)}, wanted ({len(c)}, D) or for opt3 ({len(c)}, L, D)")
    h = h.view(len(h), -1, h.shape[-1])                        # (B, L, D)
    c, h = F.normalize(c, dim=-1, eps=1e-8), F.normalize(h, dim=-1, eps=1e-8)
    if gathered is None:
        all_c, all_h = c, h
    else:
        all_c, all_h = (F.normalize(z, dim=-1, eps=1e-8) for z in gathered)
    others = torch.arange(len(all_c), device=c.device)         # sentence ids
    own = torch.arange(len(c), device=c.device) + offset
    anchors, keys, ids = c, all_h.flatten(0, -2), others.repeat_interleave(h.shape[1])
    if objective in ("base", "opt1"):
        keys, ids = torch.cat([keys, all_c]), torch.cat([ids, others])
    if objective == "base":
        anchors, h, own = torch.cat([c, h[:, 0]]), torch.cat([h, c[:, None]]), own.repeat(2)
    # log Σ exp over the keys of other sentences
    negatives = similarity_lse(anchors, keys, temperature, exclude=(own, ids), impl=impl)
    positives = (anchors[:, None].to(negatives.dtype) * h).sum(2) / temperature          # (anchors, L)
    # = log(exp positive + exp negatives) − positive
    return -F.logsigmoid(positives - negatives[:, None]).mean()


@torch.no_grad()
def regularise(model, args):
    """Return ‖θ_T − θ_F‖², a sum over all weights, and add the gradient of λ times it to T's gradients."""
    pairs = zip(model.encoder.parameters(), model.fixed[0].parameters())
    tuned, fixed = zip(*((mine, its) for mine, its in pairs if mine.grad is not None))
    differences = torch._foreach_sub(tuned, fixed)
    torch._foreach_add_([weight.grad for weight in tuned], differences, alpha=2 * args.regulariser_weight)
    return torch.stack(torch._foreach_norm(differences)).square().sum()


def compute_loss(model, batch, rows, args):
    """This rank's part of the contrastive loss, for a batch of `rows` rows over all ranks. regularise adds
    the gradient of the other term."""
    views = layer_views(model, batch, args)
    if args.objective != "opt3":                               # one layer for each sentence
        drawn = torch.randint(views.shape[1], (len(views), 1, 1), device=views.device)
        views = views.take_along_dim(drawn, 1)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
        z = model.projection(torch.cat([model(batch)[:, None], views], 1)).float()
    c, h = z[:, 0], z[:, 1:]                                   # (n, width), (n, layers, width)
    gathered = (gather_rows(c, rows), gather_rows(h, rows)) if len(c) < rows else None
    with half_products(c, args):
        loss = selfguided_loss(c, h, args.temperature, args.objective, gathered=gathered,
                               offset=own_rows(rows).start, impl=args.impl) * (len(c) / rows)
    return loss, {"loss": loss.detach()}


def layer_views(model, batch, args):
    """(rows, layers, H) float32: the views, hidden states of the fixed copy pooled over tokens."""
    return pool_layers(model, model.fixed[0], batch, model.layers, [args.view_pooling])[:, :, 0]


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    if args.evaluate:
        return score(args, __file__) if args.study is None else study_model(args, __file__)
    sentences = load_data(args.data, args)
    held_out = HeldOut(args)
    run = Run(args, __file__)
    model = build_model(args, run)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.9), eps=1e-6,
                                  weight_decay=0.0, fused=True)
    total = args.steps or args.epochs * epoch_steps(len(sentences), args.batch_size, run.world)
    run.begin(model, optimizer, total)
    tokens = tokenise_table(sentences, model, run)
    held_out.before(model, run)
    model.train()
    for step, rows in run.steps(total, len(tokens)):
        set_lr(optimizer, warmup_linear(step - 1, total, math.ceil(total / 10), args.lr))
        own = rows[own_rows(len(rows))]
        loss, values = compute_loss(model, model.batch(*tokens.views(own, 1)), len(rows), args)
        optimizer.zero_grad()
        loss.backward()
        sum_gradients(model)
        values["distance"] = regularise(model, args) * (len(own) / len(rows))  # a part, as all numbers
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.note(values, lr=optimizer.param_groups[0]["lr"])
        if run.due:
            held_out.judge(model, run)
    held_out.after(model, run)
    study_copies(model, held_out.dev, run)                     # with --study


if __name__ == "__main__":
    main()
