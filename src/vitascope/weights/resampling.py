"""Patch filters for one patch size or number of channels -> the same for another."""

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
    """To grey: the sum over channels, exact for grey images shown in colour; from grey, or to other numbers: repeated
    and scaled, so that an image with the same values in all channels gets the same answer."""
    old = filters.shape[1]
    if old == channels:
        return filters
    if channels == 1:
        return filters.sum(1, keepdim=True)
    repeated = filters.repeat(1, -(-channels // old), 1, 1)[:, :channels]
    return repeated * (old / channels)
