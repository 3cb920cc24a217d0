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

from vitascope.explain.attribution import HIDDEN_AT_ONCE, METHODS, Question, probabilities, question
from vitascope.explain.layout import Layout
from vitascope.shapes import Curves, Grid, Images, Order, Targets


@dataclass(frozen=True)
class Faithfulness:
    """Mean areas under the curves of one method, and their standard errors over the images."""

    method: str
    deletion: float
    deletion_error: float
    insertion: float
    insertion_error: float
    images: int


def order_of(heat: Grid) -> Order:
    """Return the patches from most to least important; ties are in reading order."""
    return heat.flatten(1).argsort(dim=1, descending=True, stable=True)


@torch.no_grad()
def curves(model: nn.Module, images: Images, order: Order, targets: Targets, layout: Layout, start: Images) -> Curves:
    """Return the probability of the class while patches of `images` are replaced by `start`: patches + 1 values."""
    height, width = images.shape[2] // layout.rows, images.shape[3] // layout.columns
    when = torch.empty_like(order)
    when.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    found = []
    for image, other, turn, target in zip(images, start, when, targets.tolist(), strict=True):
        turns = (
            turn.unflatten(0, (layout.rows, layout.columns)).repeat_interleave(height, 0).repeat_interleave(width, 1)
        )
        steps = torch.arange(layout.patches + 1, device=image.device)[:, None, None, None]
        changed = torch.where(turns < steps, other, image)
        found.append(torch.cat([probabilities(model, some)[:, target] for some in changed.split(HIDDEN_AT_ONCE)]))
    return torch.stack(found)


def deletion(model: nn.Module, images: Images, heat: Grid, targets: Targets, layout: Layout) -> Curves:
    return curves(model, images, order_of(heat), targets, layout, torch.zeros_like(images))


def insertion(model: nn.Module, images: Images, heat: Grid, targets: Targets, layout: Layout) -> Curves:
    """Restore the most important patch first; computed backwards, it is the last to be blurred."""
    backwards = order_of(heat).flip(1)
    return curves(model, images, backwards, targets, layout, blurred(images)).flip(1)


def area(curve: Curves) -> Tensor:
    """Return the area under each curve by the trapezoidal rule, with an x axis from 0 to 1."""
    return (curve.sum(1) - (curve[:, 0] + curve[:, -1]) / 2) / (curve.shape[1] - 1)


def blurred(images: Images) -> Images:
    """Blur with a Gaussian as wide relative to the image as in RISE: 5 of 224 pixels, at least 1.5."""
    sigma = max(1.5, 5 * images.shape[-1] / 224)
    reach = min(math.ceil(2 * sigma), min(images.shape[-2:]) - 1)
    places = torch.arange(-reach, reach + 1, dtype=images.dtype, device=images.device)
    weights = torch.exp(-(places**2) / (2 * sigma**2))
    weights = (weights / weights.sum()).expand(images.shape[1], 1, -1)
    wide = F.pad(images, (reach, reach, reach, reach), mode="reflect")
    rows = F.conv2d(wide, weights[..., None], groups=images.shape[1])
    return F.conv2d(rows, weights[:, :, None], groups=images.shape[1])


def at_random(asked: Question) -> Grid:
    """Baseline: a random order of patches for every image, equal at every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(len(asked.images), asked.layout.rows, asked.layout.columns, generator=generator).to(asked.images)


def measure(
    model: nn.Module, images: Images, methods: list[str] | None = None, *, told: Callable[[str], None] | None = None
) -> list[Faithfulness]:
    """Measure all methods and a random order; the most faithful (insertion minus deletion) first."""
    asked = question(model, images)
    curves = {}
    for name, method in {**METHODS, "random": at_random}.items():
        if methods is not None and name not in (*methods, "random"):
            continue
        if told:
            told(name)
        curves[name] = curves_of(asked, method(asked))
    return summarise(curves)


def curves_of(asked: Question, heat: Grid) -> tuple[Curves, Curves]:
    """Return the deletion and insertion curves."""
    gone, come = (way(asked.model, asked.images, heat, asked.targets, asked.layout) for way in (deletion, insertion))
    return gone, come


def summarise(curves: dict[str, tuple[Curves, Curves]]) -> list[Faithfulness]:
    """Compute the areas of deletion and insertion curves; the most faithful method first."""
    found = []
    for name, (gone, come) in curves.items():
        found.append(Faithfulness(name, *_mean_and_error(area(gone)), *_mean_and_error(area(come)), len(gone)))
    return sorted(found, key=lambda row: row.deletion - row.insertion)


def _mean_and_error(values: Tensor) -> tuple[float, float]:
    error = values.std().item() / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return values.mean().item(), error


def rank_correlation(first: Grid, second: Grid) -> Tensor:
    """Return Spearman's rank correlation per image: 1 if both rank the patches equally; ties get their mean rank."""
    ranks = [_ranks(heat.flatten(1)) for heat in (first, second)]
    centred = [rank - rank.mean(1, keepdim=True) for rank in ranks]
    lengths = centred[0].norm(dim=1) * centred[1].norm(dim=1)
    return (centred[0] * centred[1]).sum(1) / lengths.clamp(min=1e-12)  # 0 where all patches are equal


def _ranks(values: Tensor) -> Tensor:
    less = (values[:, None, :] < values[:, :, None]).sum(2)
    equal = (values[:, None, :] == values[:, :, None]).sum(2)
    return (less + (equal - 1) / 2).double()


def survives_random_weights(model: nn.Module, images: Images, method: str, *, seed: int = 0) -> float:
    """Return the mean rank correlation between the explanations of the model and of a copy with shuffled weights.

    A value near 0 is good: the explanation must depend on the trained weights (Adebayo et al. 2018)."""
    asked = question(model, images)
    other = replace(asked, model=randomised(model, seed))
    return rank_correlation(METHODS[method](asked), METHODS[method](other)).mean().item()


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Return a copy in which the entries of every weight matrix are shuffled."""
    twin = deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in twin.parameters():
            if weight.ndim > 1:
                shuffled = weight.flatten()[torch.randperm(weight.numel(), generator=generator).to(weight.device)]
                weight.copy_(shuffled.view_as(weight))
    return twin
