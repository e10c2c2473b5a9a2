"""Replay a loss: after the first call with the same shapes, the host only repeats launches and operations.

While batches are small, a GPU waits for the host. What the host does for a loss depends on shapes, dtypes,
flags and numbers (the key), never on values in GPU memory: the same key means the same work at other
addresses. So the first call with a key also runs the loss and its gradient once on copies of its arguments,
under a Recorder, which sees each launch of a Triton kernel and each operation of PyTorch. From these steps it
makes a Plan, with a Part in place of each tensor. Memory that only kernels use is allocated as a workspace.

Not replayed: calls on the CPU, other implementations than Triton, problems that need more than MAX_WORKSPACE,
new keys while a CUDA graph is captured or after MAX_PLANS, and what raises CannotRecord. Profilers that use
Triton's launch hooks do not see replayed launches.
"""
import functools
import threading

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import heuristics

MAX_PLANS = 1024                # no more are made: a temperature that changes would need one in each step
MAX_WORKSPACE = 2 ** 29         # 512 MiB: larger problems do not wait for the host
ALIGNMENT = 256                 # bytes, of the parts of a workspace
PLANS = {}                      # key -> Plan, or None: cannot be replayed
TENSORS, NUMBERS = (torch.Tensor, torch.nn.Parameter), (float, int, str, bool, type(None))
ON_THIS_THREAD = threading.local()                             # .recorder
NO_SECOND_DERIVATIVE = ("kernels: the fused operations do not support create_graph=True, which second "
                        "derivatives need; use impl='eager'")


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
    @without_compile
    @functools.wraps(function)
    def run(*arguments, impl="auto", **named):
        named["impl"] = impl
        x = arguments[0] if arguments else None
        if (type(x) not in TENSORS or not on_gpu(x) or current_recorder() is not None
                or heuristics.choose_impl(impl, x) != "triton"):
            return function(*arguments, **named)
        key, tensors = key_of(function, arguments, named)
        plan = PLANS.get(key)
        if key is not None and key not in PLANS and len(PLANS) < MAX_PLANS and not capturing():
            plan = PLANS[key] = record(function, arguments, named, tensors)
        return function(*arguments, **named) if plan is None else Replay.apply(plan, *tensors)
    return run


def on_gpu(x):
    """Return whether a tensor is on a GPU. Tests replace this."""
    return x.is_cuda


def capturing():
    """Return whether a CUDA graph is captured. Tests replace this."""
    return torch.cuda.is_current_stream_capturing()


def key_of(function, arguments, named):
    """Return (all that decides what the host does, the different tensors); (None, ()) if not known."""
    tensors, numbers, key = [], {}, [function, len(arguments), *named]
    values = [*arguments, *named.values()]
    for x in values:                                           # the list grows by the elements of tuples
        kind = type(x)
        if kind in TENSORS:
            if x.layout is not torch.strided or not on_gpu(x):     # values on the CPU may be read
                return None, ()
            number = numbers.setdefault(id(x), len(tensors))
            if number == len(tensors):
                tensors.append(x)
            gathered = x.__dict__ and (x.__dict__.get("own_rows"), numbers.get(id(gathered_from(x))))
            key.append((number, x.shape, x.stride(), x.dtype, x.get_device(), x.requires_grad, x.is_neg(),
                        x.data_ptr() % 16, gathered or None))
        elif kind in NUMBERS:
            key.append((kind, x))
        elif kind is tuple or kind is list:
            key.append((kind, len(x)))
            values += x
        else:
            return None, ()
    device = tensors[0].device.type
    if device == "cuda" and tensors[0].get_device() != torch.cuda.current_device():
        return None, ()
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    return (*key, autocast, torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
            torch.get_default_dtype(), heuristics.WEIGHT_BUFFER_BYTES, heuristics.STRIP_BYTES), tensors


def gathered_from(x):
    """Return the tensor from which gather_rows made x, or None."""
    return x.__dict__.get("gathered_from", lambda: None)()


# ── recording ──────────────────────────────────────────────────────────────────────────────────────────────


class CannotRecord(Exception):
    """A loss does something that a plan cannot repeat."""


class Memory:
    """Memory that a recorder has seen.

    kind       "given" (an input, the upstream gradient), "empty" (from torch.empty), or "result"
    is_tensor  False: only kernels use it, so it is a part of a workspace
    stages     that use it: 0 (forward), 1 (backward)
    """

    def __init__(self, kind, start, size, shape, stride, dtype):
        self.kind, self.is_tensor, self.stages = kind, kind != "empty", set()
        self.start, self.size, self.shape, self.stride, self.dtype = start, size, shape, stride, dtype
        self.home, self.offset = self, 0                       # the workspace, and where in it


def current_recorder():
    """Return the recorder that runs on this thread, or None."""
    return getattr(ON_THIS_THREAD, "recorder", None)


def record(function, arguments, named, tensors):
    """Run the function and its gradients once; return its Plan, or None if it cannot be replayed."""
    try:
        copies = {id(x): copy_of(x) for x in tensors}
        for x in tensors:
            if "own_rows" in x.__dict__:                       # from gather_rows, for checks
                copies[id(x)].own_rows = x.own_rows
                copies[id(x)].gathered_from = functools.partial(copies.get, id(gathered_from(x)))
        recorder = ON_THIS_THREAD.recorder = Recorder(copies.values())
        values = map_leaves(lambda x: copies.get(id(x), x), [*arguments, *named.values()])
        named = dict(zip(named, values[len(arguments):]))
        # the innermost hooks on saved tensors count: a checkpoint around the loss must not see the record
        hidden = torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), lambda x: x)
        with hidden, torch.autograd.set_multithreading_enabled(False):
            with recorder:
                out = function(*values[:len(arguments)], **named)
            return Plan(recorder, out.detach(), recorder.gradients(out, [*copies.values()]))
    except (CannotRecord, torch.OutOfMemoryError):
        return None
    finally:
        ON_THIS_THREAD.recorder = None


def copy_of(x):
    """Return a copy of x with its strides and alignment. Copies share no memory, even if inputs do."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
    if not 0 < x.numel() <= span <= MAX_WORKSPACE // x.itemsize or x.is_neg():
        raise CannotRecord("no elements, elements that share memory, too many, or negated ones")
    shift = x.data_ptr() % 16 // x.itemsize
    memory = x.new_empty(shift + span)
    memory[shift:] = x.detach().as_strided((span,), (1,))
    return memory.as_strided(x.shape, x.stride(), shift).requires_grad_(x.requires_grad)


def map_leaves(function, x):
    """Return nested lists and tuples with function(leaf) in place of each leaf."""
    if isinstance(x, (tuple, list)):
        return (list if isinstance(x, list) else tuple)([map_leaves(function, part) for part in x])
    return function(x)


def leaves(x):
    """Return the leaves of nested lists and tuples."""
    return [leaf for part in x for leaf in leaves(part)] if isinstance(x, (tuple, list)) else [x]


def tensors_in(x):
    """Return the tensors among the leaves; of a tensor descriptor, its tensor."""
    found = [getattr(leaf, "base", leaf) for leaf in leaves(x)]
    return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]


class Recorder(TorchDispatchMode):
    """Sees each operation of PyTorch, and each launch of a kernel, for which gpu/tiles.py calls launch()."""

    def __init__(self, inputs):
        super().__init__()
        self.memories, self.bytes, self.keep, self.stage = {}, 0, [], 0
        self.steps = [], []            # of a stage: (function, arguments, names of keywords, new memories)
        self.inputs = [self.add_memory("given", x) for x in inputs]

    def gradients(self, out, inputs):
        """Record backward, stage 1; return the gradients of the inputs, None where there is none."""
        if not out.requires_grad:
            return []
        grad = torch.ones_like(out, memory_format=torch.contiguous_format)
        self.stage, self.grad = 1, self.add_memory("given", grad)
        wanted = [x for x in inputs if x.requires_grad]
        with self:
            found = iter(torch.autograd.grad(out, wanted, grad, allow_unused=True))
        return [next(found) if x.requires_grad else None for x in inputs]

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        name, values = operator.name(), [*arguments, *(named or {}).values()]
        outs = operator(*arguments, **named or {})
        given, found = tensors_in(values), tensors_in(outs)
        is_view = operator.is_view or name in ("aten::detach", "aten::_unsafe_view")
        if is_view or not any(map(on_gpu, given + found)):
            return outs                                        # numbers on the host are part of the key
        has_dynamic_shape = torch.Tag.dynamic_output_shape in operator.tags and name != "aten::index.Tensor"
        if not found or not all(map(on_gpu, found)) or has_dynamic_shape:
            raise CannotRecord(f"{name} reads a value")
        if "empty" in name:
            for x in found:
                self.add_memory("empty", x)
        else:
            self.use(given, True)
            new = [self.add_memory("result", x) for x in found]
            self.use(found, True)
            self.steps[self.stage].append((operator, values, list(named or {}), new))
        return outs

    def launch(self, kernel, run, grid, arguments, named):
        """Launch a kernel with run, its JITFunction.run, and record how that calls CompiledKernel.run."""
        compiled = run(*arguments, grid=grid, warmup=False, **named)
        if compiled.metadata.global_scratch_size or compiled.metadata.profile_scratch_size:
            raise CannotRecord("scratch memory")
        values = [*arguments, *(named[name] for name in kernel.arg_names[len(arguments):])]
        self.use(tensors_in(values), False)
        self.keep.append(compiled)
        head = [*(*grid, 1, 1)[:3], None, compiled.function, compiled.packed_metadata, None, None, None]
        self.steps[self.stage].append((compiled.run, head + values, None, []))
        return compiled

    def add_memory(self, kind, x):
        """Return the new Memory that x begins; None if x has no elements or its memory is known."""
        storage = x.untyped_storage()
        if not x.numel() or storage.data_ptr() in self.memories:
            return None
        memory = Memory(kind, x.data_ptr(), storage.nbytes(), x.shape, x.stride(), x.dtype)
        self.memories[storage.data_ptr()] = memory
        self.keep.append(x)                                    # so that no address is used again
        self.bytes += memory.size
        if self.bytes > MAX_WORKSPACE:
            raise CannotRecord("too much memory")
        return memory

    def memory_of(self, x):
        """Return the Memory that holds x."""
        address = x.untyped_storage().data_ptr()
        if address not in self.memories:
            raise CannotRecord("a tensor of unknown origin")
        return self.memories[address]

    def use(self, tensors, as_tensors):
        """Note that this stage uses tensors, or only their addresses."""
        for x in [x for x in tensors if on_gpu(x) and x.numel()]:
            memory = self.memory_of(x)
            memory.stages.add(self.stage)
            memory.is_tensor |= as_tensors
            if as_tensors and memory.dtype != x.dtype:
                raise CannotRecord("a view in another dtype")

    def use_result(self, stage, x):
        """Note that a stage returns x. If only kernels know its memory, that gets the shape of x."""
        memory, self.stage = self.memory_of(x), stage
        if not memory.is_tensor and memory.size == x.numel() * x.itemsize:
            memory.shape, memory.stride = x.shape, x.stride()
        self.use([x], True)


# ── replaying ──────────────────────────────────────────────────────────────────────────────────────────────


class Part:
    """A tensor in a step: so many bytes from the start of the tensor in a slot.

    view  None in a launch, which needs only an address; in an operation "all", for the tensor of the slot,
          or (shape, stride, offset in elements)
    """

    def __init__(self, slot, offset, view):
        self.slot, self.offset, self.view = slot, offset, view


class Descriptor:
    """A tensor descriptor in a launch. address: a Part, or what the launcher reads; fields: the others."""

    def __init__(self, address, fields):
        self.__dict__.update(fields, address=address, fields=fields)

    @property
    def base(self):
        return self

    def data_ptr(self):
        return self.address


def fill(x, held, address):
    """Return an argument with what the slots hold: the tensor, or the address, of each Part."""
    kind = type(x)
    if kind is Part:
        if x.view is None:
            return address[x.slot] + x.offset
        if x.view == "all":
            return held[x.slot]
        shape, stride, offset = x.view
        return held[x.slot].as_strided(shape, stride, held[x.slot].storage_offset() + offset)
    if kind is Descriptor:
        return Descriptor(fill(x.address, held, address), x.fields)
    return kind([fill(part, held, address) for part in x]) if kind is tuple or kind is list else x


class Stage:
    """Forward or backward. Its slots hold the tensors that it gets, allocates, and computes by operations."""

    def __init__(self, recorder, stage, given, new, results):
        """Write the steps of a stage. given, new: memories that it gets and allocates."""
        self.new = [(memory.shape, memory.stride, memory.dtype) for memory in new]
        self.slots = {memory: i for i, memory in enumerate([*given, *new])}
        self.steps = [self.step(recorder, *step) for step in recorder.steps[stage]]
        self.results = [self.part(recorder, x, True) for x in results]
        self.has_operations = any(names is not None for *_, names, _ in self.steps)

    def step(self, recorder, function, values, names, found):
        """Return (function, arguments, pointers, tensors, others, names, is_new) for run().

        pointers, tensors    arguments that are an address, (i, slot, offset); a whole tensor, (i, slot)
        others               other arguments that contain a Part, (i, x)
        names, is_new        of the last arguments; None in a launch. Whether a result fills the next slot
        """
        values = map_leaves(lambda x: self.part(recorder, x, names is not None), values)
        changing = [(i, x) for i, x in enumerate(values)
                    if any(type(y) in (Part, Descriptor) for y in leaves(x))]
        pointers = [(i, x.slot, x.offset) for i, x in changing if type(x) is Part and x.view is None]
        tensors = [(i, x.slot) for i, x in changing if type(x) is Part and x.view == "all"]
        others = [(i, x) for i, x in changing if type(x) is not Part or x.view not in (None, "all")]
        for memory in filter(None, found):
            self.slots[memory] = len(self.slots)
        return function, values, pointers, tensors, others, names, [memory is not None for memory in found]

    def part(self, recorder, x, is_operand):
        """Return the Part of a tensor, a Descriptor, and anything else as it is."""
        if hasattr(x, "block_shape"):
            fields = {name: value for name, value in vars(x).items() if name != "base"}
            return Descriptor(self.part(recorder, x.base, False), fields)
        if not isinstance(x, torch.Tensor) or is_operand and not (on_gpu(x) and x.numel()):
            return x
        if not x.numel():
            return 0
        memory = recorder.memory_of(x)
        slot, start = self.slots[memory.home], x.data_ptr() - memory.start
        if not is_operand:
            return Part(slot, memory.offset + start, None)
        is_all = start == 0 and (x.shape, x.stride()) == (memory.shape, memory.stride)
        return Part(slot, 0, "all" if is_all else (x.shape, x.stride(), start // x.itemsize))

    def run(self, held):
        """Return the results. held: a list of the tensors that the stage gets; the others are appended."""
        device = held[0].device
        if self.has_operations and torch.is_autocast_enabled(device.type):     # the casts were recorded
            with torch.autocast(device.type, enabled=False):
                return self.run(held)
        for shape, stride, dtype in self.new:
            held.append(torch.empty_strided(shape, stride, dtype=dtype, device=device))
        address, stream = [x.data_ptr() for x in held], current_stream(device.index)
        for function, arguments, pointers, tensors, others, names, is_new in self.steps:
            arguments = arguments.copy()
            for i, slot, offset in pointers:
                arguments[i] = address[slot] + offset
            for i, slot in tensors:
                arguments[i] = held[slot]
            for i, x in others:
                arguments[i] = fill(x, held, address)
            if names is None:
                arguments[3] = stream
                function(*arguments)
                continue
            count = len(arguments) - len(names)
            outs = function(*arguments[:count], **dict(zip(names, arguments[count:])))
            for x, is_next in zip(tensors_in(outs) if isinstance(outs, (tuple, list)) else [outs], is_new):
                if is_next:
                    held.append(x)
                    address.append(x.data_ptr())
        return fill(self.results, held, address)


def current_stream(index):
    """Return the current stream of a GPU, a number. Tests replace this."""
    from triton.runtime import driver
    torch.cuda.is_current_stream_capturing()                   # gives a new thread the GPU's context
    return driver.active.get_current_stream(index)


def workspaces(memories):
    """Return the workspaces for what only kernels use: in forward, in backward, and in both."""
    found = {}
    for memory in memories:
        if memory.stages and not memory.is_tensor:
            new = Memory("empty", 0, 0, (0,), (1,), torch.uint8)
            memory.home = found.setdefault(frozenset(memory.stages), new)
            memory.offset, memory.home.stages = memory.home.size, memory.stages
            memory.home.size += -(-memory.size // ALIGNMENT) * ALIGNMENT
            memory.home.shape = (memory.home.size,)
    return [*found.values()]


class Plan:
    """The steps of a loss and of its gradients, and what is saved between them."""

    def __init__(self, recorder, out, gradients):
        self.backward, inputs = None, recorder.inputs
        self.keep = [x for x in recorder.keep if not isinstance(x, torch.Tensor)]      # compiled kernels
        recorder.use_result(0, out)
        for x in [x for x in gradients if x is not None]:
            recorder.use_result(1, x)
        memories = [*recorder.memories.values()]
        memories = [x for x in memories + workspaces(memories) if x.home is x and x.stages]
        new = [[x for x in memories if x.kind == "empty" and min(x.stages) == stage] for stage in (0, 1)]
        self.forward = Stage(recorder, 0, inputs, new[0], [out])
        if gradients:
            saved = [x for x in memories if 1 in x.stages and (0 in x.stages or x in inputs)]
            given, self.saved = [recorder.grad, *saved], [self.forward.slots[x] for x in saved]
            self.layouts = [(x.stride, x.start % 16) for x in given]
            self.backward = Stage(recorder, 1, given, new[1], gradients)


class Replay(torch.autograd.Function):
    """A Plan as a differentiable operation."""

    @staticmethod
    def forward(ctx, plan, *tensors):
        held = list(tensors)
        out, = plan.forward.run(held)
        if plan.backward is not None:
            ctx.plan = plan
            ctx.save_for_backward(*[held[i] for i in plan.saved])
        return out

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND_DERIVATIVE)
        given = list(map(with_layout, (grad, *ctx.saved_tensors), ctx.plan.layouts))
        return None, *ctx.plan.backward.run(given)


def with_layout(x, layout):
    """Return x, or a copy, with the recorded strides and alignment; saved-tensor hooks may change both."""
    stride, alignment = layout
    if x.stride() == stride and x.data_ptr() % 16 == alignment and not x.is_neg():
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
