"""--precision: the dtypes in which each script's kernels multiply, and the errors of its loss in float16."""
import pytest
import torch
import torch.nn.functional as F

import dclr
import ease
import kernels
import moco
import selfguided
import simclr
import simcse
import tacl
from kernels.training.precision import LOSS_DTYPE
from running import DATA, SENTENCES, few_images, run

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
         ("ease", [*TEXT, DATA / "entities.tsv"], {UNIT}),
         ("vascl", [*TEXT, DATA / "sentences.txt", "--neighbours", 4], {UNIT}),
         ("dclr", [*TEXT, DATA / "sentences.txt", "--guide", "GUIDE", "--phi", 0.994], {UNIT}),
         ("dclr", [*TEXT, DATA / "sentences.txt", "--guide", "GUIDE", "--form", "code"], {UNIT}),
         ("simclr", PICTURES, {UNIT}),
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


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────────


def relative_errors(loss, *rows):
    """Return the relative errors of the loss and of its gradients (Euclidean norm) if float32 rows are
    multiplied in LOSS_DTYPE."""
    exact_rows = [x.to(torch.float64).requires_grad_() for x in rows]
    rows = [x.to(torch.float32).requires_grad_() for x in rows]
    exact = loss(*exact_rows)
    with torch.autocast("cpu", LOSS_DTYPE):
        rounded = loss(*rows)
    exact_gradient = torch.cat(torch.autograd.grad(exact, exact_rows, materialize_grads=True))
    gradient = torch.cat(torch.autograd.grad(rounded, rows, materialize_grads=True))
    pairs_to_compare = (rounded, exact), (gradient, exact_gradient)
    return [((a - b).norm() / b.norm()).item() for a, b in pairs_to_compare]


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
    "supcon": lambda a, b: simclr.sup_con_loss(torch.stack([a, b], 1), torch.arange(64) // 4),
    "moco": lambda a, b: moco.moco_loss(a, b, keys(a))}


@pytest.mark.parametrize("name", PAPERS)
def test_only_rows_are_rounded(name):
    """Only products of rows use float16: if more of a loss did, its error would be several times larger. All
    cosines are above 0.75, as for an untrained encoder."""
    generator = torch.Generator().manual_seed(0)
    centre, q, noise = (torch.randn(n, 96, generator=generator, dtype=torch.float64) for n in (1, 64, 64))
    rows = [2 * centre + 0.9 * q, 2 * centre + 0.6 * q + 0.6 * noise]
    assert max(relative_errors(PAPERS[name], *rows)) < 1e-3
