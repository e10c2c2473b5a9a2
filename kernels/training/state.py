"""Write and read state.pt, from which --resume continues a run.

Everything that is read is compared with the run's model and optimizer before it is loaded, because fused
optimizers do not check shapes and strides.
"""
import json
import math
import os
import zipfile
from collections import defaultdict

import torch
from safetensors.torch import load_file

from .output_dir import create_file, flush_to_disk


def write_state(path, run):
    """Save everything that the next step depends on, with the states of all ranks' random generators."""
    temporary = path.with_suffix(".tmp")
    weights, optimizer = run.model.state_dict(), run.optimizer.state_dict()
    state = dict(progress=run.extra_state, random=run.rng_states, model=weights, optimizer=optimizer,
                 untouched=params_without_state(optimizer))
    with create_file(temporary, "wb") as file:
        torch.save(state, file)
        flush_to_disk(file)
    os.replace(temporary, path)


def params_without_state(optimizer):
    """Return the indices of the parameters that have no state in an optimizer's state_dict."""
    indices = [i for group in optimizer["param_groups"] for i in group["params"]]
    return [i for i in indices if i not in optimizer["state"]]


def read_state(path, run):
    """Restore a run's weights, optimizer, extra_state and random generators.

    Raises ValueError if the file does not fit the run, or any other exception if it is damaged. The run must
    end then, since it may be restored in part.
    """
    with zipfile.ZipFile(path) as file:                        # torch.load does not verify checksums
        if bad := file.testzip():
            raise zipfile.BadZipFile(bad)
    state = torch.load(path, map_location=run.device, weights_only=True)
    check_extra_state(state["progress"], run.extra_state, run.total)
    check_tensors("model", state["model"], run.model.state_dict())
    check_optimizer(state["optimizer"], run.optimizer, state["untouched"], state["progress"]["step"])
    if state["progress"]["saved"]:                             # the run would need it only at its end
        check_saved_model(run)
    run.model.load_state_dict(state["model"])
    rates = [group["lr"] for group in state["optimizer"]["param_groups"]]
    groups = [group | dict(lr=lr) for group, lr in zip(run.optimizer.state_dict()["param_groups"], rates)]
    run.optimizer.load_state_dict(state["optimizer"] | dict(param_groups=groups))
    torch.set_rng_state(state["random"][run.rank][0].cpu())
    if run.device.type == "cuda":
        torch.cuda.set_rng_state(state["random"][run.rank][1].cpu())
    run.extra_state = {name: state["progress"][name] for name in state["progress"] | run.extra_state}


def read_metrics(path, step):
    """Return the rows of metrics.jsonl up to a step, without an incomplete last line."""
    with open(path, encoding="utf-8") as file:
        rows = [row for row in file if row.endswith("\n")]
    return [row for row in rows if json.loads(row)["step"] <= step]


def require(condition, message):
    """Raise ValueError with this message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def check_tensors(label, found, expected):
    """Raise ValueError if two dicts {name: tensor} differ in names, or if check_tensor fails for a pair."""
    require(isinstance(found, dict) and found.keys() == expected.keys(), f"other names in {label}")
    for name, x in found.items():
        check_tensor(f"{label}: {name}", x, expected[name])


def check_tensor(label, found, expected):
    """Raise ValueError if a tensor differs from `expected` in type, shape or strides, or is not finite."""
    require(torch.is_tensor(found) == torch.is_tensor(expected), f"{label} is a {type(found).__name__}")
    if not torch.is_tensor(expected):
        return
    require(found.layout == torch.strided and found.dtype == expected.dtype and found.shape == expected.shape,
            f"{label} is {found.dtype} {tuple(found.shape)}, "
            f"expected {expected.dtype} {tuple(expected.shape)}")
    strides = [(a, b) for a, b, size in zip(found.stride(), expected.stride(), found.shape) if size > 1]
    require(all(a == b for a, b in strides),
            f"{label} has strides {found.stride()}, expected {expected.stride()}")
    require(found.isfinite().all(), f"{label} contains NaN or infinity")


def check_optimizer(found, optimizer, without_state, step):
    """Raise ValueError if an optimizer's state_dict does not fit an optimizer of this run.

    found           state_dict that was read
    optimizer       optimizer of this run; its settings must be equal, except learning rates, which change
    without_state   params_without_state of the optimizer that was saved
    step            number of steps that it had made
    """
    live = optimizer.state_dict()
    require(found.keys() == live.keys(), "other parts of the optimizer")
    require(len(found["param_groups"]) == len(live["param_groups"]), "other parameter groups")
    for group, expected in zip(found["param_groups"], live["param_groups"]):
        for name in (group.keys() & expected.keys()) - {"lr"}:       # versions of PyTorch differ in names
            require(group[name] == expected[name], f"{name} of a parameter group")
        require(type(group["lr"]) is float and 0 <= group["lr"] < math.inf, "lr of a parameter group")
    weights = dict(enumerate(w for group in optimizer.param_groups for w in group["params"]))
    require(without_state == params_without_state(found) and found["state"].keys() <= weights.keys(),
            "states of other weights than were trained")
    examples, memories = example_state(optimizer), set()
    for number, state in found["state"].items():
        require(state.keys() == examples.keys(), f"state of weight {number} has other parts")
        for name, x in state.items():
            example = examples[name]
            is_per_element = torch.is_tensor(example) and example.dim() > 0
            expected = torch.empty_like(weights[number]) if is_per_element else example
            check_tensor(f"{name} of weight {number}", x, expected)
            memory = x.untyped_storage()
            require(memory.nbytes() == x.nbytes and (memory.data_ptr() not in memories or x.numel() == 0),
                    f"{name} of weight {number} shares memory with another tensor")
            memories.add(memory.data_ptr())
            require(is_per_element or float(x) in range(1, step + 1), f"{name} of weight {number} is {x}")
            require(name != "exp_avg_sq" or (x >= 0).all(), f"{name} of weight {number} is negative")


def example_state(optimizer):
    """Return the state, {name: tensor or number}, that this type of optimizer creates for a (1, 1) weight."""
    weight = torch.nn.Parameter(torch.zeros(1, 1, device=optimizer.param_groups[0]["params"][0].device))
    weight.grad = torch.zeros_like(weight)
    twin = object.__new__(type(optimizer))                     # without __init__, whose arguments are unknown
    vars(twin).update(vars(optimizer), state=defaultdict(dict),
                      param_groups=[optimizer.param_groups[0] | dict(params=[weight])])
    twin.step()
    return dict(twin.state[weight])


def check_extra_state(found, initial, total):
    """Raise ValueError if an extra_state has entries of other types than a new run of `total` steps.

    initial   Run.extra_state of a new run
    """
    require(isinstance(found, dict) and found.keys() >= initial.keys(), "no progress")
    for name, value in initial.items():
        x = found[name]
        if value is None:                                      # None or scores
            require(x is None or isinstance(x, dict) and all(map(is_json_value, x.values())), name)
        elif isinstance(value, int):
            require(type(x) is int and 0 <= x < 2**63, name)
        else:
            require(isinstance(x, list) and len(x) >= len(value), name)
            for number in x:
                require(type(number) is int and 0 <= number < 2**63, name)
    require(0 < found["step"] <= total, "step")


def is_json_value(value):
    """Return whether a value consists of numbers, strings, None, lists and dicts only."""
    if isinstance(value, (list, dict)):
        return all(map(is_json_value, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, (int, float, str))


def check_saved_model(run):
    """Raise ValueError if the weights in --out are not finite, or do not fit the model of this run."""
    files = [*run.out.rglob("*.safetensors")]
    require(files, "no weights beside state.pt")
    for file in files:
        for name, x in load_file(file).items():
            require(x.isfinite().all(), f"{file.name}: {name} contains NaN or infinity")
    if hasattr(run.model, "restore"):
        run.model.restore(run.out)
