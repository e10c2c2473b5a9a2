"""Register a function as a PyTorch operation: opaque to torch.compile, with autocast off inside it."""
import torch
from torch import library
from torch._C._functorch import is_legacy_batchedtensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def register_op(name, schema):
    """Return a decorator that registers a function (q, …) as tencl::name, run on q's device without autocast.

    torch.ops.tencl is the namespace of this project, TenCL. call_op chooses between three ways to call an
    operation:

    run            the function itself, without gradient
    dispatched     torch.ops.tencl.name, through PyTorch's dispatcher
    with_gradient  a torch.autograd.Function around run, set by register_gradient; None: no gradient
    """
    def register(function):
        def run(q, *arguments):
            if torch.is_autocast_enabled(q.device.type):
                with torch.autocast(q.device.type, enabled=False):
                    return run(q, *arguments)
            if q.is_cuda and q.get_device() != torch.cuda.current_device():
                with torch.cuda.device_of(q):
                    return function(q, *arguments)
            return function(q, *arguments)
        op = library.custom_op(f"tencl::{name}", run, mutates_args=(), schema=schema)
        op.run, op.dispatched, op.with_gradient = run, getattr(torch.ops.tencl, name), None
        return op
    return register


def cat_rows(parts):
    """Return torch.cat(parts) without autocast: on the CPU, its cat accepts no half type but its own."""
    device_type = parts[0].device.type
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        with torch.autocast(device_type, enabled=False):
            return torch.cat(parts)
    return torch.cat(parts)


UNSUPPORTED = "kernels: the fused operations do not support {}; use impl='eager'"


def register_gradient(op, backward, save, differentiate):
    """Register differentiate(ctx, *grads) as the gradient of op's first output in its first four arguments.

    differentiate calls the registered operation `backward`. save(ctx, inputs, output) saves in ctx what
    differentiate needs.
    """
    def no_second_derivative(ctx, *grads):
        raise RuntimeError(UNSUPPORTED.format("second derivatives"))

    def set_up(ctx, inputs, output):
        ctx.inputs = len(inputs)
        ctx.set_materialize_grads(False)  # do not allocate zeros as gradients of non-differentiable outputs
        ctx.mark_non_differentiable(*output[1:])
        save(ctx, inputs, output)

    def differentiate_dispatched(ctx, *grads):
        return *differentiate(ctx, *grads), *[None] * (ctx.inputs - 4)

    class WithGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            arguments = *arguments[:4], *arguments[4]
            output = op.run(*arguments)
            set_up(ctx, arguments, output)
            return output

        @staticmethod
        def backward(ctx, *grads):
            return *differentiate(ctx, *grads), None

        @staticmethod
        def jvp(ctx, *tangents):
            raise RuntimeError(UNSUPPORTED.format("forward-mode derivatives"))

    op.register_autograd(differentiate_dispatched, setup_context=set_up)
    backward.register_autograd(no_second_derivative)
    # one tuple of all other arguments, because apply takes time for each
    op.with_gradient = lambda *arguments: WithGradient.apply(*arguments[:4], arguments[4:])


def call_op(op, q, *arguments):
    """Return op(q, …), called directly where possible, without PyTorch's dispatcher.

    The dispatcher and its checks take longer than a small batch. They are needed under torch.compile, for
    dispatch modes and tensor subclasses, and to raise an error if a gradient is differentiated again.
    """
    if is_traced(q):
        return op.dispatched(q, *arguments)
    function = op.with_gradient or (op.dispatched if torch.is_grad_enabled() else op.run)
    try:
        return function(q, *arguments)
    except (RuntimeError, NotImplementedError) as error:
        if "impl='eager'" not in str(error):
            check_not_transformed(q, *arguments)
        raise


def check_not_transformed(*arguments):
    """Raise RuntimeError if torch.func, forward-mode AD or batched gradients (is_grads_batched) are used."""
    if (torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
            or any(is_legacy_batchedtensor(x) for x in arguments if isinstance(x, torch.Tensor))):
        raise RuntimeError(UNSUPPORTED.format("torch.func transforms (vmap, grad, jvp)"))


def is_traced(x):
    """Return whether torch.compile, a dispatch mode or a subclass of Tensor sees each operation on x.

    Then the values of x may not exist and must not be read.
    """
    return (torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
            or type(x) not in (torch.Tensor, torch.nn.Parameter))
