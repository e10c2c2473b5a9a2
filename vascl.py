"""VaSCL: Virtual Augmentation Supported Contrastive Learning of Sentence Representations. Zhang, Xiao, Zhu,
Ma, Arnold, Findings of ACL 2022, arXiv 2110.08552.

The loss has two terms. The first is SimCLR's NT-Xent for two dropout views of each sentence. The second uses
a virtual augmentation of sentence i: its embedding e_i plus a perturbation δ_i of length Δ. δ_i makes
e_i + δ_i hard to distinguish from the nearest neighbours of i. The neighbours N(i) are the K other sentences
j of the batch with the largest e_i·e_j. The second term pulls e_i and e_i + δ_i together, and pushes both
away from the neighbours. τ is the temperature, and g is a projection head, dropped after training. With
z_i = g(e_i) / |g(e_i)|, z*_i = g(e_i + δ_i) / |g(e_i + δ_i)| and P_i = exp(z_i·z*_i / τ):

    L = NT-Xent of the vectors z of both views
        + mean over i and a ∈ {z_i, z*_i} of
          −log( P_i / ( P_i + Σ_{k∈N(i)} [ exp(a·z_k / τ) + exp(a·z*_k / τ) ] ) )
    δ_i = Δ ∇_i / |∇_i|,   ∇_i = gradient of −log( P_i / ( P_i + Σ_{k∈N(i)} exp(z*_i·z_k / τ) ) )
                           with respect to δ_i, at a random δ_i of length Δ

    python vascl.py --model scratch --data tests/data/sentences.txt --dev tests/data/sts.tsv
    python vascl.py --data wiki1m_for_simcse.txt --dev stsb-dev.tsv --out out/vascl
    torchrun --nproc-per-node 4 vascl.py --data wiki1m_for_simcse.txt --dev stsb-dev.tsv --out out/four

Data: a .txt file has one sentence per line; .csv .tsv .json .jsonl .parquet files have columns, chosen by
--columns, else by a header with common names (sentence1 sentence2, query positive ...), else by their order:
    1 column   unsupervised             I ate an apple.
    2 columns  sentence, positive       I ate an apple.,Someone ate fruit.
--dev and --test: sentence pairs with scores (sentence1, sentence2, score) or retrieval data (query, positive,
optional hard negatives; MRR@10). The best checkpoint on --dev is kept; without --dev, the last checkpoint.

Published results, mean Spearman of seven STS test sets, for the second command:
    RoBERTa-base     76.96 (SimCSE 76.57)
    RoBERTa-large    79.04 (SimCSE 78.90), with --model roberta-large

The default is --form code, which follows the released code: the second term trains only the head, through
z*, and the encoder learns from NT-Xent alone. With --form paper the second term also trains the encoder, and
the random δ is Gaussian instead of uniform. No result is published for --form paper. In our runs with --form
paper (docs/results.md), a pretrained encoder collapsed with the released code's Δ = 15. With a smaller Δ
(--relative-radius), none of three encoders collapsed, but the second term improved only one of them.

Departures from the released code:
  - On several GPUs, a bug makes the released code use wrong rows as neighbours; this script has no such bug.
  - The released code reads an empty cell as a full stop; this script reports an error.
"""
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F

from kernels import check_rows, checks, gather_rows, nt_xent, own_rows, similarity_topk
from kernels.training.data import SENTENCE_COLUMNS, describe_table, empty_cell, log_first_row, read_table
from kernels.training.errors import command, fail, log
from kernels.training.flags import ScriptParser, at_least, check_batch_size, fill_defaults, text_flags
from kernels.training.loop import all_reduce_gradients, steps_per_epoch
from kernels.training.precision import gather_keys, loss_autocast
from kernels.training.run import Run
from kernels.training.text.encoders import build_encoder, describe_model
from kernels.training.text.evaluation import Evaluator, evaluate_model
from kernels.training.text.tokens import tokenise_table

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = ScriptParser(__doc__)
    add = parser.add_argument
    text_flags(
        parser, model="roberta-base", out="out/vascl", form="code", seed=0,
        columns=(None, "chosen by the header, else all"), eval_every=(500, "500 (released script)"),
        pooling=(None, "as saved with --model, else avg (paper), last for a decoder"),
        batch_size=(None, "1024 (paper), 32 with --model scratch"),
        epochs=(None, "5 (paper), 4 with --model scratch"),
        lr=(None, "5e-6 (paper), 2e-3 with --model scratch; constant"))
    add("--neighbours", type=at_least(1, int), default=16,
        help="K, number of nearest neighbours of a sentence; default 16 (paper)")
    add("--radius", type=at_least(0),
        help="Δ, length of the perturbation δ; 0: no second loss term; default 15 with --form code, 0.2 with "
             "--model scratch")
    add("--relative-radius", type=at_least(0),
        help="Δ as a multiple of the mean distance of embeddings from their batch mean, instead of --radius; "
             "default 0.25 with --form paper, not set with --model scratch")
    add("--ascent-steps", type=at_least(0, int), default=1,
        help="number of gradient steps; each sets δ to Δ · gradient / |gradient|; default 1 (released code)")
    add("--head-lr", type=at_least(0), group="training",
        help="learning rate of the projection head; default 5e-4 (paper), 2e-3 with --model scratch")
    return parser


# Flags that are not on the command line get these values.
PAPER_DEFAULTS = dict(batch_size=1024, lr=5e-6, head_lr=5e-4, epochs=5)      # paper's values for RoBERTa-base
SCRATCH_DEFAULTS = dict(batch_size=32, lr=2e-3, head_lr=2e-3, epochs=4)        # used with --model scratch
RADIUS_DEFAULTS = dict(code=dict(radius=15.0), paper=dict(relative_radius=0.25), scratch=dict(radius=0.2))


# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """Return the distinct rows [(place, cells)] of --data, because equal rows would be each other's
    neighbours. Set the defaults of flags that were not given."""
    header, table = read_table(path, empty_cell, roles=SENTENCE_COLUMNS, columns=args.columns)
    place, cells = next(iter(table))
    columns = len(cells)
    if columns > 2:
        fail(f"{path} {place}: {columns} columns, expected 1 (sentence) or 2 (sentence, positive); choose "
             "them, as with --columns 1 2")
    scratch = args.model == "scratch"
    fill_defaults(args, SCRATCH_DEFAULTS if scratch else PAPER_DEFAULTS)
    if args.radius is None and args.relative_radius is None:
        fill_defaults(args, RADIUS_DEFAULTS["scratch" if scratch else args.form])
    first_with = {}                                            # {cells: the first row with these cells}
    for place, cells in table:
        first_with.setdefault(tuple(cells), (place, cells))
    rows = [*first_with.values()]
    check_batch_size(len(rows), path, args.batch_size, "distinct rows")
    if args.radius is not None and args.relative_radius is not None:
        fail(f"--radius {args.radius:g} --relative-radius {args.relative_radius:g}: expected only one")
    if (args.radius or args.relative_radius) and args.neighbours >= args.batch_size:
        fail(f"--neighbours {args.neighbours}: expected fewer than --batch-size, which is {args.batch_size}")
    args.mode = "unsupervised" if columns == 1 else "pairs"
    log("vascl", f"{args.mode}: {describe_table(table, header)}, {len(rows):,} of them distinct")
    log_first_row(table)
    return rows


def build_model(args, run):
    """Return the encoder with its pooling; its attribute `projection` is the projection head g."""
    model = build_encoder(args, run, "avg", columns=2 if args.mode == "pairs" else 1)
    linears = [torch.nn.Linear(model.width, size, bias=False) for size in (model.width, 128)]
    model.projection = torch.nn.Sequential(linears[0], torch.nn.ReLU(), linears[1])
    log("model", describe_model(model, args))
    return model.to(run.device)


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def neighbourhood_loss(e, perturbed, head, neighbours, temperature, form="paper", *, gather=None):
    """Return the second term of L, the mean over the 2N anchors z_i and z*_i.

    e, perturbed   (N, D) embeddings e and e + δ, float32 or float64, not normalised
    head           projection head: callable (N, D) → (N, F), whose outputs this function normalises
    neighbours     (N, K) int64 row numbers of the neighbours, as nearest_neighbours returns them
    form           "paper": e, perturbed and the head get gradients | "code": only the head, through z*
    gather         on several ranks: function from this rank's rows to the rows of all ranks, with gradient,
                   such as gather_rows. The row numbers in neighbours then refer to the rows of all ranks
    returns        scalar, float32 (float64 for float64 input); 0 if K = 0. Memory: O(N·K·F)
    source         Zhang et al. 2022, the neighbourhood-constrained loss
    """
    check_rows(e=(e, "N D"), perturbed=(perturbed, "N D"), neighbours=(neighbours, "N k", int))
    check_common_arguments(e, head, neighbours, temperature, form, gather)
    z = project(head, e)
    if form == "code":
        z, perturbed = z.detach(), perturbed.detach()
    anchors = torch.stack([z, project(head, perturbed)], 1)    # (N, 2, F)
    positive = anchors.prod(1).sum(1, keepdim=True) / temperature              # z_i·z*_i / τ
    others = anchors if gather is None else gather(anchors)
    negatives = anchors @ others[neighbours.long()].flatten(1, 2).mT / temperature              # (N, 2, 2K)
    return -F.logsigmoid(positive - negatives.logsumexp(2)).mean()


@torch.enable_grad()
def virtual_augmentation(e, head, neighbours, noise, radius, temperature, steps=1, form="paper", *,
                         gather=None):
    """Return perturbations δ (N, D), without gradient. e + δ is hard to distinguish from the neighbours of e.

    e            (N, D) embeddings, float32 or float64, not normalised; e gets no gradient
    head         as in neighbourhood_loss; the head gets no gradient, and its buffers do not change
    neighbours   as in neighbourhood_loss
    noise        (N, D) random vectors of any norm: first directions of δ, Gaussian (paper) or uniform (code)
    radius       Δ, the length of each row of δ; a row whose gradient is tiny (1e-8 or less) is shorter
    steps        number of gradient steps; each changes the direction of δ; 0: δ keeps the noise's direction
    form         "paper" | "code": both give the same δ for the same noise
    gather       as in neighbourhood_loss
    source       Zhang et al. 2022, the virtual augmentation
    """
    check_rows(e=(e, "N D"), neighbours=(neighbours, "N k", int), noise=(noise, "N D"))
    checks.check_same_dtype(e=e, noise=noise)
    check_common_arguments(e, head, neighbours, temperature, form, gather)
    checks.check_number("radius", radius, 0)
    checks.check_integer("steps", steps, 0)
    if isinstance(head, torch.nn.Module):           # the forward pass then changes only copies of the buffers
        buffers = {name: buffer.clone() for name, buffer in head.named_buffers()}
        head = functools.partial(torch.func.functional_call, head, buffers)

    def unit(x):
        return x / (x.norm(dim=1, keepdim=True) + 1e-8)

    z = project(head, e).detach()
    others = z if gather is None else gather(z)
    e, direction = e.detach(), unit(noise.detach())
    for _ in range(steps):
        moved = project(head, e + radius * direction.requires_grad_())
        negatives = (others[neighbours.long()] @ moved[:, :, None])[:, :, 0] / temperature           # (N, K)
        # Divide by the row count of all ranks: 1e-8 in unit() then has the same effect for any rank count.
        loss = -F.logsigmoid((z * moved).sum(1) / temperature - negatives.logsumexp(1)).sum() / len(others)
        direction = unit(torch.autograd.grad(loss, direction)[0])
    return radius * direction.detach()


def nearest_neighbours(e, k, *, gathered=None, offset=0, impl="auto"):
    """Return N(i) of each row i, (N, K) int64, nearest first: the K = min(k, M − 1) rows j ≠ i with the
    largest e_i·e_j.

    e           (N, D) embeddings of this rank, any float type, not normalised
    gathered    (M, D) embeddings of all ranks; N(i) are row numbers of gathered. None: e has all rows
    offset      index of this rank's first row in gathered
    """
    everything = e if gathered is None else gathered
    check_rows(offset, e=(e, "N D"), gathered=(everything, "M D"))
    checks.check_same_dtype(e=e, gathered=everything)
    checks.check_integer("k", k, 1)
    if len(everything) < 2:
        raise ValueError("e: 1 row, expected at least 2")
    return similarity_topk(e, gathered, min(k, len(everything) - 1), exclude="diagonal", offset=offset,
                           impl=impl)[1]


def compute_loss(model, batch, rows, args):
    """Return this rank's part of the loss of a global batch of `rows` rows, and the values to log.
    batch: both views of this rank's rows, as model.batch returns them."""
    e1, e2 = model(batch).chunk(2)
    own, head = own_rows(rows), model.projection
    unit1, unit2 = project(head, e1), project(head, e2)
    gathered = None                                            # gathered stays None if this rank has all rows
    if len(unit1) < rows:
        gathered = gather_keys(torch.stack([unit1, unit2], 1), rows, args).unbind(1)
    with loss_autocast(e1, args):
        terms = {"instance": nt_xent(unit1, unit2, args.temperature, gathered=gathered, offset=own.start,
                                     impl=args.impl)}
    all_e1 = gather_rows(e1.detach(), rows)
    radius = args.radius
    if args.relative_radius is not None:
        radius = args.relative_radius * mean_distance_to_centroid(all_e1).item()
    if radius and rows > 1:                                    # a batch of one sentence has no neighbours
        noise = torch.randn_like(all_e1) if args.form == "paper" else torch.rand_like(all_e1) - 0.5
        if dist.is_initialized():
            dist.broadcast(noise, 0)                           # all ranks use the noise of rank 0
        neighbours = nearest_neighbours(e1, args.neighbours, gathered=all_e1, offset=own.start,
                                        impl=args.impl)
        gather = functools.partial(gather_rows, rows=rows)
        delta = virtual_augmentation(e1, head, neighbours, noise[own], radius, args.temperature,
                                     args.ascent_steps, args.form, gather=gather)
        terms["neighbourhood"] = neighbourhood_loss(e1, e1 + delta, head, neighbours, args.temperature,
                                                    args.form, gather=gather)
    terms = {name: term * (len(e1) / rows) for name, term in terms.items()}
    loss = sum(terms.values())
    return loss, {"loss": loss.detach(), **{name: term.detach() for name, term in terms.items()}}


def mean_distance_to_centroid(e):
    """Return the mean distance of the rows of e (N, D) from their mean."""
    return (e - e.mean(0)).norm(dim=1).mean()


def check_common_arguments(e, head, neighbours, temperature, form, gather):
    """Check arguments of neighbourhood_loss and virtual_augmentation; raise ValueError for a wrong one."""
    if gather is None:
        checks.check_index("neighbours", neighbours, len(e))
    checks.check_temperature(temperature, e.device)
    checks.check_choice("form", form, "paper", "code")


def project(head, e):
    """Return z, the outputs of the projection head for embeddings e (N, D), normalised to length 1."""
    return F.normalize(head(e), dim=1, eps=1e-8)


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    if args.evaluate:
        return evaluate_model(Evaluator(args), __file__, "avg")
    table = load_data(args.data, args)
    evaluator = Evaluator(args)
    run = Run(args, __file__)
    model = build_model(args, run)
    rest = [weight for name, weight in model.named_parameters() if not name.startswith("projection.")]
    groups = [dict(params=rest), dict(params=model.projection.parameters(), lr=args.head_lr)]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, weight_decay=0.0, fused=True)
    total = args.steps or args.epochs * steps_per_epoch(len(table), args.batch_size)
    run.begin(model, optimizer, total)
    tokens = tokenise_table(table, model, run)
    evaluator.evaluate_before(model, run)
    model.train()
    for _, picked in run.steps(total, len(tokens)):              # the learning rate is constant (paper)
        batch = model.batch(*tokens.views(picked[own_rows(len(picked))], 2))
        loss, values = compute_loss(model, batch, len(picked), args)
        optimizer.zero_grad()
        loss.backward()
        all_reduce_gradients(model)
        optimizer.step()
        run.log_metrics(values, lr=args.lr)
        if run.eval_due:
            evaluator.evaluate_and_save(model, run)
    evaluator.finish(model, run)


if __name__ == "__main__":
    main()
