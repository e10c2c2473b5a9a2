"""What tests of the scripts share: tiny data and models, a run in this process, runs in processes of their
own."""
import contextlib
import csv
import importlib
import io
import json
import multiprocessing
import multiprocessing.forkserver
import os
import re
import socket
import subprocess
import sys
import types
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, BertTokenizer
from transformers.utils import import_utils

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
NLI = list(csv.reader(open(DATA / "nli.csv", newline="", encoding="utf-8")))[1:]
GOOD = "A man eats.,He eats.\nA dog runs.,It runs.\nThe sun is up.,It is day.\n"          # good.csv of `here`
SMALL = ["--data", "good.csv", "--model", "scratch", "--batch-size", "2", "--steps", "1"]
KEPT = [*SMALL, "--keep-state", "always"]
ONE_BATCH = ["--batch-size", "12", "--max-length", "512", "--steps", "1"]        # of 12 rows, whole
SENTENCES = [[line] for line in (DATA / "sentences.txt").read_text(encoding="utf-8").splitlines()]


def small_bert(folder):
    letters = sorted(set("".join(cell for row in NLI + SENTENCES for cell in row).lower()) - {" "})
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + letter for letter in letters)]
    shape = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64)
    off = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(pieces), initializer_range=0.2, **shape, **off)
    BertModel(config).save_pretrained(folder)
    BertTokenizer({piece: i for i, piece in enumerate(pieces)}, model_max_length=512).save_pretrained(folder)
    return folder


def run(name, out, *flags):
    """main(flags) in this process: what it writes, what it says by label, its Run, and the norm of each
    gradient."""
    script, made, norms = importlib.import_module(name), [], []
    start, add_up = script.Run, script.sum_gradients
    keep = [] if "--keep-state" in flags else ["--keep-state", "always"]       # for `state`

    def measured(model):
        add_up(model)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as lines:
        patch.setattr(script, "Run", lambda *args: made.append(start(*args)) or made[0])
        patch.setattr(script, "sum_gradients", measured)
        patch.setattr("kernels.training.extras.sentence_papers.sum_gradients", measured)   # simcse's other
        script.main([*map(str, flags), "--out", str(out), *keep])
    said = dict(line.split(None, 1) for line in lines.getvalue().splitlines())
    steps, state = metrics(out), torch.load(out / "state.pt", weights_only=True)
    losses = [step["loss"] for step in steps]
    return SimpleNamespace(script=script, run=made[0], args=made[0].args, model=made[0].model, norms=norms,
                           said=said, state=state, steps=steps, losses=losses)


def run_text(name, folder, rows, *flags):
    """The same on these rows; one column is a .txt."""
    folder.mkdir(exist_ok=True)
    file = folder / ("data.txt" if len(rows[0]) == 1 else "data.json")
    file.write_text(json.dumps(rows) if file.suffix == ".json" else "\n".join(row[0] for row in rows))
    return run(name, folder / "out", "--data", file, *flags)


def metrics(out):
    """Rows of steps, without the scores before the first step."""
    return [row for row in map(json.loads, open(out / "metrics.jsonl")) if row["step"]]


def saved_weights(out):
    """Of the encoder in a folder, without the pooler that no embedding uses."""
    weights = load_file(out / "model.safetensors")
    return {name: x for name, x in weights.items() if not name.startswith("pooler.")}


def equal(a, b):
    """To the bit, dicts and lists through."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


# a test's processes are forks of one that has imported all of this
multiprocessing.set_forkserver_preload([
    *(path.stem for path in ROOT.glob("*.py")), "running", "transformers.models.bert.modeling_bert"])


def forks():
    """The context of such processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # Python 3.11's does not get this one's path
        multiprocessing.forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def in_processes(world, name, out, flags):
    """The norms of the gradients of a run in so many processes, as rank 0 has them."""
    arguments = world, free_port(), name, out, flags
    forks()
    torch.multiprocessing.start_processes(one_of_several, arguments, world, start_method="forkserver")
    return torch.load(out / "norms")


def one_of_several(rank, world, port, name, out, flags):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    torch.cuda.is_available = lambda: False
    torch.set_num_threads(1)
    if rank:                                                   # what rank 0 writes may not be there yet
        importlib.import_module(name).main([*map(str, flags), "--out", str(out)])
    else:
        torch.save(run(name, out, *flags).norms, out / "norms")


def start(name, out, *flags, before=None, **variables):
    """The script in a process of its own."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | variables
    command = [sys.executable, "-u", f"{name}.py", *flags, "--out", out]
    return subprocess.Popen([*map(str, command)], cwd=ROOT, env=env, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, preexec_fn=before)


def refuse(name, capfd, wanted, *argv):
    """main ends with exit code 2 and one line on stderr that fits; every file of the working folder is as it
    was."""
    module = name if isinstance(name, types.ModuleType) else importlib.import_module(name)
    name = module.__name__.rpartition(".")[2]
    before = {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}
    with pytest.raises(SystemExit) as end:
        module.main([*map(str, argv)])
    err = capfd.readouterr().err
    assert end.value.code == 2
    assert re.fullmatch(rf"{name}\.py: {wanted}\n", err), err  # . fits no newline: one line
    assert {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")} == before


def one_by_one(encoder, tokenizer, sentences, pooling):
    """(n, H) by the definitions, one sentence after the other: no padding."""
    layers = {"avg": [-1], "avg_top2": [-2, -1], "avg_first_last": [1, -1]}.get(pooling)  # 0: word embeddings
    rows = []
    for tokens in (tokenizer(sentence, return_tensors="pt") for sentence in sentences):
        with torch.no_grad():
            output = encoder.eval()(**tokens, output_hidden_states=True)
        states = output.hidden_states
        bare = states[-1][0, -1 if pooling == "last" else 0]
        mean = torch.stack([states[i][0].mean(0) for i in layers]).mean(0) if layers else bare
        rows.append(output.pooler_output[0] if pooling == "pooler" else mean)
    return torch.stack(rows)


def embed_saved(folder, sentences, pooling):
    """The same of a folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return one_by_one(AutoModel.from_pretrained(folder), tokenizer, sentences, pooling)


def install_for_transformers(folder):
    """Write a package that transformers takes for the real one. It has every name, and notes what is used."""
    version = getattr(import_utils, "KERNELS_MIN_VERSION", "0.17.2")
    (folder / "kernels").mkdir(parents=True)
    (folder / "kernels-1.dist-info").mkdir()
    (folder / "kernels-1.dist-info/METADATA").write_text(f"Name: kernels\nVersion: {version}\n")
    (folder / "kernels/__init__.py").write_text("""
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    with open(__file__ + ".used", "a") as file:
        print(name, file=file)
    if name.startswith("use_kernel"):
        return lambda *_, **more: lambda decorated: decorated
    modes = {"INFERENCE": 1, "TRAINING": 2, "TORCH_COMPILE": 4}
    return type(name, (), {"__init__": lambda *_, **more: None, **modes})
""")
    return folder


class Memory(TorchDispatchMode):
    """The most MB that results of operations hold at a time; a kernel is one operation."""
    held = peak = 0

    def __init__(self):
        super().__init__()
        self.seen = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if torch.is_tensor(x) and (storage := x.untyped_storage()) not in self.seen:  # views share one
                self.seen.add(storage)
                self.add(storage.nbytes())
                weakref.finalize(storage, self.add, -storage.nbytes())
        return result

    def add(self, size):
        self.held += size / 2**20
        self.peak = max(self.peak, self.held)
