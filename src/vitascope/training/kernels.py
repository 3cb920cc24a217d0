"""A model on a GPU -> the kernels it is fastest with: known for its shapes, or found by a short measurement."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from vitascope.model.block import Block
from vitascope.model.mlp import Mlp, relu_squared
from vitascope.model.norm import LayerNorm, RMSNorm
from vitascope.model.vit import VisionTransformer
from vitascope.training.kernel_choices import KernelKey, add_own_choice, find_kernel

WARM_UP, REPEATS, ROUNDS = 3, 5, 10
Kernels = dict[str, str]  # attention, mlp and norm -> the kernel's name


@dataclass(frozen=True)
class Use:
    """What the kernels are chosen for."""

    batch: int
    dtype: torch.dtype
    training: bool
    compiled: bool


@dataclass(frozen=True)
class Part:
    """A layer whose kernel is chosen, and what it is called with."""

    module: Any  # has KERNELS
    tokens: Tensor
    more: tuple[object, ...] = ()


def choose_kernels(model: VisionTransformer, use: Use) -> Kernels:
    """On a CPU PyTorch's own. Norms in a compiled model too: a compiler fuses them with what surrounds them."""
    return {name: _fastest(part, use) for name, part in list_parts(model, use).items()}


def list_parts(model: VisionTransformer, use: Use) -> dict[str, Part]:
    """The layers of a block whose kernels can be chosen, by name; none on a CPU."""
    block, config = model.blocks[0], model.config
    weight = next(model.parameters())
    if not weight.is_cuda or not isinstance(block, Block):
        return {}
    tokens = torch.randn(use.batch, config.num_tokens, config.embed_dim, device=weight.device, dtype=use.dtype)
    parts = {"attention": Part(block.attn, tokens, (None, model.rotation))}
    if block.mlp.activation is relu_squared:
        parts["mlp"] = Part(block.mlp, tokens)
    if not use.compiled and config.norm != "none":
        parts["norm"] = Part(block.norm1, tokens)
    return parts


def use_kernels(model: nn.Module, chosen: Kernels) -> None:
    for module in model.modules():
        if isinstance(module, Block):
            module.attn.kernel = chosen.get("attention", "default")
        elif isinstance(module, Mlp):
            module.kernel = chosen.get("mlp", "default")
        elif isinstance(module, LayerNorm | RMSNorm):
            module.kernel = chosen.get("norm", "default")


def _fastest(part: Part, use: Use) -> str:
    """As measured earlier, here or where the shipped table was made; else measured now and remembered."""
    key = make_key(part, use)
    known = find_kernel(key)
    if known is None:
        known = measure_fastest(part, use)
        add_own_choice(key, known)
    return known


def measure_fastest(part: Part, use: Use) -> str:
    """The name of the kernel that takes the least time. The random state stays as it was, also where dropout draws."""
    devices = [part.tokens.device] if part.tokens.is_cuda else []
    with torch.random.fork_rng(devices):
        times = {name: _milliseconds(part, name, use) for name in part.module.KERNELS}
    return min(times, key=lambda name: times[name])


def make_key(part: Part, use: Use) -> KernelKey:
    return KernelKey(
        gpu=torch.cuda.get_device_name(),
        torch_version=str(torch.__version__),
        layer=_describe_layer(part),
        shape=tuple(part.tokens.shape),
        dtype=str(use.dtype),
        task="training" if use.training else "inference",
        kernels=tuple(part.module.KERNELS),
    )


def _describe_layer(part: Part) -> str:
    """The module's class, and of attention the settings that change its kernels."""
    module, text = part.module, type(part.module).__name__
    if hasattr(module, "num_heads"):
        settings = {"local": module.scale is not None, "causal": module.causal, "dropout": module.attn_drop.p > 0}
        text += f" of {module.num_heads} heads, {module.q_norm}"
        text += "".join(f", {name}" for name, is_set in settings.items() if is_set)
    return text + (", turned" if any(isinstance(other, Tensor) for other in part.more) else "")


def _milliseconds(part: Part, kernel: str, use: Use) -> float:
    """Infinite where the kernel does not work here."""
    tokens, tried = part.tokens, deepcopy(part.module).train(use.training)
    tried.kernel = kernel
    inputs = tokens.detach().clone().requires_grad_(use.training)
    weights = [weight for weight in tried.parameters() if weight.requires_grad]

    autocast = torch.autocast(tokens.device.type, use.dtype, enabled=use.dtype != torch.float32)

    def work() -> None:
        with torch.set_grad_enabled(use.training), autocast:
            answer = tried(inputs, *part.more)
        if use.training:
            torch.autograd.grad(answer, [inputs, *weights], torch.ones_like(answer))

    try:
        return recorded_milliseconds(work)
    except Exception:  # whatever a compiler or a driver says: there are other kernels
        return inf


def recorded_milliseconds(work: Callable[[], object]) -> float:
    """The least of a few rounds, as one CUDA graph: what it costs the device, without the starting."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(WARM_UP):
            work()
    beside.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=beside):
        for _ in range(REPEATS):
            work()
    times = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / REPEATS)
    return min(times)
