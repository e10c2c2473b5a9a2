"""--layer-study: scores of layers and poolings, compared with their definitions, one sentence at a time."""
import json
import re

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


def print_layers(model, folder, capsys, *flags):
    """Return the table of --evaluate --layer-study, as it is printed and as it is in the file."""
    flags = ["--evaluate", "--model", model, *flags, "--out", folder / "none"]
    capsys.readouterr()
    selfguided.main([*map(str, flags), "--layer-study", str(folder / "study.json")])
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    return [row[1:] for row in printed if row[0] == "study"], json.loads((folder / "study.json").read_text())


def test_evaluated_layers(tmp_path, bert, capsys):
    """The scores equal their definitions. Those of [CLS] and the mean of the last layer are also printed by
    --evaluate with --pooling cls and avg. No other file is written."""
    sts = few_pairs(tmp_path, 40)
    printed, table = print_layers(bert, tmp_path, capsys, "--dev", sts)
    assert printed[0] == ["layer", *table["poolings"]] == ["layer", "cls", "mean", "max"]
    rows, pairs = table["evaluated"], load_sts(sts)
    assert printed[1:] == [[str(i), *(f"{x:.2f}" for x in row)] for i, row in enumerate(rows)]
    encoder = AutoModel.from_pretrained(bert, output_hidden_states=True).eval()
    read, pool = AutoTokenizer.from_pretrained(bert), POOL | dict(cls=lambda x: x[0])
    with torch.no_grad():
        states = {text: encoder(**read(text, return_tensors="pt")).hidden_states
                  for pair in pairs for text in pair[:2]}
    for layer, row in enumerate(rows):
        for pooling, found in zip(table["poolings"], row, strict=True):
            first, second = (torch.stack([pool[pooling](states[pair[side]][layer][0]) for pair in pairs])
                             for side in (0, 1))
            cosines = torch.cosine_similarity(first.double(), second.double()).numpy()
            rho = spearman(cosines, [pair[2] for pair in pairs])
            constant = (layer, pooling) == (0, "cls")          # the embedding of [CLS], the same in all texts
            assert found == pytest.approx(0 if constant else 100 * rho, abs=0.01), (layer, pooling)
    assert layer == 3
    for pooling, found in ("cls", rows[-1][0]), ("avg", rows[-1][1]):
        selfguided.main(["--evaluate", "--model", str(bert), "--dev", str(sts), "--pooling", pooling])
        printed = re.search(r"^dev +([\d.-]+)", capsys.readouterr().out, re.M)
        assert float(printed[1]) == pytest.approx(found, abs=0.01)
    assert {path.name for path in tmp_path.iterdir()} == {"study.json", "few.tsv"}


def test_layers_before_and_after_training(tmp_path, capsys, folder_of):
    """The tables show the frozen copy (without the dropout of --form code) and the best checkpoint. With a
    decoder, the last token takes the place of the first."""
    sts = few_pairs(tmp_path, 40)
    flags = ["--data", DATA / "sentences.txt", "--dev", sts, "--batch-size", 12, "--steps", 2]
    flags += ["--projection-dim", 16, "--form", "code", "--lr", 1e-2, "--eval-every", 1, "--layer-study"]
    for family in "Bert", "Qwen2":
        model, out = folder_of(family), tmp_path / family
        result = run("selfguided", out, "--model", model, *flags)
        table = json.loads((out / "study.json").read_text())
        assert set(table) == {"untrained", "trained", "poolings"}
        assert table["untrained"] != table["trained"] and len(table["trained"]) == 4
        for name, folder in ("untrained", model), ("trained", out):
            _, alone = print_layers(folder, tmp_path, capsys, "--dev", sts)
            assert alone["poolings"] == table["poolings"]
            assert alone["evaluated"] == [pytest.approx(row, abs=0.02) for row in table[name]]
        best = float(result.said["done"].split()[4])
        assert table["trained"][-1][0] == pytest.approx(best, abs=0.02)
        assert table["poolings"][0] == ("last" if family == "Qwen2" else "cls")
        assert len(result.said["study"].split()) == 7 and not list(out.glob("*.tmp"))      # the last layer's


@pytest.mark.parametrize("flags, expected", [
    ("", "--layer-study: expected --dev, on which layers are scored, and .*"),
    ("--evaluate --dev good.csv --test good.csv", "--layer-study: .* with --evaluate none of --test, .*"),
    ("--dev good.csv --layer-study x.tsv", "--layer-study x.tsv: expected a name that ends in .json, .*"),
    ("--dev good.csv --layer-study none/x.json", "--layer-study none/x.json: .* in a writable folder")])
def test_bad_flags(flags, expected, cwd, capfd):
    rejects("selfguided", capfd, expected, *SMALL, "--layer-study", *flags.split())
