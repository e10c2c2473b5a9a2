"""SimCSE: Simple Contrastive Learning of Sentence Embeddings. Gao, Yao, Chen, EMNLP 2021, arXiv 2104.08821.

A sentence is pulled to its positive and pushed from the rest of the batch. Unsupervised, the positive is the
same sentence encoded again: dropout is the only noise. Supervised, it is an entailed sentence, and a
contradicted one is a hard negative. With s(a, b) = cos(a, b) / τ, anchors z1, positives z2, hard negatives z3
(if any) and α = exp(w):

    L = 1/N Σ_i [ −s(z1_i, z2_i) + log( Σ_j exp s(z1_i, z2_j) + Σ_j α^[i=j] exp s(z1_i, z3_j) ) ]

Data, a row a line: .txt is sentences; .csv .tsv .json .jsonl .parquet have columns, chosen by --columns,
by a header of usual names (sent0 sent1 hard_neg, query positive negative_1 ...) or by their order:
    1 column   unsupervised             I ate an apple.
    2 columns  anchor, positive         I ate an apple.,Someone ate fruit.
    3 columns  and a hard negative      I ate an apple.,Someone ate fruit.,Nobody ate.
    or more    hard negatives           I ate an apple.,Someone ate fruit.,Nobody ate.,I ate a pear.
Scored pairs for --dev, which chooses the best checkpoint (without it the last one is kept), and for --test:
columns sentence1, sentence2, score (0 to 5), by header, or the score first or last.

    python simcse.py --model scratch --data tests/data/nli.csv --dev tests/data/sts.tsv
    python simcse.py --data wiki1m_for_simcse.txt --dev stsb-dev.tsv --out out/unsupervised
    torchrun --nproc-per-node 4 simcse.py --data nli_for_simcse.csv --dev stsb-dev.tsv --out out/supervised

Expected, of the second and the third command: the paper's BERT-base has 82.5 and 86.2 Spearman on STS-B dev,
and 76.25 and 81.57 as the mean of its seven test sets. Unsupervised runs differ by about two points from seed
to seed. The defaults are BERT-base's: unsupervised RoBERTa-base takes --batch-size 512 --lr 1e-5 and large
512 and 3e-5; other large models --lr 1e-5.

Departures from the released code: an empty cell, there a space, is an error; under torchrun the gradient is
the one of the global batch, there 1/world of it. --eval-every is the released scripts', the paper has 250.

Views and losses of other papers (--recipe, --views, --objective) are explained in docs/others.md.
"""
from kernels.training.cli import Flags, answer_early, at_least, command, fail, fill, say
from kernels.training.extras import sentence_flags

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = Flags(__doc__)
    add, common = parser.add_argument, parser.common
    common("--pooling", said="its folder's, else cls (paper), scratch avg, a decoder's last")
    common("--head", said="its folder's, else for cls keep, unsupervised train-only (paper)")
    common("--prompt", said="its folder's, else none")
    add("--hard-negative-weight", type=at_least(-100), default=0.0, help="w = log α; default 0 (paper)")
    add("--mlm-weight", type=at_least(0), default=0.0, help="of a masked-LM loss; default 0: off; paper 0.1")
    add("--dropout", type=at_least(0),
        help="of hidden states and attention in training; default the model's own, for BERT 0.1 (paper)")
    parser.plain("--evaluate", "--data", "--dev", "--test", "--transfer", "--cluster")
    add("--ignore-equal", action="store_true",
        help="what equals an anchor's own positive in text is no negative of it; default off (paper)")
    common("--columns", said="by the header, else all")
    common("--model", "bert-base-uncased")
    common("--out", "out/simcse")
    common("--batch-size", said="512, unsupervised 64 (paper), scratch 32")
    common("--chunk-size", said="the batch")
    common("--epochs", said="3, unsupervised 1 (paper), scratch 4")
    common("--steps", said="by --epochs")
    common("--lr", said="5e-5, unsupervised 3e-5 (paper), scratch 2e-3, falling linearly to 0")
    common("--temperature", 0.05, "0.05 (paper)")
    common("--max-length", 32, "32 (paper)")
    common("--seed", 42)
    common("--eval-every", 125, "125 (released scripts)")
    common("--impl", "auto")
    parser.plain("--resume", "--keep-state", "--log", "--precision")
    sentence_flags.add_flags(parser)                           # of other papers
    return parser


# Defaults for flags that were not given: by the number of columns (paper, BERT-base), for a small random BERT
MODES = {
    1: dict(mode="unsupervised", batch_size=64, lr=3e-5, epochs=1),
    2: dict(mode="pairs", batch_size=512, lr=5e-5, epochs=3),
    3: dict(mode="supervised", batch_size=512, lr=5e-5, epochs=3)}
SCRATCH = dict(pooling="avg", batch_size=32, lr=2e-3, epochs=4)


if __name__ == "__main__":
    answer_early(make_parser)  # --help, and wrong flags, before the seconds that torch takes

import functools

import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoModelForMaskedLM

from kernels import check_rows, checks, gather_rows, own_rows, similarity_lse
from kernels.training.extras.equal_texts import loss_without_equal_texts, say_equal, text_ids
from kernels.training.extras.ranking import ranking_loss  # noqa: F401 - for those who import it from here
from kernels.training.loop import epoch_steps, half_products, set_lr, sum_gradients, warmup_linear
from kernels.training.run import Run
from kernels.training.tables import describe_table, empty_cell, read_table
from kernels.training.text.encoders import build_encoder, describe_model, set_dropout
from kernels.training.text.evaluation import HeldOut, score
from kernels.training.text.mlm import free_decoder, masked_lm_loss
from kernels.training.text.sts import load_sts, spearman  # noqa: F401 - also called from here
from kernels.training.text.tokens import tokenise_table

# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """The Table of rows of sentences; fills the flags that the number of columns decides (MODES)."""
    header, table = read_table(path, empty_cell, roles=sentence_flags.roles_of(args), columns=args.columns)
    columns = len(next(iter(table))[1])
    fill(args, MODES[min(columns, 3)] | (SCRATCH if args.model == "scratch" else {}))
    if len(table) < 2 or args.batch_size > len(table):
        fail(f"{path}: {len(table)} rows, wanted at least 2 and --batch-size, which is {args.batch_size}")
    sentence_flags.check(args, path, columns)                  # args.count: texts of a row in a batch
    say("simcse", f"{args.mode}: {describe_table(table, header)}")
    return table


def build_model(args, run):
    """The encoder without its pretrained pooler, and what is trained beside it: the head, a masked LM."""
    auto = AutoModelForMaskedLM if args.mlm_weight else AutoModel
    head, columns = ("train-only", 1) if args.mode == "unsupervised" else ("keep", args.count)
    model = build_encoder(args, run, "cls", head, auto, columns=columns)
    if args.dropout is not None:
        set_dropout(model.encoder, args.dropout, args.model)
    if model.lm is not None and not args.masked:
        free_decoder(model.lm)
    say("model", describe_model(model, args))
    return model.to(run.device)


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def simcse_loss(z1, z2, z3=None, temperature=0.05, hard_negative_weight=0.0, *, offset=0, ids=None,
                impl="auto"):
    """Mean loss of N anchors z1 against their positives z2, the other positives and any hard negatives z3.

    z1                    (N, D) raw embeddings, any float type; normalised here, a zero vector has cosine 0
    z2                    (M, D) the same of positives; row offset + i belongs to anchor i
    z3                    (M, D) or (M, n, D) the same of hard negatives, n a row; None: there are none
    hard_negative_weight  w = log α, added to the logits of the anchor's own hard negatives
    offset                this rank's first row where z2, z3 and ids are gathered from all ranks
    ids                   (M, 1 + n) integers, of the texts of z2 and z3: a text with the id of the anchor's
                          own positive is no negative of it; None: all are
    returns               scalar float32, float64 for float64; an anchor without negatives: 0
    source                Gao et al. 2021, the unsupervised and the supervised objective
    """
    check_arguments(z1, z2, z3, hard_negative_weight, offset, ids)
    hard = [] if z3 is None else [z3] if z3.ndim == 2 else z3.unbind(1)
    z1, z2, *hard = (F.normalize(z, dim=1, eps=1e-8) for z in (z1, z2, *hard))
    if ids is not None:
        return loss_without_equal_texts(z1, z2, hard, ids, temperature, hard_negative_weight, offset, impl)
    own = slice(offset, offset + len(z1))                      # the keys of these anchors
    lse = functools.partial(similarity_lse, z1, temperature=temperature, exclude="diagonal", offset=offset,
                            impl=impl)                         # log Σ_{j≠i} exp s(z1_i, ·_j)
    negatives = lse(z2)
    positive = (z1 * z2[own]).sum(1) / temperature
    for z in hard:                                             # one column in the paper
        weighted = hard_negative_weight + (z1 * z[own]).sum(1) / temperature
        negatives = torch.logaddexp(torch.logaddexp(negatives, weighted), lse(z))
    return -F.logsigmoid(positive - negatives).mean()         # = log(exp positive + exp negatives) − positive


def check_arguments(z1, z2, z3, hard_negative_weight, offset, ids):
    """Raise ValueError where an argument of simcse_loss does not fit the others."""
    checks.check_dense("z3", z3)
    several = getattr(z3, "ndim", 2) == 3
    n = 0 if z3 is None else z3.shape[1] if several else 1
    check_rows(offset, z1=(z1, "N D"), z2=(z2, "M D"), z3=(z3, "M n D" if several else "M D", None),
               ids=(ids, "M t", int, None), t=1 + n)
    checks.check_alike(z1=z1, z2=z2, z3=z3)
    checks.check_number("hard_negative_weight", hard_negative_weight, -torch.inf, device=z1.device)


def compute_loss(model, batch, rows, args, ids=None):
    """This rank's part of the loss of a batch of `rows` rows, and the numbers to log.

    ids     of the texts of all ranks' keys, with --ignore-equal
    """
    z1, *keys = model(batch).chunk(args.count)                 # anchors; positives and any hard negatives
    z2, *hard = (gather_rows(z, rows) for z in keys)           # of all ranks
    with half_products(z1, args):
        loss = simcse_loss(z1, z2, torch.stack(hard, 1) if hard else None, args.temperature,
                           args.hard_negative_weight, offset=own_rows(rows).start, ids=ids, impl=args.impl)
    loss = loss * (len(z1) / rows)
    values = {"loss": loss.detach()}
    if model.lm is not None:
        mlm = masked_lm_loss(model, batch, args.impl)
        loss, values["mlm"] = loss + args.mlm_weight * mlm, mlm.detach()
    return loss, values


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None, data=None):
    """data: for --data, texts or rows in a list or array, a dict of columns, DataFrame, Dataset, or path."""
    args = make_parser().parse_args(argv, data=data)
    if args.evaluate:
        return score(args, __file__)
    table = load_data(args.data, args)
    held_out = HeldOut(args)
    run = Run(args, __file__)
    model = build_model(args, run)
    if args.others:  # views, losses or schedules of other papers
        from kernels.training.extras.sentence_papers import train
        return train(args, run, model, table, held_out, simcse_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
    total = args.steps or args.epochs * epoch_steps(len(table), args.batch_size, run.world)
    run.begin(model, optimizer, total)
    tokens = tokenise_table(table, model, run)
    if args.ignore_equal:
        say_equal(tokens)
    held_out.before(model, run)
    model.train()
    for step, rows in run.steps(total, len(tokens)):
        set_lr(optimizer, warmup_linear(step - 1, total, 0, args.lr))
        batch = model.batch(*tokens.views(rows[own_rows(len(rows))], args.count))
        ids = text_ids(tokens, rows).to(run.device) if args.ignore_equal else None
        loss, values = compute_loss(model, batch, len(rows), args, ids)
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
