"""Record a function as a CUDA graph, which the host launches with a single call; undo what the recording changed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

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
