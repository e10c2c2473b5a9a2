"""Folders of sentence encoders as others write them: what is taken over, what is refused, what a flag
changes."""
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import BartConfig, BartModel, BertConfig, BertForSequenceClassification, T5Config, T5Model

import simcse
from kernels.training.text.checkpoint import read_layout
from kernels.training.text.encoders import build_encoder
from kernels.training.text.tokens import TokenRows
from running import DATA, NLI, SMALL, embed_saved, refuse, run

TEXTS = ["A man eats.", "It is day.", "Nobody sleeps in the sun."]
HEAD = dict(in_features=32, out_features=8, bias=False, activation_function="torch.nn.Identity")


def foreign(bert, folder, pooling, *more, prompts=None, longest=20, subfolder=""):
    """The folder bert as sentence-transformers lays it out; more: (kind, settings, tensors)."""
    shutil.copytree(bert, folder / subfolder, dirs_exist_ok=True)
    modules = [dict(path=subfolder, type="sentence_transformers.models.Transformer")]
    for i, (kind, settings, tensors) in enumerate([("Pooling", pooling, {}), *more], 1):
        modules.append(dict(path=f"{i}_{kind}", type=f"sentence_transformers.some.where.{kind}"))
        (folder / f"{i}_{kind}").mkdir()
        (folder / f"{i}_{kind}" / "config.json").write_text(json.dumps(settings))
        if tensors:
            save_file(tensors, folder / f"{i}_{kind}" / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / subfolder / "sentence_bert_config.json").write_text(json.dumps(dict(max_seq_length=longest)))
    if prompts:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


def load(folder, **flags):
    args = SimpleNamespace(model=str(folder), evaluate=True, **flags)
    return build_encoder(args, SimpleNamespace(args=args, device=torch.device("cpu"), bf16=False)).eval()


def test_what_others_wrote(bert, tmp_path):
    """Both ways to name a pooling, a linear head without tanh, a sub-folder, prompts, cut at their length."""
    head = torch.randn(8, 32)
    prompts = dict(prompts=dict(query="q ", passage="p ", sts="s "), default_prompt_name="sts")
    folder = foreign(bert, tmp_path / "a", dict(pooling_mode="mean", embedding_dimension=32),
                     ("Dense", HEAD, {"linear.weight": head}), ("Normalize", {}, {}),
                     prompts=prompts, subfolder="0_Transformer")
    model = load(folder)
    assert (model.prompts, model.scored, model.longest, model.normalise) == (("q ", "p "), "s ", 20, True)
    wanted = embed_saved(bert, [f"s {text}"[:18] for text in TEXTS], "avg") @ head.T
    short = [text[:16] for text in TEXTS]                      # with the prompt, [CLS] and [SEP] 20 tokens
    torch.testing.assert_close(model.embed_texts(short), wanted, atol=1e-5, rtol=0)
    old = dict(pooling_mode_cls_token=False, pooling_mode_mean_tokens=False, pooling_mode_lasttoken=True)
    model = load(foreign(bert, tmp_path / "b", old, longest=None))
    torch.testing.assert_close(model.embed_texts(TEXTS), embed_saved(bert, TEXTS, "last"), atol=1e-5, rtol=0)
    assert (model.prompts, model.longest, model.head) == (("",), 512, None)


def test_what_others_wrote_is_saved_again(bert, tmp_path):
    """A step of no length: the folder's embeddings, prompts and length 1, but for the longer texts that
    --max-length asks for."""
    dense = [("Dense", HEAD, {"linear.weight": torch.randn(8, 32)}), ("Normalize", {}, {})]
    prompts = dict(prompts=dict(query="q ", document="p "), default_prompt_name=None)
    folder = foreign(bert, tmp_path / "a", dict(pooling_mode="mean"), *dense, prompts=prompts)
    flags = ["--data", DATA / "nli.csv", "--batch-size", 8, "--steps", 1, "--lr", 0]
    result = run("simcse", tmp_path / "out", "--model", folder, *flags)
    assert result.said["note"] == f"{folder} was saved with texts of up to 20 tokens; the flags win"
    old, new = load(folder), load(tmp_path / "out")
    assert (new.prompts, new.scored, new.normalise, new.longest) == (("q ", "p "), "", True, 32)
    short = [text[:16] for text in TEXTS]
    torch.testing.assert_close(new.embed_texts(short), old.embed_texts(short), atol=1e-6, rtol=0)
    assert [module["path"] for module in json.loads((tmp_path / "out" / "modules.json").read_text())] == [
        "", "1_Pooling", "2_Dense", "3_Normalize"]


@pytest.mark.parametrize("pooling, more, wanted", [
    (dict(pooling_mode="max"), [], "1_Pooling: pooling max; wanted one of cls, mean, lasttoken"),
    (dict(pooling_mode_cls_token=True, pooling_mode_mean_tokens=True), [],
     "1_Pooling: pooling cls and mean; .*"),
    (dict(pooling_mode="mean", include_prompt=False), [], "1_Pooling: pooling mean without the prompt; .*"),
    ({}, [("LayerNorm", {}, {})], "modules.json: LayerNorm; wanted Transformer, .*"),
    ({}, [("Dense", HEAD | dict(activation_function="os.system"), {})], "2_Dense: activation system; .*"),
    ({}, [("Dense", HEAD | dict(use_residual=True), {})], "2_Dense: activation Identity and a residual; .*"),
    ({}, [("Dense", HEAD, {})], "its modules.json, or a folder that it names, is damaged .*"),
    ({}, [("Dense", HEAD, {"linear.weight": torch.ones(9, 32)})], "its modules.json, or .* is damaged .*")])
def test_what_is_refused(pooling, more, wanted, here, bert, capfd):
    foreign(bert, Path("model"), pooling, *more)
    refuse("simcse", capfd, f"--model model: {wanted}", *SMALL, "--model", "model")


def test_supervised_simcse_keeps_its_head_in_the_pooler(bert, tmp_path):
    """By its name; --head pooler says so of any other."""
    named = shutil.copytree(bert, tmp_path / "sup-simcse-bert-small")
    assert read_layout(str(tmp_path / "unsup-simcse-bert-small")) is None
    wanted = embed_saved(bert, TEXTS, "pooler")
    for model in load(named), load(bert, head=["pooler"]):
        torch.testing.assert_close(model.embed_texts(TEXTS), wanted, atol=1e-5, rtol=0)


def test_training_goes_on_with_the_same_head(bert, tmp_path, monkeypatch):
    """The weights of the first run's end; --head new begins another one, --pooling leaves it out; each says
    so. A head that is trained alone is not there to go on with."""
    data = ["--data", DATA / "nli.csv", "--batch-size", 8, "--steps", 1, "--lr", 1e-2]
    first = run("simcse", tmp_path / "first", *data, "--model", bert, "--prompt", "a: ", "b: ")
    out, kept = tmp_path / "first", first.model.head[0].weight.detach().clone()

    for ids, prompt, text in zip(TokenRows(out / "tokens", 3)[0], ("a: ", "b: ", "b: "), NLI[0]):
        words = first.model.tokenizer(prompt + text, truncation=True, max_length=32)
        assert ids.tolist() == words["input_ids"]              # each column has its prompt, the last goes on
    for weight in first.model.parameters():
        weight.data.zero_()
    first.model.restore(out)
    assert torch.equal(first.model.head[0].weight, kept)
    assert torch.equal(first.model.embed_texts(TEXTS), load(out).embed_texts(TEXTS))

    def go_on(name, *flags):
        result = run("simcse", tmp_path / name, *data, "--model", out, "--lr", 0, *flags)
        linear = result.model.head and result.model.head[0].weight
        return result, linear is not None and torch.equal(linear, kept)

    same, is_kept = go_on("same")                              # the small model has no dropout
    assert is_kept and same.model.prompts == ("a: ", "b: ") and "note" not in same.said
    assert same.said["model"].endswith("cls pooling, its head, without dropout, prompt 'a: ', prompt 'b: '")
    for name, flags, found in (
            ("new", ["--head", "new"], "a head"), ("avg", ["--pooling", "avg"], "cls pooling, a head"),
            ("prompts", ["--prompt", "c "], "other prompts")):
        result, is_kept = go_on(name, *flags)
        assert is_kept == (name == "prompts")
        assert result.said["note"] == f"{out} was saved with {found}; the flags win"
    result, is_kept = go_on("alone", "--head", "train-only")
    assert is_kept and not (tmp_path / "alone" / "2_Dense").exists()


def test_code_of_a_folder_is_never_run(here, bert, capfd):
    """Asked for by auto_map, of a kind that transformers does not know."""
    shutil.copytree(bert, "model")
    config = json.loads(Path("model/config.json").read_text())
    code = dict(auto_map={"AutoModel": "evil.Evil", "AutoConfig": "evil.Evil"}, model_type="evil")
    Path("model/config.json").write_text(json.dumps(config | code))
    Path("model/evil.py").write_text("raise SystemExit('it ran')\n")
    wanted = "--model model: wants to run Python that lies in it, which is never done; .*"
    refuse("simcse", capfd, wanted, *SMALL, "--model", "model")


@pytest.mark.parametrize("model, wanted", [
    (BertForSequenceClassification(BertConfig(vocab_size=90, hidden_size=8, num_hidden_layers=1,
                                              num_attention_heads=1, intermediate_size=8)),
     "a classifier, BertForSequenceClassification; wanted an encoder of sentences, such as it was made from"),
    (T5Model(T5Config(vocab_size=90, d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1)),
     "T5Model gives no states of a text's tokens; wanted a model like BERT or Qwen"),
    (BartModel(BartConfig(vocab_size=90, d_model=8, encoder_layers=1, decoder_layers=1, pad_token_id=0,
                          encoder_attention_heads=1, decoder_attention_heads=1)),
     "BartModel gives no states of a text's tokens; wanted a model like BERT or Qwen")])
def test_what_is_no_encoder(model, wanted, here, bert, capfd):
    shutil.copytree(bert, "model")
    Path("model/model.safetensors").unlink()
    model.save_pretrained("model")
    refuse("simcse", capfd, f"--model model: {wanted}", *SMALL, "--model", "model")
    assert simcse.make_parser().parse_args(["--evaluate", "--test", "x"]).evaluate
