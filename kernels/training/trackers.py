"""--log: also send the rows of metrics.jsonl to TensorBoard or Weights & Biases."""
import uuid

from .errors import fail


class TensorBoard:
    """Writes metrics to OUT/tensorboard. Run.begin calls begin on rank 0, with progress = Run.extra_state."""

    def __init__(self):
        from torch.utils.tensorboard import SummaryWriter
        self.writer_type = SummaryWriter

    def begin(self, out, flags, progress):
        # a resumed run repeats the steps after its checkpoint: delete the old rows of these steps
        self.writer = self.writer_type(out / "tensorboard", purge_step=progress["step"] + 1)

    def log(self, numbers, step):
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()


class WandB:
    """Sends metrics to Weights & Biases. Its methods are called like those of TensorBoard."""

    def __init__(self):
        import wandb
        self.wandb = wandb

    def begin(self, out, flags, progress):
        run_id = progress.setdefault("wandb", uuid.uuid4().hex)    # --resume continues this W&B run
        self.run = self.wandb.init(name=out.name, id=run_id, config=flags, resume="allow", reinit=True)

    def log(self, numbers, step):
        self.run.log(numbers, step=step)


def open_tracker(args):
    """Return the tracker that --log names, or None without --log. Fail if its package is not installed."""
    name = getattr(args, "log", None)
    try:
        return {"tensorboard": TensorBoard, "wandb": WandB}[name]() if name else None
    except ImportError:
        fail(f"--log {name}: the package {name} is not installed; pip install {name}, or leave --log out")
