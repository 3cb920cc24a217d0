"""Images and draws -> varied images, a whole batch at once, each image by its own draw, on whatever device they are."""

import torch
from torch import Tensor

from vitascope.data.colour import jitter
from vitascope.data.config import NO_CROP, AugmentConfig
from vitascope.data.draws import Draws
from vitascope.data.randaugment import randaugment
from vitascope.data.warp import cut_out, turn_and_stretch
from vitascope.shapes import Images


def flip(images: Tensor, chosen: Tensor) -> Tensor:
    """Mirror the chosen images left to right."""
    return torch.where(chosen[:, None, None, None], images.flip(-1), images)


def shift(images: Tensor, offsets: Tensor, fill: str) -> Tensor:
    """Move each image by its (rows, columns); what comes in at the edge is zero or the image mirrored."""
    for axis in (0, 1):
        size = images.shape[2 + axis]
        place = torch.arange(size, device=images.device) + offsets[:, axis, None]
        inside = (place >= 0) & (place < size)
        place = size - 1 - (size - 1 - place.abs()).abs() if fill == "reflect" else place
        place = place.clamp(0, size - 1)
        view = (-1, 1, size, 1) if axis == 0 else (-1, 1, 1, size)
        images = images.gather(2 + axis, place.view(view).expand_as(images))
        if fill != "reflect":
            images = images * inside.view(view)
    return images


def erase(images: Images, draw: Tensor, chance: float, largest: float) -> Images:
    """Wipe a rectangle of 2 % to `largest` of the chosen (normalised) images; 0 is the data's mean.

    Zhong et al. 2020: aspect ratio log-uniform between 0.3 and 1/0.3. Draw: chosen, area, aspect, row, column.
    """
    height, width = images.shape[2:]
    area = (0.02 + draw[:, 1] * max(0.0, largest - 0.02)) * height * width
    stretch = torch.exp((draw[:, 2] * 2 - 1) * 1.2039728)  # ln(1/0.3)
    rows = (area * stretch).sqrt().round().clamp(1, height)
    columns = (area / stretch).sqrt().round().clamp(1, width)
    top, left = (draw[:, 3] * (height - rows + 1)).floor(), (draw[:, 4] * (width - columns + 1)).floor()
    box = boxes(top, top + rows, left, left + columns, height, width)
    return images.masked_fill(box & (draw[:, 0] < chance)[:, None, None, None], 0.0)


def boxes(top: Tensor, bottom: Tensor, left: Tensor, right: Tensor, height: int, width: int) -> Tensor:
    """image × 1 × height × width: True inside each image's rectangle."""
    row = torch.arange(height, device=top.device)
    column = torch.arange(width, device=top.device)
    rows = (row >= top[:, None]) & (row < bottom[:, None])
    columns = (column >= left[:, None]) & (column < right[:, None])
    return rows[:, None, :, None] & columns[:, None, None, :]


def vary_stored(images: Tensor, draws: Draws, policy: AugmentConfig) -> Tensor:
    """What can be done to the stored bytes: mirror and move."""
    if "flip" in draws:
        images = flip(images, draws["flip"])
    if "shift" in draws:
        images = shift(images, draws["shift"], policy.shift_fill or "zero")
    return images


def vary_pixels(
    images: Tensor, draws: Draws, policy: AugmentConfig, crop_size: tuple[int, int] | None = None
) -> Images:
    """What is done to pixels between 0 and 1: cut out, turn and stretch, RandAugment, colour."""
    if "crop" in draws:
        images = cut_out(images, draws["crop"], policy.crop_scale or NO_CROP, crop_size)
    if "warp" in draws:
        images = turn_and_stretch(images, draws["warp"])
    if "operation" in draws:
        images = randaugment(images, draws["operation"], draws["sign"], policy.magnitude or 0.0)
    return jitter(images, draws)
