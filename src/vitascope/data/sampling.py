"""Seed and epoch -> every random number of that epoch, drawn ahead of the steps that use them.

Each epoch has a generator of its own, made from (seed, epoch): a resumed run draws what an uninterrupted one would.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitascope.data.config import AugmentConfig

RandomDraws = dict[str, Tensor]  # name -> one draw per image of a batch


def draw_epoch_order(
    num_images: int,
    num_steps: int,
    batch_size: int,
    seed: int,
    epoch: int,
    sampling_probabilities: NDArray[Any] | None = None,
) -> Tensor:
    """step × image: which images each step sees. With weights by chance; without, all of them in a new order, and those
    again in another where the steps need more."""
    rng = np.random.default_rng([seed, epoch, 0])
    if sampling_probabilities is None:
        times = -(-num_steps * batch_size // num_images)
        chosen = np.concatenate([rng.permutation(num_images) for _ in range(times)])[: num_steps * batch_size]
    else:
        chosen = rng.choice(num_images, size=num_steps * batch_size, p=sampling_probabilities)
    return torch.from_numpy(chosen).view(num_steps, batch_size)


def draw_epoch_augmentation(
    policy: AugmentConfig, num_steps: int, batch_size: int, seed: int, epoch: int, *, view_index: int = 0
) -> RandomDraws:
    """name -> step × image (…): only what the policy uses. Another `view` of the same images has its own draws."""
    rng = np.random.default_rng([seed, epoch, 1, view_index] if view_index else [seed, epoch, 1])
    shape = (num_steps, batch_size)
    shift, rounds, flip, hue = policy.shift or 0, policy.randaugment or 0, policy.flip or 0.0, policy.hue or 0.0
    parts = {
        "flip": (flip, lambda: rng.random(shape) < flip),
        "shift": (shift, lambda: rng.integers(-shift, shift + 1, (*shape, 2))),
        "crop": (policy.uses_crops, lambda: rng.random((*shape, 4))),
        "warp": (policy.rotate or policy.scale, lambda: _draw_angles_and_scales(rng, policy, shape)),
        "brightness": (policy.brightness, lambda: _draw_factors(rng, policy.brightness, shape)),
        "contrast": (policy.contrast, lambda: _draw_factors(rng, policy.contrast, shape)),
        "saturation": (policy.saturation, lambda: _draw_factors(rng, policy.saturation, shape)),
        "hue": (hue, lambda: rng.uniform(-hue, hue, shape)),
        "grey": (policy.grayscale, lambda: rng.random(shape) < (policy.grayscale or 0.0)),
        "solarize": (policy.solarize, lambda: rng.random(shape) < (policy.solarize or 0.0)),
        "operation": (rounds, lambda: rng.integers(0, 14, (*shape, rounds))),
        "sign": (rounds, lambda: rng.integers(0, 2, (*shape, rounds)) * 2.0 - 1),
        "erase": (policy.erase, lambda: rng.random((*shape, 5))),
        "mix": ((policy.mixup or policy.cutmix) and policy.mix_prob, lambda: _draw_mixing(rng, policy, shape)),
    }
    made = {name: torch.from_numpy(np.asarray(make())) for name, (used, make) in parts.items() if used}
    return {name: draw.float() if draw.is_floating_point() else draw for name, draw in made.items()}


def draw_alternating_flips(
    order: Tensor, num_images: int, flip_probability: float, seed: int, first_pass_index: int
) -> Tensor:
    """step × image: who is mirrored. By chance in the first turn (numbered 0) over all images, then as it was not in
    the turn before: two show every image from both sides (Jordan 2024, arXiv 2404.00498)."""
    at_first = torch.from_numpy(np.random.default_rng([seed, 0, 3]).random(num_images) < flip_probability)
    turns = first_pass_index + torch.arange(order.numel()).view_as(order) // num_images  # an epoch may have several
    return at_first[order] ^ (turns % 2).bool()


def draw_epoch_noise(num_patches: int, num_steps: int, batch_size: int, seed: int, epoch: int) -> Tensor:
    """step × image × number, evenly between 0 and 1: which patches are hidden."""
    return torch.from_numpy(
        np.random.default_rng([seed, epoch, 2]).random((num_steps, batch_size, num_patches), dtype=np.float32)
    )


def select_step_draws(draws: RandomDraws, step_index: int) -> RandomDraws:
    return {name: draw[step_index] for name, draw in draws.items()}


def _draw_angles_and_scales(rng: np.random.Generator, policy: AugmentConfig, shape: tuple[int, int]) -> NDArray[Any]:
    """(angle in radians, factor) per image."""
    angle = np.deg2rad(policy.rotate or 0.0)
    return np.stack([rng.uniform(-angle, angle, shape), _draw_factors(rng, policy.scale, shape)], axis=-1)


def _draw_factors(rng: np.random.Generator, max_deviation: float | None, shape: tuple[int, int]) -> NDArray[Any]:
    """Around 1, by up to `spread`."""
    return rng.uniform(1 - (max_deviation or 0.0), 1 + (max_deviation or 0.0), shape)


def _draw_mixing(rng: np.random.Generator, policy: AugmentConfig, shape: tuple[int, int]) -> NDArray[Any]:
    """(kind, own share, row, column) per image; kind 0: not mixed, 1: MixUp, 2: CutMix."""
    mixup, cutmix = policy.mixup or 0.0, policy.cutmix or 0.0
    cuts = rng.random(shape) < (0.5 if mixup and cutmix else float(cutmix > 0))
    share = np.where(cuts, rng.beta(cutmix or 1, cutmix or 1, shape), rng.beta(mixup or 1, mixup or 1, shape))
    mixed = rng.random(shape) < (policy.mix_prob or 0.0)
    kind = np.where(mixed, 1 + cuts, 0)
    return np.stack([kind, share, rng.random(shape), rng.random(shape)], axis=-1)
