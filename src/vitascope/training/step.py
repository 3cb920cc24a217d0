"""Run one training step: augment, forward, loss, backward, clip, update, average. Never waits for the device."""

from torch import Tensor, nn

from vitascope.data.sampling import RandomDraws
from vitascope.training.loader import StoredBatch
from vitascope.training.optim.build import apply_scheduled_weight_decay
from vitascope.training.optim.schedule import ScheduleValues
from vitascope.training.state import MetricSums, TrainState


def train_step(
    state: TrainState,
    stored_batch: StoredBatch,
    draws: RandomDraws,
    metric_sums: MetricSums,
    step: int | Tensor,
    schedule: ScheduleValues,
    phase: int = 0,
) -> None:
    """Train on one batch with the learning rates that the optimizers have.

    `step` and the values of `schedule` are numbers, or tensors on the device in a captured step."""
    objective, num_parts = state.objective, state.recipe.train.grad_accum_steps
    batch = state.augment_batch(*stored_batch, draws)
    for part in zip(*(tensor.chunk(num_parts) for tensor in batch), strict=True):
        fraction = len(part[0]) / len(batch[0])
        metrics = {
            name: mean * fraction for name, mean in objective.compute_loss_and_metrics(part, schedule, phase).items()
        }
        state.scaler.scale(next(iter(metrics.values()))).backward()
        metric_sums.add_and_record_nonfinite_step({name: value.detach() for name, value in metrics.items()}, step)
    objective.adjust_gradients_before_update(schedule)
    clip_gradients_and_update_weights_and_ema(state, schedule)
    objective.update_teacher_after_step(schedule)


def clip_gradients_and_update_weights_and_ema(state: TrainState, schedule: ScheduleValues) -> None:
    """Clip the gradients, update the weights and then their moving average."""
    fp16 = state.scaler.is_enabled()
    for optimizer in state.optimizers:
        state.scaler.unscale_(optimizer)  # pyright: ignore[reportArgumentType]
    limit = state.recipe.train.clip_grad or float("inf")
    weights = [*state.model.parameters(), *state.objective.extra_module.parameters()]
    norm = nn.utils.clip_grad_norm_(weights, limit) if limit < float("inf") or fp16 else None
    if not fp16 or (norm is not None and norm.isfinite()):  # fp16: one overflow anywhere skips the step for all
        if "weight_decay" in schedule:
            apply_scheduled_weight_decay(state.optimizers, schedule["weight_decay"])
        for optimizer in state.optimizers:
            state.scaler.step(optimizer)  # pyright: ignore[reportArgumentType]
    state.scaler.update()
    for optimizer in state.optimizers:
        optimizer.zero_grad()
    if state.ema:
        state.ema.update_parameters(state.model, schedule["ema_decay"])
