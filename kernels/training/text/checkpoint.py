"""The folder of a sentence encoder, read and written: transformers finds the encoder in it, and
sentence-transformers, by modules.json, what is behind the encoder. No code that lies in a folder is run."""
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ..cli import Fault, fail
from ..output_dir import model_card, new_files, save_tokenizer
from ..pretrained import find_file, read_json

MODES = {"cls": "cls", "mean": "avg", "lasttoken": "last"}  # sentence-transformers' names, and ours
FLAGS = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean",
         "pooling_mode_lasttoken": "lasttoken"}
ACTIVATIONS = {kind: getattr(torch.nn, kind) for kind in ("Tanh", "Identity", "ReLU", "GELU")}


@dataclass
class Layout:
    """What a folder says of a sentence encoder beside its weights.

    subfolder   where the encoder lies in it
    pooling     as --pooling calls it
    head        None, or linear layers and activations in turn; "pooler": it is the encoder's own
    normalise   whether embeddings are brought to length 1 in the end
    longest     tokens of a text
    lower       whether texts are read in small letters
    prompts     what is put before anchors, and before the texts of other columns; scored: before a text alone
    """
    subfolder: str = ""
    pooling: str = "avg"
    head: torch.nn.Sequential | str | None = None
    normalise: bool = False
    longest: float = math.inf
    lower: bool = False
    prompts: tuple = ("",)
    scored: str = ""


def read_layout(name, flag="--model"):
    """The Layout of a folder or hub name that has a modules.json, or of a supervised SimCSE; else None."""
    try:
        if modules := read_json(name, "modules.json"):
            return read_modules(name, modules)
    except Fault as fault:
        fail(f"{flag} {name}: {fault}")
    except Exception as error:                                 # a damaged file has many ways to fail
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        fail(f"{flag} {name}: its modules.json, or a folder that it names, is damaged ({what})")
    if re.search("(?<!un)sup-simcse", Path(name).name):        # which keeps its MLP in the pooler's place
        return Layout(pooling="cls", head="pooler")
    return None


def read_modules(name, modules):
    """The Layout that modules.json and the folders that it names describe."""
    layout, layers = Layout(), []
    for module in modules:
        kind, path = module["type"].rpartition(".")[2], module["path"]
        if Path(path).is_absolute() or ".." in Path(path).parts:
            fail(f"modules.json: {path} lies outside")
        settings = read_json(name, f"{path}/config.json") if path else {}
        if kind == "Transformer":
            prefix = f"{path}/" if path else ""
            layout.subfolder = path
            settings = read_json(name, f"{prefix}sentence_bert_config.json")
            length = settings.get("max_seq_length")
            layout.longest = max(3, int(length)) if length else math.inf
            layout.lower = bool(settings.get("do_lower_case"))
        elif kind == "WeightedLayerPooling":
            layout.pooling = mixed_layers(name, path, settings)
        elif kind == "Pooling":
            pooling = read_pooling(path, settings)
            if layout.pooling == "avg":
                layout.pooling = pooling
            elif pooling != "avg":
                fail(f"{path}: {pooling} of several layers; wanted the mean over tokens")
        elif kind == "Dense":
            layers += read_dense(name, path, settings)
        elif kind == "Normalize":
            layout.normalise = True
        elif kind != "Dropout":
            fail(f"modules.json: {kind}; wanted Transformer, WeightedLayerPooling, Pooling, Dense, Normalize")
    layout.head = torch.nn.Sequential(*layers) if layers else None
    config = read_json(name, "config_sentence_transformers.json")
    prompts = config.get("prompts") or {}
    for kind, prompt in prompts.items():
        check_prompt(f"config_sentence_transformers.json: prompt {kind!r}", prompt)
    layout.scored = prompts.get(config.get("default_prompt_name"), "")
    anchor = prompts.get("query", layout.scored)
    others = next((prompts[kind] for kind in ("document", "passage", "corpus") if kind in prompts), anchor)
    layout.prompts = (anchor,) if others == anchor else (anchor, others)
    return layout


def check_prompt(named, prompt):
    """Refuses what cannot stand before a text."""
    if not isinstance(prompt, str) or len(prompt) > LONGEST_PROMPT or re.search("[\ud800-\udfff\0]", prompt):
        length = f" of {len(prompt):,} letters" if isinstance(prompt, str) else ""
        fail(f"{named} is {prompt!r:.60}{length}; wanted a text of at most {LONGEST_PROMPT:,} letters")


LONGEST_PROMPT = 10_000


def read_pooling(path, settings):
    """The pooling, as --pooling calls it, of sentence-transformers' settings."""
    found = settings.get("pooling_mode") or [FLAGS.get(flag, flag) for flag, on in settings.items()
                                             if flag.startswith("pooling_mode_") and on]
    found = [found] if isinstance(found, str) else found or ["mean"]
    if len(found) > 1 or found[0] not in MODES or not settings.get("include_prompt", True):
        more = "" if settings.get("include_prompt", True) else " without the prompt"
        fail(f"{path}: pooling {' and '.join(found)}{more}; wanted one of {', '.join(MODES)}")
    return MODES[found[0]]


def mixed_layers(name, path, settings):
    """Which pooling a mean of layers is."""
    weights = load_file(find_file(name, f"{path}/model.safetensors"))["layer_weights"]
    mix = torch.zeros(settings["num_hidden_layers"] + 1)
    mix[settings["layer_start"] :] = weights
    for pooling, layers in LAYERS.items():
        if torch.equal(mix, mix_of(layers, len(mix)) * mix.max()):
            return pooling
    fail(f"{path}: a mean of layers that is none of {', '.join(LAYERS)}")


LAYERS = {"avg_top2": [-2, -1], "avg_first_last": [1, -1]}     # 0 is the word embeddings


def mix_of(layers, count):
    """(count,) weights of layers: 1 for these, else 0."""
    mix = torch.zeros(count)
    mix[layers] = 1
    return mix


def read_dense(name, path, settings):
    """[linear layer, activation]"""
    kind = settings.get("activation_function", "Tanh").rpartition(".")[2]
    if kind not in ACTIVATIONS or settings.get("use_residual"):
        fail(f"{path}: activation {kind}{' and a residual' * bool(settings.get('use_residual'))}; "
             f"wanted {', '.join(ACTIVATIONS)}")
    if file := find_file(name, f"{path}/model.safetensors"):
        weights = load_file(file)
    else:
        weights = torch.load(find_file(name, f"{path}/pytorch_model.bin"), "cpu", weights_only=True)
    with torch.device("meta"):                                 # however wide it says it is
        sizes = settings["in_features"], settings["out_features"]
        linear = torch.nn.Linear(*sizes, bias=settings.get("bias", True))
    weights = {part.removeprefix("linear."): x.float().contiguous() for part, x in weights.items()}
    if bad := next((part for part, x in weights.items() if not x.isfinite().all()), None):
        fail(f"{path}: {bad} holds NaN or infinity")
    linear.load_state_dict(weights, assign=True)
    return [linear, ACTIVATIONS[kind]()]


def save(model, run):
    """A SentenceEncoder as transformers and sentence-transformers read it, into --out."""
    if run.rank:
        return
    encoder, width = model.encoder, model.encoder.config.hidden_size
    head = list(model.head) if model.keep_head else []
    weights = encoder.state_dict()
    if model.has_pooler:
        weights |= unused_pooler(model)
    if pooler_of(model):  # plain transformers finds the head as its pooler_output
        weights |= {f"pooler.dense.{name}": tensor for name, tensor in head[0].state_dict().items()}
    with new_files(run) as aside:
        encoder.save_pretrained(aside, state_dict=weights)
        save_tokenizer(model.tokenizer, aside)
        index = [dict(idx=0, name="0", path="", type="sentence_transformers.models.Transformer")]
        for i, (kind, settings, tensors) in enumerate(modules_of(model, head), 1):
            folder = aside / f"{i}_{kind}"
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(settings, indent=1))
            if tensors:
                save_file(tensors, folder / "model.safetensors")
            kind = f"sentence_transformers.models.{kind}"
            index.append(dict(idx=i, name=str(i), path=folder.name, type=kind))
        (aside / "modules.json").write_text(json.dumps(index, indent=1))
        settings = {"max_seq_length": model.longest, "do_lower_case": model.lower}
        (aside / "sentence_bert_config.json").write_text(json.dumps(settings))
        if any(model.prompts):
            settings = dict(similarity_fn_name="cosine", **prompts_of(model))
            (aside / "config_sentence_transformers.json").write_text(json.dumps(settings, indent=1))
        size = head[-2].out_features if head else width
        text = f"Sentence embeddings of {size} numbers, compared by cosine; {model.pooling} pooling."
        tags = ["sentence-transformers", "sentence-similarity", "feature-extraction"]
        card = model_card(run, "sentence-similarity", tags, text, load_line(model, run))
        (aside / "README.md").write_text(card, encoding="utf-8")


def modules_of(model, head):
    """[(kind, settings, tensors)] of what is behind the encoder."""
    width, layers = model.encoder.config.hidden_size, model.encoder.config.num_hidden_layers
    size, modules = dict(word_embedding_dimension=width), []
    if model.pooling in LAYERS:
        settings = size | dict(layer_start=0, num_hidden_layers=layers)
        mix = mix_of(LAYERS[model.pooling], layers + 1)
        modules.append(("WeightedLayerPooling", settings, {"layer_weights": mix}))
    mode = next((theirs for theirs, ours in MODES.items() if model.pooling.startswith(ours)))
    modules.append(("Pooling", size | {flag: kind == mode for flag, kind in FLAGS.items()}, {}))
    for linear, activation in zip(head[::2], head[1::2]):
        kind = type(activation)
        settings = dict(in_features=linear.in_features, out_features=linear.out_features,
                        bias=linear.bias is not None,
                        activation_function=f"{kind.__module__}.{kind.__name__}")
        tensors = {f"linear.{name}": tensor.cpu() for name, tensor in linear.state_dict().items()}
        modules.append(("Dense", settings, tensors))
    return modules + [("Normalize", {}, {})] * model.normalise


def prompts_of(model):
    """What encode() puts before a text by itself is what scored pairs get."""
    prompts = dict(query=model.prompts[0], document=model.prompts[min(1, len(model.prompts) - 1)])
    if len(model.prompts) > 2:
        prompts["negative"] = model.prompts[2]
    if model.scored not in ("", model.prompts[0]):
        prompts["default"] = model.scored
    default = next((name for name in ("query", "default") if prompts.get(name) == model.scored), None)
    return dict(prompts=prompts, default_prompt_name=default)


def unused_pooler(model):
    """{name: tensor} of the pooler that transformers expects in this kind of encoder, though no embedding
    uses it: the one that was loaded, else a new one. Without it transformers would report missing weights."""
    pooler, = model.unused_pooler
    if pooler is None or not any(True for _ in pooler.parameters()):
        with torch.device("meta"):
            pooler = type(model.encoder)(model.encoder.config).pooler
        if pooler is None:
            return {}
        pooler = pooler.to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]):                # the run's random numbers stay as they are
            torch.manual_seed(0)
            pooler.apply(model.encoder._init_weights)
    return {f"pooler.{name}": tensor for name, tensor in pooler.state_dict().items()}


def pooler_of(model):
    """Whether the head takes the place of the pooler."""
    head = model.head if model.keep_head and model.has_pooler else []
    return len(head) == 2 and isinstance(head[1], torch.nn.Tanh) and model.pooling == "cls" and (
        head[0].bias is not None and head[0].in_features == head[0].out_features)


def load_line(model, run):
    """How others load the folder."""
    return f'SentenceTransformer("{run.args.out}")  or  AutoModel.from_pretrained("{run.args.out}")'
