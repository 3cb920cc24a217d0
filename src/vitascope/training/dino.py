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
from vitascope.data.draws import Draws, epoch_draws
from vitascope.data.source import Labels, UInt8Images
from vitascope.model.other_size import OtherSize
from vitascope.model.prototypes import PrototypeHead
from vitascope.model.vit import VisionTransformer
from vitascope.recipe.pretrain import DinoConfig
from vitascope.shapes import Logits
from vitascope.training.alarm import Alarm, alarm
from vitascope.training.averaging import Average
from vitascope.training.evidence import Evidence
from vitascope.training.objective import Inputs, Learning, Numbers, Objective
from vitascope.training.schedule import Values

GLOBALS = 2
StudentLogits = Float[Tensor, "view image prototype"]
TeacherLogits = Float[Tensor, "large image prototype"]


@dataclass(frozen=True)
class DinoLoss:
    """Means over images and views. `loss` = `entropy` + `divergence` (section 5.3): how unsure the teacher is, and how
    far the student is from it. `used`: how many prototypes the teacher uses, all images together."""

    loss: Tensor
    entropy: Tensor
    divergence: Tensor
    used: Tensor


def dino_loss(
    student: StudentLogits,
    teacher: TeacherLogits,
    centre: Tensor,
    student_temperature: float,
    temperature: float | Tensor,
) -> DinoLoss:
    """Cross-entropy of every student's view against every other teacher's view: 2 (V - 1) pairs, in float32.

    The first views of both are the same crops, which are not compared with themselves."""
    ours = (student.float() / student_temperature).log_softmax(-1)
    theirs = ((teacher.float() - centre) / temperature).log_softmax(-1)
    chances = theirs.exp()
    others = ours.sum(0) - ours[: len(teacher)]  # per teacher's view: all the student's views but the same one
    loss = -(chances * others).sum(-1).mean() / (len(student) - 1)
    entropy = -(chances * theirs).sum(-1).mean()
    shared = chances.mean((0, 1))
    used = torch.exp(-torch.xlogy(shared, shared).sum())
    return DinoLoss(loss, entropy, loss - entropy, used)


def view_policies(augment: AugmentConfig, config: DinoConfig) -> list[AugmentConfig]:
    """One per view: two large crops, of which the second may be solarized, then the small ones."""
    large = replace(augment, crop_scale=config.global_crops_scale)
    small = replace(augment, crop_scale=config.local_crops_scale, solarize=0.0)
    return [replace(large, solarize=0.0), large] + [small] * config.local_crops


class Network(nn.Module):
    """Crops -> answers: the model and the head on top; small crops by resampled positions."""

    def __init__(self, model: VisionTransformer, head: nn.Module, small: OtherSize | None) -> None:
        super().__init__()
        self.model, self.head, self.small = model, head, small

    def forward(self, large: Tensor, small: Tensor | None = None) -> Logits:
        features = self.model.pooled(large)
        if small is not None and self.small is not None:
            features = torch.cat([features, self.small(self.model, small)])
        return self.head(features)


class Heads(nn.Module):
    """What DINO needs beside the model: the student's head, the teacher's, and the centre of the teacher's answers."""

    centre: Tensor
    seen: Tensor

    def __init__(self, student: PrototypeHead, teacher: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher
        self.register_buffer("centre", torch.zeros(len(student.prototypes)))
        self.register_buffer("seen", torch.zeros(len(student.prototypes)))  # the mean answer of the step under way


class Dino(Objective):
    numbers = ("train_loss", "teacher_entropy", "divergence", "prototypes_used")
    measure = "knn_accuracy"

    def __init__(self, learning: Learning) -> None:
        super().__init__(learning)
        config, model, device = learning.recipe.dino, learning.model, learning.hardware.device
        head = PrototypeHead(
            embed_dim=model.config.embed_dim,
            hidden=config.hidden,
            bottleneck=config.bottleneck,
            prototypes=config.prototypes,
            batch_norm=config.batch_norm,
        ).to(device)
        self.config, self.following = config, Average(head)
        self.extra = self.heads = Heads(head, self.following.model).to(device)
        size = (config.local_size, config.local_size)
        small = OtherSize(model.config, size).to(device) if config.local_crops else None
        learning.average = learning.average or Average(model)
        self.student = learning.hardware.compile(Network(model, head, small))
        self.teacher = learning.hardware.compile(Network(learning.average.model, self.following.model, None))
        self.views = view_policies(learning.recipe.data.augment, config)
        self.evidence = Evidence(learning)

    def draws(self, steps: int, batch: int, epoch: int) -> Draws:
        seed = self.learning.recipe.train.seed
        return {
            f"{view}/{name}": draw
            for view, policy in enumerate(self.views)
            for name, draw in epoch_draws(policy, steps, batch, seed, epoch, view=view).items()
        }

    def prepare(self, images: UInt8Images, labels: Labels, draws: Draws) -> Inputs:
        """One tensor of crops per view."""
        size, preparation = (self.config.local_size, self.config.local_size), self.learning.preparation
        found = []
        for view, policy in enumerate(self.views):
            own = {name.split("/")[1]: draw for name, draw in draws.items() if name.startswith(f"{view}/")}
            found.append(preparation.view(images, own, policy, None if view < GLOBALS else size))
        return tuple(found)

    def told(self, inputs: Inputs, values: Values) -> Numbers:
        large = torch.cat(inputs[:GLOBALS])
        small = torch.cat(inputs[GLOBALS:]) if len(inputs) > GLOBALS else None
        with self.learning.hardware.autocast():
            student = self.student(large, small)
            with torch.no_grad():
                teacher = self.teacher(large)
        student = student.unflatten(0, (len(inputs), -1))
        teacher = teacher.unflatten(0, (GLOBALS, -1)).float()
        self.heads.seen.add_(teacher.mean((0, 1)) * (len(inputs[0]) / self.learning.batch))
        soft = self.config.student_temperature
        found = dino_loss(student, teacher, self.heads.centre, soft, values["teacher_temperature"])
        return dict(zip(self.numbers, (found.loss, found.entropy, found.divergence, found.used), strict=True))

    def before_update(self, values: Values) -> None:
        """The prototypes stay as they were drawn at first."""
        gradient = self.heads.student.prototypes.grad
        if gradient is not None:
            gradient.mul_(values["last_layer"])

    @torch.no_grad()
    def after_update(self, values: Values) -> None:
        """The teacher's head follows, the centre moves towards what the teacher said."""
        self.following.follow(self.heads.student, values["decay"])
        self.heads.centre.lerp_(self.heads.seen, 1 - self.config.center_momentum)
        self.heads.seen.zero_()

    def look(self, epoch: int) -> dict[str, float]:
        return {"uniform_loss": log(self.config.prototypes), **self.evidence.look(epoch)}

    def alarm(self, row: dict[str, float]) -> Alarm | None:
        return alarm(row, self.learning.recipe.train.epochs, self.config.prototypes)
