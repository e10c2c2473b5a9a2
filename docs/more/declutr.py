"""DeCLUTR: Deep Contrastive Learning for Unsupervised Textual Representations. Giorgi et al., ACL 2021, arXiv
2006.03659.

Each document gives A anchors: spans of its text. Each anchor has P positives: spans that overlap or touch it.
Training pulls an anchor to the mean embedding of its positives, and pushes the anchor away from all other
anchors and means, including those of the same document. The encoder also learns to predict masked tokens of
the anchors (L_MLM). N documents have AN anchor embeddings and AN means, together z_1 ... z_2AN. z_i' is the
mean of the positives of anchor z_i; if z_i is a mean, z_i' is its anchor. s(i, j) = cos(z_i, z_j) / τ:

    L = 1/2AN Σ_i [ −s(i, i') + log Σ_{j≠i} exp s(i, j) ] + L_MLM

    python docs/more/declutr.py --data documents.jsonl --dev stsb-dev.tsv --form code --out out/declutr
    python docs/more/declutr.py --model roberta-base --data documents.jsonl --dev stsb-dev.tsv
    torchrun --nproc-per-node 4 docs/more/declutr.py --data documents.jsonl --out out/declutr-4

Data: a .txt file has one document per line; other files have a column of documents. A document needs at least
2 · A · --max-length tokens for A anchors, else it is skipped. --dev and --test: as for simcse.py.

Published result of DistilRoBERTa: 77.50 after and 72.58 before training (mean of SentEval's downstream tasks
without SNLI). The first command above uses the settings of this training if
documents.jsonl contains the documents of OpenWebText with at least 2,048 tokens.

Both forms sample spans as the released code does: a document is divided into cells of --max-length tokens,
and each anchor lies within one cell. --form code also follows the released code here:
    MLM    anchor embeddings come from masked text; the MLM decoder shares the encoder's word embeddings
Departures from the released code:
- The released code divides contrastive gradients by the number of GPUs; this script does not.
- The released code drops the last batch of an epoch if the batch is not full; this one uses it.
"""
import os
import random
import sys

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForMaskedLM

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))  # where kernels/ is
from kernels import embed_in_chunks, nt_xent, own_rows
from kernels.training.data import empty_cell, read_table
from kernels.training.errors import command, fail, log
from kernels.training.flags import ScriptParser, at_least, check_batch_size, fill_defaults, text_flags
from kernels.training.loop import all_reduce_gradients, decay_groups, set_lr, steps_per_epoch, warmup_linear
from kernels.training.precision import gather_keys, loss_autocast
from kernels.training.progress import progress
from kernels.training.run import Run
from kernels.training.text.encoders import build_encoder, describe_model
from kernels.training.text.evaluation import Evaluator, evaluate_model
from kernels.training.text.mlm import embed_masked, masked_lm_loss, share_of_mean, untie_decoder
from kernels.training.text.tokens import NO_LIMIT, restore_order, text_batches, tokenise, tokenise_table
from uncorrected_adamw import UncorrectedAdamW

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = ScriptParser(__doc__)
    add = parser.add_argument
    text_flags(
        parser, model="distilroberta-base", out="out/declutr", form="paper", columns=(None, "the only one"),
        eval_every=(125, "125 (ours)"), max_length=(512, "512 (paper); also the longest span"),
        pooling=("avg", "avg (paper)"), head=(None, "as saved with --model, else none"),
        batch_size=(None, "16 documents (paper), 8 with --model scratch"),
        epochs=(None, "1 (paper), 10 with --model scratch"),
        lr=(None, "5e-5 (paper), 1e-3 with --model scratch; in the first tenth of the steps the rate rises "
                  "from 1/32 of this value to this value, then it falls back to 1/32"))
    add("--spans", nargs=2, type=at_least(1, int), default=[2, 2], metavar=("A", "P"),
        help="A: number of anchors per document; P: number of positives per anchor; default 2 2 (paper)")
    return parser


PAPER = dict(batch_size=16, epochs=1, lr=5e-5)
SCRATCH = dict(batch_size=8, epochs=10, lr=1e-3)               # defaults with --model scratch
MIN_SPAN = 32                                                  # minimum number of tokens of a span (paper)


# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """Read --data into a Table with one document per row, and set the defaults of flags not given."""
    _, table = read_table(path, empty_cell, columns=args.columns)
    if len(next(iter(table))[1]) > 1:
        fail(f"{path}: several columns, expected one column of documents; choose it by --columns")
    fill_defaults(args, SCRATCH if args.model == "scratch" else PAPER)
    log("declutr", f"{args.form}: {len(table):,} documents from {path}")
    return table


def build_model(args, run):
    """Load the encoder and its masked-LM head. --form paper gives the head its own word embeddings."""
    model = build_encoder(args, run, "avg", None, AutoModelForMaskedLM)
    if args.form == "paper":
        untie_decoder(model.lm)
    log("model", describe_model(model, args))
    return model.to(run.device)


def long_documents(table, model, args):
    """Return the row numbers of the documents with at least 2 · A · --max-length tokens."""
    need, lengths = 2 * args.spans[0] * args.max_length, []
    texts = (model.add_prompts(cells)[0] for _, cells in progress(table, "documents"))
    for part in text_batches(texts):
        lengths += [len(ids) - 2 for ids in tokenise(part, model.tokenizer, NO_LIMIT)[0]]  # 2: [CLS], [SEP]
    long = [i for i, length in enumerate(lengths) if length >= need]
    log("spans", f"{len(table) - len(long):,} documents left out: they have fewer than {need:,} tokens")
    check_batch_size(len(long), table.path, args.batch_size, "long documents")
    return long


def make_batch(tokens, picked, model, args):
    """Return (batch of anchors, batch of positives) of the documents whose numbers are in `picked`. Anchors
    are in document order. Positives: first positives of all anchors, then second positives of all, ..."""
    rng = random.Random(int(torch.randint(2**62, ())))         # --resume restores PyTorch's random state
    anchors, *positives = sample_spans([tokens[i][0] for i in picked], args, rng)
    return model.batch(anchors), model.batch(*positives)


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def sample_spans(documents, args, rng):
    """Sample spans as the released code does. The token ids of a document, and of a span, have one special
    token at each end. Return 1 + P lists of token ids: of all anchors, of the first positive of each anchor,
    of the second positive, and so on."""
    (count, positives), size = args.spans, args.max_length
    views = [[] for _ in range(1 + positives)]
    for ids in documents:
        first, last = ids[:1], ids[-1:]
        ids = ids[1:-1]
        cells = [*range(len(ids) // size)]
        for left in range(count, 0, -1):
            length = span_length(4, 2, size, rng)
            start = sample_cell(cells, left, rng) * size + rng.randint(0, size - length)
            spans = [(start, length)]
            for _ in range(positives):
                more = span_length(2, 4, size, rng)
                least, most = max(0, start - more), min(start + length, len(ids) - more)
                spans.append((rng.randint(least, most), more))
            for view, (at, length) in zip(views, spans):
                length = min(length, size - 2)                 # leave room for the special tokens
                view.append(np.concatenate([first, ids[at : at + length], last]))
    return views


def span_length(a, b, longest, rng):
    """Sample a span length: Beta(a, b), stretched to the range min(MIN_SPAN, longest // 2) to `longest`."""
    least = min(MIN_SPAN, longest // 2)
    return int(rng.betavariate(a, b) * (longest - least) + least)


def sample_cell(cells, left, rng):
    """Sample one of the free `cells`. Remove it and its neighbours from `cells`. If a cell from the middle
    could leave too few cells for the `left` anchors that still need one, take the first or the last cell."""
    enough = len(cells) // left >= left
    at = rng.randrange(len(cells)) if enough else rng.choice([0, len(cells) - 1])
    cell = cells[at]
    del cells[max(0, at - 1) : at + 2]
    return cell


def masked_embeddings(model, batch, impl="auto"):
    """Mask tokens of a batch and embed it. Return (embeddings (n, H), this rank's part of the mean cross
    entropy of the masked tokens). One forward pass computes both, as in the released code."""
    def embed_group(group):                                    # appends the columns loss sum and token count
        z, sums = embed_masked(model, group, impl)
        return torch.cat([z, F.pad(sums, (0, 0, 0, len(z) - 1))], 1)

    found = embed_in_chunks(embed_group, batch, model.lm if model.chunk_size else None)
    z, sums = found.split([found.shape[1] - 2, 2], 1)
    return restore_order(z, batch), share_of_mean(sums)


def compute_loss(model, batch, rows, args):
    """Return this rank's part of the loss of the global batch, and the values to log. batch: this rank's
    documents, from make_batch; rows: number of documents of the global batch."""
    (anchors, positives), count = batch, args.spans[0]
    if args.form == "code":
        z1, mlm = masked_embeddings(model, anchors, args.impl)
    else:
        z1, mlm = model(anchors), masked_lm_loss(model, anchors, args.impl)
    z2 = torch.stack(model(positives).chunk(args.spans[1])).mean(0)
    gathered = None
    if len(z1) < rows * count:                                 # with several ranks, gather a row per document
        gathered = [gather_keys(z.unflatten(0, (-1, count)), rows, args).flatten(0, 1) for z in (z1, z2)]
    with loss_autocast(z1, args):
        loss = nt_xent(z1, z2, args.temperature, gathered=gathered, offset=own_rows(rows).start * count,
                       normalize=True, impl=args.impl)
    loss = loss * (len(z1) / (rows * count))
    return loss + mlm, {"loss": loss.detach(), "mlm": mlm.detach()}


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
    documents = long_documents(table, model, args)
    optimizer = UncorrectedAdamW(decay_groups(model, 0.1), args.lr, eps=1e-6)
    total = args.steps or args.epochs * steps_per_epoch(len(documents), args.batch_size)
    run.begin(model, optimizer, total)
    tokens = tokenise_table(table, model, run, whole=True)
    evaluator.evaluate_before(model, run)
    model.train()
    for step, picked in run.steps(total, documents):           # picked: document numbers of the global batch
        rate = warmup_linear(step - 1, total, total // 10, args.lr)
        set_lr(optimizer, (args.lr + 31 * rate) / 32)          # slanted triangular schedule of AllenNLP
        batch = make_batch(tokens, picked[own_rows(len(picked))], model, args)
        loss, values = compute_loss(model, batch, len(picked), args)
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
