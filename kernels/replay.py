"""Replay a loss: from the second call with the same shapes on, only its launches run.

While batches are small, a GPU waits for the host. What the host does for a loss depends on shapes, dtypes,
flags and numbers (the key), never on values in GPU memory: the same key means the same work at other
addresses. So the first call with a key is recorded, forward and backward, as a list of steps: launches of
Triton kernels, and operations of PyTorch. A step has a Part in place of each tensor: a memory and an offset.
Memories are the inputs, the upstream gradient, the results of operations, and what torch.empty returned.
Those of the last kind that only kernels use are allocated at once, as a workspace.

Computed as before: calls on the CPU and under torch.compile, problems that need more than MAX_WORKSPACE, and
all that the recorder does not understand (CannotRecord).
"""
import functools
import threading
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from . import heuristics

MAX_PLANS = 256                 # the plans of this many keys are kept; then all are forgotten
MAX_WORKSPACE = 2 ** 28         # 256 MiB: larger problems do not wait for the host
ALIGNMENT = 256                 # bytes, of the parts of a workspace
TENSORS, NoneType = (torch.Tensor, torch.nn.Parameter), type(None)
PLANS = {}                      # key -> Plan, or None: cannot be replayed
ON_CPU = False                  # True: calls on the CPU in Triton's interpreter are replayed too, for tests
on_this_thread = threading.local()                           # .recorder
NO_SECOND_DERIVATIVE = ("kernels: the fused operations do not support create_graph=True, which second "
                        "derivatives need; use impl='eager'")


class CannotRecord(Exception):
    """The recorder does not understand what a loss does."""


def without_compile(function):
    """Decorate a function: torch.compile breaks the graph there, unless impl is "eager"."""
    @functools.wraps(function)
    def run(*arguments, impl="auto", **named):
        if torch.compiler.is_compiling() and impl != "eager":
            return torch.compiler.disable(function)(*arguments, impl=impl, **named)
        return function(*arguments, impl=impl, **named)
    return run


def replayed(function):
    """Decorate a function of tensors, numbers and tuples that returns a tensor and reads no value."""
    @functools.wraps(function)
    def run(*arguments, impl="auto", **named):
        named["impl"] = impl
        if torch.compiler.is_compiling() and impl != "eager":
            return torch.compiler.disable(function)(*arguments, **named)
        x = arguments[0] if arguments else None
        if type(x) not in TENSORS or impl not in ("auto", "triton") or not x.is_cuda and not ON_CPU:
            return function(*arguments, **named)
        key, tensors = key_of(function, arguments, named)
        plan = PLANS.get(key) or first_call(key, function, arguments, named, tensors)
        return Replay.apply(plan, *tensors) if plan else function(*arguments, **named)
    return run


def first_call(key, function, arguments, named, tensors):
    """Return the new Plan of a key, or None."""
    capturing = arguments[0].is_cuda and torch.cuda.is_current_stream_capturing()
    if key is None or key in PLANS or current_recorder() is not None or capturing:
        return None
    if len(PLANS) >= MAX_PLANS:
        PLANS.clear()
    PLANS[key] = record(function, arguments, named, tensors)
    return PLANS[key]


def key_of(function, arguments, named):
    """Return (all that decides what the host does, the different tensors); (None, ...) if it is not known."""
    tensors, addresses, key = [], [], [function, *named]
    values = [*arguments, *named.values()]
    for x in values:                                       # the list grows by the elements of tuples
        kind = type(x)
        if kind in TENSORS:
            if x.layout is not torch.strided:
                return None, ()
            tensors.append(x)
            address = x.data_ptr()
            addresses.append(address)
            key.append((x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_neg(), address % 16,
                        x.__dict__.get("own_rows")))       # gather_rows sets own_rows, checks read it
        elif kind in (float, int, str, bool, NoneType):
            key.append((kind, x))
        elif kind in (tuple, list):
            key.append((kind, len(x)))
            values += x
        else:
            return None, ()
    if len(set(addresses)) < len(addresses):
        ids = [id(x) for x in tensors]
        key += tuple(map(ids.index, ids)), tuple(map(addresses.index, addresses))
        tensors = list(dict(zip(ids, tensors)).values())
    x = tensors[0]
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        return None, ()
    autocast = torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type)
    return (*key, autocast, torch.is_grad_enabled(), torch.get_float32_matmul_precision(),
            heuristics.WEIGHT_BUFFER_BYTES, heuristics.STRIP_BYTES), tensors


# ── recording ──────────────────────────────────────────────────────────────────────────────────────────────


class Part(NamedTuple):
    """A tensor in a step."""
    memory: int              # number of the memory
    offset: int              # bytes from its start
    view: Any                # (shape, stride, offset in elements) for an operation; None: the whole memory


class Rows:
    """A tensor descriptor in a step, or what Triton's launcher reads of it: then address is a number."""
    round_f32_to_tf32, element_strides = False, None

    def __init__(self, address, shape, strides, padding):
        self.address, self.shape, self.strides, self.padding = address, shape, strides, padding
        self.base = self

    def data_ptr(self):
        return self.address


class Launch(NamedTuple):
    """A step: run(*grid, stream, function, metadata, None, None, None, *arguments)."""
    run: Any
    grid: Any
    function: Any
    metadata: Any
    arguments: list
    pointers: list           # [(i, memory, offset)]: argument i is this address
    nested: list             # [(i, x)]: argument i is x, in which there are addresses


class Operation(NamedTuple):
    """A step: function(*arguments, **named). results are the numbers of its new memories."""
    function: Any
    arguments: list
    named: dict
    results: list


class Memory:
    """Memory that a recorder has seen."""

    def __init__(self, tensor, is_empty=False):
        self.tensor, self.is_empty, self.stages = tensor, is_empty, set()
        self.is_tensor = not is_empty                      # False: a part of a workspace
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
        self.start, self.size = tensor.data_ptr(), (last + 1) * tensor.itemsize


def current_recorder():
    """Return the recorder that runs on this thread, or None."""
    return getattr(on_this_thread, "recorder", None)


def record(function, arguments, named, tensors):
    """Run the function and its gradients once; return its Plan, or None if it cannot be replayed."""
    copies = {id(x): x.detach().requires_grad_(x.requires_grad) for x in tensors}
    arguments, named = tree_map(lambda x: copies.get(id(x), x), (arguments, named))
    recorder = on_this_thread.recorder = Recorder([*copies.values()])
    try:
        # the innermost hooks on saved tensors count: a checkpoint around the loss must not see the record
        hidden = torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), lambda x: x)
        with hidden, torch.autograd.set_multithreading_enabled(False), recorder:
            out, gradients = function(*arguments, **named), ()
            if out.requires_grad:
                wanted = [x for x in copies.values() if x.requires_grad]
                gradients = torch.autograd.grad(out, wanted, recorder.start_backward(out), allow_unused=True)
        return Plan(recorder, out.detach(), gradients)
    except CannotRecord:
        return None
    finally:
        on_this_thread.recorder = None


class Recorder(TorchDispatchMode):
    """Sees each operation of PyTorch, and each launch of a kernel, for which gpu/tiles.py calls launch()."""

    def __init__(self, tensors):
        super().__init__()
        self.memories, self.steps, self.stage = [Memory(x) for x in tensors], ([], []), 0
        self.inputs, self.keep, self.hosts, self.bytes, self.ignoring = len(tensors), [], set(), 0, False

    def start_backward(self, out):
        """Return the upstream gradient; from now on steps belong to stage 1."""
        self.ignoring, self.stage, self.grad = True, 1, len(self.memories)
        self.memories.append(Memory(torch.ones_like(out)))
        self.ignoring = False
        return self.memories[-1].tensor

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        outs = operator(*arguments, **named or {})
        if self.ignoring:
            return outs
        given, found = ([x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
                        for tree in ((arguments, named), outs))
        if ON_CPU and not any(map(self.on_device, given)) and (given or "full" in operator.name()):
            self.hosts |= {x.data_ptr() for x in found}
        self.keep += found                                 # so that no address is used again
        is_view = operator.is_view or operator.name() in ("aten::detach", "aten::_unsafe_view")
        if is_view or not any(map(self.on_device, given + found)):
            return outs                                    # numbers on the host are part of the key
        if not found or not all(map(self.on_device, found)):
            raise CannotRecord(f"{operator.name()} reads a value")
        is_empty = "empty" in operator.name()
        if is_empty:
            self.add_memories(found, is_empty=True)
        else:                                              # arguments first: a result may be one of them
            values = replace([list(arguments), named or {}], lambda x: self.part(x, True))
            self.steps[self.stage].append(Operation(operator, *values, self.add_memories(found)))
        return outs

    def on_device(self, x):
        """Return whether a tensor is where the rows are; else it is a number on the host."""
        return x.is_cuda or ON_CPU and x.data_ptr() not in self.hosts

    def add_memories(self, tensors, is_empty=False):
        """Return the numbers of the new memories that tensors begin; None for a tensor in a known one."""
        numbers = []
        for x in tensors:
            if x.numel() and self.find(x) is None:
                numbers.append(len(self.memories))
                self.memories.append(Memory(x, is_empty))
                self.bytes += self.memories[-1].size
                if not is_empty:
                    self.memories[-1].stages.add(self.stage)
            elif x.numel():
                numbers.append(None)
        if self.bytes > MAX_WORKSPACE:
            raise CannotRecord("too much memory")
        return numbers

    def find(self, x):
        """Return the number of the memory that holds a tensor, or None."""
        address, memories = x.data_ptr(), self.memories
        found = [i for i, memory in enumerate(memories) if 0 <= address - memory.start < memory.size]
        exact = [i for i in found if memories[i].start == address]
        if len(found) > 1 and not exact:
            raise CannotRecord("inputs overlap")
        return (exact or found or [None])[0]

    def part(self, x, is_operand=False):
        """Return the Part of a tensor, Rows of a tensor descriptor, and anything else as it is.

        is_operand  of an operation, which needs a tensor; a launch needs only an address
        """
        if hasattr(x, "block_shape"):
            last = x.block_shape if ON_CPU else x.padding
            return Rows(self.part(x.base, is_operand), tuple(x.shape), tuple(x.strides), last)
        if not isinstance(x, torch.Tensor) or is_operand and not (x.numel() and self.on_device(x)):
            return x
        i = self.find(x) if x.numel() else None
        if i is None:
            if x.numel():
                raise CannotRecord("a tensor of unknown origin")
            return 0
        memory = self.memories[i]
        memory.stages.add(self.stage)
        offset, whole, view = x.data_ptr() - memory.start, memory.tensor, None
        if is_operand:
            memory.is_tensor = True
            if whole.dtype != x.dtype or offset % x.itemsize:
                raise CannotRecord("a view in another dtype")
            if offset or (x.shape, x.stride()) != (whole.shape, whole.stride()):
                view = x.shape, x.stride(), offset // x.itemsize
        return Part(i, offset, view)

    def result(self, x):
        """Return the Part of a result of the loss. If only kernels know its memory, that gets its shape."""
        if x is not None and x.numel():
            memory = self.memories[self.part(x).memory]
            if not memory.is_tensor and (memory.start, memory.size) == (x.data_ptr(), x.numel() * x.itemsize):
                memory.tensor = x
        return self.part(x, True)

    def launch(self, kernel, run, grid, arguments, named):
        """Launch a kernel with run, its JITFunction.run, and add the launch to the steps."""
        self.ignoring = True
        try:
            compiled = run(*arguments, grid=grid, warmup=False, **named)
        finally:
            self.ignoring = False
        values = [*arguments, *(named[name] for name in kernel.arg_names[len(arguments):])]
        values = replace(values, lambda x: self.part(x, ON_CPU))
        if ON_CPU:
            step = Operation(kernel[grid], values, {}, [])
        else:
            if compiled.metadata.global_scratch_size or compiled.metadata.profile_scratch_size:
                raise CannotRecord("scratch memory")
            pointers = [(i, *x[:2]) for i, x in enumerate(values) if type(x) is Part]
            nested = [(i, x) for i, x in enumerate(values) if type(x) is not Part and has_part(x)]
            step = Launch(compiled.run, (*grid, 1, 1)[:3], compiled.function, compiled.packed_metadata,
                          values, pointers, nested)
        self.steps[self.stage].append(step)
        return compiled


def replace(x, new):
    """Return x with new(leaf) in place of each leaf. Lists, tuples and dicts are no leaves; a Part is one."""
    if isinstance(x, dict):
        return {name: replace(value, new) for name, value in x.items()}
    if type(x) is Part or not isinstance(x, (list, tuple)):
        return new(x)
    values = [replace(value, new) for value in x]
    return type(x)(*values) if hasattr(x, "_fields") else type(x)(values)


def has_part(x):
    """Return whether an argument of a launch contains a Part."""
    return type(x) in (Part, Rows) or isinstance(x, tuple) and any(map(has_part, x))


# ── replaying ──────────────────────────────────────────────────────────────────────────────────────────────


class Plan:
    """The steps of a loss (stage 0) and of its gradients (stage 1), and the memories that they use."""

    def __init__(self, recorder, out, gradients):
        memories, self.device, self.steps = recorder.memories, out.device, recorder.steps
        recorder.stage, self.gradients = 0, None
        self.out = recorder.result(out)
        if gradients:
            recorder.stage, self.grad, found = 1, recorder.grad, iter(gradients)
            self.gradients = [recorder.result(next(found)) if memory.tensor.requires_grad else None
                              for memory in memories[:recorder.inputs]]
        # three workspaces are the last memories: what both stages use, what only stage 0, only stage 1 uses
        self.count, sizes = len(memories) + 3, [0, 0, 0]
        self.new, self.parts = ([], []), ([], [])              # tensors to allocate; parts of workspaces
        for i, memory in enumerate(memories):
            if memory.is_empty and memory.stages:
                stage = min(memory.stages)
                if memory.is_tensor:
                    if not memory.tensor.is_contiguous():
                        raise CannotRecord("an empty tensor that is not contiguous")
                    self.new[stage].append((i, memory.tensor.shape, memory.tensor.dtype))
                    continue
                kind = 0 if len(memory.stages) == 2 else 1 + stage
                for user in memory.stages:
                    self.parts[user].append((i, len(memories) + kind, sizes[kind]))
                sizes[kind] += -(-memory.size // ALIGNMENT) * ALIGNMENT
        for kind, stage in enumerate((0, 0, 1)):
            if sizes[kind]:
                self.new[stage].append((len(memories) + kind, (sizes[kind],), torch.uint8))
        self.saved = [i for i, memory in enumerate(memories) if 1 in memory.stages and (
            i < recorder.inputs or 0 in memory.stages and memory.is_tensor)]
        self.saved += [len(memories)] if sizes[0] else []
        self.autocast = torch.is_autocast_enabled(self.device.type)

    def run(self, stage, held):
        """Run the steps of a stage. held: the tensor of each memory that exists already, else None."""
        for i, shape, dtype in self.new[stage]:
            held[i] = torch.empty(shape, dtype=dtype, device=self.device)
        address = [0 if x is None else x.data_ptr() for x in held]
        for i, workspace, offset in self.parts[stage]:
            address[i] = address[workspace] + offset
        stream = None if ON_CPU else stream_getter()(self.device.index)
        for step in self.steps[stage]:
            if type(step) is Launch:
                run, (x, y, z), function, metadata, arguments, pointers, nested = step
                arguments = arguments.copy()
                for i, memory, offset in pointers:
                    arguments[i] = address[memory] + offset
                for i, part in nested:
                    arguments[i] = with_addresses(part, address)
                run(x, y, z, stream, function, metadata, None, None, None, *arguments)
            elif self.autocast:                                # an operation already has what autocast added
                with torch.autocast(self.device.type, enabled=False):
                    run_operation(step, held, address)
            else:
                run_operation(step, held, address)


@functools.cache
def stream_getter():
    """Return Triton's function from a GPU's index to its current stream."""
    from triton.runtime import driver
    return driver.active.get_current_stream


def with_addresses(x, address):
    """Return an argument of a launch with numbers in place of each Part."""
    kind = type(x)
    if kind is Part:
        return address[x.memory] + x.offset
    if kind is Rows:
        return Rows(with_addresses(x.address, address), x.shape, x.strides, x.padding)
    return tuple([with_addresses(part, address) for part in x]) if isinstance(x, tuple) else x


def run_operation(step, held, address):
    """Run an operation of PyTorch, and keep its new results."""
    arguments, named = replace([step.arguments, step.named], lambda x: with_tensor(x, held))
    found = step.function(*arguments, **named)
    found = found if isinstance(found, (tuple, list)) else [found]
    for i, x in zip(step.results, [x for x in found if x is not None and x.numel()]):
        if i is not None:
            held[i], address[i] = x, x.data_ptr()


def with_tensor(x, held):
    """Return an argument of an operation with a tensor in place of a Part."""
    if type(x) is Part:
        tensor = held[x.memory]
        if x.view is None:
            return tensor
        shape, stride, offset = x.view
        return tensor.as_strided(shape, stride, tensor.storage_offset() + offset)
    if type(x) is Rows:                                        # only in Triton's interpreter
        from triton.tools.tensor_descriptor import TensorDescriptor
        return TensorDescriptor(with_tensor(x.address, held), x.shape, x.strides, x.padding)
    return x


class Replay(torch.autograd.Function):
    """A Plan as a differentiable operation."""

    @staticmethod
    def forward(ctx, plan, *tensors):
        held = [*tensors, *[None] * (plan.count - len(tensors))]
        plan.run(0, held)
        ctx.plan = plan
        if plan.gradients:
            ctx.save_for_backward(*[held[i] for i in plan.saved])
        return with_tensor(plan.out, held)

    @staticmethod
    def backward(ctx, grad):
        plan = ctx.plan
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND_DERIVATIVE)
        grad, held = grad.contiguous(), [None] * plan.count
        held[plan.grad] = grad.clone() if grad.data_ptr() % 16 else grad
        for i, x in zip(plan.saved, ctx.saved_tensors):
            held[i] = x
        plan.run(1, held)
        return None, *[with_tensor(x, held) for x in plan.gradients]
