"""Test --precision: the dtypes in which the kernels and the layers of each script multiply matrices."""
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

import kernels
from good import words
from running import run

UNIT, ANY = torch.float16, torch.bfloat16                      # dtypes of unit rows and of other rows
# (script and flags, dtypes in which its kernels multiply in training with --precision bf16)
CALLS = [("simcse", {UNIT}), ("simcse --data few.txt --mlm-weight 1", {UNIT, ANY}), ("selfguided", {UNIT}),
         ("cline", {ANY}), ("tacl", {UNIT, ANY}), ("ease", {UNIT}), ("vascl", {UNIT}), ("dclr", {UNIT}),
         ("dclr --form code", {UNIT}), ("simclr", {UNIT}), ("moco", {UNIT})]


@pytest.mark.parametrize("precision, impl, command, wanted", [
    *(("bf16", "blockwise", *call) for call in CALLS), *(("fp32", "eager", *call) for call in CALLS[::2])])
def test_dtypes_of_products_and_gradients(command, wanted, precision, impl, here, monkeypatch):
    """Kernels multiply in the dtypes of CALLS, or in float32 with --precision fp32. The kernels get float32
    rows, and return float32 gradients that were not rounded to 16 bits. --impl applies to all kernels. With
    --precision bf16, the encoder's layers multiply in bfloat16."""
    found, impls, gradients, make_call, of_layers = set(), set(), [], kernels.call.make_call, set()

    def listen(*arguments):
        call = make_call(*arguments)
        impls.add(call.impl)
        for x in (call.q, call.k) if torch.is_grad_enabled() else ():
            if x is not None and x.requires_grad:
                assert x.dtype == torch.float32
                found.add(call.product_dtype)
                x.register_hook(gradients.append)
        return call

    def listen_to_layers(module, _, output):
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d)) and torch.is_grad_enabled():
            of_layers.add(output.dtype)

    monkeypatch.setattr("kernels.call.make_call", listen)
    monkeypatch.chdir(here)
    name, *flags = words(command)
    with register_module_forward_hook(listen_to_layers):
        run(name, here / "out", *flags, "--precision", precision, "--impl", impl)
    assert (torch.bfloat16 in of_layers) == (precision == "bf16"), of_layers
    assert found == (wanted if precision == "bf16" else {torch.float32})
    assert impls == {impl} and gradients
    assert all(x.dtype == torch.float32 and x.abs().max() > 0 for x in gradients)
    assert not any(torch.equal(x, x.to(dtype).float()) for x in gradients for dtype in (UNIT, ANY))
