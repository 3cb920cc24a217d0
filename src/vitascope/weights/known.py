"""What is known of weights besides the weights: from a config.json, from timm, or by custom."""

from dataclasses import dataclass, field
from typing import Any

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Known:
    """Settings of ModelConfig that are sure; None where nothing is said."""

    settings: dict[str, Any] = field(default_factory=dict)
    classes: list[str] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    library: str | None = None


def imagenet_normalisation(channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """ImageNet's mean and deviation for colour images; halves for others."""
    return (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else ((0.5,) * channels, (0.5,) * channels)


def class_names(count: int) -> list[str]:
    """ImageNet's where there are a thousand, else numbers."""
    if count != 1000:
        return [str(number) for number in range(count)]
    from timm.data.imagenet_info import ImageNetInfo

    info = ImageNetInfo()
    names = [info.index_to_description(number).split(",")[0] for number in range(count)]
    # Two cranes and two maillots: a class's name must be its own.
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names)]
