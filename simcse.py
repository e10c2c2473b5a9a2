"""SimCSE: Simple Contrastive Learning of Sentence Embeddings. Gao, Yao, Chen, EMNLP 2021, arXiv 2104.08821.

A sentence is pulled to its positive and pushed from the rest of the batch. Unsupervised, the positive is the
same sentence encoded again: dropout is the only noise. Supervised, it is an entailed sentence, and a
contradicted one is a hard negative. With s(a, b) = cos(a, b) / τ, anchors z1, positives z2, hard negatives z3
(if any) and α = exp(w):

    L = 1/N Σ_i [ −s(z1_i, z2_i) + log( Σ_j exp s(z1_i, z2_j) + Σ_j α^[i=j] exp s(z1_i, z3_j) ) ]

Data, a row a line: .txt is sentences, .csv .tsv .json .jsonl have columns, whose order alone counts:
    1 column   unsupervised             I ate an apple.
    2 columns  anchor, positive         I ate an apple.,Someone ate fruit.
    3 columns  and a hard negative      I ate an apple.,Someone ate fruit.,Nobody ate.
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
the one of the global batch, there 1/world of it. Evaluation every 125 steps is the released scripts'; the
paper says 250.
"""
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoModelForMaskedLM

from kernels import gather_rows, own_rows, similarity_lse
from kernels.training.command import Flags, at_least, command, fail, fill, say
from kernels.training.encoders import POOLINGS, SentenceEncoder, begin_linear, describe_model, load_encoder
from kernels.training.loop import epoch_steps, half_products, set_lr, sum_gradients
from kernels.training.mlm import free_decoder, masked_lm_loss
from kernels.training.run import Run
from kernels.training.sts import ScoredPairs, load_sts, spearman  # noqa: F401 - also called from here
from kernels.training.tables import describe_table, empty_cell, read_table, texts_of
from kernels.training.tokens import tokenise_table

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = Flags(__doc__)
    add, common = parser.add_argument, parser.common
    add("--pooling", choices=POOLINGS, help="what is a sentence's embedding; default cls, scratch avg")
    add("--head", choices=("keep", "train-only"),
        help="pooling cls: its MLP at test; default keep, unsupervised train-only (paper)")
    add("--hard-negative-weight", type=at_least(-100), default=0.0, help="w = log α; default 0 (paper)")
    add("--mlm-weight", type=at_least(0), default=0.0, help="of a masked-LM loss; default 0: off; paper 0.1")
    common("--data")
    common("--dev")
    common("--test")
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
    common("--resume")
    common("--impl", "auto")
    common("--precision")
    return parser


# What a flag is where it was not given: by the number of columns (paper, BERT-base), and for a small random
# BERT.
MODES = {
    1: dict(mode="unsupervised", views=2, pooling="cls", head="train-only", batch_size=64, lr=3e-5, epochs=1),
    2: dict(mode="pairs", views=2, pooling="cls", head="keep", batch_size=512, lr=5e-5, epochs=3),
    3: dict(mode="supervised", views=3, pooling="cls", head="keep", batch_size=512, lr=5e-5, epochs=3)}
SCRATCH = dict(pooling="avg", batch_size=32, lr=2e-3, epochs=4)

# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """The Table of rows of sentences; fills the flags that the number of columns decides (MODES)."""
    header, table = read_table(path, empty_cell)
    place, cells = next(iter(table))
    if (columns := len(cells)) not in MODES:
        wanted = "1 (sentence), 2 (anchor, positive) or 3 (and hard negative)"
        fail(f"{path} {place}: {columns} columns, wanted {wanted}")
    fill(args, MODES[columns] | (SCRATCH if args.model == "scratch" else {}))
    if len(table) < 2 or args.batch_size > len(table):
        fail(f"{path}: {len(table)} rows, wanted at least 2 and --batch-size, which is {args.batch_size}")
    say("simcse", f"{args.mode}: {describe_table(table, header)}")
    return table


def build_model(args, run):
    """The encoder without its pretrained pooler, and what is trained beside it: the head, a masked LM."""
    auto = AutoModelForMaskedLM if args.mlm_weight else AutoModel
    loaded, tokenizer = load_encoder(args.model, texts_of(args.data), auto)
    encoder, config, head = loaded.base_model, loaded.config, None
    if args.pooling == "cls":
        head = begin_linear(torch.nn.Linear(config.hidden_size, config.hidden_size), config.initializer_range)
    model = SentenceEncoder(encoder, tokenizer, run, args.pooling, head, keep_head=args.head == "keep")
    model.lm = free_decoder(loaded) if args.mlm_weight else None
    say("model", describe_model(model, args))
    return model.to(run.device)


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def compute_loss(model, batch, rows, args):
    """This rank's part of the contrastive loss of a batch of `rows` rows, and of the masked LM's if it is
    on."""
    z1, *keys = model(batch).chunk(args.views)
    keys = [gather_rows(z, rows) for z in keys]
    flags = dict(temperature=args.temperature, hard_negative_weight=args.hard_negative_weight, impl=args.impl)
    with half_products(z1, args):
        loss = simcse_loss(z1, *keys, offset=own_rows(rows).start, **flags) * (len(z1) / rows)
    values = {"loss": loss.detach()}
    if model.lm is not None:
        mlm = masked_lm_loss(model, batch, args.impl)
        loss, values["mlm"] = loss + args.mlm_weight * mlm, mlm.detach()
    return loss, values


def simcse_loss(z1, z2, z3=None, temperature=0.05, hard_negative_weight=0.0, *, offset=0, impl="auto"):
    """Mean loss of N anchors: z1 against its positive among z2, and against hard negatives z3 if there are
    any.

    z1                    (N, D) raw embeddings, any float type; normalised here, a zero vector has cosine 0
    z2, z3                (M, D) the same of positives and hard negatives; row offset + i belongs to anchor i
    hard_negative_weight  w = log α, added to the logit of the anchor's own hard negative
    offset                this rank's first row where z2 and z3 are gathered from all ranks
    returns               scalar float32, float64 for float64; one anchor without hard negatives: 0
    source                Gao et al. 2021, the unsupervised and the supervised objective
    """
    z1, z2 = F.normalize(z1, dim=1, eps=1e-8), F.normalize(z2, dim=1, eps=1e-8)
    own = slice(offset, offset + len(z1))
    others = dict(temperature=temperature, exclude="diagonal", offset=offset, impl=impl)
    positive = (z1 * z2[own]).sum(1) / temperature
    negatives = similarity_lse(z1, z2, **others)
    if z3 is not None:
        z3 = F.normalize(z3, dim=1, eps=1e-8)
        hard = hard_negative_weight + (z1 * z3[own]).sum(1) / temperature
        negatives = torch.logaddexp(torch.logaddexp(negatives, hard), similarity_lse(z1, z3, **others))
    return -F.logsigmoid(positive - negatives).mean()  # = log(exp positive + exp negatives) - positive


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    table = load_data(args.data, args)
    pairs = ScoredPairs(args)
    run = Run(args, __file__)
    model = build_model(args, run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
    total = args.steps or args.epochs * epoch_steps(len(table), args.batch_size, run.world)
    run.begin(model, optimizer, total)
    tokens = tokenise_table(table, model, run)
    pairs.before(model, run)
    model.train()
    for step, rows in run.steps(total, len(tokens)):
        set_lr(optimizer, args.lr * (total - step + 1) / total)  # from step 1, which has all of it
        batch = model.batch(*tokens.views(rows[own_rows(len(rows))], args.views))
        loss, values = compute_loss(model, batch, len(rows), args)
        optimizer.zero_grad()
        loss.backward()
        sum_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.note(values, lr=optimizer.param_groups[0]["lr"])
        if run.due:
            pairs.judge(model, run)
    pairs.after(model, run)


if __name__ == "__main__":
    main()
