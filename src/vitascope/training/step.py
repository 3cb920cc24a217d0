"""A batch -> one step of learning: vary, forward, loss, backward, clip, update, average. No waiting for the device."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.data.draws import Draws
from vitascope.data.mixing import Target
from vitascope.data.source import Labels, UInt8Images
from vitascope.training.session import Session
from vitascope.training.teacher import distilled


@dataclass
class Tally:
    """Sums kept on the device over an epoch: loss, right answers, and the first step whose loss was not a number."""

    loss: Tensor
    right: Tensor
    bad_step: Tensor

    @classmethod
    def empty(cls, device: str) -> "Tally":
        return cls(torch.zeros((), device=device), torch.zeros((), device=device), torch.full((), -1, device=device))

    def add(self, loss: Tensor, right: Tensor, step: int | Tensor) -> None:
        self.loss += loss
        self.right += right
        self.bad_step.copy_(torch.where((self.bad_step < 0) & ~loss.isfinite(), step, self.bad_step))

    def clear(self) -> None:
        self.loss.zero_()
        self.right.zero_()
        self.bad_step.fill_(-1)


def train_step(
    session: Session,
    images: UInt8Images,
    labels: Labels,
    draws: Draws,
    tally: Tally,
    weights: Tensor | None,
    step: int | Tensor,
    decay: float | Tensor,
) -> None:
    """At the rates the optimizers have. `weights` per class for data.balance=loss; `step` and the average's `decay` are
    numbers, or tensors where the step is recorded."""
    config = session.recipe.train
    inputs, target = session.data.preparation.varied(images, labels, draws, session.recipe.data.augment)
    parts = zip(inputs.chunk(config.accumulate), _chunks(target, config.accumulate), strict=True)
    for part, answer in parts:
        with session.hardware.autocast():
            logits = session.forward(part)
            taught = session.teacher(part) if session.teacher else None
        loss = classify(logits, answer, config.label_smoothing, weights)
        if taught is not None:
            loss = torch.lerp(loss, distilled(logits, taught, config), config.distill_share)
        loss = loss * (len(part) / len(inputs))
        session.scaler.scale(loss).backward()
        tally.add(loss.detach(), (logits.detach().argmax(1) == answer.dominant()).sum() / len(inputs), step)
    update(session, decay)


def classify(logits: Tensor, target: Target, smoothing: float, weights: Tensor | None) -> Tensor:
    """Cross-entropy against mixed and smoothed labels, in float32."""
    answers = target.probabilities(logits.shape[1])
    return F.cross_entropy(logits.float(), answers, weight=weights, label_smoothing=smoothing)


def update(session: Session, decay: float | Tensor) -> None:
    """Gradients -> new weights, and the average follows."""
    fp16 = session.scaler.is_enabled()
    for optimizer in session.optimizers:
        session.scaler.unscale_(optimizer)
    limit = session.recipe.train.clip_grad or float("inf")
    norm = nn.utils.clip_grad_norm_(session.model.parameters(), limit) if limit < float("inf") or fp16 else None
    if not fp16 or (norm is not None and norm.isfinite()):  # fp16: one overflow anywhere skips the step for all
        for optimizer in session.optimizers:
            session.scaler.step(optimizer)
    session.scaler.update()
    for optimizer in session.optimizers:
        optimizer.zero_grad(set_to_none=True)
    if session.average:
        session.average.follow(session.model, decay)


def _chunks(target: Target, count: int) -> list[Target]:
    columns = zip(target.own.chunk(count), target.partner.chunk(count), target.share.chunk(count), strict=True)
    return [Target(own, partner, share) for own, partner, share in columns]
