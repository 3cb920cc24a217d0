"""DINO objective: the student predicts the teacher's output for other crops of the same image (Caron et al. 2021).

The teacher is the exponential moving average of the student. The outputs are distributions over `prototypes`, which are
trained without labels. Two operations prevent collapse to a constant output: the teacher's logits are centred (their
mean is subtracted, so that no prototype dominates) and sharpened by a low temperature (so that they are not uniform).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vitascope.data.config import NO_CROP, AugmentConfig, check_and_convert_crop_scale, make_alternating_flip_error
from vitascope.data.dataset import Dataset, Labels, UInt8Images
from vitascope.data.preprocessing import Preprocessing
from vitascope.data.sampling import RandomDraws, draw_epoch_augmentation_parameters, select_step_draws
from vitascope.draw import CurvePanel
from vitascope.errors import UserError, skip_beartype
from vitascope.model.anatomy import count_forward_flops_per_image
from vitascope.model.config import ModelConfig
from vitascope.model.pretraining import BackboneWithHead, DinoHeads, PrototypeHead, ResolutionAdapter
from vitascope.recipe.schema import Recipe
from vitascope.training.objectives.dino_loss import dino_loss
from vitascope.training.objectives.objective import Alarm, Batch, StepMetrics, TitledVersions, ValidationMetrics
from vitascope.training.objectives.self_supervised import SelfSupervised, is_after_first_epochs
from vitascope.training.optim.schedule import AveragedModel, ScheduleValues, interpolate_cosine

if TYPE_CHECKING:
    from vitascope.training.state import TrainState

NUM_GLOBAL_CROPS = 2
UNIFORM_ENTROPY_RATIO, LOW_DIVERGENCE_RATIO = 0.998, 0.005  # collapse, as fractions of ln K for K prototypes
MIN_PROTOTYPES_USED = 1.5  # effective number of prototypes over all images
TEACHER_PANEL = CurvePanel(
    "teacher distribution",
    "nats",
    {"entropy": "teacher_entropy", "KL divergence": "divergence", "ln K (uniform)": "uniform_loss"},
    "Teacher distribution: its entropy, KL(teacher ‖ student), and ln K, the entropy of a uniform distribution over "
    "the K prototypes (dino.prototypes). The loss is entropy plus KL divergence.",
)


@skip_beartype
@dataclass(frozen=True)
class DinoConfig:
    """train.objective=dino: a student predicts the output of its EMA, the teacher, on other crops (Caron 2021)."""

    prototypes: int = 1024  # output width of the head; the paper has 65,536 for ImageNet
    hidden: int = 512  # width of the head's two hidden layers; the paper has 2048
    bottleneck: int = 256  # width of the normalised features before the prototypes
    batch_norm: bool = True  # batch norm in the head's hidden layers; without it, small ViTs collapse (see docs)
    local_crops: int = 4  # number of local crops besides the two global crops; 0: none
    local_size: int = 16  # side of a local crop in pixels; a multiple of model.patch_size
    global_crops_scale: tuple[float, float] = (0.4, 1.0)  # global crops: range of their area, as fractions of the image
    local_crops_scale: tuple[float, float] = (0.15, 0.4)  # local crops: the same
    student_temperature: float = 0.1  # softmax temperature of the student
    teacher_temperature: float = 0.04  # softmax temperature of the teacher at the start
    final_teacher_temperature: float = 0.07  # softmax temperature of the teacher after teacher_warmup
    teacher_warmup: float = 0.1  # fraction of all steps in which the teacher's temperature rises linearly
    teacher_momentum: float = 0.996  # EMA decay of the teacher; rises to 1 by a cosine
    center_momentum: float = 0.9  # EMA decay of the center (the teacher's mean output, subtracted); 1: no centering
    freeze_last: float = 0.01  # fraction of all steps in which the prototypes are frozen

    def __post_init__(self) -> None:
        for name in ("global_crops_scale", "local_crops_scale"):
            object.__setattr__(self, name, check_and_convert_crop_scale(f"dino.{name}", getattr(self, name)))
        if self.local_crops and self.local_crops_scale == NO_CROP:
            raise UserError("dino.local_crops_scale=[1,1] uses the whole image. Choose a range such as [0.15,0.4].")
        for name in ("prototypes", "hidden", "bottleneck", "local_size"):
            if getattr(self, name) < (2 if name == "prototypes" else 1):
                raise UserError(f"dino.{name}={getattr(self, name)} is too small.")
        if self.local_crops < 0:
            raise UserError(f"dino.local_crops={self.local_crops} is negative. It must be 0 or more.")
        for name in ("student_temperature", "teacher_temperature", "final_teacher_temperature"):
            if not getattr(self, name) > 0:
                raise UserError(f"dino.{name}={getattr(self, name)} must be greater than 0.")
        for name in ("teacher_warmup", "teacher_momentum", "center_momentum", "freeze_last"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"dino.{name}={getattr(self, name)} must be at least 0 and at most 1.")


def make_augment_config_per_view(augment: AugmentConfig, dino_config: DinoConfig) -> list[AugmentConfig]:
    """Return one policy per view: two global crops, of which the second may be solarized, then the local crops."""
    global_crop = replace(augment, crop_scale=dino_config.global_crops_scale)
    local_crop = replace(augment, crop_scale=dino_config.local_crops_scale, solarize=0.0)
    return [replace(global_crop, solarize=0.0), global_crop] + [local_crop] * dino_config.local_crops


class Dino(SelfSupervised):
    """Self-distillation without labels. `extra_module` holds the heads and the centre."""

    name = "dino"
    config_class = DinoConfig
    loss_name = "cross-entropy of teacher and student"
    curve_panels = {"teacher": TEACHER_PANEL}  # noqa: RUF012
    metric_names = ("train_loss", "teacher_entropy", "divergence", "prototypes_used")
    needs_ema = True  # the teacher
    num_whole_views = NUM_GLOBAL_CROPS
    lr_find_problem = "its loss also falls when the model collapses"
    preview_name = "crops for DINO's student"
    preview_sections = ("dino.",)

    def __init__(self, state: "TrainState") -> None:
        super().__init__(state)
        config: DinoConfig = state.recipe.objective_config
        model, device = state.model, state.hardware.device
        head = PrototypeHead(
            embed_dim=model.config.embed_dim,
            hidden_width=config.hidden,
            bottleneck_width=config.bottleneck,
            num_prototypes=config.prototypes,
            batch_norm=config.batch_norm,
        ).to(device)
        self.config, self.averaged_head = config, AveragedModel(head)
        self.extra_module = self.heads = DinoHeads(head, self.averaged_head.model).to(device)
        size = (config.local_size, config.local_size)
        small = ResolutionAdapter(model.config, size).to(device) if config.local_crops else None
        teacher = state.eval_model
        self.student_network = state.hardware.compile(BackboneWithHead(model, head, small))
        self.teacher_network = state.hardware.compile(BackboneWithHead(teacher, self.averaged_head.model, None))
        self.view_policies = make_augment_config_per_view(state.recipe.data.augment, config)
        self.can_accumulate = not config.batch_norm

    @classmethod
    def check_recipe(cls, recipe: Recipe) -> None:
        super().check_recipe(recipe)
        train, dino = recipe.train, recipe.objective_config
        if train.ema:
            raise UserError(f"train.ema={train.ema} does not work with DINO: its teacher is the EMA. Set train.ema=0.")
        if train.grad_accum_steps > 1 and dino.batch_norm:
            raise UserError(
                f"train.grad_accum_steps={train.grad_accum_steps} does not work with dino.batch_norm, which needs "
                "the whole batch. Set train.grad_accum_steps=1 or dino.batch_norm=false."
            )
        if dino.local_crops:
            _check_model_accepts_crops(dino.local_size, recipe.model)
        if dino.teacher_momentum == 1:
            raise UserError("dino.teacher_momentum=1 never updates the teacher. The default is 0.996.")

    @classmethod
    def check_augmentation(cls, requested: AugmentConfig) -> None:
        super().check_augmentation(requested)
        if requested.crop_scale:
            raise UserError(
                f"data.augment.crop_scale={requested.crop_scale} cannot be used with train.objective=dino: its crops "
                "are set by dino.global_crops_scale and dino.local_crops_scale."
            )
        if requested.flip_mode == "alternating":
            raise make_alternating_flip_error("DINO draws a new crop each time")

    @classmethod
    def make_default_augmentation(cls, dataset_policy: AugmentConfig, num_channels: int) -> AugmentConfig:
        """Photos get colour jitter (Caron et al. 2021) without blur, which removes too much of 32 pixels."""
        policy = super().make_default_augmentation(dataset_policy, num_channels)
        if num_channels != 3:
            return policy
        return replace(policy, brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1, grayscale=0.2, solarize=0.2)

    @classmethod
    def compute_own_schedule_values(cls, step: int, num_steps: int, recipe: Recipe) -> dict[str, float]:
        dino: DinoConfig = recipe.objective_config
        done = step / max(1, num_steps)
        warm = min(1.0, done / dino.teacher_warmup) if dino.teacher_warmup else 1.0
        rise = dino.final_teacher_temperature - dino.teacher_temperature
        return {
            "ema_decay": interpolate_cosine(dino.teacher_momentum, 1.0, done),
            "teacher_temperature": dino.teacher_temperature + warm * rise,
            "last_layer_grad_factor": float(step >= round(dino.freeze_last * num_steps)),
        }

    @classmethod
    def count_equivalent_forward_passes(cls, recipe: Recipe) -> float:
        """Two global crops, also through the teacher (forward only), and the local crops; all with the head."""
        model, dino = recipe.model, recipe.objective_config
        features = replace(model, num_classes=0)
        head = 2 * (model.embed_dim + dino.hidden) * dino.hidden + 2 * (dino.hidden + dino.prototypes) * dino.bottleneck
        flops = NUM_GLOBAL_CROPS * (1 + 1 / 3) * (count_forward_flops_per_image(features) + head)
        if dino.local_crops:
            local_crop = replace(features, img_size=dino.local_size)
            flops += dino.local_crops * (count_forward_flops_per_image(local_crop) + head)
        return flops / count_forward_flops_per_image(model)

    @classmethod
    def augment_preview_images(
        cls, samples: Dataset, preprocessing: Preprocessing, recipe: Recipe, seed: int
    ) -> TitledVersions:
        """Return the two global crops, which the teacher gets too, and the local crops."""
        crops, dino = [], recipe.objective_config
        for view_index, policy in enumerate(make_augment_config_per_view(recipe.data.augment, dino)):
            draws = draw_epoch_augmentation_parameters(policy, 1, len(samples), seed, 0, view_index=view_index)
            size = (dino.local_size, dino.local_size) if view_index >= NUM_GLOBAL_CROPS else None
            crops.append(preprocessing.augment(samples.images, select_step_draws(draws, 0), policy, size))
        return TitledVersions(crops, ["global 1", "global 2", *(f"local {i + 1}" for i in range(dino.local_crops))])

    def draw_random_numbers_of_epoch(self, num_steps: int, batch_size: int, epoch: int) -> RandomDraws:
        seed = self.state.recipe.train.seed
        return {
            f"{view}/{name}": draw
            for view, policy in enumerate(self.view_policies)
            for name, draw in (
                draw_epoch_augmentation_parameters(policy, num_steps, batch_size, seed, epoch, view_index=view)
                | self.draw_depth_noise_of_epoch(num_steps, batch_size, epoch, view_index=view)
            ).items()
        }

    def augment_batch(self, images: UInt8Images, labels: Labels, draws: RandomDraws) -> Batch:
        """One tensor of crops per view; then, with stochastic depth, its noise per view."""
        size, preprocessing = (self.config.local_size, self.config.local_size), self.state.preprocessing
        crops = []
        for view, policy in enumerate(self.view_policies):
            view_draws = {name.split("/")[1]: draw for name, draw in draws.items() if name.startswith(f"{view}/")}
            crops.append(preprocessing.augment(images, view_draws, policy, None if view < NUM_GLOBAL_CROPS else size))
        return *crops, *(draw for name, draw in draws.items() if name.endswith("/depth"))

    def compute_loss_and_metrics(self, batch: Batch, schedule: ScheduleValues, phase: int = 0) -> StepMetrics:
        """Return loss and metrics. Add the teacher's mean output to `heads.seen` (see `update_teacher_after_step`)."""
        crops, depth_noise = batch[: len(self.view_policies)], batch[len(self.view_policies) :]
        global_crops, local_crops = torch.cat(crops[:NUM_GLOBAL_CROPS]), _concat_or_none(crops[NUM_GLOBAL_CROPS:])
        global_noise = _concat_or_none(depth_noise[:NUM_GLOBAL_CROPS])
        local_noise = _concat_or_none(depth_noise[NUM_GLOBAL_CROPS:])
        with self.state.hardware.autocast():
            student = self.student_network(global_crops, local_crops, global_noise, local_noise)
            with torch.no_grad():
                teacher = self.teacher_network(global_crops)
        student = student.unflatten(0, (len(crops), -1))
        teacher = teacher.unflatten(0, (NUM_GLOBAL_CROPS, -1)).float()
        self.heads.seen.add_(teacher.mean((0, 1)) * (len(batch[0]) / self.state.batch_size))
        temperatures = (self.config.student_temperature, schedule["teacher_temperature"])
        losses = dino_loss(student, teacher, self.heads.centre, *temperatures)
        values = (losses.loss, losses.teacher_entropy, losses.divergence, losses.prototypes_used)
        return dict(zip(self.metric_names, values, strict=True))

    def adjust_gradients_before_update(self, schedule: ScheduleValues) -> None:
        """Keep the prototypes fixed during dino.freeze_last."""
        gradient = self.heads.student.prototypes.grad
        if gradient is not None:
            gradient.mul_(schedule["last_layer_grad_factor"])

    @torch.no_grad()
    def update_teacher_after_step(self, schedule: ScheduleValues) -> None:
        """Update the teacher's head and the centre of its logits."""
        self.averaged_head.update_parameters(self.heads.student, schedule["ema_decay"])
        self.heads.centre.lerp_(self.heads.seen, 1 - self.config.center_momentum)
        self.heads.seen.zero_()

    def validate(self, epoch: int) -> ValidationMetrics:
        return {"uniform_loss": log(self.config.prototypes), **super().validate(epoch)}

    def detect_collapse(self, metrics: dict[str, float]) -> Alarm | None:
        alarm = detect_teacher_collapse(metrics, self.state.recipe.train.epochs, self.config.prototypes)
        return alarm or super().detect_collapse(metrics)


def detect_teacher_collapse(metrics: dict[str, float], num_epochs: int, num_prototypes: int) -> Alarm | None:
    """Return an alarm if the outputs are almost uniform, or the same prototype for every image."""
    if not is_after_first_epochs(metrics, num_epochs):
        return None
    max_entropy, entropy = log(num_prototypes), metrics["teacher_entropy"]
    has_low_divergence = abs(metrics["divergence"]) < LOW_DIVERGENCE_RATIO * max_entropy
    if entropy > UNIFORM_ENTROPY_RATIO * max_entropy and has_low_divergence:
        return Alarm(
            "uniform",
            "Collapse: the teacher's outputs are almost uniform, so the student cannot learn from them. Their entropy "
            f"is {entropy:z.3f} (maximum ln {num_prototypes} = {max_entropy:.3f}) and the loss is "
            f"{metrics['train_loss']:z.3f}. Lower dino.teacher_temperature and dino.final_teacher_temperature, for "
            "example to 0.04 and 0.02. Keep dino.batch_norm=true. For short runs, lower dino.teacher_momentum.",
        )
    if metrics["prototypes_used"] < MIN_PROTOTYPES_USED:
        return Alarm(
            "one answer",
            f"Collapse: every image has the same output. Only {metrics['prototypes_used']:.1f} of {num_prototypes} "
            f"prototypes are used, and the loss is {metrics['train_loss']:z.3f}. Lower dino.center_momentum, for "
            "example to 0.9. Or raise dino.teacher_temperature, or lower train.lr or train.muon_lr.",
        )
    return None


def _check_model_accepts_crops(crop_size: int, model: ModelConfig) -> None:
    """Check that the model works with crops that have fewer patches than its images."""
    rows, columns = model.patch_shape
    if crop_size % rows or crop_size % columns or crop_size > min(model.image_shape):
        raise UserError(
            f"dino.local_size={crop_size} must be a multiple of patch_size={model.patch_size} and at most "
            f"img_size={model.img_size}."
        )
    if model.absolute_positions == "sinusoidal":
        raise UserError("positions=sinusoidal does not work with local crops. Choose positions=sincos2d or learned.")
    if model.attention == "lsa" and (crop_size // rows) * (crop_size // columns) + model.num_prefix_tokens < 2:
        raise UserError(
            f"A crop of dino.local_size={crop_size} is one token, but attention=lsa needs two or more. "
            "Choose a larger size."
        )


def _concat_or_none(tensors: Sequence[Tensor]) -> Tensor | None:
    return torch.cat(tuple(tensors)) if tensors else None
