"""List a recipe's settings, find the differences between recipes, and write the command that repeats a run."""

import shlex
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vitascope.data.config import resolve_augmentation
from vitascope.errors import UserError
from vitascope.recipe.reading import list_recipe_names, read_recipe
from vitascope.recipe.schema import Recipe
from vitascope.recipe.writing import OBJECTIVE_SECTIONS, flatten_sections, format_value

# They depend on the machine and do not affect the result.
MACHINE_SETTINGS = ("data.root", "data.download", "train.track", "train.save_seconds")


def flatten_comparable_settings(recipe: Recipe) -> dict[str, Any]:
    """Return `{"model.depth": 8, …}` without unused settings and those of the machine; a path becomes its last name."""
    settings = flatten_sections(asdict(recipe))
    settings |= {key: list(value) for key, value in settings.items() if isinstance(value, tuple)}  # as in JSON
    settings["data.name"] = Path(settings["data.name"]).name
    unused = tuple(f"{name}." for name in OBJECTIVE_SECTIONS if name != recipe.train.objective)
    return {key: value for key, value in settings.items() if key not in MACHINE_SETTINGS and not key.startswith(unused)}


def find_differing_settings(recipes: list[Recipe]) -> dict[str, list[Any]]:
    """Return each setting that differs between the recipes, with its value in each."""
    flat = [flatten_comparable_settings(recipe) for recipe in recipes]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    columns = {key: [settings.get(key) for settings in flat] for key in keys}
    return {key: values for key, values in columns.items() if any(value != values[0] for value in values)}


def format_shortest_train_command(recipe: Recipe, seeds: list[int]) -> str:
    """Return the command that trains it again, based on the built-in recipe with the fewest differences."""
    changes: dict[str, dict[str, Any]] = {}
    for recipe_name in list_recipe_names():
        with suppress(UserError):  # a recipe that does not fit these images, such as mirrored digits
            changes[recipe_name] = _find_changed_settings(recipe_name, recipe)
    name = min(changes, key=lambda recipe_name: (len(changes[recipe_name]), recipe_name != recipe.name))
    overrides = [
        shlex.quote(f"{key}={format_value(value)}") for key, value in changes[name].items() if key != "train.seed"
    ]
    seed = f"train.seed={seeds[0]}" if len(seeds) == 1 else "train.seed=$seed"
    command = " ".join(["vitascope train", name, *overrides, seed])
    return command if len(seeds) == 1 else f"for seed in {' '.join(map(str, seeds))}; do {command}; done"


def _find_changed_settings(base_recipe_name: str, recipe: Recipe) -> dict[str, Any]:
    """Return the settings that turn the named recipe, with its default augmentation filled in, into this one."""
    base = read_recipe(base_recipe_name)
    data = replace(base.data, name=recipe.data.name)
    augment = resolve_augmentation(base.data.augment, recipe.data.name, recipe.model.in_chans, base.train.objective)
    base = replace(base, data=replace(data, augment=augment))
    changes = {key: values[1] for key, values in find_differing_settings([base, recipe]).items()}
    if read_recipe(base_recipe_name).data.name != recipe.data.name:
        changes["data.name"] = _anonymize_data_path(recipe.data.name)
    return changes


def _anonymize_data_path(data_name: str) -> str:
    """Replace an absolute path, which differs between machines, by /path/to/NAME."""
    return f"/path/to/{Path(data_name).name}" if Path(data_name).is_absolute() else data_name
