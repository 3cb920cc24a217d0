"""Labels -> the loss of answering otherwise: cross-entropy, with a teacher's answers where there is one."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.data.draws import Draws
from vitascope.data.mixing import Target
from vitascope.data.source import Labels, UInt8Images
from vitascope.data.training_data import class_weights
from vitascope.model.masked import SomePatches
from vitascope.training.objective import Inputs, Learning, Numbers, Objective
from vitascope.training.schedule import Values
from vitascope.training.scoring import score
from vitascope.training.teacher import Teacher, distilled, open_teacher


class Classify(Objective):
    numbers = ("train_loss", "train_accuracy")

    def __init__(self, learning: Learning) -> None:
        super().__init__(learning)
        data, config = learning.data, learning.recipe
        stages: list[nn.Module] = [learning.model]
        if config.train.patch_share_epochs:
            seen = config.train.seen_patches(learning.model.config.num_patches)
            stages.insert(0, SomePatches(learning.model, seen))
        self.forwards = [learning.hardware.compile(stage) for stage in stages]
        self.judged = learning.hardware.compile(judged)
        self.weights: Tensor | None = None  # per class, for data.balance=loss
        if config.data.balance == "loss":
            self.weights = class_weights(data.train.labels, len(data.classes)).to(learning.hardware.device)
        self.teacher: Teacher | None = None
        if config.train.distill:
            self.teacher = open_teacher(
                config.train.distill, data.preparation, data.classes, learning.hardware, named=data.source.named
            )
            self.fingerprint = self.teacher.fingerprint

    def stage_of(self, epoch: int) -> int:
        """train.patch_share: 0 while only some patches are used, then 1."""
        few = self.learning.recipe.train.patch_share_epochs
        return int(epoch >= few) if few else 0

    def draws(self, steps: int, batch: int, epoch: int) -> Draws:
        some = self.learning.recipe.train.patch_share_epochs
        return super().draws(steps, batch, epoch) | (self.patch_noise(steps, batch, epoch) if some else {})

    def prepare(self, images: UInt8Images, labels: Labels, draws: Draws) -> Inputs:
        policy = self.learning.recipe.data.augment
        inputs, target = self.learning.preparation.varied(images, labels, draws, policy)
        noise = [draws["noise"]] if "noise" in draws else []
        return inputs, target.own, target.partner, target.share, *noise

    def told(self, inputs: Inputs, values: Values) -> Numbers:
        images, target = inputs[0], Target(*inputs[1:4])
        noise = () if self.stage else inputs[4:]  # which patches are seen at first
        config = self.learning.recipe.train
        with self.learning.hardware.autocast():
            logits = self.forwards[self.stage](images, *noise)
            taught = self.teacher(images) if self.teacher else None
        loss, right = self.judged(logits, target, config.label_smoothing, self.weights)
        if taught is not None:
            loss = torch.lerp(loss, distilled(logits, taught, config), config.distill_alpha)
        return {"train_loss": loss, "train_accuracy": right}

    def look(self, epoch: int) -> dict[str, float]:
        data = self.learning.data
        if data.validation is None:
            return {}
        found = score(self.learning.answering, data.validation, data.preparation, self.learning.hardware)
        return {"val_loss": found.loss, "val_accuracy": found.accuracy}


def judged(logits: Tensor, target: Target, smoothing: float, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """The loss, and the share of right answers."""
    right = (logits.detach().argmax(1) == target.dominant()).float().mean()
    return cross_entropy(logits, target, smoothing, weights), right


def cross_entropy(logits: Tensor, target: Target, smoothing: float, weights: Tensor | None) -> Tensor:
    """Against mixed and smoothed labels, in float32 at least."""
    return soft_cross_entropy(logits, target.probabilities(logits.shape[1]), smoothing, weights)


def soft_cross_entropy(logits: Tensor, answers: Tensor, smoothing: float, weights: Tensor | None = None) -> Tensor:
    """Against a probability for each class."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, answers.to(logits.dtype), weight=weights, label_smoothing=smoothing)
