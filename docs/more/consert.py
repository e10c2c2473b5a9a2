"""ConSERT: A Contrastive Framework for Self-Supervised Sentence Representation Transfer. Yan et al., ACL
2021, arXiv 2105.11741.

The encoder reads two changed views of each sentence, or a view of an anchor and a view of its positive.
Training pulls the two embeddings together and pushes them away from those of all other sentences. N sentences
have 2N embeddings z_1 ... z_2N. z_i and z_i' are the two views of a sentence, s(i, j) = cos(z_i, z_j) / τ:

    L = 1/2N Σ_i [ −s(i, i') + log Σ_{j≠i} exp s(i, j) ]

    python docs/more/consert.py --model scratch --data tests/data/sentences.txt --dev tests/data/sts.tsv
    python docs/more/consert.py --data sts.txt --dev stsb-dev.tsv --out out/consert
    python docs/more/consert.py --data nli.csv --columns sent0 sent1 --views shuffle dropout --adversarial 0.1

--views names the change of each view:
    dropout              changes nothing: only the encoder's dropout acts, if you give --dropout above 0
    feature_cutoff       sets a fraction of the features to 0, the same features for all tokens of a text
    token_cutoff         sets all features of a fraction of the tokens to 0
    embedding_dropout    sets a fraction of all entries of the token embeddings to 0
    shuffle              permutes the positions of the tokens
The cutoffs and embedding_dropout change the input of the encoder's first layer, and rescale no other values.
--adversarial needs positives. It adds noise to the same input of the anchors, along the gradient of the loss.

Data: a .txt file with one sentence per line, or a table with one column (sentences) or two (anchors
and positives). --dev and --test: as for simcse.py.

Published result of BERT-base: 72.74 after and 53.86 before training (mean Spearman × 100 of seven STS test
sets; use --evaluate --pooling avg_top2). The second command above uses the settings of this training if
sts.txt contains the 89,192 sentences of all splits of the seven data sets, without scores.

Departures from the released code: the loss is the paper's mean over all anchors, not 0.15 times (mean over
first views + mean over second views). Only the released code stops after ten evaluations without progress.
"""
import contextlib
import math
import os
import sys

import torch
import torch.nn.functional as F

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))  # where kernels/ is
from kernels import embed_in_chunks, nt_xent, own_rows
from kernels.training.data import SENTENCE_COLUMNS, describe_table, empty_cell, log_first_row, read_table
from kernels.training.errors import command, fail, log
from kernels.training.flags import ScriptParser, at_least, check_batch_size, fill_defaults, text_flags
from kernels.training.loop import all_reduce_gradients, decay_groups, set_lr, steps_per_epoch, warmup_linear
from kernels.training.precision import gather_keys, loss_autocast
from kernels.training.run import Run
from kernels.training.text.encoders import build_encoder, describe_model, set_dropout
from kernels.training.text.evaluation import Evaluator, evaluate_model
from kernels.training.text.tokens import restore_order, tokenise_table
from uncorrected_adamw import UncorrectedAdamW

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────

# {view: default of --view-rates}
CUTOFFS = dict(feature_cutoff=0.2, token_cutoff=0.15, embedding_dropout=0.2)
VIEWS = dict(dropout=0.0, shuffle=0.0) | CUTOFFS
RELEASED = dict(batch_size=96, lr=5e-7, epochs=10)
SCRATCH = dict(batch_size=32, lr=2e-4, epochs=4)               # defaults with --model scratch


def make_parser():
    parser = ScriptParser(__doc__)
    add = parser.add_argument
    text_flags(
        parser, model="bert-base-uncased", out="out/consert", columns=(None, "by the header, else all"),
        eval_every=(200, "200 (released script)"), max_length=(64, "64 (released script)"),
        temperature=(0.1, "0.1 (paper)"), pooling=("avg", "avg (paper)"),
        head=(None, "as saved with --model, else none"),
        batch_size=(None, "96 (paper), 32 with --model scratch"),
        epochs=(None, "10 (released script), 4 with --model scratch"),
        lr=(None, "5e-7 (paper), 2e-4 with --model scratch; warm-up over a tenth of the steps, then linear "
                  "decay to 0"))
    add("--views", nargs=2, choices=[*VIEWS], default=["feature_cutoff", "shuffle"], metavar="VIEW",
        help="changes of the two views (see above); default feature_cutoff shuffle (paper)")
    add("--view-rates", nargs=2, type=at_least(0, most=0.999), metavar="RATE",
        help="fraction of features, tokens or entries that each view changes; default 0.2 for "
             "feature_cutoff (paper) and embedding_dropout, 0.15 for token_cutoff")
    parser.add_shared("--adversarial", 0.0, "0 (off); requires data with positives")
    add("--dropout", type=at_least(0, most=0.999), group="model", default=0.0,
        help="dropout probability of the encoder in training; default 0 (released script for BERT-base)")
    return parser


# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """Read --data into a Table of one or two columns. Set the defaults of flags not given."""
    header, table = read_table(path, empty_cell, roles=SENTENCE_COLUMNS, columns=args.columns)
    columns = len(next(iter(table))[1])
    fill_defaults(args, SCRATCH if args.model == "scratch" else RELEASED)
    fill_defaults(args, dict(view_rates=[VIEWS[name] for name in args.views]))
    if columns > 2:
        fail(f"{path}: {columns} columns, expected 1 (sentences) or 2 (anchors, positives); see --columns")
    check_batch_size(len(table), path, args.batch_size)
    if args.adversarial and columns == 1:
        fail(f"--adversarial: {path} has 1 column, expected an anchor and a positive; see --columns")
    log("consert", describe_table(table, header))
    log_first_row(table)
    return table


def build_model(args, run):
    """Load the encoder, which needs BERT's module `embeddings`."""
    model = build_encoder(args, run, "avg", None)
    set_dropout(model.encoder, args.dropout, args.model)
    # in XLM, `embeddings` is only the table of word embeddings, without positions
    if isinstance(getattr(model.encoder, "embeddings", None), (type(None), torch.nn.Embedding)):
        fail(f"--model {args.model}: found {type(model.encoder).__name__}, expected a model like BERT")
    log("model", describe_model(model, args))
    return model.to(run.device)


def make_batch(model, tokens, picked):
    """Return the batch of the n rows whose numbers are in `picked`. A batch is a list of groups [row indices,
    token ids, mask, view numbers]. Row v · n + i of the batch is view v of text i; v is 0 or 1."""
    return [[*group, group[0] // len(picked)] for group in model.batch(*tokens.views(picked, 2))]


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def cutoff(x, mask, name, rate):
    """Set a fraction of each text's features, tokens or entries to 0; round down, as the released code does.

    x       (n, L, D) input of the encoder's first layer
    mask    (n, L) bool, False at padding; feature_cutoff also changes padding
    """
    parts = mask[:, :, None]                                   # True for parts that may become 0
    if name == "feature_cutoff":
        parts = torch.ones_like(x[:, :1], dtype=torch.bool)
    elif name == "embedding_dropout":
        parts = parts.expand_as(x)
    keys = random_keys(parts.flatten(1))
    counts = (parts.flatten(1).sum(1, keepdim=True).double() * rate).long()
    zeros = keys < keys.sort(1).values.gather(1, counts)       # True for the `counts` smallest keys of a text
    return x.masked_fill(zeros.view(parts.shape), 0)


def random_keys(eligible):
    """Return random numbers from 0 to 1 where `eligible` is True, and 2 elsewhere, to sort these last."""
    return torch.rand(eligible.shape, device=eligible.device, dtype=torch.float64).masked_fill_(~eligible, 2)


def reorder(x, order):
    """Permute the tokens of each text: token j of text i becomes x[i, order[i, j]], for x of (n, L, D)."""
    return x.gather(1, order[:, :, None].expand_as(x))


@contextlib.contextmanager
def changed_embeddings(encoder, args, mask, view, noise=None):
    """Within this context the encoder applies shuffle, noise and cutoffs to the texts that it reads.

    shuffle permutes the word embeddings, so that words get other positions, and restores the order of words
    in the output of the last layer. Noise and cutoffs change the output of the module `embeddings`.

    mask     (n, L) attention mask of the texts
    view     (n,) view of each text, an index into args.views
    noise    (n, L, D) noise that is added before the cutoffs, or None
    """
    real = mask.bool()
    shuffled = torch.tensor([name == "shuffle" for name in args.views], device=mask.device)[view]
    order = torch.arange(mask.shape[1], device=mask.device).repeat(len(mask), 1)
    order[shuffled] = random_keys(real[shuffled]).argsort(dim=1, stable=True)

    def shuffle(_, __, words):
        return reorder(words, order)

    def undo_shuffle(_, __, output):                           # pooling may read the first or last token
        output.last_hidden_state = reorder(output.last_hidden_state, order.argsort(1))
        return output

    def change(_, __, x):
        x = x if noise is None else x + reorder(noise, order)  # reorder moves the noise with its token
        for number, (name, rate) in enumerate(zip(args.views, args.view_rates)):
            rows = (view == number).nonzero()[:, 0]
            if name in CUTOFFS and len(rows):
                x = x.index_put((rows,), cutoff(x[rows], real[rows], name, rate))
        return x

    with (encoder.get_input_embeddings().register_forward_hook(shuffle),
          encoder.embeddings.register_forward_hook(change),
          encoder.register_forward_hook(undo_shuffle)):
        yield


def encode(model, batch, args):
    """Return (2n, H) embeddings of a batch: first the n first views, then the n second views."""
    def embed(group):
        _, ids, mask, *more = group
        with changed_embeddings(model.encoder, args, mask, *more):
            return model.pool(ids, mask)

    return restore_order(embed_in_chunks(embed, batch, model if model.chunk_size else None), batch)


def add_adversarial_noise(model, batch, rows, args):
    """Return the batch with noise for its first views. Noise moves the embedding of each token by a step of
    length --adversarial, along the gradient of the loss with respect to this embedding."""
    width = model.encoder.config.hidden_size
    noise = [torch.zeros(*ids.shape, width, device=ids.device, requires_grad=True) for _, ids, *_ in batch]
    loss, _ = compute_loss(model, [[*group, step] for group, step in zip(batch, noise)], rows, args)
    loss.backward()
    changed = []
    for group, step in zip(batch, noise):
        _, _, mask, view = group
        direction = F.normalize(step.grad, dim=2) * (mask * (view == 0)[:, None])[:, :, None]
        changed.append([*group, args.adversarial * direction])
    return changed


def compute_loss(model, batch, rows, args):
    """Return this rank's part of the loss of the global batch, and the values to log. batch: this rank's
    rows, made by make_batch; rows: number of rows of the global batch."""
    z1, z2 = encode(model, batch, args).chunk(2)
    gathered = None if len(z1) == rows else [gather_keys(z, rows, args) for z in (z1, z2)]
    with loss_autocast(z1, args):
        loss = nt_xent(z1, z2, args.temperature, gathered=gathered, offset=own_rows(rows).start,
                       normalize=True, impl=args.impl)
    loss = loss * (len(z1) / rows)
    return loss, {"loss": loss.detach()}


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
    total = args.steps or args.epochs * steps_per_epoch(len(table), args.batch_size)
    warmup = math.ceil(total / 10)
    optimizer = UncorrectedAdamW(decay_groups(model, 0.01), args.lr, eps=1e-6)
    run.begin(model, optimizer, total, warmup)
    tokens = tokenise_table(table, model, run)
    evaluator.evaluate_before(model, run)
    model.train()
    for step, picked in run.steps(total, len(tokens)):
        set_lr(optimizer, warmup_linear(step - 1, total, warmup, args.lr))
        batch = make_batch(model, tokens, picked[own_rows(len(picked))])
        if args.adversarial:
            batch = add_adversarial_noise(model, batch, len(picked), args)
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
