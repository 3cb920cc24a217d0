"""Measure the faithfulness of explanations by deletion and insertion (Petsiuk et al. 2018, RISE).

Patches are changed one at a time, most important first, and the probability of the explained class is recorded.
Deletion makes patches grey (the mean of the training images); a smaller area under the curve is better.
Insertion restores patches of a blurred image; a larger area is better.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.explain.attribution import (
    METHODS,
    OCCLUSION_BATCH_SIZE,
    AttributionInputs,
    build_attribution_inputs,
    predict_probabilities,
)
from vitascope.explain.subject import TokenLayout
from vitascope.shapes import Images, PatchHeatmap, ProbabilityCurves, TargetClasses, TokenIndices


@dataclass(frozen=True)
class Faithfulness:
    """Mean areas under the curves of one method, and their standard errors over the images."""

    method: str
    deletion: float
    deletion_error: float
    insertion: float
    insertion_error: float
    images: int


def sort_patches_by_importance(heatmap: PatchHeatmap) -> TokenIndices:
    """Return the patches from most to least important; ties are in reading order."""
    return heatmap.flatten(1).argsort(dim=1, descending=True, stable=True)


@torch.no_grad()
def compute_probability_curves(
    model: nn.Module,
    images: Images,
    patch_order: TokenIndices,
    targets: TargetClasses,
    layout: TokenLayout,
    replacement_images: Images,
) -> ProbabilityCurves:
    """Return the probability of the class while patches of `images` are replaced by `start`: patches + 1 values."""
    height, width = images.shape[2] // layout.rows, images.shape[3] // layout.columns
    when = torch.empty_like(patch_order)
    when.scatter_(1, patch_order, torch.arange(patch_order.shape[1], device=patch_order.device).expand_as(patch_order))
    found = []
    for image, other, turn, target in zip(images, replacement_images, when, targets.tolist(), strict=True):
        turns = (
            turn.unflatten(0, (layout.rows, layout.columns)).repeat_interleave(height, 0).repeat_interleave(width, 1)
        )
        steps = torch.arange(layout.num_patches + 1, device=image.device)[:, None, None, None]
        changed = torch.where(turns < steps, other, image)
        found.append(
            torch.cat([predict_probabilities(model, some)[:, target] for some in changed.split(OCCLUSION_BATCH_SIZE)])
        )
    return torch.stack(found)


def deletion(
    model: nn.Module, images: Images, heatmap: PatchHeatmap, targets: TargetClasses, layout: TokenLayout
) -> ProbabilityCurves:
    return compute_probability_curves(
        model, images, sort_patches_by_importance(heatmap), targets, layout, torch.zeros_like(images)
    )


def insertion(
    model: nn.Module, images: Images, heatmap: PatchHeatmap, targets: TargetClasses, layout: TokenLayout
) -> ProbabilityCurves:
    """Restore the most important patch first; computed backwards, it is the last to be blurred."""
    backwards = sort_patches_by_importance(heatmap).flip(1)
    return compute_probability_curves(model, images, backwards, targets, layout, blur_images(images)).flip(1)


def area_under_curve(curves: ProbabilityCurves) -> Tensor:
    """Return the area under each curve by the trapezoidal rule, with an x axis from 0 to 1."""
    return (curves.sum(1) - (curves[:, 0] + curves[:, -1]) / 2) / (curves.shape[1] - 1)


def blur_images(images: Images) -> Images:
    """Blur with a Gaussian as wide relative to the image as in RISE: 5 of 224 pixels, at least 1.5."""
    sigma = max(1.5, 5 * images.shape[-1] / 224)
    reach = min(math.ceil(2 * sigma), min(images.shape[-2:]) - 1)
    places = torch.arange(-reach, reach + 1, dtype=images.dtype, device=images.device)
    weights = torch.exp(-(places**2) / (2 * sigma**2))
    weights = (weights / weights.sum()).expand(images.shape[1], 1, -1)
    wide = F.pad(images, (reach, reach, reach, reach), mode="reflect")
    rows = F.conv2d(wide, weights[..., None], groups=images.shape[1])
    return F.conv2d(rows, weights[:, :, None], groups=images.shape[1])


def attribute_at_random(inputs: AttributionInputs) -> PatchHeatmap:
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
    asked = build_attribution_inputs(model, images)
    curves = {}
    for name, method in {**METHODS, "random": attribute_at_random}.items():
        if methods is not None and name not in (*methods, "random"):
            continue
        if on_method_start:
            on_method_start(name)
        curves[name] = compute_deletion_and_insertion(asked, method(asked))
    return summarise_faithfulness(curves)


def compute_deletion_and_insertion(
    inputs: AttributionInputs, heatmap: PatchHeatmap
) -> tuple[ProbabilityCurves, ProbabilityCurves]:
    """Return the deletion and insertion curves."""
    gone, come = (
        way(inputs.model, inputs.images, heatmap, inputs.targets, inputs.layout) for way in (deletion, insertion)
    )
    return gone, come


def summarise_faithfulness(
    curves_by_method: dict[str, tuple[ProbabilityCurves, ProbabilityCurves]],
) -> list[Faithfulness]:
    """Compute the areas of deletion and insertion curves; the most faithful method first."""
    found = []
    for name, (gone, come) in curves_by_method.items():
        found.append(
            Faithfulness(
                name,
                *_compute_mean_and_standard_error(area_under_curve(gone)),
                *_compute_mean_and_standard_error(area_under_curve(come)),
                len(gone),
            )
        )
    return sorted(found, key=lambda row: row.deletion - row.insertion)


def _compute_mean_and_standard_error(values: Tensor) -> tuple[float, float]:
    error = values.std().item() / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return values.mean().item(), error


def rank_correlation(first_heatmap: PatchHeatmap, second_heatmap: PatchHeatmap) -> Tensor:
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
    asked = build_attribution_inputs(model, images)
    other = replace(asked, model=copy_with_shuffled_weights(model, seed))
    return rank_correlation(METHODS[method](asked), METHODS[method](other)).mean().item()


def copy_with_shuffled_weights(model: nn.Module, seed: int = 0) -> nn.Module:
    """Return a copy in which the entries of every weight matrix are shuffled."""
    twin = deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in twin.parameters():
            if weight.ndim > 1:
                shuffled = weight.flatten()[torch.randperm(weight.numel(), generator=generator).to(weight.device)]
                weight.copy_(shuffled.view_as(weight))
    return twin
