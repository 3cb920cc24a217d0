"""The default augmentation of a user's own images depends on their size; that of published data does not."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitascope.data.config import NO_AUGMENTATION, NO_CROP, AugmentConfig, resolve_augmentation
from vitascope.recipe.choices import OBJECTIVE_SECTIONS, complete_augmentation_for_objective
from vitascope.recipe.reading import list_recipe_names, read_recipe
from vitascope.training.prepare import complete_recipe_and_load_data_and_weights, make_console

COLOURS = {"brightness": 0.2, "contrast": 0.2, "saturation": 0.2}
PHOTOS = replace(NO_AUGMENTATION, flip=0.5, shift=4, cutmix=1.0, mix_prob=0.5, **COLOURS)


def resolve_own_images(side: int, num_channels: int = 3) -> AugmentConfig:
    return resolve_augmentation(AugmentConfig(), "my/photos", num_channels, image_size=(side, side))


def test_defaults_of_own_images_by_hand() -> None:
    assert resolve_own_images(32) == PHOTOS and resolve_own_images(28) == PHOTOS
    assert [resolve_own_images(side).shift for side in (8, 16, 48, 63)] == [1, 2, 6, 8]
    assert resolve_own_images(64) == replace(PHOTOS, shift=0, crop_scale=(0.35, 1.0)) == resolve_own_images(224)
    assert [resolve_own_images(side, 1).shift for side in (4, 28, 32, 64, 224)] == [1, 2, 2, 4, 14]
    assert not resolve_own_images(224, 1).uses_crops
    wide = resolve_augmentation(AugmentConfig(), "my/photos", 3, image_size=(48, 200))
    assert wide.shift == 6 and not wide.uses_crops  # the shorter side counts


@given(st.integers(12, 63))
def test_a_shift_is_about_an_eighth_of_the_side(side) -> None:
    assert abs(resolve_own_images(side).shift - side / 8) <= 0.5


def test_a_setting_wins_over_the_default_of_the_size() -> None:
    requested = AugmentConfig(shift=3, crop_scale=NO_CROP)
    settings = resolve_augmentation(requested, "my/photos", 3, image_size=(224, 224))
    assert settings.shift == 3 and not settings.uses_crops


@pytest.mark.parametrize("name", list_recipe_names())
def test_the_augmentation_of_a_shipped_recipe_does_not_depend_on_the_image_size(name) -> None:
    recipe = read_recipe(name)
    found = [
        complete_augmentation_for_objective(
            recipe.data.augment, recipe.data.name, recipe.model.in_chans, recipe.train.objective, image_size
        )
        for image_size in ((32, 32), recipe.model.image_shape, (224, 224))
    ]
    assert found[0] == found[1] == found[2]
    if name == "tiny10-finetune":
        assert found[0] == PHOTOS


@pytest.mark.parametrize("objective", OBJECTIVE_SECTIONS)
def test_training_without_labels_crops_photos_as_before(objective) -> None:
    """DINO's own crops are not doubled."""
    small, large = (
        complete_augmentation_for_objective(AugmentConfig(), "my/photos", 3, objective, (side, side))
        for side in (32, 96)
    )
    assert small == large == complete_augmentation_for_objective(AugmentConfig(), "cifar10", 3, objective)


@pytest.mark.parametrize(("side", "shift", "crop_scale"), [(32, 4, NO_CROP), (96, 0, (0.35, 1.0))])
def test_a_run_stores_the_defaults_for_the_size_of_its_model(tmp_path, side, shift, crop_scale) -> None:
    for index in range(8):
        path = tmp_path / "photos" / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (50, 40), (30 * index, 0, 0)).save(path)
    words = [f"data.name={tmp_path / 'photos'}", f"model.img_size={side}", "data.validation=0"]
    recipe, _, _ = complete_recipe_and_load_data_and_weights(read_recipe("cifar10", words), make_console(quiet=True))
    assert (recipe.data.augment.shift, recipe.data.augment.crop_scale) == (shift, crop_scale)


def test_images_of_an_array_file_are_shifted_by_their_stored_size(tmp_path) -> None:
    """The model has 96 pixels, but the 32 stored pixels are shifted."""
    pixels = np.zeros((8, 32, 32, 3), np.uint8)
    np.savez(tmp_path / "x.npz", x_train=pixels, y_train=np.arange(8) % 2)
    words = [f"data.name={tmp_path / 'x.npz'}", "model.img_size=96", "data.validation=0"]
    recipe, _, _ = complete_recipe_and_load_data_and_weights(read_recipe("cifar10", words), make_console(quiet=True))
    assert recipe.data.augment.shift == 4 and not recipe.data.augment.uses_crops
