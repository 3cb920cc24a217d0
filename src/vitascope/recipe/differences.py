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

MACHINE_SETTINGS = (
    "data.root",
    "data.download",
    "train.track",
    "train.save_seconds",
)  # they depend on the machine and do not affect the result


def flatten_recipe(recipe: Recipe) -> dict[str, Any]:
    """`{"model.depth": 8, …}`, without unused settings and those of the machine; a path becomes its last name."""
    found = flatten_sections(asdict(recipe))
    found |= {key: list(value) for key, value in found.items() if isinstance(value, tuple)}  # as JSON gives it back
    found["data.name"] = Path(found["data.name"]).name
    unused = [f"{name}." for name in OBJECTIVE_SECTIONS if name != recipe.train.objective]
    return {key: v for key, v in found.items() if key not in MACHINE_SETTINGS and not key.startswith(tuple(unused))}


def find_differing_settings(recipes: list[Recipe]) -> dict[str, list[Any]]:
    """Each setting that differs between the recipes, with its value in each."""
    flat = [flatten_recipe(recipe) for recipe in recipes]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    columns = {key: [settings.get(key) for settings in flat] for key in keys}
    return {key: values for key, values in columns.items() if any(value != values[0] for value in values)}


def format_train_command(recipe: Recipe, seeds: list[int]) -> str:
    """The command that trains it again, based on the built-in recipe with the fewest differences."""
    changes: dict[str, dict[str, Any]] = {}
    for known in list_recipe_names():
        with suppress(UserError):  # a recipe that does not fit these images, such as mirrored digits
            changes[known] = _find_changed_settings(known, recipe)
    name = min(changes, key=lambda known: (len(changes[known]), known != recipe.name))
    words = [shlex.quote(f"{key}={format_value(value)}") for key, value in changes[name].items() if key != "train.seed"]
    seed = f"train.seed={seeds[0]}" if len(seeds) == 1 else "train.seed=$seed"
    call = " ".join(["vitascope train", name, *words, seed])
    return call if len(seeds) == 1 else f"for seed in {' '.join(map(str, seeds))}; do {call}; done"


def _find_changed_settings(base_recipe_name: str, recipe: Recipe) -> dict[str, Any]:
    """The settings that turn the named recipe, with its default augmentation filled in, into this one."""
    base = read_recipe(base_recipe_name)
    data = replace(base.data, name=recipe.data.name)
    augment = resolve_augmentation(base.data.augment, recipe.data.name, recipe.model.in_chans, base.train.objective)
    base = replace(base, data=replace(data, augment=augment))
    found = {key: values[1] for key, values in find_differing_settings([base, recipe]).items()}
    own = read_recipe(base_recipe_name).data.name
    return found | ({"data.name": _anonymize_data_path(recipe.data.name)} if own != recipe.data.name else {})


def _anonymize_data_path(data_name: str) -> str:
    """A folder's absolute path differs between machines."""
    return f"/path/to/{Path(data_name).name}" if Path(data_name).is_absolute() else data_name
