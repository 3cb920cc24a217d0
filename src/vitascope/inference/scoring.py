"""Compute outputs, logits, loss and accuracy of stored images, batch by batch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.data.dataset import Dataset, UInt8Images
from vitascope.errors import UserError
from vitascope.inference.hardware import InferenceHardware, disable_tf32_for_float32, set_malloc_to_keep_memory
from vitascope.inference.views import average_logits_over_views
from vitascope.model.vit import VisionTransformer
from vitascope.shapes import Images, Logits

MAX_BATCH_SIZE = 1000
ACTIVATION_BYTES = {"cpu": 2**25}  # for a batch's activations, by device: on a CPU the size of its caches
DEFAULT_ACTIVATION_BYTES = 2**30


@dataclass(frozen=True)
class Score:
    """Mean cross-entropy (without label smoothing) and accuracy."""

    loss: float
    accuracy: float
    num_images: int


def compute_logits(
    model: nn.Module,
    images: UInt8Images | Dataset,
    preprocess: Callable[[UInt8Images], Images],
    hardware: InferenceHardware,
    *,
    batch_size: int | None = None,
    num_views: int = 1,
) -> Logits:
    """Return the logits in float32 on the CPU, averaged over the views (`VIEWS`)."""
    return compute_outputs(
        model,
        lambda prepared: average_logits_over_views(model, prepared, num_views),
        images,
        preprocess,
        hardware,
        batch_size,
    )


@torch.no_grad()
def compute_outputs(
    model: nn.Module,
    forward: Callable[[Tensor], Tensor],
    images: UInt8Images | Dataset,
    preprocess: Callable[[UInt8Images], Images],
    hardware: InferenceHardware,
    batch_size: int | None = None,
) -> Tensor:
    """Return the outputs of `forward`, a function of `model`, for all images, as float32 on the CPU.

    The model is not changed. It must be in eval mode."""
    if model.training:
        raise UserError("The model is in training mode, so dropout is active. Call model.eval() first.")
    if hardware.device == "cpu":
        set_malloc_to_keep_memory()
    batch_size = batch_size or choose_inference_batch_size(model, hardware.device)
    batches = images.split(batch_size) if isinstance(images, Tensor) else images.iterate_batches(batch_size)
    with hardware.autocast(), disable_tf32_for_float32(hardware):
        parts = [forward(preprocess(part.to(hardware.device, non_blocking=True))).float() for part in batches]
    return torch.cat(parts).cpu()


def choose_inference_batch_size(model: nn.Module, device: str) -> int:
    """Return 1000, or fewer if the MLP activations (4 × embed_dim per token) would not fit into ACTIVATION_BYTES."""
    if not isinstance(model, VisionTransformer):
        return MAX_BATCH_SIZE
    memory = ACTIVATION_BYTES.get(device, DEFAULT_ACTIVATION_BYTES)
    return max(1, min(MAX_BATCH_SIZE, memory // (32 * model.config.num_tokens * model.config.embed_dim)))


def score_logits(logits: Logits, labels: Tensor) -> Score:
    """Return the loss and accuracy of logits."""
    num_correct = (logits.argmax(1) == labels).sum().item()
    return Score(F.cross_entropy(logits, labels).item(), num_correct / len(labels), len(labels))
