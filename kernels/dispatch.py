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


def differentiable(operation, backward, save, differentiate):
    """Teach autograd that operation has the gradient differentiate(ctx, *grads), which calls backward."""
    def no_second_derivative(ctx, *grads):
        raise RuntimeError("kernels: the fused operations have no second derivative; use impl='eager', which "
                           "has all of them")

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

    operation.register_autograd(differentiate, setup_context=prepare)
    backward.register_autograd(no_second_derivative)
    operation.plain = Plain.apply


def call(operation, q, *arguments):
    """operation(q, …), past PyTorch's dispatcher where nobody listens to it.

    It and its checks take longer than a small batch. Listeners are a compiler, a mode, a tensor that is more
    than a tensor, and a gradient that is to be differentiated again.
    """
    if (torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
            or type(q) not in (torch.Tensor, torch.nn.Parameter)):
        return operation.traced(q, *arguments)
    if operation.plain is not None:
        return operation.plain(q, *arguments)
    return operation.traced(q, *arguments) if torch.is_grad_enabled() else operation.run(q, *arguments)
