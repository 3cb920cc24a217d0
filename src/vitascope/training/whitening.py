"""Training images -> a patch projection that starts on whitened patches.

In photographs neighbouring pixels are alike: a few slow patterns make up almost all of what a patch varies in, and a
random projection passes on little else. Whitening first makes every direction vary as much (Coates & Ng 2012; Jordan
2024, arXiv 2404.00498, for convolutions). Both maps are linear, so the projection simply starts as their
product; afterwards it learns as always.
"""

import torch
from torch import Tensor

from vitascope.data.training_data import TrainingData
from vitascope.model.patches import PatchEmbed, patchify
from vitascope.shapes import Patches

IMAGES = 1000  # enough to know how patches vary: 64,000 of 4 × 4 pixels, for 48 × 48 numbers
NUMBERS = 2**25  # of large images fewer are enough: more pixels than these are not held at once
LEAST = 0.01  # added to every variance (of normalised pixels: about 1 on average), so that noise is not blown up


def whitening(patches: Patches) -> tuple[Tensor, Tensor]:
    """The mean patch, and the symmetric matrix after which patches vary by 1 in all directions."""
    rows = patches.flatten(0, 1).double()
    mean = rows.mean(0)
    variances, directions = torch.linalg.eigh(torch.cov(rows.T))
    return mean, directions * (variances.clamp(min=0) + LEAST).rsqrt() @ directions.T


@torch.no_grad()
def whiten(embed: PatchEmbed, data: TrainingData) -> None:
    """The projection of patches -> the projection of whitened patches."""
    one = data.preparation(data.train.images[:1]).numel()
    images = data.preparation(data.train.evenly(max(1, min(IMAGES, NUMBERS // one))).images)
    mean, matrix = whitening(patchify(images, embed.patch_size))
    weight = embed.proj.weight
    product = weight.flatten(1).double() @ matrix
    weight.copy_(product.view_as(weight))
    if embed.proj.bias is not None:
        embed.proj.bias.sub_(product @ mean)
