"""Encoders of every family: three steps of training, saved, and read back by ourselves, by the definitions,
and by sentence-transformers where it is installed."""
import contextlib
import functools
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
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerFast

import simcse
from kernels.training.text.encoders import build_encoder
from kernels.training.text.sts import load_sts, spearman
from kernels.training.text.tokens import TokenRows
from running import DATA, SMALL, one_by_one, refuse

SHAPE = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64,
             max_position_embeddings=130, initializer_range=0.2, pad_token_id=0)
DECODER = SHAPE | dict(num_key_value_heads=1, head_dim=16)
ENCODERS = {
    "Bert": SHAPE, "Roberta": SHAPE, "XLMRoberta": SHAPE, "MPNet": SHAPE,
    "DistilBert": dict(dim=32, n_layers=3, n_heads=2, hidden_dim=64, max_position_embeddings=130,
                       initializer_range=0.2, pad_token_id=0),
    "SqueezeBert": SHAPE | dict(embedding_size=32), "Esm": SHAPE,              # its files have other names
    "XLM": dict(emb_dim=32, n_layers=3, n_heads=2, max_position_embeddings=130, init_std=0.2, pad_index=0),
    "DebertaV2": SHAPE | dict(relative_attention=True, position_buckets=16, pos_att_type="p2c|c2p",
                              position_biased_input=False, norm_rel_ebd="layer_norm", share_att_key=True),
    "ModernBert": SHAPE | dict(global_attn_every_n_layers=2, local_attention=8)}
DECODERS = {name: DECODER for name in ("Qwen2", "Qwen3", "Llama", "Mistral", "Gemma")}
LETTERS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(33, 127))]


def small_tokenizer(decoder=False, **more):
    """One token a letter; a decoder's pads on the left."""
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, "[UNK]"))
    splits = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("", "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    marks = dict(unk_token="[UNK]", eos_token="[SEP]", pad_token="[PAD]")
    if not decoder:
        frame = dict(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
        tokenizer.post_processor = processors.TemplateProcessing(**frame)
        marks |= dict(cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
    side = "left" if decoder else "right"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side=side, **marks | more)


def small_model(family, folder):
    """A folder with a random model of the family; Llama's tokenizer has no padding."""
    more = dict(pad_token=None) if family == "Llama" else {}
    small_tokenizer(family not in ENCODERS, **more).save_pretrained(folder)
    shape = (ENCODERS | DECODERS)[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(vocab_size=len(LETTERS), **shape)
    AutoModel.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    return functools.cache(lambda family: small_model(family, tmp_path_factory.mktemp(family)))


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
