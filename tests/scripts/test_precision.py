"""--precision: the dtypes in which each script's kernels multiply, and the errors that these dtypes cause.

    python tests/scripts/test_precision.py        prints the errors in docs/results.md, in two minutes
"""
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import dclr  # noqa: E402 - the path first
import ease  # noqa: E402
import kernels  # noqa: E402
import moco  # noqa: E402
import selfguided  # noqa: E402
import simclr  # noqa: E402
import simcse  # noqa: E402
import tacl  # noqa: E402
from kernels.training.precision import LOSS_DTYPE  # noqa: E402
from running import DATA, SENTENCES, few_images, run  # noqa: E402

# ── what reaches the kernels ────────────────────────────────────────────────────────────────────────────────

TEXT = ["--model", "scratch", "--batch-size", 8, "--data"]
PICTURES = ["--model", "resnet-small", "--data", "IMAGES", "--batch-size", 8, "--probe-epochs", 0]
UNIT, ANY = torch.float16, torch.bfloat16                      # dtype for rows of length 1, and of any length
# script, flags, dtypes in which the kernels multiply in training with --precision bf16
CALLS = [("simcse", [*TEXT, DATA / "nli.csv"], {UNIT}),
         ("simcse", [*TEXT, DATA / "sentences.txt", "--mlm-weight", 1], {UNIT, ANY}),
         ("selfguided", [*TEXT, DATA / "sentences.txt", "--projection-dim", 64], {UNIT}),
         ("cline", [*TEXT, DATA / "sentences.txt", "--wordnet", DATA / "wordnet"], {ANY}),
         ("tacl", [*TEXT, "DOCUMENTS"], {UNIT, ANY}),
         ("tacl", [*TEXT, "DOCUMENTS", "--similarity", "dot"], {ANY}),
         ("ease", [*TEXT, DATA / "entities.tsv"], {UNIT}),
         ("vascl", [*TEXT, DATA / "sentences.txt", "--neighbours", 4], {UNIT}),
         ("dclr", [*TEXT, DATA / "sentences.txt", "--guide", "GUIDE", "--phi", 0.994], {UNIT}),
         ("dclr", [*TEXT, DATA / "sentences.txt", "--guide", "GUIDE", "--form", "code"], {UNIT}),
         ("simclr", PICTURES, {UNIT}),
         ("simclr", [*PICTURES, "--supervised"], {UNIT}),
         ("moco", [*PICTURES, "--queue-size", 16, "--bn-splits", 2], {UNIT})]


@pytest.mark.parametrize("precision, impl, name, flags, wanted", [
    *(("bf16", "blockwise", *call) for call in CALLS), *(("fp32", "eager", *call) for call in CALLS[::2])])
def test_dtypes_of_products_and_gradients(name, flags, wanted, precision, impl, bert, tmp_path, monkeypatch):
    """Kernels multiply in the dtypes of CALLS, or in float32 with --precision fp32. They get float32 rows and
    return float32 gradients that were not rounded to 16 bits. --impl reaches all of them."""
    documents = tmp_path / "documents.txt"
    lines = [row[0] for row in SENTENCES[:80]]
    documents.write_text("\n\n".join("\n".join(lines[i : i + 8]) for i in range(0, 80, 8)))
    paths = {"DOCUMENTS": documents, "GUIDE": bert, "IMAGES": few_images(tmp_path)}
    flags = [paths.get(flag, flag) for flag in flags]
    found, impls, gradients, prepare = set(), set(), [], kernels.call.prepare

    def listen(*arguments, **named):
        call = prepare(*arguments, **named)
        impls.add(named["impl"])
        for x in (call.q, call.k) if torch.is_grad_enabled() else ():
            if x is not None and x.requires_grad:
                assert x.dtype == torch.float32
                found.add(call.product_dtype)
                x.register_hook(gradients.append)
        return call

    for module in ("call", "losses"):
        monkeypatch.setattr(f"kernels.{module}.prepare", listen)
    run(name, tmp_path / "out", *flags, "--steps", 1, "--precision", precision, "--impl", impl)
    assert found == (wanted if precision == "bf16" else {torch.float32})
    assert impls == {impl} and gradients
    assert all(x.dtype == torch.float32 and x.abs().max() > 0 for x in gradients)
    assert not any(torch.equal(x, x.to(dtype).float()) for x in gradients for dtype in (UNIT, ANY))


# ── the error of a loss and of its gradient ─────────────────────────────────────────────────────────────────

LOSSES = {"info_nce": kernels.info_nce, "nt_xent": kernels.nt_xent,
          "queue_loss": lambda q, k, tau: kernels.queue_loss(*(x[: len(x) // 4] for x in (q, k)),
                                                             k[len(k) // 4 :].detach(), tau)}
SETS = {"random": "unrelated rows", "trained": "pairs so close that the loss is about 5e-3",
        "cone": "all cosines near 0.8, as for an untrained encoder"}
TEMPERATURES = 0.02, 0.05, 0.1, 0.5


def pairs(kind, n, d, tau):
    """Return unit rows q and k, (n, D) float64, of a kind in SETS for τ = tau; k_i is the positive of q_i."""
    generator = torch.Generator().manual_seed(0)

    def sample(n):
        return F.normalize(torch.randn(n, d, generator=generator, dtype=torch.float64), dim=1)

    def mix(cosine, x, y):                                     # a vector with this cosine to x, if x ⊥ y
        return F.normalize(cosine * x + (1 - cosine**2) ** 0.5 * y, dim=1)

    q, k, centre = sample(n), sample(n), sample(1)
    k = F.normalize(k - (k * q).sum(1, keepdim=True) * q, dim=1)
    if kind == "trained":
        k = mix(min(0.95, tau * (math.log(n) + 1 / (2 * d * tau**2) - math.log(5e-3))), q, k)
    if kind == "cone":
        q, k = (mix(0.9, centre, x) for x in (q, mix(0.7, q, k)))
    return q, k


def relative_errors(dtype, loss, q, k, *tau):
    """Return the relative errors of the loss and of its gradients (Euclidean norm) if float32 rows are
    multiplied in dtype."""
    exact_rows = [x.to(torch.float64).requires_grad_() for x in (q, k)]
    rows = [x.to(torch.float32).requires_grad_() for x in (q, k)]
    exact = loss(*exact_rows, *tau)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        rounded = loss(*rows, *tau)
    exact_gradient = torch.cat(torch.autograd.grad(exact, exact_rows, materialize_grads=True))
    gradient = torch.cat(torch.autograd.grad(rounded, rows, materialize_grads=True))
    pairs_to_compare = (rounded, exact), (gradient, exact_gradient)
    return [((a - b).norm() / b.norm()).item() for a, b in pairs_to_compare]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", SETS)
@pytest.mark.parametrize("tau", TEMPERATURES)
def test_float16_has_far_less_error_than_bfloat16(loss, kind, tau):
    case = LOSSES[loss], *pairs(kind, 256, 128, tau), tau
    half, brain = (relative_errors(dtype, *case)[1] for dtype in (torch.float16, torch.bfloat16))
    assert LOSS_DTYPE == torch.float16 and 4 * half < brain and half < 5e-3


# ── papers ──────────────────────────────────────────────────────────────────────────────────────────────────

FEATURES, MASKED = torch.eye(64), torch.ones(8, 8)


def keys(a):
    """Return a queue for MoCo: the rows of `a`, rotated by one, without gradient, in the queue's dtype."""
    return F.normalize(a.detach().roll(1, 0), dim=1).to(a.dtype if a.dtype == torch.float64 else LOSS_DTYPE)


PAPERS = {
    "simcse": lambda a, b: simcse.simcse_loss(a, b, a.roll(1, 0)),
    "selfguided": lambda a, b: selfguided.selfguided_loss(a, b, 0.05),
    "tacl": lambda a, b: tacl.tacl_loss(a.view(8, 8, -1), b.view(8, 8, -1), MASKED, None, 0.05),
    "ease": lambda a, b: ease.ease_loss(a, b, b.roll(1, 0)[:, None], 0.05, 1.0),
    "dclr": lambda a, b: dclr.dclr_loss(a, b, b[:9], FEATURES.to(a), FEATURES.to(a), 0.5),
    "dclr code": lambda a, b: dclr.dclr_loss(a, b, b[:9], FEATURES.to(a), FEATURES.to(a), 0.5, form="code"),
    "simclr": lambda a, b: simclr.simclr_loss(a, b, 0.1),
    "simclr ranks": lambda a, b: simclr.simclr_loss(a, b, 0.1, gathered=(a, b)),
    "supcon": lambda a, b: simclr.sup_con_loss(torch.stack([a, b], 1), torch.arange(64) // 4),
    "moco": lambda a, b: moco.moco_loss(a, b, keys(a))}


@pytest.mark.parametrize("name", PAPERS)
def test_only_rows_are_rounded(name):
    """Only products of rows use float16: if more of a loss did, its error would be several times larger."""
    raw = (3 * x for x in pairs("cone", 64, 96, 0.05))
    assert max(relative_errors(LOSS_DTYPE, PAPERS[name], *raw)) < 1e-3


# ── the table ───────────────────────────────────────────────────────────────────────────────────────────────


def main():
    dtypes, largest = (torch.float16, torch.bfloat16, torch.float32), {}
    for kind, text in SETS.items():
        print(f"{kind:9} {text}")
    print("\n| rows | D | " + " | ".join(f"τ = {tau}" for tau in TEMPERATURES) + " |\n" + "| --- " * 6 + "|")
    for kind, d in ((kind, d) for kind in SETS for d in (128, 768)):
        cells = []
        for tau in TEMPERATURES:
            rows, cell = pairs(kind, 2048, d, tau), []
            for dtype in dtypes:
                errors = [relative_errors(dtype, loss, *rows, tau) for loss in LOSSES.values()]
                largest[dtype] = [max(x) for x in zip(*errors, largest.get(dtype, (0, 0)))]
                cell.append(f"{max(error for _, error in errors):.1e}")
            cells.append(" / ".join(cell[:2]))
        print(f"| {kind} | {d} | " + " | ".join(cells) + " |", flush=True)
    for dtype, (of_loss, of_gradient) in largest.items():
        print(f"{str(dtype)[6:]:9} at most {of_gradient:.1e} in a gradient, {of_loss:.1e} in a loss")


if __name__ == "__main__":
    main()
