"""A model and a split -> loss and accuracy, the same for any batch size."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.data.preparation import Preparation
from vitascope.data.source import Split
from vitascope.training.hardware import Hardware


@dataclass(frozen=True)
class Score:
    """Mean cross-entropy (without smoothing) and the share of right answers."""

    loss: float
    accuracy: float
    images: int


@torch.inference_mode()
def logits_of(
    model: nn.Module, split: Split, preparation: Preparation, hardware: Hardware, batch: int = 1000
) -> Tensor:
    """All logits in float32, on the CPU."""
    was_training = model.training
    model.eval()
    parts = []
    for images in split.images.split(batch):
        with hardware.autocast():
            parts.append(model(preparation(images.to(hardware.device, non_blocking=True))).float())
    model.train(was_training)
    return torch.cat(parts).cpu()


def score(model: nn.Module, split: Split, preparation: Preparation, hardware: Hardware) -> Score:
    logits, labels = logits_of(model, split, preparation, hardware), split.labels.cpu()
    right = (logits.argmax(1) == labels).sum().item()
    return Score(F.cross_entropy(logits, labels).item(), right / len(labels), len(labels))
