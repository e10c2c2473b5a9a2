"""Masked language models: which tokens are masked, and losses compared with those of the full logits."""
import itertools
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DistilBertConfig,
    RobertaConfig,
)

import simcse
from formulas import check_equal, randn
from kernels import blockwise
from kernels.training.text import mlm, tokens
from kernels.training.text.encoders import SentenceEncoder
from kernels.training.text.mlm import (
    decoder_loss,
    encoder_and_mlm_states,
    mask_tokens,
    masked_lm_loss,
    untie_decoder,
)
from kernels.training.text.models import has_decoder
from running import NLI, equal


def test_mask_tokens():
    torch.manual_seed(0)
    ids, maskable = torch.randint(5, 1000, (400, 500)), torch.rand(400, 500) < 0.9
    masked, chosen = mask_tokens(ids, maskable, Mock(mask_token_id=4, __len__=lambda self: 1000))
    assert not (chosen & ~maskable).any() and equal(masked[~chosen], ids[~chosen])
    random = (masked != ids) & (masked != 4)
    shares = [chosen[maskable], (masked == 4)[chosen], (masked == ids)[chosen], random[chosen]]
    assert [x.double().mean().item() for x in shares] == pytest.approx([0.15, 0.8, 0.1, 0.1], abs=0.01)
    assert masked.min() < 4 and len(masked[random].unique()) > 900


@pytest.mark.parametrize("impl", ["blockwise", "eager"])
@pytest.mark.parametrize("bias", [True, False])
def test_decoder_loss(impl, bias, monkeypatch):
    strips = dict(ONE_STRIP=0, MIN_STRIP_ROWS=3, STRIP_LOGITS=1)
    for name, value in strips.items():
        monkeypatch.setattr(blockwise, name, value)
    hidden, weight, biases = randn(7, 5, 11), randn(13, 5, 12), randn(13, 1, 13)[:, 0]
    targets = torch.tensor([0, 12, 3, 3, 7, 1, 0])

    def ours(h, w, b):
        decoder = SimpleNamespace(weight=w, bias=b if bias else None)
        return decoder_loss(h, decoder, targets[: len(h)], impl=impl) + 0 * b.sum()

    check_equal(ours, lambda h, w, b: F.cross_entropy(h @ w.T + bias * b, targets), hidden, weight, biases)
    empty = ours(hidden[:0].requires_grad_(), weight, biases)
    empty.backward()
    assert empty == 0 and empty.dtype == torch.float64


@pytest.mark.parametrize("kind, wanted", [("albert", True), ("mobilebert", False), ("t5", False)])
def test_has_decoder(kind, wanted):
    """MobileBERT's decoder multiplies by two matrices, and T5's reads a second text."""
    shape = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config = AutoConfig.for_model(kind, vocab_size=40, embedding_size=8, intra_bottleneck_size=16, **shape)
    auto = AutoModelForMaskedLM if kind != "t5" else AutoModelForSeq2SeqLM
    assert has_decoder(auto.from_config(config)) == wanted


@pytest.mark.parametrize("config", [
    RobertaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2),
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


@pytest.mark.parametrize("chunks", [{}, {"chunk_size": 2}, {"chunk_tokens": 90}])
@pytest.mark.parametrize("chosen, draw, becomes", [(0.1, 0.7, "[MASK]"), (0.1, 0.95, "e"), (0.1, 0.85, ""),
                                                   (0.2, 0.7, "")])
def test_masked_lm_loss(chosen, draw, becomes, chunks, bert, monkeypatch):
    """Fixed random numbers decide whether all tokens are masked, replaced by an e, unchanged, or not chosen.
    Special tokens are never chosen. The decoder is untied, and simcse.py multiplies the loss by its
    weight."""
    lm, tokenizer = AutoModelForMaskedLM.from_pretrained(bert), AutoTokenizer.from_pretrained(bert)
    run = SimpleNamespace(args=SimpleNamespace(max_length=64, model=bert, **chunks),
                          device=torch.device("cpu"), bf16=False)
    model = SentenceEncoder(lm.base_model, tokenizer, run, "avg")
    model.lm = untie_decoder(lm)
    decoder, embeddings = lm.get_output_embeddings(), lm.get_input_embeddings()
    assert decoder.weight.data_ptr() != embeddings.weight.data_ptr()
    assert equal(decoder.weight, embeddings.weight)
    views = [tokens.tokenise([row[i] for row in NLI[:6]], tokenizer, 64)[0] for i in range(2)]
    letter, losses = tokenizer.convert_tokens_to_ids(becomes or "e"), []
    for ids in (torch.from_numpy(row).long() for view in views for row in view):
        words = ~torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
        logits = lm(input_ids=torch.where(words & bool(becomes), letter, ids)[None]).logits[0]
        losses.append(F.cross_entropy(logits[words], ids[words], reduction="none"))
    expected = torch.cat(losses).mean()
    if chosen >= 0.15:                         # no token is chosen
        expected = 0 * expected
    draws = itertools.cycle([chosen, draw])
    monkeypatch.setattr(torch, "rand", lambda shape, device: torch.full(shape, next(draws)))
    monkeypatch.setattr(torch, "randint", lambda high, shape, device: torch.full(shape, letter))
    monkeypatch.setitem(tokens.GROUP_COST, "cpu", 0)
    batch = model.batch(*views)
    assert len(batch) > 2
    embed = Mock(wraps=mlm.embed_in_chunks)
    monkeypatch.setattr(mlm, "embed_in_chunks", embed)
    masked_lm_loss(model, batch).backward()
    assert embed.call_args.args[2] is (lm if chunks else None)
    wanted = torch.autograd.grad(expected, decoder.weight)[0]
    found = torch.zeros_like(wanted) if decoder.weight.grad is None else decoder.weight.grad
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)
    args = SimpleNamespace(views=["dropout"] * 2, count=2, anchors=1, objective="infonce", temperature=0.05,
                           hard_negative_weight=0.0, mlm_weight=0.3, impl="auto", precision="fp32",
                           masked=False)
    total, values = simcse.compute_loss(model, batch, 6, args)
    assert values["mlm"].item() == pytest.approx(expected.item(), abs=1e-4)
    assert total.item() == pytest.approx(values["loss"].item() + 0.3 * expected.item(), abs=1e-4)
