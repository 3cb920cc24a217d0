"""What is known of weights besides the weights: from a config.json, from timm, or by custom."""

from collections import Counter
from collections.abc import Sequence
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


def for_channels(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """A mean or deviation for each channel; where their number is another, the mean of all."""
    told = tuple(float(value) for value in values)
    return told if len(told) == channels else (sum(told) / len(told),) * channels


def class_names(count: int) -> list[str]:
    """ImageNet's where there are a thousand, else numbers."""
    if count != 1000:
        return [str(number) for number in range(count)]
    from timm.data.imagenet_info import ImageNetInfo

    info = ImageNetInfo()
    return unique([info.index_to_description(number).split(",")[0] for number in range(count)])


def unique(names: list[str]) -> list[str]:
    """A class's name must be its own: of two cranes each gets its number behind it."""
    often = Counter(names)
    return [name if often[name] == 1 else f"{name} ({number})" for number, name in enumerate(names)]


def anonymous(classes: list[str]) -> bool:
    """Nobody named them: they are 0, 1, 2, or transformers' LABEL_0, LABEL_1, LABEL_2."""
    numbers = range(len(classes))
    return classes in ([str(number) for number in numbers], [f"LABEL_{number}" for number in numbers])
