"""Learning rate finder: raise the rate at every step, record the loss and suggest a rate (Smith 2017)."""

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
FELL = 0.98  # the loss must fall below this fraction of its start for a suggestion
BROKE = 1.1
RULE = "one third of the learning rate with the lowest loss."


@dataclass(frozen=True)
class RateCurve:
    """Smoothed loss at each learning rate of AdamW. Other rates, such as Muon's, grow in proportion."""

    rates: list[float]
    losses: list[float]

    @property
    def lowest(self) -> int:
        return min(range(len(self.losses)), key=self.losses.__getitem__)

    @property
    def suggested(self) -> float | None:
        """A third of the rate with the lowest loss: nearly the fastest, with a safety margin. None if the loss hardly
        fell, because its minimum is then random."""
        fell = self.losses[self.lowest] < FELL * self.losses[0]
        return self.rates[self.lowest] / 3 if fell else None

    @property
    def broken(self) -> float | None:
        """The first rate after the minimum at which the loss is 10 % above it; the last rate before it was NaN; else
        None."""
        high = BROKE * self.losses[self.lowest]
        pairs = list(zip(self.rates, self.losses, strict=True))[self.lowest :]
        last = self.rates[-1] if len(self.rates) < STEPS else None
        return next((rate for rate, loss in pairs if loss > high), last)

    def draw(self, path: Path) -> Path:
        figure, [panel] = new_figure(1, width=7.0, height=4.4)
        panel.semilogx(self.rates, self.losses, color=COLOURS[0])
        if self.suggested:
            panel.axvline(self.suggested, color=COLOURS[1], linestyle="--", label=f"suggested {self.suggested:.2g}")
        if self.broken:
            panel.axvline(self.broken, color=COLOURS[3], linestyle=":", label=f"loss diverges above {self.broken:.2g}")
        if self.suggested or self.broken:
            panel.legend(frameon=False)
        panel.grid(alpha=0.25)
        label(
            panel, "Training loss at increasing learning rates", "learning rate (train.lr)", "training loss, smoothed"
        )
        caption(figure, self._describe())
        return save(figure, path)

    def _describe(self) -> str:
        text = "One training step per learning rate, from small to large. On the left, the loss hardly falls."
        if self.broken:
            text += " Right of the dotted line the loss diverges."
        if self.suggested:
            text += f" Suggested: {RULE}"
        return text


def find_rate(recipe: Recipe, console: Console) -> RateCurve:
    """Raise the learning rate until the loss is far above its minimum, NaN or infinite."""
    if recipe.train.objective == "dino":
        raise UserError(
            "lr-find does not support DINO: its loss also falls when the model collapses. "
            "Compare a few rates with vitascope study."
        )
    recipe, data, adapted = decided(recipe, console)
    recipe = replace(recipe, train=replace(recipe.train, cuda_graph="never"))  # the rate changes at every step
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
        raise UserError("The first loss is NaN or infinite. Check the data and the model settings.")
    return RateCurve(rates, losses)


def _rate(number: int) -> float:
    return LOWEST * (HIGHEST / LOWEST) ** (number / (STEPS - 1))


def _losses(session: Session) -> Iterator[float]:
    """Yield the loss of each step while the rate grows."""
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
