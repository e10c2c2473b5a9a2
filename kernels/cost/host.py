"""The time that the host needs for a loss, forward and backward, without a GPU: python -m kernels.cost --host

While a batch is small, a GPU waits for the host, so a step takes as long as the host needs to start all
kernels and PyTorch operations. Here the tensors are on the CPU and have 16 features, so that the arithmetic
takes no time, and a driver that launches nothing replaces Triton's (launches.py). Matrices that PyTorch
computes have only 16 rows, for the same reason: the operations are the same for any number of rows. The time
of the GPU's driver comes on top of each launch and operation.
"""
import gc
import time
from contextlib import ExitStack
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import eager, losses, stored
from ..benchmark.cases import MIN_FLOP, TAU, make_inputs, our_loss, stack_views
from ..blockwise import STORED_LOGITS_ON_GPU
from ..masks import Mask
from .launches import simulated_gpu

ROWS = 64, 256, 1024
FEATURES = 16
NO_LAUNCH = "empty", "local_scalar", "aten::full"              # full makes a CPU tensor of a number


def textbook(loss):
    """Return a loss as users write it, as a function (q, k, targets) → scalar, without checks."""
    tau = torch.tensor(TAU)

    def nt_xent(q, k, targets):
        z = torch.cat([q[:len(q) // 2], k[:len(q) // 2]])
        return eager.nt_xent(z, z, tau, 0)

    def sup_con_loss(q, k, targets):
        z = stack_views(q, k)
        return eager.sup_con_loss(z, z, tau, Mask("labels", targets // 4, targets // 4))

    functions = {
        "nt_xent": nt_xent,
        "clip_loss": lambda q, k, targets: eager.info_nce(q, k, tau, symmetric=True),
        "info_nce": lambda q, k, targets: eager.info_nce(q, k, tau),
        "queue_loss": lambda q, k, targets: eager.queue_loss(q, k[-len(q):], k[:-len(q)], tau),
        "linear_cross_entropy": lambda q, k, targets: eager.linear_cross_entropy(q, k, targets, -100, tau),
        "sigmoid_loss": lambda q, k, targets: eager.sigmoid_loss(q, k, tau, torch.tensor(-10.0), 0),
        "sup_con_loss": sup_con_loss}
    return functions[loss]


class CountOperations(TorchDispatchMode):
    """Count the PyTorch operations that would launch a kernel on a GPU."""
    count = 0

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        if not operator.is_view and not any(name in operator.name() for name in NO_LAUNCH):
            self.count += 1
        return operator(*arguments, **named or {})


def make_step(loss, rows, impl):
    """Return a function that computes a loss and its gradients; impl: "eager", "blockwise" or "triton"."""
    rows = rows if impl == "triton" else 16
    q, k, targets = make_inputs(loss, (rows, rows, FEATURES), torch.bfloat16, "cpu", trained=False)
    function = textbook(loss) if impl == "eager" else our_loss(loss, impl)

    def step():
        q.grad = k.grad = None
        function(q, k, targets).backward()
    return step


def microseconds(steps, repeats=20, calls=20):
    """Return the shortest mean time of each step in µs; steps alternate, because a CPU's speed changes."""
    shortest = [float("inf")] * len(steps)
    for _ in range(repeats):
        for i, step in enumerate(steps):
            start = time.process_time()
            for _ in range(calls):
                step()
            shortest[i] = min(shortest[i], (time.process_time() - start) / calls * 1e6)
    return shortest


def half_product(a, b, factor=None):
    """Start the operations of stored.product: the CPU has no product of half rows with a float32 result."""
    torch.mm(a, b)
    s = a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)
    return s if factor is None else s.mul_(factor)


def measure(loss, rows, chip):
    """Return {implementation: (µs, launches of Triton kernels, PyTorch operations)} for a loss."""
    launches, counts = [], {}
    with ExitStack() as stack:
        stack.enter_context(simulated_gpu(chip, lambda *launch: launches.append(launch)))
        # as on a GPU: numbers are on the host, and targets are not read
        for module in ("launch", "sigmoid"):
            name = f"kernels.gpu.{module}.is_host_scalar"
            stack.enter_context(patch(name, lambda scalar, x: not scalar.requires_grad))
        stack.enter_context(patch.object(losses, "is_traced", lambda x: True))
        patch_stored = {"operands": lambda q, k, tau: (q, q if k is None else k), "product": half_product}
        stack.enter_context(patch.multiple(stored, **patch_stored))
        steps = {impl: make_step(loss, rows, impl) for impl in ("eager", "blockwise", "triton")}
        for impl, step in steps.items():
            step()                                              # compiles kernels
            launches.clear()
            with CountOperations() as operations:
                step()
            counts[impl] = len(launches), operations.count
        gc.collect()
        gc.disable()
        stack.callback(gc.enable)
        times = microseconds(list(steps.values()))
    return {impl: (us, *counts[impl]) for impl, us in zip(steps, times)}


def report(chip, chosen=None, sizes=ROWS):
    """Yield the lines of the table: one per loss and number of rows; chosen is a loss, or None: all."""
    yield "µs per step on this CPU (Triton launches + PyTorch operations); auto: what impl='auto' chooses"
    titles = "eager", "blockwise", "triton"
    yield f"{'loss':22}{'rows':>5}{titles[0]:>15}{titles[1]:>15}{titles[2]:>15}  auto"
    for loss in [chosen] if chosen else MIN_FLOP:
        for rows in sizes:
            found = measure(loss, rows, chip)
            is_small = rows * rows <= STORED_LOGITS_ON_GPU and loss != "queue_loss"
            auto = "blockwise" if is_small else "triton"
            cells = (f"{us:.0f} ({launches} + {operations})" for us, launches, operations in found.values())
            ratio = found[auto][0] / found["eager"][0]
            text = "".join(f"{cell:>15}" for cell in cells)
            yield f"{loss:22}{rows:>5}{text}  {auto}, {ratio:.2f} of eager"
