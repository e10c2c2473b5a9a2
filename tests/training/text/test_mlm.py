"""Masked language models: which tokens are masked, and losses compared with those of the full logits."""
import itertools
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from transformers import AlbertConfig, AutoModelForMaskedLM, AutoTokenizer, DistilBertConfig, RobertaConfig

import simcse
from kernels.training.text import tokens
from kernels.training.text.encoders import SentenceEncoder
from kernels.training.text.mlm import (
    encoder_and_mlm_states,
    mask_tokens,
    masked_lm_loss,
    untie_decoder,
)
from running import NLI, equal


def test_shares_of_masked_tokens():
    """15 % of the maskable tokens are chosen; of these 80 % become [MASK], 10 % a random token (BERT)."""
    torch.manual_seed(0)
    ids, maskable = torch.randint(5, 1000, (400, 500)), torch.rand(400, 500) < 0.9
    masked, chosen = mask_tokens(ids, maskable, Mock(mask_token_id=4, __len__=lambda self: 1000))
    assert not (chosen & ~maskable).any() and equal(masked[~chosen], ids[~chosen])
    random = (masked != ids) & (masked != 4)
    shares = [chosen[maskable], (masked == 4)[chosen], (masked == ids)[chosen], random[chosen]]
    assert [x.double().mean().item() for x in shares] == pytest.approx([0.15, 0.8, 0.1, 0.1], abs=0.01)
    assert masked.min() < 4 and len(masked[random].unique()) > 900


SHAPE = dict(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)


@pytest.mark.parametrize("config", [
    RobertaConfig(**SHAPE), AlbertConfig(**SHAPE, embedding_size=8, intermediate_size=16),
    DistilBertConfig(vocab_size=40, dim=16, n_layers=2, n_heads=2, hidden_dim=32)])
def test_encoder_and_mlm_states(config):
    """The decoder applied to the chosen tokens' states gives the full model's logits of these tokens, for
    each kind of MLM head."""
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(config).eval()
    decoder, ids, chosen = model.get_output_embeddings(), torch.randint(3, 40, (3, 9)), torch.rand(3, 9) < 0.4
    torch.nn.init.normal_(decoder.bias)
    mask = (torch.arange(9) < torch.tensor([[9], [5], [7]])).long()
    output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    hidden, states = encoder_and_mlm_states(model, model.base_model, ids, mask, chosen)
    torch.testing.assert_close(hidden, output.hidden_states[-1])
    torch.testing.assert_close(decoder(states), output.logits[chosen])
    assert not model.base_model._forward_hooks and not decoder._forward_pre_hooks


@pytest.mark.parametrize("chunks", [{}, {"chunk_size": 2}])
@pytest.mark.parametrize("chosen, draw, becomes", [
    (0.1, 0.7, "[MASK]"), (0.1, 0.95, "e"), (0.1, 0.85, ""), (0.2, 0.7, "no token is chosen")])
def test_masked_lm_loss(chosen, draw, becomes, chunks, bert, monkeypatch):
    """Fixed random numbers decide whether all tokens are masked, replaced by an e, unchanged, or not chosen.
    The loss is the mean over all of them, but not over special and protected tokens. The decoder is untied
    from the word embeddings. simcse.py multiplies the loss by its weight."""
    lm, tokenizer = AutoModelForMaskedLM.from_pretrained(bert), AutoTokenizer.from_pretrained(bert)
    run = SimpleNamespace(args=SimpleNamespace(max_length=64, model=bert, **chunks),
                          device=torch.device("cpu"), bf16=False)
    model = SentenceEncoder(lm.base_model, tokenizer, run, "avg")
    model.lm = untie_decoder(lm)
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
    args = SimpleNamespace(views=["dropout"] * 2, count=2, anchors=1, objective="infonce", temperature=0.05,
                           hard_negative_weight=0.0, mlm_weight=0.3, impl="auto", precision="fp32",
                           masked=False)
    total, values = simcse.compute_loss(model, batch, 4, args)
    assert total.item() == pytest.approx((values["loss"] + 0.3 * values["mlm"]).item(), abs=1e-4)
