"""Images and labels -> images mixed with their neighbours in the batch, and labels mixed by exactly the same share.

MixUp (Zhang et al. 2018) blends two images, CutMix (Yun et al. 2019) pastes a rectangle of one into the other. Each
image has its own kind and share; its partner is the image before it in the batch.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitascope.data.augment import boxes
from vitascope.data.source import Labels
from vitascope.shapes import Images


@dataclass(frozen=True)
class Target:
    """What the answer should be: the image's own class by `share`, its partner's by the rest."""

    own: Labels
    partner: Labels
    share: Float[Tensor, "image"]

    def probabilities(self, classes: int) -> Float[Tensor, "image class"]:
        share = self.share[:, None]
        return share * F.one_hot(self.own, classes) + (1 - share) * F.one_hot(self.partner, classes)

    def dominant(self) -> Labels:
        """The class with the larger share, against which a training accuracy is counted."""
        return torch.where(self.share >= 0.5, self.own, self.partner)


def unmixed(labels: Labels) -> Target:
    return Target(labels, labels, torch.ones(len(labels), device=labels.device))


def mix(images: Images, labels: Labels, draw: Tensor) -> tuple[Images, Target]:
    """`draw` per image: kind (0 none, 1 MixUp, 2 CutMix), own share, row, column. Partners are rolled by one."""
    kind, share, row, column = draw.unbind(1)
    partner = images.roll(1, dims=0)
    box, cut_share = cutmix_boxes(share, row, column, images.shape[2], images.shape[3])
    share = torch.where(kind == 2, cut_share, torch.where(kind == 1, share, 1.0))
    weight = share[:, None, None, None].to(images.dtype)
    blended = images * weight + partner * (1 - weight)
    is_cut = (kind == 2)[:, None, None, None]
    mixed = torch.where(is_cut, torch.where(box, partner, images), blended)
    return mixed, Target(labels, labels.roll(1), share)


def cutmix_boxes(share: Tensor, row: Tensor, column: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Rectangles of 1 - share of the area around a drawn centre, clipped at the edges, and the share truly left."""
    half = (1 - share).sqrt() / 2
    centre_row, centre_column = row * height, column * width
    top, bottom = (centre_row - half * height).round().clamp(0), (centre_row + half * height).round().clamp(max=height)
    left, right = (
        (centre_column - half * width).round().clamp(0),
        (centre_column + half * width).round().clamp(max=width),
    )
    box = boxes(top, bottom, left, right, height, width)
    return box, 1 - (bottom - top) * (right - left) / (height * width)
