"""Sentence encoders: every pooling against its definition, saved folders in other libraries, and models that
cannot be loaded."""
import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertModel, CanineTokenizer, XLMConfig

from kernels.training.errors import UserError
from kernels.training.flags import POOLINGS
from kernels.training.text import tokens
from kernels.training.text.encoders import SentenceEncoder, init_linear
from kernels.training.text.models import load_text_model
from running import NLI, SMALL, embed_unbatched, rejects


def make_encoder(folder, pooling, head=None, **more):
    """Return the SentenceEncoder of a folder with this pooling and head."""
    encoder, tokenizer = load_text_model(str(folder))
    limits = {name: more.pop(name, None) for name in ("chunk_size", "chunk_tokens")}
    args = SimpleNamespace(model=str(folder), max_length=32, **limits)
    run = SimpleNamespace(args=args, device=torch.device("cpu"), bf16=False)
    return SentenceEncoder(encoder, tokenizer, run, pooling, head, **more)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("keep", [True, False])
def test_embeddings_match_the_definition(pooling, keep, bert, monkeypatch):
    """Embeddings do not depend on the order and the groups of the rows. The head is used in training, and at
    inference only with keep_head."""
    sentences = ["Yes.", "no, " * 20, *(row[0] for row in NLI[:10])]
    torch.manual_seed(1)
    head = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) if pooling == "cls" else None
    model = make_encoder(bert, pooling, head, keep_head=keep)
    rows, group_counts = tokens.tokenise(sentences, model.tokenizer, 512)[0], set()
    bare = embed_unbatched(model.encoder, model.tokenizer, sentences, pooling)
    headed = model.head(bare) if pooling == "cls" else bare
    for training, cost in itertools.product((True, False), (0, 60, 10**6)):
        model.train(training)
        monkeypatch.setitem(tokens.GROUP_COST, "cpu", cost)
        wanted = headed if training or keep else bare
        for order in (range(12), range(11, -1, -1), [7, 1, 3, 0, 3]):
            batch = model.batch([rows[i] for i in order])
            group_counts.add(len(batch))
            torch.testing.assert_close(model(batch), wanted[list(order)], atol=1e-5, rtol=0)
        views = model.batch(rows, rows[::-1])
        torch.testing.assert_close(model(views), torch.cat([wanted, wanted.flip(0)]), atol=1e-5, rtol=0)
    assert min(group_counts) == 1 and max(group_counts) > 4
    embedded = model.eval().embed_texts(sentences, size=5)
    torch.testing.assert_close(embedded, headed if keep else bare, atol=1e-5, rtol=0)


def test_batches_and_chunks_of_one_row(bert):
    """Results keep their two dimensions, and chunks give the gradients of the whole batch."""
    rows = tokens.tokenise([row[0] for row in NLI[:5]], AutoTokenizer.from_pretrained(bert), 32)[0]
    gradients = []
    for size, most in ((None, None), (1, None), (2, None), (None, 1), (2, 50)):
        model = make_encoder(bert, "avg", chunk_size=size, chunk_tokens=most)
        z = model(model.batch(rows))
        assert z.shape == (5, 32) and model(model.batch(rows[:1])).shape == (1, 32)
        z.square().sum().backward()
        found = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
        gradients.append(torch.cat(found))
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-4, atol=1e-4)


# ── models that cannot be loaded ──


def test_slow_tokenizer_is_rejected(tmp_path):
    """CanineTokenizer has no vocabulary file; the weights in the folder are fine."""
    shape = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16)
    BertModel(BertConfig(vocab_size=16, **shape)).save_pretrained(tmp_path)
    CanineTokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError) as end:
        load_text_model(str(tmp_path), flag="--guide")
    wanted = f"--guide {tmp_path}: CanineTokenizer is a slow tokenizer, expected one with a tokenizer.json"
    assert str(end.value) == wanted


def test_triton_on_a_cpu_is_an_error(cwd, monkeypatch, capfd):
    """Without TRITON_INTERPRET, --impl triton is an error on a CPU."""
    monkeypatch.setattr("kernels.gpu.launch.INTERPRETED", False)
    rejects("simcse", capfd, "--impl: 'triton'.*", *SMALL, "--impl", "triton")


@pytest.mark.parametrize("config", [BertConfig(initializer_range=0.3), XLMConfig(init_std=0.3)])
def test_new_layers_have_the_models_initialisation(config):
    linear = init_linear(torch.nn.Linear(300, 300), config)
    assert linear.weight.std().item() == pytest.approx(0.3, rel=0.05) and linear.bias.eq(0).all()
