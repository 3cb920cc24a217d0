"""Run one training step: augment, forward, loss, backward, clip, update, average. Never waits for the device."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitascope.data.dataset import Labels, UInt8Images
from vitascope.data.sampling import RandomDraws
from vitascope.training.objectives.objective import StepMetrics
from vitascope.training.optim.build import apply_scheduled_weight_decay
from vitascope.training.optim.schedule import ScheduleValues
from vitascope.training.session import Session


@dataclass
class MetricSums:
    """Sums of the step metrics over an epoch, on the device, and the first step with a NaN or infinite loss."""

    sums: dict[str, Tensor]
    first_nonfinite_step: Tensor  # −1: none

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
    """Train on one batch with the learning rates that the optimizers have.

    `step` and the values of `schedule` are numbers, or tensors on the device in a captured step."""
    objective, num_parts = session.objective, session.recipe.train.grad_accum_steps
    batch = session.prepare_batch(images, labels, draws)
    for part in zip(*(tensor.chunk(num_parts) for tensor in batch), strict=True):
        fraction = len(part[0]) / len(batch[0])
        metrics = {name: mean * fraction for name, mean in objective.compute_loss_and_metrics(part, schedule).items()}
        session.scaler.scale(next(iter(metrics.values()))).backward()
        metric_sums.add({name: value.detach() for name, value in metrics.items()}, step)
    objective.adjust_gradients(schedule)
    update_weights_and_ema(session, schedule)
    objective.update_teacher(schedule)


def update_weights_and_ema(session: Session, schedule: ScheduleValues) -> None:
    """Clip the gradients, update the weights and then their moving average."""
    fp16 = session.scaler.is_enabled()
    for optimizer in session.optimizers:
        session.scaler.unscale_(optimizer)  # pyright: ignore[reportArgumentType]
    limit = session.recipe.train.clip_grad or float("inf")
    weights = [*session.model.parameters(), *session.objective.extra_module.parameters()]
    norm = nn.utils.clip_grad_norm_(weights, limit) if limit < float("inf") or fp16 else None
    if not fp16 or (norm is not None and norm.isfinite()):  # fp16: one overflow anywhere skips the step for all
        if "weight_decay" in schedule:
            apply_scheduled_weight_decay(session.optimizers, schedule["weight_decay"])
        for optimizer in session.optimizers:
            session.scaler.step(optimizer)  # pyright: ignore[reportArgumentType]
    session.scaler.update()
    for optimizer in session.optimizers:
        optimizer.zero_grad()
    if session.ema:
        session.ema.update_parameters(session.model, schedule["ema_decay"])
