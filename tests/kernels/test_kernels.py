"""Every code path of the kernels, with every mask, equals eager in float64; none stores the matrix of logits.

tests/contract compares each public loss with its formula. The GPU, D and the number of rows select a path.
These tests force a path by settings inside the package, for small matrices of several tiles (blocks of 32, 64
or 128 rows and columns) or several strips (blocks of rows).
"""
import itertools

import pytest
import torch
from comparing import (
    DEVICE,
    GPU,
    HALF,
    LOSSES,
    MASKS,
    TRITON,
    compare,
    differentiate,
    masks,
    patch_kernels,
    positive_pairs,
    unit_rows,
)

from kernels import blockwise, info_nce, similarity_lse
from kernels.gpu import heuristics
from kernels.masks import make_mask
from running import Memory

# ── Triton ──────────────────────────────────────────────────────────────────────────────────────────────────

LARGE_D = {"gpu.heuristics.MAX_SMALL_D": 0}
SEPARATE_BACKWARD = LARGE_D | {"gpu.fuses_backward": lambda *x: False}
WITH_BOUND = {"gpu.heuristics.SHIFT_LOGITS": 0}                # like many logits: a bound replaces row maxima
ONE_MULTIPROCESSOR = {"gpu.launch.EMULATED_MULTIPROCESSORS": 1}                # only the interpreter reads it
LSE_IN_BLOCKS = {"gpu.lse_forward.table_block_shape": lambda q, k, square: (128, 128)}
STRIPS_OF_128 = {"gpu.fused_forward_backward.strip_height": lambda *x: 128}
ALL_IN_BLOCKS = LSE_IN_BLOCKS | {"gpu.products.weight_block_shape": lambda q, k, square: (128, 128)}
# {path that a shape or a GPU can select: (settings that force the path, losses that use it)}
CODE_PATHS = {
    "descriptors": ({"gpu.launch.MAX_POINTER_WORK": 0},
                    "info_nce clip_loss nt_xent queue_loss linear sigmoid_loss"),
    "tiles of older GPUs": ({"gpu.launch.EMULATED_CAPABILITY": 8}, "info_nce clip_loss sigmoid_loss"),
    "tiles of newer GPUs": (LARGE_D | {"gpu.launch.EMULATED_CAPABILITY": 10}, "clip_loss nt_xent"),
    "temperature as a number": (
        {f"gpu.{module}.is_host_scalar": lambda number, x: True for module in ("launch", "sigmoid")},
        "info_nce clip_loss queue_loss sigmoid_loss"),
    "without a bound": ({}, "gathered_clip_loss gathered_sup_con_loss pair"),
    "queue, a program for all columns": (ONE_MULTIPROCESSOR, "queue_loss"),
    "lse with bound": (WITH_BOUND, "clip_loss nt_xent ids"),
    "lse in blocks": (LSE_IN_BLOCKS, "info_nce clip_loss nt_xent lse self_similarity"),
    "lse in blocks with bound": (LSE_IN_BLOCKS | WITH_BOUND, "clip_loss self_similarity"),
    "several tiles in a program": (ONE_MULTIPROCESSOR | LARGE_D | WITH_BOUND,
                                   "info_nce offset clip_loss nt_xent linear sigmoid_loss"),
    "large D": (LARGE_D, "info_nce offset clip_loss nt_xent gathered_nt_xent lse self_similarity ids"),
    "strips": (LARGE_D | STRIPS_OF_128, "info_nce offset gathered_nt_xent linear ignoring"),
    "strips with bound": (WITH_BOUND | STRIPS_OF_128, "offset gathered_nt_xent linear ignoring"),
    "wide tiles": (LARGE_D | {"gpu.fused_forward_backward.MIN_WIDE_D": 0}, "offset linear"),
    "separate backward": (SEPARATE_BACKWARD | WITH_BOUND, "info_nce offset gathered_nt_xent linear ignoring"),
    "separate backward in blocks": (SEPARATE_BACKWARD | ALL_IN_BLOCKS, "offset clip_loss nt_xent "
                                    "gathered_nt_xent linear lse self_similarity ids sigmoid_loss"),
    "separate backward in blocks with bound": (SEPARATE_BACKWARD | ALL_IN_BLOCKS | WITH_BOUND,
                                               "clip_loss nt_xent linear self_similarity")}


@pytest.mark.parametrize("dtype", TRITON, ids=str)
@pytest.mark.parametrize("path, loss", [
    (path, loss) for path, (_, losses) in CODE_PATHS.items() for loss in losses.split()])
def test_every_code_path(path, loss, dtype, monkeypatch):
    patch_kernels(monkeypatch, CODE_PATHS[path][0])
    rows = 75 if loss == "nt_xent" else 150                    # nt_xent stacks two views
    compare(LOSSES[loss], *positive_pairs(rows, 40, dtype), units=32)


@pytest.mark.parametrize("name, d", list(zip(MASKS, [24, 16, 257, *[24, 16] * 3])))
@pytest.mark.parametrize("dtype", TRITON, ids=str)
def test_every_mask_across_tiles(dtype, name, d):
    q, k, mask = unit_rows(130, d, dtype, 0), unit_rows(140, d, dtype, 1), masks(130, 140)[name]
    compare(lambda q, k, t, impl: similarity_lse(q, k, t, impl=impl, **mask), q, k)


@pytest.mark.parametrize("impl, dtype, large_d", [
    ("blockwise", torch.float32, True), ("triton", torch.float32, True),
    *itertools.product(["triton"], HALF, [False, True])], ids=str)
@pytest.mark.parametrize("loss", ["clip_loss", "nt_xent", "info_nce"])
@pytest.mark.parametrize("temperature", [0.01, 0.003])
def test_exponentials_beyond_the_range_of_float32(temperature, loss, impl, dtype, large_d, monkeypatch):
    """Subtracting one bound from all logits works as long as no row's sum underflows. At τ = 0.01, exp2 of
    the logits would overflow without the bound. At τ = 0.003, most rows' sums underflow with the bound, and
    forward must compute these rows again, each with its own maximum."""
    patch_kernels(monkeypatch, WITH_BOUND | (LARGE_D if large_d else {}))
    q, k = positive_pairs(40, 24, dtype)
    k = torch.where(torch.arange(40, device=DEVICE)[:, None] % 3 == 0, -q, k)
    q[-1] *= 4                                                 # the bound must count the last rows of q and k
    k[-2] *= 100
    compare(LOSSES[loss], q, k, temperature, impl, units=64)


@pytest.mark.parametrize("n, m, size", [
    (1, 1, 4), (2 ** 20, 2 ** 20, 2), (2 ** 17, 300, 4), (64, 2 ** 22, 2), (1, 2 ** 24, 2), (8192, 8192, 2),
    (2 ** 20, 100, 2)])
def test_blocks_fit_their_buffers(n, m, size):
    """Blocks of weights, strips of logits and tables of row statistics stay within their limits in bytes."""
    whole_tiles = lambda count: heuristics.round_up(count, 128)
    assert whole_tiles(heuristics.strip_height(size, m, 64)) * whole_tiles(m) * size <= heuristics.STRIP_BYTES
    for d, square in itertools.product((1, 768, 2 ** 17), (False, True)):
        dtype = torch.float32 if size == 4 else torch.float16
        q, k = (torch.empty(count, d, dtype=dtype, device="meta") for count in (n, n if square else m))
        height, width = heuristics.weight_block_shape(q, k, square)
        assert 1 <= height <= n and 1 <= width <= len(k)
        assert whole_tiles(height) * whole_tiles(width) * size <= heuristics.WEIGHT_BUFFER_BYTES
        height, width = heuristics.table_block_shape(q, k, square)
        tables = (2 if square else 1) * 2 * 4 * height * width // 128
        assert 0 < height and 0 < width and height % 128 == width % 128 == 0
        assert tables <= max(heuristics.TABLE_BYTES, min(size * (n + len(k)) * d, heuristics.STRIP_BYTES))


def as_tf32(x, half_a_step=0):
    """Truncate float32 to TF32, as tensor cores do. With half_a_step = 2 ** 12, round to TF32 instead."""
    return ((x.contiguous().view(torch.int32) + half_a_step) & -2 ** 13).view(torch.float32)


@pytest.mark.skipif(GPU, reason="simulates a GPU in the interpreter")
@pytest.mark.parametrize("loss, changes", [
    ("info_nce", {}), ("info_nce", {"gpu.fuses_backward": lambda *x: False}), ("clip_loss", WITH_BOUND)])
def test_tf32_is_rounded_not_truncated(loss, changes, monkeypatch):
    """Tensor cores truncate float32 operands to TF32. Our kernels round operands first, as cuBLAS does."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from kernels.gpu import products
    multiply, add_product = InterpreterBuilder.create_dot, products.add_product

    def truncated(x):
        return TensorHandle(as_tf32(torch.from_numpy(x.data.copy())).numpy(), x.dtype)

    def add_product_in_tf32(sums, a, b, overwrite):
        assert torch.equal(as_tf32(a), a) and torch.equal(as_tf32(b), b)
        add_product(sums, a, b, overwrite)

    modules = "products", "fused_forward_backward"
    patch_kernels(monkeypatch, changes | {f"gpu.{name}.add_product": add_product_in_tf32 for name in modules})
    monkeypatch.setattr(InterpreterBuilder, "create_dot",
                        lambda self, a, b, *rest: multiply(self, truncated(a), truncated(b), *rest))
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    q, k = positive_pairs(150, 40, torch.float32)
    f, t = LOSSES[loss], torch.tensor(0.05)

    def in_float64(*rows):
        return differentiate(lambda *x: f(*x, t.double(), "eager"), *(x.double() for x in rows))

    ours, exact = differentiate(lambda *x: f(*x, t, "triton"), q, k), in_float64(q, k)
    of_rounded, of_truncated = (in_float64(as_tf32(q, step), as_tf32(k, step)) for step in (2 ** 12, 0))
    for a, b, c, d in zip(ours, of_rounded, of_truncated, exact):
        assert (a - d).norm() < 1.5 * (b - d).norm() < (c - d).norm()


class FakeKernel:
    """Like a kernel of Triton with the arguments X, SIDE, count, scale, BLOCK; remembers what it launches."""
    fn, arg_names = object(), ["X", "SIDE", "count", "scale", "BLOCK"]

    def __init__(self):
        self.compiled, self.launches = 0, []

    def __getitem__(self, grid):
        def launch_and_compile(*arguments, num_warps, BLOCK):
            self.compiled += 1
            self.launches.append((arguments, BLOCK))
            return {(7, 1, 1): lambda *arguments: self.launches.append((arguments[:-1], arguments[-1]))}
        return launch_and_compile


def test_a_compiled_kernel_is_launched_again_only_for_the_same_kinds_of_arguments(monkeypatch):
    """Triton compiles for dtypes, alignment, None, and for integers that are 1, multiples of 16 or 64-bit."""
    from kernels.gpu import launch
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "COMPILED", {})
    kernel, x = FakeKernel(), torch.zeros(8, device=DEVICE)
    usual = dict(arguments=(x, (None, x), 5, 0.5), BLOCK=64, num_warps=4)

    def start(arguments, **keywords):
        launch.launch(kernel, (7,), *arguments, **keywords)
        assert kernel.launches[-1] == (arguments, keywords["BLOCK"])

    others = [(x[1:], (None, x), 5, 0.5), (x.half(), (None, x), 5, 0.5), (x, (None, x[1:]), 5, 0.5),
              (x, (x, x), 5, 0.5), (x, (None, None), 5, 0.5), (x, (None, x), 16, 0.5), (x, (None, x), 1, 0.5),
              (x, (None, x), 2 ** 31, 0.5), (x, (None, x), 2 ** 31 + 1, 0.5)]
    different = [usual | dict(arguments=arguments) for arguments in others]
    different += [usual | dict(BLOCK=128), usual | dict(num_warps=8)]
    for count, call in enumerate([usual, *different], 1):
        start(**call)
        assert kernel.compiled == count
    for call in (usual, usual | dict(arguments=(x + 1, (None, x + 2), 7, 2.5)), *different):
        start(**call)
    assert kernel.compiled == 1 + len(different)


# ── blockwise ───────────────────────────────────────────────────────────────────────────────────────────────

STRIPS = {"blockwise.ONE_STRIP": 0, "blockwise.MIN_STRIP_ROWS": 32}
STRIPS_OF_3 = {"blockwise.ONE_STRIP": 0, "blockwise.MIN_STRIP_ROWS": 3, "blockwise.STRIP_LOGITS": 1}


@pytest.mark.parametrize("name", [*MASKS, *LOSSES])
def test_strips(name, monkeypatch):
    """Blockwise cuts the rows into strips of 3 rows. The last strip is shorter."""
    patch_kernels(monkeypatch, STRIPS_OF_3)
    q, k = unit_rows(38, 12, torch.float64, 12), unit_rows(53, 12, torch.float64, 13)
    if name in MASKS:
        mask = masks(38, 53)[name]
        compare(lambda q, k, t, impl: similarity_lse(q, k, t, impl=impl, **mask), q, k, impl="blockwise")
    else:
        compare(LOSSES[name], q, k[:38], impl="blockwise", units=32)


@pytest.mark.parametrize("name", ["self_similarity", "pair"])
def test_strips_of_self_similarity_start_on_the_diagonal(name, monkeypatch):
    """Only the upper triangle is computed. exp(s_ij) is used for (i, j) and (j, i), if it cannot overflow."""
    patch_kernels(monkeypatch, STRIPS_OF_3)
    q = unit_rows(38, 12, torch.float64, 12)
    compare(LOSSES[name], q, q, 0.01, impl="blockwise", units=32)
    mask = make_mask(len(q), len(q), True, "pair")
    found = blockwise.logit_strips(q, q, torch.tensor(1.0), mask, triangle=True)
    assert sum(s.numel() for _, _, s in found) == sum((38 - i) * min(3, 38 - i) for i in range(0, 38, 3))


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("loss", ["two ids", *LOSSES])
def test_blockwise_never_holds_the_matrix(loss, monkeypatch):
    """1,000 × 1,000 logits take 3.8 MiB. The losses of two views have four times as many."""
    patch_kernels(monkeypatch, STRIPS | {"blockwise.STRIP_LOGITS": 2 ** 14})
    q, k = (x.requires_grad_() for x in positive_pairs(1000, 8, torch.float32))
    with Memory() as memory:
        if loss == "two ids":
            similarity_lse(q, k, 0.1, **masks(1000, 1000)["ids"], impl="blockwise").sum().backward()
        else:
            LOSSES[loss](q, k, 0.1, "blockwise").sum().backward()
    assert 0.03 < memory.peak < 1.2


# ── on a GPU ────────────────────────────────────────────────────────────────────────────────────────────────

on_a_gpu = pytest.mark.skipif(not GPU, reason="no GPU")


@on_a_gpu
@pytest.mark.parametrize("impl", ["eager", "blockwise", "triton"])
@pytest.mark.parametrize("loss", ["info_nce", "clip_loss", "nt_xent", "queue_loss"])
def test_cuda_graph(loss, impl):
    """A CUDA graph can capture forward and backward, so neither synchronises. A replay reads the new q."""
    q, k = (unit_rows(1024, 128, torch.bfloat16, seed).requires_grad_() for seed in (51, 52))

    def step():
        return torch.autograd.grad(LOSSES[loss](q, k, 0.07, impl), q)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        q.copy_(unit_rows(1024, 128, torch.bfloat16, 53))
    graph.replay()
    assert torch.equal(captured, step())


@on_a_gpu
@pytest.mark.parametrize("d", [64, 128, 768, 1024])
@pytest.mark.parametrize("dtype, precision", [
    (torch.float32, "highest"), (torch.float32, "high"), *((dtype, "highest") for dtype in HALF)], ids=str)
def test_gpu_at_size(dtype, precision, d):
    """Check every mask on thousands of rows, in all dtypes and float32 matmul precisions."""
    q, k = unit_rows(4099, d, dtype, 29), unit_rows(8201, d, dtype, 30)
    torch.set_float32_matmul_precision(precision)
    try:
        for mask in masks(4099, 8201).values():
            compare(lambda q, k, t, impl: similarity_lse(q, k, t, impl=impl, **mask), q, k)
    finally:
        torch.set_float32_matmul_precision("highest")


@on_a_gpu
def test_gpu_memory():
    """A loss of 32,768 × 32,768 logits uses less than 512 MiB. In bfloat16 the logits would take 2 GiB."""
    q, k = (unit_rows(32768, 128, torch.bfloat16, seed).requires_grad_() for seed in (31, 32))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    info_nce(q, k, 0.07).backward()
    assert torch.cuda.max_memory_allocated() - before < 512 * 2 ** 20
