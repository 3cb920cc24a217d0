"""Spoilt images: as much as said, no more, and the same every time."""

import pytest
import torch

from vitascope.evaluation.robustness import (
    CORRUPTIONS,
    add_gaussian_noise,
    apply_gaussian_blur,
    reduce_contrast,
    shift_in_alternating_directions,
)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_spoiling_is_repeatable_keeps_the_shape_and_grows_with_the_level(name) -> None:
    kind = CORRUPTIONS[name]
    images = torch.rand(8, 3, 32, 32)
    distances = []
    for level in kind.scale_levels_to_image_size((32, 32)):
        spoilt = kind.apply(images, level, 5)
        assert spoilt.shape == images.shape and spoilt.min() >= 0 and spoilt.max() <= 1
        assert torch.equal(spoilt, kind.apply(images, level, 5))
        distances.append((spoilt - images).abs().mean().item())
    if name != "shift":  # of random pixels every shift is as far
        assert distances == sorted(distances)
    assert distances[0] > 0.005


def test_noise_has_the_spread_it_says_and_another_seed_is_other_noise() -> None:
    grey = torch.full((4, 1, 64, 64), 0.5)
    assert (add_gaussian_noise(grey, 0.1, 0) - 0.5).std().item() == pytest.approx(0.1, rel=0.03)
    assert not torch.equal(add_gaussian_noise(grey, 0.1, 0), add_gaussian_noise(grey, 0.1, 1))


def test_a_shift_moves_each_image_to_another_side_by_whole_pixels() -> None:
    dots = torch.zeros(4, 1, 7, 7)
    dots[:, :, 3, 3] = 1
    places = [tuple((image[0] == 1).nonzero()[0].tolist()) for image in shift_in_alternating_directions(dots, 2, 0)]
    assert sorted(places) == [(1, 3), (3, 1), (3, 5), (5, 3)]


def test_blur_spreads_a_dot_as_wide_as_it_says_and_leaves_a_plain_image() -> None:
    dot = torch.zeros(1, 1, 41, 41)
    dot[..., 20, 20] = 1
    across = apply_gaussian_blur(dot, 2.0, 0)[0, 0].sum(0)
    where = torch.arange(41) - 20.0
    assert (across * where**2).sum().sqrt().item() == pytest.approx(2.0, rel=0.03)
    plain = torch.full((1, 3, 8, 8), 0.3)
    torch.testing.assert_close(apply_gaussian_blur(plain, 2.0, 0), plain)


def test_fading_keeps_the_mean_and_takes_the_share_of_contrast_away() -> None:
    images = torch.rand(3, 3, 8, 8)
    faded = reduce_contrast(images, 0.4, 0)
    torch.testing.assert_close(faded.mean((1, 2, 3)), images.mean((1, 2, 3)))
    torch.testing.assert_close(faded.std((1, 2, 3)), 0.6 * images.std((1, 2, 3)))


def test_levels_in_pixels_grow_with_the_image() -> None:
    assert CORRUPTIONS["shift"].scale_levels_to_image_size((224, 224)) == [7, 14, 21, 28]
    assert CORRUPTIONS["noise"].scale_levels_to_image_size((224, 224)) == [0.05, 0.1, 0.15, 0.2]
