"""Models, runs and data of strangers contain programs. None of them runs: the script refuses the input by one
line, or trains without the program.

A program writes the file `pwned`. It is a pickle, or the module own.py. A second test shows that these programs
work: careless readers run them.
"""
import contextlib
import io
import os
import pickle
import re
import runpy
import sys

import numpy as np
import pytest
import torch
import transformers
from command import run
from good import change_files, with_settings, words

OWN = dict.fromkeys([f"Auto{kind}" for kind in ("Config", "Model", "ModelForMaskedLM", "ModelForCausalLM",
                     "ModelForSequenceClassification", "ImageProcessor")], "own.Own")
INNER = {"model_type": "trocr", "auto_map": {"AutoModel": "bert--own.Own"}}    # transformers has no AutoModel of it
OWN_TOKENIZER = {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}, "tokenizer_class": "Own"}


class Bomb:
    """Object that writes a file when it is unpickled. `text` is a Python program that does the same."""

    def __init__(self, path):
        self.text = f"open({str(path)!r}, 'w').close()"

    def __reduce__(self):
        return exec, (self.text,)


# ── programs: functions of a Bomb, and of the old content of the file, that return its new content ──


def settings(**more):
    return lambda bomb, old: with_settings(**more)(old)


def pickled(bomb, old=None):
    return pickle.dumps(bomb, 2)


def archive(value, old=None):
    torch.save(value, file := io.BytesIO())
    return file.getvalue()


def in_state(part):
    return lambda bomb, old: archive(torch.load(io.BytesIO(old), weights_only=True) | {part: bomb})


def npy(bomb, old=None):
    np.save(file := io.BytesIO(), np.array([bomb] * 16, object), allow_pickle=True)
    return file.getvalue()


def npy_header(bomb, old=None):
    """Return an .npy file whose header, a Python expression, is a program."""
    text = f"exec({bomb.text!r})\n".encode()
    return b"\x93NUMPY\x01\0" + len(text).to_bytes(2, "little") + text


def npz(name):
    def make(bomb, old=None):
        arrays = dict(images=np.zeros((16, 16, 16, 3), np.uint8), labels=np.arange(16) % 2)
        np.savez(file := io.BytesIO(), **arrays | {name: np.array([bomb] * 16, object)})
        return file.getvalue()
    return make


def cifar(protocol):
    batch = {b"data": np.zeros((16, 3072), np.uint8), b"labels": [0, 1] * 8}
    return lambda bomb, old=None: pickle.dumps(batch | {b"batch_label": bomb}, protocol)


# ── careless readers: functions of the path of the program ──


def trust(kind):
    return lambda path: getattr(transformers, kind).from_pretrained(path.parent, trust_remote_code=True)


def unpickle(path):
    torch.load(path, weights_only=False)


def read_arrays(path):
    found = np.load(path, allow_pickle=True)
    [*found.values()] if path.suffix == ".npz" else found


def read_header(path):
    eval(path.read_bytes()[10:])


def import_own(path):
    runpy.run_path(path.parent / "own.py")


# ── inputs ──

HALF, STATE, BIN, DENSE = "simcse --out half --resume", "half/state.pt", "bert/pytorch_model.bin", "bert/dense/"
MODEL, OWN_MODEL = "bert/config.json", settings(auto_map=OWN, model_type="own")
TOKENS, OWN_TOKENS = "bert/tokenizer_config.json", settings(
    auto_map={"AutoTokenizer": ["own.Own", "own.Own"]}, tokenizer_class="Own")
NO_WEIGHTS = {"bert/model.safetensors": None}
TRANSFORMER = '{"type": "sentence_transformers.models.Transformer", "path": ""}, '
LAYERS = {"bert/modules.json": f'[{TRANSFORMER} {{"type": "sentence_transformers.models.Dense", "path": "dense"}}]',
          "bert/dense/config.json": '{"in_features": 32, "out_features": 32}'}

# command; file that has the program, or names own.py; the program; a careless reader; other files
INPUTS = [
    ("simcse --model bert", MODEL, OWN_MODEL, trust("AutoModel")),
    ("vascl --model bert", MODEL, settings(auto_map=OWN), trust("AutoModel")),
    ("childtuning --model bert", MODEL, OWN_MODEL, trust("AutoModelForSequenceClassification")),
    ("cline --model bert", MODEL, settings(auto_map=OWN), trust("AutoModelForMaskedLM")),
    ("dclr --guide bert", MODEL, OWN_MODEL, trust("AutoModel")),
    ("tacl --model scratch --teacher bert", MODEL, OWN_MODEL, trust("AutoModel")),
    ("ease --model bert --evaluate --dev sts.tsv", MODEL, OWN_MODEL, trust("AutoModel")),
    ("simcse --model bert", MODEL, settings(model_type="encoder-decoder", encoder=INNER, decoder=INNER),
     trust("AutoModel")),
    ("selfguided --model bert", MODEL, settings(model_type="llava", text_config=INNER), trust("AutoModel")),
    ("simcse --model bert", TOKENS, OWN_TOKENS, trust("AutoTokenizer")),
    ("childtuning --model bert", TOKENS, OWN_TOKENS, trust("AutoTokenizer")),
    ("moco --model net", "net/config.json", OWN_MODEL, trust("AutoModel")),
    ("simclr --model net", "net/preprocessor_config.json", settings(auto_map=OWN, image_processor_type="Own"),
     trust("AutoImageProcessor")),
    ("simcse --model bert", "bert/modules.json", lambda *_: f'[{TRANSFORMER} {{"type": "own.Own", "path": ""}}]',
     import_own),
    ("simcse --model bert", BIN, pickled, unpickle, NO_WEIGHTS),
    ("tacl --model scratch --teacher bert", BIN, archive, unpickle, NO_WEIGHTS),
    ("vascl --model bert", f"{DENSE}pytorch_model.bin", pickled, unpickle, LAYERS),
    ("ease --evaluate --dev sts.tsv --model bert", f"{DENSE}pytorch_model.bin", archive, unpickle, LAYERS),
    ("simclr --finetune few.npz --model net", "net/head.safetensors", pickled, unpickle),
    (HALF, STATE, pickled, unpickle), (HALF, STATE, archive, unpickle),
    *((HALF, STATE, in_state(part), unpickle) for part in ("optimizer", "random", "progress", "model", "more")),
    (HALF, "half/args.json", pickled, unpickle),
    (HALF, "half/own.py", lambda bomb, _: bomb.text, import_own, {"half/simcse.py": "import own"}),
    ("moco --data a.npz", "a.npz", npz("images"), read_arrays),
    ("simclr --data a.npz", "a.npz", npz("labels"), read_arrays),
    ("simclr --data a.npz", "a.npz", npz("more"), read_arrays),
    ("moco --data a.npy", "a.npy", npy, read_arrays), ("simclr --data a.npy", "a.npy", npy_header, read_header),
    *(("simclr --data cifar", "cifar/data_batch_1", cifar(protocol), read_arrays) for protocol in (0, 2, 5)),
    ("ease --entity-vectors a.npy", "a.npy", npy, read_arrays)]
each_input = pytest.mark.parametrize("row", INPUTS, ids=[
    f"{i} {command} ({file})" for i, (command, file, *_) in enumerate(INPUTS)])


def write_input(here, file, program, careless, others=None):
    """Write the program, and own.py in each folder. Returns the path that shows that one of them has run."""
    bomb = Bomb(here / "pwned")
    change_files(here, others or {})
    own = {f"{folder}own.py": f"{bomb.text}\nclass Own: pass\n" for folder in ("", "bert/", "net/")}
    old = (here / file).read_bytes() if (here / file).exists() else None
    change_files(here, own | {file: program(bomb, old)})
    return here / "pwned"


def say_yes():
    """Answer "y" to all questions of the command, such as whether to trust a model."""
    read_end, write_end = os.pipe()
    os.write(write_end, b"y\n" * 99)
    os.dup2(read_end, 0)
    sys.stdin = open(0, closefd=False)


@each_input
def test_no_code_runs(row, here):
    mark = write_input(here, *row[1:])
    done = run(words(row[0]), here, setup=say_yes)
    assert not mark.exists()
    one_line = rf"{row[0].split()[0]}\.py: [^\x00-\x1f\x7f]+\n"
    assert done.code == 0 and not done.errors or done.code == 2 and re.fullmatch(one_line, done.errors), done


@each_input
def test_programs_work(row, here, monkeypatch):
    """A careless reader runs the program. If this fails, the test above would not notice anything."""
    mark = write_input(here, *row[1:])
    monkeypatch.chdir(here)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(here / "cache"))
    with contextlib.suppress(Exception):
        row[3](here / row[1])
    assert mark.exists()


@pytest.mark.parametrize("script", ["simcse", "childtuning"])
@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_implementations_are_not_downloaded(name, script, here):
    """A config cannot name compiled code of the hub. Without a network, such a download would be an error."""
    change_files(here, {MODEL: with_settings(**{name: "kernels-community/flash-attn"})})
    done = run(words(f"{script} --model bert"), here)
    assert done.code == 0 and not done.errors
