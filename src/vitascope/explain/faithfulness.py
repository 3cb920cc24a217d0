"""Measure the faithfulness of explanations by deletion and insertion (Petsiuk et al. 2018, RISE).

Patches are changed one at a time, most important first, and the probability of the explained class is recorded.
Deletion makes patches grey (0 after normalisation); a smaller area under the curve is better.
Insertion restores patches of a blurred image; a larger area is better.
On grids of more than 64 patches, the curves have 29 evenly spaced points instead of one per patch.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.explain.attribution import (
    OCCLUSION_BATCH_SIZE,
    AttributionInputs,
    build_attribution_inputs,
    predict_probabilities,
)
from vitascope.explain.maps import TokenLayout
from vitascope.explain.methods import METHODS
from vitascope.shapes import Images, PatchHeatmap, ProbabilityCurves, TargetClasses, TokenIndices

MAX_PATCHES_WITH_ALL_POINTS = 64  # on larger grids the curves are sampled
NUM_SAMPLED_INTERVALS = 28  # between the points of a sampled curve: 7 of 196 patches


@dataclass(frozen=True)
class Faithfulness:
    """Mean areas under the curves of one method, and their standard errors over the images."""

    method: str
    deletion: float
    deletion_error: float  # NaN for one image
    insertion: float
    insertion_error: float
    images: int


class FaithfulnessCurves(NamedTuple):
    """The probability of the explained class, by image and point: see `choose_numbers_of_changed_patches`."""

    deletion: ProbabilityCurves
    insertion: ProbabilityCurves


class MeanAndError(NamedTuple):
    mean: float
    standard_error: float  # NaN for one image


def sort_patches_by_importance(heatmap: PatchHeatmap) -> TokenIndices:
    """Return the patches from most to least important; ties are in reading order."""
    return heatmap.flatten(1).argsort(dim=1, descending=True, stable=True)


def choose_numbers_of_changed_patches(num_patches: int) -> Tensor:
    """Return the number of changed patches at each point of a curve, from none to all."""
    if num_patches <= MAX_PATCHES_WITH_ALL_POINTS:
        return torch.arange(num_patches + 1)
    return torch.linspace(0, num_patches, NUM_SAMPLED_INTERVALS + 1).round().long()


def count_curve_passes(num_patches: int) -> int:
    """Return the forward passes per image for the deletion and the insertion curve of a method."""
    return 2 * len(choose_numbers_of_changed_patches(num_patches))


def count_forward_passes(methods: list[str], num_patches: int, num_images: int) -> int:
    """Return the forward passes of explaining images with these methods, and of the curves of each and of a random
    order. Passes that record attention are not counted."""
    passes = 2 + (1 + len(methods)) * count_curve_passes(num_patches)  # 2: predictions
    for method in map(METHODS.__getitem__, methods):
        passes += method.num_passes + (1 + num_patches if method.needs_pass_per_patch else 0)
    return num_images * passes


def describe_curve_sampling(num_patches: int) -> str:
    """Return a sentence about sampled curves; empty if every number of changed patches is measured."""
    if num_patches <= MAX_PATCHES_WITH_ALL_POINTS:
        return ""
    return f"Each curve has {NUM_SAMPLED_INTERVALS + 1} points, evenly spaced from 0 to {num_patches} changed patches."


@torch.no_grad()
def compute_probabilities_while_replacing_patches(
    model: nn.Module,
    images: Images,
    patch_order: TokenIndices,
    targets: TargetClasses,
    layout: TokenLayout,
    replacement_images: Images,
) -> ProbabilityCurves:
    """Return the class's probability at each point, as patches are replaced by those of `replacement_images`."""
    height, width = images.shape[2] // layout.rows, images.shape[3] // layout.columns
    step_by_patch = torch.empty_like(patch_order)
    step_by_patch.scatter_(
        1, patch_order, torch.arange(patch_order.shape[1], device=patch_order.device).expand_as(patch_order)
    )
    num_changed = choose_numbers_of_changed_patches(layout.num_patches).to(images.device)[:, None, None, None]
    curves = []
    for image, replacement, patch_steps, target in zip(
        images, replacement_images, step_by_patch, targets.tolist(), strict=True
    ):
        pixel_steps = (
            patch_steps.unflatten(0, (layout.rows, layout.columns))
            .repeat_interleave(height, 0)
            .repeat_interleave(width, 1)
        )
        changed_images = torch.where(pixel_steps < num_changed, replacement, image)
        curves.append(
            torch.cat(
                [predict_probabilities(model, batch)[:, target] for batch in changed_images.split(OCCLUSION_BATCH_SIZE)]
            )
        )
    return torch.stack(curves)


def deletion(
    model: nn.Module, images: Images, heatmap: PatchHeatmap, targets: TargetClasses, layout: TokenLayout
) -> ProbabilityCurves:
    """Make the most important patch grey first."""
    return compute_probabilities_while_replacing_patches(
        model, images, sort_patches_by_importance(heatmap), targets, layout, torch.zeros_like(images)
    )


def insertion(
    model: nn.Module, images: Images, heatmap: PatchHeatmap, targets: TargetClasses, layout: TokenLayout
) -> ProbabilityCurves:
    """Restore the most important patch first; computed backwards, it is the last to be blurred."""
    reversed_order = sort_patches_by_importance(heatmap).flip(1)
    return compute_probabilities_while_replacing_patches(
        model, images, reversed_order, targets, layout, blur_relative_to_image_size(images)
    ).flip(1)


def area_under_curve(curves: ProbabilityCurves) -> Tensor:
    """Return the area under each curve by the trapezoidal rule, with an x axis from 0 to 1."""
    return (curves.sum(1) - (curves[:, 0] + curves[:, -1]) / 2) / (curves.shape[1] - 1)


def blur_relative_to_image_size(images: Images) -> Images:
    """Blur with a Gaussian as wide relative to the image as in RISE: 5 of 224 pixels, at least 1.5."""
    sigma = max(1.5, 5 * images.shape[-1] / 224)
    radius = min(math.ceil(2 * sigma), min(images.shape[-2:]) - 1)
    offsets = torch.arange(-radius, radius + 1, dtype=images.dtype, device=images.device)
    weights = torch.exp(-(offsets**2) / (2 * sigma**2))
    weights = (weights / weights.sum()).expand(images.shape[1], 1, -1)
    padded = F.pad(images, (radius, radius, radius, radius), mode="reflect")
    rows = F.conv2d(padded, weights[..., None], groups=images.shape[1])
    return F.conv2d(rows, weights[:, :, None], groups=images.shape[1])


def attribute_at_random_with_fixed_seed(inputs: AttributionInputs) -> PatchHeatmap:
    """Baseline: a random order of patches for every image, equal at every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(len(inputs.images), inputs.layout.rows, inputs.layout.columns, generator=generator).to(
        inputs.images
    )


def measure_faithfulness(
    model: nn.Module,
    images: Images,
    methods: list[str] | None = None,
    *,
    on_method_start: Callable[[str], None] | None = None,
) -> list[Faithfulness]:
    """Measure all methods and a random order; the most faithful (insertion minus deletion) first."""
    inputs = build_attribution_inputs(model, images)
    curves = {}
    for name, method in {**METHODS, "random": attribute_at_random_with_fixed_seed}.items():
        if methods is not None and name not in (*methods, "random"):
            continue
        if on_method_start:
            on_method_start(name)
        curves[name] = compute_deletion_and_insertion_curves(inputs, method(inputs))
    return summarise_and_rank_faithfulness(curves)


def compute_deletion_and_insertion_curves(inputs: AttributionInputs, heatmap: PatchHeatmap) -> FaithfulnessCurves:
    """Return the deletion and insertion curves of each image."""
    arguments = inputs.model, inputs.images, heatmap, inputs.targets, inputs.layout
    return FaithfulnessCurves(deletion(*arguments), insertion(*arguments))


def summarise_and_rank_faithfulness(
    curves_by_method: dict[str, FaithfulnessCurves],
) -> list[Faithfulness]:
    """Compute the areas of deletion and insertion curves; the most faithful method first."""
    rows = []
    for name, (deletion_curves, insertion_curves) in curves_by_method.items():
        rows.append(
            Faithfulness(
                name,
                *_compute_mean_and_standard_error(area_under_curve(deletion_curves)),
                *_compute_mean_and_standard_error(area_under_curve(insertion_curves)),
                len(deletion_curves),
            )
        )
    return sorted(rows, key=lambda row: row.deletion - row.insertion)


def _compute_mean_and_standard_error(values: Tensor) -> MeanAndError:
    error = values.std().item() / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return MeanAndError(values.mean().item(), error)


def spearman_correlation_per_image(first_heatmap: PatchHeatmap, second_heatmap: PatchHeatmap) -> Tensor:
    """Return Spearman's rank correlation per image: 1 if both rank the patches equally; ties get their mean rank."""
    ranks = [_compute_average_ranks(heat.flatten(1)) for heat in (first_heatmap, second_heatmap)]
    centred = [rank - rank.mean(1, keepdim=True) for rank in ranks]
    lengths = centred[0].norm(dim=1) * centred[1].norm(dim=1)
    return (centred[0] * centred[1]).sum(1) / lengths.clamp(min=1e-12)  # 0 where all patches are equal


def _compute_average_ranks(values: Tensor) -> Tensor:
    less = (values[:, None, :] < values[:, :, None]).sum(2)
    equal = (values[:, None, :] == values[:, :, None]).sum(2)
    return (less + (equal - 1) / 2).double()


def correlate_with_shuffled_weights(model: nn.Module, images: Images, method: str, *, seed: int = 0) -> float:
    """Return the mean rank correlation between the explanations of the model and of a copy with shuffled weights.

    A value near 0 is good: the explanation must depend on the trained weights (Adebayo et al. 2018)."""
    inputs = build_attribution_inputs(model, images)
    shuffled_inputs = replace(inputs, model=copy_with_shuffled_weights(model, seed))
    return spearman_correlation_per_image(METHODS[method](inputs), METHODS[method](shuffled_inputs)).mean().item()


def copy_with_shuffled_weights(model: nn.Module, seed: int = 0) -> nn.Module:
    """Return a copy in which the entries of every weight matrix are shuffled."""
    shuffled_model = deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in shuffled_model.parameters():
            if weight.ndim > 1:
                shuffled_weight = weight.flatten()[
                    torch.randperm(weight.numel(), generator=generator).to(weight.device)
                ]
                weight.copy_(shuffled_weight.view_as(weight))
    return shuffled_model
