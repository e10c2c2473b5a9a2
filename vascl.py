"""VaSCL: Virtual Augmentation Supported Contrastive Learning of Sentence Representations. Zhang, Xiao, Zhu,
Ma, Arnold, Findings of ACL 2022, arXiv 2110.08552.

A sentence gets a virtual augmentation: a step δ from its embedding e to where its nearest neighbours in the
batch are hardest to tell from it. It is pulled there and pushed from the neighbours, beside SimCLR's loss of
two views (dropout). With a head g for training only, z = g(e) / |g(e)|, z* that of e + δ, N(i) the K
sentences j of largest e_i·e_j, and P_i = exp(z_i·z*_i / τ):

    L = NT-Xent of both views' z
        + mean over i, a ∈ {z_i, z*_i} of −log( P_i / (P_i + Σ_{k∈N(i)} exp(a·z_k / τ) + exp(a·z*_k / τ)) )
    δ_i = Δ ∇ / |∇|,   ∇ the gradient of −log( P_i / (P_i + Σ_{k∈N(i)} exp(z*_i·z_k / τ)) ) by a random δ_i
                       of length Δ

Data, one row per line: .txt has sentences; .csv .tsv .json .jsonl .parquet have columns, chosen by --columns,
by a header of usual names (sentence1 sentence2, query positive ...) or by their order:
    1 column   unsupervised             I ate an apple.
    2 columns  sentence, positive       I ate an apple.,Someone ate fruit.
Scored pairs for --dev, which chooses the best checkpoint (without it the last one is kept), and for --test:
columns sentence1, sentence2, score (0 to 5), by header, or the score first or last.

    python vascl.py --model scratch --data tests/data/sentences.txt --dev tests/data/sts.tsv
    python vascl.py --data wiki1m_for_simcse.txt --dev stsb-dev.tsv --out out/vascl
    torchrun --nproc-per-node 4 vascl.py --data wiki1m_for_simcse.txt --dev stsb-dev.tsv --out out/four

Expected: the paper's RoBERTa-base has 76.96, large 79.04 Spearman as the mean of seven STS tests (SimCSE:
76.57 and 78.90), by the released code, which the second command follows.

Why --form code is the default: there the second term trains only the head, through z*, and the encoder learns
from the first term. In --form paper no gradient is stopped. With the released Δ, which nobody tried in that
form, the pretrained encoder that we tried collapsed. With a Δ that is small beside the embeddings' spread
(--relative-radius) it did not, but only one of three gained by the term (docs/results.md). The random δ of
the paper's form is Gaussian, that of the code is uniform before it is scaled. Nobody has published a run of
the paper's form.

Departures from the released code: on several GPUs its neighbours are wrong rows; an empty cell, there a full
stop, is an error.
"""
from kernels.training.cli import Flags, answer_early, at_least, command, fail, fill, say

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = Flags(__doc__)
    add, common = parser.add_argument, parser.common
    common("--pooling", said="its folder's, else avg (paper), a decoder's last")
    common("--prompt", said="its folder's, else none")
    common("--form", "code")
    add("--neighbours", type=at_least(1, int), default=16, help="K; default 16 (paper)")
    add("--radius", type=at_least(0),
        help="Δ; default 15 (released code), scratch 0.2; 0 leaves the neighbourhood term out")
    add("--relative-radius", type=at_least(0),
        help="Δ in mean distances of a batch's e to their mean instead; default of --form paper 0.25")
    add("--ascent-steps", type=at_least(0, int), default=1,
        help="gradients, each taken at the last one's δ; default 1 (released code)")
    add("--head-lr", type=at_least(0), help="learning rate of the head; default 5e-4 (paper), scratch 2e-3")
    parser.plain("--evaluate", "--data", "--dev", "--test", "--transfer", "--cluster")
    common("--columns", said="by the header, else all")
    common("--model", "roberta-base")
    common("--out", "out/vascl")
    common("--batch-size", said="1024 (paper), scratch 32")
    common("--chunk-size", said="the batch")
    common("--epochs", said="5 (paper), scratch 4")
    common("--steps", said="by --epochs")
    common("--lr", said="5e-6 (paper), scratch 2e-3, constant")
    common("--temperature", 0.05, "0.05 (paper)")
    common("--max-length", 32, "32 (paper)")
    common("--seed", 0)
    common("--eval-every", 500, "500 (released script)")
    common("--impl", "auto")
    parser.plain("--resume", "--keep-state", "--log", "--precision")
    return parser


# Defaults for flags that were not given: the paper's (RoBERTa-base), and for a small random BERT.
PAPER = dict(batch_size=1024, lr=5e-6, head_lr=5e-4, epochs=5)
SCRATCH = dict(batch_size=32, lr=2e-3, head_lr=2e-3, epochs=4)
RADIUS = dict(code=dict(radius=15.0), paper=dict(relative_radius=0.25), scratch=dict(radius=0.2))


if __name__ == "__main__":
    answer_early(make_parser)  # --help, and wrong flags, before the seconds that torch takes

import functools
import hashlib
import itertools

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from kernels import check_rows, checks, gather_rows, nt_xent, own_rows, similarity_topk
from kernels.training.loop import epoch_steps, half_products, sum_gradients
from kernels.training.run import Run
from kernels.training.tables import SENTENCES, describe_table, empty_cell, read_table
from kernels.training.text.encoders import build_encoder, describe_model
from kernels.training.text.evaluation import HeldOut, score
from kernels.training.text.sts import load_sts, spearman  # noqa: F401 - also called from here
from kernels.training.text.tokens import tokenise_table

# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """The distinct rows of sentences; fills the flags that were not given (PAPER, SCRATCH)."""
    header, table = read_table(path, empty_cell, roles=SENTENCES, columns=args.columns)
    place, cells = next(iter(table))
    if (columns := len(cells)) > 2:
        wanted = "1 (sentence) or 2 (sentence, positive), as by --columns 1 2"
        fail(f"{path} {place}: {columns} columns, wanted {wanted}")
    fill(args, SCRATCH if args.model == "scratch" else PAPER)
    if args.radius is None and args.relative_radius is None:
        fill(args, RADIUS["scratch" if args.model == "scratch" else args.form])
    rows = DistinctRows(table)
    if len(rows) < 2 or args.batch_size > len(rows):
        fail(f"{path}: {len(rows)} distinct rows, wanted at least 2 and --batch-size, "
             f"which is {args.batch_size}")
    if args.radius is not None and args.relative_radius is not None:
        fail(f"--radius {args.radius:g} --relative-radius {args.relative_radius:g}: wanted one of them")
    if (args.radius or args.relative_radius) and args.neighbours >= args.batch_size:
        fail(f"--neighbours {args.neighbours}: wanted fewer than --batch-size, which is {args.batch_size}")
    args.mode = "unsupervised" if columns == 1 else "pairs"
    say("vascl", f"{args.mode}: {describe_table(table, header)}, {len(rows):,} of them distinct")
    return rows


class DistinctRows:
    """The rows of a table without repetitions: equal sentences would be each other's neighbours (paper)."""

    def __init__(self, table):
        keys = bytearray()  # 8 bytes a row, not the texts: a file may be larger than memory
        for _, cells in table:
            keys += hashlib.blake2b(repr(cells).encode(), digest_size=8).digest()
        self.table, self.first = table, np.zeros(len(table), bool)
        self.first[np.unique(np.frombuffer(keys, np.uint64), return_index=True)[1]] = True

    def __len__(self):
        return int(self.first.sum())

    def __iter__(self):
        return itertools.compress(self.table, self.first)


def build_model(args, run):
    """The encoder without its pretrained pooler, and the head g, for training only."""
    model = build_encoder(args, run, "avg", columns=1 + (args.mode == "pairs"))
    linears = [torch.nn.Linear(model.width, size, bias=False) for size in (model.width, 128)]
    model.projection = torch.nn.Sequential(linears[0], torch.nn.ReLU(), linears[1])
    say("model", describe_model(model, args))
    return model.to(run.device)


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def neighbourhood_loss(e, perturbed, head, neighbours, temperature, form="paper"):
    """The second term of L: mean −log softmax of z_i·z*_i over the 2N anchors z_i and z*_i, each against the
    z and z* of its K neighbours only.

    e, perturbed   (N, D) raw embeddings and e + δ, float32 or float64
    head           callable (N, D) → (N, F); its output is normalised here
    neighbours     (N, K) int64 row numbers
    form           "paper": gradient to e, perturbed and the head | "code": only to the head, through z*
    returns        scalar float32, float64 for float64, 0 for K = 0; O(N·K·F) memory
    """
    check_rows(e=(e, "N D"), perturbed=(perturbed, "N D"), neighbours=(neighbours, "N k", int))
    check_neighbourhood(e, head, neighbours, temperature, form)
    z = project(head, e)
    if form == "code":
        z, perturbed = z.detach(), perturbed.detach()
    anchors = torch.stack([z, project(head, perturbed)], 1)    # (N, 2, F)
    positive = anchors.prod(1).sum(1, keepdim=True) / temperature
    negatives = anchors @ anchors[neighbours.long()].flatten(1, 2).mT / temperature             # (N, 2, 2K)
    return -F.logsigmoid(positive - negatives.logsumexp(2)).mean()


@torch.enable_grad()
def virtual_augmentation(e, head, neighbours, noise, radius, temperature, steps=1, form="paper"):
    """δ (N, D) of length radius, a constant: the step to where the neighbours are hardest to tell from e.

    e            (N, D) raw embeddings, float32 or float64; neither e nor the head gets a gradient, and the
                 head's buffers do not change
    head         and neighbours: as in neighbourhood_loss
    noise        (N, D) the first direction, of any length: Gaussian (paper) or uniform around 0 (code)
    steps        gradient steps, each of which replaces the direction; 0 keeps that of the noise
    form         "paper" | "code": from the same noise they make the same δ
    returns      like e; a row with gradient 0 gets 0
    source       Zhang et al. 2022, the virtual augmentation
    """
    check_rows(e=(e, "N D"), neighbours=(neighbours, "N k", int), noise=(noise, "N D"))
    checks.check_alike(e=e, noise=noise)
    check_neighbourhood(e, head, neighbours, temperature, form)
    checks.check_number("radius", radius, 0)
    checks.check_integer("steps", steps, 0)
    if isinstance(head, torch.nn.Module):  # running statistics are not to see these passes
        buffers = {name: buffer.clone() for name, buffer in head.named_buffers()}
        head = functools.partial(torch.func.functional_call, head, buffers)

    def unit(x):
        return x / (x.norm(dim=1, keepdim=True) + 1e-8)

    e, z, direction = e.detach(), project(head, e).detach(), unit(noise.detach())
    for _ in range(steps):
        moved = project(head, e + radius * direction.requires_grad_())
        negatives = (z[neighbours.long()] @ moved[:, :, None])[:, :, 0] / temperature           # (N, K)
        loss = -F.logsigmoid((z * moved).sum(1) / temperature - negatives.logsumexp(1)).mean()
        direction = unit(torch.autograd.grad(loss, direction)[0])
    return radius * direction.detach()


def nearest_neighbours(e, k, *, impl="auto"):
    """N(i), (N, K) int64: for each row of raw embeddings e (N, D), any float type, the K = min(k, N − 1)
    other rows of largest e_i·e_j, largest first. The (N, N) matrix is never stored; N is at least 2."""
    check_rows(e=(e, "N D"))
    checks.check_integer("k", k, 1)
    if len(e) < 2:
        raise ValueError("e: 1 row, wanted at least 2")
    return similarity_topk(e, None, min(k, len(e) - 1), exclude="diagonal", impl=impl)[1]


def compute_loss(model, batch, rows, args):
    """This rank's part of both terms. Every rank computes them for the whole batch of `rows` rows, which
    costs next to nothing beside the encoder."""
    own = model(batch).chunk(2)
    head, e1, e2 = model.projection, *(gather_rows(e, rows) for e in own)
    unit = project(head, e1), project(head, e2)
    with half_products(e1, args):
        terms = {"instance": nt_xent(*unit, args.temperature, impl=args.impl)}
    radius = args.radius
    if args.relative_radius is not None:
        radius = args.relative_radius * spread(e1.detach()).item()
    if radius and rows > 1:  # a last batch may be one sentence, without neighbours
        noise = torch.randn_like(e1) if args.form == "paper" else torch.rand_like(e1) - 0.5
        if dist.is_initialized():
            dist.broadcast(noise, 0)
        neighbours = nearest_neighbours(e1, args.neighbours, impl=args.impl)
        delta = virtual_augmentation(e1, head, neighbours, noise, radius, args.temperature,
                                     args.ascent_steps, args.form)
        terms["neighbourhood"] = neighbourhood_loss(e1, e1 + delta, head, neighbours, args.temperature,
                                                    args.form)
    terms = {name: term * (len(own[0]) / rows) for name, term in terms.items()}
    loss = sum(terms.values())
    return loss, {"loss": loss.detach(), **{name: term.detach() for name, term in terms.items()}}


def spread(e):
    """The mean distance of the rows of e (N, D) from their mean."""
    return (e - e.mean(0)).norm(dim=1).mean()


def check_neighbourhood(e, head, neighbours, temperature, form):
    """The checks that both functions on neighbours share."""
    checks.check_callable("head", head)
    checks.check_index("neighbours", neighbours, len(e))
    checks.check_temperature(temperature, e.device)
    checks.check_choice("form", form, "paper", "code")


def project(head, e):
    """The unit vectors z of embeddings e (N, D)."""
    return F.normalize(head(e), dim=1, eps=1e-8)


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    if args.evaluate:
        return score(args, __file__, "avg")
    table = load_data(args.data, args)
    held_out = HeldOut(args)
    run = Run(args, __file__)
    model = build_model(args, run)
    groups = [dict(params=model.encoder.parameters()),
              dict(params=model.projection.parameters(), lr=args.head_lr)]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, weight_decay=0.0, fused=True)
    total = args.steps or args.epochs * epoch_steps(len(table), args.batch_size, run.world)
    run.begin(model, optimizer, total)
    tokens = tokenise_table(table, model, run)
    held_out.before(model, run)
    model.train()
    for _, rows in run.steps(total, len(tokens)):              # at a constant rate (paper)
        batch = model.batch(*tokens.views(rows[own_rows(len(rows))], 2))
        loss, values = compute_loss(model, batch, len(rows), args)
        optimizer.zero_grad()
        loss.backward()
        sum_gradients(model)
        optimizer.step()
        run.note(values, lr=args.lr)
        if run.due:
            held_out.judge(model, run)
    held_out.after(model, run)


if __name__ == "__main__":
    main()
