"""Bad folders: models that are damaged, huge or contain programs; an --out that cannot be written; runs that
--resume cannot read."""
import itertools
import json
import os
import pickle
import struct
from functools import partial

import torch
from cases import Case, all_of, change_file, write_file
from images import Bomb, write_photos
from safetensors.torch import load, save
from texts import NOISE, flip_bits

model_case, out_case = partial(Case, "folders", stdin=b"y\n" * 9), partial(Case, "out", may_leave_out=True)
MODEL_FLAGS = [("simcse", "--model"), ("vascl", "--model"), ("selfguided", "--model"), ("ease", "--model"),
               ("cline", "--model"), ("tacl", "--model"), ("dclr", "--model"), ("dclr", "--guide"),
               ("childtuning", "--model"), ("tacl", "--teacher")]
CODE = {kind: f"code.{kind}" for kind in ("AutoConfig", "AutoModel", "AutoModelForMaskedLM",
                                          "AutoModelForSequenceClassification")}      # for "auto_map"
PICKLED_BOMB = pickle.dumps(Bomb(), 2)
write_bomb = write_file("bert/code.py", Bomb.write)


def change_settings(file="config.json", folder="bert", **more):
    """Return a `make` that sets values in a JSON file."""
    return change_file(f"{folder}/{file}", lambda old: json.dumps(json.loads(old) | more).encode())


def change_weights(edit, folder="bert"):
    """Return a `make` that replaces a model's weights by edit({name: tensor})."""
    return change_file(f"{folder}/model.safetensors", lambda old: save({
        name: tensor.contiguous() for name, tensor in edit(load(old)).items()}))


def to_nan(x):
    return x * torch.nan if x.is_floating_point() else x


def replace_weights(name, content):
    """Return a `make` that replaces model.safetensors by this file."""
    return all_of(write_file("bert/model.safetensors"), write_file(f"bert/{name}", content))


def make_pipe(name):
    """Return a `make` that replaces a file by a named pipe."""
    return all_of(write_file(name), lambda here: os.mkfifo(here / name))


def torch_save_to(name, value):
    """Return a `make` that saves the value with torch.save."""
    return lambda here: torch.save(value, here / name)


# {name: make} of models that a script must refuse
REFUSED = {
    "auto_map": all_of(write_bomb, change_settings(auto_map=CODE, model_type="own")),
    **{f"config: {name}": write_file("bert/config.json", data) for name, data in {
        "missing": None, "empty": "", "a list": "[]", "a text": '"bert"', "half": '{"model_type": "bert",',
        "utf-16": '{"model_type": "bert"}'.encode("utf-16"), "nested deeply": '{"a":' * 10**5}.items()},
    **{f"config: {name} {value}": change_settings(**{name: value}) for name, value in [
        ("model_type", "none"), ("model_type", "gpt2"), ("model_type", "resnet"),
        ("num_hidden_layers", 10**9),
        ("hidden_size", 10**12), ("hidden_size", -1), ("hidden_size", 0), ("hidden_size", "wide"),
        ("hidden_size", 64), ("num_attention_heads", 7), ("num_attention_heads", 0), ("vocab_size", 10**12),
        ("vocab_size", 20), ("intermediate_size", 10**12), ("hidden_act", "exec"),
        ("hidden_dropout_prob", 2)]},
    "config: a pipe": make_pipe("bert/config.json"),
    **{f"weights: {name}": write_file("bert/model.safetensors", data) for name, data in {
        "missing": None, "empty": b"", "noise": NOISE, "a pickle": PICKLED_BOMB,
        "a head of 2**60": struct.pack("<Q", 2**60) + b"{}"}.items()},
    "weights: half": change_file("bert/model.safetensors", lambda old: old[: len(old) // 2]),
    "weights: a pipe": make_pipe("bert/model.safetensors"),
    "weights: other shapes": change_weights(lambda old: {name: x[:3] for name, x in old.items()}),
    "weights: every second": change_weights(lambda old: dict(list(old.items())[::2])),
    "weights: a pickle that runs": replace_weights("pytorch_model.bin", PICKLED_BOMB),
    "weights: an archive that runs": all_of(write_file("bert/model.safetensors"),
                                            torch_save_to("bert/pytorch_model.bin", Bomb())),
    "weights: shards elsewhere": replace_weights("model.safetensors.index.json", json.dumps(
        {"metadata": {}, "weight_map": {"embeddings.word_embeddings.weight": "../../x.safetensors"}})),
    **{f"tokenizer: {name}": write_file("bert/tokenizer.json", data) for name, data in {
        "missing": None, "empty": "{}", "half": '{"version": "1.0"', "noise": NOISE}.items()},
    "tokenizer: a pipe": make_pipe("bert/tokenizer.json"),
    "tokenizer: no settings": write_file("bert/tokenizer_config.json", "x"),
    "an adapter alone": all_of(write_file("bert/config.json"), write_file("bert/adapter_config.json", "{}"))}
EITHER = {
    "auto_map beside a known kind": all_of(write_bomb, change_settings(auto_map=CODE)),
    "auto_map of a tokenizer": all_of(write_bomb, change_settings(
        "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["code.Own"] * 2})),
    "4 positions": change_settings(max_position_embeddings=4),
    "no activation": change_settings(hidden_act=None),
    "a classifier": change_settings(architectures=["BertForSequenceClassification"]),
    "float3": change_settings(dtype="float3"),
    "quantised": change_settings(quantization_config={"quant_method": "exec"}),
    "an adapter beside": write_file("bert/adapter_config.json", '{"base_model_name_or_path": "../x"}'),
    "integers": change_weights(lambda old: {name: x.to(torch.int8) for name, x in old.items()}),
    "more weights": change_weights(lambda old: old | {"more.weight": torch.ones(3)}),
    **{f"bits of {file}": change_file(f"bert/{file}", lambda old: flip_bits(old))
       for file in ("tokenizer.json", "config.json", "model.safetensors")}}
NET_SETTINGS = [("depths", [10**9] * 4), ("hidden_sizes", [10**12] * 4), ("hidden_sizes", []),
                ("num_channels", 4), ("depths", [-1] * 4), ("depths", "x"),
                ("auto_map", {"AutoModel": "code.Runs"}),
                ("auto_map", {"AutoModel": "a/b--code.Runs"})]


def write_modules(*parts, **files):
    """Return a `make` that writes modules.json and config.json files of modules.

    parts   entries of modules.json: (type, path), or any JSON value
    files   {path of a module: its settings}
    """
    whole = [dict(idx=i, name=str(i), type=f"sentence_transformers.models.{part[0]}", path=part[1])
             if isinstance(part, tuple) else part for i, part in enumerate(parts)]
    return all_of(write_file("bert/modules.json", json.dumps(whole)),
                  *(write_file(f"bert/{path}/config.json", json.dumps(text)) for path, text in files.items()))


BERT, DENSE = ("Transformer", ""), ("Dense", "dense")
dense_layer = write_modules(BERT, DENSE, dense=dict(in_features=32, out_features=32))
LAYOUTS = {
    "elsewhere": write_modules(BERT, ("Dense", "../../x")),
    "at the root": write_modules(BERT, ("Pooling", "/etc")),
    "the encoder elsewhere": write_modules(("Transformer", "../net")),
    "a dict": write_file("bert/modules.json", '{"a": 1}'),
    "numbers": write_modules(1, 2), "a type that runs": write_modules(BERT, {"type": "code.Own", "path": ""}),
    "no type": write_modules(BERT, {"path": ""}), "no path": write_modules({"type": "Transformer"}),
    "a pipe": make_pipe("bert/modules.json"), "half": write_file("bert/modules.json", '[{"idx": 0,'),
    "10**12 wide": write_modules(BERT, DENSE, dense=dict(in_features=10**12, out_features=10**12)),
    "no weights": dense_layer,
    "a pickle that runs": all_of(dense_layer, write_file("bert/dense/pytorch_model.bin", PICKLED_BOMB)),
    "weights of nan": all_of(dense_layer, write_file("bert/dense/model.safetensors", save(
        {"linear.weight": torch.full((32, 32), torch.nan), "linear.bias": torch.zeros(32)}))),
    "settings are a list": write_modules(BERT, ("Pooling", "1"), **{"1": []}),
    "a length in words": all_of(write_modules(BERT), write_file("bert/sentence_bert_config.json",
                                                                '{"max_seq_length": "x"}')),
    "prompts of numbers": all_of(write_modules(BERT), write_file("bert/config_sentence_transformers.json",
                                                                 '{"prompts": [1]}'))}


def model_cases():
    uses, nets = itertools.cycle(MODEL_FLAGS), itertools.cycle(["moco", "simclr"])
    for name, make in (REFUSED | EITHER).items():
        script, flag = next(uses)
        yield model_case(f"{flag}: {name}", script, [flag, "bert"], make,
                         "one line" if name in REFUSED else "either",
                         may_leave_out="bits" in name)         # flipped bits may show only in the loss
    for script, flag in MODEL_FLAGS:
        make = change_weights(lambda old: {name: to_nan(x) for name, x in old.items()})
        yield model_case(f"{flag}: weights of nan", script, [flag, "bert"], make, "one line",
                         may_leave_out=True)
    for name, make in LAYOUTS.items():
        script, _ = MODEL_FLAGS[len(name) % 4]
        yield model_case(f"modules.json: {name}", script, ["--model", "bert"], make,
                         may_leave_out="nan" in name)
    for name in ("auto_map", "auto_map of a tokenizer", "weights: a pickle that runs"):
        yield model_case(f"--evaluate: {name}", "simcse",
                         ["--evaluate", "--model", "bert", "--dev", "sts.tsv"],
                         (REFUSED | EITHER)[name])
    for name, value in NET_SETTINGS:
        make = all_of(change_settings(folder="net", **{name: value}), write_file("net/code.py", Bomb.write))
        yield model_case(f"net: {name} {value}", next(nets), ["--model", "net"], make, "one line")
    for name, edit in {"half": lambda old: old[:-9], "noise": lambda old: NOISE}.items():
        yield model_case(f"net: weights {name}", next(nets), ["--model", "net"],
                         change_file("net/model.safetensors", edit), "one line")
    make = change_weights(lambda old: {name: to_nan(x) for name, x in old.items()}, "net")
    yield model_case("net: weights of nan", "simclr", ["--model", "net"], make, "one line",
                     may_leave_out=True)
    for (script, flag), path in zip(MODEL_FLAGS[::3], ("few.csv", "net", "e", "documents.txt")):
        make = lambda here: (here / "e").symlink_to("e")
        yield model_case(f"{flag} {path}", script, [flag, path], make, "one line")


# ── --out ──

OUTS = {"few.csv": None, "few.csv/out": None, "bert": None, "half": None, ".": None, "/proc/x": None,
        "/dev/null": None, "o" * 300: None, "link": lambda here: (here / "link").symlink_to("none/x"),
        "itself": lambda here: (here / "itself").symlink_to("itself"),
        "pipe": lambda here: os.mkfifo(here / "pipe"),
        "bare": lambda here: os.mkdir(here / "bare", 0o500),
        "bare/x": lambda here: os.mkdir(here / "bare", 0o500)}
RESUME_HALF = ["--steps", "2", "--resume", "--out", "half"]
COMMAND, NUMBER = b'"command": [', b'"command": 7, "x": ['
RUN_FILES = ["state.pt", "args.json", "metrics.jsonl", "model.safetensors", "tokens/ids", "tokens/ends"]
DAMAGES = {"empty": lambda old: b"", "truncated": lambda old: old[: len(old) // 2],
           "zeroed": lambda old: bytes(len(old)),
           "longer": lambda old: old + b"junk junk", "flipped": lambda old: flip_bits(old)}


def change_state(**more):
    """Return a `make` that sets these entries of state.pt."""
    def make(here):
        path = here / "half/state.pt"
        torch.save(torch.load(path, weights_only=True) | more, path)
    return make


def extend_command(*words, folder="half"):
    """Return a `make` that appends these words to the command in args.json."""
    def make(here):
        path = here / folder / "args.json"
        flags = json.loads(path.read_text())
        path.write_text(json.dumps(flags | {"command": [*flags["command"], *words]}))
    return make


DAMAGED_RUNS = {
    "a command of numbers": extend_command(1), "NUL in the command": extend_command("--data", "few.csv\0"),
    "no such flag in the command": extend_command("--no-such"),
    "another --lr in the command": extend_command("--lr", "1"),
    "no file in the command": extend_command("--dev", "none.tsv"),
    "the command is a number": change_file("half/args.json", lambda old: old.replace(COMMAND, NUMBER)),
    **{f"{file} {name}": change_file(f"half/{file}", edit)
       for file, (name, edit) in itertools.product(RUN_FILES, DAMAGES.items())},
    **{f"{file} missing": write_file(f"half/{file}") for file in RUN_FILES},
    **{f"{file} is a pipe": make_pipe(f"half/{file}") for file in RUN_FILES},
    "state.pt is a program": write_file("half/state.pt", PICKLED_BOMB),
    "an archive that runs": torch_save_to("half/state.pt", Bomb()),
    "state.pt is a list": torch_save_to("half/state.pt", [1]),
    "args.json is a list": write_file("half/args.json", "[]"),
    "metrics.jsonl is a list": write_file("half/metrics.jsonl", "[1]\n"),
    "no step": write_file("half/metrics.jsonl", "{}\n"),
    "no model": change_state(model={}), "step 10**9": change_state(progress={"step": 10**9}),
    "no random": change_state(random=[])}


def out_cases():
    scripts = itertools.cycle(["simcse", "moco", "tacl", "childtuning", "cline"])
    for path, make in OUTS.items():
        yield out_case(f"--out {path[:9]}", next(scripts), ["--out", path], make, "one line",
                       enforce_permissions=True)
    yield out_case("in --data", "moco", ["--data", "photos", "--out", "photos/out"], write_photos(),
                   "one line")
    for name, make in DAMAGED_RUNS.items():
        yield out_case(f"--resume: {name}", "simcse", RESUME_HALF, make, same_as=[*RESUME_HALF[:-1], "twin"])
    yield out_case("--resume: other flags", "simcse", [*RESUME_HALF, "--lr", "1"], None, "one line")
    yield out_case("--resume: another script", "vascl", RESUME_HALF, None, "one line")
    other = change_file("few.csv", lambda old: old[:200] + old[200:].replace(b"a", b"e", 1))
    yield out_case("--resume: other data", "simcse", RESUME_HALF, other, "one line")
    yield out_case("--resume: whole", "simcse", RESUME_HALF, None, "accepted",
                   same_as=[*RESUME_HALF[:-1], "twin"])


def cases():
    yield from model_cases()
    yield from out_cases()
