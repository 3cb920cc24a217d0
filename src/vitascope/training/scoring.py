"""A model and stored images -> logits, loss and accuracy, the same for any batch size."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.data.preparation import Preparation
from vitascope.data.source import Split, UInt8Images
from vitascope.model.vit import VisionTransformer
from vitascope.shapes import Images, Logits
from vitascope.training.allocator import keep_freed_memory
from vitascope.training.hardware import Hardware, exact_products
from vitascope.training.views import average_logits

BATCH = 1000
MEMORY = {"cpu": 2**25}  # bytes for a batch's activations: on a CPU what its caches hold; the answers stay the same
ELSEWHERE = 2**30


@dataclass(frozen=True)
class Score:
    """Mean cross-entropy (without smoothing) and the share of right answers."""

    loss: float
    accuracy: float
    images: int


def logits_of(
    model: nn.Module,
    images: UInt8Images,
    prepare: Callable[[UInt8Images], Images],
    hardware: Hardware,
    *,
    batch: int | None = None,
    views: int = 1,
) -> Logits:
    """All logits in float32, on the CPU, averaged over the views (`training/views.py`)."""
    return answers(model, lambda prepared: average_logits(model, prepared, views), images, prepare, hardware, batch)


@torch.no_grad()
def answers(
    model: nn.Module,
    ask: Callable[[Tensor], Tensor],
    images: UInt8Images,
    prepare: Callable[[UInt8Images], Images],
    hardware: Hardware,
    batch: int | None = None,
) -> Tensor:
    """What the model, asked so, says to prepared images: without dropout, as float32, on the CPU."""
    if hardware.device == "cpu":
        keep_freed_memory()
    was_training = model.training
    model.eval()
    try:
        with hardware.autocast(), exact_products(hardware):
            parts = [
                ask(prepare(part.to(hardware.device, non_blocking=True))).float()
                for part in images.split(batch or batch_for(model, hardware.device))
            ]
    finally:
        model.train(was_training)
    return torch.cat(parts).cpu()


def batch_for(model: nn.Module, device: str) -> int:
    """A thousand images, fewer where a token's features, widened four times in the MLP, would fill the memory."""
    if not isinstance(model, VisionTransformer):
        return BATCH
    memory = MEMORY.get(device, ELSEWHERE)
    return max(1, min(BATCH, memory // (32 * model.config.num_tokens * model.config.embed_dim)))


def score(model: nn.Module, split: Split, preparation: Preparation, hardware: Hardware) -> Score:
    logits, labels = logits_of(model, split.images, preparation, hardware), split.labels.cpu()
    right = (logits.argmax(1) == labels).sum().item()
    return Score(F.cross_entropy(logits, labels).item(), right / len(labels), len(labels))
