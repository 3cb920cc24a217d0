"""List the runs in a folder with their settings and results, and compare runs: settings, results and curves."""

import shlex
import shutil
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitascope.errors import UserError
from vitascope.model.anatomy import count_parameters
from vitascope.recipe.choices import OBJECTIVE_SECTIONS, complete_augmentation_for_objective, load_objective
from vitascope.recipe.reading import list_recipe_names, read_recipe
from vitascope.recipe.schema import Recipe, convert_recipe_to_dict, flatten_sections, format_value_for_command_line
from vitascope.run.directory import Run, is_run_folder
from vitascope.run.metrics import extract_learning_curves, sum_epoch_seconds
from vitascope.run.test_set_log import read_test_set_log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NULL_MEANINGS = {  # what null means, where it is not the default of the data
    "data.labels": "none",
    "data.memory": "automatic",
    "model.init_values": "none",
    "train.distill": "none",
    "train.final_weight_decay": "constant",
    "weights": "none",
}
MAX_NAME_LENGTH = 46
# They depend on the machine and do not affect the result.
MACHINE_SETTINGS = ("data.root", "data.download", "train.track", "train.save_seconds")


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
    tune: str | None = None  # train.tune of a run that started from weights: full, head, lora; None: from scratch
    freeze: int = 0  # train.freeze: number of frozen blocks
    remark: str | None = None  # why the run cannot be read; the other values are then unknown


def find_runs(runs_folder: Path) -> list[Run]:
    """Find all runs in the folder and its subfolders, oldest first."""
    if not runs_folder.is_dir():
        raise UserError(f"There is no folder {runs_folder}. Train a model first: vitascope train digits")
    folders = [path.parent for path in runs_folder.rglob("recipe.yaml") if is_run_folder(path.parent)]
    return [Run(folder) for folder in sorted(folders, key=lambda folder: folder.name)]


def summarize_run_or_explain(run: Run) -> RunSummary:
    """Read one row of the list of runs. For a run that cannot be read, the row has a remark: the reason."""
    try:
        return summarize_run(run)
    except UserError as error:
        reason = str(error)
    except OSError as error:
        reason = f"{error.filename or run.path} cannot be read: {error.strerror}."
    return RunSummary(
        str(run.path), run.path.parent.name, "", 0, 0, 0, 0, run.is_finished, 0.0, None, None, remark=reason
    )


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
        uses_linear_probe=not recipe.train.uses_labels,
        tune=recipe.train.tune if recipe.weights else None,
        freeze=recipe.train.freeze,
    )


def open_run_for_deletion(path: Path) -> Run:
    """Return the run in exactly this folder, for deletion."""
    if path.is_symlink():
        raise UserError(f"{path} is a link. Give the run's own folder: {path.resolve()}")
    # Only a run is searched for other runs inside: any other folder may be the whole disk.
    if is_run_folder(path) and not any(is_run_folder(file.parent) for file in path.glob("*/**/recipe.yaml")):
        return Run(path)
    raise UserError(f"{path} is not a run. Give one run's folder: runs/<recipe>/<date>-seed<n>.")


def delete_run(run: Run) -> None:
    try:
        shutil.rmtree(run.path)
    except OSError as error:
        raise UserError(f"{run.path} could not be deleted: {error.strerror}.") from error


@dataclass(frozen=True)
class RunComparison:
    """Several runs, their summaries, and the settings in which they differ."""

    runs: list[Run]
    run_summaries: list[RunSummary]
    differing_settings: dict[str, list[Any]]  # setting -> its value in each run
    unreadable_runs: list[RunSummary] = field(default_factory=list)  # left out, with the reason as remark

    @property
    def short_unique_run_names(self) -> list[str]:
        """Short unique names: the settings that differ, else the folder names."""
        settings = self.differing_settings | {
            key: [Path(str(name)).name for name in names]
            for key, names in self.differing_settings.items()
            if key == "data.name"
        }
        columns = zip(*settings.values(), strict=True)  # one per run
        names = [
            ", ".join(
                f"{key.split('.')[-1]}={format_setting_for_reading(key, value)}"
                for key, value in zip(settings, values, strict=True)
            )
            for values in columns
        ]
        is_short = all(len(name) <= MAX_NAME_LENGTH for name in names)
        return (
            names
            if is_short and len(set(names)) == len(self.runs)
            else [f"{run.path.parent.name}/{run.path.name}" for run in self.runs]
        )

    def draw_curves(self) -> "Figure":
        """Draw loss and accuracy of all runs."""
        from vitascope.draw.curves import draw_run_comparison

        named_runs = zip(self.short_unique_run_names, self.runs, strict=True)
        curves = {
            f"run {n}: {name}": extract_learning_curves(run.metrics)
            for n, (name, run) in enumerate(named_runs, start=1)
        }
        caption = f"{len(self.runs)} runs. Solid lines: validation images. Dashed lines: training images."
        if any(summary.uses_linear_probe for summary in self.run_summaries):
            caption += " Validation accuracy of runs without labels: linear probe."
        losses = [load_objective(run.recipe.train.objective).loss_name for run in self.runs]
        return draw_run_comparison(curves, caption, losses)

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison for JSON."""
        summaries = [*self.run_summaries, *self.unreadable_runs]
        return {"runs": [vars(summary) for summary in summaries], "differing": self.differing_settings}


def compare_runs(runs: list[Run]) -> RunComparison:
    """Compare at least two different runs. Runs that cannot be read are left out, if two are left."""
    if len(runs) < 2:
        raise UserError("Give at least two runs to compare.")
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise UserError("The same run is given twice.")
    summaries = [summarize_run_or_explain(run) for run in runs]
    unreadable = [summary for summary in summaries if summary.remark]
    if len(runs) - len(unreadable) < 2:
        raise UserError(f"Fewer than two of the runs can be read. {unreadable[0].remark}")
    runs = [run for run, summary in zip(runs, summaries, strict=True) if not summary.remark]
    recipes = [run.recipe for run in runs]
    differing = find_differing_settings(recipes)
    data_names = [recipe.data.name for recipe in recipes]
    if len(set(data_names)) > 1:  # with full paths: folders of one name may hold other images
        differing |= {"data.name": data_names}
    return RunComparison(runs, [summary for summary in summaries if not summary.remark], differing, unreadable)


def flatten_comparable_settings(recipe: Recipe) -> dict[str, Any]:
    """Return `{"model.depth": 8, …}` without unused settings and those of the machine; a path becomes its last name."""
    settings = flatten_sections(convert_recipe_to_dict(recipe))
    settings |= {key: list(value) for key, value in settings.items() if isinstance(value, tuple)}  # as in JSON
    settings["data.name"] = Path(settings["data.name"]).name
    settings["data.labels"] = Path(settings["data.labels"]).name if settings["data.labels"] else None
    return {key: value for key, value in settings.items() if key not in MACHINE_SETTINGS}


def find_differing_settings(recipes: list[Recipe]) -> dict[str, list[Any]]:
    """Return each setting that differs between the recipes, with its value in each."""
    flat = [flatten_comparable_settings(recipe) for recipe in recipes]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    columns = {key: [settings.get(key) for settings in flat] for key in keys}
    return {key: values for key, values in columns.items() if any(value != values[0] for value in values)}


def format_setting_for_reading(key: str, value: Any) -> str:
    """Format a setting's value for readers, not for the command line: words instead of null, and GiB."""
    if value is None:
        is_unused = key.partition(".")[0] in OBJECTIVE_SECTIONS
        return "not used" if is_unused else NULL_MEANINGS.get(key, "default")
    return f"{value:g} GiB" if key == "data.memory" else format_value_for_command_line(value)


def format_shortest_train_command(recipe: Recipe, seeds: list[int]) -> str:
    """Return the command that trains it again, based on the built-in recipe with the fewest differences."""
    changes: dict[str, dict[str, Any]] = {}
    for recipe_name in list_recipe_names():
        with suppress(UserError):  # a recipe that does not fit these images, such as mirrored digits
            changes[recipe_name] = _find_overrides_of_builtin_recipe(recipe_name, recipe)
    name = min(changes, key=lambda recipe_name: (len(changes[recipe_name]), recipe_name != recipe.name))
    overrides = [
        shlex.quote(f"{key}={format_value_for_command_line(value)}")
        for key, value in changes[name].items()
        if key != "train.seed"
    ]
    seed = f"train.seed={seeds[0]}" if len(seeds) == 1 else "train.seed=$seed"
    command = " ".join(["vitascope train", name, *overrides, seed])
    return command if len(seeds) == 1 else f"for seed in {' '.join(map(str, seeds))}; do {command}; done"


def _find_overrides_of_builtin_recipe(base_recipe_name: str, recipe: Recipe) -> dict[str, Any]:
    """Return the settings that turn the named recipe, with its default augmentation filled in, into this one."""
    base = read_recipe(base_recipe_name)
    data = replace(base.data, name=recipe.data.name)
    augment = complete_augmentation_for_objective(
        base.data.augment, recipe.data.name, recipe.model.in_chans, base.train.objective, recipe.model.image_shape
    )
    base = replace(base, data=replace(data, augment=augment))
    changes = {key: values[1] for key, values in find_differing_settings([base, recipe]).items()}
    if read_recipe(base_recipe_name).data.name != recipe.data.name:
        changes["data.name"] = _anonymize_data_path(recipe.data.name)
    return changes


def _anonymize_data_path(data_name: str) -> str:
    """Replace an absolute path, which differs between machines, by /path/to/NAME."""
    return f"/path/to/{Path(data_name).name}" if Path(data_name).is_absolute() else data_name
