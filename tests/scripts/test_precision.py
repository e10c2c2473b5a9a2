"""Test --precision: the dtypes in which the kernels of each script multiply matrices."""
import pytest
import torch

import kernels
from running import DATA, SENTENCES, few_images, run

TEXT = ["--model", "scratch", "--batch-size", 8, "--data"]
PICTURES = ["--model", "resnet-small", "--data", "IMAGES", "--batch-size", 8, "--probe-epochs", 0]
UNIT, ANY = torch.float16, torch.bfloat16                      # dtypes: for unit rows, for other rows
# (script, flags, dtypes in which its kernels multiply in training with --precision bf16)
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
    """Kernels multiply in the dtypes of CALLS, or in float32 with --precision fp32. The kernels get float32
    rows, and return float32 gradients that were not rounded to 16 bits. --impl applies to all kernels."""
    documents = tmp_path / "documents.txt"
    lines = [row[0] for row in SENTENCES[:80]]
    documents.write_text("\n\n".join("\n".join(lines[i : i + 8]) for i in range(0, 80, 8)))
    paths = {"DOCUMENTS": documents, "GUIDE": bert, "IMAGES": few_images(tmp_path)}
    flags = [paths.get(flag, flag) for flag in flags]
    found, impls, gradients, make_call = set(), set(), [], kernels.call.make_call

    def listen(*arguments):
        call = make_call(*arguments)
        impls.add(call.impl)
        for x in (call.q, call.k) if torch.is_grad_enabled() else ():
            if x is not None and x.requires_grad:
                assert x.dtype == torch.float32
                found.add(call.product_dtype)
                x.register_hook(gradients.append)
        return call

    monkeypatch.setattr("kernels.call.make_call", listen)
    run(name, tmp_path / "out", *flags, "--steps", 1, "--precision", precision, "--impl", impl)
    assert found == (wanted if precision == "bf16" else {torch.float32})
    assert impls == {impl} and gradients
    assert all(x.dtype == torch.float32 and x.abs().max() > 0 for x in gradients)
    assert not any(torch.equal(x, x.to(dtype).float()) for x in gradients for dtype in (UNIT, ANY))
