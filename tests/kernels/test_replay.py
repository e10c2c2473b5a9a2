"""A replayed loss has the bits of the original. On a CPU, Triton's interpreter runs the recorded launches."""
import ctypes
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from comparing import DEVICE, GPU, LOSSES, labels_of

import kernels
from kernels import checks, replay

HALF, FLOAT = torch.float16, torch.float32
BIAS = torch.full((), -10.0, device=DEVICE, requires_grad=True)
CALLS = {name: lambda q, k, t, loss=loss: loss(q, k, t, "triton") for name, loss in LOSSES.items()} | {
    "bias": lambda q, k, t: kernels.sigmoid_loss(q, k, t, BIAS, impl="triton"),
    "normalize": lambda q, k, t: kernels.clip_loss(q, k, t, normalize=True, impl="triton"),
    "frozen keys": lambda q, k, t: kernels.similarity_lse(
        q, k.detach(), t, within=(labels_of(q), labels_of(k)), impl="triton"),
    "features": lambda q, k, t: kernels.similarity_lse(
        q, None, t, similar=(q.detach(), q.detach(), 0.3), impl="triton")}
READ_VALUES_ON_A_CPU = () if GPU else ("linear", "ignoring", "gathered_sup_con_loss")


def rows(*shape, dtype=torch.float32):
    return (torch.randn(shape, device=DEVICE) / shape[-1] ** 0.5).to(dtype)


LAYOUTS = {                                                    # functions of (n, d, dtype)
    "plain": lambda n, d, dtype: [rows(n, d, dtype=dtype) for _ in range(2)],
    "turned": lambda n, d, dtype: [rows(d, n, dtype=dtype).T for _ in range(2)],
    "not aligned": lambda n, d, dtype: [rows(n, d + 1, dtype=dtype).flatten()[1:n * d + 1].view(n, d)] * 2,
    "stepped": lambda n, d, dtype: [rows(2 * n, d + 32, dtype=dtype)[::2, 16:d + 16] for _ in range(2)],
    "one tensor": lambda n, d, dtype: [rows(n, d, dtype=dtype)] * 2,
    "halves": lambda n, d, dtype: rows(2 * n, d, dtype=dtype).split(n)}

# ── plans in the interpreter ────────────────────────────────────────────────────────────────────────────────


def tensor_at(address, like):
    """Return the tensor at an address, with the shape, strides and dtype of the tensor `like`."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(like.shape, like.stride()))
    memory = (ctypes.c_byte * (span * like.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())


def with_tensors(x, like):
    """Return an argument of CompiledKernel.run with tensors in place of addresses, as in `like`."""
    if isinstance(like, torch.Tensor):
        return tensor_at(x, like) if x else like
    if isinstance(x, replay.Descriptor):
        return type(like)(tensor_at(x.base.data_ptr(), like.base), **x.fields)
    return type(like)(*map(with_tensors, x, like)) if isinstance(x, tuple) else x


class Compiled:
    """Takes the place of Triton's CompiledKernel in the interpreter: a kernel and its recorded arguments."""
    function = packed_metadata = None
    metadata = SimpleNamespace(global_scratch_size=0, profile_scratch_size=0)

    def __init__(self, run, values):
        self.kernel, self.values = run, values

    def run(self, x, y, z, stream, function, metadata, info, enter, leave, *arguments):
        self.kernel(*map(with_tensors, arguments, self.values), grid=(x, y, z), warmup=False)


@pytest.fixture(autouse=True)
def replay_on_the_cpu(monkeypatch):
    """Start each test without plans; on a CPU, replay losses as on a GPU."""
    monkeypatch.setattr(replay, "PLANS", {})
    if GPU:
        return
    launch = replay.Recorder.launch

    def launch_in_interpreter(recorder, kernel, run, grid, arguments, named):
        def run_and_compile(*arguments, **named):
            recorder.__exit__(None, None, None)                # do not record the interpreter's operations
            run(*arguments, **named)
            recorder.__enter__()
            return Compiled(run, [*arguments, *(named[name] for name in kernel.arg_names[len(arguments):])])
        return launch(recorder, kernel, run_and_compile, grid, arguments, named)
    monkeypatch.setattr(replay.Recorder, "launch", launch_in_interpreter)
    monkeypatch.setattr(replay, "on_gpu", lambda x: True)
    monkeypatch.setattr(replay, "current_stream", lambda index: None)
    monkeypatch.setattr(replay, "capturing", lambda: False)
    monkeypatch.setattr(checks, "check_number", lambda *values, **named: None)  # original reads tensors
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")


# ── tests ───────────────────────────────────────────────────────────────────────────────────────────────────


def step(loss, leaves, tau, scale):
    """Return [loss times scale, gradients of its weighted sum in the leaves, tau and BIAS]."""
    wanted = [x for x in (*leaves, tau, BIAS) if isinstance(x, torch.Tensor)]
    for x in wanted:
        x.grad = None
    value = CALLS[loss](*leaves, tau)
    value *= scale                                             # users may change the loss in place
    (value * torch.linspace(1, 2, value.numel(), device=DEVICE)).sum().backward()
    return [value.detach(), *(x.grad for x in wanted)]


CASES = [*((loss, "plain", 12, 33, HALF, True) for loss in CALLS if loss not in READ_VALUES_ON_A_CPU),
         *((loss, "plain", 70, 32, FLOAT, False) for loss in ("info_nce", "nt_xent", "queue_loss", "lse")),
         *((loss, layout, 8, 33, HALF, False) for loss in ("info_nce", "nt_xent") for layout in LAYOUTS),
         ("bias", "halves", 40, 272, FLOAT, True)]


@pytest.mark.parametrize("loss, layout, n, d, dtype, learned", CASES, ids=str)
def test_same_bits(loss, layout, n, d, dtype, learned, monkeypatch):
    """The first call records a plan. The next calls replay it with new rows and other upstream gradients."""
    tau = torch.tensor(0.2, device=DEVICE, requires_grad=True) if learned else 0.2

    def new_leaves():
        q, k = LAYOUTS[layout](n, d, dtype)
        leaf = q.requires_grad_()
        return leaf, leaf if q is k else k.requires_grad_()

    step(loss, new_leaves(), tau, 1.0)
    assert all(replay.PLANS.values())
    count = len(replay.PLANS)
    for scale in (0.25, 3.0):
        leaves = new_leaves()
        found = step(loss, leaves, tau, scale)
        assert len(replay.PLANS) == count
        with monkeypatch.context() as patch:
            patch.setattr(replay, "on_gpu", lambda x: False)
            expected = step(loss, leaves, tau, scale)
        for a, b in zip(found, expected, strict=True):
            assert a is b is None or torch.equal(a, b)


def one(q, k, **named):
    return kernels.info_nce(q, k, named.pop("temperature", 0.2), **named, impl="triton")


def test_what_differs_has_another_plan():
    q, k = (rows(6, 32, dtype=HALF).requires_grad_() for _ in range(2))
    shifted = torch.cat([k.flatten()[:1], k.flatten()])[1:].view(6, 32).detach().requires_grad_()
    gathered, turned = k.detach().requires_grad_(), k.detach().T.contiguous().T.requires_grad_()
    gathered.own_rows = 0, 6
    for call in (lambda: one(q, k), lambda: one(q, k, offset=0), lambda: one(q, k.detach()),
                 lambda: one(q[:5], k), lambda: one(q, k, temperature=0.3), lambda: one(q[::2], k),
                 lambda: one(q, k, symmetric=True), lambda: one(q, k, normalize=True), lambda: one(q, q),
                 lambda: one(q, shifted), lambda: one(q, gathered), lambda: one(q.float(), k.float()),
                 lambda: one(q[:5], k, offset=1), lambda: one(q, turned)):
        count = len(replay.PLANS)
        call()
        assert len(replay.PLANS) == count + 1
    q, k = (rows(6, 32).requires_grad_() for _ in range(2))
    one(q, k)
    for context in (torch.no_grad(), torch.autocast(DEVICE, HALF)):
        with context:
            one(q, k)
    torch.set_default_dtype(torch.float64)
    one(q, k)
    torch.set_default_dtype(torch.float32)
    assert len(replay.PLANS) == 17 and all(replay.PLANS.values())


def test_errors_are_those_of_the_loss():
    q, k = (rows(6, 32).requires_grad_() for _ in range(2))
    for _ in range(2):
        with pytest.raises(ValueError, match="k: 5 rows, expected at least 6"):
            one(q, k[:5])
    assert not replay.PLANS
    all_q, all_k = q.detach(), k.detach()                      # as gather_rows marks its result
    all_q.gathered_from, all_k.gathered_from, all_q.own_rows, all_k.own_rows = ref(q), ref(k), (0, 6), (0, 6)
    for _ in range(2):
        kernels.clip_loss(q, k, gathered=(all_q, all_k), impl="triton")
        with pytest.raises(ValueError, match=r"gathered: found \(text, image\)"):
            kernels.clip_loss(q, k, gathered=(all_k, all_q), impl="triton")
    with pytest.raises(RuntimeError, match="second derivatives need; use impl='eager'"):
        torch.autograd.grad(one(q, k), q, create_graph=True)
    loss = one(q, k)
    with torch.no_grad():
        k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
