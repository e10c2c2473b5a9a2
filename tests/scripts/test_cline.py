"""cline.py: losses against explicit formulas, the model, whole runs, bad input."""
import itertools
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import cline
import loss_formulas
import running
from cline import total_loss
from kernels.training.text import tokens
from running import DATA, SENTENCES, free_port, rejects, run
from whole_runs import check_processes

COMMAND = ["--model", "scratch", "--tagger", "lexicon", "--wordnet", DATA / "wordnet",
           "--data", DATA / "sentences.txt"]
both_forms = pytest.mark.parametrize("form", ["paper", "code"])

# ── the model ──


def fixed_masks(ids, maskable, tokenizer):
    """Mask every fifth token, so that a row has the same masks in every batch."""
    is_masked = maskable & (torch.arange(ids.shape[1]) % 5 == 2)
    return torch.where(is_masked, tokenizer.mask_token_id, ids), is_masked


def reference_losses(model, rows, mask, form):
    """Return (MLM, RTD, CTS) and the vectors of the three views, one text at a time without padding.

    mask    whether to mask tokens of the originals, for the MLM loss of transformers' own head
    """
    special = torch.tensor(model.tokenizer.all_special_ids)
    vectors, mlm, rtd = [[], [], []], [], []
    for row, view in itertools.product(rows, range(3)):
        ids = torch.from_numpy(row[view]).long()[None]
        maskable = ~torch.isin(ids, special) & (view == 0) & mask
        masked_ids, is_masked = fixed_masks(ids, maskable, model.tokenizer)
        output = model.lm(input_ids=masked_ids, output_hidden_states=True)
        hidden = output.hidden_states[-1]
        z = hidden[0, 0]
        vectors[view].append(z if form == "paper" else model.head(z))
        mlm.append(F.cross_entropy(output.logits[is_masked], ids[is_masked], reduction="none"))
        if view:
            rtd.append((model.rtd(hidden)[0].squeeze(-1), torch.from_numpy(row[view + 2]).long()))
    cts = loss_formulas.contrastive_loss(*map(torch.stack, vectors), form)
    rtd = loss_formulas.replaced_token_loss(*map(torch.cat, zip(*rtd)), form)
    return (torch.cat(mlm).mean(), rtd, cts), vectors


def make_rows(form, bert, texts):
    """Return (model, tokenised rows of the first texts, flags)."""
    flags = [*COMMAND, "--form", form, "--model", bert, "--max-length", 256]
    args = cline.make_parser().parse_args([*map(str, flags)])
    triples = cline.make_triples(*cline.load_data(args.data, args), args)[:texts]
    model = cline.build_model(args, SimpleNamespace(args=args, device=torch.device("cpu"), bf16=False))
    return model, cline.tokenise_triples(triples, model, args)[0], args


@both_forms
def test_compute_loss(form, bert, monkeypatch):
    """Value and gradients equal those of texts encoded one by one, both with many small length groups and
    with a single group. --impl reaches the decoder's loss. A batch without masks has finite gradients."""
    model, rows, args = make_rows(form, bert, 9)
    decoder_loss = Mock(wraps=cline.decoder_loss)
    monkeypatch.setattr(cline, "mask_tokens", fixed_masks)
    monkeypatch.setattr(cline, "decoder_loss", decoder_loss)
    torch.nn.init.normal_(model.log_variances)
    torch.nn.init.normal_(model.rtd.weight if form == "paper" else model.rtd[3].weight)
    expected, _ = reference_losses(model, rows, True, form)
    loss = total_loss(expected, model.log_variances)
    names, weights = zip(*model.named_parameters())
    wanted = dict(zip(names, torch.autograd.grad(loss, weights, allow_unused=True)))
    for cost, impl in ((0, "eager"), (10**6, "blockwise")):
        args.impl = impl
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
    monkeypatch.setattr(cline, "mask_tokens", lambda ids, maskable, _: (ids, maskable & False))
    loss, values = cline.compute_loss(model, cline.make_batch(rows, model), len(rows), args)
    loss.backward()
    assert values["mlm"] == 0 and all(p.grad.isfinite().all() for p in model.parameters())


@both_forms
def test_evaluate_triples(form, bert):
    """The scores equal the reference. Twelve rows, eight times each, need more than one batch of 64."""
    model, rows, args = make_rows(form, bert, 12)
    with torch.no_grad():
        (_, rtd, cts), vectors = reference_losses(model, rows, False, form)
    original, synonym, antonym = vectors
    margins = [(o @ s - o @ a).item() for o, s, a in zip(original, synonym, antonym)]
    result = cline.evaluate_triples(model.train(), rows * 8, args)
    assert model.training and result["hits"] == pytest.approx(100 * np.mean([m > 0 for m in margins]))
    wanted = [np.mean(margins), rtd.item(), cts.item()]
    assert [result[name] for name in ("margin", "rtd", "cts")] == pytest.approx(wanted, rel=1e-3)


# ── whole runs ──


def small_command(folder, rows, *flags):
    """Return COMMAND for the first rows of its data, with batches of 8."""
    (folder / "few.txt").write_text("\n".join(text for text, in SENTENCES[:rows]))
    return [*COMMAND[:-1], folder / "few.txt", "--batch-size", 8, "--max-length", 64, *flags]


def run_rank(rank, *rest):
    """Run one of several processes, with masks that do not depend on the process."""
    cline.mask_tokens = fixed_masks
    running.one_of_several(rank, *rest)


def test_several_processes_equal_one(tmp_path, bert, monkeypatch):
    """Ranks have different numbers of rows, masked tokens and scored tokens. max(s, 0), which is not a mean
    over rows, is added once, not once per rank."""
    flags = small_command(tmp_path, 23, "--model", bert, "--form", "code", "--steps", 3, "--lr", 1e-4)
    flags += ["--warmup-steps", 1, "--held-out-rows", 2]
    monkeypatch.setattr(cline, "mask_tokens", fixed_masks)
    one, out = run("cline", tmp_path / "one", *flags), tmp_path / "three"
    rest = 3, free_port(), "cline", out, flags
    torch.multiprocessing.start_processes(run_rank, rest, 3, start_method="forkserver")
    check_processes(one, out, torch.load(out / "norms"), loose=10)


# ── bad input ──

LABELS = r"data\.csv line 1: '%s', expected start:end:code \(0 kept, 1 to 5 replaced\) of words .*"
COLUMNS = r", expected 1 \(text\), 3 \(original, synonym, antonym\) or 5 \(and synonym_words, antonym_words\)"
FEW = (r"rows have a replaced word in both copies, expected at least --batch-size \+ --held-out-rows, which "
       r"are 2 \+ ")
GOOD = "A dog.,A hound.,A cat.\n" * 4


@pytest.mark.parametrize("content, flags, wanted", [
    ("A b,A b,c d\nA b,A c,A b\n", "", rf"data\.csv: 0 {FEW}0"),
    ("He was not.\nIt is his.\nThey were.\n", "--data data.txt", rf"data\.txt: 0 {FEW}0"),
    (GOOD, "--held-out-rows 3", rf"data\.csv: 4 {FEW}3"),
    ("A,b,\n", "", r"data\.csv line 1: an empty cell; .*"),
    ("A b,c\n", "", r"data\.csv line 1: 2 columns" + COLUMNS),
    ("a b,c,d,e\n", "", r"data\.csv line 1: 4 columns" + COLUMNS),
    ("A,b,c,0:1:2,x\n", "", LABELS % "x"), ("A,b,c,0:2:2,0:1:4\n", "", LABELS % "0:2:2"),
    ("A,b c,c,2:3:2 0:1:2,0:1:4\n", "", LABELS % "2:3:2 0:1:2"),
    ("A,b,c,0:1:6,0:1:4\n", "", LABELS % "0:1:6"),
    (GOOD, "--data data.txt --save-triples a.txt", r"--save-triples a\.txt: expected the name of .*"),
    (GOOD, "--data data.txt --save-triples none/a.csv", r"--save-triples none/a\.csv: expected .*"),
    (GOOD, "--data data.txt --save-triples data.csv", r"--save-triples data\.csv: expected .*"),
    (GOOD, "--save-triples new.csv", r"--save-triples new\.csv: data\.csv already holds triples; .*"),
    (GOOD, "--synonym-rate nan", r"argument --synonym-rate: nan: expected a number from 0 to 1"),
    (GOOD, "--data data.txt --wordnet=", "--wordnet: empty; .*")])
def test_bad_input(tmp_path, monkeypatch, capfd, content, flags, wanted):
    monkeypatch.chdir(tmp_path)
    for name in ("data.csv", "data.txt"):
        Path(name).write_text(content)
    rates = ["--synonym-rate", 1, "--antonym-rate", 1]
    start = [*COMMAND[:-1], "data.csv", "--batch-size", 2, "--steps", 1, *rates]
    rejects("cline", capfd, wanted, *start, *flags.split())


def test_texts_need_wordnet(cwd, capfd):
    Path("texts.txt").write_text("A dog.\nA cat.\n")
    wanted = r"texts\.txt: one column of texts, expected --wordnet .*"
    rejects("cline", capfd, wanted, "--model", "scratch", "--data", "texts.txt")
