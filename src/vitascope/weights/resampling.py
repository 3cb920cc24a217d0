"""Resample patch filters to another patch size or number of channels, and report an adaptation."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def compute_resize_matrix(old_size: tuple[int, int], new_size: tuple[int, int]) -> Tensor:
    """B, new pixels × old pixels: what resizing a patch (bicubic, antialiased) does to it, in float64."""
    units = torch.eye(old_size[0] * old_size[1], dtype=torch.float64).view(-1, 1, *old_size)
    return F.interpolate(units, size=new_size, mode="bicubic", antialias=True).flatten(1).T


def resample_patch_filters(filters: Tensor, new_patch_size: tuple[int, int]) -> Tensor:
    """feature × channel × rows × columns -> the same for another patch: (Bᵀ)⁺ w (Beyer et al. 2023, FlexiViT, eq. 4).

    A patch resized by B then gets the old answer ⟨x, w⟩: exactly where patches grow, by least squares where they
    shrink."""
    old = (filters.shape[2], filters.shape[3])
    if old == new_patch_size:
        return filters
    pseudo = torch.linalg.pinv(compute_resize_matrix(old, new_patch_size).T)
    resized = filters.double().flatten(2) @ pseudo.T
    return resized.unflatten(2, new_patch_size).to(filters.dtype)


def compute_patch_resampling_error(filters: Tensor, resized_filters: Tensor, pixel_correlation: float = 0.95) -> float:
    """How far answers are from the old ones, relative to their size, for images whose neighbouring pixels correlate by
    `likeness`, as photos' do: the root of tr(d C dᵀ) / tr(w C wᵀ) with d = w − Bᵀw'. 0 would be white noise."""
    old, new = (filters.shape[2], filters.shape[3]), (resized_filters.shape[2], resized_filters.shape[3])
    before = filters.double().flatten(2)
    apart = before - resized_filters.double().flatten(2) @ compute_resize_matrix(old, new)
    rows, columns = (pixel_correlation ** (torch.arange(n)[:, None] - torch.arange(n)).abs().double() for n in old)
    together = torch.kron(rows, columns)
    power = [torch.einsum("fcp,pq,fcq->", part, together, part) for part in (apart, before)]
    return (power[0] / power[1]).sqrt().item()


def adapt_filter_channels(filters: Tensor, num_channels: int) -> Tensor:
    """To grey: the sum over channels. Else repeated in turn, cut and scaled by old/new: an image with the same values
    in all channels gets the same answer where the new number is a multiple of the old one (1 → 3, 3 → 6), and another
    one elsewhere (`channel_error` says how far off). As timm does it."""
    old = filters.shape[1]
    if old == num_channels:
        return filters
    if num_channels == 1:
        return filters.sum(1, keepdim=True)
    repeated = filters.repeat(1, -(-num_channels // old), 1, 1)[:, :num_channels]
    return repeated * (old / num_channels)


def convert_filters_to_grayscale(
    filters: Tensor,
    bias: Tensor,
    colour_mean_std: tuple[Sequence[float], Sequence[float]],
    grayscale_mean_std: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """Filters and bias that answer a grey image, normalised by `grey`, as the old ones answer it shown in all colours,
    normalised by `colour` (mean and deviation, each per channel)."""
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in colour_mean_std)
    exact = filters.double()
    summed = adapt_filter_channels(exact * (grayscale_mean_std[1] / std), 1)
    moved = bias.double() + (exact * ((grayscale_mean_std[0] - mean) / std)).sum((1, 2, 3))
    return summed.to(filters.dtype), moved.to(bias.dtype)


def compute_channel_error(filters: Tensor, adapted_filters: Tensor) -> float:
    """The share of the filters that is lost. To grey it is colour: all that differs from the mean over channels. Else:
    how far answers are from the old ones where the new image's channels are the old one's, in turn."""
    old = filters.shape[1]
    if adapted_filters.shape[1] == 1:
        back = filters.mean(1, keepdim=True)
    else:
        back = torch.stack([adapted_filters[:, channel::old].sum(1) for channel in range(old)], 1)
    return ((filters - back).norm() / filters.norm()).item()


@dataclass(frozen=True)
class TensorChange:
    """One changed tensor. `lost`: relative error, the norm of the difference divided by the norm of the original."""

    name: str
    before: list[int]
    after: list[int]
    how: str
    lost: float


@dataclass(frozen=True)
class AdaptationReport:
    """What an adaptation changed, or why it is not possible."""

    weights: str
    library: str
    settings: dict[str, Any]  # requested
    image_before: list[int]  # pixels: rows, columns
    image_after: list[int]
    patch_before: list[int]
    patch_after: list[int]
    grid_before: list[int]  # rows, columns
    grid_after: list[int]
    tokens_before: int
    tokens_after: int
    pixels_seen: float  # fraction of the image's pixels covered by patches
    flops_before: int  # per image
    flops_after: int
    resampled: list[TensorChange] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    kept: int = 0  # unchanged tensors
    assumed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    alternative: dict[str, Any] = field(default_factory=dict)  # upscaling the images instead
    refused: str | None = None
