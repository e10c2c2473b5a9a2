"""Mine hard negatives for pairs of texts: texts whose embeddings are close to that of an anchor.

    python -m kernels.training.mine --model out/first --data pairs.csv --out triples.csv
    python simcse.py --model out/first --data triples.csv --out out/second

Each row of --data has an anchor, a positive and, optionally, hard negatives. The output has these columns,
followed by the mined negatives. Without --columns, the columns are found by their header names or, in files
without a header, by their order.

The candidates for a row are the distinct positives of all rows, except the anchor itself and the texts of all
rows with the same anchor. Texts that differ only in white space count as equal. Let p be the cosine of anchor
and positive. The cosine s of anchor and candidate must satisfy

    s ≤ p · (1 − r)    --relative-margin r: candidates that score close to p are often unlabelled positives
    s ≤ p − m          --margin m
    min ≤ s ≤ max      --min-score and --max-score

The remaining candidates are ranked by s, the highest first. --negatives N selects ranks 1 to N. --ranks FIRST
LAST samples N of the ranks FIRST to LAST: FIRST > 1 skips the top ranks, which have the most false negatives.
A row with fewer than N candidates is left out and counted. With the default r = 0.05, s is at most 95 % of p
(TopK-PercPos of NV-Retriever, Moreira et al. 2024, arXiv 2407.15831). With --precision bf16, the embeddings
are rounded to float16, which changes s by less than 1e-3.
"""
import csv
import itertools
import json
import os
import re
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from kernels import similarity_topk
from kernels.heuristics import TOPK_SLOTS

from .data import SENTENCE_COLUMNS, describe_table, empty_cell, log_first_row, read_table
from .errors import command, fail, log
from .flags import ScriptParser, at_least
from .out import atomic_file
from .precision import LOSS_DTYPE
from .progress import progress
from .run import Run
from .text.encoders import build_encoder, describe_model

BLOCK = 4096                                                   # rows searched at a time
SUFFIXES = ".csv", ".tsv", ".jsonl"


def make_parser():
    parser = ScriptParser(__doc__)
    add, shared = parser.add_argument, parser.add_shared
    parser.set_defaults(evaluate=True)                         # the model is only evaluated, not trained
    add("--data", reads="training data", group="data", required=True,
        help="anchors and positives, in the format described above")
    shared("--columns", shown="by the header, else all")
    add("--model", group="model", required=True, help="trained encoder: a hub name or a local folder")
    add("--out", group="run", required=True, type=Path, help=f"file to write: {', '.join(SUFFIXES)}")
    add("--negatives", type=at_least(1, int), default=1,
        help="number of hard negatives N to mine for each row; default 1")
    add("--ranks", type=at_least(1, int), nargs=2, metavar=("FIRST", "LAST"),
        help="range of ranks from which the N negatives are sampled; rank 1 is the hardest; default 1 N")
    add("--relative-margin", type=at_least(-100), default=0.05,
        help="r: a negative's score is at most (1 - r) times that of the positive; with r below 0, negatives "
             "may score higher than the positive; default 0.05")
    add("--margin", type=at_least(-2), default=-2.0,
        help="m: a negative's score is at most that of the positive minus m; default -2, which excludes "
             "nothing")
    add("--min-score", type=at_least(0), default=0.0, help="lowest score of a negative; default 0")
    add("--max-score", type=at_least(0), default=1.0, help="highest score of a negative; default 1")
    add("--seed", type=at_least(0, int), default=42, help="random seed for sampling from --ranks; default 42")
    shared("--impl", "auto", group="run",
           help="implementation of the search: Triton kernels, PyTorch block by block, or plain "
                "PyTorch; auto: triton on an NVIDIA GPU, else eager (small data) or blockwise")
    shared("--precision", group="run")
    return parser


def check_flags(args):
    """Set the default of --ranks. Raise UserError if --ranks or --out has a bad value."""
    args.ranks = args.ranks or [1, args.negatives]
    first, last = args.ranks
    if last - first + 1 < args.negatives:
        fail(f"--ranks {first} {last}: expected FIRST LAST, with at least --negatives {args.negatives} ranks")
    if args.out.suffix.lower() not in SUFFIXES:
        fail(f"--out {args.out}: expected a name that ends in {', '.join(SUFFIXES)}")
    if args.out.exists():
        fail(f"--out {args.out}: this file exists; delete it or name another")
    if not os.access(args.out.parent, os.W_OK):
        fail(f"--out {args.out}: {args.out.parent} is not a writable folder")


def load_data(args):
    """Read --data. Return a Table with rows (anchor, positive, hard negatives)."""
    def check(cells):
        if args.out.suffix.lower() == ".tsv" and re.search(r"[\t\r\n]", "".join(cells)):
            return "a tab or a line break, which a .tsv cannot hold; expected --out with .csv or .jsonl"
        return empty_cell(cells)

    header, table = read_table(args.data, check, roles=SENTENCE_COLUMNS, columns=args.columns)
    place, cells = next(iter(table))
    if len(cells) < 2:
        fail(f"{args.data} {place}: 1 column, expected anchor, positive and any hard negatives")
    log("data", describe_table(table, header))
    log_first_row(table)
    return table


def load_model(args):
    """Load --model as a SentenceEncoder."""
    run = Run(args, __file__)
    model = build_encoder(args, run, columns=2).to(run.device)
    log("model", describe_model(model, args))
    return model


def assign_text_ids(table):
    """Return (text ids (R, columns) of all rows, texts): texts[i] is the text with the id i. Each distinct
    anchor or positive has its own id. All other texts, which are hard negatives, share the id len(texts)."""
    def key(text):
        return " ".join(text.split())

    ids, texts = {}, []
    for _, cells in table:
        for text in cells[:2]:
            if ids.setdefault(key(text), len(texts)) == len(texts):
                texts.append(text)
    return torch.tensor([[ids.get(key(text), len(texts)) for text in cells] for _, cells in table]), texts


def embed_anchors_and_positives(model, texts, anchors, positives):
    """Return unit embeddings (q (A, D), k (M, D)). q: texts with the ids `anchors`, after the model's first
    prompt. k: texts with the ids `positives`, after the second prompt. If both prompts are equal, embed each
    text once."""
    first, second = model.prompts[0], model.prompts[:2][-1]
    if first == second:
        z = embed_side(model, texts, first)
        return z[anchors], z[positives]
    return tuple(embed_side(model, [texts[i] for i in ids.tolist()], prompt)
                 for ids, prompt in ((anchors, first), (positives, second)))


def embed_side(model, texts, prompt):
    """Return unit embeddings (T, D) on the model's device: float32 (with --precision bf16: float16)."""
    model.default_prompt = prompt
    z, places = model.embed(texts)
    z = F.normalize(z, dim=1, eps=1e-8).to(LOSS_DTYPE if model.bf16 else torch.float32)
    return z[places]


@torch.no_grad()
def mine(rows, q, k, args):
    """Return (text ids of the negatives (R, N), their scores (R, N), the scores of the positives (R,)).

    The negatives of a row with fewer than N candidates all have the id −1.

    rows     (R, columns) text ids: anchor, positive, hard negatives
    q, k     (A, D), (M, D) unit embeddings of the distinct anchors and positives, in the order of their ids
    args     has negatives (N), ranks, relative_margin, margin, min_score, max_score, seed, impl
    memory   O(R·N) in addition to q and k. The search handles BLOCK rows at a time. For each row, it
             stores at least LAST candidates (--ranks), and further ones to replace excluded texts
    """
    first, last = args.ranks
    generator, found = torch.Generator().manual_seed(args.seed), []
    rows, stride = rows.to(q.device), rows.max().item() + 1
    _, anchors = rows[:, 0].unique(return_inverse=True)
    pool, positives = rows[:, 1].unique(return_inverse=True)
    # excluded pairs: an anchor and a text of a row with this anchor. One number encodes a pair.
    excluded = (anchors[:, None] * stride + rows).unique()
    excluded_counts = (excluded // stride).bincount()          # number of excluded texts per anchor
    blocks = [*zip(anchors.split(BLOCK), positives.split(BLOCK))]
    for anchor, own in progress(blocks, "searching", f" blocks of {BLOCK:,} rows"):
        positive = (q[anchor].float() * k[own].float()).sum(1)
        bound = (positive * (1 - args.relative_margin)).minimum(positive - args.margin)
        bound = bound.clamp(max=args.max_score) + 1e-6         # a tolerance for rounding
        s, columns = search(q[anchor], k, last + excluded_counts[anchor], bound, args)
        text = pool[columns]
        pair = anchor[:, None] * stride + text
        kept = ~torch.isin(pair, excluded) & (s >= args.min_score) & (s <= bound[:, None])
        rank = kept.cumsum(1)
        kept &= (first <= rank) & (rank <= last)
        # Each rank of the range gets a random number. The ranks with the N largest numbers are the sample.
        chance = torch.rand(len(anchor), last - first + 1, generator=generator).to(q.device)
        chance = chance.gather(1, (rank - first).clamp(0, last - first)).masked_fill(~kept, -1)
        at = chance.topk(args.negatives, 1).indices.sort(1).values         # the hardest first
        too_few = kept.sum(1) < args.negatives
        found.append((text.gather(1, at).masked_fill(too_few[:, None], -1), s.gather(1, at), positive))
    return tuple(torch.cat(part).cpu() for part in zip(*found))


def search(q, k, min_found, bound, args):
    """Return (scores (R, n), row numbers in k (R, n)) of the n nearest rows of k for each row of q. n is at
    least max(min_found), but at most len(k). If a row has fewer than min_found (R,) scores up to its `bound`
    (R,), search again for this row, only among the rows of k that score below the bound."""
    n = min(len(k), max(TOPK_SLOTS, min_found.max().item()))
    s, columns = similarity_topk(q, k, n, impl=args.impl)
    short = ((s <= bound[:, None]).sum(1) < min_found.clamp(max=len(k))) & (bound >= args.min_score)
    if short.any() and n < len(k):
        q = q[short]
        bound = bound[short, None].clamp(min=1e-4)             # keeps q / bound within float16's range
        below = ((q / bound).to(q.dtype), k, 1.0)              # leave out columns with q·k / bound ≥ 1
        s[short], columns[short] = similarity_topk(q, k, n, similar=below, impl=args.impl)
    return s, columns


def write_rows(path, table, negatives, texts):
    """Write a table to a file, with the mined negatives (R, N) as further columns. Leave out rows without
    negatives. The file is written under a temporary name, and renamed when it is complete."""
    count = len(next(iter(table))[1]) - 2 + negatives.shape[1]
    names = ["negative"] if count == 1 else [f"negative_{i + 1}" for i in range(count)]
    names = ["anchor", "positive", *names]
    rows = ([*cells, *(texts[i] for i in ids)] for (_, cells), ids in zip(table, negatives.tolist())
            if ids[0] >= 0)
    with atomic_file(path) as file:
        if path.suffix.lower() == ".jsonl":
            file.writelines(json.dumps(dict(zip(names, row))) + "\n" for row in rows)
        elif path.suffix.lower() == ".tsv":
            file.writelines("\t".join(row) + "\n" for row in itertools.chain([names], rows))
        else:
            csv.writer(file).writerows(itertools.chain([names], rows))


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    check_flags(args)
    table = load_data(args)
    rows, texts = assign_text_ids(table)
    anchors, pool = rows[:, 0].unique(), rows[:, 1].unique()
    if len(pool) <= args.ranks[1]:
        fail(f"{args.data}: {len(pool)} distinct positives, expected more than {args.ranks[1]}, the last "
             "rank (--negatives, --ranks)")
    model = load_model(args)
    start = time.monotonic()
    q, k = embed_anchors_and_positives(model, texts, anchors, pool)
    middle = time.monotonic()
    log("embed", f"{len(texts):,} texts in {middle - start:.1f} s")
    negatives, s, p = mine(rows, q, k, args)
    log("search", f"{len(rows):,} rows against {len(pool):,} positives in {time.monotonic() - middle:.1f} s")
    full = negatives[:, 0] >= 0
    too_few = f"fewer than {args.negatives} candidates within --ranks, the margins and the score bounds"
    if not full.any():
        fail(f"{args.data}: nothing to write, all rows have {too_few}")
    write_rows(args.out, table, negatives, texts)
    log("score", f"mean cosine to the anchor: positives {p[full].mean():.3f}, negatives {s[full].mean():.3f}")
    log("mined", f"{full.sum():,} rows written to {args.out}, {(~full).sum():,} left out: {too_few}")


if __name__ == "__main__":
    main()
