"""Run a script in a new process, as a user does, and read its output and its files.

A server imports PyTorch, transformers and the scripts once, and each process is forked from this server. In a
new Python process these imports would take five seconds.
"""
import functools
import json
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data"
SCRIPTS = "simclr moco simcse selfguided cline tacl ease vascl dclr childtuning".split()
MORE = [f"docs/more/{name}" for name in (
    "consert", "declutr", "simcls", "cil", "finetune", "ood", "memory_bank", "simclr_v2")]
multiprocessing.set_forkserver_preload([*SCRIPTS, "transformers.models.bert.modeling_bert"])


def start(words, folder, setup=None, data=None):
    """Start a process that does what `python WORDS` does in a folder, and return the process.

    words    the script's name without .py, then its flags
    setup    function that the process calls before the script, for example to limit the memory
    data     rows for the script's main(data=...), in place of a data file
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
        multiprocessing.forkserver.ensure_running()
    name, *flags = map(str, words)                             # for a script in docs/more: docs/more/NAME
    process = multiprocessing.get_context("forkserver").Process(
        target=run_here, args=(name, flags, str(folder), setup, data))
    process.start()
    return process


def run_here(name, flags, folder, setup, data):
    """Run a script in this process. Write stdout to the file `printed`, and stderr to the file `errors`."""
    os.chdir(folder)
    for path, descriptor in (("printed", 1), ("errors", 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    multiprocessing.set_start_method(None, force=True)         # not set, as in a new Python process
    if setup:
        setup()
    sys.argv = [f"{name}.py", *flags]
    sys.path.insert(0, str(ROOT / Path(name).parent))          # as Python does for the folder of a script
    if data is None:
        runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
    else:
        __import__(name).main(flags, data=data)


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


def run(words, folder, setup=None, data=None):
    """Run `python WORDS` in a folder to its end.

    returns  code: exit code, or minus the number of a signal; printed: stdout; errors: stderr
    """
    process = start(words, folder, setup, data)
    process.join(60)
    process.kill()                                             # has an effect only if the process hangs
    process.join()
    printed, errors = (Path(folder, name).read_text("utf-8") for name in ("printed", "errors"))
    return SimpleNamespace(code=process.exitcode, printed=printed, errors=errors)


def train(words, folder, **more):
    """Run a command, check that its exit code is 0, and return its stdout."""
    done = run(words, folder, **more)
    assert done.code == 0, done.errors
    return done.printed


def metrics(out):
    """Return the rows of metrics.jsonl, with all `seconds` set to 0."""
    return [json.loads(line) | {"seconds": 0} for line in Path(out, "metrics.jsonl").read_text().splitlines()]


def weights(out):
    """Return {(file name, tensor name): bytes} of all tensors in the .safetensors files inside a folder."""
    return {(path.name, name): x.reshape(-1).view(torch.uint8).numpy().tobytes()
            for path in Path(out).rglob("*.safetensors") for name, x in load_file(path).items()}
