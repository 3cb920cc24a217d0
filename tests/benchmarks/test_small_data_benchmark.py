"""What ways to learn from little data are held against does not move when the recipe they start from does."""

from argparse import Namespace

import pytest

from benchmarks import small_data
from vitascope.data.config import AugmentConfig, resolve_augmentation
from vitascope.recipe.reading import read_recipe
from vitascope.recipe.schema import Recipe, format_value_for_command_line


def read(arm: str, base: str) -> Recipe:
    asked = Namespace(
        base=base, data="cifar10", tune=True, labels=1.0, epochs=20, device="cpu", compile="never", lr=None
    )
    return read_recipe(
        "cifar10",
        [
            f"{key}={format_value_for_command_line(value)}"
            for key, value in small_data.make_settings(arm, asked).items()
        ],
    )


@pytest.mark.parametrize("arm", small_data.ARMS)
def test_every_arm_can_be_trained_with_the_default_augmentation_of_the_data(arm) -> None:
    recipe = read(arm, "plain")
    assert resolve_augmentation(recipe.data.augment, "cifar10") == resolve_augmentation(AugmentConfig(), "cifar10")
    assert recipe.model.initialize == ("mimetic" if "mimetic" in arm else "timm")


@pytest.mark.parametrize("arm", small_data.RECIPE_ARMS)
def test_arms_based_on_the_recipe_keep_its_settings(arm) -> None:
    recipe = read(arm, "recipe")
    assert (recipe.model.initialize, recipe.data.augment.randaugment) == ("conv_like", 2)
