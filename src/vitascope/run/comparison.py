"""Compare runs: the settings that differ, the results, and their curves in one figure."""

from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from vitascope.draw.curves import draw_run_comparison
from vitascope.errors import UserError
from vitascope.recipe.differences import find_differing_settings
from vitascope.recipe.writing import format_value
from vitascope.run.directory import Run
from vitascope.run.listing import RunSummary, summarize_run
from vitascope.run.metrics import extract_curves

MAX_NAME_LENGTH = 46


@dataclass(frozen=True)
class RunComparison:
    """Several runs, their summaries, and the settings in which they differ."""

    runs: list[Run]
    run_summaries: list[RunSummary]
    differing_settings: dict[str, list[Any]]  # setting -> its value in each run

    @property
    def run_names(self) -> list[str]:
        """Short unique names: the settings that differ, else the folder names."""
        keys = [key.split(".")[-1] for key in self.differing_settings]
        columns = zip(*self.differing_settings.values(), strict=True)  # one per run
        names = [
            ", ".join(f"{key}={format_value(v)}" for key, v in zip(keys, values, strict=True)) for values in columns
        ]
        is_short = all(len(name) <= MAX_NAME_LENGTH for name in names)
        return (
            names
            if is_short and len(set(names)) == len(self.runs)
            else [f"{run.path.parent.name}/{run.path.name}" for run in self.runs]
        )

    def draw_curves(self) -> Figure:
        """Draw loss and accuracy of all runs."""
        named_runs = zip(self.run_names, self.runs, strict=True)
        curves = {f"run {n}: {name}": extract_curves(run.metrics) for n, (name, run) in enumerate(named_runs, start=1)}
        caption = f"{len(self.runs)} runs. Solid lines: validation images. Dashed lines: training images."
        if any(summary.uses_linear_probe for summary in self.run_summaries):
            caption += " Validation accuracy of runs without labels: linear probe."
        return draw_run_comparison(curves, caption)

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison for JSON."""
        return {"runs": [vars(summary) for summary in self.run_summaries], "differing": self.differing_settings}


def compare_runs(runs: list[Run]) -> RunComparison:
    """Compare at least two different runs."""
    if len(runs) < 2:
        raise UserError("Give at least two runs to compare.")
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise UserError("The same run is given twice.")
    return RunComparison(
        runs, [summarize_run(run) for run in runs], find_differing_settings([run.recipe for run in runs])
    )
