"""Read and write the folder of a sentence encoder.

transformers can load the encoder from this folder. sentence-transformers also reads modules.json, which lists
the encoder and the modules after it, such as pooling. Python code in a folder is never run.
"""
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ..out import atomic_output, save_tokenizer
from ..pretrained import find_file, loading, read_json

POOLING_NAMES = {"cls": "cls", "mean": "avg", "lasttoken": "last"}  # {sentence-transformers' name: our name}
POOLING_FLAGS = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean",
                 "pooling_mode_lasttoken": "lasttoken"}               # the names in older config.json files
ACTIVATIONS = {kind: getattr(torch.nn, kind) for kind in ("Tanh", "Identity", "ReLU", "GELU")}
AVERAGED_LAYERS = {"avg_top2": [-2, -1], "avg_first_last": [1, -1]}    # layer 0 is the embedding layer


@dataclass
class SavedSettings:
    """The settings of a sentence encoder that its folder stores besides the weights.

    pooling         one of the values of --pooling; None: the folder does not say it
    head            alternating linear layers and activations; "pooler": the encoder's pooler; None: no head
    normalise       whether embeddings are divided by their L2 norm at the end
    max_length      number of tokens to which longer texts are truncated
    lower_case      whether texts are converted to lower case
    prompts         prompts of the columns (anchor, positive, ...); all further columns use the last prompt
    default_prompt  prompt for texts that do not come from --data, such as those of --dev
    all_prompts     {name: prompt}, including prompts that no column uses
    """
    pooling: str | None = None
    head: torch.nn.Sequential | str | None = None
    normalise: bool = False
    max_length: float = math.inf
    lower_case: bool = False
    prompts: tuple = ("",)
    default_prompt: str = ""
    all_prompts: dict = field(default_factory=dict)


def read_saved_settings(name, flag):
    """Return the SavedSettings of a model in a folder or on the hub. Without modules.json, return the
    defaults of SavedSettings, except for the released supervised SimCSE models."""
    with loading(f"{flag} {name}: its modules.json, or a folder listed in it"):
        if modules := read_json(name, "modules.json"):
            return read_modules(name, modules)
    if re.search("(?<!un)sup-simcse", Path(name).name):        # these models store their head as the pooler
        return SavedSettings(pooling="cls", head="pooler")
    return SavedSettings()


def read_modules(name, modules):
    """Convert the contents of modules.json, and of the folders listed in it, to SavedSettings."""
    saved, layers = SavedSettings(pooling="avg"), []
    for module in modules:
        kind, path = module["type"].rpartition(".")[2], module["path"]
        settings = read_json(name, f"{path}/config.json") if path else {}
        if kind == "Transformer":
            settings = read_json(name, "sentence_bert_config.json")
            saved.max_length = settings.get("max_seq_length") or math.inf
            saved.lower_case = bool(settings.get("do_lower_case"))
        elif kind == "WeightedLayerPooling":
            saved.pooling = read_layer_pooling(name, path, settings["layer_start"])
        elif kind == "Pooling":
            if saved.pooling not in AVERAGED_LAYERS:        # avg_top2 and avg_first_last include mean pooling
                saved.pooling = read_pooling(path, settings)
        elif kind == "Dense":
            layers += read_dense(name, path, settings)
        elif kind == "Normalize":
            saved.normalise = True
        elif kind != "Dropout":
            raise ValueError(f"module {kind}, expected one of Transformer, WeightedLayerPooling, Pooling, "
                             "Dense, Dropout, Normalize")
    saved.head = torch.nn.Sequential(*layers) if layers else None
    config = read_json(name, "config_sentence_transformers.json")
    saved.all_prompts = prompts = config.get("prompts") or {}
    saved.default_prompt = prompts.get(config.get("default_prompt_name"), "")
    anchor = prompts.get("query", saved.default_prompt)
    rest = "" if "query" in prompts else anchor                # encode_document does the same
    others = next((prompts[kind] for kind in ("document", "passage", "corpus") if kind in prompts), rest)
    saved.prompts = (anchor,) if others == anchor else (anchor, others)
    return saved


def read_pooling(path, settings):
    """Return the value of --pooling for the settings of a Pooling module of sentence-transformers."""
    flags = [flag for flag, on in settings.items() if flag.startswith("pooling_mode_") and on]
    found = settings.get("pooling_mode") or [POOLING_FLAGS.get(flag, flag) for flag in flags] or "mean"
    mode = found if isinstance(found, str) else " and ".join(found)
    if mode not in POOLING_NAMES or not settings.get("include_prompt", True):
        raise ValueError(f"{path}: pooling {mode}, expected one of {', '.join(POOLING_NAMES)}, with "
                         "include_prompt true")
    return POOLING_NAMES[mode]


def read_layer_pooling(name, path, first_layer):
    """Return the value of --pooling for a WeightedLayerPooling module: avg_top2 or avg_first_last."""
    weights = load_file(find_file(name, f"{path}/model.safetensors"))["layer_weights"]
    for pooling, layers in AVERAGED_LAYERS.items():
        if first_layer == 0 and torch.equal(weights, layer_weights(layers, len(weights))):
            return pooling
    raise ValueError(f"{path}: expected the layer weights of the pooling {' or '.join(AVERAGED_LAYERS)}")


def layer_weights(layers, count):
    """Return a (count,) tensor: 1 for the layers with an index in `layers`, 0 for all other layers."""
    weights = torch.zeros(count)
    weights[layers] = 1
    return weights


def read_dense(name, path, settings):
    """Load a Dense module of sentence-transformers. Return [linear layer, activation]."""
    kind = settings.get("activation_function", "Tanh").rpartition(".")[2]
    if kind not in ACTIVATIONS or settings.get("use_residual"):
        raise ValueError(f"{path}: activation {kind}, expected one of {', '.join(ACTIVATIONS)} without a "
                         "residual connection")
    if file := find_file(name, f"{path}/model.safetensors"):
        weights = load_file(file)
    else:
        weights = torch.load(find_file(name, f"{path}/pytorch_model.bin"), "cpu", weights_only=True)
    linear = torch.nn.Linear(settings["in_features"], settings["out_features"], settings.get("bias", True))
    linear.load_state_dict({part.removeprefix("linear."): x.float() for part, x in weights.items()})
    return [linear, ACTIVATIONS[kind]()]


def save(model, run):
    """Write a SentenceEncoder into --out, so that transformers and sentence-transformers can load it."""
    if run.rank:
        return
    encoder = model.encoder
    head = list(model.head) if model.keep_head else []
    weights = encoder.state_dict()
    if hasattr(encoder, "pooler"):
        weights |= pooler_weights(model, head)
    with atomic_output(run) as aside:
        encoder.save_pretrained(aside, state_dict=weights)
        model.tokenizer.padding_side = "right"                 # SentenceEncoder.batch pads on the right
        save_tokenizer(model.tokenizer, aside)
        index = [dict(idx=0, name="0", path="", type="sentence_transformers.models.Transformer")]
        for i, (kind, settings, tensors) in enumerate(modules_after_encoder(model, head), 1):
            folder = aside / f"{i}_{kind}"
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(settings, indent=1))
            if tensors:
                save_file(tensors, folder / "model.safetensors")
            kind = f"sentence_transformers.models.{kind}"
            index.append(dict(idx=i, name=str(i), path=folder.name, type=kind))
        (aside / "modules.json").write_text(json.dumps(index, indent=1))
        settings = {"max_seq_length": model.max_length, "do_lower_case": model.lower_case}
        (aside / "sentence_bert_config.json").write_text(json.dumps(settings))
        if any(model.prompts) or model.all_prompts:
            settings = dict(similarity_fn_name="cosine", **prompts_to_save(model))
            (aside / "config_sentence_transformers.json").write_text(json.dumps(settings, indent=1))


def modules_after_encoder(model, head):
    """Return the modules that sentence-transformers runs after the encoder: [(type, config, tensors)].

    head    list of alternating linear layers and activations; empty if the head is not saved
    """
    width, layers = model.encoder.config.hidden_size, model.encoder.config.num_hidden_layers
    size, modules = dict(word_embedding_dimension=width), []
    if model.pooling in AVERAGED_LAYERS:
        settings = size | dict(layer_start=0, num_hidden_layers=layers)
        weights = layer_weights(AVERAGED_LAYERS[model.pooling], layers + 1)
        modules.append(("WeightedLayerPooling", settings, {"layer_weights": weights}))
    mode = next(theirs for theirs, ours in POOLING_NAMES.items() if model.pooling.startswith(ours))
    modules.append(("Pooling", size | {flag: kind == mode for flag, kind in POOLING_FLAGS.items()}, {}))
    for linear, activation in zip(head[::2], head[1::2]):
        kind = type(activation)
        settings = dict(in_features=linear.in_features, out_features=linear.out_features,
                        bias=linear.bias is not None,
                        activation_function=f"{kind.__module__}.{kind.__name__}")
        tensors = {f"linear.{name}": tensor.cpu() for name, tensor in linear.state_dict().items()}
        modules.append(("Dense", settings, tensors))
    if model.normalise:
        modules.append(("Normalize", {}, {}))
    return modules


def prompts_to_save(model):
    """Return {"prompts": {name: text}, "default_prompt_name": name or None} for sentence-transformers. Like
    our embed_texts, sentence-transformers' encode() puts the default prompt before each text."""
    prompts = dict(model.all_prompts)
    if any(model.prompts):
        prompts["query"] = model.prompts[0]
        prompts["document"] = model.prompts[min(1, len(model.prompts) - 1)]
    default = next((name for name, text in prompts.items() if text and text == model.default_prompt), None)
    return dict(prompts=prompts, default_prompt_name=default)


def pooler_weights(model, head):
    """Return {name: tensor} of the pretrained pooler or, if the model has none, of a new pooler. Embeddings
    do not need a pooler, but transformers reports missing weights when it loads a folder without a pooler.

    If the head has the form of BERT's pooler ([CLS], a square linear layer, tanh), the head replaces the
    pooler. Then pooler_output in transformers equals the embedding of SentenceEncoder.
    """
    pooler, = model.pretrained_pooler
    if pooler is None or not [*pooler.parameters()]:
        with torch.device("meta"):
            pooler = type(model.encoder)(model.encoder.config).pooler
        if pooler is None:
            return {}
        pooler = pooler.to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]):                # keeps the run's random state unchanged
            torch.manual_seed(0)
            pooler.apply(model.encoder._init_weights)
    weights = {f"pooler.{name}": tensor for name, tensor in pooler.state_dict().items()}
    is_similar = len(head) == 2 and isinstance(head[1], torch.nn.Tanh) and head[0].bias is not None
    if is_similar and model.pooling == "cls" and head[0].in_features == head[0].out_features:
        weights |= {f"pooler.dense.{name}": tensor for name, tensor in head[0].state_dict().items()}
    return weights


def load_hint(model, run):
    """Return the line that shows how sentence-transformers and transformers load the saved folder."""
    note = "  (for head and prompts, see docs/use.md)" if model.keep_head or any(model.prompts) else ""
    return f'SentenceTransformer("{run.args.out}")  or  AutoModel.from_pretrained("{run.args.out}"){note}'


def save_transformer(run, model, tokenizer, more=None):
    """On rank 0, write a model and its tokenizer into --out, in transformers' format.

    more    tensors to write into further files: {file name: {name: tensor}}
    """
    if run.rank:
        return
    with atomic_output(run) as aside:
        model.save_pretrained(aside)
        save_tokenizer(tokenizer, aside)
        for name, tensors in (more or {}).items():
            save_file({part: tensor.cpu() for part, tensor in tensors.items()}, aside / name)
