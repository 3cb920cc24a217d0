"""Classification objective: cross-entropy, optionally with distillation from a teacher."""

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.data.augment import MixedLabels
from vitascope.data.dataset import Labels, UInt8Images
from vitascope.data.preprocessing import Preprocessing
from vitascope.data.sampling import RandomDraws
from vitascope.data.splits import compute_class_weights
from vitascope.errors import UserError, shorten_error_message
from vitascope.model.pretraining import PatchDropout
from vitascope.recipe.train import TrainConfig
from vitascope.shapes import Images, Logits
from vitascope.training.hardware import Hardware
from vitascope.training.objectives.objective import Batch, Learning, Objective, StepMetrics
from vitascope.training.optim.schedule import ScheduleValues
from vitascope.training.scoring import score_model
from vitascope.weights.model_info import has_placeholder_names
from vitascope.weights.pretrained import AnyModel, open_any


class Classify(Objective):
    metric_names = ("train_loss", "train_accuracy")

    def __init__(self, learning: Learning) -> None:
        super().__init__(learning)
        data, config = learning.data, learning.recipe
        stages: list[nn.Module] = [learning.model]
        if config.train.num_patch_share_epochs:
            seen = config.train.count_kept_patches(learning.model.config.num_patches)
            stages.insert(0, PatchDropout(learning.model, seen))
        self.models_by_phase = [learning.hardware.compile(stage) for stage in stages]
        self.compute_loss_and_accuracy = learning.hardware.compile(compute_loss_and_accuracy)
        self.weight_per_class: Tensor | None = None  # per class, for data.balance=loss
        if config.data.balance == "loss":
            self.weight_per_class = compute_class_weights(data.train.labels, len(data.classes)).to(
                learning.hardware.device
            )
        self.teacher: Teacher | None = None
        if config.train.distill:
            self.teacher = open_teacher(
                config.train.distill,
                data.preprocessing,
                data.classes,
                learning.hardware,
                has_class_names=data.source.has_class_names,
            )
            self.fingerprint = self.teacher.fingerprint

    def get_phase(self, epoch: int) -> int:
        """train.patch_share: 0 while only some patches are used, then 1."""
        few = self.learning.recipe.train.num_patch_share_epochs
        return int(epoch >= few) if few else 0

    def make_random_draws(self, num_steps: int, batch_size: int, epoch: int) -> RandomDraws:
        some = self.learning.recipe.train.num_patch_share_epochs
        return super().make_random_draws(num_steps, batch_size, epoch) | (
            self.make_patch_noise(num_steps, batch_size, epoch) if some else {}
        )

    def prepare_batch(self, images: UInt8Images, labels: Labels, draws: RandomDraws) -> Batch:
        policy = self.learning.recipe.data.augment
        inputs, target = self.learning.preprocessing.augment_and_mix(images, labels, draws, policy)
        noise = [draws["noise"]] if "noise" in draws else []
        return inputs, target.labels, target.partner_labels, target.lam, *noise

    def compute_loss_and_metrics(self, batch: Batch, schedule: ScheduleValues) -> StepMetrics:
        images, target = batch[0], MixedLabels(*batch[1:4])
        noise = () if self.phase else batch[4:]  # which patches are seen at first
        config = self.learning.recipe.train
        with self.learning.hardware.autocast():
            logits = self.models_by_phase[self.phase](images, *noise)
            taught = self.teacher(images) if self.teacher else None
        loss, right = self.compute_loss_and_accuracy(logits, target, config.label_smoothing, self.weight_per_class)
        if taught is not None:
            loss = torch.lerp(loss, distillation_loss(logits, taught, config), config.distill_alpha)
        return {"train_loss": loss, "train_accuracy": right}

    def validate(self, epoch: int) -> dict[str, float]:
        data = self.learning.data
        if data.validation is None:
            return {}
        found = score_model(self.learning.eval_model, data.validation, data.preprocessing, self.learning.hardware)
        return {"val_loss": found.loss, "val_accuracy": found.accuracy}


def compute_loss_and_accuracy(
    logits: Tensor, target: MixedLabels, label_smoothing: float, weight_per_class: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The loss, and the share of right answers."""
    right = (logits.detach().argmax(1) == target.get_dominant_labels()).float().mean()
    return cross_entropy(logits, target, label_smoothing, weight_per_class), right


def cross_entropy(
    logits: Tensor, target: MixedLabels, label_smoothing: float, weight_per_class: Tensor | None
) -> Tensor:
    """Against mixed and smoothed labels, in float32 at least."""
    return soft_cross_entropy(logits, target.compute_probabilities(logits.shape[1]), label_smoothing, weight_per_class)


def soft_cross_entropy(
    logits: Tensor, target_probabilities: Tensor, label_smoothing: float, weight_per_class: Tensor | None = None
) -> Tensor:
    """Against a probability for each class."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        logits, target_probabilities.to(logits.dtype), weight=weight_per_class, label_smoothing=label_smoothing
    )


@dataclass
class Teacher:
    """In eval mode, never learning. It sees each image as varied and mixed as the student does (DeiT), but normalised
    and sized as it is used to."""

    network: nn.Module
    student_preprocessing: Preprocessing  # how the student's images are prepared
    teacher_preprocessing: Preprocessing  # how the teacher's are
    class_order: list[int] | None  # where the student's classes stand among the teacher's; None: in the same places
    uses_float32: bool = False  # it answers in float32, whatever the student computes in
    fingerprint: str = ""  # a short name for exactly these weights

    @torch.no_grad()
    def __call__(self, images: Images) -> Logits:
        with torch.autocast(images.device.type, enabled=False) if self.uses_float32 else nullcontext():
            logits = self.network(self.student_preprocessing.convert_preprocessed(self.teacher_preprocessing, images))
        return logits if self.class_order is None else logits[:, self._class_order_tensor]

    @cached_property
    def _class_order_tensor(self) -> Tensor:
        return torch.tensor(self.class_order, device=next(self.network.parameters()).device)


def open_teacher(
    model_ref: str,
    student_preprocessing: Preprocessing,
    class_names: list[str],
    hardware: Hardware,
    *,
    has_class_names: bool = True,
) -> Teacher:
    """`classes` are the student's, `named` unless they are only numbers."""
    with torch.random.fork_rng(devices=[]):  # building a network draws weights: the student's chances stay its own
        found = open_any(model_ref)
    order = _match_class_order(model_ref, found, class_names, has_class_names)
    _check_forward_pass(model_ref, found)
    module = found.module.to(hardware.device).eval().requires_grad_(False)
    forward = hardware.compile(module)
    plain = hardware.precision == "float16"  # where a teacher's answer could overflow
    return Teacher(
        forward, student_preprocessing, found.preprocessing, order, plain, _compute_weights_fingerprint(module)
    )  # pyright: ignore


def distillation_loss(student_logits: Logits, teacher_logits: Logits, config: TrainConfig) -> Tensor:
    """Distillation loss in float32, averaged over the images.

    Soft: T² · KL(teacher ‖ student), both softened by T (Hinton et al. 2015); hard: cross-entropy with the teacher's
    choice (Touvron et al. 2021)."""
    student_logits, teacher_logits = student_logits.float(), teacher_logits.float()
    if config.distill_type == "hard":
        return F.cross_entropy(student_logits, teacher_logits.argmax(1))
    soft = config.distill_temperature
    ours, theirs = (part.div(soft).log_softmax(1) for part in (student_logits, teacher_logits))
    return F.kl_div(ours, theirs, log_target=True, reduction="batchmean") * soft**2


def _check_forward_pass(model_ref: str, teacher: AnyModel) -> None:
    """Run the teacher on one empty image, to report errors before the training starts."""
    size = teacher.preprocessing.size
    try:
        with torch.no_grad():
            logits = teacher.module(torch.zeros(1, len(teacher.preprocessing.mean), *size))
        width = tuple(logits.shape)
    except Exception as error:  # whatever a network may say
        raise UserError(
            f"The teacher {model_ref} fails on an image of {size[0]}×{size[1]}: {shorten_error_message(error)}."
        ) from error
    if width != (1, teacher.num_classes):
        raise UserError(
            f"The output of the teacher {model_ref} has shape {list(width)}; it must be one number per class."
        )


def _compute_weights_fingerprint(module: nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for weight in module.state_dict().values():
        digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _match_class_order(
    model_ref: str, teacher: AnyModel, class_names: list[str], has_class_names: bool
) -> list[int] | None:
    """Match classes by name if both have names. Otherwise an equal number of classes is taken as the same classes."""
    if teacher.num_classes != len(class_names):
        raise UserError(
            f"The teacher {model_ref} has {teacher.num_classes} classes, but the data has {len(class_names)}. "
            "Fine-tune it on this data first, then distil from that run."
        )
    if teacher.classes is None or teacher.classes == class_names:
        return None
    if set(teacher.classes) != set(class_names) and (has_placeholder_names(teacher.classes) or not has_class_names):
        return None
    unknown = [name for name in class_names if name not in teacher.classes]
    if unknown:
        raise UserError(
            f"The teacher {model_ref} has no class '{unknown[0]}'; it has {', '.join(teacher.classes[:5])}, …"
        )
    return [teacher.classes.index(name) for name in class_names]
