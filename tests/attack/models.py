"""Models from elsewhere: folders that name code to run, claim huge sizes, have a tokenizer that does not
match the embeddings, or have settings that fail only during training."""

import itertools
import json
import struct
from functools import partial

import torch
from cases import Case, all_of, change_file, write_file
from folders import BERT, CODE, DENSE, change_settings, change_weights, write_modules
from images import Bomb
from kinds import save_small_model
from safetensors.torch import save

case = partial(Case, "models", stdin=b"y\n" * 9)
write_bombs = all_of(
    *(write_file(f"{folder}/code.py", Bomb.write) for folder in ("bert", "net", "small")),
    write_file("bert/custom_generate/generate.py", Bomb.write),
)
TOKENIZER, OWN_CLASS = "bert/tokenizer.json", "code.Own"
MODEL_FLAGS = {
    "simcse": "--model",
    "selfguided": "--model",
    "cline": "--model",
    "tacl": "--model",
    "ease": "--model",
    "vascl": "--model",
    "dclr": "--guide",
    "childtuning": "--model",
}
AUTO_MAP = {
    name: OWN_CLASS
    for name in [*CODE, "AutoModelForPreTraining", "AutoTokenizer", "AutoProcessor", "AutoFeatureExtractor",
                 "AutoImageProcessor", "AutoModelForCausalLM"]
}

# ── code ──

# (kind for which transformers has a config but no model for this use, script)
UNKNOWN = [("trocr", "simcse"), ("rag", "vascl"), ("blip_text_model", "ease"),
           ("musicgen_decoder", "selfguided"), ("speech-encoder-decoder", "simcse"),
           ("vision-encoder-decoder", "tacl"), ("encoder-decoder", "dclr"), ("gpt2", "cline"),
           ("mamba", "childtuning"), ("clip_vision_model", "simcse"), ("timm_wrapper", "ease")]
INNER_MODEL = {"model_type": "trocr", "auto_map": AUTO_MAP}  # a model inside a model


def foreign_model(name, **more):
    """Return a `make` that gives bert/ this model_type, and an auto_map that names code to run."""
    return all_of(write_bombs, change_settings(model_type=name, auto_map=AUTO_MAP, **more))


def code_cases():
    for name, script in UNKNOWN:
        inner = dict(
            encoder=INNER_MODEL, decoder=INNER_MODEL, question_encoder=INNER_MODEL, generator=INNER_MODEL)
        more = inner if "encoder-" in name or name == "rag" else {}
        yield case(f"{name} with auto_map", script, [MODEL_FLAGS[script], "bert"],
                   foreign_model(name, **more), "one line")
    yield case("gpt2 with auto_map, masked", "simcse", ["--model", "bert", "--mlm-weight", 1],
               foreign_model("gpt2"), "one line")
    for name in ("text_config", "vision_config", "backbone_config", "encoder", "sub"):
        make = all_of(write_bombs, change_settings(**{name: INNER_MODEL}))
        yield case(f"{name} with auto_map", "simcse", ["--model", "bert"], make)
    for name in ("llava", "vision-text-dual-encoder", "clip", "colpali"):
        make = foreign_model(name, text_config=INNER_MODEL, vision_config=INNER_MODEL, vlm_config=INNER_MODEL,
                             backbone_config=INNER_MODEL)
        yield case(f"{name} of models with auto_map", "vascl", ["--model", "bert"], make, "one line")
    for name, text in {
        "generation_config.json": {"auto_map": AUTO_MAP, "custom_generate": "x"},
        "processor_config.json": {"auto_map": AUTO_MAP, "processor_class": "Own"},
        "preprocessor_config.json": {"auto_map": AUTO_MAP, "image_processor_type": "Own"},
        "tokenizer_config.json": {"auto_map": {"AutoTokenizer": [OWN_CLASS, OWN_CLASS]},
                                  "tokenizer_class": "Own", "config_tokenizer_class": "Own"},
        "adapter_config.json": {"auto_map": AUTO_MAP, "base_model_name_or_path": "."},
    }.items():
        for script in ("simcse", "childtuning"):
            yield case(f"{name} with auto_map", script, ["--model", "bert"],
                       all_of(write_bombs, write_file(f"bert/{name}", json.dumps(text))))
    for script in ("moco", "simclr"):
        make = all_of(write_bombs, change_settings(folder="net", model_type="trocr", auto_map=AUTO_MAP))
        yield case("a net of a kind without a model", script, ["--model", "net"], make, "one line")
        make = all_of(write_bombs, change_settings(folder="net", backbone_config=INNER_MODEL))
        yield case("a net with a model in it", script, ["--model", "net"], make)
    for name, value in [("attn_implementation", "own/code"), ("_attn_implementation", "own/code"),
                        ("experts_implementation", "own/code"), ("use_kernels", True),
                        ("attn_implementation", {"": "own/code:run"}), ("custom_object", "code.Own"),
                        ("transformers_weights", "../../x.safetensors"), ("fusion_config", {"a": True})]:
        yield case(f"{name}: {value}", "simcse", ["--model", "bert"],
                   all_of(write_bombs, change_settings(**{name: value})))
    for flag, argv in {"--evaluate": ["--dev", "sts.tsv"], "--test": ["--test", "sts.tsv"]}.items():
        yield case(f"{flag} of trocr", "dclr", ["--evaluate", "--model", "bert", *argv],
                   foreign_model("trocr"), "one line")


# ── sizes ──

SIZES = {
    "bert": [("num_hidden_layers", 10**7), ("num_labels", 10**8), ("max_position_embeddings", 10**9),
             ("type_vocab_size", 10**10), ("id2label", {str(i): "x" for i in range(10**5)}),
             ("layer_types", ["full_attention"] * 10**6), ("pruned_heads", {"0": list(range(10**6))})],
    "albert": [("inner_group_num", 10**7), ("num_hidden_groups", 10**7), ("inner_group_num", 10**5)],
    "bart": [("decoder_layers", 10**7), ("encoder_layers", 10**5), ("max_position_embeddings", 10**10)],
    "xmod": [("languages", [f"l{i}" for i in range(10**6)]), ("languages", [f"l{i}" for i in range(10**4)])],
    "distilbert": [("n_layers", 10**7), ("n_layers", 10**6), ("max_position_embeddings", 10**8)],
    "qwen3": [("num_hidden_layers", 10**9), ("num_hidden_layers", 10**5), ("head_dim", 10**9)],
    "mixtral": [("num_local_experts", 10**7), ("num_local_experts", 10**9)],
    "gpt2": [("n_layer", 10**6), ("n_positions", 10**9), ("n_inner", 10**11)],
    "xlm": [("n_layers", 10**6), ("n_langs", 10**9), ("emb_dim", 10**9), ("max_position_embeddings", 10**8)],
    "canine": [("num_hash_functions", 10**6), ("num_hash_buckets", 10**10)],
}


def size_cases():
    scripts = itertools.cycle(MODEL_FLAGS)
    for name, changes in SIZES.items():
        for setting, value in changes:
            script, short = next(scripts), value if isinstance(value, int) else len(value)
            make = all_of(
                partial(save_small_model, name), change_settings(folder="small", **{setting: value}))
            yield case(f"{name} with {setting} {short}", script, [MODEL_FLAGS[script], "small"], make)
    yield case("40 MB of settings", "simcse", ["--model", "bert"],
               change_file("bert/config.json", lambda old: old + b" " * 40 * 2**20), "one line")
    yield case("layers in a model within", "simcse", ["--model", "bert"],
               change_settings(model_type="clip", text_config={"num_hidden_layers": 10**9}), "one line")
    for name, value in [("depths", [10**7] * 4), ("num_labels", 10**9), ("hidden_sizes", [10**7] * 4)]:
        yield case(f"a net with {name} {value}", "moco", ["--model", "net"],
                   change_settings(folder="net", **{name: value}), "one line")


# ── tokenizers ──


def change_tokenizer(edit):
    """Return a `make` that calls edit(content of tokenizer.json) and saves the file again."""

    def edit_bytes(old):
        content = json.loads(old)
        edit(content)
        return json.dumps(content).encode()

    return change_file(TOKENIZER, edit_bytes)


def add_token(content, number, special=False):
    """Return a `make` that adds a token with this text and id to the tokenizer."""
    token = dict(id=number, content=content, single_word=False, lstrip=False, rstrip=False, normalized=False,
                 special=special)
    return change_tokenizer(lambda content: content["added_tokens"].append(token))


def add_word(text, number):
    """Return a `make` that adds a word with this id to the vocabulary."""
    return change_tokenizer(lambda content: content["model"]["vocab"].update({text: number}))


def change_tokenizer_config(**more):
    return change_settings("tokenizer_config.json", **more)


def change_special_ids(content):
    """Give all special tokens of the post-processor the id 1,000,000."""
    for token in content["post_processor"]["special_tokens"].values():
        token["ids"] = [10**6]


TOKENIZERS = {
    "a token more": add_token("cat", 10**3),
    "10**6": add_token("cat", 10**6),
    "2**31": add_token("cat", 2**31),
    "2**32 - 1": add_token("cat", 2**32 - 1),
    "2**63": add_token("cat", 2**63),
    "-1": add_token("cat", -1),
    "a special one": add_token("[NEW]", 10**4, True),
    "a word": add_word("a", 10**6),
    "a word of 2**31": add_word("a", 2**31),
    "a word of -1": add_word("a", -1),
    "ids of marks": change_tokenizer(change_special_ids),
    "another pad": change_tokenizer_config(pad_token="[ROOM]"),
    "another mask": change_tokenizer_config(mask_token="<mask>"),
    "more marks": change_tokenizer_config(extra_special_tokens=["<a>", "<b>"]),
    "no pad": change_tokenizer_config(pad_token=None),
    "no marks": change_tokenizer_config(
        pad_token=None, eos_token=None, sep_token=None, cls_token=None, mask_token=None),
    "a decoder of added tokens": change_tokenizer_config(
        added_tokens_decoder={"9999999": {"content": "cat"}}),
    "a length in words": change_tokenizer_config(model_max_length="x"),
    "a length of 0": change_tokenizer_config(model_max_length=0),
    "a length of -5": change_tokenizer_config(model_max_length=-5),
    "a length of 1e400": change_tokenizer_config(model_max_length=1e400),
    "a length of null": change_tokenizer_config(model_max_length=None),
    "a length of true": change_tokenizer_config(model_max_length=True),
    "a length of 5.5": change_tokenizer_config(model_max_length=5.5),
    "the left side": change_tokenizer_config(padding_side="left", truncation_side="left"),
    "no side": change_tokenizer_config(truncation_side="up"),
    "cut to 2": change_tokenizer(
        lambda content: content.update(
            truncation=dict(direction="Right", max_length=2, strategy="LongestFirst", stride=0))
    ),
    "padded to 10**6": change_tokenizer(
        lambda content: content.update(
            padding=dict(strategy={"Fixed": 10**6}, direction="Right", pad_to_multiple_of=None, pad_id=0,
                         pad_type_id=0, pad_token="[PAD]")
        )
    ),
    "an empty vocabulary": change_tokenizer(lambda content: content["model"].update(vocab={})),
    "no post-processor": change_tokenizer(lambda content: content.update(post_processor=None)),
    "a slow class": change_tokenizer_config(tokenizer_class="BertJapaneseTokenizer"),
    "inputs by other names": change_tokenizer_config(model_input_names=["pixels"]),
}


def tokenizer_cases():
    scripts = itertools.cycle(MODEL_FLAGS)
    for name, make in TOKENIZERS.items():
        script = next(scripts)
        yield case(f"tokens: {name}", script, [MODEL_FLAGS[script], "bert"], make)
    for name in ("a token more", "10**6", "a special one", "ids of marks", "another pad", "no pad"):
        make = TOKENIZERS[name]
        yield case(f"tokens of --evaluate: {name}", "simcse",
                   ["--evaluate", "--model", "bert", "--dev", "sts.tsv"], make)
        yield case(
            f"tokens of a classifier: {name}", "childtuning", ["--model", "bert", "--batch-size", 5], make)
    for name in ("a token more", "10**6"):
        yield case(
            f"tokens of --teacher: {name}", "tacl", ["--teacher", "bert", "--model", "bert"], TOKENIZERS[name]
        )


# ── settings ──

SETTINGS = [("initializer_range", float("nan")), ("initializer_range", -1), ("initializer_range", "x"),
            ("initializer_range", 1e300), ("output_attentions", True), ("output_hidden_states", True),
            ("attn_implementation", "flex_attention"), ("attn_implementation", "flash_attention_2"),
            ("attn_implementation", "none"), ("attn_implementation", "eager"), ("architectures", [1]),
            ("architectures", "x"), ("architectures", {}), ("chunk_size_feed_forward", 2),
            ("chunk_size_feed_forward", 7), ("chunk_size_feed_forward", -1), ("return_dict", False),
            ("torchscript", True), ("is_decoder", True), ("add_cross_attention", True),
            ("problem_type", "multi_label_classification"), ("pad_token_id", 10**6), ("pad_token_id", -1),
            ("layer_norm_eps", float("nan")), ("layer_norm_eps", -1.0), ("attention_probs_dropout_prob", 1.0),
            ("hidden_dropout_prob", float("nan")), ("classifier_dropout", 7), ("dtype", "float16"),
            ("dtype", "float64"), ("tie_word_embeddings", False), ("position_embedding_type", "relative_key"),
            ("id2label", {"0": "x"}), ("label2id", {"x": -1}), ("use_cache", "yes"), ("type_vocab_size", 0),
            ("model_type", "roberta"), ("model_type", "distilbert"), ("model_type", ""), ("model_type", 7),
            ("model_type", None), ("transformers_version", "99.0"), ("name_or_path", "../x")]
LAYOUTS = {
    "a dense layer of 16": all_of(
        write_modules(BERT, ("Pooling", "p"), DENSE, p={}, dense=dict(in_features=16, out_features=8)),
        write_file("bert/dense/model.safetensors",
                   save({"linear.weight": torch.ones(8, 16), "linear.bias": torch.zeros(8)})),
    ),
    "dense layers of 8 and 9": all_of(
        write_modules(BERT, DENSE, ("Dense", "next"), dense=dict(in_features=32, out_features=8),
                      next=dict(in_features=9, out_features=8)),
        *(
            write_file(f"bert/{name}/model.safetensors",
                       save({"linear.weight": torch.ones(8, size), "linear.bias": torch.zeros(8)}))
            for name, size in (("dense", 32), ("next", 9))
        ),
    ),
    "a dense layer that claims more": all_of(
        write_modules(BERT, DENSE, dense=dict(in_features=10**6, out_features=10**6)),
        write_file("bert/dense/model.safetensors", save({"linear.weight": torch.ones(8, 32)}))),
    **{
        f"prompts {str(value)[:20]!a}": all_of(
            write_modules(BERT),
            write_file("bert/config_sentence_transformers.json",
                       json.dumps({"prompts": value, "default_prompt_name": "query"})),
        )
        for value in ({"query": 7}, {"query": ["a"]}, {"query": None}, {"query": "\ud800"}, {"query": "a\0b"},
                      ["a"], {"query": "a " * 2_500_000}, {"query": "a " * 400}, 7, "x", {"document": {}},
                      {"query": "\u202e"})
    },
    "a default prompt that is none": all_of(
        write_modules(BERT),
        write_file(
            "bert/config_sentence_transformers.json", '{"prompts": {"a": "b"}, "default_prompt_name": ["a"]}'
        ),
    ),
    **{
        f"a length of {value!a}": all_of(
            write_modules(BERT),
            write_file("bert/sentence_bert_config.json", json.dumps({"max_seq_length": value})))
        for value in (-1, 1, 1e400, [], True, "9" * 5000, 10**30)
    },
    "modules 10**5 deep": write_file("bert/modules.json", "[" * 10**5),
    "a pooling of all": all_of(
        write_modules(BERT, ("Pooling", "p")),
        write_file("bert/p/config.json", json.dumps({"pooling_mode": ["cls", "mean"]}))),
    "a mean of layers that are not there": all_of(
        write_modules(BERT, ("WeightedLayerPooling", "w"), w=dict(num_hidden_layers=99, layer_start=4)),
        write_file("bert/w/model.safetensors", save({"layer_weights": torch.ones(96)}))),
}


def overlap_weights(here):
    """Save the weights as .bin: a bias is expanded from one number, and two weights share memory."""
    from safetensors.torch import load_file

    found = load_file(here / "bert/model.safetensors")
    wide = "encoder.layer.0.intermediate.dense."
    found[wide + "bias"] = found[wide + "bias"][:1].expand(64)
    found["encoder.layer.1.attention.self.query.weight"] = found[
        "encoder.layer.0.attention.self.query.weight"].T
    torch.save(found, here / "bert/pytorch_model.bin")
    (here / "bert/model.safetensors").unlink()


WEIGHTS = {
    "overlapping": overlap_weights,
    "complex": change_weights(lambda old: {name: x.to(torch.complex64) for name, x in old.items()}),
    "booleans": change_weights(lambda old: {name: x > 0 for name, x in old.items()}),
    "float64": change_weights(lambda old: {name: x.double() for name, x in old.items()}),
    "one infinity": change_weights(lambda old: old | {"pooler.dense.bias": torch.full((32,), torch.inf)}),
    "1e38": change_weights(lambda old: {name: x * 1e37 for name, x in old.items()}),
    "zeros": change_weights(lambda old: {name: x * 0 for name, x in old.items()}),
    "a header of 100 MB": write_file("bert/model.safetensors", struct.pack("<Q", 10**8) + b"{}"),
    "other names": change_weights(lambda old: {f"x.{name}": x for name, x in old.items()}),
    "a prefix": change_weights(lambda old: {f"bert.{name}": x for name, x in old.items()}),
}


def settings_cases():
    scripts = itertools.cycle(MODEL_FLAGS)
    for name, value in SETTINGS:
        script = next(scripts)
        yield case(
            f"{name} {value!a}", script, [MODEL_FLAGS[script], "bert"], change_settings(**{name: value}))
    for name, value in SETTINGS[:18:3]:
        yield case(f"{name} {value!a} of a classifier", "childtuning", ["--model", "bert"],
                   change_settings(**{name: value}))
    for name, make in LAYOUTS.items():
        yield case(f"modules: {name}", ["simcse", "vascl", "dclr"][len(name) % 3], ["--model", "bert"], make)
        if "prompt" in name:
            argv = ["--evaluate", "--model", "bert", "--dev", "sts.tsv"]
            yield case(f"modules of --evaluate: {name}", "simcse", argv, make)
    for name, make in WEIGHTS.items():
        yield case(f"weights: {name}", next(scripts), ["--model", "bert"], make, may_leave_out="1e38" in name)


def cases():
    for part in (code_cases, size_cases, tokenizer_cases, settings_cases):
        yield from part()
