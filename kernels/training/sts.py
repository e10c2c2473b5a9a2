"""Scored pairs of sentences: Spearman, alignment, uniformity; the best checkpoint by them."""
import math
import re

import numpy as np
import torch
import torch.nn.functional as F

from kernels import similarity_lse

from .command import fail, say
from .encoders import build_encoder, describe_model
from .layout import load_line, save
from .run import Run
from .tables import plain, read_table


class ScoredPairs:
    """The pairs of --dev, which choose the best checkpoint, and of --test, which it is read with."""

    def __init__(self, args):
        self.impl, self.dev = args.impl, load_sts(args.dev) if args.dev else []
        self.tests = {path: load_sts(path) for path in args.test}

    def before(self, model, run):
        """The score before the first step."""
        if self.dev and run.step == 0:
            run.progress["before"] = evaluate(model, self.dev, self.impl)
        if self.dev:
            say("before", f"dev Spearman {run.progress['before']['spearman']:.2f}")

    def judge(self, model, run):
        """Evaluates, and saves the model where it is the best so far; without --dev the last is."""
        scores = evaluate(model, self.dev, self.impl) if self.dev else {}
        if run.keeps(scores, by="spearman"):
            save(model, run)

    def after(self, model, run):
        """Reads the best checkpoint, tests it, and says how to load it."""
        model.restore(run.out)
        say_scores({path: evaluate(model, pairs, self.impl) for path, pairs in self.tests.items()})
        before, best = run.progress["before"], run.progress["best"]
        rise = ""
        if self.dev:
            rise = f"dev Spearman {before['spearman']:.2f} → {best['spearman']:.2f} at step {best['step']}, "
        run.done(rise)
        say("load", load_line(model, run))


def score(args, script, pooling="cls"):
    """--evaluate of sentence encoders: the files of --dev and --test through --model."""
    files = {path: load_sts(path) for path in ([args.dev] if args.dev else []) + args.test}
    if not files:
        fail("--evaluate: nothing to evaluate; name files of scored pairs by --dev or --test")
    run = Run(args, script)
    model = build_encoder(args, run, pooling, columns=len(args.prompt or [""])).to(run.device)
    say("model", describe_model(model, args))
    say_scores({path: evaluate(model, pairs, args.impl) for path, pairs in files.items()})


def say_scores(tests):
    """A line a file, and the mean."""
    for path, scores in tests.items():
        kinds = [name for name in ("alignment", "uniformity") if name in scores]
        more = "".join(f"{name} {scores[name]:.3f}  " for name in kinds)
        say("test", f"{scores['spearman']:.2f}  {more}{path}")
    if tests:
        say("test", f"{np.mean([round(scores['spearman'], 2) for scores in tests.values()]):.2f}  mean")


def load_sts(path):
    """[(sentence1, sentence2, score)]; the subsets of a file are one list (the setting "all")."""
    names = ["sentence1", "sentence2", "score"]
    header, table = read_table(path, names=names)
    header = header and [plain(name) for name in header]
    first = next(iter(table))[1]
    if header is None and len(first) == 3:  # the score is last, unless only the first cell is a number
        header = names if re.fullmatch(r"[\d. ]*", first[2]) else ["score", "sentence1", "sentence2"]
    if header is None or not set(names) <= set(header):
        found = ", ".join(header or ["no header"])
        fail(f"{path}: {found}; wanted {', '.join(names)}, or 3 columns, the score first or last")
    pairs = []
    for place, cells in table:
        one, two, score = (" ".join(cells[header.index(name)].split()) for name in names)
        if not one or not two:
            fail(f"{path} {place}: an empty sentence")
        if not re.fullmatch(r"(\d+\.?\d*|\.\d+)?", score) or float(score or 0) > 5:
            fail(f"{path} {place}: score {score!r}, wanted a number from 0 to 5")
        if score:  # SemEval leaves some pairs unscored; they do not count
            pairs.append((one, two, float(score)))
    if len(pairs) < 2:
        fail(f"{path}: {len(pairs)} scored pairs, wanted at least 2")
    return pairs


def spearman(a, b):
    """Pearson correlation of the ranks; equal values share their mean rank. 0 where one side is constant."""
    ranks = []
    for x in (a, b):
        _, group, sizes = np.unique(x, return_inverse=True, return_counts=True)
        ranks.append((sizes.cumsum() - (sizes - 1) / 2)[group])
    return 0.0 if min(np.ptp(r) for r in ranks) == 0 else float(np.corrcoef(*ranks)[0, 1])


@torch.no_grad()
def evaluate(model, pairs, impl="auto"):
    """100 ρ, and alignment and uniformity (Wang, Isola 2020), of scored pairs; sentences are not cut to
    --max-length."""
    sentences = {sentence for pair in pairs for sentence in pair[:2]}
    sentences, training = sorted(sentences, key=lambda text: (len(text), text)), model.training
    z = F.normalize(torch.nan_to_num(model.eval().read(sentences)), dim=1, eps=1e-8)
    model.train(training)
    place = {sentence: i for i, sentence in enumerate(sentences)}
    one, two = (z[[place[pair[side]] for pair in pairs]].double() for side in (0, 1))
    scores = np.array([pair[2] for pair in pairs])
    result = {"spearman": 100 * spearman((one * two).sum(1).cpu().numpy(), scores)}
    near = torch.from_numpy(scores > 4).to(z.device)
    if near.any():
        result["alignment"] = (one - two)[near].square().sum(1).mean().item()
    if len(z) > 1:  # exp(−2 |x − y|²) = exp(4 x·y − 4) on unit rows
        lse = similarity_lse(z, temperature=0.25, exclude="diagonal", impl=impl).double()
        result["uniformity"] = lse.logsumexp(0).item() - 4 - math.log(len(z) * (len(z) - 1))
    return result
