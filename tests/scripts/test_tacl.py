"""tacl.py: the loss against float64 sums over single anchors, the model, whole runs, bad input."""
import json
import math
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer, BertConfig, BertForPreTraining, BertModel, DistilBertConfig
from transformers import DistilBertForMaskedLM as DistilBertLM

import tacl
from formulas import both_impls, check_equal, randn
from kernels import blockwise
from running import SENTENCES, equal, rejects, run, run_distributed
from tacl import tacl_loss
from whole_runs import check_processes

both_forms = pytest.mark.parametrize("form", ["paper", "code"])

# ── the loss ──


def cosines(a, b):
    """Return the cosines of rows; those with a zero vector are 0."""
    return a @ b.T / (a.norm(dim=-1, keepdim=True).clamp(min=1e-8) * b.norm(dim=1).clamp(min=1e-8))


def reference_loss(student, teacher, masked, real, temperature, form, similarity="cosine"):
    """Return the paper's sum over anchors, divided by their number as in the released code. With form "code"
    the denominator includes padding."""
    losses = []
    for s, t, is_masked, is_real in zip(student, teacher, masked, real):
        for i in (is_masked & is_real).nonzero()[:, 0]:
            logits = s[i] @ t.T if similarity == "dot" else cosines(s[i], t) / temperature
            terms = torch.exp(logits)
            losses.append(-torch.log(terms[i] / (terms[is_real] if form == "paper" else terms).sum()))
    return sum(losses, 0 * student.sum()) / max(1, len(losses))


def random_batch(b, length, d, seed):
    """Return (student, teacher, masked, attention mask), with padding at the end, at the start and in
    between. The last sequence has no anchor."""
    student, teacher = (randn(b * length, d, seed + i).view(b, length, d) for i in (0, 1))
    masked = torch.rand(b, length, generator=torch.Generator().manual_seed(seed)) < 0.3
    place = torch.arange(length)
    real = torch.stack([[place < length - row, place >= row, place % 3 != 1][row % 3] for row in range(b)])
    masked[0, 1] = True
    masked[-1] &= b == 1
    return student, teacher, masked, real


@both_impls
@both_forms
@pytest.mark.parametrize("shape", [(1, 4, 3), (6, 7, 4), (3, 40, 8)], ids=str)
@pytest.mark.parametrize("temperature", [0.01, 0.5])
def test_tacl_loss(impl, form, shape, temperature, monkeypatch):
    """Cases: random vectors, a student close to the teacher, a student equal to it, zero vectors, one token
    per sequence (no negatives, except padding), masked padding (not an anchor) and no mask at all (loss 0);
    each with cosines and dot products.

    The strips of impl "blockwise" are small: short sequences share a strip, and long ones are cut. The
    teacher gets no gradient and is not changed.
    """
    strips = dict(ONE_STRIP=0, MIN_STRIP_ROWS=5, STRIP_LOGITS=1)
    for name, value in strips.items():
        monkeypatch.setattr(blockwise, name, value)
    student, teacher, masked, real = random_batch(*shape, seed=sum(shape))
    leaf = teacher.clone().requires_grad_()
    zeros = teacher.clone()
    zeros[:, 1] = 0
    first = torch.zeros_like(real)
    first[:, 0] = True
    for s, t, is_masked, is_real in (
            (student, leaf, masked, real), (teacher + 0.3 * student, teacher, masked, real),
            (student, student, masked, real), (zeros, zeros, masked, real), (student, teacher, first, first),
            (student, teacher, ~real, real), (student, teacher, masked & False, real)):
        for similarity in ("cosine", "dot"):
            given = is_masked.int(), is_real.long(), temperature, form
            same = t.detach(), is_masked, is_real, temperature, form, similarity
            check_equal(lambda s: tacl_loss(s, t, *given, similarity=similarity, impl=impl),
                  lambda s: reference_loss(s, *same), s)
    assert leaf.grad is None and torch.equal(leaf, teacher)


@both_impls
@pytest.mark.parametrize("name, error", [("float32", 1e-5), ("bfloat16", 0.1), ("float16", 0.02)])
def test_dtypes_and_tiny_losses(impl, name, error):
    """A loss far below float32's resolution near 1 is accurate. The defaults are τ = 0.01 and no padding."""
    student, teacher, masked, real = random_batch(3, 9, 16, seed=10)
    given = (student + 2 * teacher).to(getattr(torch, name)), teacher.to(getattr(torch, name))
    loss = tacl_loss(*given, masked, real, impl=impl)
    exact = tacl_loss(*(x.double() for x in given), masked, real, impl=impl)
    assert loss.dtype == torch.float32 and abs(loss - exact) < error
    assert tacl_loss(*given, masked & False).dtype == torch.float32
    wide = F.normalize(randn(27, 48, 4), dim=1).view(3, 9, 48)
    others = [torch.cat([wide[b, :i], wide[b, i + 1 :]]) @ wide[b, i] for b, i in masked.nonzero()]
    tiny = np.mean([torch.log1p(torch.exp((x - 1) / 0.01).sum()).item() for x in others])
    assert tiny < 1e-15
    assert tacl_loss(wide.float(), wide.float(), masked, impl=impl).item() == pytest.approx(tiny, rel=1e-2)


# ── the model and its three losses ──


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write --data and --dev, and return the flags that name them."""
    folder, lines = tmp_path_factory.mktemp("documents"), [line for line, in SENTENCES]
    for name, head, first, count in (("data", "", 0, 8), ("dev", "I\n", 500, 4)):
        documents = ["\n".join(lines[i : i + 5]) for i in range(first, first + 5 * count, 5)]
        (folder / name).write_text(head + "\n\n".join(documents), encoding="utf-8")
    return ["--batch-size", 8, "--max-length", 48, "--data", folder / "data", "--dev", folder / "dev"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, bert):
    """Write four models with the tokenizer of `bert`: a BERT with all its heads, one with a larger hidden
    size, and a DistilBERT (with dropout) with and without its masked-LM head."""
    home, tokenizer = tmp_path_factory.mktemp("models"), AutoTokenizer.from_pretrained(bert)
    torch.manual_seed(1)
    shape = dict(num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=len(tokenizer),
                 hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = DistilBertConfig(vocab_size=len(tokenizer), dim=32, n_layers=2, n_heads=2, hidden_dim=64)
    models = {"bert": BertForPreTraining(BertConfig(hidden_size=32, initializer_range=0.2, **shape)),
              "wide": BertModel(BertConfig(hidden_size=64, **shape))}
    models["distilbert-lm"] = DistilBertLM(config)
    models["distilbert"] = models["distilbert-lm"].distilbert
    for parameter in models["bert"].cls.parameters():          # biases, too
        torch.nn.init.normal_(parameter, std=0.3)
    for name, model in models.items():
        model.save_pretrained(home / name)
        tokenizer.save_pretrained(home / name)
    return home


def build(flags, model, **changes):
    """Return (model, flags, nine pairs, nine sentences). `changes` replace flags; --max-length is long, so
    that the pairs have many lengths."""
    args = tacl.make_parser().parse_args([*map(str, flags), "--model", str(model), "--dev-pairs", "9"])
    vars(args).update(max_length=256, **changes)
    torch.manual_seed(0)
    model, teacher = tacl.build_model(args, SimpleNamespace(device=torch.device("cpu"), bf16=False))
    pairs, _ = tacl.load_dev(args.data, 8, model, args)
    return model, teacher, args, pairs, tacl.load_dev(args.dev, 4, model, args)[1]


@both_forms
@pytest.mark.parametrize("grad_accum, weight", [(1, 1), (4, 0.5)])
def test_compute_loss_and_evaluate(form, grad_accum, weight, files, folders, monkeypatch):
    """Losses and gradients equal BertForPreTraining's own losses and the contrastive loss of each row.

    The decoder computes no logits, and --impl reaches the kernels. `evaluate` returns the same losses, the
    accuracy, and the token similarity of each layer, here computed with loops.
    """
    changes = dict(form=form, grad_accum=grad_accum, contrastive_weight=weight, impl="eager")
    model, teacher, args, rows, sentences = build(files, folders / "bert", **changes)
    for parameter in model.encoder.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)   # unlike its teacher
    values, seen, decoder = Counter(), [], model.lm.get_output_embeddings()
    kernels = {name: Mock(wraps=getattr(tacl, name)) for name in ("decoder_loss", "similarity_lse")}
    for name, kernel in kernels.items():
        monkeypatch.setattr(tacl, name, kernel)
    micro_batches = tacl.make_batch(rows, model.train(), args)
    lengths = sorted(len(row[0]) for row in rows)
    size = 9 if grad_accum == 1 else 3                         # rows of a micro-batch, of similar length
    widths = lengths[size - 1 :: size] if form == "paper" else [256] * (9 // size)
    assert [micro_batch[0].shape[1] for micro_batch in micro_batches] == widths
    assert len(set(lengths)) > 4 and len(rows) == len(sentences) == 9 and model.missing_heads == []
    with decoder.register_forward_hook(lambda *x: seen.append(x[2].numel())):
        for micro_batch in micro_batches:
            loss, found = tacl.compute_loss(model, micro_batch, tacl.mean_weights(rows), args, teacher)
            loss.backward()
            values.update({name: value.item() for name, value in found.items()})
    calls = [call for kernel in kernels.values() for call in kernel.call_args_list]
    assert {call.kwargs["impl"] for call in calls} == {"eager"} and set(seen) == {0}
    evaluated = tacl.evaluate(model, (rows, sentences), args, teacher)
    assert model.training
    ours = {name: parameter.grad.clone() for name, parameter in model.lm.named_parameters()}
    model.zero_grad()

    def column(k):                                             # entry k of each row, padded
        padded = [F.pad(torch.tensor(row[k]), (0, widths[-1] - len(row[0]))) for row in rows]
        return torch.stack(padded).long()
    ids, segments, masked_ids, is_masked = column(0), column(1), column(3), column(4) > 0
    real, labels = ids > 0, torch.tensor([int(row[2]) for row in rows])
    inputs = dict(attention_mask=real, token_type_ids=segments)
    library = model.lm(masked_ids, **inputs, labels=ids.where(is_masked, -100), next_sentence_label=labels,
                       output_hidden_states=True)
    t = BertModel.from_pretrained(folders / "bert").eval()(ids, **inputs).last_hidden_state.detach().double()
    s = library.hidden_states[-1].double()
    contrast = reference_loss(s, t, is_masked, real, 0.01, form)
    (library.loss + weight * contrast).backward()
    for name, parameter in model.lm.named_parameters():
        rounding = 2e-3 * parameter.grad.abs().max().item() + 1e-5
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=rounding, msg=name)
    nsp = F.cross_entropy(library.seq_relationship_logits, labels).item()
    for found in (values, evaluated):
        assert [found["mlm"], found["nsp"]] == pytest.approx([library.loss.item() - nsp, nsp], abs=2e-5)
        assert found["contrast"] == pytest.approx(contrast.item(), rel=2e-3)   # float32 at τ = 0.01
        total = found["mlm"] + found["nsp"] + weight * found["contrast"]
        assert found["loss"] == pytest.approx(total, abs=1e-4)
    ends = real.sum(1) if form == "paper" else [256] * 9       # with form "code" padding may be nearest
    right = [i == cosines(s[row, i], t[row, : ends[row]]).argmax() for row, i in is_masked.nonzero()]
    assert evaluated["accuracy"] == pytest.approx(100 * np.mean(right), abs=1e-3) and 0.1 < np.mean(right) < 1
    assert len(sentences[0][0]) == 3                           # one word: its similarity is NaN
    states = [model.encoder(torch.tensor(ids)[None].long(), output_hidden_states=True).hidden_states
              for ids, *_ in sentences]
    for i, found in enumerate(evaluated["similarity"]):        # without [CLS] and [SEP]
        each = [cosines(layers[i][0, 1:-1], layers[i][0, 1:-1]) for layers in states[1:]]
        means = [(x.sum() - len(x)).item() / (len(x) ** 2 - len(x)) for x in each]
        assert found == pytest.approx(np.mean(means), abs=1e-5)
        each = [cosines(layers[i][0], layers[i][0]) for layers in states]      # with [CLS] and [SEP]
        pairs = torch.cat([x[~torch.eye(len(x), dtype=bool)] for x in each])
        assert evaluated["similarity_special"][i] == pytest.approx(pairs.mean().item(), abs=1e-5)


def test_contrastive_weight_0_does_not_run_the_teacher(files, folders, monkeypatch):
    """In training there is no teacher and no contrastive loss; `evaluate` still computes them."""
    flags = [*files, "--contrastive-weight", 0, "--grad-accum", 2]
    model, teacher, args, rows, sentences = build(flags, folders / "bert")
    teacher_calls, loss_mock = [], Mock(wraps=tacl_loss)
    monkeypatch.setattr(tacl, "tacl_loss", loss_mock)
    teacher.register_forward_hook(lambda *_: teacher_calls.append(1))
    for micro_batch in tacl.make_batch(rows, model.train(), args):
        loss, values = tacl.compute_loss(model, micro_batch, tacl.mean_weights(rows), args, teacher)
        assert {*values} == {"loss", "mlm", "nsp"} and loss.item() == (values["mlm"] + values["nsp"]).item()
        loss.backward()
    assert not teacher_calls and not loss_mock.called
    scores = tacl.evaluate(model, (rows, sentences), args, teacher)
    assert teacher_calls and scores["contrast"] > 0 and scores["accuracy"] > 0
    assert len(scores["similarity"]) == 3
    assert scores["loss"] == pytest.approx(scores["mlm"] + scores["nsp"], abs=1e-5)


@pytest.mark.parametrize("name, missing", [
    ("distilbert", {"vocab_layer_norm", "vocab_projector", "vocab_transform", "next sentence"}),
    ("distilbert-lm", {"next sentence"}), ("scratch", set())])
def test_missing_heads_and_frozen_teacher(name, missing, files, folders):
    """Heads that the checkpoint lacks are trained. The teacher is neither trained nor saved, and
    model.train() does not turn its dropout on."""
    model, teacher, args, rows, _ = build(files, name if name == "scratch" else folders / name)
    if name == "distilbert-lm":
        stored = DistilBertLM.from_pretrained(folders / name).state_dict()
        assert equal(dict(model.lm.state_dict()), dict(stored))
    micro_batch, = tacl.make_batch(rows, model, args)
    model.train()
    loss, values = tacl.compute_loss(model, micro_batch, tacl.mean_weights(rows), args, teacher)
    loss.backward()
    assert set(model.missing_heads) == missing
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert values["nsp"].item() == pytest.approx(math.log(2), abs=0.05)
    assert not any(p.requires_grad or p in {*model.parameters()} for p in teacher.parameters())
    ids, _, segments, real, *_ = micro_batch

    def states(encoder):
        return tacl.run_encoder(encoder, ids, segments, real).last_hidden_state
    assert torch.equal(states(teacher), states(teacher))
    assert not torch.equal(states(model.encoder), states(teacher))
    assert torch.equal(states(model.eval().encoder), states(teacher))


# ── whole runs ──


def check_folder(result, out, name):
    """Check that the printed line loads the encoder of state.pt, with its pooler, that no head and no teacher
    is saved, and that the tokenizer does not truncate."""
    model, prefix = eval(result.said["load"], {"AutoModel": AutoModel}), f"lm.{name}."
    state = result.state["model"]
    assert not any("teacher" in key for key in state)
    state = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    assert equal(dict(model.state_dict()), state) and {*load_file(out / "model.safetensors")} == {*state}
    assert name == "distilbert" or any("pooler" in key for key in state)
    assert json.loads((out / "tokenizer.json").read_text())["truncation"] is None
    assert f"{result.steps[-1]['dev_accuracy']:.2f} %" in (out / "README.md").read_text()


def test_learns(tmp_path, files, bert):
    """A random BERT, whose tokens are similar, learns: the losses fall, and the tokens of the top layer
    become less similar. The learning rate has warm-up for a tenth of the steps, and decays to 0."""
    result = run("tacl", tmp_path / "out", *files, "--model", bert, "--steps", 39, "--lr", 3e-3)
    last, before = result.steps[-1], result.state["progress"]["before"]
    assert last["dev_accuracy"] > before["accuracy"] + 20 and last["dev_contrast"] < 0.7 * before["contrast"]
    assert last["dev_mlm"] < before["mlm"] - 0.1 and len(before["similarity"]) == 4
    assert last["dev_similarity"][-1] < before["similarity"][-1]
    change = f"contrast accuracy {before['accuracy']:.2f} → {last['dev_accuracy']:.2f} %, "
    tops = [(before[name][-1], last[f"dev_{name}"][-1]) for name in ("similarity", "similarity_special")]
    change += "token similarity of the top layer {:.3f} → {:.3f}, with [CLS] and [SEP] {:.3f} → {:.3f}, "
    change = change.format(*tops[0], *tops[1])
    assert result.said["done"].startswith(change) and "cls.seq_relationship" in result.said["model"]
    assert tacl.format_scores(before) == result.said["before"]
    assert f"{tops[0][1]:.3f}, with [CLS] and [SEP] " in result.said["after"]
    assert result.said["after"].endswith(f"{tops[1][1]:.3f}")
    rates = np.interp(range(39), [0, 3, 39], [0, 3e-3, 0])
    assert [step["lr"] for step in result.steps] == pytest.approx(rates)
    check_folder(result, tmp_path / "out", "bert")


def test_several_processes_equal_one(tmp_path, files, bert):
    """Ranks have unequal numbers of masked tokens. Without --dev nothing is evaluated."""
    flags = [*files[:-2], "--model", bert, "--steps", 4, "--lr", 1e-3, "--grad-accum", 2]
    one = run("tacl", tmp_path / "one", *flags)
    assert not {"after", "before"} & {*one.said} and one.said["done"].startswith("0 min")
    assert max(one.norms) > 1                                  # clipping is active
    check_processes(one, tmp_path / "three", run_distributed(3, "tacl", tmp_path / "three", flags), loose=10)


# ── bad input ──

GOOD = "A man eats.\nHe likes it.\n\nA dog runs.\nIt is fast.\n"
FEW = "documents of two or more sentences, expected at least 2; write one sentence per line .*"
TEACHER = "--model bert --teacher"


@pytest.mark.parametrize("content, flags, wanted", [
    (None, "", r"data: No such file or directory"), ("\n \n", "", r"data: 0 " + FEW),
    ("A man eats.\nHe likes it.\nA dog runs.\n", "--data good --dev data", r"data: 1 " + FEW),
    ("A.\n\nB.\n\nC.\nD.\n", "", r"data: 1 " + FEW),
    ("A.\n\xff.\n", "", r"data: not UTF-8 before byte 6; convert it, for example with iconv"),
    (GOOD, "--max-length 4", r"--max-length 4: expected at least 5: \[CLS\], two \[SEP\], .*"),
    (GOOD, "--max-length 513", r"--max-length 513: scratch reads at most 512 tokens"),
    (GOOD, "--shuffle-buffer 1", r"argument --shuffle-buffer: 1: expected a number of at least 2"),
    (GOOD, "--teacher none/such", r"--teacher none/such: no such folder, and the hub .*"),
    (GOOD, f"{TEACHER} wide", r"--teacher wide: its hidden size is 64, expected 32, as in bert"),
    (GOOD, f"{TEACHER} other", r"--teacher other: its vocabulary is not that of bert; expected .*"),
    (GOOD, "--model bare --whole-word", r"--whole-word: the tokenizer of bare has no pieces that .*")])
def test_bad_input(content, flags, wanted, tmp_path, capfd, monkeypatch, folders):
    monkeypatch.chdir(tmp_path)
    for name, text in dict(good=GOOD, data=content).items():
        Path(name).write_text(text, encoding="latin-1") if text else None
    for name in ("bert", "wide"):
        Path(name).symlink_to(folders / name)
    changes = dict(other=('"##a"', '"##other"'), bare=('"##', '"__'))
    for name in changes.keys() & flags.split():
        file = Path(shutil.copytree("bert", name), "tokenizer.json")
        file.write_text(file.read_text().replace(*changes[name]))
    start = ["--model", "scratch", "--data", "data", "--batch-size", 2, "--steps", 1]
    rejects("tacl", capfd, wanted, *start, *flags.split())
