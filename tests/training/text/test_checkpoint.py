"""Test folders in the format of sentence-transformers: their settings, and flags that override these."""
import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from saved_encoders import make_encoder, save

from kernels.training.errors import UserError
from running import embed_saved

TEXTS = ["A man eats.", "It is day.", "Nobody sleeps in the sun."]
HEAD = dict(in_features=32, out_features=8, bias=False, activation_function="torch.nn.Identity")
WEIGHTS = {"linear.weight": torch.linspace(-3, 3, 8 * 32).sin().view(8, 32)}
PROMPTS = dict(query="q ", document="p ", topic="t ")


def write_folder(bert, folder, pooling, *more, default=None, **settings):
    """Copy the model `bert` to a folder in the format of sentence-transformers.

    pooling    config of the Pooling module
    more       further modules, each as (type, config, tensors)
    default    name of the default prompt; None: the folder has no prompts
    settings   settings of the module Transformer
    """
    shutil.copytree(bert, folder, dirs_exist_ok=True)
    modules = [dict(path="", type="sentence_transformers.models.Transformer")]
    for i, (kind, config, tensors) in enumerate([("Pooling", pooling, {}), *more], 1):
        modules.append(dict(path=f"{i}_{kind}", type=f"sentence_transformers.any.module.{kind}"))
        (folder / f"{i}_{kind}").mkdir()
        (folder / f"{i}_{kind}" / "config.json").write_text(json.dumps(config))
        if tensors:
            save_file(tensors, folder / f"{i}_{kind}" / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    if default:
        prompts = dict(prompts=PROMPTS, default_prompt_name=default)
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


def test_saved_settings_are_applied_and_saved_again(folder_of, tmp_path):
    """The folder has a linear head, prompts, lower case, normalisation and a maximum length.
    Prompts that no column uses are saved again, too."""
    bert, out = folder_of("Bert"), tmp_path / "out"            # its tokenizer has one token per character
    folder = write_folder(bert, tmp_path / "a", dict(pooling_mode="mean"), ("Dense", HEAD, WEIGHTS),
                          ("Normalize", {}, {}), default="topic", max_seq_length=9, do_lower_case=True)
    (folder / "2_Dense/model.safetensors").unlink()
    torch.save(WEIGHTS, folder / "2_Dense/pytorch_model.bin")  # the format of older folders
    model = make_encoder(folder, evaluate=True).eval()
    save(model, out)
    z = embed_saved(bert, ["tamanea", "titisda", "tnobody"], "avg") @ WEIGHTS["linear.weight"].T
    for found in (model, make_encoder(out, evaluate=True).eval()):
        assert found.add_prompts(["A", "B", "C"]) == ["q a", "p b", "p c"]
        assert (found.max_length, found.normalise, found.lower_case) == (9, True, True)
        embedded = found.embed_texts(["A man eats", "IT IS DAY", "nobody sleeps"])
        torch.testing.assert_close(embedded, z, atol=1e-5, rtol=0)
    settings = json.loads((out / "config_sentence_transformers.json").read_text())
    assert settings["prompts"] == PROMPTS
    for prompts, texts in ((dict(query="q ", topic="t "), ["q a", "b"]), (dict(topic="t "), ["t a", "t b"]),
                           (dict(query="q ", passage="p "), ["q a", "p b"])):
        settings |= dict(prompts=prompts, default_prompt_name="topic" if "topic" in prompts else None)
        (out / "config_sentence_transformers.json").write_text(json.dumps(settings))
        assert make_encoder(out, evaluate=True).add_prompts(["A", "B"]) == texts
    assert [module["path"] for module in json.loads((out / "modules.json").read_text())] == [
        "", "1_Pooling", "2_Dense", "3_Normalize"]


@pytest.mark.parametrize("settings, pooling", [
    (dict(pooling_mode_cls_token=False, pooling_mode_mean_tokens=False, pooling_mode_lasttoken=True), "last"),
    (dict(pooling_mode_cls_token=True), "cls"), (dict(pooling_mode="mean"), "avg"), ({}, "avg")])
def test_pooling_of_old_and_new_folders(settings, pooling, bert, tmp_path):
    """The folder sets only the pooling: no head, no prompt, and the maximum length is the model's."""
    model = make_encoder(write_folder(bert, tmp_path, settings), evaluate=True).eval()
    torch.testing.assert_close(model.embed_texts(TEXTS), embed_saved(bert, TEXTS, pooling), atol=1e-5, rtol=0)
    assert (model.head, model.prompts, model.max_length) == (None, ("",), 512)


@pytest.mark.parametrize("flags, kept", [
    ({}, True), (dict(head=["train-only"]), True), (dict(head=["new"]), False), (dict(pooling="avg"), False),
    (dict(prompt=["c "], max_length=61), True)])
def test_flags_override_saved_settings(flags, kept, bert, tmp_path):
    """Training continues with the saved head; the flags --head new and --pooling drop the saved head."""
    folder = write_folder(bert, tmp_path / "a", dict(pooling_mode="cls"), ("Dense", HEAD, WEIGHTS),
                          default="query", max_seq_length=60)
    model = make_encoder(folder, "train-only", **flags)
    assert (model.head is not None and torch.equal(model.head[0].weight, WEIGHTS["linear.weight"])) == kept
    assert model.prompts == (("c ",) if "prompt" in flags else ("q ", "p "))
    assert model.max_length == flags.get("max_length", 60)
    assert model.keep_head == ("head" not in flags and model.head is not None)


def test_pooler_as_head(bert, tmp_path):
    """A supervised SimCSE model, recognised by its name, uses its pooler as the head. Other models do so with
    --head pooler."""
    named = shutil.copytree(bert, tmp_path / "sup-simcse-bert-small")
    other = shutil.copytree(bert, tmp_path / "unsup-simcse-bert-small")
    assert make_encoder(other, evaluate=True).head is None
    expected = embed_saved(bert, TEXTS, "pooler")
    for folder, flags in (named, {}), (other, dict(head=["pooler"])):
        found = make_encoder(folder, evaluate=True, **flags).eval().embed_texts(TEXTS)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("pooling, more, wanted", [
    (dict(pooling_mode="max"), [], "1_Pooling: pooling max, expected one of cls, mean, lasttoken, .*"),
    ({}, [("LayerNorm", {}, {})], "module LayerNorm, expected one of Transformer, .*"),
    ({}, [("Dense", HEAD | dict(activation_function="torch.nn.SiLU"), {})], "2_Dense: activation SiLU, .*")])
def test_unsupported_modules(pooling, more, wanted, bert, tmp_path):
    folder = write_folder(bert, tmp_path, pooling, *more)
    with pytest.raises(UserError, match=f"^--model {folder}: its modules.json, .*: {wanted}$"):
        make_encoder(folder)
