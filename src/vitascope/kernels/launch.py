"""Launch kernels with little work for the host: called directly, as a PyTorch operator, or recorded as a CUDA graph.

`torch.compile` and `vmap` need an operator. Calling one imports the compiler `torch._dynamo`, which takes five seconds.
So everywhere else the launcher of a Triton kernel is called itself, with its gradient as a `torch.autograd.Function`. A
CUDA graph is launched with a single call; what its recording changed can be undone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

Outputs = Any  # a tensor or a tuple of tensors
PLAIN_TENSOR_TYPES = (Tensor, torch.nn.Parameter)


class KernelOperator:
    """A callable with the same result whether it is called directly or as a PyTorch operator."""

    def __init__(self, name: str, launch: Callable[..., Outputs]) -> None:
        self.launch = launch
        self.operator = torch.library.custom_op(name, launch, mutates_args=())
        self.compute_gradients: Callable[..., tuple[Tensor | None, ...]] | None = None
        self.setup_context: Callable[..., None] | None = None
        self.register_fake, self.register_vmap = self.operator.register_fake, self.operator.register_vmap

    def register_autograd(
        self, compute_gradients: Callable[..., tuple[Tensor | None, ...]], *, setup_context: Callable[..., None]
    ) -> None:
        self.compute_gradients, self.setup_context = compute_gradients, setup_context
        self.operator.register_autograd(compute_gradients, setup_context=setup_context)

    def __call__(self, *args: Any) -> Outputs:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or _are_traced(args):
            return self.operator(*args)
        needs_gradient = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        if self.compute_gradients is None or not (needs_gradient and torch.is_grad_enabled()):
            return self.launch(*args)
        return _DirectCall.apply(self, *args)


def _are_traced(args: tuple[Any, ...]) -> bool:
    """Return whether an argument is a tensor without data. `is_compiling` is false in backward passes of torch 2.11."""
    return any(isinstance(arg, Tensor) and type(arg) not in PLAIN_TENSOR_TYPES for arg in args)


class _DirectCall(torch.autograd.Function):
    """Launch the kernel, and compute gradients as the operator does."""

    @staticmethod
    def forward(ctx: Any, kernel: KernelOperator, *args: Any) -> Outputs:
        outputs = kernel.launch(*args)
        ctx.kernel = kernel
        if kernel.setup_context is not None:
            kernel.setup_context(ctx, args, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.kernel.compute_gradients(ctx, *grad_outputs)


def kernel_operator(name: str) -> Callable[[Callable[..., Outputs]], KernelOperator]:
    """Decorate the launcher of a kernel: `@kernel_operator("vitascope::name")`."""
    return lambda launch: KernelOperator(name, launch)


Output = TypeVar("Output")


def warm_up_and_record_cuda_graph(
    run: Callable[[], Output], warm_up: Callable[[], object]
) -> tuple[torch.cuda.CUDAGraph, Output]:
    """Run `warm_up` on another stream, in which kernels are chosen and memory is allocated, then record `run`.

    Return the graph and the output of `run`, which every replay overwrites."""
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        warm_up()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    return graph, output


@contextmanager
def restore_tensors_on_exit(tensors: list[Tensor]) -> Iterator[None]:
    """Copy the values of the tensors, and write them back on exit, also after an error."""
    before = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)


def make_repeated_call(function: Callable[[], object], num_calls: int) -> Callable[[], None]:
    """Return a function that calls `function` so many times."""

    def call_repeatedly() -> None:
        for _ in range(num_calls):
            function()

    return call_repeatedly
