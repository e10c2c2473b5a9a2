"""Run a command line in a new process, as a user does, and read what it prints and writes.

The processes are forked from a server that has imported PyTorch, transformers and the scripts, because a new
Python needs five seconds for these imports.
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
MORE = [f"docs/more/{name}" for name in ("consert", "declutr", "simcls", "cil", "finetune")]
multiprocessing.set_forkserver_preload([*SCRIPTS, "transformers.models.bert.modeling_bert"])


def start(words, folder, setup=None, data=None):
    """Start `python WORDS` in a folder, and return its process.

    words    the script's name without .py, then its flags
    setup    function that the process calls first, for example to limit its memory
    data     rows to pass to main(data=...), instead of a file
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
        multiprocessing.forkserver.ensure_running()
    name, *flags = map(str, words)                             # of a further paper: docs/more/NAME
    process = multiprocessing.get_context("forkserver").Process(
        target=run_here, args=(name, flags, str(folder), setup, data))
    process.start()
    return process


def run_here(name, flags, folder, setup, data):
    """Run a script in this process, which writes its streams to the files `printed` and `errors`."""
    os.chdir(folder)
    for path, descriptor in (("printed", 1), ("errors", 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    multiprocessing.set_start_method(None, force=True)         # image scripts choose their own
    if setup:
        setup()
    sys.argv = [f"{name}.py", *flags]
    sys.path.insert(0, str(ROOT / Path(name).parent))          # as `python docs/more/NAME.py` does
    if data is None:
        runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
    else:
        __import__(name).main(flags, data=data)


def start_rank(rank, count, port, words, folder, setup=None):
    """Start one of `count` processes in a folder of its own, and return it. Several are those of torchrun."""
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

    returns  code: the exit code, negative for a signal; printed, errors: the text of its two streams
    """
    process = start(words, folder, setup, data)
    process.join(60)
    process.kill()                                             # only if it hangs
    process.join()
    printed, errors = (Path(folder, name).read_text("utf-8") for name in ("printed", "errors"))
    return SimpleNamespace(code=process.exitcode, printed=printed, errors=errors)


def train(words, folder, **more):
    """Run a command that must succeed, and return what it printed."""
    done = run(words, folder, **more)
    assert done.code == 0, done.errors
    return done.printed


def metrics(out):
    """Return the rows of metrics.jsonl without their times."""
    return [json.loads(line) | {"seconds": 0} for line in Path(out, "metrics.jsonl").read_text().splitlines()]


def weights(out):
    """Return {file and name: bytes} of all tensors in the .safetensors files of a folder."""
    return {(path.name, name): x.reshape(-1).view(torch.uint8).numpy().tobytes()
            for path in Path(out).rglob("*.safetensors") for name, x in load_file(path).items()}
