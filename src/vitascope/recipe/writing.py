"""Write a recipe as YAML with every setting, so that a run can be repeated; format a value as typed."""

import hashlib
import json
from dataclasses import asdict
from functools import cache
from typing import Any

from vitascope.recipe.schema import Recipe

SECTIONS = ("dino", "mae")  # each is for the objective of the same name


def recipe_yaml(recipe: Recipe) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(recipe_sections(recipe))


def recipe_sections(recipe: Recipe, every: bool = False) -> dict[str, Any]:
    """Return all settings as plain values, without the sections of unused objectives unless `every`."""
    unused = [] if every else [name for name in SECTIONS if name != recipe.train.objective]
    return {key: value for key, value in asdict(recipe).items() if key not in unused}


def chosen_settings(recipe: Recipe, every: bool = False) -> dict[str, Any]:
    """Return the settings that differ from the defaults. They identify a run or a study across versions."""
    return _without(recipe_sections(recipe, every), _defaults())


@cache
def _defaults() -> dict[str, Any]:
    return recipe_sections(Recipe(), every=True)


def flat(sections: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Flatten sections to `section.setting` -> value."""
    found: dict[str, Any] = {}
    for name, value in sections.items():
        found |= flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return found


def settings_of(sections: dict[str, Any]) -> dict[str, str]:
    """Return `section.setting` -> value as typed on the command line."""
    return {name: word(value) for name, value in flat(sections).items()}


def short_name(said: Any, digits: int = 16) -> str:
    """Return a hash of plain values in hexadecimal digits."""
    return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=digits // 2).hexdigest()


def _without(said: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Return only the values that differ from `plain`, section by section."""
    other = {key: value for key, value in said.items() if value != plain[key]}
    return {key: _without(value, plain[key]) if isinstance(value, dict) else value for key, value in other.items()}


def word(value: Any) -> str:
    """Format a value as typed on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(word, value))}]"
    return "null" if value is None else str(value)
