"""Patch filters for one patch size or number of channels -> the same for another."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def resize_matrix(old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """B, new pixels × old pixels: what resizing a patch (bicubic, antialiased) does to it, in float64."""
    units = torch.eye(old[0] * old[1], dtype=torch.float64).view(-1, 1, *old)
    return F.interpolate(units, size=new, mode="bicubic", antialias=True).flatten(1).T


def resample_patch(filters: Tensor, new: tuple[int, int]) -> Tensor:
    """feature × channel × rows × columns -> the same for another patch: (Bᵀ)⁺ w (Beyer et al. 2023, FlexiViT, eq. 4).

    A patch resized by B then gets the old answer ⟨x, w⟩: exactly where patches grow, by least squares where they
    shrink."""
    old = (filters.shape[2], filters.shape[3])
    if old == new:
        return filters
    pseudo = torch.linalg.pinv(resize_matrix(old, new).T)
    resized = filters.double().flatten(2) @ pseudo.T
    return resized.unflatten(2, new).to(filters.dtype)


def patch_error(filters: Tensor, resized: Tensor, likeness: float = 0.95) -> float:
    """How far answers are from the old ones, relative to their size, for images whose neighbouring pixels correlate by
    `likeness`, as photos' do: the root of tr(d C dᵀ) / tr(w C wᵀ) with d = w − Bᵀw'. 0 would be white noise."""
    old, new = (filters.shape[2], filters.shape[3]), (resized.shape[2], resized.shape[3])
    before = filters.double().flatten(2)
    apart = before - resized.double().flatten(2) @ resize_matrix(old, new)
    rows, columns = (likeness ** (torch.arange(n)[:, None] - torch.arange(n)).abs().double() for n in old)
    together = torch.kron(rows, columns)
    power = [torch.einsum("fcp,pq,fcq->", part, together, part) for part in (apart, before)]
    return (power[0] / power[1]).sqrt().item()


def change_channels(filters: Tensor, channels: int) -> Tensor:
    """To grey: the sum over channels. Else repeated in turn, cut and scaled by old/new: an image with the same values
    in all channels gets the same answer where the new number is a multiple of the old one (1 → 3, 3 → 6), and another
    one elsewhere (`channel_error` says how far off). As timm does it."""
    old = filters.shape[1]
    if old == channels:
        return filters
    if channels == 1:
        return filters.sum(1, keepdim=True)
    repeated = filters.repeat(1, -(-channels // old), 1, 1)[:, :channels]
    return repeated * (old / channels)


def fold_to_grey(
    filters: Tensor, bias: Tensor, colour: tuple[Sequence[float], Sequence[float]], grey: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Filters and bias that answer a grey image, normalised by `grey`, as the old ones answer it shown in all colours,
    normalised by `colour` (mean and deviation, each per channel)."""
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in colour)
    exact = filters.double()
    summed = change_channels(exact * (grey[1] / std), 1)
    moved = bias.double() + (exact * ((grey[0] - mean) / std)).sum((1, 2, 3))
    return summed.to(filters.dtype), moved.to(bias.dtype)


def channel_error(filters: Tensor, changed: Tensor) -> float:
    """The share of the filters that is lost. To grey it is colour: all that differs from the mean over channels. Else:
    how far answers are from the old ones where the new image's channels are the old one's, in turn."""
    old = filters.shape[1]
    if changed.shape[1] == 1:
        back = filters.mean(1, keepdim=True)
    else:
        back = torch.stack([changed[:, channel::old].sum(1) for channel in range(old)], 1)
    return ((filters - back).norm() / filters.norm()).item()
