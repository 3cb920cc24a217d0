"""Read and write config.json: model sizes, class names and image preparation."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from vitascope.data.preparation import Preparation
from vitascope.errors import UserError
from vitascope.model.config import OLD_INITIALIZERS, ModelConfig


@dataclass(frozen=True)
class ModelFacts:
    """Everything besides the weights that is needed to use a model without its data."""

    model: ModelConfig
    classes: list[str]
    preparation: Preparation
    stored: tuple[int, int, int]  # channels, rows, columns of an image before it is prepared
    probe: bool = False  # trained without labels; the classifier is a linear probe

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def facts_from(said: Any, where: str) -> ModelFacts:
    """`said`: what config.json holds, which is at `where`."""
    try:
        known = {item.name for item in fields(ModelConfig)}
        settings = {name: value for name, value in said["model"].items() if name in known}
        if (start := settings.get("initialize")) in OLD_INITIALIZERS:
            settings["initialize"] = OLD_INITIALIZERS[start]
        model = ModelConfig(**settings)
        how = said["preparation"]
        preparation = Preparation(tuple(how["size"]), tuple(how["mean"]), tuple(how["std"]))
        stored = tuple(said.get("stored", (model.in_chans, *model.image_shape)))
        facts = ModelFacts(model, said["classes"], preparation, stored, bool(said.get("probe", False)))
        lengths = len(facts.classes), len(preparation.mean), len(preparation.std)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{where} is incomplete ({type(error).__name__}). Restore the file, or train again.") from error
    if lengths != (model.num_classes, model.in_chans, model.in_chans):
        raise UserError(
            f"{where} is inconsistent: num_classes={model.num_classes} and in_chans={model.in_chans}, but it lists "
            f"{lengths[0]} classes, {lengths[1]} means and {lengths[2]} standard deviations. "
            "Restore the file, or train again."
        )
    return facts
