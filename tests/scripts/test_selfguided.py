"""Test selfguided.py: the first loss, the two copies of the encoder, sampled layers, columns of sentences."""
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModel

import loss_formulas
import selfguided
from kernels.training.text import tokens
from running import ONE_BATCH, SENTENCES, embed_unbatched, run_text
from selfguided import add_regulariser_gradient, compute_loss, pool_layers

ROWS = [["Yes."], ["no, " * 20], *SENTENCES[:10]]
TEXT = [row[0] for row in ROWS]
POOL = dict(max=lambda x: x.amax(0), mean=lambda x: x.mean(0), sum=lambda x: x.sum(0))      # states x (L, H)


@pytest.mark.parametrize("objective, flags, pooling, layers", [
    ("base", "--layers 2", "max", [2]), ("opt1", "--layers 2 --form code", "mean", [2]),
    ("opt2", "--layers 0 --view-pooling sum", "sum", [0]), ("opt3", "--temperature 0.1", "max", range(4))])
def test_first_loss_matches_the_formula(objective, flags, pooling, layers, tmp_path, bert, monkeypatch):
    """The first loss equals the formula on hidden states of one sentence at a time. The views depend neither
    on the weights of the tuned copy nor on how rows are grouped for encoding."""
    flags = ["--objective", objective, "--lr", 0, "--projection-dim", 16, *ONE_BATCH, *flags.split()]
    result = run_text("selfguided", tmp_path, ROWS, "--model", bert, *flags)
    model, head = result.model, result.model.projection
    assert [type(part).__name__ for part in head] == ["Linear", "GELU"] * 2 and head[1].approximate == "none"
    encoder = AutoModel.from_pretrained(bert, output_hidden_states=True).eval().requires_grad_(False)
    states = [encoder(**model.tokenizer(text, return_tensors="pt")).hidden_states for text in TEXT]
    views = torch.stack([torch.stack([POOL[pooling](x[layer][0]) for layer in layers]) for x in states])
    c = head(embed_unbatched(encoder, model.tokenizer, TEXT, "cls")).double()
    expected = loss_formulas.selfguided_loss(c, head(views).double(), result.args.temperature, objective)
    assert result.losses == pytest.approx([expected.item()], rel=1e-4)
    for weight in model.encoder.encoder.parameters():
        weight.data *= 1.5
    for cost in (0, 10**6):
        monkeypatch.setitem(tokens.GROUP_COST, "cpu", cost)
        batch = model.batch(tokens.tokenise(TEXT, model.tokenizer, 128)[0])
        assert len(batch) == 1 if cost else len(batch) > 4
        found = pool_layers(model, encoder, batch, model.layers, pooling)
        torch.testing.assert_close(found, views, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["paper", "code"])
def test_fixed_copy_does_not_change_and_regularises_the_tuned_copy(form, tmp_path, monkeypatch):
    """Six steps change all weights of the tuned copy T except the embedding layer, and no weight of the fixed
    copy F. state.pt does not contain F. Only --form code gives F dropout. The regulariser has the gradient 2λ
    (θ_T − θ_F). The regulariser's value is 0, not NaN, while T equals F."""
    flags = ["--model", "scratch", "--form", form, "--projection-dim", 16, "--regulariser-weight", 0.3]
    made, build_model = [], selfguided.build_model
    monkeypatch.setattr(selfguided, "build_model", lambda *given: made.append(build_model(*given)) or made[0])
    result = run_text("selfguided", tmp_path, ROWS, *flags, "--lr", 1e-2, *ONE_BATCH, "--steps", 6)
    model, args, fixed = result.model.train(), result.args, made[0][1]
    assert [step["distance"] > 0 for step in result.steps] == [False] * 2 + [True] * 4
    torch.manual_seed(args.seed)
    start = dict(build_model(args, result.run)[0].encoder.named_parameters())
    assert all(torch.equal(weight, start[name]) for name, weight in fixed.named_parameters())
    for name, weight in model.encoder.named_parameters():
        assert torch.equal(weight, start[name]) == name.startswith("embeddings."), name
    assert {name.split(".")[0] for name in result.state["model"]} == {"encoder", "projection"}
    batch = model.batch(tokens.tokenise(TEXT, model.tokenizer, 128)[0])
    same = torch.equal(*(pool_layers(model, fixed, batch, model.layers, "max") for _ in range(2)))
    assert same == (form == "paper") and not torch.equal(model(batch), model(batch))
    model.zero_grad()
    views = pool_layers(model, fixed, batch, model.layers, "max")
    compute_loss(model, (batch, views), 12, args)[0].backward()
    pairs = list(zip(model.encoder.encoder.parameters(), fixed.encoder.parameters()))
    expected = [tuned.grad + 0.6 * (tuned - fixed) for tuned, fixed in pairs]
    distance = sum((tuned - fixed).square().sum() for tuned, fixed in pairs).item()
    assert add_regulariser_gradient(model, fixed, args).item() == pytest.approx(distance, rel=1e-5)
    assert distance > 0.1
    torch.testing.assert_close([tuned.grad for tuned, _ in pairs], expected)


def test_one_layer_is_sampled_per_sentence(monkeypatch):
    """The views are made so that each number in a view is the index of its layer: 0, 1 or 2."""
    views, loss = torch.arange(3.0)[:, None].expand(600, 3, 4), Mock(return_value=torch.zeros(()))
    monkeypatch.setattr(selfguided, "selfguided_loss", loss)
    model = Mock(return_value=views[:, 0], projection=torch.nn.Identity(), device=views.device, bf16=False)
    for _ in range(2):
        compute_loss(model, (None, views), 600, Mock(objective="opt2"))
    first, second = (call.args[1] for call in loss.call_args_list)
    assert first.shape == (600, 1, 4) and torch.equal(first.amin(2), first.amax(2))
    assert first.long().flatten().bincount().min() > 4 * 150 and 300 < (first != second).sum() / 4 < 500


@pytest.mark.parametrize("content, flags, sentences", [
    ("sentence1\tscore\tsentence2\tgenre\nA\t5\tB\tx\nC\t0.5\t7\tx\n", "", "A B C 7"),     # known names
    ("sentence\tlabel\nA\tB\nC\tD\n", "", "A C"),
    ("A\tB\t-5\nC\t7\t1e-05\n", "", "A B C 7"), ("A\tB\t-5\nC\t7\t1e-05\n", "--columns 2 1", "B A 7 C")])
def test_columns_of_sentences(content, flags, sentences, tmp_path):
    """Sentences come from --columns, from columns with known names, or else from columns of texts."""
    (tmp_path / "a.tsv").write_text(content)
    args = selfguided.make_parser().parse_args(["--data", "x", "--batch-size", "2", *flags.split()])
    assert [text for _, (text,) in selfguided.load_data(tmp_path / "a.tsv", args)] == sentences.split()
