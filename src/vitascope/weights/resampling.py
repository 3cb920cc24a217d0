"""Resample patch filters to another patch size or number of channels."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitascope.weights.model_info import Normalisation


class PatchFilters(NamedTuple):
    weight: Tensor  # feature × channel × rows × columns
    bias: Tensor  # feature


def compute_resize_matrix(old_size: tuple[int, int], new_size: tuple[int, int]) -> Tensor:
    """Return B (new pixels × old pixels, float64), the matrix of bicubic, antialiased resizing of a patch."""
    unit_patches = torch.eye(old_size[0] * old_size[1], dtype=torch.float64).view(-1, 1, *old_size)
    return F.interpolate(unit_patches, size=new_size, mode="bicubic", antialias=True).flatten(1).T


def resample_patch_filters(filters: Tensor, new_patch_size: tuple[int, int]) -> Tensor:
    """Resample filters w (feature × channel × rows × columns): (Bᵀ)⁺ w (Beyer et al. 2023, FlexiViT, eq. 4).

    For a patch resized by B, the output ⟨x, w⟩ is unchanged if the patches grow. If they shrink, it is the
    least-squares approximation."""
    old_size = (filters.shape[2], filters.shape[3])
    if old_size == new_patch_size:
        return filters
    pseudo_inverse = torch.linalg.pinv(compute_resize_matrix(old_size, new_patch_size).T)
    resized = filters.double().flatten(2) @ pseudo_inverse.T
    return resized.unflatten(2, new_patch_size).to(filters.dtype)


def compute_patch_resampling_error(filters: Tensor, resized_filters: Tensor, pixel_correlation: float = 0.95) -> float:
    """Return the expected relative error of the filters' outputs, sqrt(tr(d C dᵀ) / tr(w C wᵀ)) with d = w − Bᵀw'.

    C is the pixel covariance of images whose neighbouring pixels correlate by `pixel_correlation`, as in photos.
    0 is white noise."""
    old_size = (filters.shape[2], filters.shape[3])
    new_size = (resized_filters.shape[2], resized_filters.shape[3])
    original = filters.double().flatten(2)
    difference = original - resized_filters.double().flatten(2) @ compute_resize_matrix(old_size, new_size)
    rows, columns = (pixel_correlation ** (torch.arange(n)[:, None] - torch.arange(n)).abs().double() for n in old_size)
    covariance = torch.kron(rows, columns)
    power = [torch.einsum("fcp,pq,fcq->", part, covariance, part) for part in (difference, original)]
    return (power[0] / power[1]).sqrt().item()


def sum_or_repeat_filter_channels(filters: Tensor, num_channels: int) -> Tensor:
    """Sum the filters over the channels for one channel. Otherwise repeat them in order, scaled by old/new, as in timm.

    An image with equal channels keeps its output if the new number is a multiple of the old one (1 → 3, 3 → 6).
    `compute_channel_adaptation_error` measures the error otherwise."""
    old_channels = filters.shape[1]
    if old_channels == num_channels:
        return filters
    if num_channels == 1:
        return filters.sum(1, keepdim=True)
    repeated = filters.repeat(1, -(-num_channels // old_channels), 1, 1)[:, :num_channels]
    return repeated * (old_channels / num_channels)


def convert_filters_to_grayscale(
    filters: Tensor, bias: Tensor, colour_normalisation: Normalisation, grayscale_normalisation: Normalisation
) -> PatchFilters:
    """Convert colour filters to one channel. For a grayscale image, the output equals that of the colour filters.

    The colour filters get the image in all channels, with `colour_normalisation`; the new filters get it with
    `grayscale_normalisation`, which has one channel."""
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in colour_normalisation)
    grayscale_mean, grayscale_std = grayscale_normalisation.mean[0], grayscale_normalisation.std[0]
    exact = filters.double()
    summed = sum_or_repeat_filter_channels(exact * (grayscale_std / std), 1)
    shifted_bias = bias.double() + (exact * ((grayscale_mean - mean) / std)).sum((1, 2, 3))
    return PatchFilters(summed.to(filters.dtype), shifted_bias.to(bias.dtype))


def compute_channel_adaptation_error(filters: Tensor, adapted_filters: Tensor) -> float:
    """Return the relative error of the filters after a change of channels.

    For one channel, the error is the filters' difference from their mean over the channels (the colour information).
    Otherwise it is the error for an image whose channels repeat the old channels in order."""
    old_channels = filters.shape[1]
    if adapted_filters.shape[1] == 1:
        restored = filters.mean(1, keepdim=True)
    else:
        restored = torch.stack([adapted_filters[:, channel::old_channels].sum(1) for channel in range(old_channels)], 1)
    return ((filters - restored).norm() / filters.norm()).item()
