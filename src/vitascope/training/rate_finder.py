"""A recipe -> the loss over a rate that grows at every step, and the rate it suggests (Smith 2017)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from rich.console import Console

from vitascope.data.draws import one_step
from vitascope.draw.look import caption, label, new_figure, save
from vitascope.draw.palette import COLOURS
from vitascope.errors import UserError
from vitascope.recipe.schema import Recipe
from vitascope.training.feeding import EpochLoader
from vitascope.training.optimizers import set_rates
from vitascope.training.schedule import Values, step_values
from vitascope.training.session import Session, start_session
from vitascope.training.step import Tally, train_step
from vitascope.training.train import decided

LOWEST, HIGHEST, STEPS, SMOOTHING = 1e-5, 1.0, 300, 0.9
FELL = 0.98  # the loss must fall at least so far for its lowest point to mean something
BROKE = 1.1


@dataclass(frozen=True)
class RateCurve:
    """Smoothed losses over rates of AdamW; other groups' rates grow in proportion."""

    rates: list[float]
    losses: list[float]

    @property
    def lowest(self) -> int:
        return min(range(len(self.losses)), key=self.losses.__getitem__)

    @property
    def suggested(self) -> float | None:
        """A third of the rate at which the loss was lowest: close to the fastest, with room to the edge. None where the
        loss hardly fell: then its lowest point is chance."""
        fell = self.losses[self.lowest] < FELL * self.losses[0]
        return self.rates[self.lowest] / 3 if fell else None

    @property
    def broken(self) -> float:
        """The first rate after the lowest point at which the loss is a tenth above it, or the last one tried."""
        high = BROKE * self.losses[self.lowest]
        pairs = list(zip(self.rates, self.losses, strict=True))[self.lowest :]
        return next((rate for rate, loss in pairs if loss > high), self.rates[-1])

    def draw(self, path: Path) -> Path:
        figure, [panel] = new_figure(1, width=7.0, height=4.4)
        panel.semilogx(self.rates, self.losses, color=COLOURS[0])
        if self.suggested:
            panel.axvline(self.suggested, color=COLOURS[1], linestyle="--", label=f"suggested {self.suggested:.1e}")
        panel.axvline(self.broken, color=COLOURS[3], linestyle=":", label=f"breaks {self.broken:.1e}")
        panel.legend(frameon=False)
        panel.grid(alpha=0.25)
        label(panel, "Loss over a growing learning rate", "learning rate (train.lr)", "training loss, smoothed")
        caption(
            figure,
            "One step per rate. Left: too small to learn. Right of the lowest point: too large, the loss breaks.",
        )
        return save(figure, path)


def find_rate(recipe: Recipe, console: Console) -> RateCurve:
    """Stops early where the loss is far above its best, or not a number."""
    if recipe.train.objective == "dino":
        raise UserError(
            "DINO's loss also falls by collapsing, so it does not tell which rate is good. Try a few: vitascope study"
        )
    recipe, data, adapted = decided(recipe, console)
    recipe = replace(recipe, train=replace(recipe.train, cuda_graph="never"))  # every step has a rate of its own
    session = start_session(recipe, data, weights=adapted.weights if adapted else None)
    rates, losses, average, best = [], [], 0.0, math.inf
    for number, loss in enumerate(_losses(session)):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        smooth = average / (1 - SMOOTHING ** (number + 1))
        if not math.isfinite(loss) or smooth > 4 * best:
            break
        best = min(best, smooth)
        rates.append(_rate(number))
        losses.append(smooth)
    if not rates:
        raise UserError("The very first loss was not a number: look at the data and the model's settings.")
    return RateCurve(rates, losses)


def _rate(number: int) -> float:
    return LOWEST * (HIGHEST / LOWEST) ** (number / (STEPS - 1))


def _losses(session: Session) -> Iterator[float]:
    """The loss at each step, epoch after epoch, under the growing rate."""
    loader, number = EpochLoader(session), 0
    session.objective.stage = session.objective.stage_of(session.recipe.train.epochs - 1)  # whole images
    try:
        for epoch in count():
            order, draws = loader.next(epoch)
            for step in range(session.steps_per_epoch):
                if number == STEPS:
                    return
                set_rates(session.optimizers, _rate(number) / session.recipe.train.lr)
                tally = Tally.empty(session)
                values: Values = {**step_values(number, STEPS, session.recipe)}
                train_step(session, *loader.batch(order[step]), one_step(draws, step), tally, number, values)
                yield tally.loss.item()
                number += 1
    finally:
        loader.close()
