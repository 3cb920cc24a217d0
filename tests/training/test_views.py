"""Views at test time: which pixels each copy shows, with which weights, and for which runs."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from vitascope import ModelConfig, UserError, VisionTransformer
from vitascope.data.augment import shift_images
from vitascope.data.config import AugmentConfig
from vitascope.data.preprocessing import Preprocessing
from vitascope.inference.hardware import make_float32_inference_hardware
from vitascope.inference.scoring import (
    VIEW_DESCRIPTIONS,
    VIEWS,
    check_views_match_training,
    compute_logits,
    compute_outputs_in_batches,
    make_shifted_and_mirrored_views,
)
from vitascope.recipe.reading import read_recipe
from vitascope.records.record import _format_train_and_record_command

STORED = torch.randint(0, 256, (7, 3, 9, 9), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
PREPARE = Preprocessing((8, 8), (0.4, 0.5, 0.6), (0.2, 0.3, 0.25))  # another size than the stored images'


@pytest.fixture
def model() -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(
        ModelConfig(img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2, num_classes=5)
    ).eval()


def test_one_and_two_views_are_bit_identical_to_the_image_s_and_the_mirror_image_s_logits(model) -> None:
    hardware = make_float32_inference_hardware(model)
    plain = compute_outputs_in_batches(model, model, STORED, PREPARE, hardware, 3)
    mirrored = compute_outputs_in_batches(model, model, STORED, lambda part: PREPARE(part).flip(-1), hardware, 3)
    assert torch.equal(compute_logits(model, STORED, PREPARE, hardware, batch_size=3), plain)
    assert torch.equal(
        compute_logits(model, STORED, PREPARE, hardware, batch_size=3, num_views=2), (plain + mirrored) / 2
    )


@pytest.mark.parametrize(
    ("views", "centre", "corners"),
    [(6, 1 / 4, {(0, 0): 1 / 8, (2, 2): 1 / 8}), (10, 1 / 10, dict.fromkeys([(0, 0), (0, 2), (2, 0), (2, 2)], 1 / 10))],
)
def test_six_and_ten_views_are_a_weighted_mean_written_by_hand(model, views, centre, corners) -> None:
    model.eval()
    padded = F.pad(PREPARE.scale_and_resize(STORED), (1, 1, 1, 1), mode="reflect")  # before normalising: the same
    expected = torch.zeros(7, 5)
    with torch.no_grad():
        for (row, column), weight in {(1, 1): centre, **corners}.items():
            image = PREPARE.normalize(padded[:, :, row : row + 8, column : column + 8])
            expected += weight * (model(image) + model(image.flip(-1)))
    logits = compute_logits(
        model, STORED, PREPARE, make_float32_inference_hardware(model), batch_size=4, num_views=views
    )
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-5)
    assert (logits - compute_logits(model, STORED, PREPARE, make_float32_inference_hardware(model))).abs().max() > 1e-3


class OnePixel(torch.nn.Module):
    """Answers with the value of one pixel and keeps what it saw."""

    def __init__(self, row: int, column: int) -> None:
        super().__init__()
        self.place, self.seen = (row, column), []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        row, column = self.place
        self.seen.append(int(images[0, 0, row, column]))
        return images[:, :, row, column]


@pytest.mark.parametrize(
    ("place", "views", "seen", "mean"),
    [
        ((1, 1), 2, [11, 12], 11.5),
        ((1, 1), 6, [11, 12, 0, 1, 22, 23], (11 + 12) / 4 + (0 + 1 + 22 + 23) / 8),
        ((0, 0), 6, [0, 3, 11, 12, 11, 12], (0 + 3) / 4 + (11 + 12 + 11 + 12) / 8),  # −1 is row 1 mirrored at the edge
        ((1, 1), 10, [11, 12, 0, 1, 22, 23, 2, 3, 20, 21], 11.5),
    ],
)
def test_a_model_of_one_pixel_sees_exactly_the_shifted_and_mirrored_pixels(place, views, seen, mean) -> None:
    """Pixel (r, c) of the image is 10 r + c. A mirrored view shows column 3 − c of its shifted image."""
    image = torch.tensor([[10.0 * row + column for column in range(4)] for row in range(4)])[None, None]
    pixel = OnePixel(*place).eval()
    hardware = make_float32_inference_hardware(torch.nn.Linear(1, 1))
    logits = compute_logits(
        pixel, torch.zeros(1, 1, 4, 4, dtype=torch.uint8), lambda _: image, hardware, num_views=views
    )
    assert pixel.seen == seen and logits.item() == mean


def test_a_view_is_shifted_as_the_augmentation_that_fills_by_reflection_shifts() -> None:
    images = torch.randn(3, 2, 6, 5)
    for view, copy in zip(VIEWS[10], make_shifted_and_mirrored_views(images, VIEWS[10]), strict=True):
        expected = shift_images(images, torch.tensor([view.shift]).expand(3, 2), "reflect")
        assert torch.equal(copy, expected.flip(-1) if view.mirrored else expected)


def test_the_images_are_prepared_once_for_all_views(model) -> None:
    calls = []
    compute_logits(
        model,
        STORED,
        lambda part: calls.append(0) or PREPARE(part),
        make_float32_inference_hardware(model),
        batch_size=4,
        num_views=10,
    )
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("views", "augment", "sentence"),
    [
        (0, {}, "views=0 is not available. Choose 1"),
        (3, {}, "views=3 is not available. Choose 1"),
        (2, {"flip": 0.0}, "views=2 adds the mirror image, .* data.augment.flip=0. Use views=1"),
        (6, {"flip": 0.0}, "views=6 adds the mirror image"),
        (6, {"shift": 0}, "views=6 adds shifted images, .* data.augment.shift=0. Use views=2"),
        (10, {"shift": 0}, "views=10 adds shifted images"),
    ],
)
def test_views_that_do_not_exist_or_that_a_run_never_saw_are_refused(views, augment, sentence) -> None:
    recipe = read_recipe("cifar10")
    seen = AugmentConfig(**({"flip": 0.5, "shift": 4} | augment))
    with pytest.raises(UserError, match=sentence):
        check_views_match_training(replace(recipe, data=replace(recipe.data, augment=seen)), views)


def test_a_command_line_error_names_the_option_that_was_typed() -> None:
    recipe = read_recipe("digits")
    with pytest.raises(UserError, match=r"--views 6 adds the mirror image.*Use --views 1"):
        check_views_match_training(replace(recipe, data=replace(recipe.data, augment=AugmentConfig())), 6, "--views {}")


def test_a_run_that_saw_mirrored_and_shifted_images_takes_all_views_which_all_have_words() -> None:
    recipe = read_recipe("cifar10")
    seen = replace(recipe, data=replace(recipe.data, augment=AugmentConfig(flip=0.5, shift=1)))
    for views, chosen in VIEWS.items():
        check_views_match_training(seen, views)
        assert len(chosen) == len(set(chosen)) == views
    assert list(VIEW_DESCRIPTIONS) == list(VIEWS)
    assert _format_train_and_record_command(recipe, [1], "mine", 6).endswith("--name mine --views 6")
    assert "--views" not in _format_train_and_record_command(recipe, [1], "mine", 1)
