"""A batch -> one step of learning: vary, forward, loss, backward, clip, update, average. No waiting for the device."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitascope.data.dataset import Labels, UInt8Images
from vitascope.data.sampling import RandomDraws
from vitascope.training.objectives.objective import StepMetrics
from vitascope.training.optim.build import apply_weight_decay
from vitascope.training.optim.schedule import ScheduleValues
from vitascope.training.session import Session


@dataclass
class MetricSums:
    """Sums kept on the device over an epoch: what each step told, and the first step whose loss was not a number."""

    sums: dict[str, Tensor]
    first_nonfinite_step: Tensor

    @classmethod
    def empty(cls, session: Session) -> "MetricSums":
        device = session.hardware.device
        names = session.objective.metric_names
        return cls({name: torch.zeros((), device=device) for name in names}, torch.full((), -1, device=device))

    @property
    def loss(self) -> Tensor:
        return next(iter(self.sums.values()))

    def add(self, metrics: StepMetrics, step: int | Tensor) -> None:
        for name, total in self.sums.items():
            total += metrics[name]
        loss = next(iter(metrics.values()))
        self.first_nonfinite_step.copy_(
            torch.where((self.first_nonfinite_step < 0) & ~loss.isfinite(), step, self.first_nonfinite_step)
        )

    def reset(self) -> None:
        for total in self.sums.values():
            total.zero_()
        self.first_nonfinite_step.fill_(-1)


def train_step(
    session: Session,
    images: UInt8Images,
    labels: Labels,
    draws: RandomDraws,
    metric_sums: MetricSums,
    step: int | Tensor,
    schedule: ScheduleValues,
) -> None:
    """At the rates the optimizers have. `step` and the `values` of this step are numbers, or tensors where the step is
    recorded."""
    objective, count = session.objective, session.recipe.train.grad_accum_steps
    inputs = session.prepare_batch(images, labels, draws)
    for part in zip(*(tensor.chunk(count) for tensor in inputs), strict=True):
        share = len(part[0]) / len(inputs[0])
        told = {name: number * share for name, number in objective.compute_loss_and_metrics(part, schedule).items()}
        session.scaler.scale(next(iter(told.values()))).backward()
        metric_sums.add({name: number.detach() for name, number in told.items()}, step)
    objective.adjust_gradients(schedule)
    update_weights(session, schedule)
    objective.update_teacher(schedule)


def update_weights(session: Session, schedule: ScheduleValues) -> None:
    """Gradients -> new weights, and the average follows."""
    fp16 = session.scaler.is_enabled()
    for optimizer in session.optimizers:
        session.scaler.unscale_(optimizer)  # pyright: ignore[reportArgumentType]
    limit = session.recipe.train.clip_grad or float("inf")
    weights = [*session.model.parameters(), *session.objective.extra_module.parameters()]
    norm = nn.utils.clip_grad_norm_(weights, limit) if limit < float("inf") or fp16 else None
    if not fp16 or (norm is not None and norm.isfinite()):  # fp16: one overflow anywhere skips the step for all
        if "weight_decay" in schedule:
            apply_weight_decay(session.optimizers, schedule["weight_decay"])
        for optimizer in session.optimizers:
            session.scaler.step(optimizer)  # pyright: ignore[reportArgumentType]
    session.scaler.update()
    for optimizer in session.optimizers:
        optimizer.zero_grad()
    if session.ema:
        session.ema.update_parameters(session.model, schedule["decay"])
