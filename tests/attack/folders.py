"""Folders: models that are damaged, huge or programs, an --out that cannot be, runs that --resume cannot
read."""
import itertools
import json
import os
import pickle
import struct
from functools import partial

import torch
from cases import Case, both, change, put
from pictures import Bomb, photos
from safetensors.torch import load, save
from texts import NOISE, flipped

model, out = partial(Case, "folders", stdin=b"y\n" * 9), partial(Case, "out", late=True)
USES = [("simcse", "--model"), ("vascl", "--model"), ("selfguided", "--model"), ("ease", "--model"),
        ("cline", "--model"), ("tacl", "--model"), ("dclr", "--model"), ("dclr", "--guide"),
        ("childtuning", "--model"), ("tacl", "--teacher")]
CODE = {kind: f"code.{kind}" for kind in ("AutoConfig", "AutoModel", "AutoModelForMaskedLM",
                                          "AutoModelForSequenceClassification")}
RUNS = pickle.dumps(Bomb(), 2)
runs = put("bert/code.py", Bomb.write)


def settings(file="config.json", folder="bert", **more):
    """A `make` that changes a file of settings."""
    return change(f"{folder}/{file}", lambda old: json.dumps(json.loads(old) | more).encode())


def weights(how, folder="bert"):
    """A `make` that changes weights by a function of {name: tensor}."""
    return change(f"{folder}/model.safetensors", lambda old: save({
        name: tensor.contiguous() for name, tensor in how(load(old)).items()}))


def spoilt(x):
    return x * torch.nan if x.is_floating_point() else x


def instead(name, content):
    """A `make` that writes other weights."""
    return both(put("bert/model.safetensors"), put(f"bert/{name}", content))


def pipe(name):
    return both(put(name), lambda here: os.mkfifo(here / name))


def torch_saves(name, what):
    return lambda here: torch.save(what, here / name)


# What cannot be a model, by file.
ONE = {
    "auto_map": both(runs, settings(auto_map=CODE, model_type="own")),
    **{f"config: {name}": put("bert/config.json", data) for name, data in {
        "missing": None, "empty": "", "a list": "[]", "a text": '"bert"', "half": '{"model_type": "bert",',
        "utf-16": '{"model_type": "bert"}'.encode("utf-16"), "nested deeply": '{"a":' * 10**5}.items()},
    **{f"config: {name} {value}": settings(**{name: value}) for name, value in [
        ("model_type", "none"), ("model_type", "gpt2"), ("model_type", "resnet"),
        ("num_hidden_layers", 10**9),
        ("hidden_size", 10**12), ("hidden_size", -1), ("hidden_size", 0), ("hidden_size", "wide"),
        ("hidden_size", 64), ("num_attention_heads", 7), ("num_attention_heads", 0), ("vocab_size", 10**12),
        ("vocab_size", 20), ("intermediate_size", 10**12), ("hidden_act", "exec"),
        ("hidden_dropout_prob", 2)]},
    "config: a pipe": pipe("bert/config.json"),
    **{f"weights: {name}": put("bert/model.safetensors", data) for name, data in {
        "missing": None, "empty": b"", "noise": NOISE, "a pickle": RUNS,
        "a head of 2**60": struct.pack("<Q", 2**60) + b"{}"}.items()},
    "weights: half": change("bert/model.safetensors", lambda old: old[: len(old) // 2]),
    "weights: a pipe": pipe("bert/model.safetensors"),
    "weights: other shapes": weights(lambda old: {name: x[:3] for name, x in old.items()}),
    "weights: every second": weights(lambda old: dict(list(old.items())[::2])),
    "weights: a pickle that runs": instead("pytorch_model.bin", RUNS),
    "weights: an archive that runs": both(put("bert/model.safetensors"),
                                          torch_saves("bert/pytorch_model.bin", Bomb())),
    "weights: shards elsewhere": instead("model.safetensors.index.json", json.dumps(
        {"metadata": {}, "weight_map": {"embeddings.word_embeddings.weight": "../../x.safetensors"}})),
    **{f"tokenizer: {name}": put("bert/tokenizer.json", data) for name, data in {
        "missing": None, "empty": "{}", "half": '{"version": "1.0"', "noise": NOISE}.items()},
    "tokenizer: a pipe": pipe("bert/tokenizer.json"),
    "tokenizer: no settings": put("bert/tokenizer_config.json", "x"),
    "an adapter alone": both(put("bert/config.json"), put("bert/adapter_config.json", "{}"))}
EITHER = {
    "auto_map beside a known kind": both(runs, settings(auto_map=CODE)),
    "auto_map of a tokenizer": both(runs, settings("tokenizer_config.json", tokenizer_class="Own",
                                                   auto_map={"AutoTokenizer": ["code.Own", "code.Own"]})),
    "4 positions": settings(max_position_embeddings=4), "no activation": settings(hidden_act=None),
    "a classifier": settings(architectures=["BertForSequenceClassification"]),
    "float3": settings(dtype="float3"),
    "quantised": settings(quantization_config={"quant_method": "exec"}),
    "an adapter beside": put("bert/adapter_config.json", '{"base_model_name_or_path": "../x"}'),
    "integers": weights(lambda old: {name: x.to(torch.int8) for name, x in old.items()}),
    "more weights": weights(lambda old: old | {"more.weight": torch.ones(3)}),
    **{f"bits of {file}": change(f"bert/{file}", lambda old: flipped(old))
       for file in ("tokenizer.json", "config.json", "model.safetensors")}}
NETS = [("depths", [10**9] * 4), ("hidden_sizes", [10**12] * 4), ("hidden_sizes", []), ("num_channels", 4),
        ("depths", [-1] * 4), ("depths", "x"), ("auto_map", {"AutoModel": "code.Runs"}),
        ("auto_map", {"AutoModel": "a/b--code.Runs"})]


def modules(*parts, **files):
    """A `make` that writes modules.json, of (kind, path) or whatever else, and settings of such parts."""
    whole = [dict(idx=i, name=str(i), type=f"sentence_transformers.models.{part[0]}", path=part[1])
             if isinstance(part, tuple) else part for i, part in enumerate(parts)]
    return both(put("bert/modules.json", json.dumps(whole)),
                *(put(f"bert/{path}/config.json", json.dumps(text)) for path, text in files.items()))


BERT, DENSE = ("Transformer", ""), ("Dense", "dense")
dense = modules(BERT, DENSE, dense=dict(in_features=32, out_features=32))
LAYOUTS = {
    "elsewhere": modules(BERT, ("Dense", "../../x")), "at the root": modules(BERT, ("Pooling", "/etc")),
    "the encoder elsewhere": modules(("Transformer", "../net")),
    "a dict": put("bert/modules.json", '{"a": 1}'),
    "numbers": modules(1, 2), "a type that runs": modules(BERT, {"type": "code.Own", "path": ""}),
    "no type": modules(BERT, {"path": ""}), "no path": modules({"type": "Transformer"}),
    "a pipe": pipe("bert/modules.json"), "half": put("bert/modules.json", '[{"idx": 0,'),
    "10**12 wide": modules(BERT, DENSE, dense=dict(in_features=10**12, out_features=10**12)),
    "no weights": dense, "a pickle that runs": both(dense, put("bert/dense/pytorch_model.bin", RUNS)),
    "weights of nan": both(dense, put("bert/dense/model.safetensors", save(
        {"linear.weight": torch.full((32, 32), torch.nan), "linear.bias": torch.zeros(32)}))),
    "settings are a list": modules(BERT, ("Pooling", "1"), **{"1": []}),
    "a length in words": both(modules(BERT), put("bert/sentence_bert_config.json",
                                                 '{"max_seq_length": "x"}')),
    "prompts of numbers": both(modules(BERT), put("bert/config_sentence_transformers.json",
                                                  '{"prompts": [1]}'))}


def of_models():
    uses, nets = itertools.cycle(USES), itertools.cycle(["moco", "simclr"])
    for name, make in (ONE | EITHER).items():
        script, flag = next(uses)
        yield model(f"{flag}: {name}", script, [flag, "bert"], make, "one line" if name in ONE else "either",
                    late="bits" in name)                       # of weights: the loss may see them
    for script, flag in USES:
        make = weights(lambda old: {name: spoilt(x) for name, x in old.items()})
        yield model(f"{flag}: weights of nan", script, [flag, "bert"], make, "one line", late=True)
    for name, make in LAYOUTS.items():
        script, _ = USES[len(name) % 4]
        yield model(f"modules.json: {name}", script, ["--model", "bert"], make, late="nan" in name)
    for name in ("auto_map", "auto_map of a tokenizer", "weights: a pickle that runs"):
        yield model(f"--evaluate: {name}", "simcse", ["--evaluate", "--model", "bert", "--dev", "sts.tsv"],
                    (ONE | EITHER)[name])
    for name, value in NETS:
        make = both(settings(folder="net", **{name: value}), put("net/code.py", Bomb.write))
        yield model(f"net: {name} {value}", next(nets), ["--model", "net"], make, "one line")
    for name, how in {"half": lambda old: old[:-9], "noise": lambda old: NOISE}.items():
        yield model(f"net: weights {name}", next(nets), ["--model", "net"],
                    change("net/model.safetensors", how),
                    "one line")
    make = weights(lambda old: {name: spoilt(x) for name, x in old.items()}, "net")
    yield model("net: weights of nan", "simclr", ["--model", "net"], make, "one line", late=True)
    for (script, flag), path in zip(USES[::3], ("few.csv", "net", "e", "documents.txt")):
        make = lambda here: (here / "e").symlink_to("e")
        yield model(f"{flag} {path}", script, [flag, path], make, "one line")


# ── --out ──

OUTS = {"few.csv": None, "few.csv/out": None, "bert": None, "half": None, ".": None, "/proc/x": None,
        "/dev/null": None, "o" * 300: None, "link": lambda here: (here / "link").symlink_to("none/x"),
        "itself": lambda here: (here / "itself").symlink_to("itself"),
        "pipe": lambda here: os.mkfifo(here / "pipe"),
        "bare": lambda here: os.mkdir(here / "bare", 0o500),
        "bare/x": lambda here: os.mkdir(here / "bare", 0o500)}
HALF = ["--steps", "2", "--resume", "--out", "half"]
COMMAND, NUMBER = b'"command": [', b'"command": 7, "x": ['
FILES = ["state.pt", "args.json", "metrics.jsonl", "model.safetensors", "tokens/ids", "tokens/ends"]
DAMAGES = {"empty": lambda old: b"", "truncated": lambda old: old[: len(old) // 2],
           "zeroed": lambda old: bytes(len(old)),
           "longer": lambda old: old + b"junk junk", "flipped": lambda old: flipped(old)}


def state(**more):
    def make(here):
        path = here / "half/state.pt"
        torch.save(torch.load(path, weights_only=True) | more, path)
    return make


def command(*words, folder="half"):
    """args.json says that the run was started with these words too."""
    def make(here):
        path = here / folder / "args.json"
        flags = json.loads(path.read_text())
        path.write_text(json.dumps(flags | {"command": [*flags["command"], *words]}))
    return make


RESUMED = {
    "a command of numbers": command(1), "NUL in the command": command("--data", "few.csv\0"),
    "no such flag in the command": command("--no-such"), "another --lr in the command": command("--lr", "1"),
    "no file in the command": command("--dev", "none.tsv"),
    "the command is a number": change("half/args.json", lambda old: old.replace(COMMAND, NUMBER)),
    **{f"{file} {name}": change(f"half/{file}", how)
       for file, (name, how) in itertools.product(FILES, DAMAGES.items())},
    **{f"{file} missing": put(f"half/{file}") for file in FILES},
    **{f"{file} is a pipe": pipe(f"half/{file}") for file in FILES},
    "state.pt is a program": put("half/state.pt", RUNS),
    "an archive that runs": torch_saves("half/state.pt", Bomb()),
    "state.pt is a list": torch_saves("half/state.pt", [1]),
    "args.json is a list": put("half/args.json", "[]"),
    "metrics.jsonl is a list": put("half/metrics.jsonl", "[1]\n"),
    "no step": put("half/metrics.jsonl", "{}\n"),
    "no model": state(model={}), "step 10**9": state(progress={"step": 10**9}), "no random": state(random=[])}


def of_outs():
    scripts = itertools.cycle(["simcse", "moco", "tacl", "childtuning", "cline"])
    for path, make in OUTS.items():
        yield out(f"--out {path[:9]}", next(scripts), ["--out", path], make, "one line", bound=True)
    yield out("in --data", "moco", ["--data", "photos", "--out", "photos/out"], photos(), "one line")
    for name, make in RESUMED.items():
        yield out(f"--resume: {name}", "simcse", HALF, make, like=[*HALF[:-1], "twin"])
    yield out("--resume: other flags", "simcse", [*HALF, "--lr", "1"], None, "one line")
    yield out("--resume: another script", "vascl", HALF, None, "one line")
    other = change("few.csv", lambda old: old[:200] + old[200:].replace(b"a", b"e", 1))
    yield out("--resume: other data", "simcse", HALF, other, "one line")
    yield out("--resume: whole", "simcse", HALF, None, "accepted", like=[*HALF[:-1], "twin"])


def cases():
    yield from of_models()
    yield from of_outs()
