"""Models, runs and data from strangers can contain programs: a pickle, or own.py, which a setting names.
A script runs none of them. It refuses the input with one line, or trains without the program. A program that
runs writes the file `pwned`. A second test reads each input carelessly, to show that the program works.
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

from good import change_files, with_settings, words
from running import run_command


class Bomb:
    """An object that, when it is unpickled, runs the program `text`, which writes the file at `path`."""
    def __init__(self, path):
        self.text = f"open({str(path)!r}, 'w').close()"

    def __reduce__(self):
        return exec, (self.text,)


def written(write, value):
    """Return the bytes that write(value, file) writes."""
    write(value, file := io.BytesIO())
    return file.getvalue()


# Each of these functions gets a Bomb and a file's old bytes. It returns new bytes that contain a program.
pickled = lambda bomb, old: pickle.dumps(bomb, 2)
archive = lambda bomb, old: written(torch.save, bomb)
in_state = lambda part: lambda bomb, old: written(torch.save, torch.load(io.BytesIO(old)) | {part: bomb})
objects = lambda bomb: np.array([bomb] * 16, object)
npz = lambda bomb, old: written(lambda value, file: np.savez(file, images=value), objects(bomb))
cifar = lambda bomb, old: pickle.dumps(
    {b"batch_label": bomb, b"data": np.zeros((16, 3072), np.uint8), b"labels": [0, 1] * 8}, 5)
settings = lambda **more: lambda bomb, old: with_settings(**more)(old)
# careless readers: functions that open the file at a path and run the program in it
trust = lambda kind: lambda path: getattr(transformers, kind).from_pretrained(
    path.parent, trust_remote_code=True)
unpickle = lambda path: torch.load(io.BytesIO(path.read_bytes()), weights_only=False)
read_images = lambda path: np.load(path, allow_pickle=True)["images"]
import_own = lambda path: runpy.run_path(path.with_name("own.py"))

OWN = dict.fromkeys([f"Auto{kind}" for kind in "Config Model ModelForMaskedLM ModelForSequenceClassification "
                     "ImageProcessor".split()], "own.Own")
OWN_MODEL = settings(auto_map=OWN, model_type="own")
OWN_PART = settings(auto_map=OWN, image_processor_type="Own")  # transformers knows this model_type
OWN_TOKENIZER = settings(auto_map={"AutoTokenizer": ["own.Own", "own.Own"]}, tokenizer_class="Own")
# transformers has no AutoModel for trocr. If a model contains trocr, it asks whether to run own.py.
INNER = dict(model_type="trocr", auto_map={"AutoModel": "bert--own.Own"})
NESTED = settings(model_type="llava", text_config=INNER, vision_config=INNER)
LAYERS = '[{"type": "sentence_transformers.models.Transformer", "path": ""}, {"type": "%s", "path": "dense"}]'
DENSE = {"bert/modules.json": LAYERS % "sentence_transformers.models.Dense",
         "bert/dense/config.json": '{"in_features": 32, "out_features": 32}'}
NO_WEIGHTS, HALF = {"bert/model.safetensors": None}, "simcse --out half --resume"
# (command, file with a program or the name of own.py, its content, careless reader, other files)
INPUTS = [
    ("simcse --model bert", "bert/config.json", OWN_MODEL, trust("AutoModel")),
    ("childtuning --model bert", "bert/config.json", OWN_MODEL, trust("AutoModelForSequenceClassification")),
    ("tacl --teacher bert", "bert/config.json", OWN_MODEL, trust("AutoModel")),
    ("selfguided --model bert", "bert/config.json", NESTED, trust("AutoModel")),
    ("simcse --model bert", "bert/tokenizer_config.json", OWN_TOKENIZER, trust("AutoTokenizer")),
    ("moco --model net", "net/config.json", OWN_MODEL, trust("AutoModel")),
    ("simclr --model net", "net/preprocessor_config.json", OWN_PART, trust("AutoImageProcessor")),
    ("simcse --model bert", "bert/modules.json", lambda *_: LAYERS % "own.Own", import_own),
    ("simcse --model bert", "bert/pytorch_model.bin", pickled, unpickle, NO_WEIGHTS),
    ("ease --model bert --evaluate --dev sts.tsv", "bert/dense/pytorch_model.bin", archive, unpickle, DENSE),
    ("docs/more/simclr_v2 --model net", "net/head.safetensors", pickled, unpickle),
    (HALF, "half/state.pt", pickled, unpickle), (HALF, "half/state.pt", in_state("random"), unpickle),
    ("moco --data a.npz", "a.npz", npz, read_images),
    ("simclr --data cifar", "cifar/data_batch_1", cifar, read_images)]
each_input = pytest.mark.parametrize("number", range(len(INPUTS)), ids=lambda i: ", ".join(INPUTS[i][:2]))


def write_input(here, _, file, content, __, others=()):
    """Write the files of an input, and own.py in each folder. Return the path that a program would write."""
    bomb = Bomb(here / "pwned")
    own = {f"{folder}own.py": f"{bomb.text}\nclass Own: pass\n" for folder in ("", "bert/", "net/")}
    change_files(here, own | dict(others) | {file: lambda old: content(bomb, old)})
    return here / "pwned"


def say_yes():
    """Make stdin answer "y" to each question of a command, such as whether to trust a model."""
    read_end, write_end = os.pipe()
    os.write(write_end, b"y\n" * 99)
    os.dup2(read_end, 0)
    sys.stdin = open(0, closefd=False)


@each_input
def test_no_code_runs(number, here):
    mark, (command, *_) = write_input(here, *INPUTS[number]), INPUTS[number]
    done = run_command(words(command), here, setup=say_yes)
    assert not mark.exists()
    refusal = rf"{os.path.basename(command.split()[0])}\.py: [^\x00-\x1f\x7f]+\n"
    assert done.code == 0 and not done.errors or done.code == 2 and re.fullmatch(refusal, done.errors), done


@each_input
def test_programs_work(number, here, monkeypatch):
    """A careless reader runs each program, so test_no_code_runs would fail if a script ran it."""
    _, file, _, careless, *_ = INPUTS[number]
    mark = write_input(here, *INPUTS[number])
    monkeypatch.chdir(here)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(here / "cache"))
    with contextlib.suppress(Exception):
        careless(here / file)
    assert mark.exists()


@pytest.mark.parametrize("name, script", [("attn_implementation", "simcse"),
                                          ("experts_implementation", "childtuning")])
def test_no_code_of_the_hub_is_downloaded(name, script, here):
    """A config can name compiled kernels on the hub. Tests are offline, so a download would be an error."""
    change_files(here, {"bert/config.json": with_settings(**{name: "kernels-community/flash-attn"})})
    done = run_command(words(f"{script} --model bert"), here)
    assert done.code == 0 and not done.errors
