"""Encoders of every family: three steps of training, saved, and read back by ourselves, by the definitions,
and by sentence-transformers where it is installed."""
import contextlib
import importlib.util
import io
import itertools
import logging
import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

import simcse
from families import DECODERS, ENCODERS, SHAPE
from kernels.training.text.encoders import build_encoder
from kernels.training.text.sts import load_sts, spearman
from kernels.training.text.tokens import TokenRows
from running import DATA, SMALL, one_by_one, refuse

AVERAGES = itertools.cycle(["avg", "avg_top2", "avg_first_last"])
CASES = [*((name, "cls", "keep") for name in ENCODERS), *((name, "last", "keep") for name in DECODERS)]
CASES += [(name, next(AVERAGES), "train-only") for name in (*ENCODERS, *DECODERS)]
CASES += [("Bert", "avg", "keep"), ("Roberta", "last", "train-only"), ("MPNet", "cls", "train-only"),
          ("Bert", "cls_before_pooler", "train-only"), ("Qwen2", "avg_top2", "keep")]
def main(*flags):
    simcse.main([*map(str, flags)])


@pytest.mark.parametrize("family, pooling, head", CASES)
def test_a_score_is_read_back(family, pooling, head, folder_of, tmp_path, capsys):
    """That of the best checkpoint, by --evaluate and by the definitions on the folder; heads, prompts and
    mixed layers included. A decoder pads on the left elsewhere, on the right here."""
    prompts = ["--prompt", "query: ", "passage: "] if head == "keep" else []
    sts = tmp_path / "sts.tsv"
    sts.write_text("".join((DATA / "sts.tsv").read_text(encoding="utf-8").splitlines(True)[:40]))
    flags = ["--pooling", pooling, "--head", head, *prompts, "--max-length", 60, "--batch-size", 16]
    data = ["--data", DATA / "nli.csv", "--dev", sts, "--steps", 3, "--lr", 1e-3]
    main("--model", folder_of(family), *flags, *data, "--out", tmp_path / "out")
    best = re.search(r"→ (-?[\d.]+) at step", capsys.readouterr().out)[1]
    before = sorted(path.name for path in tmp_path.rglob("*"))
    main("--evaluate", "--model", tmp_path / "out", "--test", sts)
    model, test, mean = capsys.readouterr().out.splitlines()
    assert test.split()[:2] == ["test", best] and mean == f"test     {best}  mean"
    assert f", {pooling.removesuffix('_before_pooler')} pooling" in model
    assert ("its head" in model) == (head == "keep")
    assert sorted(path.name for path in tmp_path.rglob("*")) == before         # nothing is written
    one, two, scores = zip(*load_sts(sts))
    with silent_libraries():
        z1, z2 = (by_definition(tmp_path / "out", pooling, prompts[1:2], texts) for texts in (one, two))
    cosine = torch.cosine_similarity(z1.double(), z2.double()).numpy()
    assert 100 * spearman(cosine, scores) == pytest.approx(float(best), abs=0.02)
    if importlib.util.find_spec("sentence_transformers"):
        from sentence_transformers import SentenceTransformer
        with silent_libraries():
            theirs = SentenceTransformer(str(tmp_path / "out"), device="cpu")
        theirs = theirs.encode(one, convert_to_tensor=True)
        torch.testing.assert_close(theirs, z1, atol=1e-4, rtol=0)


@contextlib.contextmanager
def silent_libraries():
    """Fails if transformers or sentence-transformers reports anything, for example missing weights. That
    encode() puts the prompt of --prompt before a text may be said."""
    said, level = io.StringIO(), transformers.logging.get_verbosity()
    handler, loggers = logging.StreamHandler(said), [logging.getLogger("transformers"),
                                                     logging.getLogger("sentence_transformers")]
    transformers.logging.set_verbosity_warning()
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with contextlib.redirect_stdout(said), warnings.catch_warnings(record=True) as warned:
            yield
    finally:
        transformers.logging.set_verbosity(level)
        for logger in loggers:
            logger.removeHandler(handler)
    lines = [line for line in said.getvalue().splitlines() if not line.startswith("Default prompt name is")]
    assert lines == [] and [str(warning.message) for warning in warned] == []


def by_definition(folder, pooling, prompts, texts):
    """Embeddings of a folder, one text after the other."""
    encoder, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    z = one_by_one(encoder, tokenizer, ["".join([*prompts, text]) for text in texts], pooling)
    for file in folder.glob("*_Dense/model.safetensors"):
        weights = load_file(file)
        z = torch.tanh(z @ weights["linear.weight"].T + weights["linear.bias"])
    return z


def test_small_letters(folder_of, tmp_path):
    """Where a folder asks for them, of a tokenizer that tells large ones apart; and the next one does too."""
    folder, texts = folder_of("Bert"), (DATA / "nli.csv").read_text(encoding="utf-8").splitlines()[1:9]
    flags = ["--pooling", "avg", "--batch-size", "8", "--steps", "1", "--lr", "0"]
    simcse.main(["--model", str(folder), *flags, "--out", str(tmp_path / "a")], data=texts)
    asked = tmp_path / "a" / "sentence_bert_config.json"
    assert "false" in asked.read_text()
    asked.write_text(asked.read_text().replace("false", "true"))
    simcse.main(["--model", str(tmp_path / "a"), *flags, "--out", str(tmp_path / "b")], data=texts)
    for name, lower in ("a", True), ("b", True), (folder, False):
        args = SimpleNamespace(model=str(tmp_path / name), evaluate=True, pooling="avg")
        model = build_encoder(args, SimpleNamespace(args=args, device=torch.device("cpu"), bf16=False)).eval()
        assert torch.equal(*model.embed_texts(["IT RAINS", "it rains"])) == lower
    small, large = (TokenRows(tmp_path / name / "tokens", 1) for name in "ba")
    assert any(not np.array_equal(*rows) for rows in zip(small[0], large[0]))  # in training too


@pytest.mark.parametrize("family, flags, wanted", [
    ("Qwen2", ["--pooling", "cls"], "--pooling cls: the first token of .*, a decoder, sees no other; .*"),
    ("Bert", ["--prompt", *"abcd"], "--prompt: found 4, wanted one for all, or one for each of 2 columns"),
    ("Bert", ["--head", "keep", "train-only"], "--head keep train-only: wanted keep or train-only, and .*"),
    ("Qwen2", ["--head", "pooler"], "--head pooler: .* has none"),
    ("Llama", ["--mlm-weight", "1"], "--model .*: transformers has no AutoModelForMaskedLM of its kind; .*"),
    ("Llama", ["--max-length", "131"], "--max-length 131: .* reads at most 130 tokens")])
def test_what_does_not_fit_an_encoder(family, flags, wanted, folder_of, here, capfd):
    refuse("simcse", capfd, wanted, *SMALL, "--model", folder_of(family), "--max-length", "60", *flags)


def test_masked_language_models(folder_of, here, monkeypatch, capfd):
    """ALBERT's encoder has no pooler in there, and no activation of one; MobileBERT's has no decoder."""
    small = dict(Albert=dict(embedding_size=16), MobileBert=dict(embedding_size=16, intra_bottleneck_size=16))
    for family, more in small.items():
        monkeypatch.setitem(ENCODERS, family, SHAPE | more)
    flags = [*SMALL, "--max-length", 60, "--mlm-weight", 1]
    main(*flags, "--model", folder_of("Albert"), "--out", "out")
    capfd.readouterr()
    wanted = ".*MobileBert.*: MobileBertForMaskedLM is no masked language model like BERT or DistilBERT"
    refuse("simcse", capfd, wanted, *flags, "--model", folder_of("MobileBert"))
