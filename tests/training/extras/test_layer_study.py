"""What the layers of an encoder are worth, against the definitions, one sentence at a time."""
import json
import re

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import selfguided
from formulas import POOL
from kernels.training.text.layers import pool_tokens
from kernels.training.text.sts import load_sts, spearman
from running import DATA, SMALL, refuse, run


@pytest.mark.parametrize("pooling, pool", POOL.items())
def test_pool_tokens(pooling, pool):
    """Padding, even enormous, changes nothing, and stays as it was; a row of it alone gives no NaN."""
    hidden, mask = torch.randn(2, 4, 5), torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]])
    hidden[:, 2:] = 1e6
    ours = pool_tokens(hidden, mask, pooling)
    torch.testing.assert_close(ours[0], pool(hidden[0, :2]))
    assert ours.isfinite().all() and (hidden[:, 2:] == 1e6).all()


def study_of(model, folder, capsys, *flags):
    """(the table of --evaluate --study as printed, as written)"""
    flags = ["--evaluate", "--model", model, *flags, "--out", folder / "none"]
    capsys.readouterr()
    selfguided.main([*map(str, flags), "--study", str(folder / "study.json")])
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    return [row[1:] for row in printed if row[0] == "study"], json.loads((folder / "study.json").read_text())


def test_study(tmp_path, bert, capsys):
    """Each layer and pooling by the definitions, one sentence at a time; of the last layer [CLS] and the mean
    are what --evaluate says of --pooling cls and avg. Nothing else is written."""
    sts = tmp_path / "sts.tsv"
    lines = (DATA / "sts.tsv").read_text(encoding="utf-8").splitlines(True)
    sts.write_text("".join(lines[:40]))
    printed, table = study_of(bert, tmp_path, capsys, "--dev", sts)
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
            one, two = (torch.stack([pool[pooling](states[pair[side]][layer][0]) for pair in pairs])
                        for side in (0, 1))
            near = torch.cosine_similarity(one.double(), two.double()).numpy()
            rho = spearman(near, [pair[2] for pair in pairs])
            first = (layer, pooling) == (0, "cls")             # equal in all texts
            assert found == pytest.approx(0 if first else 100 * rho, abs=0.01), (layer, pooling)
    assert layer == 3
    for pooling, found in ("cls", rows[-1][0]), ("avg", rows[-1][1]):
        selfguided.main(["--evaluate", "--model", str(bert), "--dev", str(sts), "--pooling", pooling])
        said = re.search(r"^dev +([\d.-]+)", capsys.readouterr().out, re.M)
        assert float(said[1]) == pytest.approx(found, abs=0.01)
    assert {path.name for path in tmp_path.iterdir()} == {"study.json", "sts.tsv"}


def test_study_of_a_training(tmp_path, capsys, folder_of):
    """Tables of the fixed copy, whose dropout of the code form is off, and of the best checkpoint; a decoder
    has its last token in the place of its first."""
    flags = ["--data", DATA / "sentences.txt", "--dev", DATA / "sts.tsv", "--batch-size", 12, "--steps", 2]
    flags += ["--width", 16, "--form", "code", "--lr", 1e-2, "--eval-every", 1, "--study"]
    for family in "Bert", "Qwen2":
        model, out = folder_of(family), tmp_path / family
        result = run("selfguided", out, "--model", model, *flags)
        table = json.loads((out / "study.json").read_text())
        assert set(table) == {"untrained", "trained", "poolings"}
        assert table["untrained"] != table["trained"] and len(table["trained"]) == 4
        for name, folder in ("untrained", model), ("trained", out):
            _, alone = study_of(folder, tmp_path, capsys, "--dev", DATA / "sts.tsv")
            assert alone["poolings"] == table["poolings"]
            assert alone["evaluated"] == [pytest.approx(row, abs=0.02) for row in table[name]]
        best = float(result.said["done"].split()[4])
        assert table["trained"][-1][0] == pytest.approx(best, abs=0.02)
        assert table["poolings"][0] == ("last" if family == "Qwen2" else "cls")
        assert len(result.said["study"].split()) == 7 and not list(out.glob("*.tmp"))      # the last layer's


@pytest.mark.parametrize("flags, wanted", [
    ("", "--study: layers are judged by --dev; wanted it, and with --evaluate no other data"),
    ("--evaluate --dev good.csv --test good.csv", "--study: layers are judged by --dev; .* no other data"),
    ("--dev good.csv --study x.tsv", "--study x.tsv: wanted the name of a .json in a folder .*"),
    ("--dev good.csv --study none/x.json", "--study none/x.json: wanted the name .* that can be written")])
def test_study_that_cannot_be(flags, wanted, here, capfd):
    refuse("selfguided", capfd, wanted, *SMALL, "--study", *flags.split())
