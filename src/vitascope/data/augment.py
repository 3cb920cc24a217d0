"""Augment a batch of images on its device, each image by its own random draws; MixUp and CutMix.

MixUp (Zhang et al. 2018) blends two images, CutMix (Yun et al. 2019) pastes a rectangle of one into the other. Each
image has its own kind of mixing and its own λ; its partner is the image before it in the batch.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from vitascope.data.config import NO_CROP, AugmentConfig
from vitascope.data.dataset import ImageSize, Labels
from vitascope.data.image_ops import apply_drawn_colour_changes, apply_randaugment, crop_and_resize, rotate_and_scale
from vitascope.data.sampling import RandomDraws
from vitascope.shapes import Images


@dataclass(frozen=True)
class MixedLabels:
    """Target of a mixed image: its own class with weight `lam`, its partner's with weight 1 - `lam`."""

    labels: Labels
    partner_labels: Labels
    lam: Float[Tensor, "image"]

    def compute_probabilities(self, num_classes: int) -> Float[Tensor, "image class"]:
        """Return the target probability of every class."""
        lam = self.lam[:, None]
        return lam * F.one_hot(self.labels, num_classes) + (1 - lam) * F.one_hot(self.partner_labels, num_classes)

    def get_dominant_labels(self) -> Labels:
        """Return the class with the larger weight, with which training accuracy is computed."""
        return torch.where(self.lam >= 0.5, self.labels, self.partner_labels)


class MixedBatch(NamedTuple):
    """Mixed images and their targets."""

    images: Images
    labels: MixedLabels


class CutMixRegion(NamedTuple):
    """The rectangle to paste, and the fraction of the image that is left."""

    mask: Bool[Tensor, "image 1 height width"]
    lam: Float[Tensor, "image"]


def make_unmixed_labels(labels: Labels) -> MixedLabels:
    """Return targets with λ = 1, for images that are not mixed."""
    return MixedLabels(labels, labels, torch.ones(len(labels), device=labels.device))


def apply_mixup_or_cutmix(
    images: Images, labels: Labels, draws: Float[Tensor, "batch kind_lam_row_column"]
) -> MixedBatch:
    """Mix each image with the previous one of the batch.

    `draws` per image: kind (0: none, 1: MixUp, 2: CutMix), λ, row and column of CutMix's centre."""
    kind, lam, row, column = draws.unbind(1)
    partner = images.roll(1, dims=0)
    box, cutmix_lam = compute_cutmix_mask_and_lam(lam, row, column, images.shape[2], images.shape[3])
    lam = torch.where(kind == 2, cutmix_lam, torch.where(kind == 1, lam, 1.0))
    weight = lam[:, None, None, None].to(images.dtype)
    blended = images * weight + partner * (1 - weight)
    is_cut = (kind == 2)[:, None, None, None]
    mixed = torch.where(is_cut, torch.where(box, partner, images), blended)
    return MixedBatch(mixed, MixedLabels(labels, labels.roll(1), lam))


def compute_cutmix_mask_and_lam(
    lam: Tensor, relative_row: Tensor, relative_column: Tensor, height: int, width: int
) -> CutMixRegion:
    """Return rectangles with 1 - `lam` of the area around a centre, clipped at the edges, and the λ after clipping."""
    half = (1 - lam).sqrt() / 2
    centre_row, centre_column = relative_row * height, relative_column * width
    top, bottom = (centre_row - half * height).round().clamp(0), (centre_row + half * height).round().clamp(max=height)
    left, right = (
        (centre_column - half * width).round().clamp(0),
        (centre_column + half * width).round().clamp(max=width),
    )
    box = make_box_masks(top, bottom, left, right, height, width)
    return CutMixRegion(box, 1 - (bottom - top) * (right - left) / (height * width))


def flip_selected_images(images: Tensor, is_selected: Tensor) -> Tensor:
    """Flip the selected images left to right."""
    return torch.where(is_selected[:, None, None, None], images.flip(-1), images)


def shift_images(images: Tensor, offsets: Tensor, fill_mode: str) -> Tensor:
    """Shift each image by its (rows, columns); the edge is filled with zeros or with the mirrored image."""
    for axis in (0, 1):
        size = images.shape[2 + axis]
        index = torch.arange(size, device=images.device) + offsets[:, axis, None]
        inside = (index >= 0) & (index < size)
        index = size - 1 - (size - 1 - index.abs()).abs() if fill_mode == "reflect" else index
        index = index.clamp(0, size - 1)
        view = (-1, 1, size, 1) if axis == 0 else (-1, 1, 1, size)
        images = images.gather(2 + axis, index.view(view).expand_as(images))
        if fill_mode != "reflect":
            images = images * inside.view(view)
    return images


def erase_rectangles(images: Images, draws: Tensor, probability: float, max_area: float) -> Images:
    """Erase a rectangle with 2 % to `max_area` of the area of normalised images: set it to 0, the data's mean.

    Zhong et al. 2020: aspect ratio log-uniform between 0.3 and 1/0.3. `draws`: selection, area, aspect, row, column.
    """
    height, width = images.shape[2:]
    area = (0.02 + draws[:, 1] * max(0.0, max_area - 0.02)) * height * width
    aspect_ratio = torch.exp((draws[:, 2] * 2 - 1) * 1.2039728)  # ln(1/0.3)
    rows = (area * aspect_ratio).sqrt().round().clamp(1, height)
    columns = (area / aspect_ratio).sqrt().round().clamp(1, width)
    top, left = (draws[:, 3] * (height - rows + 1)).floor(), (draws[:, 4] * (width - columns + 1)).floor()
    box = make_box_masks(top, top + rows, left, left + columns, height, width)
    return images.masked_fill(box & (draws[:, 0] < probability)[:, None, None, None], 0.0)


def make_box_masks(
    top: Tensor, bottom: Tensor, left: Tensor, right: Tensor, height: int, width: int
) -> Bool[Tensor, "image 1 height width"]:
    """Return masks, image × 1 × height × width: True inside each image's rectangle."""
    row = torch.arange(height, device=top.device)
    column = torch.arange(width, device=top.device)
    rows = (row >= top[:, None]) & (row < bottom[:, None])
    columns = (column >= left[:, None]) & (column < right[:, None])
    return rows[:, None, :, None] & columns[:, None, None, :]


def flip_and_shift_as_drawn(images: Tensor, draws: RandomDraws, policy: AugmentConfig) -> Tensor:
    """Flip and shift. Both work on the stored bytes."""
    if "flip" in draws:
        images = flip_selected_images(images, draws["flip"])
    if "shift" in draws:
        images = shift_images(images, draws["shift"], policy.shift_fill or "zero")
    return images


def crop_warp_and_jitter_pixels(
    images: Tensor, draws: RandomDraws, policy: AugmentConfig, crop_size: ImageSize | None = None
) -> Images:
    """Augment pixels from 0 to 1: crop, rotate and scale, RandAugment, colour jitter."""
    if "crop" in draws:
        images = crop_and_resize(images, draws["crop"], policy.crop_scale or NO_CROP, crop_size)
    if "warp" in draws:
        images = rotate_and_scale(images, draws["warp"])
    if "operation" in draws:
        images = apply_randaugment(images, draws["operation"], draws["sign"], policy.magnitude or 0.0)
    return apply_drawn_colour_changes(images, draws)
