"""simclr.py and moco.py in three processes: weights, queue and pointer are those of one process."""
import os

import numpy as np
import torch

import moco
import simclr
from kernels.training.images import dataset, encoders
from running import DATA, fork_context, free_port

# flags of the runs; the first word of a name is the script. Ranks may have different numbers of rows (SimCLR)
FLAGS = ["--model", "tiny", "--batch-size", 12, "--epochs", 4, "--eval-every", 4, "--probe-epochs", 0,
         "--steps", 3, "--keep-state", "always"]
CASES = {"moco": "--bn-splits 6 --queue-size 24 --symmetric",
         "moco bank": "--bn-splits 6 --queue-size 24 --memory-bank",
         "simclr": "--warmup-epochs 0 --batch-size 11",
         "simclr labels": "--warmup-epochs 0 --batch-size 11 --supervised",
         "simclr tuned": "--warmup-epochs 0 --batch-size 11 --from-layer 0 --finetune DATA"}
encoders.RESNETS["tiny"] = encoders.BASIC | dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])


def same_views(x, args):
    """Replace augmentation: no colour changes; if there are two views, the second one is flipped."""
    if getattr(args, "memory_bank", False):
        return x
    first, second = x.chunk(2)
    return torch.cat([first, second.flip(3)])


def all_cases(rank, port, data, out):
    """Train all CASES: ranks 0 to 2 train together, rank 3 alone. float64 keeps equal runs equal to nine
    digits. SimCLR runs without batch statistics, because SyncBatchNorm does not exist for CPUs."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    torch.cuda.is_available = lambda: False
    # Random colours and flips differ between ranks, so replace them. Random crop boxes do not.
    moco.augment = simclr.augment = same_views
    dataset.flip = lambda x: x
    for i, (case, flags) in enumerate(CASES.items()):
        name = case.split()[0]
        if rank < 3:
            os.environ.update(RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1",
                              MASTER_PORT=str(port + i))
        if name == "simclr":
            torch.nn.BatchNorm2d.forward = lambda norm, x: x * norm.weight[:, None, None]
        flags = ["--data", data, *FLAGS, *flags.replace("DATA", str(data)).split()]
        script = {"simclr": simclr, "moco": moco}[name]
        script.main([*map(str, flags), "--out", str(out / f"{case}{rank // 3}")])


def test_three_processes_equal_one(tmp_path):
    """MoCo's shuffling, split batch norms, queue and bank do not depend on the number of ranks."""
    with np.load(DATA / "shapes.npz") as file:
        x, y = file["images"][:60, ::2, ::2], file["labels"][:60]
    data = tmp_path / "x.npz"
    np.savez(data, images=x[:30], labels=y[:30], test_images=x[30:], test_labels=y[30:])
    fork_context()
    arguments = free_port(), data, tmp_path
    torch.multiprocessing.start_processes(all_cases, arguments, nprocs=4, start_method="forkserver")
    for case in CASES:
        one, three = (torch.load(tmp_path / f"{case}{alone}" / "state.pt") for alone in (1, 0))
        assert one["progress"] == three["progress"]
        torch.testing.assert_close(three["model"], one["model"], rtol=1e-9, atol=1e-9)
