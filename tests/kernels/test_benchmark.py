"""Tests of python -m kernels.benchmark: results, README's table, and the plot."""
import json
import re
from pathlib import Path

import pytest

import plot_kernels
from kernels import benchmark


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])


def case(loss, size=(32, 32, 8), inputs="random"):
    return dict(loss=loss, size=size, set=inputs, dtype="float32")


def test_results_are_printed_saved_and_shown(tmp_path, capsys):
    """The default implementations, each in a new process. For 1024 x 1024 logits, auto is blockwise."""
    flags = "--loss info_nce --sizes 64x64x32 1024x1024x32 --repeat 3 --set trained --markdown"
    benchmark.main([*flags.split(), "--json", str(tmp_path / "rows.json")])
    output, saved = capsys.readouterr().out, json.loads((tmp_path / "rows.json").read_text())
    assert [row["impl"] for row in saved["rows"]] == ["eager", "eager", "auto", "auto", "blockwise"]
    for row in saved["rows"]:
        assert row["error"] < 1e-2 and row["forward_ms"] > 0 and 0 < row["ms_20"] <= row["ms"] <= row["ms_80"]
    assert len(re.findall("info_nce +64x64x32 +trained +(?:eager|auto|blockwise) ", output)) == 3
    assert "| loss | N × M × D | inputs | eager | ours | blockwise | error of eager | error" in output


def test_inputs_and_losses():
    """Each loss of the package can be measured. The value of info_nce on trained inputs is about 5e-3."""
    for loss in benchmark.DEFAULT_SIZES:
        for impl in ("eager", "blockwise", "auto"):
            row = benchmark.measure(case(loss), impl, "cpu", repeat=1)
            assert row["error"] < 1e-3 and row["ms"] > 0
    for loss in "info_nce", "clip_loss", "linear_cross_entropy":   # "torch" is the only peer installed here
        assert benchmark.measure(case(loss), "torch", "cpu", repeat=1)["error"] < 1e-3
    q, k, targets = benchmark.make_inputs(case("info_nce", (512, 512, 768), "trained"), "cpu")
    assert 1e-3 < benchmark.our_loss("info_nce", "eager")(q, k, targets).item() < 2e-2


def test_table_in_readme_is_what_its_command_prints(capsys):
    results, readme = (Path(name).read_text(encoding="utf-8") for name in ("docs/results.md", "README.md"))
    benchmark.main(re.search("python -m kernels.benchmark (--from docs/h200.json .*)", results)[1].split())
    assert capsys.readouterr().out.split("\n\n")[1].strip() in readme


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    plot_kernels.main(["docs/h200.json", str(tmp_path / "a.png"), "--loss", "nt_xent"])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
