"""Replay a loss: a first call records its steps, and later calls with the same shapes repeat only these.

With small batches, the GPU waits for the host. What the host does for a loss depends on shapes, dtypes, flags
and numbers: these form the key of a call. It never depends on values in GPU memory. So calls with equal keys
do the same work at other addresses. The first call with a key also runs the loss and its gradient once on
copies of the arguments. Meanwhile a Recorder records the steps: launches of Triton kernels and operations of
PyTorch. A Plan holds the steps, with a Part for each tensor. Tensors that only kernels use share a workspace.

A call is not replayed if it runs on the CPU or not in Triton, if it needs more memory than MAX_WORKSPACE, if
recording raises CannotRecord, if its first argument is passed by name, or if its key is new after MAX_PLANS
keys or while a CUDA graph is captured. Profilers that use Triton's launch hooks do not see replayed launches.
"""
import functools
import threading

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import heuristics
from .checks import refuse_second_derivative

MAX_PLANS = 1024                # a limit, as each new value of a number, such as temperature=0.1, adds a plan
MAX_WORKSPACE = 2 ** 29         # 512 MiB: larger problems keep the GPU busy, so replaying saves no time
ALIGNMENT = 256                 # parts of a workspace start at multiples of this number of bytes
PLANS = {}                      # key -> Plan, or None if calls with the key cannot be replayed
TENSORS, NUMBERS = (torch.Tensor, torch.nn.Parameter), (float, int, str, bool, type(None))
ON_THIS_THREAD = threading.local()                             # .recorder: the thread's Recorder


def without_compile(function):
    """Decorate a function so that torch.compile does not trace it (graph break), except for impl="eager"."""
    @functools.wraps(function)
    def run(*arguments, impl="auto", **named):
        if torch.compiler.is_compiling() and impl != "eager":
            return torch.compiler.disable(function)(*arguments, impl=impl, **named)
        return function(*arguments, impl=impl, **named)
    return run


def replayed(function):
    """Decorate a loss so that it is replayed; the loss must not read values of tensors on a GPU."""
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
    """Return whether a tensor is on a GPU. Tests replace this function."""
    return x.is_cuda


def capturing():
    """Return whether a CUDA graph is being captured. Tests replace this function."""
    return torch.cuda.is_current_stream_capturing()


def key_of(function, arguments, named):
    """Return (key of the call, list of its tensors, each once); (None, ()) if the call cannot be replayed."""
    tensors, numbers, key = [], {}, [function, len(arguments), *named]
    values = [*arguments, *named.values()]
    for x in values:                                       # the loop appends the elements of tuples to values
        kind = type(x)
        if kind in TENSORS:
            if x.layout is not torch.strided or not on_gpu(x):  # a replay would miss new values on the CPU
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
    """Return the tensor from which gather_rows made x; None if x is not from gather_rows."""
    return x.__dict__.get("gathered_from", lambda: None)()


# ── recording ──────────────────────────────────────────────────────────────────────────────────────────────


class CannotRecord(Exception):
    """Raised if a loss does something that a plan cannot repeat."""


class Memory:
    """A block of memory that a recorded operation or launch uses: the storage of a tensor.

    kind       "given" (an input or the upstream gradient), "empty" (of torch.empty) or "result" (of a step)
    is_tensor  False: only kernels use the memory, so it becomes a part of a workspace
    stages     set of stages that use the memory: 0 (forward), 1 (backward)
    """

    def __init__(self, kind, start, size, shape, stride, dtype):
        self.kind, self.is_tensor, self.stages = kind, kind != "empty", set()
        self.start, self.size, self.shape, self.stride, self.dtype = start, size, shape, stride, dtype
        self.home, self.offset = self, 0     # home: the workspace that holds it; offset: where in home


def current_recorder():
    """Return the recorder that runs on this thread, or None."""
    return getattr(ON_THIS_THREAD, "recorder", None)


def record(function, arguments, named, tensors):
    """Run the function and its gradients on copies of the tensors; return the Plan, or None if this fails."""
    try:
        copies = {id(x): copy_of(x) for x in tensors}
        for x in tensors:
            if "own_rows" in x.__dict__:             # from gather_rows; checks.py reads these two attributes
                copies[id(x)].own_rows = x.own_rows
                copies[id(x)].gathered_from = functools.partial(copies.get, id(gathered_from(x)))
        recorder = ON_THIS_THREAD.recorder = Recorder(copies.values())
        values = map_leaves(lambda x: copies.get(id(x), x), [*arguments, *named.values()])
        named = dict(zip(named, values[len(arguments):]))
        # without these hooks, a checkpoint around the loss would count what the recorded run saves
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
    """Return a copy of x with the same strides and alignment. Copies share no memory, even if inputs do."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
    if not 0 < x.numel() <= span <= MAX_WORKSPACE // x.itemsize or x.is_neg():
        raise CannotRecord("no elements, too many, elements that share memory, or a negated view")
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
    """Return a list of the leaves of nested lists and tuples."""
    return [leaf for part in x for leaf in leaves(part)] if isinstance(x, (tuple, list)) else [x]


def tensors_in(x):
    """Return the tensors among the leaves of x; a tensor descriptor counts as the tensor it describes."""
    found = [getattr(leaf, "base", leaf) for leaf in leaves(x)]
    return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]


class Recorder(TorchDispatchMode):
    """Records each operation of PyTorch and each kernel launch; for launches, gpu/tiles.py calls launch()."""

    def __init__(self, inputs):
        super().__init__()
        self.memories, self.bytes, self.keep, self.stage = {}, 0, [], 0
        self.steps = [], []            # for forward and for backward: list of arguments for Stage.step()
        self.inputs = [self.add_memory("given", x) for x in inputs]

    def gradients(self, out, inputs):
        """Record backward (stage 1); return the gradients of the inputs, None for inputs without gradient."""
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
            return outs                                        # no work on the GPU: nothing to replay
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
        """Launch a kernel by run (JITFunction.run); record a call of its CompiledKernel.run as the step."""
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
        """Add a Memory for x and return it; return None if x has no elements or its memory is known."""
        storage = x.untyped_storage()
        if not x.numel() or storage.data_ptr() in self.memories:
            return None
        memory = Memory(kind, x.data_ptr(), storage.nbytes(), x.shape, x.stride(), x.dtype)
        self.memories[storage.data_ptr()] = memory
        self.keep.append(x)                                    # keeps x alive, so its address is not reused
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
        """Record that this stage uses tensors; as_tensors=False: that a kernel uses only their addresses."""
        for x in [x for x in tensors if on_gpu(x) and x.numel()]:
            memory = self.memory_of(x)
            memory.stages.add(self.stage)
            memory.is_tensor |= as_tensors
            if as_tensors and memory.dtype != x.dtype:
                raise CannotRecord("a view in another dtype")

    def use_result(self, stage, x):
        """Record that a stage returns x; its Memory gets x's shape if only kernels used it so far."""
        memory, self.stage = self.memory_of(x), stage
        if not memory.is_tensor and memory.size == x.numel() * x.itemsize:
            memory.shape, memory.stride = x.shape, x.stride()
        self.use([x], True)


# ── replaying ──────────────────────────────────────────────────────────────────────────────────────────────


class Part:
    """Stands for a tensor in a step: the tensor in a slot (see Stage), plus an offset in bytes.

    view  None: a kernel launch needs only the address; "all": an operation needs the slot's whole tensor;
          (shape, stride, offset in elements): an operation needs this view of the slot's tensor
    """

    def __init__(self, slot, offset, view):
        self.slot, self.offset, self.view = slot, offset, view


class Descriptor:
    """Stands for a tensor descriptor in a launch. address: a Part or a number; fields: other attributes."""

    def __init__(self, address, fields):
        self.__dict__.update(fields, address=address, fields=fields)

    @property
    def base(self):
        return self

    def data_ptr(self):
        return self.address


def fill(x, held, address):
    """Return x with its Parts replaced by tensors or addresses; slot i has tensor held[i] at address[i]."""
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
    """The steps of forward or backward; each tensor they get, allocate or compute has a slot number."""

    def __init__(self, recorder, stage, given, new, results):
        """Convert the recorded steps. The stage gets each Memory in `given` and allocates each in `new`."""
        self.new = [(memory.shape, memory.stride, memory.dtype) for memory in new]
        self.slots = {memory: i for i, memory in enumerate([*given, *new])}
        self.steps = [self.step(recorder, *step) for step in recorder.steps[stage]]
        self.results = [self.part(recorder, x, True) for x in results]
        self.has_operations = any(names is not None for *_, names, _ in self.steps)

    def step(self, recorder, function, values, names, found):
        """Return (function, arguments, pointers, tensors, others, names, is_new), a step for run().

        pointers, tensors    [(i, slot, offset)]: argument i is an address; [(i, slot)]: it is a slot's tensor
        others               [(i, x)]: argument i is fill(x), for example a view or a list of tensors
        names, is_new        names of keyword arguments (None: launch); per result, whether it gets a new slot
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
        """Return a Part for a tensor x, a Descriptor for a tensor descriptor, and any other x as it is."""
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
        """Run the steps, return the results. held: list of the given tensors; run() appends the others."""
        device = held[0].device
        if self.has_operations and torch.is_autocast_enabled(device.type):
            with torch.autocast(device.type, enabled=False):      # the steps already include the casts
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
    """Return the current stream of GPU `index` as a number. Tests replace this function."""
    from triton.runtime import driver
    torch.cuda.is_current_stream_capturing()     # only called to set the GPU context of a new thread
    return driver.active.get_current_stream(index)


def workspaces(memories):
    """Put memories that only kernels use into workspaces, one per set of stages; return the workspaces."""
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
    """The steps of a loss and of its gradients, and the slots that forward saves for backward."""

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
    """Runs a Plan as a differentiable operation."""

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
        refuse_second_derivative("kernels")
        given = list(map(with_layout, (grad, *ctx.saved_tensors), ctx.plan.layouts))
        return None, *ctx.plan.backward.run(given)


def with_layout(x, layout):
    """Return x, or a copy if saved-tensor hooks have changed its recorded strides or alignment."""
    stride, alignment = layout
    if x.stride() == stride and x.data_ptr() % 16 == alignment and not x.is_neg():
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
