"""Every family of encoders: train three steps, save, and load the folder with --evaluate, with transformers,
and with sentence-transformers if it is installed."""
import contextlib
import importlib.util
import io
import itertools
import json
import logging
import os
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
from running import DATA, SMALL, embed_unbatched, few_pairs, rejects

AVERAGES = itertools.cycle(["avg", "avg_top2", "avg_first_last"])
CASES = [*((name, "cls", "keep") for name in ENCODERS), *((name, "last", "keep") for name in DECODERS)]
CASES += [(name, next(AVERAGES), "train-only") for name in (*ENCODERS, *DECODERS)]
if os.environ.get("TENCL_TESTS") != "all":
    CASES = CASES[::2]                                         # each family once: 15 is odd
CASES += [("Bert", "avg", "keep"), ("Roberta", "last", "train-only"), ("MPNet", "cls", "train-only"),
          ("Bert", "cls_before_pooler", "train-only"), ("Qwen2", "avg_top2", "keep")]


def main(*flags):
    simcse.main([*map(str, flags)])


@pytest.mark.parametrize("family, pooling, head", CASES)
def test_saved_model_has_the_printed_score(family, pooling, head, folder_of, tmp_path, capsys):
    """--evaluate, and the definition of the embeddings applied to the folder, give the score of the best
    checkpoint. This includes heads, prompts and averaged layers. Other libraries pad decoders on the left,
    we pad on the right."""
    prompts = ["--prompt", "query: ", "passage: "] if head == "keep" else []
    sts, rows = few_pairs(tmp_path, 15), tmp_path / "rows.csv"
    rows.write_bytes(b"".join((DATA / "nli.csv").read_bytes().splitlines(True)[:49]))      # three batches
    flags = ["--pooling", pooling, "--head", head, *prompts, "--max-length", 60, "--batch-size", 16]
    data = ["--data", rows, "--dev", sts, "--steps", 3, "--lr", 1e-3]
    main("--model", folder_of(family), *flags, *data, "--out", tmp_path / "out")
    best = re.search(r"→ (-?[\d.]+) at step", capsys.readouterr().out)[1]
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text())["padding_side"] == "right"
    before = sorted(path.name for path in tmp_path.rglob("*"))
    main("--evaluate", "--model", tmp_path / "out", "--test", sts)
    model, test, mean = capsys.readouterr().out.splitlines()
    assert test.split()[:2] == ["test", best] and mean == f"test     {best}  mean"
    assert f", {pooling.removesuffix('_before_pooler')} pooling" in model
    assert ("saved head" in model) == (head == "keep")
    assert sorted(path.name for path in tmp_path.rglob("*")) == before         # --evaluate writes nothing
    one, two, scores = zip(*load_sts(sts))
    with fail_on_library_messages():
        z1, z2 = (embed_by_definition(tmp_path / "out", pooling, prompts[1:2], texts) for texts in (one, two))
    cosine = torch.cosine_similarity(z1.double(), z2.double()).numpy()
    assert 100 * spearman(cosine, scores) == pytest.approx(float(best), abs=0.02)
    if importlib.util.find_spec("sentence_transformers"):
        from sentence_transformers import SentenceTransformer
        with fail_on_library_messages():
            theirs = SentenceTransformer(str(tmp_path / "out"), device="cpu")
        theirs = theirs.encode(one, convert_to_tensor=True)
        torch.testing.assert_close(theirs, z1, atol=1e-4, rtol=0)


@contextlib.contextmanager
def fail_on_library_messages():
    """Fail if transformers or sentence-transformers prints or warns of anything, such as missing weights. The
    message that encode() uses the default prompt is allowed."""
    output, level = io.StringIO(), transformers.logging.get_verbosity()
    handler = logging.StreamHandler(output)
    loggers = [logging.getLogger("transformers"), logging.getLogger("sentence_transformers")]
    transformers.logging.set_verbosity_warning()
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with contextlib.redirect_stdout(output), warnings.catch_warnings(record=True) as warned:
            yield
    finally:
        transformers.logging.set_verbosity(level)
        for logger in loggers:
            logger.removeHandler(handler)
    lines = [line for line in output.getvalue().splitlines() if not line.startswith("Default prompt name is")]
    assert lines == [] and [str(warning.message) for warning in warned] == []


def embed_by_definition(folder, pooling, prompts, texts):
    """Return a folder's embeddings of texts, each computed on its own from the files in the folder."""
    encoder, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    z = embed_unbatched(encoder, tokenizer, ["".join([*prompts, text]) for text in texts], pooling)
    for file in folder.glob("*_Dense/model.safetensors"):
        weights = load_file(file)
        z = torch.tanh(z @ weights["linear.weight"].T + weights["linear.bias"])
    return z


def test_do_lower_case(folder_of, tmp_path):
    """If a folder has do_lower_case, texts are converted to lower case, also in training, although the
    tokenizer is cased. The setting is saved again."""
    folder, texts = folder_of("Bert"), (DATA / "nli.csv").read_text(encoding="utf-8").splitlines()[1:9]
    flags = ["--pooling", "avg", "--batch-size", "8", "--steps", "1", "--lr", "0"]
    simcse.main(["--model", str(folder), *flags, "--out", str(tmp_path / "a")], data=texts)
    config = tmp_path / "a" / "sentence_bert_config.json"
    assert "false" in config.read_text()
    config.write_text(config.read_text().replace("false", "true"))
    simcse.main(["--model", str(tmp_path / "a"), *flags, "--out", str(tmp_path / "b")], data=texts)
    for name, lower in ("a", True), ("b", True), (folder, False):
        args = SimpleNamespace(model=str(tmp_path / name), evaluate=True, pooling="avg")
        model = build_encoder(args, SimpleNamespace(args=args, device=torch.device("cpu"), bf16=False)).eval()
        assert torch.equal(*model.embed_texts(["IT RAINS", "it rains"])) == lower
    cased, lower_case = (TokenRows(tmp_path / name / "tokens", 1) for name in "ab")
    assert any(not np.array_equal(*rows) for rows in zip(cased[0], lower_case[0]))


@pytest.mark.parametrize("family, flags, wanted", [
    ("Qwen2", ["--pooling", "cls"], "--pooling cls: .* is a decoder, whose first token does not see .*"),
    ("Bert", ["--prompt", *"abcd"], "--prompt: found 4 texts, expected 1 for all columns, .* 2 columns"),
    ("Bert", ["--head", "keep", "train-only"], "--head keep train-only: expected one of keep and .*"),
    ("Qwen2", ["--head", "pooler"], "--head pooler: .* has no pooler"),
    ("Llama", ["--mlm-weight", "1"], "--model .*: ValueError: Unrecognized configuration class .*"),
    ("Llama", ["--max-length", "131"], "--max-length 131: .* reads at most 130 tokens")])
def test_flags_that_do_not_fit_the_encoder(family, flags, wanted, folder_of, cwd, capfd):
    rejects("simcse", capfd, wanted, *SMALL, "--model", folder_of(family), "--max-length", "60", *flags)


def test_masked_language_models(folder_of, cwd, monkeypatch, capfd):
    """ALBERT's masked LM has no pooler, nor the pooler's activation, and can be trained. MobileBERT's has no
    linear decoder, and cannot."""
    small = dict(Albert=dict(embedding_size=16), MobileBert=dict(embedding_size=16, intra_bottleneck_size=16))
    for family, more in small.items():
        monkeypatch.setitem(ENCODERS, family, SHAPE | more)
    flags = [*SMALL, "--max-length", 60, "--mlm-weight", 1]
    main(*flags, "--model", folder_of("Albert"), "--out", "out")
    capfd.readouterr()
    wanted = ".*MobileBert.*: MobileBertForMaskedLM is not a masked language model like BERT or DistilBERT"
    rejects("simcse", capfd, wanted, *flags, "--model", folder_of("MobileBert"))
