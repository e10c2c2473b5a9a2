"""The sentence scripts from the first flag to the last line: tiny models, the data beside this file, no hub,
one CPU thread.

A new sentence script is a line in SCRIPTS.
"""
import copy
import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from running import (
    DATA,
    ROOT,
    SENTENCES,
    equal,
    in_processes,
    metrics,
    one_by_one,
    run,
    run_text,
    saved_weights,
)
from whole_runs import check_processes, check_resume

TEXT = ["--model", "scratch", "--data", DATA / "sentences.txt", "--dev", DATA / "sts.tsv"]
SCRIPTS = {
    "simcse": ["--model", "scratch", "--data", DATA / "nli.csv", "--dev", DATA / "sts.tsv"],
    "vascl": [*TEXT, "--neighbours", 4, "--radius", 0.2],
    "ease": ["--model", "scratch", "--data", DATA / "entities.tsv", "--dev", DATA / "sts.tsv"],
    "dclr": [*TEXT, "--phi", 0.994],  # leaves out a tenth of the pairs; --guide below
    "selfguided": [*TEXT, "--width", 128, "--lr", 1e-3, "--pooling", "avg", "--view-pooling", "mean"]}
RISE = {"vascl": 4, "dclr": 8}                                 # of the dev score in 30 steps, else 12
every_script = pytest.mark.parametrize("name", SCRIPTS)


@pytest.fixture(scope="module", autouse=True)
def guide(bert):
    SCRIPTS["dclr"] += ["--guide", bert]


def code_in(folder):
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*.py")}


def small(name, folder, rows=36):
    """The script's command with the first rows of its files: 36 are four batches of 8 and one of 4."""
    for file in (flag for flag in SCRIPTS[name] if isinstance(flag, Path) and flag.is_file()):
        lines = file.read_bytes().splitlines(True)[: rows + (file.suffix != ".txt")]
        (folder / file.name).write_bytes(b"".join(lines))
    cut = lambda flag: isinstance(flag, Path) and flag.is_file()
    return [*(folder / flag.name if cut(flag) else flag for flag in SCRIPTS[name]), "--batch-size", 8]


def test_every_script_is_one_file_beside_kernels(tmp_path):
    """All ten in an empty folder, in one process that has imported nothing of ours."""
    home = tmp_path / "home"
    shutil.copytree(ROOT / "kernels", home / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    pictures = ["--data", DATA / "shapes.npz", "--model", "resnet-small", "--batch-size", 16]
    pictures += ["--probe-epochs", 1]
    documents, texts = tmp_path / "documents.txt", [row[0] for row in SENTENCES[:80]]
    documents.write_text("\n\n".join("\n".join(texts[i : i + 8]) for i in range(0, 80, 8)))
    others = {"simclr": pictures, "moco": [*pictures, "--queue", 64, "--bn-splits", 2],
              "cline": ["--data", DATA / "sentences.txt", "--wordnet", DATA / "wordnet", "--batch-size", 8],
              "tacl": ["--data", documents, "--batch-size", 8],
              "childtuning": ["--data", DATA / "topics.tsv", "--mode", "F"]}
    code = "import runpy, sys\nfor command in eval(sys.stdin.read()):\n    sys.argv = command\n"
    code += "    runpy.run_path(command[0], run_name='__main__')\n"
    commands = []
    for name in (*SCRIPTS, *others):
        shutil.copy(ROOT / f"{name}.py", home)
        flags = others[name] if name in others else small(name, tmp_path)
        scratch = [] if "--model" in flags else ["--model", "scratch"]
        commands.append([*map(str, [f"{name}.py", *flags, *scratch, "--out", f"out/{name}", "--steps", 2])])
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=home, env=env,
                          input=repr(commands), capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\ndone ") == done.stdout.count("\nload ") == 10
    for name in (*SCRIPTS, *others):
        out = home / "out" / name
        wanted = ["README.md", "args.json", "config.json", "model.safetensors"]
        wanted += ["modules.json", "1_Pooling/config.json", "tokenizer.json"] * (name in SCRIPTS)
        assert [file for file in wanted if not (out / file).is_file()] == []
        assert [step["step"] for step in metrics(out)] == [1, 2]
        assert (out / f"{name}.py").read_bytes() == (ROOT / f"{name}.py").read_bytes()     # it knows its code
        assert code_in(out / "training") == code_in(ROOT / "kernels" / "training")


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "selfguided"])    # in its own file
def test_learns(name, tmp_path):
    result = run(name, tmp_path / "out", *SCRIPTS[name], "--steps", 30)
    before, best = (float(result.said["done"].split()[i]) for i in (2, 4))     # dev Spearman 41.57 → 78.94
    assert best == round(result.steps[-1]["dev_spearman"], 2) and best > before + RISE.get(name, 12)


@every_script
def test_loss_falls_when_one_batch_repeats(name, tmp_path):
    losses = run(name, tmp_path / "out", *small(name, tmp_path, 8), "--steps", 15).losses
    assert max(losses[-3:]) < 0.6 * losses[0]


@pytest.mark.parametrize("name, flags", [
    *((name, []) for name in SCRIPTS), ("simcse", ["--mlm-weight", 1]),
    ("simcse", ["--columns", 1, "--views", "token_cutoff", "delete", "--optimizer-of", "consert"])])
def test_resume_is_exact_and_evaluation_leaves_no_trace(name, flags, tmp_path):
    """Step 6 begins the second epoch; step 4, which the interrupted run did after its evaluation, is done
    again."""
    flags = [*small(name, tmp_path), "--steps", 6, *flags]
    dev = flags.index("--dev")
    never = [*flags[:dev], *flags[dev + 2 :], "--eval-every", 100]
    check_resume(name, tmp_path, [*flags, "--eval-every", 3], never, 4, [2, 0])


@pytest.mark.parametrize("size", [1, 7])
@every_script
def test_chunks_are_the_whole_step(name, size, tmp_path, monkeypatch):
    """With dropout: the same groups, embedded once and all kept, are the step without chunks."""
    flags = [*small(name, tmp_path), "--steps", 1, "--chunk-size", size]
    chunked = run(name, tmp_path / "chunked", *flags)
    keep = lambda embed, chunks, module: torch.cat([embed(chunk) for chunk in chunks])
    monkeypatch.setattr("kernels.training.text.encoders.embed_in_chunks", keep)
    whole = run(name, tmp_path / "whole", *flags)
    assert chunked.losses == pytest.approx(whole.losses, rel=1e-6)
    assert chunked.norms == pytest.approx(whole.norms, rel=1e-5) and whole.args.chunk_size == size
    for key, weight in whole.state["optimizer"]["state"].items():              # a tenth of the gradient
        mine = chunked.state["optimizer"]["state"][key]["exp_avg"]
        torch.testing.assert_close(mine, weight["exp_avg"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name, flags", [*((name, []) for name in SCRIPTS),
                                         ("selfguided", ["--objective", "base", "--layers", 2])])
def test_several_processes_equal_one(name, flags, tmp_path, bert):
    """Three have unequal shares of a batch; chunks without dropout are the whole step."""
    flags = [*small(name, tmp_path), "--model", bert, "--pooling", "avg", "--steps", 6, "--lr", 1e-3, *flags]
    if name == "ease":                                         # whose entity term is else a gentle pull
        flags += ["--warmup-steps", 1, "--entity-weight", 1, "--entity-temperature", 0.1]
    one = run(name, tmp_path / "one", *flags)
    assert max(one.norms) > 1                                  # clipping is active
    norms = in_processes(3, name, tmp_path / "three", [*flags, "--chunk-size", 3])
    check_processes(one, tmp_path / "three", norms)


@every_script
@pytest.mark.parametrize("impl", ["blockwise", "triton"])
def test_impl_follows_eager(name, impl, tmp_path, monkeypatch):
    interpreted = importlib.util.find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1"
    if impl == "triton" and not interpreted:
        pytest.skip("no Triton, or a GPU's, and this file stays on the CPU")
    flags = [*small(name, tmp_path), "--steps", 2, "--eval-every", 1]
    eager = run(name, tmp_path / "eager", *flags, "--impl", "eager")
    asked = Mock(wraps=importlib.import_module("kernels").choose_impl)
    for module in ("similarity", "losses"):
        monkeypatch.setattr(f"kernels.{module}.choose_impl", asked)
    other = run(name, tmp_path / "other", *flags, "--impl", impl)
    assert {call.args[0] for call in asked.call_args_list} == {impl}
    for value, tolerance in (("loss", 1e-4), ("dev_uniformity", 1e-3)):
        wanted = [step[value] for step in eager.steps]
        assert [step[value] for step in other.steps] == pytest.approx(wanted, abs=tolerance)


def test_best_checkpoint_is_kept(tmp_path, monkeypatch):
    """A better score replaces it, an equal one does not, and none before training counts; --test reads it."""
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
def test_others_load_the_encoder_alone(name, form, tmp_path, bert):
    """By the line that was printed: no head, no guide, no copy; the embeddings are those of the weights in
    state.pt."""
    flags = {"vascl": ["--neighbours", 3], "selfguided": ["--width", 16], "dclr": ["--guide", bert]}[name]
    common = ["--model", bert, "--batch-size", 8, "--steps", 3, "--lr", 1e-2, "--form", form]
    result = run_text(name, tmp_path, SENTENCES[:24], *common, *flags)
    sentences = [row[0] for row in SENTENCES[:6]]
    result.model.load_state_dict(result.state["model"])
    ours = result.model.eval().embed_texts(sentences).detach()
    model = eval(result.said["load"].split("  or  ")[1], {"AutoModel": AutoModel})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert not (tmp_path / "out" / "2_Dense").exists()
    theirs = one_by_one(model, tokenizer, sentences, result.model.pooling)
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)


def test_help_is_a_page_of_every_script(capsys):
    """Each tells its data, its defaults and its departures, and names what has no default."""
    for path in sorted(ROOT.glob("*.py")):
        parser = runpy.run_path(path)["make_parser"]()
        page = " ".join(parser.format_help().split())
        assert "Data" in page and "released code" in page and "--help" in page
        assert all(action.help for action in parser._actions), path.name
