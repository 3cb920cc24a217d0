"""A Recipe -> YAML that holds every setting, so that a run can be run again from it."""

from vitascope.recipe.schema import Recipe


def recipe_yaml(recipe: Recipe) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(recipe))
