"""The loops of docs/distributed.md, as they are printed, give the same weights in one process and in three,
also with a ring.

Batches have 7 or 9 rows. Three processes have unequal shares of 7 rows.
"""
import functools
import importlib
import os
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from kernels import gather_rows, nt_xent, own_rows
from running import ROOT, fork_context, free_port

PAGE = (ROOT / "docs/distributed.md").read_text("utf-8")
TITLES = ["setup", "without a wrapper", "ring", "DDP", "accumulation", "compile", "fully_shard", "saving",
          "mixed precision"]
CLIPPED = ["without a wrapper", "DDP", "compile", "fully_shard"]               # these blocks clip gradients
LOOPS = ["without a wrapper", "DDP", "accumulation", "compile", "fully_shard", "mixed precision"]
NORMS = []                                                     # gradient norms before clipping
WORLDS = (1, 3)


def code_blocks():
    """Return {title: code} of the Python blocks of the page."""
    found = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    assert len(found) == len(TITLES)
    return dict(zip(TITLES, found))


def make_batches():
    numbers = torch.Generator().manual_seed(1)
    return [torch.randn(2, rows, 20, generator=numbers, dtype=torch.float64).to(torch.get_default_dtype())
            for rows in (7, 9, 7, 9)]


def whole(x):
    """Return the full tensor if x is sharded, else x."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def clip_and_record(*args, clip=torch.nn.utils.clip_grad_norm_, **more):
    NORMS.append(clip(*args, **more))
    return NORMS[-1]


def weights(model):
    """Return {name: full weight}, with names that lack the prefixes of wrappers."""
    found = {}
    for name, weight in model.named_parameters():
        found[re.sub(r"(module|_orig_mod|layer)\.", "", name)] = whole(weight.detach()).clone()
    return found


def run_blocks(ring=False):
    """Run each block; return {title: weights after the block, "TITLE, norms": gradient norms}. ring: with the
    function of the block "ring"."""
    code, found, names = code_blocks(), {}, {}
    for title in LOOPS if ring else sorted([*LOOPS, "saving"], key=TITLES.index):
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32 if title == "mixed precision" else torch.float64)
        if title != "saving":                                  # "saving" uses the model of the block before
            names = {"batches": make_batches()}
            exec(code["setup"], names)
            exec(code["ring"] if ring else "", names)
        NORMS.clear()
        exec(code[title], names)
        found[title] = weights(names["model"])
        found[f"{title}, norms"] = dict(enumerate(map(whole, NORMS)))
        if title == "saving":
            with torch.no_grad():
                for weight in names["model"].parameters():
                    weight.zero_()
            exec(code[title].rpartition("\n\n")[2], names)     # run the part that loads shards
            found["saving, loaded"] = weights(names["model"])
            dist.barrier()
            plain = names["Encoder"]()
            plain.load_state_dict(torch.load("whole.pt"))
            found["saving, whole"] = weights(plain)
    return found


def checkpointed(module):
    """Return the module with activation checkpointing, as in the page's block "mixed precision"."""
    names = {}
    exec(code_blocks()["setup"] + code_blocks()["mixed precision"].partition("model =")[0], names)
    return names["Checkpointed"](module)


def sharded(layers):
    for layer in layers:
        fully_shard(layer)
    return fully_shard(layers)


WRAPPERS = {"checkpoint": checkpointed, "DDP": DistributedDataParallel, "fully_shard": sharded}
ORDERS = ["checkpoint, compile, DDP", "checkpoint, DDP, compile", "checkpoint, compile, fully_shard",
          "checkpoint, fully_shard, compile", "compile, checkpoint, DDP", "compile, checkpoint, fully_shard"]


def run_orders():
    """Return {order of the wrappers: gradients of the layers}; "" is the encoder without wrappers."""
    torch.set_default_dtype(torch.float64)
    found, batch, own = {}, make_batches()[0], own_rows(7)
    for order in ["", *ORDERS]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
        for name in order.split(", ") if order else ():
            wrap = torch.compile if name == "compile" else WRAPPERS[name]      # one_process sets the backend
            per_layer = name in ("checkpoint", "compile") and isinstance(model, torch.nn.Sequential)
            model = torch.nn.Sequential(*map(wrap, model)) if per_layer else wrap(model)
        if order:
            z1, z2 = model(batch[:, own].flatten(0, 1)).chunk(2)
            gathered = gather_rows(z1, 7), gather_rows(z2, 7)
            loss = nt_xent(z1, z2, gathered=gathered, offset=own.start, normalize=True)
            (loss * len(z1) / 7 * dist.get_world_size()).backward()
        else:
            nt_xent(*model(batch).unbind(), normalize=True).backward()
        found[order] = [whole(p.grad) for p in model.parameters()]
    return found


def one_process(index, ports, folder):
    """Run one of four processes: process 0 is alone, and the processes 1 to 3 are a group."""
    world, rank = (1, 0) if index == 0 else (3, index - 1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[world]))
    os.makedirs(folder / str(world), exist_ok=True)
    os.chdir(folder / str(world))
    torch.set_num_threads(1)
    torch.compile = functools.partial(torch.compile, backend="aot_eager")   # the default backend compiles C++
    torch.nn.utils.clip_grad_norm_ = clip_and_record
    torch.optim.AdamW = torch.optim.SGD                        # AdamW hides a wrong factor of the gradient
    dist.init_process_group("gloo", rank=rank, world_size=world)
    found = run_blocks()
    if world > 1:
        found["orders"] = run_orders()
        found["ring"] = run_blocks(ring=True)
    if rank == 0:
        torch.save(found, folder / f"{world}.pt")
    dist.barrier()
    dist.destroy_process_group()


def all_processes(_, ports, folder):
    """Import what the loops need once, because it takes seconds, and fork all processes."""
    importlib.import_module("torch.distributed.checkpoint")
    torch.compile(torch.nn.Linear(2, 2), backend="aot_eager")(torch.ones(1, 2))
    torch.multiprocessing.start_processes(one_process, (ports, folder), 4, start_method="fork")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return {number of processes: {title: weights}}."""
    folder = tmp_path_factory.mktemp("loops")
    fork_context()
    ports = {world: free_port() for world in WORLDS}
    torch.multiprocessing.start_processes(all_processes, (ports, folder), 1, start_method="forkserver")
    return {world: torch.load(folder / f"{world}.pt") for world in WORLDS}


def largest_difference(a, b):
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def start(dtype=torch.float64):
    """Return the weights before training."""
    names = {}
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    exec(code_blocks()["setup"], names)
    found = weights(names["Encoder"]())
    torch.set_default_dtype(torch.float32)
    return found


@pytest.mark.parametrize("title", [*LOOPS[:-1], *(f"{title}, norms" for title in CLIPPED)])
def test_three_processes_equal_one(title, results):
    assert results[1][title] and largest_difference(results[3][title], results[1][title]) < 1e-8
    assert largest_difference(results[3]["ring"][title], results[1][title]) < 1e-8
    if "norms" not in title:
        assert largest_difference(results[1][title], start()) > 1e-3           # the loop changes the weights


def test_mixed_precision_of_three_processes_is_near_one(results):
    first, one = start(torch.float32), results[1]["mixed precision"]
    for three in (results[3]["mixed precision"], results[3]["ring"]["mixed precision"]):
        assert all((three[name] - x).norm() < 0.03 * (x - first[name]).norm() for name, x in one.items())


@pytest.mark.parametrize("title", ["saving", "saving, loaded", "saving, whole"])
def test_saved_weights_are_those_of_the_model(title, results):
    assert largest_difference(results[3][title], results[3]["fully_shard"]) == 0


@pytest.mark.parametrize("order", ORDERS)
def test_order_of_wrappers(order, results):
    for found, expected in zip(results[3]["orders"][order], results[3]["orders"][""], strict=True):
        assert (found - expected).abs().max() < 1e-12
    assert f"\n- {order}\n" in PAGE
