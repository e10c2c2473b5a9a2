"""state.pt: what --resume continues from. It is written whole. What is read is compared with the model and
optimizer that it is meant for before they take it: fused optimizers trust in shapes and strides."""
import json
import math
import os
import zipfile
from collections import defaultdict

import torch
from safetensors.torch import load_file

from .output_dir import new_file, sync


def write_state(path, run):
    """All that the next step of a run depends on, the random numbers of every rank included."""
    aside = path.with_suffix(".tmp")
    weights, optimizer = run.model.state_dict(), run.optimizer.state_dict()
    state = dict(progress=run.progress, random=run.random, model=weights, optimizer=optimizer,
                 untouched=untouched(optimizer))
    with new_file(aside, "wb") as file:
        torch.save(state, file)
        sync(file)
    os.replace(aside, path)


def untouched(optimizer):
    """Numbers of the weights in an optimizer's state_dict that no step has changed: they have no state."""
    numbers = [i for group in optimizer["param_groups"] for i in group["params"]]
    return [i for i in numbers if i not in optimizer["state"]]


def read_state(path, run):
    """Puts a run's weights, optimizer, progress and random numbers back. Raises ValueError, or what a damaged
    file raises; the run has to end then."""
    with zipfile.ZipFile(path) as file:                        # torch.load reads no checksum
        if bad := file.testzip():
            raise zipfile.BadZipFile(bad)
    state = torch.load(path, map_location=run.device, weights_only=True)
    check_progress(state["progress"], run.progress, run.total)
    check_tensors("model", state["model"], run.model.state_dict())
    check_optimizer(state["optimizer"], run.optimizer, state["untouched"], state["progress"]["step"])
    if state["progress"]["saved"]:                             # would be missed at the end only
        check_checkpoint(run)
    run.model.load_state_dict(state["model"])
    rates = [group["lr"] for group in state["optimizer"]["param_groups"]]
    groups = [group | dict(lr=lr) for group, lr in zip(run.optimizer.state_dict()["param_groups"], rates)]
    run.optimizer.load_state_dict(state["optimizer"] | dict(param_groups=groups))
    torch.set_rng_state(state["random"][run.rank][0].cpu())
    if run.device.type == "cuda":
        torch.cuda.set_rng_state(state["random"][run.rank][1].cpu())
    run.progress = {name: state["progress"][name] for name in state["progress"] | run.progress}


def read_rows(path, step):
    """The rows of metrics.jsonl up to a step, of which the last one may be torn."""
    with open(path, encoding="utf-8") as file:
        rows = [row for row in file if row.endswith("\n")]
    return [row for row in rows if json.loads(row)["step"] <= step]


def want(fits, what):
    """Raises ValueError with this text unless it fits."""
    if not fits:
        raise ValueError(what)


def check_tensors(named, found, wanted):
    """Raises ValueError where found, {name: tensor}, is not what could be in the place of wanted."""
    want(isinstance(found, dict) and found.keys() == wanted.keys(), f"other names in {named}")
    for name, x in found.items():
        check_tensor(f"{named}: {name}", x, wanted[name])


def check_tensor(named, found, wanted):
    """Raises ValueError where a tensor has another kind, shape, order in memory or range."""
    want(torch.is_tensor(found) == torch.is_tensor(wanted), f"{named} is a {type(found).__name__}")
    if not torch.is_tensor(wanted):
        return
    want(found.layout == torch.strided and found.dtype == wanted.dtype and found.shape == wanted.shape,
         f"{named} is {found.dtype} {tuple(found.shape)}, wanted {wanted.dtype} {tuple(wanted.shape)}")
    strides = [(a, b) for a, b, size in zip(found.stride(), wanted.stride(), found.shape) if size > 1]
    want(all(a == b for a, b in strides),
         f"{named} has strides {found.stride()}, wanted {wanted.stride()}")
    want(found.isfinite().all(), f"{named} holds NaN or infinity")


def check_optimizer(found, optimizer, untouched_ones, step):
    """Raises ValueError where the state_dict of an optimizer has other settings, or other states of weights,
    than one that made so many steps of this run. Rates change in training."""
    live = optimizer.state_dict()
    want(found.keys() == live.keys(), "other parts of the optimizer")
    want(len(found["param_groups"]) == len(live["param_groups"]), "other groups of weights")
    for group, wanted in zip(found["param_groups"], live["param_groups"]):
        for name in (group.keys() & wanted.keys()) - {"lr"}:                   # versions have more of them
            want(group[name] == wanted[name], f"{name} of a group of weights")
        want(type(group["lr"]) is float and 0 <= group["lr"] < math.inf, "lr of a group of weights")
    weights = dict(enumerate(w for group in optimizer.param_groups for w in group["params"]))
    want(untouched_ones == untouched(found) and found["state"].keys() <= weights.keys(),
         "states of other weights than were trained")
    like, memories = state_of_one(optimizer), set()
    for number, state in found["state"].items():
        want(state.keys() == like.keys(), f"state of weight {number} has other parts")
        for name, x in state.items():
            one = like[name]
            of_weight = torch.is_tensor(one) and one.dim() > 0
            wanted = torch.empty_like(weights[number]) if of_weight else one
            check_tensor(f"{name} of weight {number}", x, wanted)
            memory = x.untyped_storage()
            want(memory.nbytes() == x.nbytes and (memory.data_ptr() not in memories or x.numel() == 0),
                 f"{name} of weight {number} lies in another's memory")
            memories.add(memory.data_ptr())
            want(of_weight or float(x) in range(1, step + 1), f"{name} of weight {number} is {x}")
            want(name != "exp_avg_sq" or (x >= 0).all(), f"{name} of weight {number} is negative")


def state_of_one(optimizer):
    """What a step of such an optimizer leaves for a weight (1, 1): {name: tensor or number}."""
    weight = torch.nn.Parameter(torch.zeros(1, 1, device=optimizer.param_groups[0]["params"][0].device))
    weight.grad = torch.zeros_like(weight)
    twin = object.__new__(type(optimizer))                     # other arguments than its own it may not take
    vars(twin).update(vars(optimizer), state=defaultdict(dict),
                      param_groups=[optimizer.param_groups[0] | dict(params=[weight])])
    twin.step()
    return dict(twin.state[weight])


def check_progress(found, usual, total):
    """Raises ValueError where what a run of `total` steps keeps beside weights is of other types than usual,
    that of a new run."""
    want(isinstance(found, dict) and found.keys() >= usual.keys(), "no progress")
    for name, value in usual.items():
        x = found[name]
        if value is None:                                      # scores, once there are any
            want(x is None or isinstance(x, dict) and all(map(is_plain, x.values())), name)
        elif isinstance(value, int):
            want(type(x) is int and 0 <= x < 2**63, name)
        else:
            want(isinstance(x, list) and len(x) >= len(value), name)
            for place in x:
                want(type(place) is int and 0 <= place < 2**63, name)
    want(0 < found["step"] <= total, "step")


def is_plain(value):
    """Whether it is a number or a text, or made of such."""
    if isinstance(value, (list, dict)):
        return all(map(is_plain, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, (int, float, str))


def check_checkpoint(run):
    """Raises ValueError where the weights in --out are not such as this run saves."""
    files = [*run.out.rglob("*.safetensors")]
    want(files, "no weights beside state.pt")
    for file in files:
        for name, x in load_file(file).items():
            want(x.isfinite().all(), f"{file.name}: {name} holds NaN or infinity")
    if hasattr(run.model, "restore"):
        run.model.restore(run.out)
