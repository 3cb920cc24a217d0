"""Store an image, its logits and its attention maps as compact arrays for the report page.

A row of a map is stored as bytes and one scale, its maximum divided by 255. The error is at most 0.2 % of the row's
maximum; one scale for all rows would be twenty times less precise.
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
    """Return the arrays of one image: `image` is prepared for the model, `stored` holds its bytes."""
    asked = question(model, image)
    whole, whole_scale = in_bytes(torch.cat(asked.graded[0]))  # block × head × query × key
    counts, counts_scale = in_bytes(asked.relevance[0])  # query × key, for the predicted class
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
    """Quantise rows of non-negative numbers to bytes; return them and each row's scale."""
    rows = values.float().cpu().numpy()
    scale = np.maximum(rows.max(-1), 1e-12) / 255
    return np.rint(rows / scale[..., None]).astype(np.uint8), scale.astype(np.float32)


def packed(arrays: dict[str, NDArray]) -> str:
    """Return the arrays as gzipped safetensors in base64, for an HTML page."""
    return b64encode(gzip.compress(save(arrays), mtime=0)).decode()
