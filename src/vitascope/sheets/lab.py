"""Where a sheet's experiments are done: each a small study in the sheet's folder, so that a stopped sheet goes on.

Several studies, and several sheets, ask for the same run: it is made once, and `made` beside the sheets' folders says
where it lies.
"""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from vitascope.data.opening import open_source
from vitascope.errors import UserError
from vitascope.run.directory import Run
from vitascope.run.files import make_folder, read_json, write_json
from vitascope.study.answer import Answer, Cell, answer
from vitascope.study.design import Design, design
from vitascope.study.queue import Queue, default_storage
from vitascope.study.running import result, show, work_off

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

    def study(self, name: str, recipe: str, words: list[str], *, judge: str = "val") -> Answer:
        """Every combination, or the only one, with all seeds; what is done already is not done again."""
        self.console.print(f"{name}: {recipe} {' '.join(words)}", highlight=False, soft_wrap=True)
        made = design(recipe, [*words, f"train.device={self.device}"], self.seeds, judge=judge, one=True)
        first = made.recipe_for(made.cells[0], made.seeds[0])
        open_source(first.data, first.model.image_shape, first.model.in_chans)  # says what is missing, once
        folder = self.folder / name
        elsewhere = "Choose another place with --out."
        make_folder(folder, elsewhere)
        queue = Queue(made, default_storage(folder), name, elsewhere)
        queue.retry_failed()  # whatever it was, this is another day
        self._take_over(queue)
        for told in work_off(queue, folder, together=self.together):
            show(told, self.console)
        found = answer(made, queue.trials)
        if found.failed:
            which, why = found.failed[0]
            raise UserError(f"{name}: {which} failed: {why}")
        self._note(found, folder)
        return found

    def _take_over(self, queue: Queue) -> None:
        """What another study has made already: judged as this one is, not learnt again."""
        runs = {
            _key(queue.design, cell, seed): self._made(queue.design, cell, seed) for cell, seed in _all(queue.design)
        }
        known = queue.take_more(len(runs), lambda cell, seed: runs[_key(queue.design, cell, seed)] is not None)
        for trial in known:
            run = runs[_key(queue.design, trial.cell, trial.seeds[0])]
            if run is not None:
                found = result(run, queue.design)
                trial.note("results", {str(trial.seeds[0]): found})
                queue.finish(trial, found["accuracy"])

    def _made(self, made: Design, cell: dict[str, str], seed: int) -> Run | None:
        told = read_json(self._notes / f"{_key(made, cell, seed)}.json").get("run")
        place = self.folder.parent / str(told)
        return Run(place) if told and (place / "model.safetensors").is_file() else None

    def _note(self, found: Answer, folder: Path) -> None:
        make_folder(self._notes)
        for cell in found.cells:
            for seed, came in cell.results.items():
                place = folder / "runs" / came["run"]
                if place.is_dir():  # not another study's
                    note = self._notes / f"{_key(found.design, cell.settings, seed)}.json"
                    write_json(note, {"run": str(place.relative_to(self.folder.parent))})

    @property
    def _notes(self) -> Path:
        return self.folder.parent / "made"

    def run(self, name: str, **settings: object) -> Run:
        """A finished run that a study made: the first whose recipe says so, such as data.fraction=0.8."""
        for place in sorted((self.folder / name / "runs").glob("*/*/model.safetensors")):
            recipe = Run(place.parent).recipe
            said = {key: getattr(getattr(recipe, key.split(".")[0]), key.split(".")[1]) for key in settings}
            if said == settings:
                return Run(place.parent)
        raise UserError(f"{self.folder / name} has no run with {settings}.")


def _all(made: Design) -> list[tuple[dict[str, str], int]]:
    return [(cell, seed) for cell in made.cells for seed in made.seeds]


def _key(made: Design, cell: dict[str, str], seed: int) -> str:
    """A short name for exactly this run, whoever asks for it."""
    recipe = replace(made.recipe_for(cell, seed), name="any")
    return hashlib.blake2b(repr(recipe).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Reached:
    """When a cell's seeds first were as good as a number, in epochs and seconds, and how many never were."""

    epochs: list[int]
    seconds: list[float]
    never: int

    def __str__(self) -> str:
        if not self.epochs:
            return "never"
        low, high = min(self.epochs), max(self.epochs)
        epochs = f"{low}" if low == high else f"{low}–{high}"
        text = f"epoch {epochs}, {sum(self.seconds) / len(self.seconds):.1f} s"
        return text if not self.never else f"{text} ({self.never} of {len(self.epochs) + self.never} seeds never)"


def reached(cell: Cell, accuracy: float) -> Reached:
    """By validation images, at the ends of epochs; seconds are the run's, shared evenly among its epochs."""
    epochs, seconds, never = [], [], 0
    for found in cell.results.values():
        curve = found["curves"]["val_accuracy"]
        first = next((epoch for epoch, value in enumerate(curve, start=1) if value >= accuracy), None)
        if first is None:
            never += 1
        else:
            epochs.append(first)
            seconds.append(found["seconds"] * first / len(curve))
    return Reached(epochs, seconds, never)
