"""kill -9 at random moments, from the first one on, loses nothing: the same command with --resume, each time,
ends in the bits of the run that was left alone. Every step is evaluated and saved.

TENCL_ATTACK=all is 20 kills of each script, else 3 of two.
"""
import json
import os
import random
import time
from pathlib import Path

import pytest
import torch
from cases import SCRIPTS, SECONDS, Furniture, end, kill, start, texts, wait_until
from safetensors.torch import load_file

from running import equal

ALL = os.environ.get("TENCL_ATTACK") == "all"
KILLS = 20 if ALL else 3
MORE = {"childtuning": ["--dev", "topics.tsv", "--mode", "D", "--fisher-samples", "4"],
        "simcse": ["--dev", "sts.tsv"],
        "ease": ["--dev", "sts.tsv"], "vascl": ["--dev", "sts.tsv"], "dclr": ["--dev", "sts.tsv"],
        "selfguided": ["--dev", "sts.tsv"]}


@pytest.mark.parametrize("name", SCRIPTS if ALL else ["simcse", "moco"])
def test_a_kill_loses_nothing(name, tmp_path):
    draw, here = random.Random(name), Furniture.copy(tmp_path / "work")
    flags = [*MORE.get(name, []), "--steps", 4 + 2 * KILLS, "--eval-every", 1, "--keep-state", "always"]
    began = time.time()
    whole = start(name, [*flags, "--out", "whole"], here, tmp_path / "whole")
    wait_until((here / "whole" / "state.pt").exists)
    ready = time.time() - began                                # with the first step
    assert end(whole, 10 * SECONDS) == 0, texts(tmp_path / "whole")
    step = (time.time() - began - ready) / (4 + 2 * KILLS)
    for _ in range(KILLS):
        process = start(name, [*flags, "--resume"], here, tmp_path / "out")
        process.join(draw.uniform(0, ready + 4 * step))
        assert process.exitcode in (None, 0), texts(tmp_path / "out")
        kill(process)
    last = start(name, [*flags, "--resume"], here, tmp_path / "out")
    assert end(last, 10 * SECONDS) == 0, texts(tmp_path / "out")
    assert result(here / "out") == result(here / "whole")
    for one in (here / "whole").rglob("*.safetensors"):
        assert equal(load_file(one), load_file(here / "out" / one.relative_to(here / "whole"))), one
    states = [torch.load(here / out / "state.pt", weights_only=True) for out in ("out", "whole")]
    for part in ("progress", "model", "optimizer", "random"):
        assert equal(*(plain(state[part]) for state in states)), part


def result(out):
    """Names of weights, and rows of metrics without their seconds."""
    rows = [json.loads(row) | {"seconds": 0} for row in open(out / "metrics.jsonl")]
    return sorted(str(path.relative_to(out)) for path in Path(out).rglob("*.safetensors")), rows


def plain(state):
    return dict(state) if isinstance(state, dict) else state
