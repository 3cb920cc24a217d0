"""Where a sheet's experiments are done: each a small study in the sheet's folder, so that a stopped sheet goes on."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from vitascope.data.opening import open_source
from vitascope.errors import UserError
from vitascope.run.directory import Run
from vitascope.run.files import make_folder, read_json, write_json
from vitascope.sheets.made import Made
from vitascope.study.answer import Answer, Cell, answer
from vitascope.study.design import design
from vitascope.study.queue import Queue
from vitascope.study.running import show, work_off
from vitascope.study.storage import default_storage

QUICK_SEEDS = 2


@dataclass(frozen=True)
class Lab:
    """One sheet's folder, seeds and haste."""

    folder: Path
    seeds: int
    quick: bool
    console: Console
    device: str = "auto"
    together: int | None = None  # how many runs learn together; none: as many as the device can use
    weights: str | None = None  # pretrained ones, for sheet D; none: its own choice
    machines: list[str] = field(default_factory=list)  # where the runs so far were made

    def study(self, name: str, recipe: str, words: list[str], *, judge: str = "val", weights: bool = False) -> Answer:
        """Every combination, or the only one, with all seeds; what is done already is not done again. `weights`: the
        runs themselves are looked at afterwards, not only what they came to."""
        self.console.print(f"{name}: {recipe} {' '.join(words)}", highlight=False, soft_wrap=True)
        made = design(recipe, [*words, f"train.device={self.device}"], self.seeds, judge=judge, one=True)
        first = made.recipe_for(made.cells[0], made.seeds[0])
        open_source(first.data, first.model.image_shape, first.model.in_chans)  # says what is missing, once
        folder = self.folder / name
        elsewhere = "Choose another place with --out."
        make_folder(folder, elsewhere)
        queue = Queue(made, default_storage(folder), name, elsewhere)
        queue.retry_failed()  # whatever it was, this is another day
        made_already = Made(self.folder.parent, self.console)
        made_already.take_over(queue, alone=self.together == 1, weights=weights)
        for told in work_off(queue, folder, together=self.together):
            made_already.note(queue, folder)
            show(told, self.console)
        made_already.note(queue, folder)  # also what was finished just before somebody killed this
        found = answer(made, queue.trials)
        if found.failed:
            which, why = found.failed[0]
            raise UserError(f"{name}: {which} failed: {why}")
        if found.waiting or not found.cells:
            raise UserError(f"{name}: another process is at some of the runs. When it has ended: the same command.")
        self.machines.extend(name for name in found.machines if name not in self.machines)
        return found

    def once(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What is measured besides the runs: kept, so that a page that is written again says the same."""
        place = self.folder.with_name(f"{self.folder.name}-{name}.json")
        known = read_json(place)
        if not known:
            make_folder(place.parent, "Choose another place with --out.")
            known = measure()
            write_json(place, known)
        return known

    def alone(self) -> "Lab":
        """For one run that learns by itself, whose seconds are those that somebody waits."""
        return replace(self, seeds=1, together=1)

    def run(self, name: str, **settings: object) -> Run:
        """A finished run that a study made: the first whose recipe says so, such as data.fraction=0.8."""
        for place in sorted((self.folder / name / "runs").glob("*/*/model.safetensors")):
            recipe = Run(place.parent).recipe
            said = {key: getattr(getattr(recipe, key.split(".")[0]), key.split(".")[1]) for key in settings}
            if said == settings:
                return Run(place.parent)
        raise UserError(f"{self.folder / name} has no run with {settings}.")


@dataclass(frozen=True)
class Reached:
    """When a cell's seeds first were as good as a number, in epochs and seconds, and how many never were in all their
    epochs."""

    epochs: list[int]
    seconds: list[float]
    never: int
    length: int

    def __str__(self) -> str:
        if not self.epochs:
            return f"not in {self.length} epochs"
        low, high = min(self.epochs), max(self.epochs)
        epochs = f"{low}" if low == high else f"{low}–{high}"
        text = f"epoch {epochs}, {sum(self.seconds) / len(self.seconds):.1f} s"
        return text if not self.never else f"{text} ({self.never} of {len(self.epochs) + self.never} seeds never)"


def first_epoch(curve: list[float], accuracy: float) -> int | None:
    """At whose end it was as good; None where it never was."""
    return next((epoch for epoch, value in enumerate(curve, start=1) if value >= accuracy), None)


def reached(cell: Cell, accuracy: float, clock: str = "seconds") -> Reached:
    """By validation images, at the ends of epochs. `clock`: seconds (steady), or waited (with setting up)."""
    epochs, seconds, never, length = [], [], 0, 0
    for found in cell.results.values():
        curve = found["curves"]["val_accuracy"]
        length = max(length, len(curve))
        first = first_epoch(curve, accuracy)
        if first is None:
            never += 1
        else:
            epochs.append(first)
            seconds.append(found["curves"][clock][first - 1])
    return Reached(epochs, seconds, never, length)
