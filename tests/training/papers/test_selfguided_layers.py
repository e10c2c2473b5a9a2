"""Test --layer-study of selfguided.py: scores of layers and poolings, compared with their definitions."""
import json

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from formulas import POOL
from kernels.training.text.sts import load_sts, spearman
from running import DATA, few_pairs, run


def test_layers_before_and_after_training(tmp_path, folder_of):
    """The tables have the scores of the frozen copy, without the dropout of --form code, and of the best
    checkpoint. The scores equal those computed by definition, one sentence at a time."""
    sts, model, out = few_pairs(tmp_path, 40), folder_of("Bert"), tmp_path / "out"
    result = run("selfguided", out, "--model", model, "--data", DATA / "sentences.txt", "--dev", sts,
                 "--batch-size", 12, "--steps", 2, "--projection-dim", 16, "--form", "code", "--lr", 1e-2,
                 "--eval-every", 1, "--layer-study")
    study = json.loads((out / "study.json").read_text())
    assert set(study) == {"untrained", "trained", "poolings"} and study["poolings"] == ["cls", "mean", "max"]
    (*columns, gold), read = zip(*load_sts(sts)), AutoTokenizer.from_pretrained(model)
    for name, folder in ("untrained", model), ("trained", out):
        encoder = AutoModel.from_pretrained(folder, output_hidden_states=True).eval()
        with torch.no_grad():
            states = [[encoder(**read(text, return_tensors="pt")).hidden_states for text in column]
                      for column in columns]
        assert len(study[name]) == 4
        for layer, row in enumerate(study[name]):
            for pooling, found in zip(("mean", "max"), row[1:], strict=True):
                a, b = (torch.stack([POOL[pooling](x[layer][0]) for x in column]) for column in states)
                rho = spearman(torch.cosine_similarity(a.double(), b.double()).numpy(), gold)
                assert found == pytest.approx(100 * rho, abs=0.02), (name, layer, pooling)
    best = float(result.said["done"].split()[4])
    assert study["trained"][-1][0] == pytest.approx(best, abs=0.02) and study["untrained"] != study["trained"]
