"""Speed up prediction: compiled with CUDA graphs on a GPU, int8 or bfloat16 on a CPU.

On a CPU, int8 or bfloat16 is used only if it is measured to be faster and if the accuracy on the run's own images drops
by at most 0.2 percentage points. This check runs once; its result is stored in the run's fast.json.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitascope.inference.hardware import make_float32_inference_hardware
from vitascope.inference.kernel_choice import KernelWorkload, choose_fastest_kernels, set_kernels
from vitascope.inference.scoring import choose_inference_batch_size, compute_outputs_in_batches
from vitascope.kernels.launch import make_repeated_call, warm_up_and_record_cuda_graph
from vitascope.model.precision import replace_linear_with_int8_in_place
from vitascope.model.vit import VisionTransformer
from vitascope.run.directory import Run
from vitascope.run.files import read_json_object_or_empty, write_json
from vitascope.run.images import try_to_sample_run_images
from vitascope.run.machine import measure_inference_speedup
from vitascope.shapes import Features
from vitascope.weights.model_info import ModelInfo

MIN_SPEEDUP = 1.15  # minimum speed-up; below it float32 is used
MAX_ACCURACY_LOSS_POINTS = 0.2  # percentage points of accuracy
MAX_CHECKED_IMAGES = 1000  # images
WARM_UP_CALLS = 3  # before a CUDA graph is recorded
SMALL_BATCH_SIZE = 32  # images; up to here a smaller CUDA graph is used

FeatureFunction = Callable[[Tensor], Features]  # prepared images -> pooled features


@dataclass(frozen=True)
class FastInference:
    """The function that computes pooled features (None: the model itself), and a description."""

    compute_pooled: FeatureFunction | None
    description: str


class FastCandidate(NamedTuple):
    compute_pooled: FeatureFunction
    number_format: str | None  # None: plain float32
    speedup: float | None  # measured on a CPU, relative to float32; None on a GPU


def choose_fast_or_float32_inference(model: VisionTransformer, run: Run, model_info: ModelInfo) -> FastInference:
    """Choose the fastest way to compute features whose accuracy loss is small enough."""
    compute_pooled, number_format, speedup = build_fastest_feature_function(model)
    if number_format is None:
        return FastInference(
            None,
            f"float32: no other format is at least {MIN_SPEEDUP} times as fast on this machine "
            f"(best: {speedup:.2f} times)",
        )
    if speedup is None:
        return FastInference(compute_pooled, number_format)
    points_lost = find_or_measure_accuracy_loss_points(model, compute_pooled, number_format, run, model_info)
    if points_lost is None:
        return FastInference(
            None,
            f"float32: the accuracy of {number_format} cannot be checked, because the run's images are not available",
        )
    if points_lost > MAX_ACCURACY_LOSS_POINTS:
        return FastInference(
            None,
            f"float32: {number_format} would lower the accuracy on the run's images "
            f"by {points_lost:.1f} percentage points",
        )
    description = (
        f"{number_format}: matrix products {speedup:.1f} times as fast as float32, "
        f"accuracy loss {points_lost:.1f} percentage points"
    )
    return FastInference(compute_pooled, description)


def build_fastest_feature_function(model: VisionTransformer, full_batch_size: int | None = None) -> FastCandidate:
    """Return the fastest function for pooled features, computed by a copy of the model.

    `full_batch_size`: images in a full batch on a GPU, if known."""
    device = next(model.parameters()).device.type
    plain = copy_as_frozen_cpu_model(model).to(next(model.parameters()).device)
    if device == "cuda":
        return FastCandidate(
            CudaGraphInference(plain, full_batch_size), "compiled, bfloat16, recorded as CUDA graphs", None
        )
    if device != "cpu":
        return FastCandidate(plain.compute_pooled_features, None, 1.0)
    speedups = {
        number_format: measure_inference_speedup(number_format, model.config.embed_dim, torch.get_num_threads())
        for number_format in FEATURE_FUNCTION_BUILDERS
    }
    number_format = max(speedups, key=lambda name: speedups[name])
    if speedups[number_format] < MIN_SPEEDUP:
        return FastCandidate(plain.compute_pooled_features, None, speedups[number_format])
    return FastCandidate(FEATURE_FUNCTION_BUILDERS[number_format](plain), number_format, speedups[number_format])


def find_or_measure_accuracy_loss_points(
    model: VisionTransformer,
    compute_fast_pooled: FeatureFunction,
    number_format: str,
    run: Run,
    model_info: ModelInfo,
) -> float | None:
    """Return the accuracy loss on the run's own images, in percentage points; None if they are not available.

    Test images are never used."""
    earlier_checks = read_json_object_or_empty(run.get_path("fast.json"))
    number_format += "".join(f", {name}={count}" for name, count in model.config.token_reduction.items())
    if number_format in earlier_checks:
        return earlier_checks[number_format]["points_lost"]
    run_sample = try_to_sample_run_images(run, model_info, MAX_CHECKED_IMAGES)
    if run_sample is None:
        return None
    samples = run_sample.samples
    accuracies = []
    for compute_pooled in (model.compute_pooled_features, compute_fast_pooled):
        features = compute_outputs_in_batches(
            model, compute_pooled, samples.images, model_info.preparation, make_float32_inference_hardware(model)
        )
        with torch.no_grad():
            accuracies.append((model.head(features).argmax(1) == samples.labels).float().mean().item())
    points_lost = 100 * (accuracies[0] - accuracies[1])
    write_json(
        run.get_path("fast.json"),
        earlier_checks | {number_format: {"points_lost": points_lost, "images": len(samples)}},
    )
    return points_lost


def make_bfloat16_inference_workload(batch_size: int) -> KernelWorkload:
    """Return the workload for which the kernels of a captured batch are chosen."""
    return KernelWorkload(batch_size, torch.bfloat16, training=False, compiled=True)


class CapturedGraph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    images: Tensor  # static input
    features: Tensor  # static output


class CudaGraphInference:
    """Compiled model in CUDA graphs with static batch sizes: one image, a few, many."""

    def __init__(self, model: VisionTransformer, full_batch_size: int | None = None) -> None:
        self.model = _convert_linear_conv_to_bfloat16_in_place(model)
        self.batch_sizes = sorted({1, SMALL_BATCH_SIZE, full_batch_size or choose_inference_batch_size(model, "cuda")})
        self.captured_graphs: dict[int, CapturedGraph] = {}
        self.lock = Lock()  # the graphs have one input and one output each

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Features:
        with self.lock:
            return self._compute_in_static_batches(images)

    def _compute_in_static_batches(self, images: Tensor) -> Features:
        parts = []
        for batch in images.split(self.batch_sizes[-1]):
            size = next(size for size in self.batch_sizes if size >= len(batch))
            graph, inputs, output = self.captured_graphs.get(size) or self._capture_and_store_feature_graph(size, batch)
            inputs[: len(batch)].copy_(batch)
            graph.replay()
            parts.append(output[: len(batch)].to(torch.float32, copy=True))  # the next replay writes there again
        return torch.cat(parts)

    def _capture_and_store_feature_graph(self, batch_size: int, example_images: Tensor) -> CapturedGraph:
        model = deepcopy(self.model)
        set_kernels(model, choose_fastest_kernels(model, make_bfloat16_inference_workload(batch_size)))
        compiled = torch.compile(model.compute_pooled_features, dynamic=False)
        inputs = example_images.new_zeros(batch_size, *example_images.shape[1:])

        def run_model() -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return compiled(inputs)

        graph, output = warm_up_and_record_cuda_graph(run_model, make_repeated_call(run_model, WARM_UP_CALLS))
        self.captured_graphs[batch_size] = CapturedGraph(graph, inputs, output)
        return self.captured_graphs[batch_size]


def _build_int8_feature_function(model: VisionTransformer) -> FeatureFunction:
    """Use int8 in the blocks; the last block keeps float32 qkv if only the class token is read."""
    float32_layers: set[nn.Module] = {model.head}
    if model.config.global_pool == "token":
        float32_layers.add(model.blocks[-1].get_submodule("attn.qkv"))
    replace_linear_with_int8_in_place(model, float32_layers)
    return model.compute_pooled_features


def _build_bfloat16_feature_function(model: VisionTransformer) -> FeatureFunction:
    bfloat16_model = _convert_linear_conv_to_bfloat16_in_place(model)

    def compute_pooled(images: Tensor) -> Features:
        with torch.autocast("cpu", torch.bfloat16):
            return bfloat16_model.compute_pooled_features(images).float()

    return compute_pooled


FEATURE_FUNCTION_BUILDERS: dict[str, Callable[[VisionTransformer], FeatureFunction]] = {
    "int8": _build_int8_feature_function,
    "bfloat16": _build_bfloat16_feature_function,
}


def _convert_linear_conv_to_bfloat16_in_place(model: VisionTransformer) -> VisionTransformer:
    """Convert linear and convolution weights to bfloat16; norms and embeddings keep their precision."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.to(torch.bfloat16)
    return model


def copy_as_frozen_cpu_model(
    model: VisionTransformer, model_class: type[VisionTransformer] = VisionTransformer
) -> VisionTransformer:
    """Copy weights and architecture to the CPU, without dropout, custom kernels, gradients or run."""
    copy = model_class(model.config)
    copy.load_state_dict(model.state_dict())
    return copy.eval().requires_grad_(False)


def compute_max_relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value."""
    if actual.shape != expected.shape:
        return float("inf")
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-12)).item()
