"""Images -> tokens, with a switch for every mistake: patches cut, projected, class token and positions put in."""

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from vitascope.checking.reference import Options, Switch

PIXELS = {  # orders of the numbers inside a patch, all of them right
    "chw": "channel, row, column",
    "hwc": "row, column, channel",
    "cwh": "channel, column, row",
    "whc": "column, row, channel",
}
NAMES = {"c": "channel", "h": "height", "w": "width"}
CUTS = {
    "both": "batch channel (height row) (width column)",
    "rows": "batch channel (height row) (column width)",
    "columns": "batch channel (row height) (width column)",
}
PATCHES = [
    Switch("patches-in-column-order", {"order": "(column row)"}),
    *(Switch("pixels-interleaved", {"cut": how}) for how in (*CUTS, "strips", "channel strips")),
]
CLASS_TOKEN = [
    Switch("class-token-at-end", {"class_at": how}) for how in ("end", "end, read first", "start, read last")
]
POSITIONS = [
    Switch("position-misplaced", {"position": how})
    for how in ("before", "end", "none", "not-class", "rolled", "class-only", "twice", "each-block")
]


def patches_of(images: Tensor, size: int, options: Options) -> Tensor:
    """(batch, channel, height, width) -> (batch, patch, pixel)."""
    batch, channels, height, width = images.shape
    count, pixels = (height // size) * (width // size), options.get("pixels", "chw")
    cut = options.get("cut")
    if cut == "strips":
        return images.reshape(batch, count, -1)
    if cut == "channel strips":
        return images.reshape(batch, channels, count, size * size).transpose(1, 2).flatten(2)
    left = CUTS.get(cut or "", "batch channel (row height) (column width)")
    inner = " ".join(NAMES[letter] for letter in pixels)
    right = f"batch {options.get('order', '(row column)')} ({inner})"
    return rearrange(images, f"{left} -> {right}", height=size, width=size)


def assemble(patches: Tensor, token: Tensor | None, table: Tensor | None, options: Options) -> Tensor:
    """Class token in front, positions added; a table for patches only leaves the class token as it is."""
    position = options.get("position")
    first = None if token is None else token.reshape(1, 1, -1).expand(len(patches), 1, -1)
    if table is not None:
        table = table.reshape(1, *table.shape[-2:])
        inside = table[:, : patches.shape[1] + (0 if first is None else 1)]
        if first is None or table.shape[1] == patches.shape[1]:
            return _joined(patches + (0 if position in ("none", "end", "each-block") else table), first, options)
        if position == "before":
            return _joined(patches + inside[:, : patches.shape[1]], first, options)
        if position == "not-class":
            return _joined(patches + inside[:, 1:], first, options)
        if position == "class-only":
            return _joined(patches, first + inside[:, :1], options)
        inside = inside.roll(1, 1) if position == "rolled" else inside * (2 if position == "twice" else 1)
        tokens = _joined(patches, first, options)
        return tokens if position in ("none", "end", "each-block") else tokens + inside
    return _joined(patches, first, options)


def _joined(patches: Tensor, first: Tensor | None, options: Options) -> Tensor:
    if first is None:
        return patches
    at_end = options.get("class_at", "").startswith("end")
    return torch.cat([patches, first] if at_end else [first, patches], dim=1)


def read_token(tokens: Tensor, options: Options) -> Tensor:
    """Return the token that the user's head reads as the class token."""
    return tokens[:, -1 if options.get("class_at") in ("end", "start, read last") else 0]


def projected(patches: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution's or a linear layer's weight, as the same linear map."""
    return F.linear(patches, weight.flatten(1), bias)
