"""DCLR: Debiased Contrastive Learning of Unsupervised Sentence Representations. Zhou, Zhang, Zhao, Wen, ACL
2022, arXiv 2205.00656.

DCLR changes the negatives of unsupervised SimCSE (simcse.py). First, a frozen encoder (the guide) finds
sentences that are similar to an anchor; these sentences are not negatives of the anchor. Second, noise
vectors n_k are negatives of all anchors. They start as Gaussian vectors, and a few steps of gradient ascent
make them more similar to the anchors. Two dropout masks give sentence i an anchor z1_i and a positive z2_i:

    L = 1/N Σ_i [ −s(z1_i, z2_i) + log( Σ_{j≠i} w_ij exp s(z1_i, z2_j) + Σ_k exp s(z1_i, n_k) ) ]

N is the number of sentences, s(a, b) is cos(a, b) / τ, and τ is the temperature. The weight w_ij is 0 if the
guide's embeddings f_i and f_j have cos(f_i, f_j) ≥ φ; all other weights are 1. Gradient ascent moves n_k by
steps of length β along the gradient of Σ_i log Σ_k exp(cos(z1_i, n_k) / τ_u), where τ_u is a temperature.

    python simcse.py --model scratch --data tests/data/sentences.txt --out out/guide
    python dclr.py --model scratch --guide out/guide --data tests/data/sentences.txt --dev tests/data/sts.tsv
    torchrun --nproc-per-node 4 dclr.py --data wiki1m_for_simcse.txt --dev stsb-dev.tsv

Data: a .txt file with one sentence per line, or one column of a .csv .tsv .json .jsonl or .parquet file.
--dev and --test: sentence pairs with scores (sentence1, sentence2, score) or retrieval data (query, positive,
optional hard negatives; MRR@10). The best checkpoint on --dev is kept; without --dev, the last checkpoint.

Published result of the released code (the third command with --form code): BERT-base reaches a mean
Spearman × 100 of 77.22 on seven STS test sets (SimCSE: 76.25). No result is published for --form paper.
Flags of the released scripts for other models (SimCSE-X is an unsupervised SimCSE checkpoint of model X):
    RoBERTa-base    --model roberta-base --guide SimCSE-RoBERTa-base --phi 0.85 --noise-per-sentence 2.5
    BERT-large      --model SimCSE-BERT-large --head pooler --batch-size 256 --epochs 1 --noise-per-sentence 3
    RoBERTa-large   --model SimCSE-RoBERTa-large --head pooler --batch-size 256 --epochs 1 --lr 1e-5
                    --guide SimCSE-RoBERTa-base --phi 0.85 --noise-per-sentence 5
The authors advise trying several values of --phi and --noise-per-sentence.

Departures from the released code:
  - The released code reads an empty cell as one space; this script reports an error.
  - With several GPUs, the released code divides the gradient by the number of GPUs; this script does not.
  - The released code attends to padding in training; this script masks padding.
  - The released code runs the guide with dropout; this script runs the guide without dropout.
  - The released code's threshold for the guide's cosine is 20 φ τ; this script's is φ (equal if τ = 0.05).
  - The released code selects the checkpoint on STS-B and SICK-R; this script selects by the --dev score.
--form code follows the released code in three other points:
  - The loss is the mean over anchors i and keys j of −log q_ij if j = i, else of −log(1 − q_ij). The keys
    are all positives and noise vectors, q_i is the softmax of w_ij s_ij over j, and s_ij is s(z1_i, key j).
  - The noise maximises Σ_i log( Σ_k exp(cos(z1_i, n_k) / τ_u) + Σ_j exp(cos(z1_i, z2_j) / τ_u) ).
  - The head has two layers: the pretrained pooler and a new layer.
The paper draws separate noise for each sentence; the released code and this script draw it once per batch.
"""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F

from kernels import check_rows, checks, gather_rows, own_rows, similarity_lse
from kernels.training.data import SENTENCE_COLUMNS, describe_table, empty_cell, log_first_row, read_table
from kernels.training.errors import command, fail, log
from kernels.training.flags import ScriptParser, at_least, check_batch_size, fill_defaults, text_flags
from kernels.training.loop import all_reduce_gradients, set_lr, steps_per_epoch
from kernels.training.precision import gather_keys, loss_autocast, unit_rows
from kernels.training.run import Run
from kernels.training.text.checkpoint import read_saved_settings
from kernels.training.text.encoders import build_encoder, describe_model
from kernels.training.text.evaluation import Evaluator, evaluate_model
from kernels.training.text.tokens import tokenise_table

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = ScriptParser(__doc__)
    add = parser.add_argument
    text_flags(
        parser, model="bert-base-uncased", out="out/dclr", form="paper",
        columns=(None, "chosen by the header, else all"), eval_every=(125, "125 (released scripts)"),
        pooling=(None, "as saved with --model, else cls (paper), avg for scratch, last for a decoder"),
        head=(None, "as saved with --model, else train-only with cls pooling (paper), else none"),
        batch_size=(None, "128 (paper), 32 with --model scratch"),
        epochs=(None, "3 (paper), 4 with --model scratch"),
        lr=(None, "3e-5 (paper), 2e-3 with --model scratch; linear decay to 0"))
    add("--phi", type=at_least(-1, most=1), default=0.9,
        help="φ: a sentence whose guide cosine with the anchor is ≥ φ is not a negative; default 0.9 (paper)")
    add("--noise-per-sentence", type=at_least(0), default=1.0,
        help="number of noise negatives per sentence of the batch; default 1 (paper)")
    add("--noise-steps", type=at_least(0, int), default=4,
        help="number of gradient-ascent steps that move the noise vectors; default 4 (paper)")
    add("--noise-step-size", type=at_least(0), default=1e-3,
        help="β, length of one gradient-ascent step; default 1e-3 (released code)")
    add("--noise-temperature", type=at_least(1e-4),
        help="τ_u, temperature in the gradient ascent of the noise; default --temperature (released code)")
    add("--guide", group="model", reads="model", default="princeton-nlp/unsup-simcse-bert-base-uncased",
        help="frozen encoder that finds false negatives (the paper's complementary model): a hub name or a "
             "local folder; default princeton-nlp/unsup-simcse-bert-base-uncased (paper)")
    return parser


# Flags that are not on the command line get these values.
PAPER_DEFAULTS = dict(batch_size=128, lr=3e-5, epochs=3)                    # the paper's values for BERT-base
SCRATCH_DEFAULTS = dict(pooling="avg", batch_size=32, lr=2e-3, epochs=4)       # used with --model scratch


# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """Return --data as a Table of sentences, and set the defaults of flags that were not given."""
    header, table = read_table(path, empty_cell, roles=SENTENCE_COLUMNS, columns=args.columns)
    place, cells = next(iter(table))
    if len(cells) != 1:
        fail(f"{path} {place}: {len(cells)} columns, expected 1 (sentence); choose one, as with --columns 1")
    defaults = SCRATCH_DEFAULTS if args.model == "scratch" else PAPER_DEFAULTS
    fill_defaults(args, defaults | dict(noise_temperature=args.temperature))
    check_batch_size(len(table), path, args.batch_size)
    log("dclr", f"unsupervised: {describe_table(table, header)}")
    log_first_row(table)
    return table


def build_model(args, run):
    """Return the encoder with its pooling and head."""
    model = build_encoder(args, run, "cls", "train-only")
    if args.form == "code" and model.head_origin == "new head" and model.pooler is not None:
        model.head = torch.nn.Sequential(*model.pooler, *model.head)       # the pretrained pooler comes first
    log("model", describe_model(model, args))
    return model.to(run.device)


def build_guide(args, run):
    """Return the guide, frozen and in eval mode. The settings in its checkpoint define its embedding. Without
    settings, the embedding is the output of the pretrained pooler, if the model has one (released code)."""
    guide_args = argparse.Namespace(model=args.guide, evaluate=True)
    guide = build_encoder(guide_args, run, flag="--guide")
    if guide.pooler is not None and read_saved_settings(args.guide, "--guide").pooling is None:
        guide.head, guide.head_origin = guide.pooler, "pooler as head"
        guide.keep_head = True                                 # apply the pooler in eval mode, too
    log("guide", describe_model(guide, guide_args))
    return guide.eval().requires_grad_(False).to(run.device)


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def dclr_loss(z1, z2, noise, f1, f2, phi, temperature=0.05, form="paper", *, offset=0, impl="auto"):
    """Return the loss L, the mean over N anchors. All vectors are normalised by this function.

    z1           (N, D) anchors of any float type; a zero vector has cosine 0 with all vectors
    z2           (M, D) positives; row offset + i is the positive of anchor i
    noise        (K, D) negatives of all anchors, without gradient; K may be 0
    f1, f2, phi  (N, E) and (M, E) guide embeddings of the sentences of z1 and z2, and the threshold φ
    form         "paper": the denominator has negatives only | "code": one_vs_all_loss, which ignores impl
    offset       index of this rank's first row in z2 and f2, which have the rows of all ranks
    returns      scalar, float32 (float64 for float64 input). The loss of an anchor without negatives is 0
    source       Zhou et al. 2022, the instance-weighted objective
    """
    check_rows(offset, z1=(z1, "N D"), z2=(z2, "M D"), noise=(noise, "k D"), f1=(f1, "N E"), f2=(f2, "M E"))
    checks.check_same_dtype(z1=z1, z2=z2, noise=noise)
    checks.check_same_dtype(f1=f1, f2=f2)
    checks.check_number("phi", phi, -torch.inf, torch.inf)
    checks.check_temperature(temperature, z1.device)
    checks.check_choice("form", form, "paper", "code")
    checks.check_choice("impl", impl, *checks.IMPLS)
    z1, z2 = unit_rows(z1), unit_rows(z2)
    f1, f2, noise = [unit_rows(x.detach()) for x in (f1, f2, noise)]
    if form == "code":
        with torch.autocast(z1.device.type, enabled=False):    # one_vs_all_loss needs full precision
            return one_vs_all_loss(z1, torch.cat([z2, noise]), f1, f2, phi, temperature, offset)
    local = slice(offset, offset + len(z1))                    # these rows of z2 are the positives of z1
    positive = (z1 * z2[local]).sum(1) / temperature
    # log Σ_{j≠i} w_ij exp s(z1_i, z2_j); the argument `similar` applies the weights w
    negatives = similarity_lse(z1, z2, temperature, exclude="diagonal", similar=(f1, f2, phi), offset=offset,
                               impl=impl)
    if len(noise):
        negatives = torch.logaddexp(negatives, similarity_lse(z1, noise, temperature, impl=impl))
    return (negatives - positive).where(negatives != -torch.inf, 0).mean()


@torch.no_grad()
def noise_negatives(z1, z2, noise, steps=4, step_size=1e-3, temperature=0.05, form="paper", *,
                    all_reduce=None, impl="auto"):
    """Make noise more similar to the anchors by `steps` steps of gradient ascent. Return new noise (K, D).

    z1, z2     (N, D) anchors and (M, D) positives of any norm and float type; they get no gradient
    noise      (K, D) starting points, for example from torch.randn; K may be 0
    step_size  β, length of one step. A row with gradient 0 does not move (in the released code it becomes 0)
    form       "paper": maximises Σ_i log Σ_k exp(cos(z1_i, n_k) / τ) | "code": Σ_k also includes all z2_j
    all_reduce None on one rank; torch.distributed.all_reduce on several ranks. In this case, z1 has this
               rank's anchors, z2 has the positives of all ranks, and all ranks must pass the same noise
    source     Zhou et al. 2022, noise-based negatives
    """
    check_rows(z1=(z1, "N D"), z2=(z2, "N D" if all_reduce is None else "m D"), noise=(noise, "k D"))
    checks.check_same_dtype(z1=z1, z2=z2, noise=noise)
    checks.check_temperature(temperature, z1.device)
    checks.check_choice("form", form, "paper", "code")
    checks.check_choice("impl", impl, *checks.IMPLS)
    checks.check_integer("steps", steps, 0)
    checks.check_number("step_size", step_size)
    z1, z2 = unit_rows(z1), unit_rows(z2)
    batch_lse = z1.new_tensor(-torch.inf)                  # this is log 0; only the code's sum contains z2
    if form == "code":
        batch_lse = similarity_lse(z1, z2, temperature, impl=impl)
    for _ in range(steps if len(noise) else 0):
        with torch.enable_grad():
            noise = noise.detach().requires_grad_()
            noise_lse = similarity_lse(z1, unit_rows(noise), temperature, impl=impl)
            gradient = torch.autograd.grad(torch.logaddexp(noise_lse, batch_lse).sum(), noise)[0]
        if all_reduce is not None:
            all_reduce(gradient)
        largest = gradient.abs().amax(1, keepdim=True)       # dividing by it avoids underflow in F.normalize
        noise = noise + step_size * F.normalize(gradient / largest.where(largest > 0, 1), dim=1)
    return noise.detach()


def compute_loss(model, batch, rows, args):
    """Return this rank's part of the loss of a global batch of `rows` rows, and the values to log.
    batch: (tokens of both views from model.batch, guide embeddings) of this rank's rows."""
    tokens, f1 = batch
    z1, z2 = model(tokens).chunk(2)
    z2, f2 = gather_keys(z2, rows, args), gather_rows(f1, rows)
    noise = torch.randn(int(args.noise_per_sentence * rows), z2.shape[1], device=z2.device)
    if dist.is_initialized():
        dist.broadcast(noise, 0)                               # all ranks use the noise of rank 0
    with loss_autocast(z1, args):
        noise = noise_negatives(z1, z2, noise, args.noise_steps, args.noise_step_size, args.noise_temperature,
                                args.form, all_reduce=dist.all_reduce if dist.is_initialized() else None,
                                impl=args.impl)
        loss = dclr_loss(z1, z2, noise, f1, f2, args.phi, args.temperature, args.form,
                         offset=own_rows(rows).start, impl=args.impl)
    loss = loss * (len(z1) / rows)
    return loss, {"loss": loss.detach()}


def instance_weights(f1, f2, phi, *, offset=0):
    """Return the weights w (N, M): w_ij is 0 if cos(f1_i, f2_j) ≥ phi and j ≠ i + offset; all others are 1.

    f1, f2   (N, E) and (M, E) guide embeddings, not normalised
    offset   index of this rank's first row in f2, which has the rows of all ranks
    source   Zhou et al. 2022, instance weighting
    """
    check_rows(offset, f1=(f1, "N E"), f2=(f2, "M E"))
    checks.check_same_dtype(f1=f1, f2=f2)
    checks.check_number("phi", phi, -torch.inf, torch.inf)
    weights = (unit_rows(f1) @ unit_rows(f2).T < phi).to(f1.dtype)
    weights.diagonal(offset).fill_(1)
    return weights


def one_vs_all_loss(z1, keys, f1, f2, phi, temperature, offset):
    """Return the released code's loss, the mean over i and j of −log q_ij if j = i, else −log(1 − q_ij).

    q_i is the softmax of w_ij s_ij over keys j. If w_ij = 0, the logit is 0, and key j adds exp(0) = 1 to the
    denominator. The q of the largest negative may round to 1, so 1 − q is computed as the sum of the other q.
    """
    def block(z1, keys, start, end):       # returns the sum of the losses over anchors start:end and all keys
        s = z1 @ keys.T / temperature
        s[:, : len(f2)] *= instance_weights(f1[start:end], f2, phi, offset=offset + start)
        own = offset + torch.arange(start, end, device=s.device)[:, None]      # column of each positive
        hardest = s.scatter(1, own, -torch.inf).argmax(1, keepdim=True)        # column of largest negative
        lse = s.logsumexp(1)
        lse_negatives = s.scatter(1, own, -torch.inf).logsumexp(1)
        lse_but_hardest = s.scatter(1, hardest, -torch.inf).logsumexp(1)
        others = (s - lse[:, None]).exp().scatter(1, torch.cat([own, hardest], 1), 0)
        # The terms: −log(1 − q) of the largest negative, −log q of the positive, −log(1 − q) of the others.
        return (lse - lse_but_hardest - F.logsigmoid(s.gather(1, own)[:, 0] - lse_negatives)
                - torch.log1p(-others).sum(1)).sum()

    z1, keys = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in (z1, keys)]
    if isinstance(temperature, torch.Tensor):     # BlockwiseSum gives no gradient to τ, so z1 is divided by τ
        z1, temperature = z1 / temperature, 1.0
    if len(keys) == 1:                                         # there are no negatives, so the loss is 0
        return F.cross_entropy(z1 @ keys.T, torch.zeros(1, dtype=torch.int64, device=keys.device))
    return BlockwiseSum.apply(block, z1, keys, max(1, 2**22 // len(keys))) / (len(z1) * len(keys))


class BlockwiseSum(torch.autograd.Function):
    """The sum of block(z1[start:end], keys, start, end) over all blocks of `size` rows of z1. forward also
    computes the gradients, block by block, so that the logits of only one block are in memory."""

    @staticmethod
    def forward(ctx, block, z1, keys, size):
        total = z1.new_zeros(())
        z1_gradient, keys_gradient = torch.zeros_like(z1), torch.zeros_like(keys)
        for start in range(0, len(z1), size):
            end = min(start + size, len(z1))
            with torch.enable_grad():
                z1_block = z1[start:end].detach().requires_grad_()
                all_keys = keys.detach().requires_grad_()
                value = block(z1_block, all_keys, start, end)
            of_z1, of_keys = torch.autograd.grad(value, (z1_block, all_keys))
            total += value.detach()
            z1_gradient[start:end] = of_z1
            keys_gradient.add_(of_keys)
        ctx.save_for_backward(z1_gradient, keys_gradient)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        z1_gradient, keys_gradient = ctx.saved_tensors
        return None, gradient * z1_gradient, gradient * keys_gradient, None


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    if args.evaluate:
        return evaluate_model(Evaluator(args), __file__)
    table = load_data(args.data, args)
    evaluator = Evaluator(args)
    run = Run(args, __file__)
    model = build_model(args, run)
    guide = build_guide(args, run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
    total = args.steps or args.epochs * steps_per_epoch(len(table), args.batch_size)
    run.begin(model, optimizer, total)
    tokens = tokenise_table(table, model, run)
    guide_tokens = tokenise_table(table, guide, run, "guide-tokens")
    evaluator.evaluate_before(model, run)
    model.train()
    for step, picked in run.steps(total, len(tokens)):
        set_lr(optimizer, args.lr * (total - step + 1) / total)  # the rate decays linearly, starting at --lr
        own = picked[own_rows(len(picked))]
        with torch.no_grad():
            f1 = guide(guide.batch(*guide_tokens.views(own, 1)))
        loss, values = compute_loss(model, (model.batch(*tokens.views(own, 2)), f1), len(picked), args)
        optimizer.zero_grad()
        loss.backward()
        all_reduce_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.log_metrics(values, lr=optimizer.param_groups[0]["lr"])
        if run.eval_due:
            evaluator.evaluate_and_save(model, run)
    evaluator.finish(model, run)


if __name__ == "__main__":
    main()
