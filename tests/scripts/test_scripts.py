"""Whole runs of the sentence scripts, with tiny models and the data in tests/data, without a hub, on one CPU
thread.

A new sentence script needs a line in SCRIPTS.
"""
import copy
import importlib.util
import os
import runpy
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from kernels import embed_in_chunks
from running import (
    DATA,
    ROOT,
    SENTENCES,
    embed_unbatched,
    equal,
    few_pairs,
    run,
    run_text,
    saved_weights,
)
from whole_runs import check_resume

TEXT = ["--model", "scratch", "--data", DATA / "sentences.txt", "--dev", DATA / "sts.tsv"]
SCRIPTS = {
    "simcse": ["--model", "scratch", "--data", DATA / "nli.csv", "--dev", DATA / "sts.tsv"],
    "vascl": [*TEXT, "--neighbours", 4, "--radius", 0.2],
    "ease": ["--model", "scratch", "--data", DATA / "entities.tsv", "--dev", DATA / "sts.tsv"],
    "dclr": [*TEXT, "--phi", 0.994],  # masks a tenth of the pairs; the fixture adds --guide
    "selfguided": [*TEXT, "--projection-dim", 128, "--lr", 1e-3, "--pooling", "avg",
                   "--view-pooling", "mean"]}
every_script = pytest.mark.parametrize("name", SCRIPTS)


@pytest.fixture(scope="module", autouse=True)
def guide(bert):
    """Add --guide to the flags of dclr.py."""
    SCRIPTS["dclr"] += ["--guide", bert]


def small(name, folder, rows=36, dev=True):
    """Return the script's flags, with files cut to the first rows: 36 are four batches of 8 and one of 4.

    dev     whether --dev is given, with ten pairs
    """
    flags = []
    for flag in SCRIPTS[name]:
        if flag == DATA / "sts.tsv":
            flag = few_pairs(folder)
        elif isinstance(flag, Path) and flag.is_file():
            header = 0 if flag.suffix == ".txt" else 1
            lines = flag.read_bytes().splitlines(True)[: header + rows]
            flag = folder / flag.name
            flag.write_bytes(b"".join(lines))
        flags.append(flag)
    return [*(flags if dev else without_dev(flags)), "--batch-size", 8]


def without_dev(flags):
    """Return the flags without --dev and its file."""
    at = flags.index("--dev")
    return [*flags[:at], *flags[at + 2 :]]


@pytest.mark.parametrize("name, flags", [
    ("simcse", ["--mlm-weight", 1]), ("vascl", [])])
def test_resume_is_bitwise_exact_and_evaluation_changes_nothing(name, flags, tmp_path):
    """The interrupted run saved its state at the evaluation after step 3, so --resume repeats step 4. Step 6
    is the first of the second epoch."""
    flags = [*small(name, tmp_path), "--steps", 6, *flags]
    never = [*without_dev(flags), "--eval-every", 100]
    check_resume(name, tmp_path, [*flags, "--eval-every", 3], never, 4, [2, 0])


@pytest.mark.parametrize("size", [1, 7])
@every_script
def test_chunks_give_the_gradient_of_the_whole_batch(name, size, tmp_path, monkeypatch):
    """A step with --chunk-size equals a step that keeps the graphs of all chunks. Both encode the same
    chunks, because the model has dropout."""
    flags = [*small(name, tmp_path, dev=False), "--steps", 1, "--chunk-size", size]
    chunked = run(name, tmp_path / "chunked", *flags)

    def embed_at_once(embed, chunks, module):
        return torch.cat([embed(chunk) for chunk in chunks])

    monkeypatch.setattr("kernels.training.text.encoders.embed_in_chunks", embed_at_once)
    whole = run(name, tmp_path / "whole", *flags)
    assert chunked.losses == pytest.approx(whole.losses, rel=1e-6)
    assert chunked.norms == pytest.approx(whole.norms, rel=1e-5) and whole.args.chunk_size == size
    for key, weight in whole.state["optimizer"]["state"].items():              # exp_avg: gradient / 10
        of_chunks = chunked.state["optimizer"]["state"][key]["exp_avg"]
        torch.testing.assert_close(of_chunks, weight["exp_avg"], rtol=1e-5, atol=1e-6)


def test_chunks_of_tokens(tmp_path, bert, monkeypatch):
    """With texts of very different lengths, no chunk exceeds --chunk-tokens or --chunk-size, except a single
    longer text. Gradients are those of a run without chunks."""
    rows = [["no " * 2**(i % 8), "yes " * (1 + i)] for i in range(24)]         # 4 to 258 tokens
    flags = ["--model", bert, "--pooling", "avg", "--batch-size", 24, "--steps", 1, "--max-length", 512]
    whole, counts = run_text("simcse", tmp_path / "whole", rows, *flags), []
    for most_rows, limits in ((48, ["--chunk-tokens", 200]), (5, ["--chunk-tokens", 200, "--chunk-size", 5])):
        embed = Mock(wraps=embed_in_chunks)
        monkeypatch.setattr("kernels.training.text.encoders.embed_in_chunks", embed)
        chunked = run_text("simcse", tmp_path / f"chunks{most_rows}", rows, *flags, *limits)
        (_, chunks, module), _ = embed.call_args
        shapes = [ids.shape for _, ids, _ in chunks]
        assert module is chunked.model.encoder and sum(n for n, _ in shapes) == 48
        assert all(n <= most_rows and n * length <= 200 or n == 1 for n, length in shapes)
        assert max(length for _, length in shapes) > 200
        counts.append((len(shapes), max(n for n, _ in shapes)))
        assert chunked.norms == pytest.approx(whole.norms, rel=1e-5)
        for key, weight in whole.state["optimizer"]["state"].items():          # exp_avg: gradient / 10
            of_chunks = chunked.state["optimizer"]["state"][key]["exp_avg"]
            torch.testing.assert_close(of_chunks, weight["exp_avg"], rtol=1e-4, atol=1e-6)
    assert counts[0][0] < counts[1][0] and counts[0][1] > 5


@every_script
@pytest.mark.parametrize("impl", ["blockwise", "triton"])
def test_every_impl_equals_eager(name, impl, tmp_path, monkeypatch):
    interpreted = importlib.util.find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1"
    if impl == "triton" and not interpreted:
        pytest.skip("needs Triton's interpreter: this file runs on the CPU")
    flags = [*small(name, tmp_path), "--steps", 2, "--eval-every", 1]
    eager = run(name, tmp_path / "eager", *flags, "--impl", "eager")
    chosen = Mock(wraps=importlib.import_module("kernels").choose_impl)
    monkeypatch.setattr("kernels.call.choose_impl", chosen)
    other = run(name, tmp_path / "other", *flags, "--impl", impl)
    assert {call.args[0] for call in chosen.call_args_list} == {impl}
    for value, tolerance in (("loss", 1e-4), ("dev_uniformity", 1e-3)):
        expected = [step[value] for step in eager.steps]
        assert [step[value] for step in other.steps] == pytest.approx(expected, abs=tolerance)


def test_best_checkpoint_is_kept(tmp_path, monkeypatch):
    """A better score on --dev replaces the checkpoint. An equal score does not, and the score before training
    does not count. --test evaluates the kept checkpoint."""
    scores, seen = iter([9.0, 1.0, 3.0, 3.0, 2.0, 7.0]), []

    def evaluate(model, *_):
        seen.append(copy.deepcopy(model.encoder.state_dict()))
        return {"spearman": next(scores)}

    monkeypatch.setattr("kernels.training.text.evaluation.evaluate", evaluate)
    flags = [*small("simcse", tmp_path), "--test", DATA / "sts.tsv", "--steps", 4, "--eval-every", 1]
    result = run("simcse", tmp_path / "out", *flags)
    assert [step["best"] for step in result.steps] == [True, True, False, False]
    assert [i for i, weights in enumerate(seen) if equal(dict(seen[2]), dict(weights))] == [2, 5]
    assert equal(dict(seen[2]), saved_weights(tmp_path / "out"))
    assert "9.00 → 3.00 at step 2," in result.said["done"]


@pytest.mark.parametrize("name", ["vascl", "selfguided", "dclr"])
@pytest.mark.parametrize("form", ["paper", "code"])
def test_transformers_loads_the_encoder(name, form, tmp_path, bert):
    """The printed line loads the encoder without head, guide or fixed copy. It gives the embeddings of the
    weights in state.pt."""
    own_flags = {"vascl": ["--neighbours", 3], "selfguided": ["--projection-dim", 16],
                 "dclr": ["--guide", bert]}
    common = ["--model", bert, "--batch-size", 8, "--steps", 3, "--lr", 1e-2, "--form", form]
    result = run_text(name, tmp_path, SENTENCES[:24], *common, *own_flags[name])
    sentences = [row[0] for row in SENTENCES[:6]]
    result.model.load_state_dict(result.state["model"])
    expected = result.model.eval().embed_texts(sentences).detach()
    model = eval(result.said["load"].split("  or  ")[1], {"AutoModel": AutoModel})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert not (tmp_path / "out" / "2_Dense").exists()
    loaded = embed_unbatched(model, tokenizer, sentences, result.model.pooling)
    torch.testing.assert_close(loaded, expected, atol=1e-5, rtol=0)


def test_help_describes_data_and_departures(capsys):
    """--help describes the data, the departures from the released code, and every flag, for every script."""
    for path in sorted(ROOT.glob("*.py")):
        parser = runpy.run_path(path)["make_parser"]()
        page = " ".join(parser.format_help().split())
        assert "Data" in page and "released code" in page and "--help" in page
        assert all(action.help for action in parser._actions), path.name
