"""Hard negatives for pairs of texts: for each anchor what a trained encoder takes for a positive.

    python -m kernels.training.mine --model out/first --data pairs.csv --out triples.csv
    python simcse.py --model out/first --data triples.csv --out out/second

Data, a row a line: anchor, positive and, where there are some, hard negatives, which stay; mined ones stand
behind them. Columns are chosen by --columns, else by their header, else as they stand.

The candidates of a row are the different positives of all rows. Never taken is a text that a row of the same
anchor has, the anchor among them; runs of spaces count as one. With p the cosine of anchor and positive, a
candidate's cosine s has to keep

    s ≤ p · (1 − r)    --relative-margin r: what scores as the positive does is often one that nobody labelled
    s ≤ p − m          --margin m
    min ≤ s ≤ max      --min-score and --max-score

What is left is ranked, the hardest first. --negatives N takes ranks 1 to N; --ranks FIRST LAST draws N of
these ranks at random, below the top, where most false negatives are. A row with fewer than N is left out and
counted. r is 0.05 unless given: a negative has at most 95 % of its positive's score (TopK-PercPos of
NV-Retriever, Moreira et al. 2024, arXiv 2407.15831).

The search multiplies R rows by M different positives, 2·R·M·D operations, a block of rows at a time: memory
is what the embeddings take. A row whose bounds leave too little of what was found is searched once more,
below them. With --precision bf16 products are in float16, and a score is off by less than 1e-3.
"""
import csv
import json
import os
import re
import time
from pathlib import Path

from ..cli import Flags, afford, answer_early, at_least, command, fail, say

BLOCK = 4096                                                   # rows that are searched at a time
CANDIDATE = 64                                                 # bytes for each of a row, about
KINDS = (".csv", ".tsv", ".jsonl")


def make_parser():
    parser = Flags(__doc__)
    add, common = parser.add_argument, parser.common
    parser.set_defaults(evaluate=True)                         # the model is read, not trained
    add("--data", reads="training data", required=True, help="pairs; see above")
    common("--columns", said="by the header, else all")
    add("--model", required=True, help="hub name or local folder of a trained encoder")
    add("--out", required=True, type=Path, help=f"file to write: {', '.join(KINDS)}")
    add("--negatives", type=at_least(1, int), default=1, help="N, mined for each row; default 1")
    add("--ranks", type=at_least(1, int), nargs=2, metavar=("FIRST", "LAST"),
        help="drawn from; default 1 N: the hardest")
    add("--relative-margin", type=at_least(-100), default=0.05,
        help="r; default 0.05; below 0, harder ones than the positive too")
    add("--margin", type=at_least(-2), help="m; default none")
    add("--min-score", type=at_least(0), default=0.0, help="default 0: what scores less is not hard")
    add("--max-score", type=at_least(0), default=1.0, help="default 1")
    add("--seed", type=at_least(0, int), default=42, help="of what --ranks draws; default 42")
    common("--impl", "auto")
    common("--precision")
    return parser


if __name__ == "__main__":
    answer_early(make_parser)  # --help, and wrong flags, before the seconds that torch takes

import torch
import torch.nn.functional as F

from kernels import similarity_topk
from kernels.paths import TOPK_SLOTS

from ..columns import SENTENCES
from ..loop import HALF
from ..output_dir import new_file
from ..progress import progress
from ..run import Run
from ..tables import describe_table, empty_cell, read_table
from ..text.encoders import build_encoder, describe_model


def check_flags(args):
    """Fills --ranks; what would fail after hours fails now."""
    args.ranks = first, last = args.ranks or [1, args.negatives]
    if last - first + 1 < args.negatives:
        fail(f"--ranks {first} {last}: wanted FIRST LAST, with at least --negatives {args.negatives} ranks")
    if args.out.suffix.lower() not in KINDS:
        fail(f"--out {args.out}: wanted a name that ends in {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    if args.out.exists():
        fail(f"--out {args.out}: this file exists; delete it or name another")
    if not os.access(args.out.parent, os.W_OK):
        fail(f"--out {args.out}: {args.out.parent} is no folder that can be written")


def load_data(args):
    """The Table of rows (anchor, positive, hard negatives)."""
    def check(cells):
        if args.out.suffix.lower() == ".tsv" and re.search(r"[\t\r\n]", "".join(cells)):
            return "a tab or a line break, which --out .tsv cannot hold; name a .csv or .jsonl"
        return empty_cell(cells)

    header, table = read_table(args.data, check, roles=SENTENCES, columns=args.columns)
    place, cells = next(iter(table))
    if len(cells) < 2:
        fail(f"{args.data} {place}: 1 column, wanted anchor, positive and any hard negatives")
    say("data", describe_table(table, header))
    return table


def load_model(args):
    """The SentenceEncoder of --model, at rest."""
    run = Run(args, __file__)
    model = build_encoder(args, run, columns=2).to(run.device)
    say("model", describe_model(model, args))
    return model.eval()


def number_texts(table):
    """(rows (R, columns) of text ids, the texts of anchors and positives); another text has the last id plus
    one."""
    def key(text):
        return " ".join(text.split())

    ids, texts = {}, []
    for _, cells in table:
        for text in cells[:2]:
            if ids.setdefault(key(text), len(texts)) == len(texts):
                texts.append(text)
    return torch.tensor([[ids.get(key(text), len(texts)) for text in cells] for _, cells in table]), texts


def embed(model, texts, anchors, pool):
    """(q (A, D), k (M, D)): of the texts with these ids, each side behind its prompt; without, a text is read
    once."""
    first, second = model.prompts[0], model.prompts[:2][-1]
    if first == second:
        z = embed_side(model, texts, first)
        return z[anchors], z[pool]
    return tuple(embed_side(model, [texts[i] for i in ids.tolist()], prompt)
                 for ids, prompt in ((anchors, first), (pool, second)))


@torch.no_grad()
def embed_side(model, texts, prompt):
    """(T, D) unit embeddings on the model's device, float32, with --precision bf16 HALF."""
    z, model.scored, kind = None, prompt, HALF if model.bf16 else torch.float32
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))    # alike in length; too long fails first
    with progress(None, "embedding", total=len(texts), unit=" texts") as bar:
        for start in range(0, len(texts), BLOCK):
            places = order[start : start + BLOCK]
            part = F.normalize(model.embed_texts([texts[i] for i in places]), dim=1, eps=1e-8)
            if z is None:
                z = part.new_empty(len(texts), part.shape[1], dtype=kind)
            z[places] = part.to(kind)
            bar.update(len(places))
    return z


@torch.no_grad()
def mine(rows, q, k, args):
    """(text ids of the negatives (R, N), all −1 in a row that has too few; their scores (R, N); the scores of
    the positives (R,)).

    rows     (R, columns) text ids: anchor, positive, hard negatives
    q, k     (A, D), (M, D) unit embeddings of the different anchors and positives, by ascending id
    args     negatives N, ranks, relative_margin, margin, min_score, max_score, seed, impl
    memory   O(R·N) beside q and k, and for each row of a block as many candidates as are barred and ranked
    """
    (first, last), draw, found = args.ranks, torch.Generator().manual_seed(args.seed), []
    rows, stride = rows.to(q.device), rows.max().item() + 1
    (_, anchors), (pool, positives) = (rows[:, i].unique(return_inverse=True) for i in (0, 1))
    barred = (anchors[:, None] * stride + rows).unique()       # sorted pairs of anchor and text
    bars = (barred // stride).bincount()
    most = min(len(k), last + bars.max().item())
    afford(f"--ranks {first} {last}: {most:,} candidates of {min(BLOCK, len(rows)):,} rows at a time",
           CANDIDATE * most * min(BLOCK, len(rows)))
    with progress(None, "searching", total=len(rows), unit=" rows") as bar:
        for anchor, own in zip(anchors.split(BLOCK), positives.split(BLOCK)):
            positive = (q[anchor].float() * k[own].float()).sum(1)
            most = upper_bound(positive, args)
            s, columns = nearest(q[anchor], k, last + bars[anchor], most, args)
            text = pool[columns]
            pair = anchor[:, None] * stride + text
            known = barred[torch.searchsorted(barred, pair).clamp(max=len(barred) - 1)] == pair
            left = ~known & (s >= args.min_score) & (s <= most[:, None])
            rank = left.cumsum(1)
            left &= (first <= rank) & (rank <= last)
            chance = torch.rand(len(anchor), last - first + 1, generator=draw).to(q.device)
            chance = chance.gather(1, (rank - first).clamp(0, last - first)).masked_fill(~left, -1)
            at = chance.topk(args.negatives, 1).indices.sort(1).values             # the hardest first
            few = left.sum(1) < args.negatives
            found.append((text.gather(1, at).masked_fill(few[:, None], -1), s.gather(1, at), positive))
            bar.update(len(anchor))
    return tuple(torch.cat(part).cpu() for part in zip(*found))


def upper_bound(positive, args):
    """(R,) what a negative scores at most, and a little, so that rounding does not decide."""
    most = (positive * (1 - args.relative_margin)).clamp(max=args.max_score)
    if args.margin is not None:
        most = most.minimum(positive - args.margin)
    return most + 1e-6


def nearest(q, k, wanted, most, args):
    """(scores, columns) of the nearest columns of each row, of which wanted (R,) score at most `most` (R,)
    where so many do: a row for which the first search finds fewer is searched again, below its bound."""
    n = min(len(k), max(TOPK_SLOTS, wanted.max().item()))
    s, columns = similarity_topk(q, k, n, impl=args.impl)
    short = ((s <= most[:, None]).sum(1) < wanted.clamp(max=len(k))) & (most >= args.min_score)
    if short.any() and n < len(k):
        q, most = q[short], most[short, None].clamp(min=1e-4)  # float16 holds what is divided by it
        below = ((q / most).to(q.dtype), k, 1.0)               # q·k / most ≥ 1 is left out
        s[short], columns[short] = similarity_topk(q, k, n, similar=below, impl=args.impl)
    return s, columns


def write(path, table, negatives, texts):
    """The rows of the table that have negatives (R, N), and these, as a file that is there once it is
    whole."""
    kind, aside = path.suffix.lower(), path.with_name(f".{path.name}.tmp")
    more = len(next(iter(table))[1]) - 2 + negatives.shape[1]
    names = ["negative"] if more == 1 else [f"negative_{i + 1}" for i in range(more)]
    names = ["anchor", "positive", *names]
    try:
        with new_file(aside) as file:
            rows = csv.writer(file)                            # its \r\n makes it quote a \r in a cell
            save = {".csv": rows.writerow, ".tsv": lambda cells: file.write("\t".join(cells) + "\n"),
                    ".jsonl": lambda cells: file.write(json.dumps(dict(zip(names, cells))) + "\n")}[kind]
            if kind != ".jsonl":
                save(names)
            for (_, cells), ids in zip(table, negatives.tolist(), strict=True):
                if ids[0] >= 0:
                    save([*cells, *(texts[i] for i in ids)])
        os.replace(aside, path)
    except OSError as error:
        fail(f"--out {path}: {error.strerror}")
    finally:
        aside.unlink(missing_ok=True)


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    check_flags(args)
    table = load_data(args)
    rows, texts = number_texts(table)
    anchors, pool = rows[:, 0].unique(), rows[:, 1].unique()
    if len(pool) <= args.negatives:
        fail(f"{args.data}: {len(pool)} different positives, wanted more than --negatives {args.negatives}")
    if len(pool) <= args.ranks[1]:
        fail(f"{args.data}: {len(pool)} different positives, wanted more than LAST of --ranks "
             f"{' '.join(map(str, args.ranks))}")
    model, start = load_model(args), time.monotonic()
    (q, k), middle = embed(model, texts, anchors, pool), time.monotonic()
    say("embed", f"{len(texts):,} texts in {middle - start:.1f} s")
    negatives, s, p = mine(rows, q, k, args)
    say("search", f"{len(rows):,} rows among {len(pool):,} positives in {time.monotonic() - middle:.1f} s")
    full = negatives[:, 0] >= 0
    few = f"fewer than {args.negatives} candidates within --ranks, margins and scores"
    if not full.any():
        fail(f"{args.data}: nothing to write, all rows have {few}")
    write(args.out, table, negatives, texts)
    say("score", f"mean cosine to the anchor: positives {p[full].mean():.3f}, negatives {s[full].mean():.3f}")
    say("mined", f"{full.sum():,} rows written to {args.out}, {(~full).sum():,} left out: {few}")


if __name__ == "__main__":
    main()
