"""Run a script in a new process, as a user does, or its main in this process, on tiny data and models.

`run_command` and `train` start a process, for tests of output, files and exit codes. `run` calls main in
this process, for tests of the model and of the losses. A server imports PyTorch, transformers and the scripts
once, and new processes are forked from this server. Else each process would spend five seconds on imports.
"""
import contextlib
import csv
import functools
import importlib
import io
import json
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import socket
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, BertTokenizer

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py"))
MORE = sorted(f"docs/more/{path.stem}" for path in ROOT.glob("docs/more/*.py")     # scripts of further papers
              if "def make_parser" in path.read_text("utf-8"))
NLI = list(csv.reader(open(DATA / "nli.csv", newline="", encoding="utf-8")))[1:]
GOOD = "A man eats.,He eats.\nA dog runs.,It runs.\nThe sun is up.,It is day.\n"    # text of good.csv
SMALL = ["--data", "good.csv", "--model", "scratch", "--batch-size", "2", "--steps", "1"]
KEPT = [*SMALL, "--keep-state", "always"]
ONE_BATCH = ["--batch-size", "12", "--max-length", "512", "--steps", "1"]        # one step with 12 whole rows
SENTENCES = [[line] for line in (DATA / "sentences.txt").read_text(encoding="utf-8").splitlines()]

# ── data and models ─────────────────────────────────────────────────────────────────────────────────────────


def few_pairs(folder, rows=10):
    """Write the first `rows` scored pairs of sts.tsv to a new file for --dev, and return its path."""
    lines = (DATA / "sts.tsv").read_bytes().splitlines(True)
    (folder / "few.tsv").write_bytes(b"".join(lines[: 1 + rows]))
    return folder / "few.tsv"


def small_bert(folder):
    """Write a small random BERT with one token per character to the folder, and return the folder."""
    characters = sorted(set("".join(cell for row in NLI + SENTENCES for cell in row).lower()) - {" "})
    inside = ["##" + character for character in characters]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *inside]
    shape = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64)
    off = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(pieces), initializer_range=0.2, **shape, **off)
    BertModel(config).save_pretrained(folder)
    BertTokenizer({piece: i for i, piece in enumerate(pieces)}, model_max_length=512).save_pretrained(folder)
    return folder


# ── run a script in a new process ───────────────────────────────────────────────────────────────────────────


# Processes are forked from a server that has imported these modules.
multiprocessing.set_forkserver_preload([*SCRIPTS, "running", "transformers.models.bert.modeling_bert"])
with contextlib.suppress(ImportError):                         # some versions of transformers lack the module
    # Loading or saving a model compiles 900 regular expressions. The call below compiles them once.
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    get_checkpoint_conversion_mapping("bert")


def fork_context():
    """Start the fork server and return its multiprocessing context."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # Python 3.11 passes no sys.path to the server
        multiprocessing.forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def start(words, folder, setup=None):
    """Start a process that does what `python WORDS` does in a folder, and return the process.

    words    the script's name without .py, then its flags; the name of a further paper is docs/more/NAME
    setup    function that the process calls before the script, for example to limit the memory
    """
    name, *flags = map(str, words)
    process = fork_context().Process(target=become_script, args=(name, flags, str(folder), setup))
    process.start()
    return process


def become_script(name, flags, folder, setup):
    """Run a script in this new process. Write stdout to the file `printed`, and stderr to `errors`."""
    os.chdir(folder)
    for path, descriptor in (("printed", 1), ("errors", 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    multiprocessing.set_start_method(None, force=True)         # a new Python process has no start method
    if setup:
        setup()
    sys.argv = [f"{name}.py", *flags]
    sys.path.insert(0, str(ROOT / Path(name).parent))          # Python also adds the folder of a script
    runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")


def start_rank(rank, count, port, words, folder, setup=None):
    """Start process `rank` of `count` in a new folder, as torchrun would if count > 1, and return it."""
    Path(folder).mkdir(parents=True)
    return start(words, folder, functools.partial(become_rank, rank, count, port, setup))


def become_rank(rank, count, port, setup):
    if count > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if setup:
        setup()


def run_ranks(function, count, *args):
    """Call function(rank, *args) in `count` new processes, which form a group."""
    fork_context()
    torch.multiprocessing.start_processes(
        call_in_group, (count, free_port(), function, args), count, start_method="forkserver")


def call_in_group(rank, count, port, function, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
    function(rank, *args)
    dist.barrier()
    dist.destroy_process_group()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def end(process):
    """Wait for a process and return its exit code. A process that hangs is killed after 60 seconds."""
    process.join(60)
    process.kill()
    process.join()
    return process.exitcode


def run_command(words, folder, **more):
    """Run `python WORDS` in a folder to its end. more: further arguments of `start`.

    returns  code: exit code, or minus the number of a signal; printed: stdout; errors: stderr
    """
    code = end(start(words, folder, **more))
    printed, errors = (Path(folder, name).read_text("utf-8") for name in ("printed", "errors"))
    return SimpleNamespace(code=code, printed=printed, errors=errors)


def train(words, folder, **more):
    """Run a command, check that its exit code is 0, and return its stdout."""
    done = run_command(words, folder, **more)
    assert done.code == 0, done.errors
    return done.printed


# ── run a script's main in this process ─────────────────────────────────────────────────────────────────────


def run(name, out, *flags):
    """Run a script's main in this process.

    returns   script: its module; run: its Run; args, model: those of the Run; norms, losses: gradient
              norm and loss of each step; state: content of state.pt; steps: rows of metrics.jsonl but
              row 0; said: {first word: rest} of the printed lines
    """
    script, runs, norms = importlib.import_module(name), [], []
    real_run, real_all_reduce = script.Run, script.all_reduce_gradients
    keep = [] if "--keep-state" in flags else ["--keep-state", "always"]       # state.pt is read below

    def make_run(*args):
        runs.append(real_run(*args))
        return runs[0]

    def all_reduce_and_measure(model):
        """Record the norm of the gradients after the all-reduce."""
        real_all_reduce(model)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as lines:
        patch.setattr(script, "Run", make_run)
        patch.setattr(script, "all_reduce_gradients", all_reduce_and_measure)
        script.main([*map(str, flags), "--out", str(out), *keep])
    said = dict(line.split(None, 1) for line in lines.getvalue().splitlines())
    steps = [row for row in metrics(out) if row["step"]]       # row 0 has the scores before training
    state = torch.load(out / "state.pt", weights_only=True)
    losses = [step["loss"] for step in steps]
    return SimpleNamespace(script=script, run=runs[0], args=runs[0].args, model=runs[0].model, norms=norms,
                           said=said, state=state, steps=steps, losses=losses)


def write_table(path, rows, header=None):
    """Write rows to a .csv file or, as one JSON value per line, to a .jsonl file. Return its path."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        if path.suffix == ".csv":
            csv.writer(file).writerows([header, *rows] if header else rows)
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def mask_every_fourth(ids, maskable, tokenizer):
    """Mask tokens whose id is a multiple of 4. The masks of mask_tokens depend on batch and process."""
    is_masked = maskable & (ids % 4 == 0)
    return torch.where(is_masked, tokenizer.mask_token_id, ids), is_masked


def run_text(name, folder, rows, *flags):
    """Write rows to a data file (.txt for one column, else .json), and run a script on this file."""
    folder.mkdir(exist_ok=True)
    file = folder / ("data.txt" if len(rows[0]) == 1 else "data.json")
    file.write_text(json.dumps(rows) if file.suffix == ".json" else "\n".join(row[0] for row in rows))
    return run(name, folder / "out", "--data", file, *flags)


# ── output and memory of a run ──────────────────────────────────────────────────────────────────────────────


def metrics(out):
    """Return the rows of metrics.jsonl. Row 0 has the scores before training, if the run has computed any."""
    return [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]


def weights(out):
    """Return {(file name, tensor name): bytes} of all tensors in the .safetensors files inside a folder."""
    return {(path.name, name): x.reshape(-1).view(torch.uint8).numpy().tobytes()
            for path in Path(out).rglob("*.safetensors") for name, x in load_file(path).items()}


def saved_weights(out):
    """Return {name: weight} of the encoder in a folder, without the pooler, which embeddings do not use."""
    weights = load_file(out / "model.safetensors")
    return {name: x for name, x in weights.items() if not name.startswith("pooler.")}


def equal(a, b):
    """Return whether two values are bitwise equal; dicts and lists are compared recursively."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


def embed_unbatched(encoder, tokenizer, sentences, pooling):
    """Return embeddings (n, H) by the pooling's definition, from one sentence at a time, without padding."""
    # indices into hidden_states; 0 would be the word embeddings
    layers = {"avg": [-1], "avg_top2": [-2, -1], "avg_first_last": [1, -1]}.get(pooling)
    rows = []
    for tokens in (tokenizer(sentence, return_tensors="pt") for sentence in sentences):
        with torch.no_grad():
            output = encoder.eval()(**tokens, output_hidden_states=True)
        states = output.hidden_states
        if pooling == "pooler":
            rows.append(output.pooler_output[0])
        elif layers:
            rows.append(torch.stack([states[i][0].mean(0) for i in layers]).mean(0))
        else:
            rows.append(states[-1][0, -1 if pooling == "last" else 0])
    return torch.stack(rows)


def embed_saved(folder, sentences, pooling):
    """Return what embed_unbatched returns for the model and the tokenizer in a folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return embed_unbatched(AutoModel.from_pretrained(folder), tokenizer, sentences, pooling)


class Memory(TorchDispatchMode):
    """Measure the peak MiB of tensors that PyTorch's operations return, without buffers inside operations."""

    def __init__(self):
        super().__init__()
        self.allocated, self.peak = 0, 0
        self.seen = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            storage = x.untyped_storage() if torch.is_tensor(x) else None
            if storage is not None and storage not in self.seen:               # views share a storage
                self.seen.add(storage)
                self.add(storage.nbytes())
                weakref.finalize(storage, self.add, -storage.nbytes())
        return result

    def add(self, size):
        self.allocated += size / 2**20
        self.peak = max(self.peak, self.allocated)
