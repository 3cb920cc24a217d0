"""Speed up prediction: compiled with CUDA graphs on a GPU, int8 or bfloat16 on a CPU.

On a CPU, int8 or bfloat16 is used only if it is measured to be faster and if the accuracy on the run's own images drops
by at most 0.2 percentage points. This check runs once; its result is stored in the run's fast.json.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitascope.evaluation.eval_data import sample_run_images
from vitascope.model.int8 import replace_linear_with_int8
from vitascope.model.vit import VisionTransformer
from vitascope.run.directory import Run
from vitascope.run.files import read_json, write_json
from vitascope.run.format_probe import measure_inference_speedup
from vitascope.shapes import Features
from vitascope.training.hardware import make_inference_hardware
from vitascope.training.kernel_choice import KernelWorkload, choose_kernels, set_kernels
from vitascope.training.scoring import choose_batch_size, compute_outputs
from vitascope.weights.model_info import ModelInfo

MIN_SPEEDUP = 1.15  # minimum speed-up; below it float32 is used
MAX_ACCURACY_LOSS_POINTS = 0.2  # percentage points of accuracy
MAX_CHECKED_IMAGES = 1000  # images
SMALL_BATCH_SIZE = 32  # images; up to here a smaller CUDA graph is used


@dataclass(frozen=True)
class FastInference:
    """The function that computes pooled features (None: the model itself), and a description."""

    compute_pooled: Callable[[Tensor], Features] | None
    description: str


def prepare_fast_inference(model: VisionTransformer, run: Run, model_info: ModelInfo) -> FastInference:
    quick, form, gain = build_fastest_feature_function(model)
    if form is None:
        return FastInference(
            None,
            f"float32: no other format is at least {MIN_SPEEDUP} times as fast on this machine (best: {gain:.2f} times)",
        )
    if gain is None:
        return FastInference(quick, form)
    lost = measure_accuracy_loss(model, quick, form, run, model_info)
    if lost is None:
        return FastInference(
            None, f"float32: the accuracy of {form} cannot be checked, because the run's images are not available"
        )
    if lost > MAX_ACCURACY_LOSS_POINTS:
        return FastInference(
            None, f"float32: {form} would lower the accuracy on the run's images by {lost:.1f} percentage points"
        )
    how = f"{form}: matrix products {gain:.1f} times as fast as float32, accuracy loss {lost:.1f} percentage points"
    return FastInference(quick, how)


def build_fastest_feature_function(
    model: VisionTransformer, full_batch_size: int | None = None
) -> tuple[Callable[[Tensor], Features], str | None, float | None]:
    """Return a copy's fastest function for pooled features, its format, and on a CPU its speed-up.

    `many` is the size of full batches on a GPU, if known."""
    device = next(model.parameters()).device.type
    plain = copy_as_plain_model(model).to(next(model.parameters()).device)
    if device == "cuda":
        return CudaGraphInference(plain, full_batch_size), "compiled, bfloat16, recorded as CUDA graphs", None
    if device != "cpu":
        return plain.compute_pooled_features, None, 1.0
    gains = {
        form: measure_inference_speedup(form, model.config.embed_dim, torch.get_num_threads())
        for form in FEATURE_FUNCTION_BUILDERS
    }
    form = max(gains, key=lambda name: gains[name])
    if gains[form] < MIN_SPEEDUP:
        return plain.compute_pooled_features, None, gains[form]
    return FEATURE_FUNCTION_BUILDERS[form](plain), form, gains[form]


def measure_accuracy_loss(
    model: VisionTransformer,
    compute_fast_pooled: Callable[[Tensor], Features],
    number_format: str,
    run: Run,
    model_info: ModelInfo,
) -> float | None:
    """Return the accuracy loss on the run's own images, in percentage points; None if they are not available.

    Test images are never used."""
    known = read_json(run.get_path("fast.json"))
    number_format += "".join(f", {name}={count}" for name, count in model.config.token_reduction.items())
    if number_format in known:
        return known[number_format]["points_lost"]
    found = sample_run_images(run, model_info, MAX_CHECKED_IMAGES)
    if found is None:
        return None
    some, _ = found
    right = []
    for pooled in (model.compute_pooled_features, compute_fast_pooled):
        features = compute_outputs(model, pooled, some.images, model_info.preparation, make_inference_hardware(model))
        with torch.no_grad():
            right.append((model.head(features).argmax(1) == some.labels).float().mean().item())
    lost = 100 * (right[0] - right[1])
    write_json(run.get_path("fast.json"), known | {number_format: {"points_lost": lost, "images": len(some)}})
    return lost


def make_inference_kernel_use(batch_size: int) -> KernelWorkload:
    """Return the use for which the kernels of a captured batch are chosen."""
    return KernelWorkload(batch_size, torch.bfloat16, training=False, compiled=True)


class CudaGraphInference:
    """Compiled model in CUDA graphs with static batch sizes: one image, a few, many."""

    def __init__(self, model: VisionTransformer, full_batch_size: int | None = None) -> None:
        self.model = _convert_weights_to_bfloat16(model)
        self.batch_sizes = sorted({1, SMALL_BATCH_SIZE, full_batch_size or choose_batch_size(model, "cuda")})
        self.captured_graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Features:
        parts = []
        for some in images.split(self.batch_sizes[-1]):
            size = next(size for size in self.batch_sizes if size >= len(some))
            graph, inputs, output = self.captured_graphs.get(size) or self._capture_graph(size, some)
            inputs[: len(some)].copy_(some)
            graph.replay()
            parts.append(output[: len(some)].to(torch.float32, copy=True))  # the next replay writes there again
        return torch.cat(parts)

    def _capture_graph(self, batch_size: int, example_images: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        model = deepcopy(self.model)
        set_kernels(model, choose_kernels(model, make_inference_kernel_use(batch_size)))
        compiled = torch.compile(model.compute_pooled_features, dynamic=False)
        inputs = example_images.new_zeros(batch_size, *example_images.shape[1:])

        def work() -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return compiled(inputs)

        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = work()
        self.captured_graphs[batch_size] = graph, inputs, output
        return self.captured_graphs[batch_size]


def _build_int8_feature_function(model: VisionTransformer) -> Callable[[Tensor], Features]:
    """Use int8 in the blocks; the last block keeps float32 qkv if only the class token is read."""
    kept: set[nn.Module] = {model.head}
    if model.config.global_pool == "token":
        kept.add(model.blocks[-1].get_submodule("attn.qkv"))
    replace_linear_with_int8(model, kept)
    return model.compute_pooled_features


def _build_bfloat16_feature_function(model: VisionTransformer) -> Callable[[Tensor], Features]:
    narrow = _convert_weights_to_bfloat16(model)

    def pooled(images: Tensor) -> Features:
        with torch.autocast("cpu", torch.bfloat16):
            return narrow.compute_pooled_features(images).float()

    return pooled


FEATURE_FUNCTION_BUILDERS: dict[str, Callable[[VisionTransformer], Callable[[Tensor], Features]]] = {
    "int8": _build_int8_feature_function,
    "bfloat16": _build_bfloat16_feature_function,
}


def _convert_weights_to_bfloat16(model: VisionTransformer) -> VisionTransformer:
    """Convert linear and convolution weights to bfloat16; norms and embeddings keep their precision."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.to(torch.bfloat16)
    return model


def copy_as_plain_model(
    model: VisionTransformer, model_class: type[VisionTransformer] = VisionTransformer
) -> VisionTransformer:
    """Copy weights and architecture to the CPU, without dropout, custom kernels, gradients or run."""
    twin = model_class(model.config)
    twin.load_state_dict(model.state_dict())
    return twin.eval().requires_grad_(False)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value."""
    if actual.shape != expected.shape:
        return float("inf")
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-12)).item()
