"""cline.py: its losses against formulas written out, its model, whole runs."""
import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoTokenizer

import cline
import running
from cline import contrastive_loss, replaced_token_loss, total_loss
from formulas import agree, points
from kernels.training.text import tokens
from running import DATA, SENTENCES, free_port, refuse, run
from whole_runs import check_processes, check_resume

COMMAND = ["--model", "scratch", "--tagger", "lexicon", "--wordnet", DATA / "wordnet",
           "--data", DATA / "sentences.txt"]
both_forms = pytest.mark.parametrize("form", ["paper", "code"])

# ── the losses, float64 to 1e-10 ──


def contrastive_written_out(o, s, a, form="paper"):
    near, far = (o * s).sum(1), (o * a).sum(1)
    if form == "paper":
        return (torch.logaddexp(near, far) - near).mean()
    near, far, zero = near / o.shape[1], far / o.shape[1], 0 * near            # two logistic losses a row
    return (torch.logaddexp(zero, -near) + torch.logaddexp(zero, far)).mean() / 2


@both_forms
@pytest.mark.parametrize("scale", [1, 30, 1e4])
@pytest.mark.parametrize("b, d", [(1, 1), (2, 16), (9, 5)])
def test_contrastive_loss(form, scale, b, d):
    """Without exp(x) of a large x."""
    views, how = [scale * points(b, d, seed) for seed in range(3)], [form] * (form == "code")
    agree(lambda *x: contrastive_loss(*x, *how), lambda *x: contrastive_written_out(*x, *how), *views)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        low = [view.to(dtype) for view in views]
        loss, exact = contrastive_loss(*low, *how), contrastive_written_out(*(x.double() for x in low), *how)
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(exact.item(), rel=tolerance, abs=1e-9)


def replaced_written_out(logits, labels, form):
    x, classes = logits[labels != -100], labels[labels != -100].long()
    if form == "paper":                                        # of "kept", whose logit is 0, and "replaced"
        x, classes = torch.stack([0 * x, x], 1), (classes > 0).long()
    return F.cross_entropy(x, classes)


@both_forms
@pytest.mark.parametrize("labels", [[[0, 1, 1]], [[-100, 0, 2, 1, -100], [-100, 1, -100, -100, -100]]])
def test_replaced_token_loss(form, labels):
    """What does not count has no part in it; where none counts it is 0; all above 0 is one class (paper)."""
    labels = torch.tensor(labels)
    logits = points(labels.numel(), 3, 1).view(*labels.shape, 3)[..., slice(3) if form == "code" else 0]
    loss = lambda x, truth=labels: replaced_token_loss(x, truth, form)
    agree(loss, lambda x: replaced_written_out(x, labels, form), logits)
    assert loss(logits.bfloat16(), labels.to(torch.int8)).dtype == torch.float32
    leaf = logits.float().requires_grad_()
    none = loss(leaf, torch.full_like(labels, -100))
    assert none == 0 and none.dtype == torch.float32 and not torch.autograd.grad(none, leaf)[0].any()


def test_total_loss():
    losses, s = torch.tensor([[2.0, 0.3, 0.7], [0.6, -0.4, 0.0]], dtype=torch.float64)
    agree(total_loss, lambda x, s: sum(math.e ** -s[i] * x[i] + (s[i] if i != 1 else 0) for i in range(3)),
          losses, s)                                           # max(0, 0) as s: slope 1


# ── the model ──


def fixed_masks(ids, may, tokenizer):
    """Each fifth place, so that rows have the same masks in every batch."""
    chosen = may & (torch.arange(ids.shape[1]) % 5 == 2)
    return torch.where(chosen, tokenizer.mask_token_id, ids), chosen


def one_by_one(model, rows, masks, form):
    """MLM, RTD, CTS of rows encoded one text at a time without padding, by the library's own heads."""
    vectors, mlm, rtd, special = [[], [], []], [], [], torch.tensor(model.tokenizer.all_special_ids)
    for row, view in itertools.product(rows, range(3)):
        ids = torch.from_numpy(row[view]).long()[None]
        masked, chosen = fixed_masks(ids, ~torch.isin(ids, special) & (view == 0) & masks, model.tokenizer)
        output = model.lm(input_ids=masked, output_hidden_states=True)
        hidden = output.hidden_states[-1]
        z = hidden[0, 0]
        vectors[view].append(z if form == "paper" else model.head(z))
        mlm.append(F.cross_entropy(output.logits[chosen], ids[chosen], reduction="none"))
        if view:
            rtd.append((model.rtd(hidden)[0].squeeze(-1), torch.from_numpy(row[view + 2]).long()))
    cts = contrastive_written_out(*map(torch.stack, vectors), form)
    return (torch.cat(mlm).mean(), replaced_written_out(*map(torch.cat, zip(*rtd)), form), cts), vectors


def prepared(form, bert, texts):
    flags = [*COMMAND, "--form", form, "--model", bert, "--max-length", 256]
    args = cline.make_parser().parse_args([*map(str, flags)])
    triples = cline.make_triples(*cline.load_data(args.data, args), args)[:texts]
    model = cline.build_model(args, SimpleNamespace(args=args, device=torch.device("cpu"), bf16=False))
    return model, cline.tokenise_triples(triples, model, args)[0], args


def test_rows_have_their_numbers_in_the_file():
    assert cline.name_rows([(None, 0), (None, 3)], [1, 0]) == "rows 4, 1, ..."


@both_forms
def test_compute_loss(form, bert, monkeypatch):
    """Value and every gradient against texts encoded one by one, whatever the groups; by --impl's kernels."""
    model, rows, args = prepared(form, bert, 9)
    decoder_loss = Mock(wraps=cline.decoder_loss)
    monkeypatch.setattr(cline, "mask_tokens", fixed_masks)
    monkeypatch.setattr(cline, "decoder_loss", decoder_loss)
    torch.nn.init.normal_(model.log_variances)
    torch.nn.init.normal_(model.rtd.weight if form == "paper" else model.rtd[3].weight)
    expected, _ = one_by_one(model, rows, True, form)
    loss, (names, weights) = total_loss(expected, model.log_variances), zip(*model.named_parameters())
    wanted = dict(zip(names, torch.autograd.grad(loss, weights, allow_unused=True)))
    for cost, args.impl in ((0, "eager"), (10**6, "blockwise")):
        monkeypatch.setitem(tokens.GROUP_COST, "cpu", cost)
        batch = cline.make_batch(rows, model)
        assert (len(batch) > 5) == (cost == 0)
        total, values = cline.compute_loss(model, batch, len(rows), args)
        assert decoder_loss.call_args.kwargs == dict(impl=args.impl)
        found = [values[name].item() for name in ("loss", "mlm", "rtd", "cts")]
        assert found == pytest.approx([x.item() for x in (loss, *expected)], rel=1e-4)
        model.zero_grad()
        total.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-3, atol=1e-4, msg=name)
    monkeypatch.setattr(cline, "mask_tokens", lambda ids, may, _: (ids, may & False))
    loss, values = cline.compute_loss(model, cline.make_batch(rows, model), len(rows), args)
    loss.backward()                                            # a batch without masks
    assert values["mlm"] == 0 and all(p.grad.isfinite().all() for p in model.parameters())


@both_forms
def test_sentence_probe(form, bert):
    """Of more rows than are encoded at a time, each of them eight times."""
    model, rows, args = prepared(form, bert, 12)
    with torch.no_grad():
        (_, rtd, cts), (original, synonym, antonym) = one_by_one(model, rows, False, form)
    margins = [(o @ s - o @ a).item() for o, s, a in zip(original, synonym, antonym)]
    result = cline.sentence_probe(model.train(), rows * 8, args)
    assert model.training and result["hits"] == pytest.approx(100 * np.mean([m > 0 for m in margins]))
    wanted = [np.mean(margins), rtd.item(), cts.item()]
    assert [result[name] for name in ("margin", "rtd", "cts")] == pytest.approx(wanted, rel=1e-3)


# ── whole runs ──


def few(folder, rows, *flags):
    """COMMAND with the first rows, batches of 8."""
    (folder / "few.txt").write_text("\n".join(text for text, in SENTENCES[:rows]))
    return [*COMMAND[:-1], folder / "few.txt", "--batch-size", 8, "--max-length", 64, *flags]


@both_forms
def test_resume_is_exact_and_evaluation_leaves_no_trace(form, tmp_path, bert):
    """A run on the triples that another saved is the same run; resumed it finds their file. The printed line
    loads the encoder; in the code's form with the trained pooler."""
    flags = few(tmp_path, 36, "--model", bert, "--form", form, "--held-out", 4, "--steps", 8)
    save = ["--save-triples", tmp_path / "triples.csv"]
    saved = [*flags, "--data", save[1]]
    result = check_resume("cline", tmp_path, [*flags, "--eval-every", 3], saved, 5, [3, 1], *save)
    encoder = eval(result.said["load"].split("  or  ")[1], {"AutoModel": AutoModel}).eval()
    words = AutoTokenizer.from_pretrained(tmp_path / "whole")("The dog ate.", return_tensors="pt")
    hidden, output = result.model.eval().encoder(**words).last_hidden_state, encoder(**words)
    torch.testing.assert_close(output.last_hidden_state, hidden)
    if form == "code":
        torch.testing.assert_close(output.pooler_output, result.model.head(hidden[:, 0]))


def test_learns(tmp_path):
    """All three losses fall, and on texts that were held out the margin opens."""
    flags = [*COMMAND, "--synonym-rate", 0.6, "--antonym-rate", 0.6, "--lr", 4e-3, "--steps", 60]
    result = run("cline", tmp_path / "out", *flags, "--batch-size", 16, "--eval-every", 20, "--held-out", 60)
    mean = lambda name, steps: np.mean([step[name] for step in steps])
    for name, most in dict(mlm=0.97, rtd=0.5, cts=0.9).items():
        assert mean(name, result.steps[-4:]) < most * mean(name, result.steps[:4]), name
    margins = [step["dev_margin"] for step in result.steps if "dev_margin" in step]
    before, after = (float(result.said["done"].split()[i].strip(",")) for i in (1, 3))     # hits 47 → 81,
    assert len(margins) == 3 and margins[-1] > max(0.1, *margins[:-1]) and before < 50 and after > 65


def one_of_several(rank, *rest):
    cline.mask_tokens = fixed_masks
    running.one_of_several(rank, *rest)


def test_several_processes_equal_one(tmp_path, bert, monkeypatch):
    """With masks that do not depend on the process. Ranks have different numbers of masked and of scored
    tokens, and of rows; max(s, 0), which is no mean, counts once."""
    flags = few(tmp_path, 23, "--model", bert, "--form", "code", "--steps", 3, "--lr", 1e-4)
    flags += ["--warmup-steps", 1, "--held-out", 2]
    monkeypatch.setattr(cline, "mask_tokens", fixed_masks)
    one, out = run("cline", tmp_path / "one", *flags), tmp_path / "three"
    rest = 3, free_port(), "cline", out, flags
    torch.multiprocessing.start_processes(one_of_several, rest, 3, start_method="forkserver")
    check_processes(one, out, torch.load(out / "norms"), loose=10)


# ── bad input ──

LABELS = r"data\.csv line 1: '%s', wanted start:end:code \(0 kept, 1 to 5 replaced\) of words of the text, .*"
COLUMNS = r", wanted 1 \(text\), 3 \(original, synonym, antonym\) or 5 \(and synonym_words, antonym_words\)"
FEW = r"rows have replaced words on both sides, wanted at least --batch-size \+ --held-out, which are 2 \+ "
GOOD = "A dog.,A hound.,A cat.\n" * 4


@pytest.mark.parametrize("content, flags, wanted", [
    ("A b,A b,c d\nA b,A c,A b\n", "", rf"data\.csv: 0 {FEW}0"),
    ("He was not.\nIt is his.\nThey were.\n", "--data data.txt", rf"data\.txt: 0 {FEW}0"),
    (GOOD, "--held-out 3", rf"data\.csv: 4 {FEW}3"), ("A,b,\n", "", r"data\.csv line 1: an empty cell; .*"),
    ("A b,c\n", "", r"data\.csv line 1: 2 columns" + COLUMNS),
    ("a b,c,d,e\n", "", r"data\.csv line 1: 4 columns" + COLUMNS),
    ("A,b,c,0:1:2,x\n", "", LABELS % "x"), ("A,b,c,0:2:2,0:1:4\n", "", LABELS % "0:2:2"),
    ("A,b c,c,2:3:2 0:1:2,0:1:4\n", "", LABELS % "2:3:2 0:1:2"),
    ("A,b,c,0:1:6,0:1:4\n", "", LABELS % "0:1:6"),
    (GOOD, "--data data.txt --save-triples a.txt", r"--save-triples a\.txt: wanted a \.csv that does not .*"),
    (GOOD, "--data data.txt --save-triples none/a.csv", r"--save-triples none/a\.csv: wanted .*"),
    (GOOD, "--data data.txt --save-triples data.csv", r"--save-triples data\.csv: wanted .*"),
    (GOOD, "--save-triples new.csv", r"--save-triples new\.csv: data\.csv holds triples already"),
    (GOOD, "--synonym-rate nan", r"argument --synonym-rate: nan: wanted a number from 0 to 1"),
    (GOOD, "--data data.txt --wordnet=", "--wordnet: an empty name, .*")])
def test_bad_input(tmp_path, monkeypatch, capfd, content, flags, wanted):
    monkeypatch.chdir(tmp_path)
    for name in ("data.csv", "data.txt"):
        Path(name).write_text(content)
    rates = ["--synonym-rate", 1, "--antonym-rate", 1]
    start = [*COMMAND[:-1], "data.csv", "--batch-size", 2, "--steps", 1, *rates]
    refuse("cline", capfd, wanted, *start, *flags.split())


def test_texts_want_wordnet(here, capfd):
    Path("texts.txt").write_text("A dog.\nA cat.\n")
    wanted = r"texts\.txt holds texts, which want --wordnet, a .*"
    refuse("cline", capfd, wanted, "--model", "scratch", "--data", "texts.txt")
