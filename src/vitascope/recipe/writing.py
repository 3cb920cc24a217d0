"""A Recipe -> YAML that holds every setting, so that a run can be run again from it; a value -> its word."""

from typing import Any

from vitascope.recipe.schema import Recipe


def recipe_yaml(recipe: Recipe) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(recipe))


def word(value: Any) -> str:
    """As it is typed on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(word, value))}]"
    return "null" if value is None else str(value)
