"""train.distill -> a teacher that answers the images a student learns from, and the loss of answering otherwise."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.data.preparation import Preparation
from vitascope.errors import UserError
from vitascope.recipe.train import TrainConfig
from vitascope.shapes import Images, Logits
from vitascope.training.hardware import Hardware
from vitascope.weights.any_model import AnyModel, open_any
from vitascope.weights.known import class_names


@dataclass
class Teacher:
    """In eval mode, never learning. It sees each image as varied and mixed as the student does (DeiT), but normalised
    and sized as it is used to."""

    forward: nn.Module
    given: Preparation  # how the student's images are prepared
    wanted: Preparation  # how the teacher's are
    order: list[int] | None  # where the student's classes stand among the teacher's; None: in the same places

    @torch.no_grad()
    def __call__(self, images: Images) -> Logits:
        logits = self.forward(self.given.turned_into(self.wanted, images))
        return logits if self.order is None else logits[:, self._order]

    @cached_property
    def _order(self) -> Tensor:
        return torch.tensor(self.order, device=next(self.forward.parameters()).device)


def open_teacher(word: str, given: Preparation, classes: list[str], hardware: Hardware) -> Teacher:
    found = open_any(word)
    order = _order(word, found, classes)
    module = found.module.to(hardware.device).eval().requires_grad_(False)
    forward = torch.compile(module) if hardware.compiled else module
    return Teacher(forward, given, found.preparation, order)  # pyright: ignore[reportArgumentType]


def distilled(logits: Logits, taught: Logits, config: TrainConfig) -> Tensor:
    """What the student is told for its answers, in float32, a mean over images.

    Soft: T² · KL(teacher ‖ student), both softened by T (Hinton et al. 2015); hard: cross-entropy with the teacher's
    choice (Touvron et al. 2021)."""
    logits, taught = logits.float(), taught.float()
    if config.distill_how == "hard":
        return F.cross_entropy(logits, taught.argmax(1))
    soft = config.distill_temperature
    ours, theirs = (part.div(soft).log_softmax(1) for part in (logits, taught))
    return F.kl_div(ours, theirs, log_target=True, reduction="batchmean") * soft**2


def _order(word: str, teacher: AnyModel, classes: list[str]) -> list[int] | None:
    """By name where both have names; else a teacher of as many classes is taken as one of the same."""
    if teacher.num_classes != len(classes):
        raise UserError(
            f"The teacher {word} answers with {teacher.num_classes} classes, the data has {len(classes)}. "
            "Fine-tune it on this data first, then distil from that run."
        )
    if teacher.classes is None or teacher.classes == classes or teacher.classes == class_names(len(classes)):
        return None
    unknown = [name for name in classes if name not in teacher.classes]
    if unknown:
        raise UserError(f"The teacher {word} knows no class '{unknown[0]}'; it has {', '.join(teacher.classes[:5])}, …")
    return [teacher.classes.index(name) for name in classes]
