"""List the runs in a folder with their settings and results."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from vitascope.errors import UserError
from vitascope.model.anatomy import count_parameters
from vitascope.run.directory import Run, is_run_folder
from vitascope.run.metrics import sum_epoch_seconds
from vitascope.run.test_set_log import read_test_set_log


@dataclass(frozen=True)
class RunSummary:
    """One row of the list of runs; None where a value does not exist (yet)."""

    run: str
    recipe: str
    data: str
    seed: int
    parameters: int
    epochs: int
    epochs_done: int
    finished: bool
    seconds: float
    val_accuracy: float | None  # last epoch
    test_accuracy: float | None  # first evaluation on the run's own test set
    uses_linear_probe: bool = False  # trained without labels: a linear probe measures val_accuracy


def find_runs(runs_folder: Path) -> list[Run]:
    """Find all runs in the folder and its subfolders, oldest first."""
    if not runs_folder.is_dir():
        raise UserError(f"There is no folder {runs_folder}. Train a model first: vitascope train digits")
    folders = [path.parent for path in runs_folder.rglob("recipe.yaml") if is_run_folder(path.parent)]
    return [Run(folder) for folder in sorted(folders, key=lambda folder: folder.name)]


def summarize_run(run: Run) -> RunSummary:
    """Read one row of the list of runs."""
    recipe, rows = run.recipe, run.metrics
    evaluations = [
        entry
        for entry in read_test_set_log(run)
        if entry.data_name == recipe.data.name and entry.is_finished_classifier_result
    ]
    return RunSummary(
        run=str(run.path),
        recipe=recipe.name,
        data=Path(recipe.data.name).name,
        seed=recipe.train.seed,
        parameters=count_parameters(recipe.model),
        epochs=recipe.train.epochs,
        epochs_done=rows[-1]["epoch"] if rows else 0,
        finished=run.is_finished,
        seconds=sum_epoch_seconds(rows),
        val_accuracy=rows[-1].get("val_accuracy") if rows else None,
        test_accuracy=evaluations[0].result["accuracy"] if evaluations else None,
        uses_linear_probe=recipe.train.objective != "classify",
    )


def open_exact_run(path: Path) -> Run:
    """Return the run in exactly this folder, for deletion."""
    if path.is_symlink():
        raise UserError(f"{path} is a link. Give the run's own folder: {path.resolve()}")
    has_runs_inside = path.is_dir() and any(is_run_folder(file.parent) for file in path.glob("*/**/recipe.yaml"))
    if is_run_folder(path) and not has_runs_inside:
        return Run(path)
    raise UserError(f"{path} is not a run. Give one run's folder: runs/<recipe>/<date>-seed<n>.")


def delete_run(run: Run) -> None:
    try:
        shutil.rmtree(run.path)
    except OSError as error:
        raise UserError(f"{run.path} could not be deleted: {error.strerror}.") from error
