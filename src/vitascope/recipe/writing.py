"""Write a recipe as YAML with every setting, so that a run can be repeated; format a value as typed."""

import hashlib
import json
from dataclasses import asdict
from functools import cache
from typing import Any

from vitascope.recipe.schema import Recipe

OBJECTIVE_SECTIONS = ("dino", "mae")  # each is for the objective of the same name


def format_recipe_yaml(recipe: Recipe) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(convert_recipe_to_dict(recipe))


def convert_recipe_to_dict(recipe: Recipe, all_sections: bool = False) -> dict[str, Any]:
    """Return all settings as plain values, without the sections of unused objectives unless `all_sections`."""
    unused = [] if all_sections else [name for name in OBJECTIVE_SECTIONS if name != recipe.train.objective]
    return {key: value for key, value in asdict(recipe).items() if key not in unused}


def find_non_default_settings(recipe: Recipe, all_sections: bool = False) -> dict[str, Any]:
    """Return the settings that differ from the defaults. They identify a run or a study across versions."""
    return _remove_defaults(convert_recipe_to_dict(recipe, all_sections), _get_default_settings())


@cache
def _get_default_settings() -> dict[str, Any]:
    return convert_recipe_to_dict(Recipe(), all_sections=True)


def flatten_sections(sections: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten sections to `section.setting` -> value."""
    settings: dict[str, Any] = {}
    for name, value in sections.items():
        settings |= (
            flatten_sections(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
        )
    return settings


def flatten_and_format_settings(sections: dict[str, Any]) -> dict[str, str]:
    """Return `section.setting` -> value as typed on the command line."""
    return {name: format_value(value) for name, value in flatten_sections(sections).items()}


def hash_values(values: Any, num_digits: int = 16) -> str:
    """Return a hash of plain values in hexadecimal digits."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=num_digits // 2).hexdigest()


def _remove_defaults(settings: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return only the values that differ from the defaults, section by section."""
    changed = {key: value for key, value in settings.items() if value != defaults[key]}
    return {
        key: _remove_defaults(value, defaults[key]) if isinstance(value, dict) else value
        for key, value in changed.items()
    }


def format_value(value: Any) -> str:
    """Format a value as typed on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(format_value, value))}]"
    return "null" if value is None else str(value)
