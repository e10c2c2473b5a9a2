"""tacl.py: its loss against float64 formulas written out anchor by anchor, its masks, its model, its runs."""
import itertools
import json
import math
import random
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
from transformers import AutoModel, AutoTokenizer, BertConfig, BertForPreTraining, BertModel
from transformers import DistilBertConfig, DistilBertForMaskedLM, DistilBertModel

import tacl
from kernels import blockwise
from running import SENTENCES, equal, in_processes, metrics, refuse, run
from tacl import tacl_loss, token_similarity
from test_losses import agree, points

both_forms = pytest.mark.parametrize("form", ["paper", "code"])
both_impls = pytest.mark.parametrize("impl", ["blockwise", "eager"])

# ── the loss ──


def cosines(a, b):
    return a @ b.T / (a.norm(dim=-1, keepdim=True) * b.norm(dim=1))


def written_out(student, teacher, masked, real, temperature, form, similarity="cosine"):
    """The paper's sum over anchors, divided by their number as the code does; padding in the denominator in
    the code's form."""
    losses = []
    for s, t, chosen, inside in zip(student, teacher, masked, real):
        for i in (chosen & inside).nonzero()[:, 0]:
            logits = s[i] @ t.T if similarity == "dot" else cosines(s[i], t) / temperature
            terms = torch.exp(logits)
            losses.append(-torch.log(terms[i] / (terms[inside] if form == "paper" else terms).sum()))
    return sum(losses) / len(losses)


def batch(b, l, d, seed):
    """(student, teacher, masked, attention mask): padding behind, before and within; the last sequence has no
    anchor."""
    student, teacher = points(b * l, d, seed).view(b, l, d), points(b * l, d, seed + 1).view(b, l, d)
    masked = torch.rand(b, l, generator=torch.Generator().manual_seed(seed)) < 0.3
    place = torch.arange(l)
    real = torch.stack([[place < l - row, place >= row, place % 3 != 1][row % 3] for row in range(b)])
    masked[0, 1] = True
    masked[-1] &= b == 1
    return student, teacher, masked, real


@both_impls
@both_forms
@pytest.mark.parametrize("shape", [(1, 4, 3), (6, 7, 4), (3, 40, 8)], ids=str)
@pytest.mark.parametrize("temperature", [0.01, 0.5])
def test_tacl_loss(impl, form, shape, temperature, monkeypatch):
    """Chosen padding is no anchor. Small strips: sequences of a few anchors share one, long ones are cut. Of
    an easy task too, of equal views, without a mask, of plain products."""
    for name, value in dict(SMALL=0, ROWS=5, STRIP=1).items():
        monkeypatch.setattr(blockwise, name, value)
    student, teacher, masked, real = batch(*shape, seed=sum(shape))
    given, how = (masked.int(), real.long(), temperature, form), (masked, real, temperature, form)
    for s, t in ((student, teacher), (teacher + 0.3 * student, teacher), (student, student)):
        agree(lambda s: tacl_loss(s, t, *given, impl=impl), lambda s: written_out(s, t, *how), s)
    agree(lambda s: tacl_loss(s, teacher, *given, similarity="dot", impl=impl),
          lambda s: written_out(s, teacher, *how, "dot"), student)
    wanted = written_out(student, teacher, masked, torch.ones_like(real), temperature, form).item()
    loss = tacl_loss(student, teacher, masked, temperature=temperature, form=form, impl=impl)
    assert loss.item() == pytest.approx(wanted)


@both_impls
def test_near_views_are_exact(impl):
    """Also where 1 + small is 1, and in float32; τ is 0.01 where it is not given."""
    *_, masked, _ = batch(4, 11, 6, seed=3)
    wide = F.normalize(points(44, 48, 4), dim=1).view(4, 11, 48)
    others = [torch.cat([wide[b, :i], wide[b, i + 1 :]]) @ wide[b, i] for b, i in masked.nonzero()]
    small = np.mean([torch.log1p(torch.exp((x - 1) / 0.01).sum()).item() for x in others])
    assert small < 1e-15
    assert tacl_loss(wide.float(), wide.float(), masked, impl=impl).item() == pytest.approx(small, rel=1e-2)


@both_impls
@both_forms
def test_anchors_alone_have_a_gradient(form, impl):
    """Without one the loss is 0, and its gradient; the teacher has none and keeps its values. A sequence of
    one token has no negatives, but for padding."""
    student, teacher, masked, real = batch(3, 6, 4, seed=7)
    before, one = teacher.clone(), torch.eye(6, dtype=torch.bool)[:3]
    for chosen, inside in ((torch.zeros_like(masked), real), (~real, real), (masked, real), (one, one)):
        leaf, kept = student.clone().requires_grad_(), teacher.requires_grad_()
        loss = tacl_loss(leaf, kept, chosen, inside, form=form, impl=impl)
        loss.backward()
        negatives = form == "code" or inside is real
        assert torch.equal(leaf.grad.any(-1), chosen & inside & negatives)
        assert (loss > 0) == leaf.grad.any() and loss.dtype == torch.float64
        assert kept.grad is None and torch.equal(kept, before)
    assert tacl_loss(student.half(), teacher.half(), torch.zeros_like(masked)).dtype == torch.float32


@pytest.mark.parametrize("name, error", [("float32", 1e-5), ("bfloat16", 0.1), ("float16", 0.02)])
def test_dtypes_and_zero_vectors(name, error):
    dtype = getattr(torch, name)
    student, teacher, masked, real = batch(3, 9, 16, seed=10)
    student, teacher = (student + 2 * teacher).to(dtype), teacher.to(dtype)
    exact = tacl_loss(student.double(), teacher.double(), masked, real)
    loss = tacl_loss(student, teacher, masked, real)
    assert loss.dtype == torch.float32 and abs(loss - exact) < error
    student, teacher[:, 2] = (student * 0).requires_grad_(), 0
    loss, anchors = tacl_loss(student, teacher, masked, real), (masked & real).sum(1)
    loss.backward()                                            # cosine 0 with all
    wanted = (anchors * real.sum(1).log()).sum() / anchors.sum()
    assert loss.item() == pytest.approx(wanted.item(), abs=0.01)
    assert student.grad.isfinite().all() or dtype == torch.float16             # which ends at 65504


@pytest.mark.parametrize("change, wanted", [
    (dict(teacher=torch.zeros(2, 3, 5)), r"student: \(2, 3, 4\), wanted \(2, 3, 5\), as masked is .B"),
    (dict(teacher=torch.zeros(2, 4, 4)), r"teacher: \(2, 4, 4\), wanted \(2, 3, 4\)"),
    (dict(attention_mask=torch.ones(3)), r"attention_mask: \(3,\), wanted \(2, 3\)"),
    (dict(form="both"), r"form: 'both', wanted paper or code"),
    (dict(similarity="euclid"), r"similarity: 'euclid', wanted cosine or dot"),
    (dict(temperature=0), r"temperature: 0, wanted a number above 0")])
def test_tacl_loss_refuses(change, wanted):
    given = dict(student=torch.zeros(2, 3, 4), teacher=torch.zeros(2, 3, 4), masked=torch.ones(2, 3))
    with pytest.raises(ValueError, match="^" + wanted):
        tacl_loss(**given | change)


def mean_cosine(tokens):
    """Of two different tokens."""
    return np.mean([F.cosine_similarity(a, b, 0).item() for a, b in itertools.permutations(tokens, 2)])


def test_token_similarity():
    hidden, places = points(15, 6, 14).view(3, 5, 6), torch.arange(5)
    mask = torch.stack([places < 5, (places > 0) & (places < 4), places == 2])
    hidden[0, 2] = 0                                           # cosine 0 with all
    *found, alone = token_similarity(hidden, mask).tolist()    # fewer than two: NaN
    assert found == pytest.approx([mean_cosine(hidden[i, mask[i]]) for i in (0, 1)]) and alone != alone


# ── masks and batches ──


def reader(pieces="abcdefghijklmnopqrstuvwxyz"):
    """What the preparation asks of a model: 0 to 4 are special tokens."""
    tokenizer = SimpleNamespace(cls_token_id=2, sep_token_id=3, mask_token_id=4, pad_token_id=0)
    continuing = {i for i, piece in enumerate(pieces, 5) if piece.startswith("##")}
    return SimpleNamespace(tokenizer=tokenizer, special={0, 1, 2, 3, 4}, continuing=continuing,
                           ordinary=[*range(5, 5 + len(pieces))], device=torch.device("cpu"))


@pytest.mark.parametrize("length, wanted", [(3, 0), (4, 1), (10, 2), (23, 3), (64, 10), (200, 16)])
def test_masks_have_berts_number(length, wanted):
    """round(0.15 · length), at least 1, at most a quarter of --max-length, here 16; special tokens never."""
    args, places = SimpleNamespace(max_length=64, whole_word=False), Counter()
    ids = np.array([2, *[5 + i % 20 for i in range(length - 3)], 3, 3][:length])
    for seed in range(50):
        masked, chosen = tacl.choose_and_mask(ids, reader(), args, random.Random(seed))
        assert chosen.sum() == wanted and not chosen[[0, -1]].any() and (masked == ids)[~chosen].all()
        places.update(chosen.nonzero()[0].tolist())
    assert length > 30 or set(places) == set(range(1, length - 2))             # any of them


def test_masks_have_berts_proportions():
    args, ids = SimpleNamespace(max_length=80_000, whole_word=False), np.array([5, 1, 6] * 20_000)
    masked, chosen = tacl.choose_and_mask(ids, reader(), args, random.Random(0))
    new, old = masked[chosen], ids[chosen]
    assert chosen.sum() == 9000 and not (old == 1).any() and not (new < 4).any()       # unknown: not chosen
    shares = (new == 4).mean(), (new == old).mean()
    assert shares == pytest.approx((0.8, 0.104), abs=0.01)     # one in 26 is replaced by itself


def test_whole_words():
    """15 % of the words, at most a quarter of them rounded down; each piece of a word has its own luck."""
    args, model = SimpleNamespace(max_length=64, whole_word=True), reader(["a", "##b", "c", "##d"])
    for words, wanted in ((3, 1), (4, 1), (12, 2), (40, 6)):
        ids, luck = np.array([2, *[5, 6, 8] * words, 3, 7, 1, 6, 3]), set()    # "##b" behind [UNK] is a word
        starts = [*range(1, 1 + 3 * words, 3), 3 * words + 2, 3 * words + 4]
        for seed in range(40):
            masked, chosen = tacl.choose_and_mask(ids, model, args, random.Random(seed))
            groups = [range(start, start + 3 if ids[start] == 5 else start + 1) for start in starts]
            assert all(len({*chosen[group]}) == 1 for group in groups)
            assert sum(chosen[group[0]] for group in groups) == wanted
            luck |= {tuple(masked[group] == 4) for group in groups if len(group) == 3 and chosen[group].all()}
        assert len(luck) > 3


def test_make_batch_pads_parts_of_similar_length():
    def row(n, blank=0):
        """ids, second segment, label, masked ids, chosen, of n tokens and padding."""
        columns = range(5, 5 + n), [i > 2 for i in range(n)], range(6, 6 + n), [i == 1 for i in range(n)]
        ids, second, masked, chosen = (np.array([*column, *[0] * blank]) for column in columns)
        return ids, second, n % 2, masked, chosen

    for form, widths in (("paper", (7, 7, 7, 9, 9)), ("code", [12] * 5)):
        args = SimpleNamespace(max_length=12, form=form, accumulate=2)
        parts = tacl.make_batch([row(n) for n in (9, 4, 7, 3, 8)], reader(), args)
        assert [len(part[0]) for part in parts] == [3, 2]
        found = (row for part in parts for row in zip(*part))
        for n, width, tensors in zip((3, 4, 7, 8, 9), widths, found):
            ids, second, label, masked, chosen = row(n, width - n)
            wanted = ids, masked, second, ids > 0, chosen, np.array(label)
            assert [x.tolist() for x in tensors] == [x.tolist() for x in wanted]


# ── the model and its three losses ──


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, lines = tmp_path_factory.mktemp("documents"), [line for line, in SENTENCES]
    for name, first, count in (("data", 0, 8), ("dev", 500, 4)):
        documents = ["\n".join(lines[i : i + 5]) for i in range(first, first + 5 * count, 5)]
        (folder / name).write_text("\n\n".join(documents), encoding="utf-8")
    return ["--batch-size", "8", "--data", folder / "data", "--dev", folder / "dev"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, bert):
    """A BERT with all its heads, and a DistilBERT with and without the one that it has, all with the letters
    of `bert`."""
    home, tokenizer = tmp_path_factory.mktemp("models"), AutoTokenizer.from_pretrained(bert)
    torch.manual_seed(1)
    shape = dict(num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=len(tokenizer),
                 hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    small = DistilBertConfig(dim=32, n_layers=2, n_heads=2, hidden_dim=64, vocab_size=len(tokenizer))
    models = {"bert": BertForPreTraining(BertConfig(hidden_size=32, initializer_range=0.2, **shape)),
              "wide": BertModel(BertConfig(hidden_size=64, **shape)),
              "distilbert": DistilBertModel(small), "distilbert-lm": DistilBertForMaskedLM(small)}
    for parameter in models["bert"].cls.parameters():
        torch.nn.init.normal_(parameter, std=0.3)              # biases too
    for name, model in models.items():
        model.save_pretrained(home / name)
        tokenizer.save_pretrained(home / name)
    return home


def build(flags, model="scratch", **change):
    args = tacl.make_parser().parse_args([*map(str, flags), "--model", str(model), "--max-length", "48"])
    vars(args).update(change)
    torch.manual_seed(0)
    return tacl.build_model(args, SimpleNamespace(device=torch.device("cpu"), bf16=False)), args


def rows_of(model, args, n=6):
    rng = random.Random(0)
    documents, _ = tacl.next_documents(args.data, 0, 8, model)
    pairs = tacl.sentence_pairs(documents, model, args, rng)[:n]
    return [(*pair, *tacl.choose_and_mask(pair[0], model, args, rng)) for pair in pairs]


@both_forms
@pytest.mark.parametrize("accumulate", [1, 4])
def test_compute_loss_is_the_librarys_and_the_papers(form, accumulate, files, folders, monkeypatch):
    """BertForPreTraining's own loss of all logits, and the contrast row by row, of a batch in one part or in
    four. No logits are made, and --impl's kernels are asked."""
    model, args = build(files, folders / "bert", form=form, accumulate=accumulate, impl="eager")
    rows, values, seen = rows_of(model, args), Counter(), []
    kernels = {name: Mock(wraps=getattr(tacl, name)) for name in ("decoder_loss", "similarity_lse")}
    for name, kernel in kernels.items():
        monkeypatch.setattr(tacl, name, kernel)
    parts, decoder = tacl.make_batch(rows, model.train(), args), model.lm.get_output_embeddings()
    assert len(parts) == min(accumulate, 3) and model.fresh == []
    with decoder.register_forward_hook(lambda *x: seen.append(x[2].numel())):
        for part in parts:
            loss, found = tacl.compute_loss(model, (part, *tacl.row_weights(rows)), args)
            loss.backward()
            values.update({name: value.item() for name, value in found.items()})
    calls = [call for kernel in kernels.values() for call in kernel.call_args_list]
    assert {call.kwargs["impl"] for call in calls} == {"eager"} and set(seen) == {0}
    ours = {name: parameter.grad.clone() for name, parameter in model.lm.named_parameters()}
    model.zero_grad()
    args.accumulate = 1
    [(ids, masked, segments, real, chosen, labels)] = tacl.make_batch(rows, model, args)
    known = dict(attention_mask=real, token_type_ids=segments)
    library = model.lm(masked, **known, labels=ids.where(chosen, -100), next_sentence_label=labels,
                       output_hidden_states=True)
    teacher = BertModel.from_pretrained(folders / "bert").eval()(ids, **known).last_hidden_state.detach()
    contrast = written_out(library.hidden_states[-1].double(), teacher.double(), chosen, real, 0.01, form)
    (library.loss + contrast).backward()
    assert values["mlm"] + values["nsp"] == pytest.approx(library.loss.item(), abs=2e-5)
    assert values["contrast"] == pytest.approx(contrast.item(), rel=2e-3)      # float32 at τ = 0.01
    assert values["loss"] == pytest.approx(values["mlm"] + values["nsp"] + values["contrast"], abs=1e-5)
    for name, parameter in model.lm.named_parameters():
        rounding = 2e-3 * parameter.grad.abs().max().item() + 1e-5
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=rounding, msg=name)


@pytest.mark.parametrize("name, fresh", [
    ("distilbert", {"vocab_layer_norm", "vocab_projector", "vocab_transform", "next sentence"}),
    ("distilbert-lm", {"next sentence"})])
def test_heads_that_the_checkpoint_lacks(name, fresh, files, folders):
    model, args = build(files, folders / name)
    assert set(model.fresh) == fresh
    if name == "distilbert-lm":
        stored = DistilBertForMaskedLM.from_pretrained(folders / name).state_dict()
        assert equal(dict(model.lm.state_dict()), dict(stored))
    assert model.nsp[2].weight.std() < 0.05 and not model.nsp[2].bias.any()
    rows = rows_of(model, args)
    [part] = tacl.make_batch(rows, model, args)
    loss, values = tacl.compute_loss(model.train(), (part, *tacl.row_weights(rows)), args)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert values["nsp"].item() == pytest.approx(math.log(2), abs=0.05)


def test_the_teacher_is_frozen_whatever_train_reaches(files):
    """Dropout of the student and none of the teacher, which is no part of what is trained, saved or set to
    train."""
    model, args = build(files)                                 # scratch has dropout
    [teacher] = model.train().teacher
    [(ids, _, segments, real, chosen, _)] = tacl.make_batch(rows_of(model, args), model, args)
    one, two = (tacl.read(teacher, ids, segments, real).last_hidden_state for _ in range(2))
    assert torch.equal(one, two) and not any(p.requires_grad for p in teacher.parameters())
    assert not torch.equal(*(tacl.embed(model, ids, segments, real, chosen)[0] for _ in range(2)))
    assert torch.equal(tacl.embed(model.eval(), ids, segments, real, chosen)[0], one)
    assert not {id(p) for p in teacher.parameters()} & {id(p) for p in model.parameters()}


@both_forms
@torch.no_grad()
def test_evaluate(form, files, folders):
    """By loops: the losses, how often the most similar token is the own one, each sentence's token similarity
    in each layer."""
    model, args = build(files, folders / "bert", form=form, dev_pairs=9)
    for parameter in model.encoder.parameters():
        parameter += 0.05 * torch.randn_like(parameter)        # unlike its teacher
    pairs, sentences = dev = tacl.load_dev(args.dev, 4, model, args)
    assert len(pairs) == len(sentences) == 9
    found, [teacher], right, nsp = tacl.evaluate(model, dev, args), model.teacher, [], []
    assert model.training
    model.eval()
    for ids, second, label, masked, chosen in pairs:
        pad = (args.max_length - len(ids)) * (form == "code")
        mask = F.pad(torch.ones(1, len(ids)), (0, pad))
        ids, masked, second = (F.pad(torch.tensor(x)[None].long(), (0, pad)) for x in (ids, masked, second))
        known = dict(attention_mask=mask, token_type_ids=second)
        s = model.encoder(masked, **known).last_hidden_state[0].double()
        t = teacher(ids, **known).last_hidden_state[0].double()
        right += [i == cosines(s[i], t).argmax() for i in chosen.nonzero()[0]]
        logits = model.lm(masked, **known).seq_relationship_logits[0]
        nsp.append(-logits.double().log_softmax(0)[int(label)].item())
    assert found["accuracy"] == pytest.approx(100 * np.mean(right), abs=1e-3) and 10 < found["accuracy"] < 100
    assert found["nsp"] == pytest.approx(np.mean(nsp), abs=1e-5)
    assert found["loss"] == pytest.approx(found["mlm"] + found["nsp"] + found["contrast"], abs=1e-4)
    states = [model.encoder(torch.tensor(ids)[None].long(), output_hidden_states=True).hidden_states
              for ids, *_ in sentences]
    layers = [[mean_cosine(hidden[0, 1:-1]) for hidden in layer] for layer in zip(*states)]    # words alone
    assert found["similarity"] == pytest.approx([np.mean(layer) for layer in layers], abs=1e-5)


# ── whole runs ──


@both_forms
def test_learns(form, tmp_path, files, bert):
    """From a random BERT whose tokens look alike: the contrast is learned, and the tokens of the top layer
    move apart. The rate rises over a tenth of the steps, and falls to 0."""
    flags = [*files, "--model", bert, "--steps", 39, "--lr", 3e-3, "--max-length", 48, "--form", form]
    result = run("tacl", tmp_path / "out", *flags)
    last, before, losses = result.steps[-1], result.state["progress"]["before"], result.losses
    assert last["dev_accuracy"] > before["accuracy"] + 20 and last["dev_contrast"] < 0.7 * before["contrast"]
    assert last["dev_mlm"] < before["mlm"] - 0.1 and np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])
    assert last["dev_similarity"][-1] < before["similarity"][-1] and len(before["similarity"]) == 4
    change = f"contrast accuracy {before['accuracy']:.2f} → {last['dev_accuracy']:.2f} %, "
    assert result.said["done"].startswith(change) and "cls.seq_relationship" in result.said["model"]
    assert tacl.summary(before) == result.said["before"]
    assert result.said["after"].endswith(f"{last['dev_similarity'][-1]:.3f}")
    rates = np.interp(range(1, 40), [0, 3, 40], [0, 3e-3, 0])
    assert [step["lr"] for step in result.steps] == pytest.approx(rates)


def check_resume(name, folder, flags, seldom, monkeypatch):
    """A run that is interrupted in its sixth step and goes on from its third is the whole one; so is one with
    flags for fewer evaluations."""
    whole, other = run(name, folder / "whole", *flags), run(name, folder / "other", *flags, *seldom)
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(whole.script, "sum_gradients", Mock(side_effect=[None] * 5 + [KeyboardInterrupt]))
        run(name, folder / "parts", *flags)
    assert len(metrics(folder / "parts")) == 5
    parts = run(name, folder / "parts", *flags, "--resume")
    assert [step | {"seconds": 0} for step in parts.steps] == [step | {"seconds": 0} for step in whole.steps]
    assert equal(parts.state, whole.state) and other.losses == whole.losses
    assert equal(*(load_file(folder / part / "model.safetensors") for part in ("parts", "whole")))
    for part in ("model", "optimizer", "random"):
        assert equal(other.state[part], whole.state[part]), part
    return whole, other


@pytest.mark.parametrize("flags", [
    [], ["--form", "code", "--accumulate", 3, "--whole-word", "--similarity", "dot", "--buffer", 2]], ids=str)
def test_resume_is_exact_and_evaluation_leaves_no_trace(flags, tmp_path, files, monkeypatch):
    """The stream goes through its file twice."""
    flags = [*files, "--model", "scratch", "--max-length", 48, "--steps", 8, "--eval-every", 3, *flags]
    whole, other = check_resume("tacl", tmp_path, flags, ["--eval-every", 9], monkeypatch)
    assert whole.state["progress"]["place"][1] > 0
    assert [sum("dev_accuracy" in step for step in x.steps) for x in (whole, other)] == [3, 1]


def check_processes(one, out, norms):
    """Clipping and Adam hide a gradient that is too large: norms are compared too."""
    assert norms == pytest.approx(one.norms, rel=1e-3)
    for name in one.steps[0].keys() - {"seconds"}:             # the terms of a loss too
        found = [step[name] for step in metrics(out)]
        assert found == pytest.approx([step[name] for step in one.steps], rel=1e-5, abs=1e-4), name
    for key, weight in torch.load(out / "state.pt", weights_only=True)["model"].items():
        if not key.endswith("key.bias"):   # softmax ignores it: Adam makes the rounding of its gradient large
            torch.testing.assert_close(weight, one.state["model"][key], atol=2e-4, rtol=0, msg=key)


def test_several_processes_equal_one(tmp_path, files, bert):
    """Ranks have unequal numbers of chosen tokens. Without --dev nothing is evaluated."""
    flags = [*files[:-2], "--model", bert, "--max-length", 48, "--steps", 5, "--lr", 1e-3, "--accumulate", 2]
    one = run("tacl", tmp_path / "one", *flags)
    assert not {"after", "before"} & {*one.said} and one.said["done"].startswith("0 min")
    assert max(one.norms) > 1                                  # clipping is active
    check_processes(one, tmp_path / "three", in_processes(3, "tacl", tmp_path / "three", flags))


@pytest.mark.parametrize("name", ["bert", "distilbert"])
def test_others_load_the_folder(name, tmp_path, files, folders):
    """By the line that was printed: the encoder in state.pt with its pooler, no head, no teacher, a tokenizer
    that cuts nothing."""
    flags = ["--model", folders / name, "--teacher", folders / "bert", "--max-length", 48, "--steps", 2]
    result, prefix = run("tacl", tmp_path / "out", *files, *flags), f"lm.{name}."
    model = eval(result.said["load"], {"AutoModel": AutoModel})
    state = result.state["model"]
    assert not any("teacher" in key for key in state)
    state = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    assert equal(dict(model.state_dict()), state)
    assert name == "distilbert" or any("pooler" in key for key in state)
    assert {*load_file(tmp_path / "out" / "model.safetensors")} == {*state}
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text())["truncation"] is None
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")("a " * 600)["input_ids"]) == 602
    assert f"{result.steps[-1]['dev_accuracy']:.2f} %" in (tmp_path / "out" / "README.md").read_text()


# ── bad input ──

FILES = {"good.txt": b"A man eats.\nHe likes it.\n\nA dog runs.\nIt is fast.\n", "blank.txt": b"\n \n",
         "one.txt": b"A man eats.\nHe likes it.\nA dog runs.\n", "short.txt": b"A.\n\nB.\n\nC.\nD.\n",
         "latin.txt": b"A.\nB.\n\nC.\nD\xff.\n"}
WANTED = "documents of two or more sentences, wanted at least 2; a sentence a line, a blank line between .*"


@pytest.mark.parametrize("flags, wanted", [
    ("--data none.txt", r"none\.txt: No such file or directory"),
    ("--dev blank.txt", r"blank\.txt: 0 " + WANTED),
    ("--data one.txt", r"one\.txt: 1 " + WANTED),
    ("--data short.txt", r"short\.txt: 1 " + WANTED),
    ("--dev latin.txt", r"latin\.txt line 5: not UTF-8; convert it, for example with iconv"),
    ("--max-length 4", r"--max-length 4: wanted 5 or more: \[CLS\], both \[SEP\], a token of each .*"),
    ("--max-length 513", r"--max-length 513: scratch reads at most 512 tokens"),
    ("--buffer 1", r"argument --buffer: 1: wanted a number of at least 2"),
    ("--teacher none/such", r"--teacher none/such: no such folder, and the hub .*; .*, or take scratch"),
    ("--model bert --teacher wide", r"--teacher wide: its vectors have 64 numbers, those of bert 32; .*"),
    ("--model bert --teacher other", r"--teacher other: its vocabulary is not that of bert; wanted .*"),
    ("--model bare --whole-word", "--whole-word: the tokenizer of bare has no pieces that begin with ##"),
    ("--model lost", r"--model \S+: \d+ weights, such as .*, are missing or do not fit its config\.json")])
def test_bad_input(flags, wanted, tmp_path, capfd, monkeypatch, folders):
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    for name in ("bert", "wide"):
        Path(name).symlink_to(folders / name)
    changes = dict(other=('"##a"', '"##other"'), bare=('"##', '"__'),
                   lost=('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    for name in changes.keys() & flags.split():
        shutil.copytree("bert", name)
        for file in (Path(name, "tokenizer.json"), Path(name, "config.json")):
            file.write_text(file.read_text().replace(*changes[name]))
    start = ["--model", "scratch", "--data", "good.txt", "--batch-size", "2", "--steps", "1"]
    refuse("tacl", capfd, wanted, *start, *flags.split())
