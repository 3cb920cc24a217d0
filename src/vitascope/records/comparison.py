"""Compare runs: the settings that differ, the results, and their curves in one figure."""

from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from vitascope.draw.overlay import draw_overlay
from vitascope.errors import UserError
from vitascope.recipe.writing import word
from vitascope.records.catalogue import Entry, entry
from vitascope.records.settings import differing
from vitascope.run.directory import Run
from vitascope.run.metrics import curves_of

NAME_LENGTH = 46


@dataclass(frozen=True)
class Comparison:
    runs: list[Run]
    entries: list[Entry]
    settings: dict[str, list[Any]]  # only those that differ, a value per run

    @property
    def names(self) -> list[str]:
        """Short unique names: the settings that differ, else the directory names."""
        keys = [key.split(".")[-1] for key in self.settings]
        columns = zip(*self.settings.values(), strict=True)  # one per run
        told = [", ".join(f"{key}={word(v)}" for key, v in zip(keys, values, strict=True)) for values in columns]
        short = all(len(name) <= NAME_LENGTH for name in told) and len(set(told)) == len(self.runs)
        return told if short else [f"{run.path.parent.name}/{run.path.name}" for run in self.runs]

    def draw(self) -> Figure:
        named = zip(self.names, self.runs, strict=True)
        curves = {f"run {n}: {name}": curves_of(run.metrics) for n, (name, run) in enumerate(named, start=1)}
        return draw_overlay(
            curves, f"{len(self.runs)} runs. Solid lines: validation images. Dashed lines: training images."
        )

    def as_dict(self) -> dict[str, Any]:
        return {"runs": [vars(item) for item in self.entries], "differing": self.settings}


def compare(runs: list[Run]) -> Comparison:
    if len(runs) < 2:
        raise UserError("Give at least two runs to compare.")
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise UserError("The same run is given twice.")
    return Comparison(runs, [entry(run) for run in runs], differing([run.recipe for run in runs]))
