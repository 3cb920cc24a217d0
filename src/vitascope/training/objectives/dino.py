"""DINO objective: the student predicts the teacher's output for other crops of the same image (Caron et al. 2021).

The teacher is the exponential moving average of the student. The outputs are distributions over `prototypes`, which are
trained without labels. Two operations prevent collapse to a constant output: the teacher's logits are centred (their
running mean is subtracted, so that no prototype dominates) and sharpened by a low temperature (so that they do not
become uniform).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitascope.data.config import AugmentConfig
from vitascope.data.dataset import Labels, UInt8Images
from vitascope.data.sampling import RandomDraws, draw_epoch_augmentation_parameters
from vitascope.model.pretraining import PrototypeHead, ResolutionAdapter
from vitascope.model.vit import VisionTransformer
from vitascope.recipe.train import DinoConfig
from vitascope.shapes import Logits
from vitascope.training.objectives.collapse import Alarm, detect_collapse_after_first_epochs
from vitascope.training.objectives.feature_metrics import FeatureEvaluator
from vitascope.training.objectives.objective import Batch, Objective, StepMetrics
from vitascope.training.optim.ema import AveragedModel
from vitascope.training.optim.schedule import ScheduleValues

if TYPE_CHECKING:
    from vitascope.training.state import TrainState

NUM_GLOBAL_CROPS = 2
StudentLogits = Float[Tensor, "view image prototype"]
TeacherLogits = Float[Tensor, "large image prototype"]


@dataclass(frozen=True)
class DinoLoss:
    """Means over images and views. `loss` = `teacher_entropy` + `divergence` (section 5.3), in nats."""

    loss: Tensor
    teacher_entropy: Tensor
    divergence: Tensor  # KL(teacher ‖ student)
    prototypes_used: Tensor  # exp of the entropy of the teacher's mean distribution


def dino_loss(
    student_logits: StudentLogits,
    teacher_logits: TeacherLogits,
    centre: Tensor,
    student_temperature: float,
    teacher_temperature: float | Tensor,
) -> DinoLoss:
    """Return the mean cross-entropy of student and teacher over all pairs of different views, in float32.

    With V views of the student and 2 of the teacher these are 2 (V - 1) pairs: the first views of both are the same
    crops and not compared."""
    student_log_probs = (student_logits.float() / student_temperature).log_softmax(-1)
    teacher_log_probs = ((teacher_logits.float() - centre) / teacher_temperature).log_softmax(-1)
    teacher_probs = teacher_log_probs.exp()
    # For each view of the teacher, the sum over all other views of the student.
    other_views = student_log_probs.sum(0) - student_log_probs[: len(teacher_logits)]
    loss = -(teacher_probs * other_views).sum(-1).mean() / (len(student_logits) - 1)
    entropy = -(teacher_probs * teacher_log_probs).sum(-1).mean()
    mean_probs = teacher_probs.mean((0, 1))
    used = torch.exp(-torch.xlogy(mean_probs, mean_probs).sum())
    return DinoLoss(loss, entropy, loss - entropy, used)


def make_augment_config_per_view(augment: AugmentConfig, dino_config: DinoConfig) -> list[AugmentConfig]:
    """Return one policy per view: two global crops, of which the second may be solarized, then the local crops."""
    global_crop = replace(augment, crop_scale=dino_config.global_crops_scale)
    local_crop = replace(augment, crop_scale=dino_config.local_crops_scale, solarize=0.0)
    return [replace(global_crop, solarize=0.0), global_crop] + [local_crop] * dino_config.local_crops


class BackboneWithHead(nn.Module):
    """Crops -> prototype logits: the model and the head. Local crops use resampled position embeddings."""

    def __init__(self, model: VisionTransformer, head: nn.Module, local_crop_encoder: ResolutionAdapter | None) -> None:
        super().__init__()
        self.model, self.head, self.local_crop_encoder = model, head, local_crop_encoder

    def forward(
        self,
        global_crops: Tensor,
        local_crops: Tensor | None = None,
        global_depth_noise: Tensor | None = None,
        local_depth_noise: Tensor | None = None,
    ) -> Logits:
        features = self.model.compute_pooled_features(global_crops, global_depth_noise)
        if local_crops is not None and self.local_crop_encoder is not None:
            local_features = self.local_crop_encoder(self.model, local_crops, local_depth_noise)
            features = torch.cat([features, local_features])
        return self.head(features)


class DinoHeads(nn.Module):
    """The heads of student and teacher, and the centre of the teacher's logits."""

    centre: Tensor
    seen: Tensor

    def __init__(self, student_head: PrototypeHead, teacher_head: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = student_head, teacher_head
        self.register_buffer("centre", torch.zeros(len(student_head.prototypes)))
        self.register_buffer(
            "seen", torch.zeros(len(student_head.prototypes))
        )  # mean teacher logits of the current step


class Dino(Objective):
    """Self-distillation without labels. `extra_module` holds the heads and the centre."""

    metric_names = ("train_loss", "teacher_entropy", "divergence", "prototypes_used")
    selection_metric = "knn_accuracy"
    needs_ema = True  # the teacher

    def __init__(self, state: "TrainState") -> None:
        super().__init__(state)
        config, model, device = state.recipe.dino, state.model, state.hardware.device
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
        self.feature_evaluator = FeatureEvaluator(state)

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
        num_views = len(self.view_policies)
        crops, depth_noise = batch[:num_views], batch[num_views:]
        global_crops, local_crops = torch.cat(crops[:NUM_GLOBAL_CROPS]), _concat_or_none(crops[NUM_GLOBAL_CROPS:])
        global_noise = _concat_or_none(depth_noise[:NUM_GLOBAL_CROPS])
        local_noise = _concat_or_none(depth_noise[NUM_GLOBAL_CROPS:])
        with self.state.hardware.autocast():
            student = self.student_network(global_crops, local_crops, global_noise, local_noise)
            with torch.no_grad():
                teacher = self.teacher_network(global_crops)
        student = student.unflatten(0, (num_views, -1))
        teacher = teacher.unflatten(0, (NUM_GLOBAL_CROPS, -1)).float()
        self.heads.seen.add_(teacher.mean((0, 1)) * (len(batch[0]) / self.state.batch_size))
        temperatures = (self.config.student_temperature, schedule["teacher_temperature"])
        losses = dino_loss(student, teacher, self.heads.centre, *temperatures)
        values = (losses.loss, losses.teacher_entropy, losses.divergence, losses.prototypes_used)
        return dict(zip(self.metric_names, values, strict=True))

    def adjust_gradients(self, schedule: ScheduleValues) -> None:
        """Keep the prototypes fixed during dino.freeze_last."""
        gradient = self.heads.student.prototypes.grad
        if gradient is not None:
            gradient.mul_(schedule["last_layer_grad_factor"])

    @torch.no_grad()
    def update_teacher(self, schedule: ScheduleValues) -> None:
        """Update the teacher's head and the centre of its logits."""
        self.averaged_head.update_parameters(self.heads.student, schedule["ema_decay"])
        self.heads.centre.lerp_(self.heads.seen, 1 - self.config.center_momentum)
        self.heads.seen.zero_()

    def validate(self, epoch: int) -> dict[str, float]:
        return {
            "uniform_loss": log(self.config.prototypes),
            **self.feature_evaluator.evaluate_features_and_set_probe_heads(epoch),
        }

    def detect_collapse(self, metrics: dict[str, float]) -> Alarm | None:
        return detect_collapse_after_first_epochs(metrics, self.state.recipe.train.epochs, self.config.prototypes)


def _concat_or_none(tensors: Sequence[Tensor]) -> Tensor | None:
    return torch.cat(tuple(tensors)) if tensors else None
