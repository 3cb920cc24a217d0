"""What an adaptation did to weights, as data: for the terminal, for JSON, for a run's directory."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Change:
    """One tensor that is not as it was. `lost` is a share: what cannot be had back from the new one."""

    name: str
    before: list[int]
    after: list[int]
    how: str
    lost: float


@dataclass(frozen=True)
class Report:
    """What an adaptation did, or why it was refused."""

    weights: str
    library: str
    settings: dict[str, Any]  # asked for
    grid_before: list[int]  # rows, columns
    grid_after: list[int]
    tokens_before: int
    tokens_after: int
    pixels_seen: float  # share of the image's pixels that reach a patch
    flops_before: int  # an image
    flops_after: int
    resampled: list[Change] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    kept: int = 0  # tensors taken over as they are
    assumed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    alternative: dict[str, Any] = field(default_factory=dict)  # resizing images up instead
    refused: str | None = None
