"""Compare a loss with its formula, in all implementations and dtypes.

The error of the implementation "eager" may be at most EAGER. Other implementations may have three times the
error of eager on the same rows, plus MORE. Each call is repeated, and must give the same bits again.
"""
import inspect

import torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"                              # without a GPU, Triton's interpreter runs
BOTH = ["eager", "blockwise"]
IMPLS = {torch.float64: BOTH, torch.float32: [*BOTH, "triton"], torch.float16: [*BOTH, "triton"],
         torch.bfloat16: [*BOTH, "triton"] if GPU else BOTH}   # the interpreter's bfloat16 products are wrong
# EAGER: limit for the error of eager. Others may have 3 · eager's error (which may be tiny) + MORE.
EAGER = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
MORE = {torch.float64: 1e-10, torch.float32: 5e-7, torch.float16: 3e-4, torch.bfloat16: 2e-3}


def cast(x, dtype, device):
    """Return x on a device. Float tensors get the dtype; 0-dim ones get float32 instead of a half type."""
    if isinstance(x, tuple):
        return tuple(cast(part, dtype, device) for part in x)
    if not isinstance(x, torch.Tensor):
        return x
    number = dtype if dtype == torch.float64 or x.dim() else torch.float32
    return x.to(device, number if x.is_floating_point() else None)


def differentiate(f, arguments):
    """Return {part: float64 tensor}: f's value, and the gradient of its weighted sum in each float tensor."""
    leaves = {name: x.detach().requires_grad_() for name, x in arguments.items()
              if isinstance(x, torch.Tensor) and x.is_floating_point()}
    value = f(**arguments | leaves)
    double = all(x.dtype == torch.float64 for x in leaves.values())
    assert value.dtype == (torch.float64 if double else torch.float32), f"{f.__name__}: {value.dtype}"
    parts = {"value": value}
    if value.requires_grad:
        weights = torch.linspace(1, 2, value.numel(), dtype=value.dtype, device=value.device)
        total = (value.where(value.isfinite(), 0) * weights.view_as(value)).sum()
        gradients = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
        parts |= {f"gradient of {name}": gradient for name, gradient in zip(leaves, gradients)}
    return {part: x.detach().double().cpu() for part, x in parts.items()}


def error_of(found, exact):
    """Return the largest error divided by the largest exact entry; infinity if infinite entries differ."""
    finite = exact.isfinite()
    if found.shape != exact.shape or not torch.equal(found[~finite], exact[~finite]):
        return torch.inf
    found, exact = found[finite], exact[finite]
    if found.equal(exact):                                     # avoid 0 / 0 for empty tensors and for zeros
        return 0.0
    return ((found - exact).abs().max() / exact.abs().max()).item()


def check(loss, formula, arguments, dtypes=IMPLS):
    """Compare a loss with its formula in all dtypes and implementations; fail with a list of all problems."""
    sizes = {name: tuple(x.shape) for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    shown = {name: "..." if isinstance(x, tuple) else x for name, x in arguments.items()} | sizes
    is_large = max(shape[0] for shape in sizes.values() if shape) > 500     # the interpreter is too slow here
    has_impl, problems = "impl" in inspect.signature(loss).parameters, []
    for dtype in dtypes:
        rounded = {name: cast(x, dtype, "cpu") for name, x in arguments.items()}
        exact = differentiate(formula, {name: cast(x, torch.float64, "cpu") for name, x in rounded.items()})
        impls = [None] if not has_impl else BOTH if is_large else IMPLS[dtype]
        limits, eager = dict.fromkeys(exact, EAGER[dtype]), None
        for impl in impls:
            device = DEVICE if impl == "triton" else "cpu"
            given = {name: cast(x, dtype, device) for name, x in rounded.items()}
            given |= dict(impl=impl) if has_impl else {}
            found, again = differentiate(loss, given), differentiate(loss, given)
            errors = {part: error_of(found[part], exact[part]) for part in exact}
            eager = eager or errors                            # the first implementation is eager
            for part, error in errors.items():
                where = f"{loss.__name__} {shown}, impl {impl}, {dtype}, {part}"
                if not error <= limits[part]:
                    problems.append(f"{where}: error {error:.1e}, limit {limits[part]:.1e}, "
                                    f"eager's error {eager[part]:.1e}")
                if not torch.equal(found[part], again[part]):
                    problems.append(f"{where}: the second call gives other bits")
            limits = {part: 3 * error + MORE[dtype] for part, error in eager.items()}
    assert not problems, "\n" + "\n".join(problems)


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cases(loss, formula, *variants, **common):
    """Return [(loss, formula, arguments)], one for each variant, which changes the common arguments."""
    return [(loss, formula, common | variant) for variant in variants]
