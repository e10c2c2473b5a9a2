"""--layer-study of selfguided.py: scores of layers and poolings, compared with their definitions."""
import json

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import selfguided
from formulas import POOL
from kernels.training.papers.selfguided_layers import pool_tokens
from kernels.training.text.sts import load_sts, spearman
from running import DATA, SMALL, few_pairs, rejects, run


@pytest.mark.parametrize("pooling, pool", POOL.items())
def test_pool_tokens_ignores_padding(pooling, pool):
    """Even huge values at padding change nothing and are not overwritten; a row of padding gives no NaN."""
    hidden, mask = torch.randn(2, 4, 5), torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]])
    hidden[:, 2:] = 1e6
    ours = pool_tokens(hidden, mask, pooling)
    torch.testing.assert_close(ours[0], pool(hidden[0, :2]))
    assert ours.isfinite().all() and (hidden[:, 2:] == 1e6).all()


@pytest.mark.parametrize("family", ["Bert", "Qwen2"])
def test_layers_before_and_after_training(family, tmp_path, folder_of, capsys):
    """The tables show the frozen copy (without the dropout of --form code) and the best checkpoint. Their
    scores equal the definitions, one sentence at a time. With a decoder, the last token takes the place of
    the first. --evaluate prints the scores of the saved model again."""
    sts, model, out = few_pairs(tmp_path, 40), folder_of(family), tmp_path / "out"
    result = run("selfguided", out, "--model", model, "--data", DATA / "sentences.txt", "--dev", sts,
                 "--batch-size", 12, "--steps", 2, "--projection-dim", 16, "--form", "code", "--lr", 1e-2,
                 "--eval-every", 1, "--layer-study")
    study = json.loads((out / "study.json").read_text())
    first = "last" if family == "Qwen2" else "cls"
    assert set(study) == {"untrained", "trained", "poolings"} and study["poolings"] == [first, "mean", "max"]
    pool = POOL | dict(cls=lambda x: x[0], last=lambda x: x[-1])
    pairs, read = load_sts(sts), AutoTokenizer.from_pretrained(model)
    for name, folder in ("untrained", model), ("trained", out):
        encoder = AutoModel.from_pretrained(folder, output_hidden_states=True).eval()
        with torch.no_grad():
            states = {text: encoder(**read(text, return_tensors="pt")).hidden_states
                      for pair in pairs for text in pair[:2]}
        assert len(study[name]) == 4
        for layer, row in enumerate(study[name]):
            for pooling, found in zip(study["poolings"], row, strict=True):
                a, b = (torch.stack([pool[pooling](states[pair[side]][layer][0]) for pair in pairs]).double()
                        for side in (0, 1))
                rho = spearman(torch.cosine_similarity(a, b).numpy(), [pair[2] for pair in pairs])
                constant = (layer, pooling) == (0, "cls")      # the embedding of [CLS], the same in all texts
                assert found == pytest.approx(0 if constant else 100 * rho, abs=0.02), (name, layer, pooling)
    best = float(result.said["done"].split()[4])
    assert study["trained"][-1][0] == pytest.approx(best, abs=0.02) and study["untrained"] != study["trained"]
    selfguided.main(["--evaluate", "--model", str(out), "--dev", str(sts), "--layer-study"])
    rows = [line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.startswith("study")]
    assert [[float(x) for x in row[1:]] for row in rows[1:]] == [
        pytest.approx(row, abs=0.02) for row in study["trained"]]


@pytest.mark.parametrize("flags, expected", [
    ("", "--layer-study: expected --dev, on which layers are scored, and .*"),
    ("--dev good.csv --layer-study x.tsv", "--layer-study x.tsv: expected a name that ends in .json, .*")])
def test_bad_flags(flags, expected, cwd, capfd):
    rejects("selfguided", capfd, expected, *SMALL, "--layer-study", *flags.split())
