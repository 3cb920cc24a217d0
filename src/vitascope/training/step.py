"""A batch -> one step of learning: vary, forward, loss, backward, clip, update, average. No waiting for the device."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitascope.data.draws import Draws
from vitascope.data.source import Labels, UInt8Images
from vitascope.training.objective import Numbers
from vitascope.training.optimizers import decay_weights
from vitascope.training.schedule import Values
from vitascope.training.session import Session


@dataclass
class Tally:
    """Sums kept on the device over an epoch: what each step told, and the first step whose loss was not a number."""

    sums: dict[str, Tensor]
    bad_step: Tensor

    @classmethod
    def empty(cls, session: Session) -> "Tally":
        device = session.hardware.device
        names = session.objective.numbers
        return cls({name: torch.zeros((), device=device) for name in names}, torch.full((), -1, device=device))

    @property
    def loss(self) -> Tensor:
        return next(iter(self.sums.values()))

    def add(self, numbers: Numbers, step: int | Tensor) -> None:
        for name, total in self.sums.items():
            total += numbers[name]
        loss = next(iter(numbers.values()))
        self.bad_step.copy_(torch.where((self.bad_step < 0) & ~loss.isfinite(), step, self.bad_step))

    def clear(self) -> None:
        for total in self.sums.values():
            total.zero_()
        self.bad_step.fill_(-1)


def train_step(
    session: Session,
    images: UInt8Images,
    labels: Labels,
    draws: Draws,
    tally: Tally,
    step: int | Tensor,
    values: Values,
) -> None:
    """At the rates the optimizers have. `step` and the `values` of this step are numbers, or tensors where the step is
    recorded."""
    objective, count = session.objective, session.recipe.train.grad_accum_steps
    inputs = session.prepare(images, labels, draws)
    for part in zip(*(tensor.chunk(count) for tensor in inputs), strict=True):
        share = len(part[0]) / len(inputs[0])
        told = {name: number * share for name, number in objective.told(part, values).items()}
        session.scaler.scale(next(iter(told.values()))).backward()
        tally.add({name: number.detach() for name, number in told.items()}, step)
    objective.before_update(values)
    update(session, values)
    objective.after_update(values)


def update(session: Session, values: Values) -> None:
    """Gradients -> new weights, and the average follows."""
    fp16 = session.scaler.is_enabled()
    for optimizer in session.optimizers:
        session.scaler.unscale_(optimizer)  # pyright: ignore[reportArgumentType]
    limit = session.recipe.train.clip_grad or float("inf")
    weights = [*session.model.parameters(), *session.objective.extra.parameters()]
    norm = nn.utils.clip_grad_norm_(weights, limit) if limit < float("inf") or fp16 else None
    if not fp16 or (norm is not None and norm.isfinite()):  # fp16: one overflow anywhere skips the step for all
        if "weight_decay" in values:
            decay_weights(session.optimizers, values["weight_decay"])
        for optimizer in session.optimizers:
            session.scaler.step(optimizer)  # pyright: ignore[reportArgumentType]
    session.scaler.update()
    for optimizer in session.optimizers:
        optimizer.zero_grad()
    if session.average:
        session.average.follow(session.model, values["decay"])
