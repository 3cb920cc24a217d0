"""Draw an epoch's image order and augmentation in advance, from the seed and the epoch.

Each epoch has its own generator, seeded with (seed, epoch), so a resumed run draws the same numbers as an uninterrupted
one.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from vitascope.data.config import AugmentConfig

RandomDraws = dict[str, Tensor]  # name -> one draw per image of a batch


def draw_epoch_image_indices(
    num_images: int,
    num_steps: int,
    batch_size: int,
    seed: int,
    epoch: int,
    sampling_probabilities: NDArray[Any] | None = None,
) -> Int[Tensor, "step image"]:
    """Return the image indices of each step, step × image.

    With `sampling_probabilities`, images are drawn with replacement. Otherwise it is a permutation of all images,
    followed by further permutations if the steps need more."""
    rng = np.random.default_rng([seed, epoch, 0])
    if sampling_probabilities is None:
        num_passes = -(-num_steps * batch_size // num_images)
        order = np.concatenate([rng.permutation(num_images) for _ in range(num_passes)])[: num_steps * batch_size]
    else:
        order = rng.choice(num_images, size=num_steps * batch_size, p=sampling_probabilities)
    return torch.from_numpy(order).view(num_steps, batch_size)


def draw_epoch_augmentation_parameters(
    policy: AugmentConfig, num_steps: int, batch_size: int, seed: int, epoch: int, *, view_index: int = 0
) -> RandomDraws:
    """Return the draws that the policy uses, name -> step × image (× …). Each `view_index` has its own draws."""
    rng = np.random.default_rng([seed, epoch, 1, view_index] if view_index else [seed, epoch, 1])
    shape = (num_steps, batch_size)
    shift, rounds, flip, hue = policy.shift or 0, policy.randaugment or 0, policy.flip or 0.0, policy.hue or 0.0
    draw_functions = {
        "flip": (flip, lambda: rng.random(shape) < flip),
        "shift": (shift, lambda: rng.integers(-shift, shift + 1, (*shape, 2))),
        "crop": (policy.uses_crops, lambda: rng.random((*shape, 4))),
        "warp": (policy.rotate or policy.scale, lambda: _draw_angles_and_scales(rng, policy, shape)),
        "brightness": (policy.brightness, lambda: _draw_factors_around_one(rng, policy.brightness, shape)),
        "contrast": (policy.contrast, lambda: _draw_factors_around_one(rng, policy.contrast, shape)),
        "saturation": (policy.saturation, lambda: _draw_factors_around_one(rng, policy.saturation, shape)),
        "hue": (hue, lambda: rng.uniform(-hue, hue, shape)),
        "grayscale": (policy.grayscale, lambda: rng.random(shape) < (policy.grayscale or 0.0)),
        "solarize": (policy.solarize, lambda: rng.random(shape) < (policy.solarize or 0.0)),
        "operation": (rounds, lambda: rng.integers(0, 14, (*shape, rounds))),
        "sign": (rounds, lambda: rng.integers(0, 2, (*shape, rounds)) * 2.0 - 1),
        "erase": (policy.erase, lambda: rng.random((*shape, 5))),
        "mix": (
            (policy.mixup or policy.cutmix) and policy.mix_prob,
            lambda: _draw_mixup_cutmix_parameters(rng, policy, shape),
        ),
    }
    draws = {
        name: torch.from_numpy(np.asarray(draw_values()))
        for name, (is_used, draw_values) in draw_functions.items()
        if is_used
    }
    return {name: draw.float() if draw.is_floating_point() else draw for name, draw in draws.items()}


def draw_alternating_flips(
    order: Tensor, num_images: int, flip_probability: float, seed: int, first_pass_index: int
) -> Bool[Tensor, "step image"]:
    """Return which images are flipped, step × image: at random in pass 0, then alternating from pass to pass.

    Two passes show every image in both orientations (Jordan 2024, arXiv 2404.00498)."""
    first_flips = torch.from_numpy(np.random.default_rng([seed, 0, 3]).random(num_images) < flip_probability)
    pass_indices = first_pass_index + torch.arange(order.numel()).view_as(order) // num_images
    return first_flips[order] ^ (pass_indices % 2).bool()


def draw_epoch_patch_noise(
    num_patches: int, num_steps: int, batch_size: int, seed: int, epoch: int
) -> Float[Tensor, "step image patch"]:
    """Return uniform noise from 0 to 1, step × image × patch, which selects the hidden patches."""
    return torch.from_numpy(
        np.random.default_rng([seed, epoch, 2]).random((num_steps, batch_size, num_patches), dtype=np.float32)
    )


def draw_epoch_depth_noise(
    num_branches: int, num_steps: int, batch_size: int, seed: int, epoch: int, *, view_index: int = 0
) -> Float[Tensor, "step image branch"]:
    """Return uniform noise from 0 to 1, step × image × residual branch, which selects the branches that are dropped.

    Each `view_index` has its own draws."""
    rng = np.random.default_rng([seed, epoch, 4, view_index] if view_index else [seed, epoch, 4])
    return torch.from_numpy(rng.random((num_steps, batch_size, num_branches), dtype=np.float32))


def select_step_draws(draws: RandomDraws, step_index: int) -> RandomDraws:
    """Return the draws of one step."""
    return {name: draw[step_index] for name, draw in draws.items()}


def _draw_angles_and_scales(rng: np.random.Generator, policy: AugmentConfig, shape: tuple[int, int]) -> NDArray[Any]:
    """Return (angle in radians, factor) per image."""
    angle = np.deg2rad(policy.rotate or 0.0)
    return np.stack([rng.uniform(-angle, angle, shape), _draw_factors_around_one(rng, policy.scale, shape)], axis=-1)


def _draw_factors_around_one(
    rng: np.random.Generator, max_deviation: float | None, shape: tuple[int, int]
) -> NDArray[Any]:
    """Return factors between 1 - `max_deviation` and 1 + `max_deviation`."""
    return rng.uniform(1 - (max_deviation or 0.0), 1 + (max_deviation or 0.0), shape)


def _draw_mixup_cutmix_parameters(
    rng: np.random.Generator, policy: AugmentConfig, shape: tuple[int, int]
) -> NDArray[Any]:
    """Return (kind, λ, row, column) per image; kind 0: not mixed, 1: MixUp, 2: CutMix."""
    mixup, cutmix = policy.mixup or 0.0, policy.cutmix or 0.0
    is_cutmix = rng.random(shape) < (0.5 if mixup and cutmix else float(cutmix > 0))
    lam = np.where(is_cutmix, rng.beta(cutmix or 1, cutmix or 1, shape), rng.beta(mixup or 1, mixup or 1, shape))
    is_mixed = rng.random(shape) < (policy.mix_prob or 0.0)
    kind = np.where(is_mixed, 1 + is_cutmix, 0)
    return np.stack([kind, lam, rng.random(shape), rng.random(shape)], axis=-1)
