"""Test tacl.py: the student's three losses, compared with those of transformers, its scores, the frozen
teacher, and the saved files. Sentence pairs and masks are tested in tests/training/papers."""
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer, BertConfig, BertForPreTraining, BertModel

import loss_formulas
import tacl
from families import small_model
from loss_formulas import cosines
from running import equal, run


@pytest.fixture
def files(documents):
    """Return flags for a run on these two files."""
    return ["--batch-size", 8, "--max-length", 48, "--data", documents[0], "--dev", documents[1]]


@pytest.fixture(scope="module")
def with_heads(tmp_path_factory, bert):
    """Return a folder that contains a BERT with all its pre-training heads, and the tokenizer of `bert`."""
    folder, tokenizer = tmp_path_factory.mktemp("heads"), AutoTokenizer.from_pretrained(bert)
    torch.manual_seed(1)
    model = BertForPreTraining(BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        vocab_size=len(tokenizer), initializer_range=0.2, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0))
    for parameter in model.cls.parameters():                   # biases are 0 without this
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build(flags, model, **changes):
    """Return (student, teacher, flags, nine sentence pairs, nine sentences). `changes` replace flags.
    --max-length is 256, so that the pairs have many lengths."""
    args = tacl.make_parser().parse_args([*map(str, flags), "--model", str(model), "--dev-pairs", "9"])
    vars(args).update(max_length=256, **changes)
    torch.manual_seed(0)
    model, teacher = tacl.build_model(args, SimpleNamespace(device=torch.device("cpu"), bf16=False))
    pairs, _ = tacl.load_dev(args.data, 8, model, args)
    return model, teacher, args, pairs, tacl.load_dev(args.dev, 4, model, args)[1]


def padded(rows, part, width):
    """Return entry number `part` of all rows as one tensor (rows, width), padded with 0."""
    return torch.stack([F.pad(torch.tensor(row[part]), (0, width - len(row[0]))) for row in rows]).long()


@pytest.mark.parametrize("form", ["paper", "code"])
@pytest.mark.parametrize("grad_accum, weight", [(1, 1), (4, 0.5)])
def test_losses_equal_those_of_transformers(form, grad_accum, weight, files, with_heads):
    """Losses and gradients, summed over micro-batches, equal those of BertForPreTraining and of the
    contrastive loss on the whole batch. The decoder computes no logits. `evaluate` returns equal losses and
    the accuracy."""
    changes = dict(form=form, grad_accum=grad_accum, contrastive_weight=weight, impl="eager")
    model, teacher, args, rows, sentences = build(files, with_heads, **changes)
    for parameter in model.encoder.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)   # makes the student differ from the teacher
    values, seen, decoder = Counter(), [], model.lm.get_output_embeddings()
    micro_batches = tacl.make_batch(rows, model.train(), args)
    lengths = sorted(len(row[0]) for row in rows)
    size = 9 if grad_accum == 1 else 3                         # number of rows of a micro-batch
    widths = lengths[size - 1 :: size] if form == "paper" else [256] * (9 // size)
    assert [micro_batch[0].shape[1] for micro_batch in micro_batches] == widths and len(set(lengths)) > 4
    with decoder.register_forward_hook(lambda *x: seen.append(x[2].numel())):
        for micro_batch in micro_batches:
            loss, found = tacl.compute_loss(model, micro_batch, tacl.mean_weights(rows), args, teacher)
            loss.backward()
            values.update({name: value.item() for name, value in found.items()})
    evaluated = tacl.evaluate(model, (rows, sentences), args, teacher)
    ours = {name: parameter.grad.clone() for name, parameter in model.lm.named_parameters()}
    model.zero_grad()
    ids, segments, masked_ids, is_masked = (padded(rows, part, widths[-1]) for part in (0, 1, 3, 4))
    real, is_masked, labels = ids > 0, is_masked > 0, torch.tensor([int(row[2]) for row in rows])
    inputs = dict(attention_mask=real, token_type_ids=segments)
    library = model.lm(masked_ids, **inputs, labels=ids.where(is_masked, -100), next_sentence_label=labels,
                       output_hidden_states=True)
    t = BertModel.from_pretrained(with_heads).eval()(ids, **inputs).last_hidden_state.detach().double()
    s = library.hidden_states[-1].double()
    contrast = loss_formulas.tacl_loss(s, t, is_masked, real, 0.01, form)
    (library.loss + weight * contrast).backward()
    assert set(seen) == {0} and model.missing_heads == [] and model.training
    for name, parameter in model.lm.named_parameters():
        rounding = 2e-3 * parameter.grad.abs().max().item() + 1e-5
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=rounding, msg=name)
    nsp = F.cross_entropy(library.seq_relationship_logits, labels).item()
    for found in (values, evaluated):
        assert [found["mlm"], found["nsp"]] == pytest.approx([library.loss.item() - nsp, nsp], abs=2e-5)
        assert found["contrast"] == pytest.approx(contrast.item(), rel=2e-3)   # τ = 0.01 enlarges rounding
        total = found["mlm"] + found["nsp"] + weight * found["contrast"]
        assert found["loss"] == pytest.approx(total, abs=1e-4)
    ends = real.sum(1) if form == "paper" else [256] * 9       # "code" compares with padding, too
    right = [i == cosines(s[row, i], t[row, : ends[row]]).argmax() for row, i in is_masked.nonzero()]
    assert evaluated["accuracy"] == pytest.approx(100 * np.mean(right), abs=1e-3)
    assert 0.05 < np.mean(right) < 1


def test_token_similarity(files, with_heads):
    """Each layer has two similarities: a mean over sentences, without [CLS] and [SEP], and a mean over all
    pairs of tokens, with [CLS] and [SEP]. The first mean leaves out a sentence of one word."""
    model, teacher, args, rows, sentences = build(files, with_heads)
    found = tacl.evaluate(model, (rows, sentences), args, teacher)
    assert len(sentences[0][0]) == 3 and len(sentences) == 9
    states = [model.encoder(torch.tensor(ids)[None].long(), output_hidden_states=True).hidden_states
              for ids, *_ in sentences]
    for layer in range(3):
        pairs = [cosines(x[layer][0], x[layer][0]) for x in states]
        pairs = [x.where(~torch.eye(len(x), dtype=torch.bool), torch.nan) for x in pairs]
        inner = torch.stack([x[1:-1, 1:-1].nanmean() for x in pairs[1:]]).mean()
        assert found["similarity"][layer] == pytest.approx(inner.item(), abs=1e-5)
        both = torch.cat([x.flatten() for x in pairs]).nanmean()
        assert found["similarity_special"][layer] == pytest.approx(both.item(), abs=1e-5)


def test_missing_heads_and_frozen_teacher(tmp_path, files):
    """The heads that a DistilBERT lacks are added and trained. The teacher is frozen, is no part of the model
    that is saved, and stays without dropout after model.train()."""
    folder = small_model("DistilBert", tmp_path, max_position_embeddings=512, initializer_range=0.02)
    model, teacher, args, rows, _ = build(files, folder)
    micro_batch, = tacl.make_batch(rows, model, args)
    model.train()
    loss, values = tacl.compute_loss(model, micro_batch, tacl.mean_weights(rows), args, teacher)
    loss.backward()
    heads = {"vocab_layer_norm", "vocab_projector", "vocab_transform", "next sentence"}
    assert set(model.missing_heads) == heads
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert values["nsp"].item() == pytest.approx(math.log(2), abs=0.05)
    assert not any(p.requires_grad or p in {*model.parameters()} for p in teacher.parameters())
    ids, _, segments, real, *_ = micro_batch

    def states(encoder):
        return tacl.run_encoder(encoder, ids, segments, real).last_hidden_state
    assert torch.equal(states(teacher), states(teacher))
    assert not torch.equal(states(model.encoder), states(teacher))
    assert torch.equal(states(model.eval().encoder), states(teacher))


def test_saved_student(tmp_path, files, bert):
    """The printed code loads the encoder of state.pt, with its pooler but without heads and teacher."""
    result, out = run("tacl", tmp_path / "out", *files, "--model", bert, "--steps", 2), tmp_path / "out"
    model = eval(result.said["load"], {"AutoModel": AutoModel})
    inside = {name.removeprefix("lm.bert."): weight for name, weight in result.state["model"].items()
              if name.startswith("lm.bert.")}
    assert equal(dict(model.state_dict()), inside) and {*load_file(out / "model.safetensors")} == {*inside}
    assert any("pooler" in name for name in inside) and not any("teacher" in x for x in result.state["model"])
