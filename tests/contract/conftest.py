"""Fixtures of models and data that several tests of the contract need."""
import shutil

import pytest
import torch
from transformers import AutoModel

from running import DATA, train


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Return the folder of an encoder that simcse.py has trained for 30 steps."""
    folder = tmp_path_factory.mktemp("trained")
    train(["simcse", "--model", "scratch", "--data", DATA / "nli.csv", "--steps", 30, "--out", "out"], folder)
    return folder / "out"


@pytest.fixture(scope="session")
def spoiled(trained, tmp_path_factory):
    """Return the trained encoder's folder with a random last layer, so that lower layers embed better."""
    folder = shutil.copytree(trained, tmp_path_factory.mktemp("spoiled") / "out")
    model = AutoModel.from_pretrained(trained)
    torch.manual_seed(0)
    for weight in model.encoder.layer[-1].parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(folder)
    return folder
