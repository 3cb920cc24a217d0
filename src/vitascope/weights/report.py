"""Report of an adaptation of weights, for the terminal, for JSON and for the run folder."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Change:
    """One changed tensor. `lost`: relative error, the norm of the difference divided by the norm of the original."""

    name: str
    before: list[int]
    after: list[int]
    how: str
    lost: float


@dataclass(frozen=True)
class Report:
    """What an adaptation changed, or why it is not possible."""

    weights: str
    library: str
    settings: dict[str, Any]  # requested
    image_before: list[int]  # pixels: rows, columns
    image_after: list[int]
    patch_before: list[int]
    patch_after: list[int]
    grid_before: list[int]  # rows, columns
    grid_after: list[int]
    tokens_before: int
    tokens_after: int
    pixels_seen: float  # fraction of the image's pixels covered by patches
    flops_before: int  # per image
    flops_after: int
    resampled: list[Change] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    kept: int = 0  # unchanged tensors
    assumed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    alternative: dict[str, Any] = field(default_factory=dict)  # upscaling the images instead
    refused: str | None = None
