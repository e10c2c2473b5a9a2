"""SimCLS: A Simple Framework for Contrastive Learning of Abstractive Summarization. Liu, Liu, ACL 2021, arXiv
2106.01890.

A summariser writes several candidate summaries of each text. The encoder learns to choose the best candidate:
better candidates should have a higher cosine with the text. The data list the candidates of a text from best
to worst, for example by ROUGE. The embeddings are z of the text, r of the reference summary, and c_1 ... c_C
of the candidates in this order. With s(x) = cos(z, x) and a margin λ:

    L = mean over texts of  Σ_i max(0, s(c_i) − s(r)) + Σ_{i<j} max(0, s(c_j) − s(c_i) + (j − i) λ)

    python docs/more/simcls.py --data train.tsv --dev val.tsv --form code --out out/simcls
    python docs/more/simcls.py --data train.tsv --dev val.tsv --form code --candidate-length 80 --out out/xsum
    python docs/more/simcls.py --evaluate --model out/simcls --dev test.tsv

Data: columns for text, reference and each candidate, from best to worst. The script finds them by --columns,
else by names in the header (text reference candidate_1 candidate_2 ...), else by their order. A JSON row may
have a list of candidates. --dev has the same columns, and may end with a column `scores`: one number for each
candidate, such as ROUGE, separated by spaces. The script keeps the checkpoint with the highest mean score of
the chosen candidates. Without scores, it keeps the checkpoint that chooses the first candidate most often.

Published ROUGE-1, ROUGE-2, ROUGE-L of the chosen summaries, with 16 candidates per text: 46.67, 22.15, 43.54
on CNN/DailyMail (first command); 47.61, 24.57, 39.44 on XSum (second command). The script computes no ROUGE.

--form code is the loss of the released code. The first sum of L becomes a mean over i. In the second sum, the
terms with equal j − i are averaged, and then these averages are summed.
"""
import os
import re
import sys

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))  # where kernels/ is
from kernels import check_rows, checks, own_rows
from kernels.training import data
from kernels.training.data import NUMBER, SENTENCE_COLUMNS, empty_cell, log_first_row, read_table
from kernels.training.errors import command, fail, log
from kernels.training.flags import ScriptParser, at_least, check_batch_size, fill_defaults, run_flags
from kernels.training.loop import all_reduce_gradients, set_lr, steps_per_epoch
from kernels.training.run import Run
from kernels.training.text.checkpoint import load_hint, save
from kernels.training.text.encoders import build_encoder, describe_model
from kernels.training.text.tokens import tokenise_table

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = ScriptParser(__doc__)
    add = parser.add_argument
    run_flags(
        parser, model="roberta-base", dev=None, out="out/simcls", form="paper",
        columns=(None, "chosen by the header, else all"), eval_every=(1000, "1000 (released code)"),
        max_length=(512, "512 (released code)"),
        pooling=(None, "as saved with --model, else cls_before_pooler (paper), avg for scratch"),
        batch_size=(None, "12 (released code)"), epochs=(None, "5 (released code), 20 with --model scratch"),
        lr=(None, "2e-3 (released code), 20 with --model scratch; the rate of step t is this value times "
                  "min(t^-½, t · 10,000^-1½)"))
    parser.add_shared_flags("--chunk-size")
    add("--candidate-length", type=at_least(3, int), default=120,
        help="truncate training candidates to this many tokens; default 120 (released code; use 80 for XSum)")
    add("--margin", type=at_least(0), default=0.01,
        help="λ, margin between consecutive candidates; default 0.01 (paper)")
    return parser


RELEASED = dict(batch_size=12, epochs=5, lr=2e-3)
SCRATCH = dict(batch_size=12, epochs=20, lr=20.0, pooling="avg")               # defaults with --model scratch

# {role: usual names of its column}; a number may follow the name of a candidate column
ROLES = {"text": SENTENCE_COLUMNS["anchor"] + "document source article".split(),
         "reference": SENTENCE_COLUMNS["positive"] + "reference summary target".split(),
         "candidate": SENTENCE_COLUMNS["negative"] + "candidate candidates cand".split()}
SCORES = {"scores": "scores rouge rouges candidatescores".split()}         # names of the last column of --dev


# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """Read --data into a Table. Set args.count (number of columns) and the defaults of flags not given."""
    _, table = read_table(path, empty_cell, roles=ROLES, columns=args.columns)
    args.count = len(next(iter(table))[1])
    fill_defaults(args, SCRATCH if args.model == "scratch" else RELEASED)
    if args.count < 3:
        fail(f"{path}: {args.count} columns, expected text, reference and candidates; see --columns")
    check_batch_size(len(table), path, args.batch_size)
    log("simcls", f"{args.form}: {len(table):,} rows with {args.count - 2} candidates from {path}")
    log_first_row(table)
    return table


def load_dev(path, columns=None):
    """Read a file of --dev. Return [(text, [candidates], [scores])], without the references. Without the
    column `scores`, the first candidate of each text has the score 100, and the others have the score 0.
    columns: --columns, which need not name the column `scores`."""
    found = [name for name in data.Table(path, names=columns or ()).header or ()
             if data.role_of(name, SCORES)]
    _, table = read_table(path, empty_cell, roles=ROLES | SCORES, columns=columns and [*columns, *found])
    data.refuse_identifiers(table, range(len(next(iter(table))[1]) - len(found)))
    rows = []
    for place, (text, _, *candidates) in table:
        scores = candidates.pop().split() if found else ["100"] + ["0"] * (len(candidates) - 1)
        if len(scores) != len(candidates) or not all(re.fullmatch(NUMBER, x) for x in scores):
            fail(f"{path} {place}: {len(candidates)} candidates and the scores {' '.join(scores)[:60]!r}; "
                 "expected candidates, and a number for each of them, separated by spaces")
        rows.append((text, candidates, [*map(float, scores)]))
    return rows


def build_model(args, run):
    """Load the encoder. By default, an embedding is the last state of the first token, without a head."""
    model = build_encoder(args, run, "cls_before_pooler")
    log("model", describe_model(model, args))
    return model.to(run.device)


def make_batch(tokens, picked, model, args):
    """Return the batch of the rows whose numbers are in `picked`. Truncation keeps candidates' last token."""
    most = args.candidate_length
    text, reference, *candidates = tokens.views(picked, args.count)
    candidates = [[ids if len(ids) <= most else np.append(ids[: most - 1], ids[-1]) for ids in view]
                  for view in candidates]
    return model.batch(text, reference, *candidates)


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def ranking_loss(scores, reference, margin=0.01, form="paper"):
    """Return L: candidates should score below the reference, and above worse candidates by a margin.

    scores      (B, C) scores of the C candidates of B texts, from best to worst, any float type
    reference   (B,) score of each text's reference, of the same dtype as scores
    margin      λ, margin between consecutive candidates
    form        "paper" | "code": see the top of this file
    returns     scalar
    source      Liu and Liu 2021, arXiv 2106.01890
    """
    check_rows(scores=(scores, "B C"), reference=(reference, "B"))
    checks.check_number("margin", margin)
    checks.check_choice("form", form, "paper", "code")
    hinges = [F.relu(scores - reference[:, None])]
    for distance in range(1, scores.shape[1]):
        hinges.append(F.relu(scores[:, distance:] - scores[:, :-distance] + distance * margin))
    return sum(hinge.sum(1).mean() if form == "paper" else hinge.mean() for hinge in hinges)


def compute_loss(model, batch, rows, args):
    """Return this rank's part of the loss of the global batch, and the values to log. batch: this rank's
    rows, from make_batch; rows: number of rows of the global batch."""
    z, *others = model(batch).chunk(args.count)
    reference, *scores = [F.cosine_similarity(z, other, dim=1) for other in others]
    loss = ranking_loss(torch.stack(scores, 1), reference, args.margin, args.form) * (len(z) / rows)
    return loss, {"loss": loss.detach()}


# ── evaluation ──────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def evaluate(model, rows):
    """Choose for each text the candidate with the highest cosine, and measure how good these choices are.

    rows      the result of load_dev; texts are not truncated to --max-length
    returns   {"chosen": mean score of the chosen candidates, "best": mean score of the best candidates}
    """
    z, places = model.embed([text for row in rows for text in (row[0], *row[1])])
    z = F.normalize(torch.nan_to_num(z), dim=1, eps=1e-8)[places].double()
    start, chosen = 0, []
    for _, candidates, scores in rows:
        end = start + 1 + len(candidates)
        chosen.append(scores[int((z[start + 1 : end] @ z[start]).argmax())])
        start = end
    return {"chosen": sum(chosen) / len(rows), "best": sum(max(scores) for *_, scores in rows) / len(rows)}


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    if args.evaluate:
        rows = load_dev(args.dev or args.data, args.columns)
        model = build_model(args, Run(args, __file__))
        scores = evaluate(model, rows)
        return log("dev", f"chosen {scores['chosen']:.4g} of at most {scores['best']:.4g}")
    table, dev = load_data(args.data, args), load_dev(args.dev, args.columns) if args.dev else []
    run = Run(args, __file__)
    model = build_model(args, run)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    total = args.steps or args.epochs * steps_per_epoch(len(table), args.batch_size)
    run.begin(model, optimizer, total)
    tokens = tokenise_table(table, model, run)
    if dev and run.step == 0:
        run.log_initial_scores(evaluate(model, dev))
    model.train()
    for step, picked in run.steps(total, len(tokens)):         # picked: row numbers of the global batch
        set_lr(optimizer, args.lr * min(step ** -0.5, step * 10_000 ** -1.5))
        batch = make_batch(tokens, picked[own_rows(len(picked))], model, args)
        loss, values = compute_loss(model, batch, len(picked), args)
        optimizer.zero_grad()
        loss.backward()
        all_reduce_gradients(model)                            # no gradient clipping, as in released code
        optimizer.step()
        run.log_metrics(values, lr=optimizer.param_groups[0]["lr"])
        if run.eval_due:
            scores = evaluate(model, dev) if dev else {}
            if run.should_save(scores, "chosen", f"{scores['chosen']:.4g}" if dev else ""):
                save(model, run)
    before, after = run.extra_state["before"], run.extra_state["saved"]
    run.finish(f"chosen {before['chosen']:.4g} → {after['chosen']:.4g} of at most {after['best']:.4g}, "
               if dev else "")
    log("load", load_hint(model, run))


if __name__ == "__main__":
    main()
