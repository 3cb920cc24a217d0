"""A model on a GPU -> the kernels it is fastest with: a short measurement per shape, remembered for the next time."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitascope.data.places import cache_folder
from vitascope.errors import UserError
from vitascope.model.block import Block
from vitascope.model.mlp import Mlp, relu_squared
from vitascope.model.norm import LayerNorm, RMSNorm
from vitascope.model.vit import VisionTransformer
from vitascope.run.files import make_folder, read_json, write_json

WARM_UP, REPEATS, ROUNDS = 3, 5, 10
Kernels = dict[str, str]  # attention, mlp and norm -> the kernel's name


@dataclass(frozen=True)
class Use:
    """What the kernels are chosen for."""

    batch: int
    dtype: torch.dtype
    training: bool
    compiled: bool


def choose_kernels(model: VisionTransformer, use: Use) -> Kernels:
    """On a CPU PyTorch's own. Norms in a compiled model too: a compiler fuses them with what surrounds them."""
    block, config = model.blocks[0], model.config
    weight = next(model.parameters())
    if not weight.is_cuda or not isinstance(block, Block):
        return {}
    tokens = torch.randn(use.batch, config.num_tokens, config.embed_dim, device=weight.device, dtype=use.dtype)
    chosen = {"attention": _fastest(block.attn, tokens, (None, model.rotation), use)}
    if block.mlp.activation is relu_squared:
        chosen["mlp"] = _fastest(block.mlp, tokens, (), use)
    if not use.compiled and config.norm != "none":
        chosen["norm"] = _fastest(block.norm1, tokens, (), use)
    return chosen


def use_kernels(model: nn.Module, chosen: Kernels) -> None:
    for module in model.modules():
        if isinstance(module, Block):
            module.attn.kernel = chosen.get("attention", "default")
        elif isinstance(module, Mlp):
            module.kernel = chosen.get("mlp", "default")
        elif isinstance(module, LayerNorm | RMSNorm):
            module.kernel = chosen.get("norm", "default")


def _fastest(module: Any, tokens: Tensor, more: tuple[object, ...], use: Use) -> str:
    memory, key = read_memory(), _key(module, tokens, more, use)
    known = memory.get(key)
    if known is not None and known in module.KERNELS:
        return known
    times = {name: _milliseconds(module, name, tokens, more, use) for name in module.KERNELS}
    best = min(times, key=lambda name: times[name])
    write_memory(memory | {key: best})
    return best


def _key(module: nn.Module, tokens: Tensor, more: tuple[object, ...], use: Use) -> str:
    heads = f" of {module.num_heads} heads, {module.q_norm}" if hasattr(module, "num_heads") else ""
    if heads:
        kind: Any = module
        said = {"local": kind.scale is not None, "causal": kind.causal, "dropout": kind.attn_drop.p > 0}
        heads += "".join(f", {name}" for name, there in said.items() if there)
    turned = ", turned" if any(isinstance(part, Tensor) for part in more) else ""
    shape, task = "×".join(map(str, tokens.shape)), "training" if use.training else "inference"
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    among = "/".join(getattr(module, "KERNELS", ()))  # a kernel that is new was not asked
    return f"{machine}: {type(module).__name__}{heads}{turned}, {shape}, {use.dtype}, {task}, of {among}"


def _milliseconds(module: nn.Module, kernel: str, tokens: Tensor, more: tuple[object, ...], use: Use) -> float:
    """Infinite where the kernel does not work here."""
    tried: Any = deepcopy(module).train(use.training)
    tried.kernel = kernel
    inputs = tokens.detach().clone().requires_grad_(use.training)
    weights = [weight for weight in tried.parameters() if weight.requires_grad]

    autocast = torch.autocast(tokens.device.type, use.dtype, enabled=use.dtype != torch.float32)

    def work() -> None:
        with torch.set_grad_enabled(use.training), autocast:
            answer = tried(inputs, *more)
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


def _file() -> Path:
    return cache_folder() / "kernels.json"


def read_memory() -> Kernels:
    """What earlier measurements found; nothing where the file is missing or torn."""
    return {key: name for key, name in read_json(_file()).items() if isinstance(name, str)}


def write_memory(memory: Kernels) -> None:
    try:
        make_folder(_file().parent)
        write_json(_file(), memory)
    except UserError:
        pass  # measured again next time
