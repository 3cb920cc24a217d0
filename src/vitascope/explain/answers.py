"""An image's way through a model -> arrays a page can draw: the image, its logits, every map in a byte per number.

A row of a map is stored as bytes and one scale, its largest value over 255: a cell is wrong by at most 0.2 % of the
row's largest. One scale for all would lose twenty times more.
"""

import gzip
from base64 import b64encode

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save
from torch import nn

from vitascope.data.source import UInt8Images
from vitascope.explain.maps import logits_and_maps
from vitascope.shapes import Images


@torch.no_grad()
def answer(model: nn.Module, image: Images, stored: UInt8Images) -> dict[str, NDArray]:
    """`image`: one, as the model sees it; `stored`: the same, as bytes to show."""
    logits, maps = logits_and_maps(model, image)
    whole = torch.cat(maps).float().cpu().numpy()  # block × head × query × key
    scale = np.maximum(whole.max(-1), 1e-12) / 255
    return {
        "logits": logits[0].float().cpu().numpy(),
        "maps_scale": scale.astype(np.float32),
        "image": np.ascontiguousarray(stored[0].permute(1, 2, 0).cpu().numpy()),
        "maps": np.rint(whole / scale[..., None]).astype(np.uint8),
    }


def packed(arrays: dict[str, NDArray]) -> str:
    """Safetensors, gzipped, as text that can stand in a page."""
    return b64encode(gzip.compress(save(arrays), mtime=0)).decode()
