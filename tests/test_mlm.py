"""SimCSE's masked-LM loss against all logits of the same model, and its weight in the total."""
import itertools

import pytest
import torch
import torch.nn.functional as F

from test_scripts import NLI, one_cpu_thread, run_text  # noqa: F401, the fixture holds here too


@pytest.mark.parametrize("chosen, dice, becomes", [(0.1, 0.7, "[MASK]"), (0.1, 0.95, "e"), (0.1, 0.85, ""), (0.2, 0.7, "")])
def test_simcse_mlm_loss(chosen, dice, becomes, tmp_path, monkeypatch):
    """All tokens have the same luck: masked, replaced by an e, left as they are, not chosen. Special ones never are."""
    flags = ["--model", "scratch", "--batch-size", 8, "--steps", 1, "--mlm-weight", 0.3]
    result = run_text("simcse", tmp_path, NLI[:8], *flags)
    script, model, tokenizer = result.script, result.model.eval(), result.model.tokenizer
    assert model.lm.get_output_embeddings().weight is not model.encoder.get_input_embeddings().weight
    rows = [tuple(script.tokenise(row, model, 512)[0]) for row in NLI[:8]]
    losses, letter = [], tokenizer.convert_tokens_to_ids(becomes or "e")
    for ids in (torch.from_numpy(ids).long() for row in rows for ids in row):
        words = ~torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
        logits = model.lm(input_ids=torch.where(words & bool(becomes), letter, ids)[None]).logits[0]
        losses.append(F.cross_entropy(logits[words], ids[words], reduction="none"))
    luck = itertools.cycle([chosen, dice])
    monkeypatch.setattr(torch, "rand", lambda shape, device: torch.full(shape, next(luck)))
    monkeypatch.setattr(torch, "randint", lambda high, shape, device: torch.full(shape, letter))
    monkeypatch.setitem(script.GROUP_COST, "cpu", 0)
    batch = script.make_batch(rows, model, result.args)
    assert len(batch) > 1
    loss, values = script.compute_loss(model, batch, result.args)
    expected = torch.cat(losses).mean().item() * (chosen < 0.15)
    assert values["mlm"].item() == pytest.approx(expected, abs=1e-4)
    assert loss.item() == pytest.approx(values["loss"].item() + 0.3 * expected, abs=1e-4)
