"""List the runs in a folder with their settings and results."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from vitascope.errors import UserError
from vitascope.model.anatomy import count_parameters
from vitascope.run.directory import Run, is_run
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


def find_runs(runs_folder: Path) -> list[Run]:
    """Every run in the folder and its subfolders, oldest first."""
    if not runs_folder.is_dir():
        raise UserError(f"There is no folder {runs_folder}. Train a model first: vitascope train digits")
    found = [path.parent for path in runs_folder.rglob("recipe.yaml") if is_run(path.parent)]
    return [Run(path) for path in sorted(found, key=lambda path: path.name)]


def summarize_run(run: Run) -> RunSummary:
    recipe, rows = run.recipe, run.metrics
    own = [
        opening
        for opening in read_test_set_log(run)
        if opening.data_name == recipe.data.name and opening.is_finished_classifier_result
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
        test_accuracy=own[0].result["accuracy"] if own else None,
    )


def find_exact_run(path: Path) -> Run:
    """The run in exactly this directory, for deletion."""
    if path.is_symlink():
        raise UserError(f"{path} is a link. Give the run's own directory: {path.resolve()}")
    below = [place for place in path.glob("*/**/recipe.yaml") if is_run(place.parent)] if path.is_dir() else []
    if is_run(path) and not below:
        return Run(path)
    raise UserError(f"{path} is not a run. Give one run's directory: runs/<recipe>/<date>-seed<n>.")


def delete_run(run: Run) -> None:
    try:
        shutil.rmtree(run.path)
    except OSError as error:
        raise UserError(f"{run.path} could not be deleted: {error.strerror}.") from error
