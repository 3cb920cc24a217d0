"""Features -> how near they are to each of many learned directions: DINO's head (Caron et al. 2021, section 3.2)."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.shapes import Features, Logits


class PrototypeHead(nn.Module):
    """Three layers, a narrow normalised one, and cosines with the prototypes: answers between -1 and 1.

    The prototypes have length 1 always (the authors' `norm_last_layer`), so only their directions learn. With
    `batch_norm` (the authors' choice for convolutional networks) the hidden layers see each image beside the others of
    its batch: what all have in common, which is most of what a young ViT says of small images, falls away."""

    def __init__(
        self, *, embed_dim: int, hidden: int, bottleneck: int, prototypes: int, batch_norm: bool = False
    ) -> None:
        super().__init__()
        widths = [embed_dim, hidden, hidden]
        self.layers = nn.Sequential()
        for before, after in pairwise(widths):
            self.layers.append(nn.Linear(before, after, bias=not batch_norm))  # batch norm would undo the bias
            if batch_norm:
                self.layers.append(nn.BatchNorm1d(after, track_running_stats=False))
            self.layers.append(nn.GELU())
        self.layers.append(nn.Linear(hidden, bottleneck))
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias) if layer.bias is not None else None
        self.prototypes = nn.Parameter(F.normalize(torch.randn(prototypes, bottleneck), dim=1))

    def forward(self, features: Features) -> Logits:
        return F.linear(F.normalize(self.layers(features), dim=1), self._directions())

    def _directions(self) -> Tensor:
        return F.normalize(self.prototypes, dim=1)
