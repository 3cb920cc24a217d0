"""Facts about weights that the tensors do not contain: from config.json, from timm, or by convention."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Known:
    """Known settings of ModelConfig, class names and normalisation; None: not known."""

    settings: dict[str, Any] = field(default_factory=dict)
    classes: list[str] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    library: str | None = None


def imagenet_normalisation(channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """ImageNet's mean and deviation for colour images; halves for others."""
    return (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else ((0.5,) * channels, (0.5,) * channels)


def for_channels(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """One value per channel. If the number of channels differs, every channel gets the mean."""
    told = tuple(float(value) for value in values)
    return told if len(told) == channels else (sum(told) / len(told),) * channels


def class_names(count: int) -> list[str]:
    """ImageNet's class names for 1000 classes, else numbers."""
    if count != 1000:
        return [str(number) for number in range(count)]
    from timm.data.imagenet_info import ImageNetInfo

    info = ImageNetInfo()
    return unique([info.index_to_description(number).split(",")[0] for number in range(count)])


def unique(names: list[str]) -> list[str]:
    """Make class names unique: duplicate names get their class index appended."""
    often = Counter(names)
    return [name if often[name] == 1 else f"{name} ({number})" for number, name in enumerate(names)]


def anonymous(classes: list[str]) -> bool:
    """Whether the classes have no real names: 0, 1, 2, … or transformers' LABEL_0, LABEL_1, …."""
    numbers = range(len(classes))
    return classes in ([str(number) for number in numbers], [f"LABEL_{number}" for number in numbers])
