"""train.distill -> a teacher that answers the images a student learns from, and the loss of answering otherwise."""

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.data.preparation import Preparation
from vitascope.errors import UserError, first_line
from vitascope.recipe.train import TrainConfig
from vitascope.shapes import Images, Logits
from vitascope.training.hardware import Hardware
from vitascope.weights.any_model import AnyModel, open_any
from vitascope.weights.known import anonymous


@dataclass
class Teacher:
    """In eval mode, never learning. It sees each image as varied and mixed as the student does (DeiT), but normalised
    and sized as it is used to."""

    forward: nn.Module
    given: Preparation  # how the student's images are prepared
    wanted: Preparation  # how the teacher's are
    order: list[int] | None  # where the student's classes stand among the teacher's; None: in the same places
    plain: bool = False  # it answers in float32, whatever the student computes in
    fingerprint: str = ""  # a short name for exactly these weights

    @torch.no_grad()
    def __call__(self, images: Images) -> Logits:
        with torch.autocast(images.device.type, enabled=False) if self.plain else nullcontext():
            logits = self.forward(self.given.turned_into(self.wanted, images))
        return logits if self.order is None else logits[:, self._order]

    @cached_property
    def _order(self) -> Tensor:
        return torch.tensor(self.order, device=next(self.forward.parameters()).device)


def open_teacher(
    word: str, given: Preparation, classes: list[str], hardware: Hardware, *, named: bool = True
) -> Teacher:
    """`classes` are the student's, `named` unless they are only numbers."""
    with torch.random.fork_rng(devices=[]):  # building a network draws weights: the student's chances stay its own
        found = open_any(word)
    order = _order(word, found, classes, named)
    _try(word, found)
    module = found.module.to(hardware.device).eval().requires_grad_(False)
    forward = hardware.compile(module)
    plain = hardware.precision == "float16"  # where a teacher's answer could overflow
    return Teacher(forward, given, found.preparation, order, plain, _fingerprint(module))  # pyright: ignore


def distilled(logits: Logits, taught: Logits, config: TrainConfig) -> Tensor:
    """Distillation loss in float32, averaged over the images.

    Soft: T² · KL(teacher ‖ student), both softened by T (Hinton et al. 2015); hard: cross-entropy with the teacher's
    choice (Touvron et al. 2021)."""
    logits, taught = logits.float(), taught.float()
    if config.distill_type == "hard":
        return F.cross_entropy(logits, taught.argmax(1))
    soft = config.distill_temperature
    ours, theirs = (part.div(soft).log_softmax(1) for part in (logits, taught))
    return F.kl_div(ours, theirs, log_target=True, reduction="batchmean") * soft**2


def _try(word: str, teacher: AnyModel) -> None:
    """Run the teacher on one empty image, to report errors before the training starts."""
    size = teacher.preparation.size
    try:
        with torch.no_grad():
            logits = teacher.module(torch.zeros(1, len(teacher.preparation.mean), *size))
        width = tuple(logits.shape)
    except Exception as error:  # whatever a network may say
        raise UserError(f"The teacher {word} fails on an image of {size[0]}×{size[1]}: {first_line(error)}.") from error
    if width != (1, teacher.num_classes):
        raise UserError(f"The output of the teacher {word} has shape {list(width)}; it must be one number per class.")


def _fingerprint(module: nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for weight in module.state_dict().values():
        digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _order(word: str, teacher: AnyModel, classes: list[str], named: bool) -> list[int] | None:
    """Match classes by name if both have names. Otherwise an equal number of classes is taken as the same classes."""
    if teacher.num_classes != len(classes):
        raise UserError(
            f"The teacher {word} has {teacher.num_classes} classes, but the data has {len(classes)}. "
            "Fine-tune it on this data first, then distil from that run."
        )
    if teacher.classes is None or teacher.classes == classes:
        return None
    if set(teacher.classes) != set(classes) and (anonymous(teacher.classes) or not named):
        return None
    unknown = [name for name in classes if name not in teacher.classes]
    if unknown:
        raise UserError(f"The teacher {word} has no class '{unknown[0]}'; it has {', '.join(teacher.classes[:5])}, …")
    return [teacher.classes.index(name) for name in classes]
