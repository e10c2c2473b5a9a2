"""Write and read state.pt, from which --resume continues a run."""
import json
import os

import torch

from .output_dir import create_file, flush_to_disk


def write_state(path, run):
    """Save everything that the next step depends on, with the states of all ranks' random generators."""
    temporary = path.with_suffix(".tmp")
    state = dict(progress=run.extra_state, random=run.rng_states, model=run.model.state_dict(),
                 optimizer=run.optimizer.state_dict())
    with create_file(temporary, "wb") as file:
        torch.save(state, file)
        flush_to_disk(file)
    os.replace(temporary, path)


def read_state(path, run):
    """Restore a run's weights, optimizer, extra_state and random generators.

    Raises any exception if the file is damaged or does not fit the run. The run must end then, since it may
    be restored in part.
    """
    state = torch.load(path, map_location=run.device, weights_only=True)
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"][run.rank][0].cpu())
    if run.device.type == "cuda":
        torch.cuda.set_rng_state(state["random"][run.rank][1].cpu())
    run.extra_state |= state["progress"]


def read_metrics(path, step):
    """Return the rows of metrics.jsonl up to a step, without an incomplete last line."""
    with open(path, encoding="utf-8") as file:
        rows = [row for row in file if row.endswith("\n")]
    return [row for row in rows if json.loads(row)["step"] <= step]
