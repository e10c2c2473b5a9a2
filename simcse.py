"""SimCSE: Simple Contrastive Learning of Sentence Embeddings. Gao, Yao, Chen, EMNLP 2021, arXiv 2104.08821.

Training pulls the embedding of a sentence, the anchor, towards its positive and pushes it away from the other
sentences of the batch. In unsupervised training, the positive is the same sentence, encoded again with
another dropout mask. In supervised training, the anchor entails its positive and contradicts its hard
negative. For N anchors z1_i with positives z2_i and, if there are any, hard negatives z3_i, the loss is

    L = 1/N Σ_i [ −s(z1_i, z2_i) + log( Σ_j exp s(z1_i, z2_j) + Σ_j α^[i=j] exp s(z1_i, z3_j) ) ]

s(a, b) is cos(a, b) / τ with the temperature τ. The weight α^[i=j] is α for the anchor's own hard negative
and 1 for all others. --hard-negative-weight is w = log α; without hard negatives, this flag has no effect.

    python simcse.py --model scratch --data tests/data/nli.csv --dev tests/data/sts.tsv
    python simcse.py --data wiki1m_for_simcse.txt --dev stsb-dev.tsv --out out/unsupervised
    torchrun --nproc-per-node 4 simcse.py --data nli_for_simcse.csv --dev stsb-dev.tsv --out out/supervised

Data: a .txt file with one sentence per line, or a .csv .tsv .json .jsonl .parquet file. The script finds the
columns by --columns, else by common names in a header (sent0 sent1 hard_neg, query positive negative_1 ...),
else by their order. The number of columns decides the kind of training:
    1 column   unsupervised                     I ate an apple.
    2 columns  anchor, positive                 I ate an apple.,Someone ate fruit.
    3 columns  anchor, positive, hard negative  I ate an apple.,Someone ate fruit.,Nobody ate.
    4 or more  with several hard negatives      I ate an apple.,Someone ate fruit.,Nobody ate.,I ate a pear.
A JSON row with lists, {"query": "q", "pos": ["a", "b"], "neg": ["c", "d"]}, is read as one row per positive.
--dev and --test: sentence pairs with scores (sentence1, sentence2, score) or retrieval data (query, positive,
optional hard negatives; MRR@10). The best checkpoint on --dev is kept; without --dev, the last checkpoint.

Published results of BERT-base (Spearman × 100), for the second and the third command:
    unsupervised    82.5 on STS-B dev    76.25 as the mean of seven STS test sets
    supervised      86.2                 81.57
Unsupervised results differ by about two points between seeds. The paper's flags for other models:
    BERT-large      --lr 1e-5
    RoBERTa-base    unsupervised: --batch-size 512 --lr 1e-5
    RoBERTa-large   unsupervised: --batch-size 512 --lr 3e-5    supervised: --lr 1e-5

Departures from the released code:
  - The released code reads an empty cell as one space; this script reports an error.
  - With several GPUs, the released code divides the gradient by the number of GPUs; this script does not.
"""
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoModelForMaskedLM

from kernels import RingRows, check_rows, checks, own_rows, similarity_lse
from kernels.training.data import SENTENCE_COLUMNS, describe_table, empty_cell, log_first_row, read_table
from kernels.training.errors import command, log
from kernels.training.flags import ScriptParser, at_least, check_batch_size, fill_defaults, text_flags
from kernels.training.loop import all_reduce_gradients, set_lr, steps_per_epoch, warmup_linear
from kernels.training.papers.simcse_equal_texts import log_equal_texts, text_ids
from kernels.training.precision import gather_keys, loss_autocast, unit_rows
from kernels.training.run import Run
from kernels.training.text.encoders import build_encoder, describe_model, set_dropout
from kernels.training.text.evaluation import Evaluator, evaluate_model
from kernels.training.text.mlm import masked_lm_loss, untie_decoder
from kernels.training.text.tokens import tokenise_table

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = ScriptParser(__doc__)
    add = parser.add_argument
    text_flags(
        parser, model="bert-base-uncased", out="out/simcse", hard_negative_weight=(0.0, "0 (paper)"),
        columns=(None, "chosen by the header, else all"),
        eval_every=(125, "125 (released scripts; the paper has 250)"),
        pooling=(None, "as saved with --model, else cls (paper), avg for scratch, last for a decoder"),
        head=(None, "as saved with --model; else for cls pooling keep (unsupervised: train-only), else none"),
        batch_size=(None, "512, or 64 if unsupervised (paper), 32 with --model scratch"),
        epochs=(None, "3, or 1 if unsupervised (paper), 4 with --model scratch"),
        lr=(None, "5e-5, 3e-5 if unsupervised (paper), 2e-3 with --model scratch; linear decay to 0"))
    add("--ignore-equal", action="store_true",
        help="leave out negatives that mean the same as the anchor. Texts of a batch mean the same if they "
             "are equal, anchor and positive of one row, or linked through other texts; default off (paper)")
    add("--mlm-weight", type=at_least(0), default=0.0,
        help="weight of the masked-LM loss; 0: off; default 0 (paper; its variant with this loss has 0.1)")
    add("--dropout", type=at_least(0, most=0.999), group="model",
        help="dropout probability of the encoder in training; default the model's own, 0.1 for BERT (paper)")
    parser.add_shared_flags("--ring")
    return parser


# Each number of columns has its own flag defaults (paper, BERT-base). 3 stands for 3 or more columns.
DEFAULTS_BY_COLUMNS = {
    1: dict(mode="unsupervised", batch_size=64, lr=3e-5, epochs=1),
    2: dict(mode="pairs", batch_size=512, lr=5e-5, epochs=3),
    3: dict(mode="supervised", batch_size=512, lr=5e-5, epochs=3)}
SCRATCH_DEFAULTS = dict(pooling="avg", batch_size=32, lr=2e-3, epochs=4)       # used with --model scratch


# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """Return the Table of --data, and set the flags whose defaults depend on its number of columns."""
    header, table = read_table(path, empty_cell, roles=SENTENCE_COLUMNS, columns=args.columns)
    columns = len(next(iter(table))[1])
    scratch = SCRATCH_DEFAULTS if args.model == "scratch" else {}
    fill_defaults(args, DEFAULTS_BY_COLUMNS[min(columns, 3)] | scratch)
    check_batch_size(len(table), path, args.batch_size)
    args.count = max(columns, 2)         # count is the number of texts per row; a single column is used twice
    log("simcse", f"{args.mode}: {describe_table(table, header)}")
    log_first_row(table)
    return table


def build_model(args, run):
    """Return the encoder with its pooling and head, and with a masked-LM decoder if --mlm-weight is not 0."""
    auto = AutoModelForMaskedLM if args.mlm_weight else AutoModel
    head = "train-only" if args.mode == "unsupervised" else "keep"
    columns = 1 if args.mode == "unsupervised" else args.count
    model = build_encoder(args, run, "cls", head, auto, columns=columns)
    if args.dropout is not None:
        set_dropout(model.encoder, args.dropout, args.model)
    if model.lm is not None:
        untie_decoder(model.lm)
    log("model", describe_model(model, args))
    return model.to(run.device)


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def simcse_loss(z1, z2, z3=None, temperature=0.05, hard_negative_weight=0.0, *, offset=0, ids=None,
                impl="auto"):
    """Return the mean loss of N anchors. Embeddings of one float type and any norm are normalised here.

    z1                    (N, D) anchors; a zero vector has cosine 0 with every vector
    z2                    (M, D) positives of all ranks, or RingRows; row offset + i is the positive of z1_i
    z3                    (M, D) or (M, n, D) hard negatives, one or n per row of z2, or RingRows; None: none
    hard_negative_weight  w = log α, added to the logits of the anchor's own hard negatives
    offset                row of z2, z3 and ids that belongs to this rank's first anchor
    ids                   (M, 1 + n) integers that identify the texts in z2 and z3. Negatives with the id of
                          the anchor's positive are left out. None: all negatives are used
    returns               scalar: float64 for float64 inputs, else float32; an anchor without negatives adds 0
    source                Gao et al. 2021, the unsupervised and the supervised objective
    """
    z3 = z3[:, None] if z3 is not None and z3.ndim == 2 else z3
    check_rows(offset, z1=(z1, "N D"), z2=(z2, "M D", RingRows), z3=(z3, "M n D", RingRows, None),
               ids=(ids, "M t", int, None), t=1 if z3 is None else 1 + z3.shape[1])
    checks.check_same_dtype(z1=z1, z2=z2, z3=z3)
    checks.check_number("hard_negative_weight", hard_negative_weight, -torch.inf, device=z1.device)
    hard = [] if z3 is None else [unit_rows(z) for z in z3.unbind(1)]
    z1, z2 = unit_rows(z1), unit_rows(z2)
    local = slice(offset, offset + len(z1))                    # these rows of z2 and z3 belong to the anchors

    def negatives_lse(keys, column):          # log Σ exp s(z1_i, key_j) over j ≠ i; ids may exclude more keys
        exclude = "diagonal" if ids is None else ("diagonal", ids[local, 0], ids[:, column])
        return similarity_lse(z1, keys, temperature, exclude=exclude, offset=offset, impl=impl)

    positive = (z1 * z2[local]).sum(1) / temperature
    negatives = negatives_lse(z2, 0)
    for column, z in enumerate(hard, 1):                       # the paper has one hard negative per anchor
        own = hard_negative_weight + (z1 * z[local]).sum(1) / temperature
        if ids is not None:                # fill with a finite number, because −inf would give a NaN gradient
            own = own.masked_fill(ids[local, column] == ids[local, 0], torch.finfo(own.dtype).min)
        negatives = torch.logaddexp(torch.logaddexp(negatives, own), negatives_lse(z, column))
    return -F.logsigmoid(positive - negatives).mean()         # = log(exp positive + exp negatives) − positive


def compute_loss(model, batch, rows, args, ids=None):
    """Return this rank's part of the loss of a global batch of `rows` rows, and the values to log. batch:
    this rank's texts, from model.batch. ids: as in simcse_loss; None without --ignore-equal."""
    z1, z2, *hard = model(batch).chunk(args.count)
    z2 = gather_keys(z2, rows, args)
    z3 = gather_keys(torch.stack(hard, 1), rows, args) if hard else None
    with loss_autocast(z1, args):
        loss = simcse_loss(z1, z2, z3, args.temperature, args.hard_negative_weight,
                           offset=own_rows(rows).start, ids=ids, impl=args.impl)
    loss = loss * (len(z1) / rows)
    values = {"loss": loss.detach()}
    if model.lm is not None:
        mlm = masked_lm_loss(model, batch, args.impl)
        loss = loss + args.mlm_weight * mlm
        values["mlm"] = mlm.detach()
    return loss, values


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
    total = args.steps or args.epochs * steps_per_epoch(len(table), args.batch_size)
    run.begin(model, optimizer, total)
    tokens = tokenise_table(table, model, run)
    log_equal_texts(tokens, args)
    evaluator.evaluate_before(model, run)
    model.train()
    for step, picked in run.steps(total, len(tokens)):     # picked holds the row numbers of the global batch
        set_lr(optimizer, warmup_linear(step - 1, total, 0, args.lr))
        batch = model.batch(*tokens.views(picked[own_rows(len(picked))], args.count))
        ids = text_ids(tokens, picked, run.device) if args.ignore_equal else None
        loss, values = compute_loss(model, batch, len(picked), args, ids)
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
