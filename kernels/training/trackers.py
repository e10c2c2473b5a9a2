"""--log: send the rows of metrics.jsonl to TensorBoard or Weights & Biases as well."""
import uuid

from .cli import fail


class TensorBoard:
    """Writes event files to OUT/tensorboard. `begin` is called once, by the first rank, then `log` for each
    row of metrics.jsonl."""

    def __init__(self):
        from torch.utils.tensorboard import SummaryWriter
        self.writer_type = SummaryWriter

    def begin(self, out, flags, progress):
        # rows after the checkpoint are logged again by --resume
        self.writer = self.writer_type(out / "tensorboard", purge_step=progress["step"] + 1)

    def log(self, row):
        for name, value in numbers(row).items():
            self.writer.add_scalar(name, value, row["step"])
        self.writer.flush()


class WandB:
    """Sends the run to Weights & Biases, as TensorBoard."""

    def __init__(self):
        import wandb
        self.wandb = wandb

    def begin(self, out, flags, progress):
        if earlier := getattr(self.wandb, "run", None):        # of another trial in this process
            earlier.finish()
        run_id = progress.setdefault("wandb", uuid.uuid4().hex)    # --resume continues this run
        try:
            self.run = self.wandb.init(name=out.name, id=run_id, config=flags, resume="allow")
        except Exception as error:                             # not logged in, no network
            fail(f"--log wandb: {type(error).__name__}: {error}".splitlines()[0])

    def log(self, row):
        self.run.log(numbers(row), step=row["step"])


def numbers(row):
    """The numbers of a row of metrics, without its step."""
    return {name: value for name, value in row.items() if type(value) in (int, float) and name != "step"}


TRACKERS = {"tensorboard": TensorBoard, "wandb": WandB}


def open_tracker(args):
    """What --log names, or None; a missing package is one clear line."""
    name = getattr(args, "log", None)
    try:
        return TRACKERS[name]() if name else None
    except ImportError:
        fail(f"--log {name}: the package {name} is not installed; pip install {name}, or leave --log out")
