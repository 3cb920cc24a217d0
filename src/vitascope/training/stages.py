"""weights=recipe:NAME: the recipe of the first stage, with the same held-out images and seed, and its own epochs."""

from dataclasses import replace

from vitascope.errors import UserError
from vitascope.recipe.reading import read_recipe
from vitascope.recipe.schema import Recipe

STAGE = "recipe:"


def stage_before(recipe: Recipe) -> Recipe:
    """The recipe of the first stage. It uses all training images that are not held out, without data.fraction."""
    first = read_recipe((recipe.weights or "").removeprefix(STAGE))
    if first.weights and first.weights.startswith(STAGE):
        raise UserError(
            f"weights={recipe.weights}: that recipe has an earlier stage itself. At most two stages are supported."
        )
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
