"""Classification objective: cross-entropy, optionally with distillation from a teacher."""

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.data.augment import MixedLabels
from vitascope.data.dataset import Labels, UInt8Images
from vitascope.data.open_data import compute_class_weights
from vitascope.data.preprocessing import Preprocessing
from vitascope.data.sampling import RandomDraws
from vitascope.errors import UserError, shorten_error_message
from vitascope.inference.classifier import Classifier
from vitascope.inference.open_model import open_model
from vitascope.inference.scoring import score_model
from vitascope.model.anatomy import count_forward_flops_per_image
from vitascope.model.pretraining import PatchDropout
from vitascope.recipe.schema import Recipe
from vitascope.recipe.train import TrainConfig
from vitascope.shapes import Images, Logits
from vitascope.training.hardware import Hardware
from vitascope.training.objectives.objective import Batch, Objective, StepMetrics, ValidationMetrics
from vitascope.training.optim.schedule import ScheduleValues
from vitascope.weights.model_info import has_placeholder_names

if TYPE_CHECKING:
    from vitascope.training.state import TrainState


class LossAndAccuracy(NamedTuple):
    """Means over a batch; in batched training one value per model."""

    loss: Tensor
    accuracy: Tensor


class Classify(Objective):
    """Cross-entropy with the labels, optionally mixed with the loss of distillation from a teacher."""

    name = "classify"
    metric_names = ("train_loss", "train_accuracy")

    def __init__(self, state: "TrainState") -> None:
        super().__init__(state)
        data, config = state.data, state.recipe
        phase_models: list[nn.Module] = [state.model]
        if config.train.num_patch_dropout_epochs:
            num_kept = config.train.count_kept_patches(state.model.config.num_patches)
            phase_models.insert(0, PatchDropout(state.model, num_kept))
        self.models_by_phase = [state.hardware.compile(model) for model in phase_models]
        self.compute_loss_and_accuracy = state.hardware.compile(compute_loss_and_accuracy)
        self.weight_per_class: Tensor | None = None  # per class, for data.balance=loss
        if config.data.balance == "loss":
            self.weight_per_class = compute_class_weights(data.train.labels, len(data.classes)).to(
                state.hardware.device
            )
        self.teacher: Teacher | None = None
        if config.train.distill:
            self.teacher = open_teacher_for_classes(
                config.train.distill,
                data.preprocessing,
                data.classes,
                state.hardware,
                has_class_names=data.source.has_class_names,
            )
            self.fingerprint = self.teacher.fingerprint

    @classmethod
    def count_equivalent_forward_passes(cls, recipe: Recipe) -> float:
        """Epochs with train.patch_share cost less."""
        train, flops = recipe.train, count_forward_flops_per_image(recipe.model)
        if not train.num_patch_dropout_epochs:
            return 1.0
        kept_flops = count_forward_flops_per_image(recipe.model, train.count_kept_patches(recipe.model.num_patches))
        return 1 - train.num_patch_dropout_epochs / train.epochs * (1 - kept_flops / flops)

    def get_phase_of_epoch(self, epoch: int) -> int:
        """train.patch_share: 0 while only some patches are used, then 1."""
        num_epochs = self.state.recipe.train.num_patch_dropout_epochs
        return int(epoch >= num_epochs) if num_epochs else 0

    def draw_random_numbers_of_epoch(self, num_steps: int, batch_size: int, epoch: int) -> RandomDraws:
        drops_patches = self.state.recipe.train.num_patch_dropout_epochs
        return super().draw_random_numbers_of_epoch(num_steps, batch_size, epoch) | (
            self.draw_patch_noise_of_epoch(num_steps, batch_size, epoch) if drops_patches else {}
        )

    def augment_batch(self, images: UInt8Images, labels: Labels, draws: RandomDraws) -> Batch:
        policy = self.state.recipe.data.augment
        inputs, target = self.state.preprocessing.augment_and_mix(images, labels, draws, policy)
        noise = [draws[name] for name in ("noise", "depth") if name in draws]
        return inputs, target.labels, target.partner_labels, target.lam, *noise

    def compute_loss_and_metrics(self, batch: Batch, schedule: ScheduleValues, phase: int = 0) -> StepMetrics:
        images, target = batch[0], MixedLabels(*batch[1:4])
        noise = batch[4 + phase :]  # train.patch_share's, skipped in phase 1; then that of stochastic depth
        config = self.state.recipe.train
        with self.state.hardware.autocast():
            logits = self.models_by_phase[phase](images, *noise)
            teacher_logits = self.teacher(images) if self.teacher else None
        loss, accuracy = self.compute_loss_and_accuracy(logits, target, config.label_smoothing, self.weight_per_class)
        if teacher_logits is not None:
            loss = torch.lerp(loss, distillation_loss(logits, teacher_logits, config), config.distill_alpha)
        return {"train_loss": loss, "train_accuracy": accuracy}

    def validate(self, epoch: int) -> ValidationMetrics:
        data = self.state.data
        if data.validation is None:
            return {}
        score = score_model(self.state.eval_model, data.validation, data.preprocessing, self.state.hardware)
        return {"val_loss": score.loss, "val_accuracy": score.accuracy}


def compute_loss_and_accuracy(
    logits: Tensor, target: MixedLabels, label_smoothing: float, weight_per_class: Tensor | None
) -> LossAndAccuracy:
    """Return the mean loss and accuracy. For a mixed image, the label with the larger weight counts as correct."""
    accuracy = (logits.detach().argmax(1) == target.get_dominant_labels()).float().mean()
    return LossAndAccuracy(cross_entropy(logits, target, label_smoothing, weight_per_class), accuracy)


def cross_entropy(
    logits: Tensor, target: MixedLabels, label_smoothing: float, weight_per_class: Tensor | None
) -> Tensor:
    """Return the mean cross-entropy with mixed and smoothed labels, in float32 or float64."""
    return soft_cross_entropy(logits, target.compute_probabilities(logits.shape[1]), label_smoothing, weight_per_class)


def soft_cross_entropy(
    logits: Tensor, target_probabilities: Tensor, label_smoothing: float, weight_per_class: Tensor | None = None
) -> Tensor:
    """Return the mean cross-entropy with target probabilities, in float32 or float64."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        logits, target_probabilities.to(logits.dtype), weight=weight_per_class, label_smoothing=label_smoothing
    )


@dataclass
class Teacher:
    """A trained model in eval mode. Its inputs are augmented and mixed as the student's (DeiT), but resized and
    normalised as in its own training."""

    network: nn.Module
    student_preprocessing: Preprocessing  # of the student's images
    teacher_preprocessing: Preprocessing  # of the teacher's images
    class_order: list[int] | None  # teacher's index of each class of the student; None: the same order
    uses_float32: bool = False  # even if the student is trained in float16
    fingerprint: str = ""  # hash of the weights

    @torch.no_grad()
    def __call__(self, images: Images) -> Logits:
        with torch.autocast(images.device.type, enabled=False) if self.uses_float32 else nullcontext():
            logits = self.network(
                self.student_preprocessing.convert_preprocessed_images(self.teacher_preprocessing, images)
            )
        return logits if self.class_order is None else logits[:, self._class_order_tensor]

    @cached_property
    def _class_order_tensor(self) -> Tensor:
        return torch.tensor(self.class_order, device=next(self.network.parameters()).device)


def open_teacher_for_classes(
    model_ref: str,
    student_preprocessing: Preprocessing,
    class_names: list[str],
    hardware: Hardware,
    *,
    has_class_names: bool = True,
) -> Teacher:
    """Open a teacher for the student's classes. `has_class_names`: False if the classes have only numbers."""
    try:
        teacher = open_model(model_ref)
    except UserError as error:
        raise UserError(f"train.distill={model_ref}: {error}") from error
    order = _find_teacher_class_indices(model_ref, teacher, class_names, has_class_names)
    _check_teacher_forward_pass(model_ref, teacher)
    module = teacher.model.to(hardware.device)
    forward = hardware.compile(module)
    uses_float32 = hardware.precision == "float16"  # the teacher's logits could overflow
    return Teacher(
        forward, student_preprocessing, teacher.preprocessing, order, uses_float32, _compute_weights_fingerprint(module)
    )  # pyright: ignore


def distillation_loss(student_logits: Logits, teacher_logits: Logits, config: TrainConfig) -> Tensor:
    """Distillation loss in float32, averaged over the images.

    Soft: T² · KL(teacher ‖ student), both softened by T (Hinton et al. 2015); hard: cross-entropy with the teacher's
    choice (Touvron et al. 2021)."""
    student_logits, teacher_logits = student_logits.float(), teacher_logits.float()
    if config.distill_type == "hard":
        return F.cross_entropy(student_logits, teacher_logits.argmax(1))
    temperature = config.distill_temperature
    student, teacher = (logits.div(temperature).log_softmax(1) for logits in (student_logits, teacher_logits))
    return F.kl_div(student, teacher, log_target=True, reduction="batchmean") * temperature**2


def _check_teacher_forward_pass(model_ref: str, teacher: Classifier) -> None:
    """Run the teacher on one empty image, to report errors before the training starts."""
    size = teacher.preprocessing.size
    try:
        with torch.no_grad():
            logits = teacher.model(torch.zeros(1, len(teacher.preprocessing.mean), *size))
        shape = tuple(logits.shape)
    except Exception as error:  # any error of an external model
        raise UserError(
            f"The teacher {model_ref} fails on an image of {size[0]}×{size[1]}: {shorten_error_message(error)}."
        ) from error
    if shape != (1, len(teacher.classes)):
        raise UserError(
            f"The output of the teacher {model_ref} has shape {list(shape)}; it must be one number per class."
        )


def _compute_weights_fingerprint(module: nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for weight in module.state_dict().values():
        digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _find_teacher_class_indices(
    model_ref: str, teacher: Classifier, class_names: list[str], has_class_names: bool
) -> list[int] | None:
    """Match classes by name if both have names. Otherwise an equal number of classes is taken as the same classes."""
    if len(teacher.classes) != len(class_names):
        raise UserError(
            f"The teacher {model_ref} has {len(teacher.classes)} classes, but the data has {len(class_names)}. "
            "Fine-tune it on this data first, then distil from that run."
        )
    if teacher.has_assumed_classes or teacher.classes == class_names:
        return None
    if set(teacher.classes) != set(class_names) and (has_placeholder_names(teacher.classes) or not has_class_names):
        return None
    unknown = [name for name in class_names if name not in teacher.classes]
    if unknown:
        raise UserError(
            f"The teacher {model_ref} has no class '{unknown[0]}'; it has {', '.join(teacher.classes[:5])}, …"
        )
    return [teacher.classes.index(name) for name in class_names]
