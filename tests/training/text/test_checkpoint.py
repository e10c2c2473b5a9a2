"""Model folders written by sentence-transformers: supported and unsupported settings, overriding flags."""
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import BartConfig, BartModel, T5Config, T5Model

from kernels.training.text.checkpoint import read_saved_settings
from kernels.training.text.encoders import build_encoder
from kernels.training.text.tokens import TokenRows
from running import DATA, NLI, SMALL, embed_saved, rejects, run

TEXTS = ["A man eats.", "It is day.", "Nobody sleeps in the sun."]
HEAD = dict(in_features=32, out_features=8, bias=False, activation_function="torch.nn.Identity")


def write_st_folder(bert, folder, pooling, *more, prompts=None, max_length=20, subfolder=""):
    """Copy the model `bert` to a folder in the format of sentence-transformers.

    pooling   config of the Pooling module
    more      further modules: (type, config, tensors)
    """
    shutil.copytree(bert, folder / subfolder, dirs_exist_ok=True)
    modules = [dict(path=subfolder, type="sentence_transformers.models.Transformer")]
    for i, (kind, settings, tensors) in enumerate([("Pooling", pooling, {}), *more], 1):
        modules.append(dict(path=f"{i}_{kind}", type=f"sentence_transformers.any.module.{kind}"))
        (folder / f"{i}_{kind}").mkdir()
        (folder / f"{i}_{kind}" / "config.json").write_text(json.dumps(settings))
        if tensors:
            save_file(tensors, folder / f"{i}_{kind}" / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / subfolder / "sentence_bert_config.json").write_text(json.dumps(dict(max_seq_length=max_length)))
    if prompts:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


def load(folder, **flags):
    """Return the SentenceEncoder of a folder, as --evaluate builds it."""
    args = SimpleNamespace(model=str(folder), evaluate=True, **flags)
    return build_encoder(args, SimpleNamespace(args=args, device=torch.device("cpu"), bf16=False)).eval()


def test_saved_settings_are_applied(bert, tmp_path):
    """The first folder has pooling_mode, a linear head, a sub-folder, prompts and a maximum length. The
    second has the older pooling flags."""
    head = torch.randn(8, 32)
    prompts = dict(prompts=dict(query="q ", passage="p ", sts="s "), default_prompt_name="sts")
    folder = write_st_folder(bert, tmp_path / "a", dict(pooling_mode="mean", embedding_dimension=32),
                             ("Dense", HEAD, {"linear.weight": head}), ("Normalize", {}, {}),
                             prompts=prompts, subfolder="0_Transformer")
    model = load(folder)
    assert (model.prompts, model.default_prompt) == (("q ", "p "), "s ")
    assert (model.max_length, model.normalise) == (20, True)
    wanted = embed_saved(bert, [f"s {text}"[:18] for text in TEXTS], "avg") @ head.T
    short = [text[:16] for text in TEXTS]      # 20 tokens with the prompt, [CLS] and [SEP]
    torch.testing.assert_close(model.embed_texts(short), wanted, atol=1e-5, rtol=0)
    old = dict(pooling_mode_cls_token=False, pooling_mode_mean_tokens=False, pooling_mode_lasttoken=True)
    model = load(write_st_folder(bert, tmp_path / "b", old, max_length=None))
    torch.testing.assert_close(model.embed_texts(TEXTS), embed_saved(bert, TEXTS, "last"), atol=1e-5, rtol=0)
    assert (model.prompts, model.max_length, model.head) == (("",), 512, None)


def test_saved_settings_are_saved_again(bert, tmp_path):
    """After a step with --lr 0, embeddings, prompts and normalisation are as before. Only the maximum length
    is that of --max-length."""
    dense = [("Dense", HEAD, {"linear.weight": torch.randn(8, 32)}), ("Normalize", {}, {})]
    prompts = dict(prompts=dict(query="q ", document="p ", topic="t "), default_prompt_name=None)
    folder = write_st_folder(bert, tmp_path / "a", dict(pooling_mode="mean"), *dense, prompts=prompts)
    flags = ["--data", DATA / "nli.csv", "--batch-size", 8, "--steps", 1, "--lr", 0]
    result = run("simcse", tmp_path / "out", "--model", folder, *flags)
    differs = "a maximum length of 20 tokens"
    assert result.said["note"] == f"{folder} was saved with {differs}; the flags override this"
    old, new = load(folder), load(tmp_path / "out")
    assert (new.prompts, new.default_prompt, new.normalise, new.max_length) == (("q ", "p "), "", True, 32)
    saved = json.loads((tmp_path / "out" / "config_sentence_transformers.json").read_text())
    assert saved["prompts"] == prompts["prompts"]              # also the prompt that no column uses
    short = [text[:16] for text in TEXTS]
    torch.testing.assert_close(new.embed_texts(short), old.embed_texts(short), atol=1e-6, rtol=0)
    assert [module["path"] for module in json.loads((tmp_path / "out" / "modules.json").read_text())] == [
        "", "1_Pooling", "2_Dense", "3_Normalize"]


@pytest.mark.parametrize("pooling, more, wanted", [
    (dict(pooling_mode="max"), [], "1_Pooling: pooling max, expected one of cls, mean, lasttoken, .*"),
    (dict(pooling_mode_cls_token=True, pooling_mode_mean_tokens=True), [],
     "1_Pooling: pooling cls and mean, .*"),
    (dict(pooling_mode="mean", include_prompt=False), [], "1_Pooling: pooling mean, .* with include_prompt"),
    ({}, [("LayerNorm", {}, {})], "module LayerNorm, expected one of Transformer, .*"),
    ({}, [("Dense", HEAD | dict(activation_function="os.system"), {})], "2_Dense: activation system, .*"),
    ({}, [("Dense", HEAD | dict(use_residual=True), {})], "2_Dense: .* without a residual connection"),
    ({}, [("Dense", HEAD, {})], ".*"),
    ({}, [("Dense", HEAD, {"linear.weight": torch.ones(9, 32)})], ".*size mismatch.*")])
def test_unsupported_modules(pooling, more, wanted, cwd, bert, capfd):
    write_st_folder(bert, Path("model"), pooling, *more)
    rejects("simcse", capfd, f"--model model: its modules.json, .*: {wanted}", *SMALL, "--model", "model")


def test_pooler_as_head(bert, tmp_path):
    """Supervised SimCSE models, recognised by their name, use their pooler as the head. With --head pooler
    other models do so, too."""
    named = shutil.copytree(bert, tmp_path / "sup-simcse-bert-small")
    assert read_saved_settings(str(tmp_path / "unsup-simcse-bert-small")) is None
    wanted = embed_saved(bert, TEXTS, "pooler")
    for model in load(named), load(bert, head=["pooler"]):
        torch.testing.assert_close(model.embed_texts(TEXTS), wanted, atol=1e-5, rtol=0)


def test_training_continues_with_the_saved_head(bert, tmp_path):
    """A second run starts from the head of the first run. With --head new or --pooling it does not, and
    prints a note. With --head train-only the head is not saved."""
    data = ["--data", DATA / "nli.csv", "--batch-size", 8, "--steps", 1, "--lr", 1e-2]
    first = run("simcse", tmp_path / "first", *data, "--model", bert, "--prompt", "a: ", "b: ")
    out, kept = tmp_path / "first", first.model.head[0].weight.detach().clone()

    for ids, prompt, text in zip(TokenRows(out / "tokens", 3)[0], ("a: ", "b: ", "b: "), NLI[0]):
        words = first.model.tokenizer(prompt + text, truncation=True, max_length=32)
        assert ids.tolist() == words["input_ids"]              # the third column has the last prompt
    for weight in first.model.parameters():
        weight.data.zero_()
    first.model.restore(out)
    assert torch.equal(first.model.head[0].weight, kept)
    assert torch.equal(first.model.embed_texts(TEXTS), load(out).embed_texts(TEXTS))

    def continue_training(name, *flags):
        result = run("simcse", tmp_path / name, *data, "--model", out, "--lr", 0, *flags)
        head = result.model.head
        return result, head is not None and torch.equal(head[0].weight, kept)

    same, is_kept = continue_training("same")                  # the small model has no dropout
    assert is_kept and same.model.prompts == ("a: ", "b: ") and "note" not in same.said
    assert same.said["model"].endswith("cls pooling, saved head, without dropout, prompt 'a: ', prompt 'b: '")
    for name, flags, found in (
            ("new", ["--head", "new"], "a head"), ("avg", ["--pooling", "avg"], "cls pooling, a head"),
            ("prompts", ["--prompt", "c "], "other prompts")):
        result, is_kept = continue_training(name, *flags)
        assert is_kept == (name == "prompts")
        assert result.said["note"] == f"{out} was saved with {found}; the flags override this"
    result, is_kept = continue_training("train-only", "--head", "train-only")
    assert is_kept and not (tmp_path / "train-only" / "2_Dense").exists()


@pytest.mark.parametrize("model", [
    T5Model(T5Config(vocab_size=90, d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1)),
    BartModel(BartConfig(vocab_size=90, d_model=8, encoder_layers=1, decoder_layers=1, pad_token_id=0,
                         encoder_attention_heads=1, decoder_attention_heads=1))])
def test_models_that_read_two_texts(model, cwd, bert, capfd):
    shutil.copytree(bert, "model")
    Path("model/model.safetensors").unlink()
    model.save_pretrained("model")
    wanted = f"--model model: {type(model).__name__} reads two texts, expected a model like BERT or Qwen"
    capfd.readouterr()                                         # a progress bar of transformers
    rejects("simcse", capfd, wanted, *SMALL, "--model", "model")
