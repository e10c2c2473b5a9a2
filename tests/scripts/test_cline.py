"""Test cline.py: the three losses and the scores, compared with texts that are encoded one at a time.
Replaced words are tested in tests/training/papers, whole runs in tests/contract."""
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import cline
import loss_formulas
from kernels.training.text import tokens
from running import DATA, mask_every_fourth

COMMAND = ["--model", "scratch", "--tagger", "lexicon", "--wordnet", DATA / "wordnet"]


def reference_losses(model, rows, mask, form):
    """Return the losses (MLM, RTD, CTS) and the vectors of the three views, from one text at a time.

    mask    whether to mask tokens of the originals; transformers' own head then gives the MLM loss
    """
    special = torch.tensor(model.tokenizer.all_special_ids)
    vectors, mlm, rtd = [[], [], []], [], []
    for row, view in itertools.product(rows, range(3)):
        ids = torch.from_numpy(row[view]).long()[None]
        maskable = ~torch.isin(ids, special) & (view == 0) & mask
        masked_ids, is_masked = mask_every_fourth(ids, maskable, model.tokenizer)
        output = model.lm(input_ids=masked_ids, output_hidden_states=True)
        hidden = output.hidden_states[-1]
        z = hidden[0, 0]
        vectors[view].append(z if form == "paper" else model.head(z))
        mlm.append(F.cross_entropy(output.logits[is_masked], ids[is_masked], reduction="none"))
        if view:
            rtd.append((model.rtd(hidden)[0].squeeze(-1), torch.from_numpy(row[view + 2]).long()))
    vectors = [*map(torch.stack, vectors)]
    cts = loss_formulas.contrastive_loss(*vectors, form)
    rtd = loss_formulas.replaced_token_loss(*map(torch.cat, zip(*rtd)), form)
    return (torch.cat(mlm).mean(), rtd, cts), vectors


@pytest.mark.parametrize("form", ["paper", "code"])
def test_compute_loss_and_evaluate_triples(form, bert, monkeypatch):
    """Losses, gradients and scores equal those of texts encoded one by one, with many small length groups and
    with one group. Without masked tokens, gradients are finite. The scored rows fill two batches."""
    flags = [*COMMAND, "--data", DATA / "sentences.txt", "--form", form, "--model", bert, "--max-length", 256]
    args = cline.make_parser().parse_args([*map(str, flags)])
    triples = cline.make_triples(*cline.load_data(args.data, args), args)[:9]
    model = cline.build_model(args, SimpleNamespace(args=args, device=torch.device("cpu"), bf16=False))
    rows, _ = cline.tokenise_triples(triples, model, args)
    monkeypatch.setattr(cline, "mask_tokens", mask_every_fourth)
    model.log_variances.data = torch.tensor([0.3, -1, 0.5])
    torch.nn.init.normal_(model.rtd.weight if form == "paper" else model.rtd[3].weight)
    expected, _ = reference_losses(model, rows, True, form)
    loss = loss_formulas.total_loss(torch.stack(expected), model.log_variances)
    names, weights = zip(*model.named_parameters())
    wanted = dict(zip(names, torch.autograd.grad(loss, weights, allow_unused=True)))
    for cost in (0, 10**6):
        monkeypatch.setitem(tokens.GROUP_COST, "cpu", cost)
        batch = cline.make_batch(rows, model)
        assert (len(batch) > 5) == (cost == 0)
        total, values = cline.compute_loss(model, batch, len(rows), args)
        found = [values[name].item() for name in ("loss", "mlm", "rtd", "cts")]
        assert found == pytest.approx([x.item() for x in (loss, *expected)], rel=1e-4)
        model.zero_grad()
        total.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-3, atol=1e-4, msg=name)
    of_two_ranks, _ = cline.compute_loss(model, batch, 2 * len(rows), args)   # it adds only half of max(s, 0)
    assert (total - of_two_ranks).item() == pytest.approx((0.3 + 0.5) / 2, rel=1e-3)
    monkeypatch.setattr(cline, "mask_tokens", lambda ids, maskable, _: (ids, maskable & False))
    loss, values = cline.compute_loss(model, cline.make_batch(rows, model), len(rows), args)
    loss.backward()
    assert values["mlm"] == 0 and all(p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        (_, rtd, cts), (original, synonym, antonym) = reference_losses(model, rows, False, form)
    margins = (original * (synonym - antonym)).sum(1)
    result = cline.evaluate_triples(model.train(), rows * 8, args)
    assert model.training and result["hits"] == pytest.approx(100 * np.mean((margins > 0).tolist()))
    wanted = [margins.mean().item(), rtd.item(), cts.item()]
    assert [result[name] for name in ("margin", "rtd", "cts")] == pytest.approx(wanted, rel=1e-3)
