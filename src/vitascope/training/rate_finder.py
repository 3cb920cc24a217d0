"""Learning rate finder: raise the rate at every step, record the loss and suggest a rate (Smith 2017)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from rich.console import Console

from vitascope.data.sampling import select_step_draws
from vitascope.draw import COLOURS
from vitascope.draw.style import add_caption, create_figure, save_figure, set_labels
from vitascope.errors import UserError
from vitascope.recipe.choices import load_objective
from vitascope.recipe.schema import Recipe
from vitascope.training.loader import Loader
from vitascope.training.optim.build import set_learning_rates
from vitascope.training.optim.schedule import ScheduleValues, compute_schedule_values
from vitascope.training.prepare import complete_recipe_and_load_data_and_weights, seed_and_build_train_state
from vitascope.training.state import TrainState
from vitascope.training.step import MetricSums, train_step

MIN_LR, MAX_LR, NUM_STEPS, SMOOTHING = 1e-5, 1.0, 300, 0.9
REQUIRED_LOSS_RATIO = 0.98  # the loss must fall below this fraction of its start for a suggestion
DIVERGED_LOSS_RATIO = 1.1  # of the lowest loss
DIVERGED_TEXT = "more than 10 % above its minimum"
RULE = "one third of the learning rate with the lowest loss."


@dataclass(frozen=True)
class LearningRateCurve:
    """Smoothed loss at each learning rate of AdamW. Other rates, such as Muon's, change by the same factor."""

    learning_rates: list[float]
    losses: list[float]

    @property
    def lowest_loss_index(self) -> int:
        return min(range(len(self.losses)), key=self.losses.__getitem__)

    @property
    def suggested_lr(self) -> float | None:
        """A third of the rate with the lowest loss: nearly the fastest, with a safety margin.

        None if the loss hardly fell, because its minimum is then random."""
        fell = self.losses[self.lowest_loss_index] < REQUIRED_LOSS_RATIO * self.losses[0]
        return self.learning_rates[self.lowest_loss_index] / 3 if fell else None

    @property
    def divergence_lr(self) -> float | None:
        """The first rate after the minimum at which the smoothed loss is more than 10 % above the minimum.

        If the loss became NaN or jumped to four times its minimum first, the last rate before that. Otherwise None."""
        high = DIVERGED_LOSS_RATIO * self.losses[self.lowest_loss_index]
        pairs = list(zip(self.learning_rates, self.losses, strict=True))[self.lowest_loss_index :]
        last = self.learning_rates[-1] if len(self.learning_rates) < NUM_STEPS else None
        return next((rate for rate, loss in pairs if loss > high), last)

    def describe_divergence(self) -> str:
        """Say from which learning rate on the loss rises."""
        if self.divergence_lr:
            return f"From {self.divergence_lr:.2g} on, the loss is {DIVERGED_TEXT}."
        return f"The loss never rose to {DIVERGED_TEXT}."

    def save_figure(self, path: Path) -> Path:
        figure, [panel] = create_figure(1, width=7.0, height=4.4)
        panel.semilogx(self.learning_rates, self.losses, color=COLOURS[0])
        if self.suggested_lr:
            panel.axvline(
                self.suggested_lr, color=COLOURS[1], linestyle="--", label=f"suggested {self.suggested_lr:.2g}"
            )
        if self.divergence_lr:
            panel.axvline(
                self.divergence_lr,
                color=COLOURS[3],
                linestyle=":",
                label=f"loss {DIVERGED_TEXT}, from {self.divergence_lr:.2g}",
            )
        if self.suggested_lr or self.divergence_lr:
            panel.legend(frameon=False)
        panel.grid(alpha=0.25)
        set_labels(
            panel, "Training loss at increasing learning rates", "learning rate (train.lr)", "training loss, smoothed"
        )
        add_caption(figure, self._make_caption())
        return save_figure(figure, path)

    def _make_caption(self) -> str:
        text = "One training step per learning rate, from small to large. On the left, the loss hardly falls."
        if self.divergence_lr:
            text += f" Right of the dotted line, the loss rises to {DIVERGED_TEXT}."
        if self.suggested_lr:
            text += f" Suggested: {RULE}"
        return text


def measure_learning_rate_curve(recipe: Recipe, console: Console) -> LearningRateCurve:
    """Raise the learning rate until the loss is far above its minimum, NaN or infinite."""
    if problem := load_objective(recipe.train.objective).lr_find_problem:
        raise UserError(
            f"lr-find does not support train.objective={recipe.train.objective}: {problem}. "
            "Compare a few rates with vitascope study."
        )
    recipe, data, adapted_model = complete_recipe_and_load_data_and_weights(recipe, console)
    recipe = replace(recipe, train=replace(recipe.train, cuda_graph="never"))  # the rate changes at every step
    state = seed_and_build_train_state(recipe, data, initial_weights=adapted_model.weights if adapted_model else None)
    rates, losses, average, best = [], [], 0.0, math.inf
    for step, loss in enumerate(_train_at_rising_lr_yielding_losses(state)):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        smooth = average / (1 - SMOOTHING ** (step + 1))
        if not math.isfinite(loss) or smooth > 4 * best:
            break
        best = min(best, smooth)
        rates.append(_compute_lr_at_step(step))
        losses.append(smooth)
    if not rates:
        raise UserError("The first loss is NaN or infinite. Check the data and the model settings.")
    return LearningRateCurve(rates, losses)


def _compute_lr_at_step(step: int) -> float:
    return MIN_LR * (MAX_LR / MIN_LR) ** (step / (NUM_STEPS - 1))


def _train_at_rising_lr_yielding_losses(state: TrainState) -> Iterator[float]:
    """Yield the loss of each step while the rate grows."""
    loader, step = Loader(state), 0
    phase = state.objective.get_phase_of_epoch(state.recipe.train.epochs - 1)  # whole images
    try:
        for epoch in count():
            plan = loader.get_plan_and_start_next(epoch)
            loader.start_prefetching(plan.image_order)
            plan = plan.to(state.hardware.device)
            for step_in_epoch in range(state.steps_per_epoch):
                if step == NUM_STEPS:
                    return
                set_learning_rates(state.optimizers, _compute_lr_at_step(step) / state.recipe.train.lr)
                metric_sums = MetricSums.empty(state)
                schedule: ScheduleValues = {**compute_schedule_values(step, NUM_STEPS, state.recipe)}
                batch = loader.load_next_batch(plan.image_order[step_in_epoch])
                draws = select_step_draws(plan.draws, step_in_epoch)
                train_step(state, batch, draws, metric_sums, step, schedule, phase)
                yield metric_sums.loss.item()
                step += 1
    finally:
        loader.close()
