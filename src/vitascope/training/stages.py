"""weights=recipe:NAME -> the recipe whose run comes first: the same images held back, the same seed, its own epochs."""

from dataclasses import replace

from vitascope.errors import UserError
from vitascope.recipe.reading import read_recipe
from vitascope.recipe.schema import Recipe

STAGE = "recipe:"


def stage_before(recipe: Recipe) -> Recipe:
    """It learns from all training images that are not held back, also where the later stage uses a fraction."""
    first = read_recipe((recipe.weights or "").removeprefix(STAGE))
    if first.weights and first.weights.startswith(STAGE):
        raise UserError(f"weights={recipe.weights}: that recipe has a stage before it too. Two stages are the most.")
    own, later = first.data, recipe.data
    data = replace(
        own,
        name=later.name,
        root=later.root,
        download=later.download,
        validation=later.validation,
        strict=later.strict,
    )
    train = replace(first.train, seed=recipe.train.seed, device=recipe.train.device)
    return replace(first, data=data, train=train)
