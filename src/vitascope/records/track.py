"""Determine the track of a run, and check that runs may be combined into one record.

pure: non-overlapping patches, attention and MLP, trained from scratch. tokenizer: shifted patches or convolutions. ssl:
self-supervised pretraining on the same data. teacher: distillation from another model. pretrained: weights from another
data set. staged: supervised pretraining on the same data.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from vitascope.errors import UserError
from vitascope.recipe.schema import Recipe
from vitascope.run.directory import Run, is_run_folder
from vitascope.run.listing import find_differing_settings, format_setting_for_reading
from vitascope.run.machine import RunMachineInfo, get_run_device_name

Track = Literal["pure", "tokenizer", "ssl", "teacher", "pretrained", "staged"]


def find_previous_stage_run(run: Run) -> Run | None:
    """Return the run whose weights this one started from; None if it started from scratch or from a weights file."""
    weights = run.recipe.weights
    if not weights:
        return None
    path = Path(weights)
    if is_run_folder(path):
        return Run(path)
    if path.is_absolute() and not path.exists():
        raise UserError(
            f"{run.path} started from the weights of {weights}, which no longer exist. Restore them or train again."
        )
    return None


def list_previous_stage_runs(run: Run) -> list[Run]:
    """Return all earlier stages, the first one first."""
    stage = find_previous_stage_run(run)
    return [] if stage is None else [*list_previous_stage_runs(stage), stage]


def determine_training_track(run: Run) -> Track:
    """Determine the track; see the top of this file."""
    recipe, stage = run.recipe, find_previous_stage_run(run)
    if recipe.train.distill:
        return "teacher"
    if stage is not None:
        if stage.recipe.data.name != recipe.data.name:
            return "pretrained"
        stage_track = determine_training_track(stage)
        return "staged" if stage_track in ("pure", "tokenizer") else stage_track
    if recipe.weights:
        return "pretrained"
    if not recipe.train.uses_labels:
        return "ssl"
    return "pure" if recipe.model.tokenizer == "patch" else "tokenizer"


def make_portable_recipe(run: Run) -> Recipe:
    """Return the run's recipe; an earlier stage is given by its recipe name instead of its path."""
    stage = find_previous_stage_run(run)
    return run.recipe if stage is None else replace(run.recipe, weights=f"recipe:{stage.recipe.name}")


REQUIRED_MACHINE_KEYS = ("machine", "hardware", "versions", "commit", "date", "data_hash")


def check_recordable_and_read_machine_info(run: Run) -> RunMachineInfo:
    """Read the machine, versions and commit that the run itself stored. Reject a run that cannot be recorded."""
    if not run.is_finished:
        raise UserError(f"{run.path} is not finished. Resume it with: vitascope resume {run.path}")
    if not run.metrics:
        raise UserError(f"{run.path} has no metrics.jsonl, so its training time is unknown. Train it again.")
    if (num_batched := run.metrics[-1].get("together", 1)) > 1:
        raise UserError(
            f"{run.path} was trained in one batch of {num_batched} runs, so its own time is unknown. Train it alone."
        )
    machine_info = run.machine
    if missing := [key for key in REQUIRED_MACHINE_KEYS if key not in machine_info]:
        raise UserError(f"{run.path}/machine.json has no {missing[0]}, so the run cannot be recorded. Train it again.")
    for later in machine_info.get("resumed", []):
        if any(later[key] != machine_info[key] for key in ("machine", "commit", "versions")):
            raise UserError(
                f"{run.path} was resumed on another machine, at another commit or with other versions. Train it again."
            )
    return machine_info


def _check_only_seed_differs(runs: list[Run], recipes: list[Recipe]) -> None:
    """Reject runs whose recipes differ in more than the seed; name up to four settings, their values and runs."""
    differing = find_differing_settings(recipes) if recipes else {}
    differences = []
    for key, values in differing.items():
        first_run_by_value = {}
        for run, value in zip(runs, values, strict=True):
            first_run_by_value.setdefault(format_setting_for_reading(key, value), run.path)
        listed = ", ".join(f"{value} ({path})" for value, path in first_run_by_value.items())
        differences += [f"{key}: {listed}"] if key != "train.seed" else []
    if differences:
        raise UserError(f"The runs differ in {'; '.join(differences[:4])}. A record is one recipe with several seeds.")


def check_runs_fit_one_record(runs: list[Run], machine_infos: list[RunMachineInfo], commit: str | None) -> None:
    """Reject runs that differ in more than their seed."""
    seeds = [run.recipe.train.seed for run in runs]
    if repeated := [seed for seed in set(seeds) if seeds.count(seed) > 1]:
        raise UserError(f"Seed {repeated[0]} is given more than once. A record has one run per seed.")
    stages = [stage for run in runs if (stage := find_previous_stage_run(run))]
    _check_only_seed_differs(runs, [make_portable_recipe(run) for run in runs])
    _check_only_seed_differs(stages, [stage.recipe for stage in stages])
    check_equal_in_all_runs("machines", [get_run_device_name(info) for info in machine_infos])
    check_equal_in_all_runs("commits", [str(info["commit"]) for info in machine_infos])
    check_equal_in_all_runs("versions of torch", [str(info["versions"].get("torch")) for info in machine_infos])
    for key in ("precision", "compiled", "captured"):
        check_equal_in_all_runs(f"values of {key}", [str(info["hardware"].get(key)) for info in machine_infos])
    check_equal_in_all_runs("numbers of images seen", [str(run.metrics[-1]["images_seen"]) for run in runs])
    check_equal_in_all_runs("training images", [str(info.get("whole_data_hash")) for info in machine_infos])
    run_commit = machine_infos[0]["commit"]
    if run_commit and commit and run_commit != commit:
        raise UserError(f"--commit {commit[:12]}: the runs were made at commit {run_commit[:12]}. Leave --commit out.")


def check_equal_in_all_runs(quantity_name: str, values: Iterable[str]) -> None:
    """Reject runs with different values of a quantity."""
    different = list(dict.fromkeys(values))
    if len(different) > 1:
        raise UserError(
            f"The runs have different {quantity_name}: {different[0]} and {different[1]}. Record them separately."
        )
