"""DCLR: Debiased Contrastive Learning of Unsupervised Sentence Representations. Zhou, Zhang, Zhao, Wen, ACL
2022, arXiv 2205.00656.

Unsupervised SimCSE with other negatives. If a finished model, the guide, finds a sentence similar to the
anchor, the sentence is likely no negative: its weight is 0. And noise is added as negatives, because
sentences leave much of the space empty: Gaussian vectors n_k, moved a few steps of length β up the gradient
of the loss of all anchors against them, at a temperature τ_u. With anchors z1, positives z2,
s(a, b) = cos(a, b) / τ, the guide's embeddings f, and w_ij = 0 where cos(f_i, f_j) ≥ φ, else 1:

    L = 1/N Σ_i [ −s(z1_i, z2_i) + log( Σ_{j≠i} w_ij exp s(z1_i, z2_j) + Σ_k exp s(z1_i, n_k) ) ]

Data: one sentence per line of .txt, or one column of .csv .tsv .json .jsonl .parquet. Scored pairs for --dev,
which chooses the best checkpoint (without it the last one is kept), and for --test: columns sentence1,
sentence2, score (0 to 5), by header, or the score first or last.

    python simcse.py --model scratch --data tests/data/sentences.txt --out out/guide
    python dclr.py --model scratch --guide out/guide --data tests/data/sentences.txt --dev tests/data/sts.tsv
    torchrun --nproc-per-node 4 dclr.py --data wiki1m_for_simcse.txt --dev stsb-dev.tsv

Expected: the paper's BERT-base has 77.22 Spearman as the mean of seven STS test sets (SimCSE 76.25). Its code
is that of the third command with --form code. Nobody has published a run of the default, the paper's
equations. The defaults are BERT-base's. RoBERTa takes its own SimCSE as --guide and --phi 0.85, its base
--noise-times 2.5. Large models start from a SimCSE (--model), whose pooler alone is the head (--head pooler),
and take --batch-size 256 --epochs 1 --noise-times 3, RoBERTa 5 and --lr 1e-5. The authors advise a search for
φ and the noise.

Departures from the released code: an empty cell, there a space, is an error; under torchrun the gradient is
the one of the global batch, there 1/world of it; padding is masked; the guide has no dropout; φ does not move
with τ; --dev alone selects. What else differs is --form code: its loss (one_against_all), all of z2 in the
ascent too, and a head on top of the encoder's pooler. The paper has noise of its own for each sentence; here,
as released, a batch shares it.
"""
from kernels.training.cli import Flags, answer_early, at_least, command, fail, fill, say

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = Flags(__doc__)
    add, common = parser.add_argument, parser.common
    common("--pooling", said="its folder's, else cls (paper), scratch avg, a decoder's last")
    common("--head", said="its folder's, else for cls train-only (paper)")
    common("--prompt", said="its folder's, else none")
    add("--guide", reads="model", default="princeton-nlp/unsup-simcse-bert-base-uncased",
        help="complementary model, a hub name or local folder; default the paper's")
    add("--phi", type=at_least(-1), default=0.9,
        help="φ, the guide's cosine from which on none is a negative; default 0.9 (paper)")
    add("--noise-times", type=at_least(0), default=1.0, help="noise vectors a sentence; default 1 (paper)")
    add("--noise-steps", type=at_least(0, int), default=4,
        help="steps of the noise up the gradient; default 4 (paper)")
    add("--noise-step-size", type=at_least(0), default=1e-3,
        help="β, length of such a step; default 1e-3 (released code)")
    add("--noise-temperature", type=at_least(1e-4),
        help="τ_u, of the loss that the noise climbs; default --temperature (released code)")
    common("--form", "paper")
    add("--mlm-weight", type=at_least(0), default=0.0, help="of a masked-LM loss; default 0: off; code 0.1")
    parser.plain("--evaluate", "--data", "--dev", "--test", "--transfer", "--cluster")
    common("--columns", said="by the header, else all")
    common("--model", "bert-base-uncased")
    common("--out", "out/dclr")
    common("--batch-size", said="128 (paper), scratch 32")
    common("--chunk-size", said="the batch")
    common("--epochs", said="3 (paper), scratch 4")
    common("--steps", said="by --epochs")
    common("--lr", said="3e-5 (paper), scratch 2e-3, falling linearly to 0")
    common("--temperature", 0.05, "0.05 (paper)")
    common("--max-length", 32, "32 (paper)")
    common("--seed", 42)
    common("--eval-every", 125, "125 (released scripts)")
    common("--impl", "auto")
    parser.plain("--resume", "--keep-state", "--log", "--precision")
    return parser


# Defaults for flags that were not given: the paper's (BERT-base), and for a small random BERT.
PAPER = dict(batch_size=128, lr=3e-5, epochs=3)
SCRATCH = dict(pooling="avg", batch_size=32, lr=2e-3, epochs=4)


if __name__ == "__main__":
    answer_early(make_parser)  # --help, and wrong flags, before the seconds that torch takes

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModel, AutoModelForMaskedLM

from kernels import check_rows, checks, gather_rows, own_rows, similarity_lse
from kernels.training.loop import epoch_steps, half_products, set_lr, sum_gradients
from kernels.training.run import Run
from kernels.training.tables import SENTENCES, describe_table, empty_cell, read_table
from kernels.training.text.encoders import build_encoder, describe_model
from kernels.training.text.evaluation import HeldOut, score
from kernels.training.text.mlm import free_decoder, masked_lm_loss
from kernels.training.text.sts import load_sts, spearman  # noqa: F401 - also called from here
from kernels.training.text.tokens import tokenise_table

# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """The Table of sentences; fills the flags that were not given (PAPER, SCRATCH)."""
    header, table = read_table(path, empty_cell, roles=SENTENCES, columns=args.columns)
    place, cells = next(iter(table))
    if (columns := len(cells)) != 1:
        fail(f"{path} {place}: {columns} columns, wanted 1 (sentence), as by --columns 1")
    if args.phi > 1:
        fail(f"--phi {args.phi}: wanted a cosine, from -1 to 1")
    fill(args, (SCRATCH if args.model == "scratch" else PAPER) | dict(noise_temperature=args.temperature))
    if len(table) < 2 or args.batch_size > len(table):
        fail(f"{path}: {len(table)} rows, wanted at least 2 and --batch-size, which is {args.batch_size}")
    say("dclr", f"unsupervised: {describe_table(table, header)}")
    return table


def build_model(args, run):
    """The encoder without its pretrained pooler, with what is trained beside it: the head, a masked LM."""
    auto = AutoModelForMaskedLM if args.mlm_weight else AutoModel
    model = build_encoder(args, run, "cls", "train-only", auto)
    if args.form == "code" and model.origin == "new" and model.pooler[0] is not None:
        model.head = torch.nn.Sequential(*model.pooler[0], *model.head)
    if model.lm is not None:
        free_decoder(model.lm)
    say("model", describe_model(model, args))
    return model.to(run.device)


def build_guide(args, run):
    """The complementary model, which is neither trained nor saved. It embeds as its folder says, or else by
    the output of its pooler (released code)."""
    asked = argparse.Namespace(model=args.guide, evaluate=True)
    guide = build_encoder(asked, run, flag="--guide")
    if guide.layout is None and guide.pooler[0] is not None:
        guide.head, guide.keep_head, guide.origin = guide.pooler[0], True, "pooler"
    say("guide", describe_model(guide, asked))
    return guide.eval().requires_grad_(False).to(run.device)


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def dclr_loss(z1, z2, noise, f1, f2, phi, temperature=0.05, form="paper", *, offset=0, impl="auto"):
    """L: mean loss of N anchors z1 with their positives among z2. Negatives are the rows of z2 that
    instance_weights leaves, and the noise.

    z1           (N, D) raw embeddings, any float type; normalised here, a zero vector has cosine 0 with all
    z2           (M, D) positives, likewise; row offset + i belongs to anchor i
    noise        (K, D) negatives of all anchors, without gradient; K may be 0
    f1, f2, phi  as in instance_weights, for the rows of z1 and z2
    form         "paper": the denominator leaves out the positive | "code": one_against_all, plain PyTorch
    offset       this rank's first row where z2 and f2 are gathered from all ranks
    returns      scalar float32, float64 for float64; an anchor without negatives: 0
    source       Zhou et al. 2022, the instance-weighted objective
    """
    check_rows(offset, z1=(z1, "N D"), z2=(z2, "M D"), noise=(noise, "k D"), f1=(f1, "N E"), f2=(f2, "M E"))
    checks.check_alike(z1=z1, z2=z2, noise=noise)
    checks.check_alike(f1=f1, f2=f2)
    checks.check_number("phi", phi, -torch.inf, torch.inf)
    checks.check_temperature(temperature, z1.device)
    checks.check_choice("form", form, "paper", "code")
    checks.check_impl(impl)
    z1, z2 = F.normalize(z1, dim=1, eps=1e-8), F.normalize(z2, dim=1, eps=1e-8)
    f1, f2, noise = (F.normalize(x.detach(), dim=1, eps=1e-8) for x in (f1, f2, noise))
    if form == "code":
        with torch.autocast(z1.device.type, enabled=False):    # its products are plain PyTorch's
            return one_against_all(z1, torch.cat([z2, noise]), f1, f2, phi, temperature, offset)
    own = slice(offset, offset + len(z1))
    others = dict(temperature=temperature, exclude="diagonal", offset=offset, impl=impl)
    positive = (z1 * z2[own]).sum(1) / temperature
    # log Σ_{j≠i} w_ij exp s(z1_i, z2_j): instance_weights, without storing them
    negatives = similarity_lse(z1, z2, similar=(f1, f2, phi), **others)
    if len(noise):
        negatives = torch.logaddexp(negatives, similarity_lse(z1, noise, temperature, impl=impl))
    return (negatives - positive).where(negatives != -torch.inf, 0).mean()


def instance_weights(f1, f2, phi, *, offset=0):
    """w (N, M): 0 where cos(f1_i, f2_j) ≥ phi, except at j = i + offset, else 1. Source: Zhou et al. 2022.

    f1, f2     (N, E), (M, E) raw embeddings of the guide
    offset     this rank's first row where f2 is gathered from all ranks
    """
    check_rows(offset, f1=(f1, "N E"), f2=(f2, "M E"))
    checks.check_alike(f1=f1, f2=f2)
    checks.check_number("phi", phi, -torch.inf, torch.inf)
    weights = (F.normalize(f1, dim=1, eps=1e-8) @ F.normalize(f2, dim=1, eps=1e-8).T < phi).to(f1.dtype)
    weights.diagonal(offset).fill_(1)
    return weights


@torch.no_grad()
def noise_negatives(z1, z2, noise, steps=4, step_size=1e-3, temperature=0.05, form="paper", *, impl="auto"):
    """(K, D) raw noise after some steps up the gradient of the loss of all anchors against the noise.

    z1, z2     (N, D) raw embeddings of anchors and positives, any float type; normalised here, no gradient
    noise      (K, D) where to start, as from torch.randn; K may be 0
    step_size  length of each row's step; a row without gradient stays where it is (released code: becomes 0)
    form       "paper": the denominator of the loss holds the noise | "code": and all of z2
    source     Zhou et al. 2022, noise-based negatives
    """
    check_rows(z1=(z1, "N D"), z2=(z2, "N D"), noise=(noise, "k D"))
    checks.check_alike(z1=z1, z2=z2, noise=noise)
    checks.check_temperature(temperature, z1.device)
    checks.check_choice("form", form, "paper", "code")
    checks.check_impl(impl)
    checks.check_integer("steps", steps, 0)
    checks.check_number("step_size", step_size)
    z1, z2 = F.normalize(z1, dim=1, eps=1e-8), F.normalize(z2, dim=1, eps=1e-8)
    rest = similarity_lse(z1, z2, temperature, impl=impl) if form == "code" else z1.new_tensor(-torch.inf)
    for _ in range(steps if len(noise) else 0):
        with torch.enable_grad():
            noise = noise.detach().requires_grad_()
            lse = similarity_lse(z1, F.normalize(noise, dim=1, eps=1e-8), temperature, impl=impl)
            gradient, = torch.autograd.grad(torch.logaddexp(lse, rest).sum(), noise)
        largest = gradient.abs().amax(1, keepdim=True)  # of a row; the squares of a tiny one would vanish
        noise = noise + step_size * F.normalize(gradient / largest.where(largest > 0, 1), dim=1)
    return noise.detach()


def compute_loss(model, batch, rows, args):
    """This rank's part of the loss and of the masked LM's, for a batch of `rows` rows over all ranks: groups
    of both views, and the guide's embeddings."""
    batch, f1 = batch
    z1, z2 = model(batch).chunk(2)
    z2, f2 = gather_rows(z2, rows), gather_rows(f1, rows)
    noise = torch.randn(int(args.noise_times * rows), z2.shape[1], device=z2.device)
    if dist.is_initialized():
        dist.broadcast(noise, 0)                               # the same for all ranks
    shared, climb = dict(form=args.form, impl=args.impl), (args.noise_step_size, args.noise_temperature)
    with half_products(z1, args):
        noise = noise_negatives(gather_rows(z1, rows), z2, noise, args.noise_steps, *climb, **shared)
        loss = dclr_loss(z1, z2, noise, f1, f2, args.phi, args.temperature, offset=own_rows(rows).start,
                         **shared)
    loss = loss * (len(z1) / rows)
    values = {"loss": loss.detach()}
    if model.lm is not None:
        mlm = masked_lm_loss(model, batch, args.impl)
        loss, values["mlm"] = loss + args.mlm_weight * mlm, mlm.detach()
    return loss, values


def one_against_all(z1, keys, f1, f2, phi, temperature, offset):
    """The released code's loss: mean over N rows and M keys of −log q_ii and −log(1 − q_ij), where q is the
    softmax of w_ij s_ij, so that a weight of 0 makes a logit of 0.

    For the largest negative 1 − q is summed from the other terms, because q may round to 1.
    """
    def block(z1, keys, start, end):
        s = z1 @ keys.T / temperature
        s[:, : len(f2)] *= instance_weights(f1[start:end], f2, phi, offset=offset + start)
        own = offset + torch.arange(start, end, device=s.device)[:, None]
        top = s.scatter(1, own, -torch.inf).argmax(1, keepdim=True)
        lse = s.logsumexp(1)
        negatives, rest = (s.scatter(1, column, -torch.inf).logsumexp(1) for column in (own, top))
        q = (s - lse[:, None]).exp().scatter(1, torch.cat([own, top], 1), 0)
        return (lse - rest - F.logsigmoid(s.gather(1, own)[:, 0] - negatives) - torch.log1p(-q).sum(1)).sum()

    if len(keys) == 1:                                         # no negative
        return 0 * (z1 * keys).sum()
    z1, keys = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (z1, keys))
    return SumOfBlocks.apply(block, z1, keys, max(1, 2**22 // len(keys))) / (len(z1) * len(keys))


class SumOfBlocks(torch.autograd.Function):
    """Σ block(z1[start:end], keys, start, end). forward takes the gradients of each block, so that only one
    block is in memory at a time."""

    @staticmethod
    def forward(ctx, block, z1, keys, size):
        total, gradients = z1.new_zeros(()), (torch.zeros_like(z1), torch.zeros_like(keys))
        for start in range(0, len(z1), size):
            end = min(start + size, len(z1))
            with torch.enable_grad():
                rows, columns = z1[start:end].detach().requires_grad_(), keys.detach().requires_grad_()
                value = block(rows, columns, start, end)
            of_rows, of_columns = torch.autograd.grad(value, (rows, columns))
            total += value.detach()
            gradients[0][start:end] = of_rows
            gradients[1].add_(of_columns)
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return None, *(gradient * x for x in ctx.saved_tensors), None


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    if args.evaluate:
        return score(args, __file__)
    table = load_data(args.data, args)
    held_out = HeldOut(args)
    run = Run(args, __file__)
    model, guide = build_model(args, run), build_guide(args, run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
    total = args.steps or args.epochs * epoch_steps(len(table), args.batch_size, run.world)
    run.begin(model, optimizer, total)
    tokens = tokenise_table(table, model, run)
    guide_tokens = tokenise_table(table, guide, run, "guide-tokens")
    held_out.before(model, run)
    model.train()
    for step, rows in run.steps(total, len(tokens)):
        set_lr(optimizer, args.lr * (total - step + 1) / total)  # from step 1, which has all of it
        own = rows[own_rows(len(rows))]
        with torch.no_grad():
            f1 = guide(guide.batch(*guide_tokens.views(own, 1)))
        loss, values = compute_loss(model, (model.batch(*tokens.views(own, 2)), f1), len(rows), args)
        optimizer.zero_grad()
        loss.backward()
        sum_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.note(values, lr=optimizer.param_groups[0]["lr"])
        if run.due:
            held_out.judge(model, run)
    held_out.after(model, run)


if __name__ == "__main__":
    main()
