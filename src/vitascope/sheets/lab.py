"""Run a sheet's experiments, each as a small study in the sheet's folder, so that a sheet can be resumed."""

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
    """One sheet's folder, number of seeds and options."""

    folder: Path
    seeds: int
    quick: bool
    console: Console
    device: str = "auto"
    together: int | None = None  # most runs to train in one batch; None: chosen for the device
    weights: str | None = None  # pretrained weights for sheet D; None: the default
    machines: list[str] = field(default_factory=list)  # machines that trained the runs so far
    experiments: dict[str, str] = field(default_factory=dict)  # the sheet's studies: name -> title

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def title(self, name: str) -> str:
        """The study's number and title."""
        if name not in self.experiments:
            return f"Experiment: {name}"
        place = list(self.experiments).index(name) + 1
        return f"Experiment {place} of {len(self.experiments)}: {self.experiments[name]}"

    def study(self, name: str, recipe: str, words: list[str], *, judge: str = "val", weights: bool = False) -> Answer:
        """Train every combination with all seeds; finished runs are not repeated. `weights`: the runs' weights are
        needed afterwards, not only their results."""
        made = design(recipe, [*words, f"train.device={self.device}"], self.seeds, judge=judge, one=True)
        varied = "".join(f" {key}={','.join(values)}" for key, values in made.axes.items())
        self.say(f"{self.title(name)}. {made.size}{':' if varied else ''}{varied}")
        first = made.recipe_for(made.cells[0], made.seeds[0])
        open_source(first.data, first.model.image_shape, first.model.in_chans)  # reports missing data once
        folder = self.folder / name
        elsewhere = "Choose another folder with --out."
        make_folder(folder, elsewhere)
        queue = Queue(made, default_storage(folder), name, elsewhere)
        queue.retry_failed()  # the cause may be gone
        made_already = Made(self.folder.parent, self.console)
        made_already.take_over(queue, alone=self.together == 1, weights=weights)
        for told in work_off(queue, folder, together=self.together):
            made_already.note(queue, folder)
            show(told, self.console)
        made_already.note(queue, folder)  # also runs that finished just before an interruption
        found = answer(made, queue.trials)
        if found.failed:
            which, why = found.failed[0]
            raise UserError(f"{self.title(name)}: {which} failed: {why}")
        if found.waiting or not found.cells:
            raise UserError(
                f"{self.title(name)}: another process is training some of the runs. Repeat the command when it has "
                "finished."
            )
        self.machines.extend(name for name in found.machines if name not in self.machines)
        return found

    def once(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Measure once and store the result, so that a page written again has the same numbers."""
        place = self.folder.with_name(f"{self.folder.name}-{name}.json")
        known = read_json(place)
        if not known:
            make_folder(place.parent, "Choose another folder with --out.")
            known = measure()
            write_json(place, known)
        return known

    def alone(self) -> "Lab":
        """For a single run, trained alone, whose seconds include the set-up."""
        return replace(self, seeds=1, together=1)

    def run(self, name: str, **settings: object) -> Run:
        """The first finished run of a study with these settings, such as data.fraction=0.8."""
        for place in sorted((self.folder / name / "runs").glob("*/*/model.safetensors")):
            recipe = Run(place.parent).recipe
            said = {key: getattr(getattr(recipe, key.split(".")[0]), key.split(".")[1]) for key in settings}
            if said == settings:
                return Run(place.parent)
        raise UserError(f"{self.folder / name} has no run with {settings}.")


@dataclass(frozen=True)
class Reached:
    """When the seeds of a cell first reached an accuracy, in epochs and seconds, and how many never did."""

    epochs: list[int]
    seconds: list[float]
    never: int
    length: int

    def __str__(self) -> str:
        if not self.epochs:
            return f"not reached in {self.length} epochs"
        low, high = min(self.epochs), max(self.epochs)
        epochs = f"{low}" if low == high else f"{low}–{high}"
        text = f"epoch {epochs}, {sum(self.seconds) / len(self.seconds):.1f} s"
        return (
            text if not self.never else f"{text} (not reached by {self.never} of {len(self.epochs) + self.never} seeds)"
        )


def first_epoch(curve: list[float], accuracy: float) -> int | None:
    """The first epoch with this accuracy; None if there is none."""
    return next((epoch for epoch, value in enumerate(curve, start=1) if value >= accuracy), None)


def reached(cell: Cell, accuracy: float, clock: str = "seconds") -> Reached:
    """By validation accuracy at the end of epochs. `clock`: seconds (without set-up) or waited (with set-up)."""
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
