"""Crops of one image -> one answer: a student learns what its own average says of other crops (Caron et al. 2021).

Nobody names the answers: there are `prototypes` to choose from. Two forces keep the answers from becoming all the same:
the teacher's are centred (what it says on average is subtracted, so that no prototype takes all) and sharpened by a low
temperature (so that they do not become all alike).
"""

from dataclasses import dataclass, replace
from math import log

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitascope.data.config import AugmentConfig
from vitascope.data.dataset import Labels, UInt8Images
from vitascope.data.sampling import RandomDraws, draw_epoch_augmentation
from vitascope.model.pretraining import PrototypeHead
from vitascope.model.resolution import ResolutionAdapter
from vitascope.model.vit import VisionTransformer
from vitascope.recipe.train import DinoConfig
from vitascope.shapes import Logits
from vitascope.training.objectives.collapse import Alarm, detect_collapse
from vitascope.training.objectives.feature_metrics import FeatureEvaluator
from vitascope.training.objectives.objective import Batch, Learning, Objective, StepMetrics
from vitascope.training.optim.ema import AveragedModel
from vitascope.training.optim.schedule import ScheduleValues

NUM_GLOBAL_CROPS = 2
StudentLogits = Float[Tensor, "view image prototype"]
TeacherLogits = Float[Tensor, "large image prototype"]


@dataclass(frozen=True)
class DinoLoss:
    """Means over images and views. `loss` = `entropy` + `divergence` (section 5.3): how unsure the teacher is, and how
    far the student is from it. `used`: how many prototypes the teacher uses, all images together."""

    loss: Tensor
    teacher_entropy: Tensor
    divergence: Tensor
    prototypes_used: Tensor


def dino_loss(
    student_logits: StudentLogits,
    teacher_logits: TeacherLogits,
    centre: Tensor,
    student_temperature: float,
    teacher_temperature: float | Tensor,
) -> DinoLoss:
    """Cross-entropy of every student's view against every other teacher's view: 2 (V - 1) pairs, in float32.

    The first views of both are the same crops, which are not compared with themselves."""
    ours = (student_logits.float() / student_temperature).log_softmax(-1)
    theirs = ((teacher_logits.float() - centre) / teacher_temperature).log_softmax(-1)
    chances = theirs.exp()
    others = ours.sum(0) - ours[: len(teacher_logits)]  # per teacher's view: all the student's views but the same one
    loss = -(chances * others).sum(-1).mean() / (len(student_logits) - 1)
    entropy = -(chances * theirs).sum(-1).mean()
    shared = chances.mean((0, 1))
    used = torch.exp(-torch.xlogy(shared, shared).sum())
    return DinoLoss(loss, entropy, loss - entropy, used)


def make_view_policies(augment: AugmentConfig, dino_config: DinoConfig) -> list[AugmentConfig]:
    """One per view: two large crops, of which the second may be solarized, then the small ones."""
    large = replace(augment, crop_scale=dino_config.global_crops_scale)
    small = replace(augment, crop_scale=dino_config.local_crops_scale, solarize=0.0)
    return [replace(large, solarize=0.0), large] + [small] * dino_config.local_crops


class BackboneWithHead(nn.Module):
    """Crops -> answers: the model and the head on top; small crops by resampled positions."""

    def __init__(self, model: VisionTransformer, head: nn.Module, local_crop_encoder: ResolutionAdapter | None) -> None:
        super().__init__()
        self.model, self.head, self.local_crop_encoder = model, head, local_crop_encoder

    def forward(self, global_crops: Tensor, local_crops: Tensor | None = None) -> Logits:
        features = self.model.compute_pooled_features(global_crops)
        if local_crops is not None and self.local_crop_encoder is not None:
            features = torch.cat([features, self.local_crop_encoder(self.model, local_crops)])
        return self.head(features)


class DinoHeads(nn.Module):
    """What DINO needs beside the model: the student's head, the teacher's, and the centre of the teacher's answers."""

    centre: Tensor
    seen: Tensor

    def __init__(self, student_head: PrototypeHead, teacher_head: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = student_head, teacher_head
        self.register_buffer("centre", torch.zeros(len(student_head.prototypes)))
        self.register_buffer("seen", torch.zeros(len(student_head.prototypes)))  # the mean answer of the step under way


class Dino(Objective):
    metric_names = ("train_loss", "teacher_entropy", "divergence", "prototypes_used")
    selection_metric = "knn_accuracy"

    def __init__(self, learning: Learning) -> None:
        super().__init__(learning)
        config, model, device = learning.recipe.dino, learning.model, learning.hardware.device
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
        learning.ema = learning.ema or AveragedModel(model)
        self.student_network = learning.hardware.compile(BackboneWithHead(model, head, small))
        self.teacher_network = learning.hardware.compile(
            BackboneWithHead(learning.ema.model, self.averaged_head.model, None)
        )
        self.view_policies = make_view_policies(learning.recipe.data.augment, config)
        self.feature_evaluator = FeatureEvaluator(learning)

    def make_random_draws(self, num_steps: int, batch_size: int, epoch: int) -> RandomDraws:
        seed = self.learning.recipe.train.seed
        return {
            f"{view}/{name}": draw
            for view, policy in enumerate(self.view_policies)
            for name, draw in draw_epoch_augmentation(
                policy, num_steps, batch_size, seed, epoch, view_index=view
            ).items()
        }

    def prepare_batch(self, images: UInt8Images, labels: Labels, draws: RandomDraws) -> Batch:
        """One tensor of crops per view."""
        size, preparation = (self.config.local_size, self.config.local_size), self.learning.preprocessing
        found = []
        for view, policy in enumerate(self.view_policies):
            own = {name.split("/")[1]: draw for name, draw in draws.items() if name.startswith(f"{view}/")}
            found.append(preparation.augment(images, own, policy, None if view < NUM_GLOBAL_CROPS else size))
        return tuple(found)

    def compute_loss_and_metrics(self, batch: Batch, schedule: ScheduleValues) -> StepMetrics:
        large = torch.cat(batch[:NUM_GLOBAL_CROPS])
        small = torch.cat(batch[NUM_GLOBAL_CROPS:]) if len(batch) > NUM_GLOBAL_CROPS else None
        with self.learning.hardware.autocast():
            student = self.student_network(large, small)
            with torch.no_grad():
                teacher = self.teacher_network(large)
        student = student.unflatten(0, (len(batch), -1))
        teacher = teacher.unflatten(0, (NUM_GLOBAL_CROPS, -1)).float()
        self.heads.seen.add_(teacher.mean((0, 1)) * (len(batch[0]) / self.learning.batch_size))
        soft = self.config.student_temperature
        found = dino_loss(student, teacher, self.heads.centre, soft, schedule["teacher_temperature"])
        return dict(
            zip(
                self.metric_names,
                (found.loss, found.teacher_entropy, found.divergence, found.prototypes_used),
                strict=True,
            )
        )

    def adjust_gradients(self, schedule: ScheduleValues) -> None:
        """The prototypes stay as they were drawn at first."""
        gradient = self.heads.student.prototypes.grad
        if gradient is not None:
            gradient.mul_(schedule["last_layer"])

    @torch.no_grad()
    def update_teacher(self, schedule: ScheduleValues) -> None:
        """The teacher's head follows, the centre moves towards what the teacher said."""
        self.averaged_head.update_parameters(self.heads.student, schedule["decay"])
        self.heads.centre.lerp_(self.heads.seen, 1 - self.config.center_momentum)
        self.heads.seen.zero_()

    def validate(self, epoch: int) -> dict[str, float]:
        return {"uniform_loss": log(self.config.prototypes), **self.feature_evaluator.evaluate_features(epoch)}

    def detect_collapse(self, metrics: dict[str, float]) -> Alarm | None:
        return detect_collapse(metrics, self.learning.recipe.train.epochs, self.config.prototypes)
