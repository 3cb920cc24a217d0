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
from torch import Tensor, nn

from vitascope.data.source import UInt8Images
from vitascope.explain.attribution import question
from vitascope.explain.maps import model_answer
from vitascope.shapes import Images


def answer(model: nn.Module, image: Images, stored: UInt8Images) -> dict[str, NDArray]:
    """`image`: one, as the model sees it; `stored`: the same, as bytes to show."""
    asked = question(model, image)
    whole, whole_scale = in_bytes(torch.cat(asked.graded[0]))  # block × head × query × key
    counts, counts_scale = in_bytes(asked.relevance[0])  # query × key, for the answer
    with torch.no_grad():
        logits = model_answer(model, image)
    return {
        "logits": logits[0].float().cpu().numpy(),
        "maps_scale": whole_scale,
        "relevance_scale": counts_scale,
        "image": np.ascontiguousarray(stored[0].permute(1, 2, 0).cpu().numpy()),
        "maps": whole,
        "relevance": counts,
    }


def in_bytes(values: Tensor) -> tuple[NDArray, NDArray]:
    """Rows of numbers from 0 up -> bytes, and each row's scale."""
    rows = values.float().cpu().numpy()
    scale = np.maximum(rows.max(-1), 1e-12) / 255
    return np.rint(rows / scale[..., None]).astype(np.uint8), scale.astype(np.float32)


def packed(arrays: dict[str, NDArray]) -> str:
    """Safetensors, gzipped, as text that can stand in a page."""
    return b64encode(gzip.compress(save(arrays), mtime=0)).decode()
