"""Augmentation: reference values from Pillow and torchvision; invariants of batches and mixing."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps
from torchvision.transforms.v2 import functional as tv

from vitascope import UserError
from vitascope.data import image_ops
from vitascope.data.augment import (
    apply_mixup_or_cutmix,
    erase_rectangles,
    flip_selected_images,
    make_unmixed_labels,
    shift_images,
)
from vitascope.data.config import NO_AUGMENTATION, AugmentConfig, resolve_augmentation
from vitascope.data.image_ops import (
    adjust_brightness,
    adjust_contrast,
    adjust_saturation,
    rotate_and_scale,
    rotate_hue,
    to_grayscale,
)
from vitascope.data.preprocessing import Preprocessing
from vitascope.data.sampling import (
    draw_epoch_augmentation_parameters,
    draw_epoch_depth_noise,
    draw_epoch_image_indices,
    select_step_draws,
)

GEOMETRY = replace(NO_AUGMENTATION, flip=0.5, shift=2, rotate=20.0, scale=0.2, erase=0.5)
EVERYTHING = replace(GEOMETRY, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.2, randaugment=2)
PREPROCESSING = Preprocessing((8, 10), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


def draw_stored_images(batch: int = 6, channels: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (batch, channels, 8, 10), dtype=torch.uint8)


def test_flipping_and_shifting_by_hand() -> None:
    image = torch.arange(9, dtype=torch.uint8).view(1, 1, 3, 3)
    assert flip_selected_images(image, torch.tensor([True]))[0, 0].tolist() == [[2, 1, 0], [5, 4, 3], [8, 7, 6]]
    assert torch.equal(flip_selected_images(image, torch.tensor([False])), image)
    assert shift_images(image, torch.tensor([[1, 0]]), "zero")[0, 0].tolist() == [[3, 4, 5], [6, 7, 8], [0, 0, 0]]
    assert shift_images(image, torch.tensor([[0, -1]]), "zero")[0, 0].tolist() == [[0, 0, 1], [0, 3, 4], [0, 6, 7]]
    assert shift_images(image, torch.tensor([[0, -1]]), "reflect")[0, 0].tolist() == [[1, 0, 1], [4, 3, 4], [7, 6, 7]]


@pytest.mark.parametrize("fill", ["zero", "reflect"])
def test_shifting_is_padding_and_cropping(fill) -> None:
    images = draw_stored_images(4)
    offsets = torch.tensor([[0, 0], [2, -1], [-2, 2], [1, 1]])
    mode = {"zero": "constant", "reflect": "reflect"}[fill]
    padded = torch.nn.functional.pad(images.float(), (2, 2, 2, 2), mode=mode).byte()
    for image, wide, (down, right) in zip(shift_images(images, offsets, fill), padded, offsets.tolist(), strict=True):
        assert torch.equal(image, wide[:, 2 + down : 10 + down, 2 + right : 12 + right])


@pytest.mark.parametrize(
    ("vitascope_op", "reference_op"),
    [
        (adjust_brightness, tv.adjust_brightness),
        (adjust_contrast, tv.adjust_contrast),
        (adjust_saturation, tv.adjust_saturation),
    ],
)
def test_colour_changes_are_torchvisions(vitascope_op, reference_op) -> None:
    images, factors = torch.rand(3, 3, 8, 10), [0.3, 1.0, 1.7]
    changed = vitascope_op(images, torch.tensor(factors))
    for image, expected, factor in zip(changed, images, factors, strict=True):
        torch.testing.assert_close(image, reference_op(expected, factor), atol=1e-3, rtol=0)


def test_hue_rotation_keeps_gray_and_a_third_of_a_turn_maps_red_to_green() -> None:
    red = torch.tensor([1.0, 0, 0]).view(1, 3, 1, 1)
    rotated = rotate_hue(red, torch.tensor([1 / 3]))
    torch.testing.assert_close(rotated, torch.tensor([0.0, 1, 0]).view(1, 3, 1, 1), atol=1e-6, rtol=0)
    plain = torch.full((1, 3, 2, 2), 0.4)
    torch.testing.assert_close(rotate_hue(plain, torch.tensor([0.21])), plain)


def to_pillow(image: torch.Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).numpy())


@pytest.mark.parametrize(
    ("vitascope_op", "reference_op", "levels"),
    [
        (image_ops.equalize, ImageOps.equalize, 0),
        (image_ops.autocontrast, ImageOps.autocontrast, 1),
        (lambda x: image_ops.posterize(x, 3), lambda image: ImageOps.posterize(image, 3), 0),
        (
            lambda x: image_ops.adjust_sharpness(x, torch.full((len(x),), 1.6)),
            lambda image: ImageEnhance.Sharpness(image).enhance(1.6),
            2,
        ),
    ],
    ids=["equalize", "autocontrast", "posterize", "sharpness"],
)
def test_randaugments_operations_are_pillows(vitascope_op, reference_op, levels) -> None:
    images = (draw_stored_images(4).float() * 0.6 + 30).byte()
    changed = (vitascope_op(images.float() / 255) * 255).round()
    for image, expected in zip(changed, images, strict=True):
        difference = image - torch.from_numpy(np.array(reference_op(to_pillow(expected)))).permute(2, 0, 1)
        assert difference.abs().max() <= levels


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("rotate", {"angle": 15.0, "translate": [0, 0], "shear": [0.0, 0.0]}),
        ("translate_x", {"angle": 0.0, "translate": [10 * 0.5 * 150 / 331, 0], "shear": [0.0, 0.0]}),
        ("translate_y", {"angle": 0.0, "translate": [0, 8 * 0.5 * 150 / 331], "shear": [0.0, 0.0]}),
    ],
)
def test_affine_operations_are_torchvisions(name, settings) -> None:
    images = torch.rand(2, 3, 8, 10)
    moved = image_ops.shear_shift_rotate(
        images, torch.tensor([[0.5 * (operation == name) for operation in image_ops.AFFINE_OPERATIONS]] * 2)
    )
    expected = tv.affine(images, scale=1.0, interpolation=tv.InterpolationMode.BILINEAR, **settings)
    inner = (slice(None), slice(None), slice(2, -2), slice(3, -3))
    torch.testing.assert_close(moved[inner], expected[inner], atol=1e-4, rtol=0)


def test_rotating_and_scaling_is_torchvisions_affine() -> None:
    images = torch.rand(1, 3, 9, 9)
    result = rotate_and_scale(images, torch.tensor([[0.3, 1.2]]))
    expected = tv.affine(
        images,
        angle=math.degrees(0.3),
        translate=[0, 0],
        scale=1.2,
        shear=[0.0, 0.0],
        interpolation=tv.InterpolationMode.BILINEAR,
    )
    torch.testing.assert_close(result[..., 2:-2, 2:-2], expected[..., 2:-2, 2:-2], atol=1e-4, rtol=0)


def test_randaugment_of_the_selected_images_equals_computing_all_and_selecting(monkeypatch) -> None:
    """The CPU and GPU implementations agree; the input images are unchanged."""
    images, operation = torch.rand(60, 3, 8, 10), torch.randint(len(image_ops.OPERATIONS), (60, 2))
    before, sign = images.clone(), torch.randint(2, (60, 2)) * 2.0 - 1
    alone = image_ops.apply_randaugment(images, operation, sign, magnitude=9.0)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(
        image_ops.apply_randaugment(images, operation, sign, magnitude=9.0), alone, atol=1e-6, rtol=0
    )
    assert torch.equal(images, before) and not torch.equal(alone, before)


def test_randaugment_of_magnitude_0_changes_nothing() -> None:
    images = torch.rand(12, 3, 8, 10)
    operation = torch.arange(12)[:, None]  # all but autocontrast and equalize
    out = image_ops.apply_randaugment((images * 255).round() / 255, operation, torch.ones(12, 1), magnitude=0.0)
    torch.testing.assert_close(out, (images * 255).round() / 255, atol=1e-5, rtol=0)


@given(seed=st.integers(0, 50), channels=st.sampled_from([1, 3]))
def test_augmenting_a_batch_equals_augmenting_each_image(seed, channels) -> None:
    images, labels = draw_stored_images(5, channels), torch.arange(5)
    preprocessing = Preprocessing((8, 10), PREPROCESSING.mean[:channels], PREPROCESSING.std[:channels])
    draws = select_step_draws(draw_epoch_augmentation_parameters(EVERYTHING, 1, 5, seed, 0), 0)
    together, _ = preprocessing.augment_and_mix(images, labels, draws, EVERYTHING)
    for index in range(5):
        alone = {name: draw[index : index + 1] for name, draw in draws.items()}
        one, _ = preprocessing.augment_and_mix(images[index : index + 1], labels[index : index + 1], alone, EVERYTHING)
        torch.testing.assert_close(one[0], together[index], atol=1e-5, rtol=0)


def test_every_image_and_every_epoch_has_its_own_draws() -> None:
    image = draw_stored_images(1).expand(32, -1, -1, -1)
    first = draw_epoch_augmentation_parameters(EVERYTHING, 1, 32, seed=3, epoch=0)
    again, later, other = (
        draw_epoch_augmentation_parameters(EVERYTHING, 1, 32, seed, epoch) for seed, epoch in ((3, 0), (3, 1), (4, 0))
    )
    varied, _ = PREPROCESSING.augment_and_mix(image, torch.zeros(32).long(), select_step_draws(first, 0), EVERYTHING)
    assert len(varied.flatten(1).unique(dim=0)) > 24
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["erase"], later["erase"]) and not torch.equal(first["erase"], other["erase"])


def test_depth_noise_is_uniform_and_new_for_every_seed_epoch_and_view() -> None:
    noise = draw_epoch_depth_noise(4, num_steps=10, batch_size=50, seed=3, epoch=0)
    assert noise.shape == (10, 50, 4) and noise.dtype == torch.float32 and noise.min() >= 0 and noise.max() < 1
    assert noise.mean() == pytest.approx(0.5, abs=0.03) and noise.std() == pytest.approx(12**-0.5, abs=0.02)
    assert torch.equal(noise, draw_epoch_depth_noise(4, 10, 50, 3, 0))
    others = [draw_epoch_depth_noise(4, 10, 50, seed, epoch) for seed, epoch in ((3, 1), (4, 0))]
    others += [draw_epoch_depth_noise(4, 10, 50, 3, 0, view_index=view) for view in (1, 2)]
    assert len({draw.sum().item() for draw in [noise, *others]}) == 5


def test_an_epoch_is_a_permutation_unless_sampling_probabilities_are_given() -> None:
    order = draw_epoch_image_indices(10, 3, 3, seed=0, epoch=0)
    assert order.shape == (3, 3) and len(order.unique()) == 9
    weights = np.array([0.5, 0.5, *[0.0] * 8])
    again = draw_epoch_image_indices(10, 5, 4, seed=0, epoch=0)  # twice all of them
    assert again.flatten().bincount().tolist() == [2] * 10 and len(set(again.flatten()[:10].tolist())) == 10
    assert set(draw_epoch_image_indices(10, 3, 3, 0, 0, weights).flatten().tolist()) <= {0, 1}


@given(seed=st.integers(0, 99))
def test_the_mixed_label_is_the_mixed_area(seed) -> None:
    policy = replace(NO_AUGMENTATION, cutmix=1.0, mix_prob=0.7)
    draw = select_step_draws(draw_epoch_augmentation_parameters(policy, 1, 8, seed, 0), 0)["mix"]
    colours = torch.arange(8.0)[:, None, None, None].expand(8, 1, 8, 10)
    mixed, target = apply_mixup_or_cutmix(colours.contiguous(), torch.arange(8), draw)
    own_fraction = (mixed == colours).float().mean(dim=(1, 2, 3))
    torch.testing.assert_close(target.lam, own_fraction, atol=1e-6, rtol=0)
    probabilities = target.compute_probabilities(8)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(8))
    torch.testing.assert_close(probabilities.diagonal(), own_fraction, atol=1e-6, rtol=0)


@given(seed=st.integers(0, 99))
def test_mixup_of_constants_is_their_weighted_mean(seed) -> None:
    draw = select_step_draws(draw_epoch_augmentation_parameters(replace(NO_AUGMENTATION, mixup=0.4), 1, 6, seed, 0), 0)[
        "mix"
    ]
    colours = torch.arange(6.0)[:, None, None, None].expand(6, 3, 4, 4)
    mixed, target = apply_mixup_or_cutmix(colours.contiguous(), torch.arange(6), draw)
    torch.testing.assert_close(
        mixed[:, 0, 0, 0], target.compute_probabilities(6) @ torch.arange(6.0), atol=1e-5, rtol=0
    )
    assert (target.lam < 1).any()


def test_kinds_of_mixing_have_the_requested_frequencies() -> None:
    kinds = draw_epoch_augmentation_parameters(
        replace(NO_AUGMENTATION, mixup=1.0, cutmix=1.0, mix_prob=0.5), 1, 4000, 0, 0
    )["mix"][0, :, 0]
    frequencies = [(kinds == kind).float().mean().item() for kind in (0, 1, 2)]
    assert frequencies == pytest.approx([0.5, 0.25, 0.25], abs=0.04)


def test_labels_are_one_hot_without_mixing() -> None:
    assert torch.equal(
        make_unmixed_labels(torch.tensor([2, 0])).compute_probabilities(3), torch.tensor([[0.0, 0, 1], [1, 0, 0]])
    )


@given(seed=st.integers(0, 99))
def test_erasing_sets_a_rectangle_of_the_requested_area_in_selected_images_only(seed) -> None:
    draw = torch.rand(16, 5, generator=torch.Generator().manual_seed(seed))
    erased = erase_rectangles(torch.ones(16, 1, 16, 16), draw, probability=0.5, max_area=0.33)
    erased_fraction = 1 - erased.mean(dim=(1, 2, 3))
    is_selected = draw[:, 0] < 0.5
    assert (erased_fraction[~is_selected] == 0).all()
    assert (erased_fraction[is_selected] > 0).all() and (erased_fraction[is_selected] < 0.42).all()
    rows, columns = (erased == 0).any(3).sum((1, 2)), (erased == 0).any(2).sum((1, 2))
    assert torch.equal((rows * columns).float() / 256, erased_fraction)


def test_preprocessing_normalises_resizes_and_converts_channels() -> None:
    images = draw_stored_images()
    plain = PREPROCESSING(images)
    torch.testing.assert_close(plain[:, 1], (images[:, 1].float() / 255 - 0.4) / 0.3)
    torch.testing.assert_close(PREPROCESSING.denormalize(plain), images.float() / 255, atol=1e-6, rtol=0)
    assert Preprocessing((4, 4), (0.5,), (0.5,))(images).shape == (6, 1, 4, 4)
    assert Preprocessing((16, 16), PREPROCESSING.mean, PREPROCESSING.std)(images[:, :1]).shape == (6, 3, 16, 16)
    torch.testing.assert_close(to_grayscale(images.float()), tv.rgb_to_grayscale(images.float()), atol=0.2, rtol=0)


def test_a_policy_completes_the_settings_and_digits_are_never_flipped() -> None:
    settings = resolve_augmentation(AugmentConfig(shift=1), "cifar10")
    assert (settings.shift, settings.flip) == (1, 0.5)
    assert resolve_augmentation(AugmentConfig(), "mnist").flip == 0
    assert (
        resolve_augmentation(AugmentConfig(), "my/signs", num_channels=1).flip == 0
        and resolve_augmentation(AugmentConfig(), "my/photos").flip == 0.5
    )
    with pytest.raises(UserError, match="a mirrored digit is a different symbol"):
        resolve_augmentation(AugmentConfig(flip=0.5), "mnist")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"flip": 1.5}, "data.augment.flip=1.5 must be at least 0 and at most 1"),
        ({"shift": -1}, "data.augment.shift=-1 must be at least 0 and at most 1000"),
        ({"shift_fill": "mirror"}, "shift_fill='mirror' is unknown"),
    ],
)
def test_impossible_augmentation_settings_are_errors(settings, sentence) -> None:
    with pytest.raises(UserError, match=sentence):
        AugmentConfig(**settings)
