"""Describe a model besides its weights: settings, class names and preprocessing, as in config.json."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from torch import Tensor

from vitascope.data.preprocessing import Preprocessing
from vitascope.errors import UserError
from vitascope.model.config import OLD_INITIALIZERS, ModelConfig
from vitascope.model.limits import MAX_SIDE

StateDict = dict[str, Tensor]  # by parameter name
ModelSettings = dict[str, Any]  # values of ModelConfig's fields, by name
JsonObject = dict[str, Any]  # contents of a JSON file such as config.json


class Normalisation(NamedTuple):
    """Mean and standard deviation of the pixels, one value per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class ModelInfo:
    """Everything besides the weights that is needed to use a model without its data."""

    model: ModelConfig
    classes: list[str]
    preparation: Preprocessing
    stored: tuple[int, int, int]  # channels, rows, columns of an image before preprocessing
    probe: bool = False  # trained without labels; the classifier is a linear probe
    temperature: float = 1.0  # divides the logits; stored in the run and in exports, not in config.json

    def as_dict(self) -> dict[str, Any]:
        """Return the contents of config.json."""
        return {name: value for name, value in asdict(self).items() if name != "temperature"}

    @property
    def is_resized_again(self) -> bool:
        """Whether images are resized to the data's size and then to the model's."""
        return self.stored[1:] != self.preparation.size

    @property
    def preprocessing_description(self) -> str:
        """The steps from an image file to the model's input, as Pillow, torchvision and NumPy users name them."""
        size, model_size = (f"{rows}×{columns}" for rows, columns in (self.stored[1:], self.preparation.size))
        mean, std = (
            ", ".join(f"{value:.4g}" for value in values) for values in (self.preparation.mean, self.preparation.std)
        )
        steps = [
            "rotate by the EXIF orientation",
            "put transparent images on white",
            f"convert to {'grayscale' if self.stored[0] == 1 else 'RGB'}",
            f"crop the centre to the shape of {size} (rows × columns)",
            f"resize to {size} (bicubic, antialiased, 8 bits)",
        ]
        if self.is_resized_again:
            steps.append(f"resize to {model_size} (bilinear)")
        if self.stored[0] != self.model.in_chans:
            steps.append(f"convert to {'grayscale' if self.model.in_chans == 1 else 'RGB'}")
        return ", ".join([*steps, "divide by 255", f"subtract {mean} and divide by {std} (per channel)"])


def parse_model_info(config_json: Any, source_name: str) -> ModelInfo:
    """Check and convert the contents of config.json. `source_name`: its path, for error messages."""
    try:
        model = _parse_model_settings(config_json["model"])
        stored_values = config_json["preparation"]
        size, mean, std = (tuple(stored_values[key]) for key in ("size", "mean", "std"))
        preprocessing = Preprocessing(size, mean, std)
        stored = tuple(config_json.get("stored", (model.in_chans, *model.image_shape)))
        info = ModelInfo(model, config_json["classes"], preprocessing, stored, bool(config_json.get("probe", False)))
        lengths = len(info.classes), len(mean), len(std)
    except UserError as error:
        raise UserError(f"{source_name} is damaged: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{source_name} is incomplete ({type(error).__name__}). Restore the file, or train again."
        ) from error
    if problem := _find_wrong_value(info):
        raise UserError(f"{source_name} is damaged: {problem}. Restore the file, or train again.")
    if lengths != (model.num_classes, model.in_chans, model.in_chans):
        raise UserError(
            f"{source_name} is inconsistent: num_classes={model.num_classes} and in_chans={model.in_chans}, but it "
            f"lists {lengths[0]} classes, {lengths[1]} means and {lengths[2]} standard deviations. "
            "Restore the file, or train again."
        )
    return info


def _parse_model_settings(stored_settings: ModelSettings) -> ModelConfig:
    """Return the model, without settings of other versions."""
    field_names = {item.name for item in fields(ModelConfig)}
    settings = {name: value for name, value in stored_settings.items() if name in field_names}
    if (initializer := settings.get("initialize")) in OLD_INITIALIZERS:
        settings["initialize"] = OLD_INITIALIZERS[initializer]
    return ModelConfig(**settings)


def _find_wrong_value(info: ModelInfo) -> str | None:
    """Return which value besides the model's settings cannot be used; None if all can."""
    preprocessing, rows_and_columns = info.preparation, info.model.image_shape
    if not isinstance(info.classes, list) or not all(isinstance(name, str) for name in info.classes):
        return "classes must be a list of names"
    if len(set(info.classes)) < len(info.classes):
        return "a class name occurs twice"
    if preprocessing.size != rows_and_columns:
        return f"size must be {list(rows_and_columns)}, the model's image size"
    if not all(map(_is_normal_number, (*preprocessing.mean, *preprocessing.std))):
        return "mean and std must be numbers"
    if min(preprocessing.std, default=1.0) <= 0:
        return "std must be greater than 0"
    sides = info.stored
    if len(sides) != 3 or not all(type(side) is int and 1 <= side <= MAX_SIDE for side in sides):
        return "stored must be the channels, rows and columns of an image"
    return None


def _is_normal_number(value: Any) -> bool:
    """Return whether float32 can hold this number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e30 < value < 1e30


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class WeightsMetadata:
    """Known settings, class names and normalisation of a weights file; None: not known."""

    settings: ModelSettings = field(default_factory=dict)
    classes: list[str] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    library: str | None = None
    stored: tuple[int, int, int] | None = None  # channels, rows, columns before preprocessing


def get_default_normalisation(num_channels: int) -> Normalisation:
    """Return ImageNet's mean and standard deviation for three channels, else 0.5 for both."""
    if num_channels == 3:
        return Normalisation(IMAGENET_MEAN, IMAGENET_STD)
    return Normalisation((0.5,) * num_channels, (0.5,) * num_channels)


def match_or_average_channel_values(channel_values: Sequence[float], num_channels: int) -> tuple[float, ...]:
    """Return one value per channel. If the number of channels differs, every channel gets the mean."""
    values = tuple(float(value) for value in channel_values)
    return values if len(values) == num_channels else (sum(values) / len(values),) * num_channels


def make_imagenet_or_numeric_class_names(num_classes: int) -> list[str]:
    """Return ImageNet's class names for 1000 classes, else numbers."""
    if num_classes != 1000:
        return [str(index) for index in range(num_classes)]
    from timm.data.imagenet_info import ImageNetInfo

    info = ImageNetInfo()
    return make_names_unique([info.index_to_description(index).split(",")[0] for index in range(num_classes)])


def make_names_unique(names: list[str]) -> list[str]:
    """Make class names unique: duplicate names get their class index appended."""
    counts = Counter(names)
    return [name if counts[name] == 1 else f"{name} ({index})" for index, name in enumerate(names)]


def has_placeholder_names(class_names: list[str]) -> bool:
    """Return whether the classes have no real names: 0, 1, 2, … or transformers' LABEL_0, LABEL_1, …."""
    indices = range(len(class_names))
    return class_names in ([str(index) for index in indices], [f"LABEL_{index}" for index in indices])
