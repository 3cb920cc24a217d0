"""Facts about a model: config.json, class names, preprocessing; from timm or by convention where tensors do not say."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from vitascope.data.preprocessing import Preprocessing
from vitascope.errors import UserError
from vitascope.model.config import OLD_INITIALIZERS, ModelConfig


@dataclass(frozen=True)
class ModelInfo:
    """Everything besides the weights that is needed to use a model without its data."""

    model: ModelConfig
    classes: list[str]
    preparation: Preprocessing
    stored: tuple[int, int, int]  # channels, rows, columns of an image before it is prepared
    probe: bool = False  # trained without labels; the classifier is a linear probe

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_model_info(config_json: Any, source_name: str) -> ModelInfo:
    """`said`: what config.json holds, which is at `where`."""
    try:
        known = {item.name for item in fields(ModelConfig)}
        settings = {name: value for name, value in config_json["model"].items() if name in known}
        if (start := settings.get("initialize")) in OLD_INITIALIZERS:
            settings["initialize"] = OLD_INITIALIZERS[start]
        model = ModelConfig(**settings)
        how = config_json["preparation"]
        preparation = Preprocessing(tuple(how["size"]), tuple(how["mean"]), tuple(how["std"]))
        stored = tuple(config_json.get("stored", (model.in_chans, *model.image_shape)))
        facts = ModelInfo(model, config_json["classes"], preparation, stored, bool(config_json.get("probe", False)))
        lengths = len(facts.classes), len(preparation.mean), len(preparation.std)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{source_name} is incomplete ({type(error).__name__}). Restore the file, or train again."
        ) from error
    if lengths != (model.num_classes, model.in_chans, model.in_chans):
        raise UserError(
            f"{source_name} is inconsistent: num_classes={model.num_classes} and in_chans={model.in_chans}, but it lists "
            f"{lengths[0]} classes, {lengths[1]} means and {lengths[2]} standard deviations. "
            "Restore the file, or train again."
        )
    return facts


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class WeightsMetadata:
    """Known settings of ModelConfig, class names and normalisation; None: not known."""

    settings: dict[str, Any] = field(default_factory=dict)
    classes: list[str] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    library: str | None = None


def get_default_normalisation(num_channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """ImageNet's mean and deviation for colour images; halves for others."""
    return (IMAGENET_MEAN, IMAGENET_STD) if num_channels == 3 else ((0.5,) * num_channels, (0.5,) * num_channels)


def match_channel_count(channel_values: Sequence[float], num_channels: int) -> tuple[float, ...]:
    """One value per channel. If the number of channels differs, every channel gets the mean."""
    told = tuple(float(value) for value in channel_values)
    return told if len(told) == num_channels else (sum(told) / len(told),) * num_channels


def make_class_names(num_classes: int) -> list[str]:
    """ImageNet's class names for 1000 classes, else numbers."""
    if num_classes != 1000:
        return [str(number) for number in range(num_classes)]
    from timm.data.imagenet_info import ImageNetInfo

    info = ImageNetInfo()
    return make_names_unique([info.index_to_description(number).split(",")[0] for number in range(num_classes)])


def make_names_unique(names: list[str]) -> list[str]:
    """Make class names unique: duplicate names get their class index appended."""
    often = Counter(names)
    return [name if often[name] == 1 else f"{name} ({number})" for number, name in enumerate(names)]


def has_placeholder_names(class_names: list[str]) -> bool:
    """Whether the classes have no real names: 0, 1, 2, … or transformers' LABEL_0, LABEL_1, …."""
    numbers = range(len(class_names))
    return class_names in ([str(number) for number in numbers], [f"LABEL_{number}" for number in numbers])
