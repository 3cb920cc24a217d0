"""Epochs -> batches for the steps: images on the device where they fit, each epoch's draws made while another runs."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from vitascope.data.draws import Draws, epoch_order, flips_by_turns, one_step
from vitascope.data.training_data import class_weights
from vitascope.training.captured import CapturedStep
from vitascope.training.optimizers import set_rates
from vitascope.training.schedule import Values, step_values
from vitascope.training.session import Session
from vitascope.training.step import Tally, train_step


class EpochLoader:
    """The training images, on the device where they fit, and each epoch's draws, made while the one before runs."""

    def __init__(self, session: Session) -> None:
        self.session, self.device = session, session.hardware.device
        train, config = session.data.train, session.recipe.data
        self.home = self.device if self._fits(train.images) else "cpu"
        self.images, self.labels = train.images.to(self.home), train.labels.to(self.home)
        self.chances = None
        if config.balance == "sampling":
            weights = class_weights(train.labels, len(session.data.classes))[train.labels].double()
            self.chances = (weights / weights.sum()).numpy()
        self.captured: dict[int, CapturedStep] = {}  # by stage
        self.pool = ThreadPoolExecutor(1)
        self.ahead: dict[int, Future[tuple[Tensor, Draws]]] = {}

    def next(self, epoch: int) -> tuple[Tensor, Draws]:
        order, draws = (self.ahead.pop(epoch, None) or self.pool.submit(self._draw, epoch)).result()
        if epoch + 1 < self.session.recipe.train.epochs:
            self.ahead[epoch + 1] = self.pool.submit(self._draw, epoch + 1)
        draws = {name: draw.to(self.device, non_blocking=True) for name, draw in draws.items()}
        return order.to(self.home, non_blocking=True), draws

    def start(self, epoch: int, tally: Tally) -> Callable[[int], None]:
        """An epoch's draws in place; what comes back runs its steps, recorded or one by one."""
        order, draws = self.next(epoch)
        self.session.objective.stage = self.session.objective.stage_of(epoch)
        if not self.session.hardware.captured or self.home != self.device:
            tally.clear()
            return lambda step: self._plain_step(order[step], one_step(draws, step), tally)
        if not self.captured:
            self._record(epoch, order, draws, tally)
        captured = self.captured[self.session.objective.stage]
        captured.load(order, draws)
        return lambda step: captured()

    def _record(self, epoch: int, order: Tensor, draws: Draws, tally: Tally) -> None:
        """The steps of all stages to come, this one's last, so that later epochs only run."""
        objective = self.session.objective
        coming = range(epoch, self.session.recipe.train.epochs)
        for stage in sorted({objective.stage_of(later) for later in coming}, reverse=True):
            objective.stage = stage
            self.captured[stage] = CapturedStep(self.session, self.images, self.labels, tally)
            self.captured[stage].load(order, draws)

    def _plain_step(self, index: Tensor, draws: Draws, tally: Tally) -> None:
        session = self.session
        values: Values = {**step_values(session.step, session.steps, session.recipe)}
        set_rates(session.optimizers, values["rate"])
        train_step(session, *self.batch(index), draws, tally, session.step, values)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        images, labels = self.images[index], self.labels[index]
        return images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)

    def rewind(self) -> None:
        """Recorded steps back to the first of the epoch and of the run: for measuring the same steps again."""
        for captured in self.captured.values():
            captured.rewind()

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)

    def _draw(self, epoch: int) -> tuple[Tensor, Draws]:
        return epoch_plan(self.session, epoch, self.chances)

    def _fits(self, images: Tensor) -> bool:
        if self.device != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info()
        return images.numel() < free // 2


def epoch_plan(session: Session, epoch: int, chances: NDArray[Any] | None = None) -> tuple[Tensor, Draws]:
    """Which images each step sees, by chance where `chances` are given, and every other draw of the epoch."""
    steps, batch = session.steps_per_epoch, session.batch
    seed = session.recipe.train.seed
    order = epoch_order(len(session.data.train), steps, batch, seed, epoch, chances)
    draws, policy = session.objective.draws(steps, batch, epoch), session.recipe.data.augment
    if "flip" in draws and policy.flip_mode == "alternating":
        turn = epoch * session.recipe.data.passes_per_epoch
        draws["flip"] = flips_by_turns(order, len(session.data.train), policy.flip or 0.0, seed, turn)
    return order, draws
