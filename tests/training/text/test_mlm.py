"""Test masked language models: which tokens are masked, and the loss, compared with that of full logits."""
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForMaskedLM, AutoTokenizer

import simcse
from kernels.training.text import tokens
from kernels.training.text.checkpoint import pooler_weights
from kernels.training.text.encoders import SentenceEncoder
from kernels.training.text.mlm import masked_lm_loss, untie_decoder
from running import NLI, equal


@pytest.mark.parametrize("chunks", [{}, {"chunk_size": 2}])
@pytest.mark.parametrize("chosen, draw, becomes", [
    (0.149, 0.799, "[MASK]"), (0.149, 0.901, "e"), (0.149, 0.801, ""), (0.149, 0.899, ""),
    (0.151, 0.799, "no token is chosen")])
def test_masked_lm_loss(chosen, draw, becomes, chunks, bert, monkeypatch):
    """Fixed random numbers decide whether all tokens are masked, replaced by an e, unchanged, or not chosen.
    The loss is the mean over chosen tokens. Special and protected tokens are never chosen. The decoder is
    untied from the word embeddings. simcse.py multiplies the loss by --mlm-weight."""
    lm, tokenizer = AutoModelForMaskedLM.from_pretrained(bert), AutoTokenizer.from_pretrained(bert)
    run = SimpleNamespace(args=SimpleNamespace(max_length=64, model=bert, **chunks),
                          device=torch.device("cpu"), bf16=False)
    model = SentenceEncoder(lm.base_model, tokenizer, run, "avg")
    model.lm = lm
    untie_decoder(lm)
    decoder, embeddings = lm.get_output_embeddings(), lm.get_input_embeddings()
    torch.nn.init.normal_(decoder.bias)
    assert decoder.weight is not embeddings.weight and equal(decoder.weight, embeddings.weight)
    views = [tokens.tokenise([row[i] for row in NLI[:4]], tokenizer, 64)[0] for i in range(2)]
    letter, protected = tokenizer.convert_tokens_to_ids("e"), tokenizer.convert_tokens_to_ids("##a")
    new, losses = {"[MASK]": tokenizer.mask_token_id, "e": letter}.get(becomes), []
    for ids in (torch.from_numpy(row).long() for view in views for row in view):
        words = ~torch.isin(ids, torch.tensor([*tokenizer.all_special_ids, protected]))
        logits = lm(input_ids=(torch.where(words, new, ids) if new else ids)[None]).logits[0]
        losses.append(F.cross_entropy(logits[words], ids[words], reduction="none"))
    expected = torch.cat(losses).mean() * (chosen < 0.15)
    draws = itertools.cycle([chosen, draw])
    monkeypatch.setattr(torch, "rand", lambda shape, device: torch.full(shape, next(draws)))
    monkeypatch.setattr(torch, "randint", lambda high, shape, device: torch.full(shape, letter))
    monkeypatch.setitem(tokens.GROUP_COST, "cpu", 0)
    batch = model.batch(*views)
    assert len(batch) > 2
    loss = masked_lm_loss(model, batch, protected=lambda ids: ids == protected)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-4)
    weights = decoder.weight, decoder.bias, embeddings.weight
    found = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
    wanted = torch.autograd.grad(expected, weights)
    torch.testing.assert_close(found, [*wanted], atol=1e-4, rtol=1e-3)
    args = SimpleNamespace(count=2, temperature=0.05, hard_negative_weight=0.0, mlm_weight=0.3, impl="auto",
                           precision="fp32")
    total, values = simcse.compute_loss(model, batch, 4, args)
    state = torch.get_rng_state()                              # pooler_weights must not change this state
    assert pooler_weights(model, []) and torch.equal(torch.get_rng_state(), state)
    assert total.item() == pytest.approx((values["loss"] + 0.3 * values["mlm"]).item(), abs=1e-4)
