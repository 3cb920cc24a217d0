"""Choose the fastest kernels for a model on a GPU: from tables for known shapes, or by a short measurement.

`kernel_choices.json` in this folder is the shipped table. `python -m benchmarks.kernel_table` measures it on a GPU.
"""

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from vitascope.data.data_root import get_cache_folder
from vitascope.errors import UserError
from vitascope.kernels.launch import make_repeated_call, warm_up_and_record_cuda_graph
from vitascope.model.block import Block
from vitascope.model.mlp import Mlp, relu_squared
from vitascope.model.norm import LayerNorm, RMSNorm
from vitascope.model.vit import VisionTransformer
from vitascope.run.files import make_folder, read_json_object_or_empty, write_json

SHIPPED_TABLE_PATH = Path(__file__).with_name("kernel_choices.json")
KernelTable = dict[str, str]  # a key's text -> the fastest kernel's name
KEY_PATTERN = re.compile(
    r"(?P<gpu>.+), torch (?P<torch_version>\S+): (?P<layer>.+), (?P<shape>\d+(?:×\d+)*), (?P<dtype>\S+), "
    r"(?P<task>training|inference), of (?P<kernels>\S*)"
)


@dataclass(frozen=True)
class KernelKey:
    """The conditions of a measurement. Its text form is the key in JSON files."""

    gpu: str
    torch_version: str
    layer: str  # the module's class and the settings that change its kernels
    shape: tuple[int, ...]  # of the tokens
    dtype: str
    task: str  # training or inference
    kernels: tuple[str, ...]  # those that were compared: a new kernel needs a new measurement

    def __str__(self) -> str:
        machine, shape = f"{self.gpu}, torch {self.torch_version}", "×".join(map(str, self.shape))
        return f"{machine}: {self.layer}, {shape}, {self.dtype}, {self.task}, of {'/'.join(self.kernels)}"

    @classmethod
    def parse(cls, text: str) -> "KernelKey | None":
        """Parse the text form of a key; None if it is not one."""
        match = KEY_PATTERN.fullmatch(text)
        if match is None:
            return None
        shape = tuple(int(size) for size in match["shape"].split("×"))
        names = {name: match[name] for name in ("gpu", "torch_version", "layer", "dtype", "task")}
        return cls(**names, shape=shape, kernels=tuple(match["kernels"].split("/")))


def find_fastest_kernel(key: KernelKey) -> str | None:
    """Return the fastest kernel; None if this GPU, shape and list of kernels were not measured."""
    local, shipped = read_local_kernel_table(), read_kernel_table_or_empty(SHIPPED_TABLE_PATH)
    candidates = (local.get(str(key)), shipped.get(str(key)), _find_kernel_ignoring_torch_version(key, shipped))
    return next((name for name in candidates if name in key.kernels), None)


def _find_kernel_ignoring_torch_version(key: KernelKey, kernel_table: KernelTable) -> str | None:
    """Return the fastest kernel with the newest torch version with which this GPU and shape were measured."""
    parsed = {parsed_key: name for text, name in kernel_table.items() if (parsed_key := KernelKey.parse(text))}
    name_by_version = {
        TorchVersion(other_key.torch_version): name
        for other_key, name in parsed.items()
        if _is_same_except_torch_version(other_key, key)
    }
    return name_by_version[max(name_by_version)] if name_by_version else None


def _is_same_except_torch_version(key: KernelKey, other_key: KernelKey) -> bool:
    return replace(key, torch_version=other_key.torch_version) == other_key


def read_kernel_table_or_empty(path: Path) -> KernelTable:
    """Read a table of fastest kernels; empty if the file is missing or damaged."""
    return {key: name for key, name in read_json_object_or_empty(path).items() if isinstance(name, str)}


def read_local_kernel_table() -> KernelTable:
    """Read the measurements of this machine."""
    return read_kernel_table_or_empty(get_local_table_path())


def try_store_fastest_kernel(key: KernelKey, kernel_name: str) -> None:
    """Store a measurement for later runs. If the file cannot be written, later runs measure again."""
    try:
        make_folder(get_local_table_path().parent)
        write_json(get_local_table_path(), read_local_kernel_table() | {str(key): kernel_name})
    except UserError:
        pass


def get_local_table_path() -> Path:
    return get_cache_folder() / "kernels.json"


WARM_UP_CALLS, CALLS_PER_GRAPH, NUM_TIMED_REPLAYS = 3, 5, 10
KernelByLayer = dict[str, str]  # attention, mlp and norm -> the kernel's name


@dataclass(frozen=True)
class KernelWorkload:
    """The batch size, dtype and mode that kernels are chosen for."""

    batch_size: int
    dtype: torch.dtype
    training: bool
    compiled: bool


@dataclass(frozen=True)
class LayerCall:
    """A layer whose kernel is chosen, and its inputs."""

    module: Any  # has KERNELS
    tokens: Tensor
    extra_args: tuple[object, ...] = ()


def choose_fastest_kernels(model: VisionTransformer, workload: KernelWorkload) -> KernelByLayer:
    """Return the fastest kernel of each layer; empty on a CPU. Norms of a compiled model are left to the compiler."""
    return {
        name: _find_or_measure_fastest_kernel(layer, workload)
        for name, layer in make_layer_calls_for_kernel_choice(model, workload).items()
    }


def make_layer_calls_for_kernel_choice(model: VisionTransformer, workload: KernelWorkload) -> dict[str, LayerCall]:
    """Return the layers of a block whose kernels can be chosen, by name; none on a CPU."""
    block, config = model.blocks[0], model.config
    weight = next(model.parameters())
    if not weight.is_cuda or not isinstance(block, Block):
        return {}
    tokens = torch.randn(
        workload.batch_size, config.num_tokens, config.embed_dim, device=weight.device, dtype=workload.dtype
    )
    layers = {"attention": LayerCall(block.attn, tokens, (None, model.rotation))}
    if block.mlp.activation is relu_squared:
        layers["mlp"] = LayerCall(block.mlp, tokens)
    if not workload.compiled and config.norm != "none":
        layers["norm"] = LayerCall(block.norm1, tokens)
    return layers


def set_kernels(model: nn.Module, kernel_by_layer: KernelByLayer) -> None:
    """Set the kernels of all blocks; layers that are not listed use `default`."""
    for module in model.modules():
        if isinstance(module, Block):
            module.attn.kernel = kernel_by_layer.get("attention", "default")
        elif isinstance(module, Mlp):
            module.kernel = kernel_by_layer.get("mlp", "default")
        elif isinstance(module, LayerNorm | RMSNorm):
            module.kernel = kernel_by_layer.get("norm", "default")


def _find_or_measure_fastest_kernel(layer_call: LayerCall, workload: KernelWorkload) -> str:
    """Return the fastest kernel from the tables; otherwise measure it and store the result."""
    key = make_kernel_key(layer_call, workload)
    name = find_fastest_kernel(key)
    if name is None:
        name = measure_fastest_kernel(layer_call, workload)
        try_store_fastest_kernel(key, name)
    return name


def measure_fastest_kernel(layer_call: LayerCall, workload: KernelWorkload) -> str:
    """Return the kernel with the shortest time. The random state is not changed, even with dropout."""
    devices = [layer_call.tokens.device] if layer_call.tokens.is_cuda else []
    with torch.random.fork_rng(devices):
        times = {
            name: _measure_kernel_milliseconds_or_inf(layer_call, name, workload) for name in layer_call.module.KERNELS
        }
    return min(times, key=lambda name: times[name])


def make_kernel_key(layer_call: LayerCall, workload: KernelWorkload) -> KernelKey:
    return KernelKey(
        gpu=torch.cuda.get_device_name(),
        torch_version=str(torch.__version__),
        layer=_format_layer_class_and_attention_settings(layer_call),
        shape=tuple(layer_call.tokens.shape),
        dtype=str(workload.dtype),
        task="training" if workload.training else "inference",
        kernels=tuple(layer_call.module.KERNELS),
    )


def _format_layer_class_and_attention_settings(layer_call: LayerCall) -> str:
    """Return the module's class, and for attention the settings that change its kernels."""
    module, text = layer_call.module, type(layer_call.module).__name__
    if hasattr(module, "num_heads"):
        settings = {"local": module.scale is not None, "causal": module.causal, "dropout": module.attn_drop.p > 0}
        text += f" of {module.num_heads} heads, {module.q_norm}"
        text += "".join(f", {name}" for name, is_set in settings.items() if is_set)
    return text + (", turned" if any(isinstance(arg, Tensor) for arg in layer_call.extra_args) else "")


def _measure_kernel_milliseconds_or_inf(layer_call: LayerCall, kernel_name: str, workload: KernelWorkload) -> float:
    """Return the time of a call, with the backward pass in training; infinite if the kernel does not work here."""
    tokens, module = layer_call.tokens, deepcopy(layer_call.module).train(workload.training)
    module.kernel = kernel_name
    inputs = tokens.detach().clone().requires_grad_(workload.training)
    weights = [weight for weight in module.parameters() if weight.requires_grad]

    autocast = torch.autocast(tokens.device.type, workload.dtype, enabled=workload.dtype != torch.float32)

    def call_layer() -> None:
        with torch.set_grad_enabled(workload.training), autocast:
            output = module(inputs, *layer_call.extra_args)
        if workload.training:
            torch.autograd.grad(output, [inputs, *weights], torch.ones_like(output))

    try:
        return measure_milliseconds_in_cuda_graph(call_layer)
    except Exception:  # any error of a compiler or driver: another kernel is used
        return inf


def measure_milliseconds_in_cuda_graph(function: Callable[[], object]) -> float:
    """Return the shortest time per call over several replays of a CUDA graph, without launch overhead."""
    graph, _ = warm_up_and_record_cuda_graph(
        make_repeated_call(function, CALLS_PER_GRAPH), make_repeated_call(function, WARM_UP_CALLS)
    )
    times = []
    for _ in range(NUM_TIMED_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / CALLS_PER_GRAPH)
    return min(times)
