"""How a function becomes an operation of PyTorch: opaque to torch.compile, autocast off inside."""
import torch
from torch import library
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def operation(name, schema):
    """The decorated function (q, …) as tencl::name, with autocast off and on q's device."""
    def register(function):
        def run(q, *arguments):
            if torch.is_autocast_enabled(q.device.type):
                with torch.autocast(q.device.type, enabled=False):
                    return run(q, *arguments)
            if q.is_cuda and q.get_device() != torch.cuda.current_device():
                with torch.cuda.device_of(q):
                    return function(q, *arguments)
            return function(q, *arguments)
        made = library.custom_op(f"tencl::{name}", run, mutates_args=(), schema=schema)
        made.run, made.traced, made.plain = run, getattr(torch.ops.tencl, name), None
        return made
    return register


REFUSED = ("kernels: the fused operations have no {}; use impl='eager', which has all of them")


def differentiable(operation, backward, save, differentiate):
    """Teach autograd that operation has the gradient differentiate(ctx, *grads), which calls backward."""
    def no_second_derivative(ctx, *grads):
        raise RuntimeError(REFUSED.format("second derivative"))

    def prepare(ctx, inputs, output):
        ctx.set_materialize_grads(False)  # no zeros for what is not differentiable
        save(ctx, inputs, output)

    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            output = operation.run(*arguments)
            prepare(ctx, arguments, output)
            return output

        @staticmethod
        def backward(ctx, *grads):
            return differentiate(ctx, *grads)

        @staticmethod
        def jvp(ctx, *tangents):
            raise RuntimeError(REFUSED.format("forward mode"))

    operation.register_autograd(differentiate, setup_context=prepare)
    backward.register_autograd(no_second_derivative)
    operation.plain = Plain.apply


def call(operation, q, *arguments):
    """operation(q, …), past PyTorch's dispatcher where nobody listens to it.

    It and its checks take longer than a small batch. Listeners are a compiler, a mode, a tensor that is more
    than a tensor, and a gradient that is to be differentiated again.
    """
    if is_watched(q):
        return operation.traced(q, *arguments)
    way = operation.plain or (operation.traced if torch.is_grad_enabled() else operation.run)
    try:
        return way(q, *arguments)
    except (RuntimeError, NotImplementedError) as error:
        if is_transformed(q, *arguments) and "impl='eager'" not in str(error):
            raise RuntimeError(REFUSED.format("torch.func transforms (vmap, grad, jvp)")) from error
        raise


def is_transformed(*arguments):
    """Whether torch.func, forward mode or a batch of gradients (is_grads_batched) is at work."""
    from torch._C import _functorch
    return (torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
            or any(_functorch.is_legacy_batchedtensor(x) for x in arguments if isinstance(x, torch.Tensor)))


def is_watched(x):
    """Whether somebody listens to what is done with a tensor, who may know none of its values."""
    return (torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
            or type(x) not in (torch.Tensor, torch.nn.Parameter))
