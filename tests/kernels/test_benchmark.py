"""Tests of python -m kernels.benchmark: results, peers (other packages), README's table, and the plot."""
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from kernels import benchmark


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(Path(__file__).parents[2])


def measure(loss, impl):
    return benchmark.measure(loss, [32, 32, 8], torch.float32, impl, "cpu", repeat=1, trained=False)


def test_results_are_printed_saved_and_shown(tmp_path, capsys):
    """The results of two implementations, each measured in a new process."""
    flags = "--loss info_nce --sizes 64x64x32 --impl eager blockwise --repeat 3 --set trained --markdown"
    benchmark.main([*flags.split(), "--json", str(tmp_path / "rows.json")])
    output, saved = capsys.readouterr().out, json.loads((tmp_path / "rows.json").read_text())
    assert saved["device"] and [row["impl"] for row in saved["rows"]] == ["eager", "blockwise"]
    for row in saved["rows"]:
        assert row["error"] < 1e-2 and row["forward_ms"] > 0 and 0 < row["ms_20"] <= row["ms"] <= row["ms_80"]
    assert len(re.findall("info_nce +64x64x32 +trained +(?:eager|blockwise) ", output)) == 2
    assert "| loss | N × M × D | inputs | eager | ours | error of eager | error of ours |\n" in output


def test_inputs_and_losses():
    """Each loss of the package can be measured. The value of info_nce on trained inputs is about 5e-3."""
    for loss in benchmark.DEFAULT_SIZES:
        for impl in ("eager", "blockwise", "auto"):
            row = measure(loss, impl)
            assert row["error"] < 1e-3 and row["ms"] > 0
    q, k, targets = benchmark.make_inputs("info_nce", (512, 512, 768), torch.float32, "cpu", trained=True)
    assert 1e-3 < benchmark.our_loss("info_nce", "eager")(q, k, targets).item() < 2e-2


def test_peers_are_called_correctly(monkeypatch):
    """The peers here are made-up packages, which compute what the documentation of the real ones says."""
    def cce(x, weight, target, filter_eps=None):
        return F.cross_entropy(x @ weight.T, target)

    def liger():
        return lambda weight, x, target: cce(x, weight, target)

    def inf_cl(q, k, target, scale, head_dim):
        return F.cross_entropy(q @ k.T * scale, target, reduction="none")

    def memeff(temperature, normalized_inputs, stable):
        own = torch.arange(32)
        return lambda q, k: (cce(q / temperature, k, own) + cce(k / temperature, q, own)) / 2

    def siglip(q, k, log_scale, bias):
        match = 2 * torch.eye(len(q)) - 1
        return -F.logsigmoid(match * (q @ k.T * log_scale.exp() + bias)).sum() / len(q)

    for name, names in {
            "memeff": dict(MemoryEfficientCLIPLoss=memeff), "siglip_kernel": dict(fused_siglip_loss=siglip),
            "inf_cl": dict(cal_flash_loss=inf_cl), "cut_cross_entropy": dict(linear_cross_entropy=cce),
            "liger_kernel": {}, "liger_kernel.transformers": dict(LigerFusedLinearCrossEntropyLoss=liger),
    }.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**names))
    peers = {"info_nce": 4, "linear_cross_entropy": 4, "clip_loss": 5, "nt_xent": 5, "sigmoid_loss": 1,
             "queue_loss": 0, "sup_con_loss": 0}
    for loss, number in peers.items():
        rows = [row for row in (measure(loss, impl) for impl in benchmark.PEERS) if "ms" in row]
        assert len(rows) == number
        assert all(row["error"] < 1e-3 for row in rows if loss != "nt_xent")   # peers' nt_xent differs


def test_table_in_readme_is_what_its_command_prints(capsys):
    readme = Path("README.md").read_text(encoding="utf-8")
    benchmark.main(re.search("python -m kernels.benchmark (--from .* --markdown)", readme)[1].split())
    assert capsys.readouterr().out.split("\n\n")[1].strip() in readme


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    benchmark.main(["--from", "docs/h200.json", "--loss", "nt_xent", "--plot", str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
