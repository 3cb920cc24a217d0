"""Open pretrained weights or any trained classifier: `timm:NAME`, `hf:REPO`, a file or a folder."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitascope.data.preprocessing import Preprocessing
from vitascope.errors import UserError
from vitascope.model.config import ModelConfig, Size, check_size
from vitascope.model.vit import VisionTransformer
from vitascope.weights.files import (
    WEIGHTS_SUFFIXES,
    download_hub_repository,
    download_timm_model,
    read_timm_metadata,
    read_weights_file,
)
from vitascope.weights.folders import (
    build_timm_from_config,
    find_weights_file,
    is_model_folder,
    load_timm_weights,
    read_config_json,
    read_model_folder,
)
from vitascope.weights.infer_config import check_weights_fit, infer_config
from vitascope.weights.model_info import (
    ModelInfo,
    WeightsMetadata,
    get_default_normalisation,
    make_class_names,
    make_names_unique,
    match_channel_count,
)
from vitascope.weights.parameter_names import convert_to_timm_names

ONLINE_PREFIXES = ("timm:", "hf:")
MAX_RELATIVE_DIFFERENCE = 1e-4  # relative to the largest logit: rounding is far below, another activation above
IMAGENET_CLASSES = "class names of ImageNet, because there are 1000 classes"
ACCEPTED_WEIGHTS_HELP = "Use timm:NAME, hf:REPO, a file (.safetensors, .pth), a folder with config.json, or a run."


@dataclass(frozen=True)
class PretrainedModel:
    """A trained model: weights in float32, sizes, classes, preparation, and the assumptions made."""

    name: str
    library: str  # whose names the weights had
    info: ModelInfo
    weights: dict[str, Tensor]
    assumptions: list[str] = field(default_factory=list)
    dropped_names: list[str] = field(default_factory=list)  # weights that our model has no place for
    notes: list[str] = field(default_factory=list)

    @property
    def user_messages(self) -> list[str]:
        """Lines for the user: assumptions, removed weights and notes."""
        left_out = [f"removed: {', '.join(self.dropped_names)}"] if self.dropped_names else []
        return (
            [f"assumed: {words}" for words in self.assumptions] + left_out + [f"note: {words}" for words in self.notes]
        )

    def build_model(self) -> VisionTransformer:
        """The model with these weights, in eval mode."""
        return build_eval_model(self.info.model, self.weights)


def build_eval_model(config: ModelConfig, weights: dict[str, Tensor]) -> VisionTransformer:
    built = VisionTransformer(config)
    built.load_state_dict(weights)
    return built.eval()


def open_weights(model_ref: str, *, num_heads: int | None = None, img_size: Size | None = None) -> PretrainedModel:
    """Open what `weights=` accepts. `num_heads`, `img_size`: used if the weights do not define them."""
    if img_size is not None:
        img_size = check_size("img_size", img_size)
    given = UserOverrides(num_heads, img_size)
    if model_ref.startswith("timm:"):
        return _open_timm_model(model_ref, given)
    if model_ref.startswith("hf:"):
        return _open_model_folder(download_hub_repository(model_ref.removeprefix("hf:")), model_ref, given)
    path = Path(model_ref).expanduser()
    if path.is_dir():
        return _open_model_folder(path, model_ref, given)
    if path.suffix in WEIGHTS_SUFFIXES and is_model_folder(path.parent):
        return _open_file_with_config(path, model_ref, given)
    if path.suffix in WEIGHTS_SUFFIXES:
        tensors, beside = read_weights_file(path)
        return pretrained_from_state_dict(
            tensors,
            str(path),
            given.add_to_metadata(WeightsMetadata(), model_ref),
            extra_dropped=beside,
            requested_size=img_size,
        )
    if path.exists():
        raise UserError(
            f"{model_ref} is not a weights file: its name must end in {', '.join(WEIGHTS_SUFFIXES)}. {ACCEPTED_WEIGHTS_HELP}"
        )
    raise UserError(f"There are no weights '{model_ref}'. {ACCEPTED_WEIGHTS_HELP}")


@dataclass(frozen=True)
class UserOverrides:
    """Settings of the weights that the user gives."""

    num_heads: int | None = None
    img_size: Size | None = None  # used only if nothing else defines it

    def add_to_metadata(self, metadata: WeightsMetadata, model_ref: str) -> WeightsMetadata:
        """Add the user's settings to `known`. A contradiction with config.json is an error."""
        if self.num_heads is None:
            return metadata
        self.check_num_heads(metadata.settings.get("num_heads", self.num_heads), model_ref)
        return replace(metadata, settings=metadata.settings | {"num_heads": self.num_heads})

    def check_num_heads(self, actual_num_heads: int, model_ref: str) -> None:
        if self.num_heads not in (None, actual_num_heads):
            raise UserError(
                f"{model_ref} has num_heads={actual_num_heads}, so num_heads={self.num_heads} would be a different model. "
                "Leave num_heads out."
            )


def pretrained_from_state_dict(
    state_dict: dict[str, Tensor],
    name: str,
    metadata: WeightsMetadata | None = None,
    *,
    extra_dropped: list[str] | None = None,
    requested_size: Size | None = None,
) -> PretrainedModel:
    """Convert any library's state dict. `known`: further facts, from config.json or from the user."""
    metadata = metadata or WeightsMetadata()
    renamed = convert_to_timm_names(state_dict, name)
    settings = renamed.settings | metadata.settings
    config, assumed = infer_config(renamed.weights, renamed.library, name, requested_size=requested_size, **settings)
    facts, dropped = make_model_info(config, metadata, assumed), [*(extra_dropped or []), *renamed.dropped_names]
    return PretrainedModel(
        name, metadata.library or renamed.library, facts, renamed.weights, assumed, dropped, renamed.notes
    )


def make_model_info(config: ModelConfig, metadata: WeightsMetadata, assumptions: list[str]) -> ModelInfo:
    mean, std = metadata.mean, metadata.std
    if mean is None or std is None or {len(mean), len(std)} != {config.in_chans}:
        mean, std = get_default_normalisation(config.in_chans)
        assumptions.append(
            f"images normalised with mean {_format_values(mean)}, standard deviation {_format_values(std)}"
        )
    classes = (
        make_names_unique(metadata.classes)
        if metadata.classes and len(metadata.classes) == config.num_classes
        else None
    )
    if classes is None:
        classes = make_class_names(config.num_classes)
        if config.num_classes == 1000:
            assumptions.append(IMAGENET_CLASSES)
    stored = (config.in_chans, *config.image_shape)
    return ModelInfo(config, classes, Preprocessing(config.image_shape, tuple(mean), tuple(std)), stored)


def _open_model_folder(
    folder: Path, model_ref: str, overrides: UserOverrides, weights_path: Path | None = None
) -> PretrainedModel:
    found = read_model_folder(folder, weights_path)
    where = str(weights_path or folder)
    if isinstance(found.metadata, ModelInfo):
        overrides.check_num_heads(found.metadata.model.num_heads, model_ref)
        check_weights_fit(found.tensors, found.metadata.model, where)
        return PretrainedModel(model_ref, "vitascope", found.metadata, found.tensors, dropped_names=found.extra_names)
    known = overrides.add_to_metadata(found.metadata, model_ref)
    made = replace(
        pretrained_from_state_dict(
            found.tensors, where, known, extra_dropped=found.extra_names, requested_size=overrides.img_size
        ),
        name=model_ref,
    )
    if found.timm_model is not None:
        check_same_output(made, load_timm_weights(found.timm_model, made.weights, where))
    return made


def _open_file_with_config(weights_path: Path, model_ref: str, overrides: UserOverrides) -> PretrainedModel:
    """A weights file in a folder with config.json, such as best.safetensors of a run."""
    config = weights_path.parent / "config.json"
    try:
        found = _open_model_folder(weights_path.parent, model_ref, overrides, weights_path)
    except UserError as error:
        hint = f"It was read with {config}. If that belongs to another model, move the weights to their own folder."
        raise UserError(f"{error} {hint}") from error
    return replace(found, notes=[*found.notes, f"sizes, classes and normalisation are from {config}"])


def _open_timm_model(model_ref: str, overrides: UserOverrides) -> PretrainedModel:
    theirs = download_timm_model(model_ref.removeprefix("timm:"))
    found = pretrained_from_state_dict(
        theirs.state_dict(), model_ref, overrides.add_to_metadata(read_timm_metadata(theirs), model_ref)
    )
    check_same_output(found, theirs)
    return found


def check_same_output(pretrained: PretrainedModel, reference_model: Any) -> None:
    """Compare the outputs for one image, and raise an error if the model is not a plain ViT."""
    images = torch.randn(1, *pretrained.info.stored, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, told = reference_model.eval()(images), pretrained.build_model()(images)
    if wanted.shape != told.shape or not (
        wanted - told
    ).abs().max() <= MAX_RELATIVE_DIFFERENCE * wanted.abs().max().clamp(min=1e-6):
        raise UserError(
            f"{pretrained.name} is not a plain ViT: with the same weights, Vitascope's model gives a different output."
        )


def _format_values(values: Any) -> str:
    return "/".join(f"{value:.3g}" for value in values)


@dataclass(frozen=True)
class AnyModel:
    """In eval mode. `classes`: their names, None where only their number is known."""

    module: nn.Module
    preprocessing: Preprocessing
    num_classes: int
    classes: list[str] | None


def open_any(model_ref: str) -> AnyModel:
    """`timm:NAME` and folders that timm saved go through timm; everything else is what `weights=` takes."""
    if model_ref.startswith("timm:"):
        return wrap_timm_model(download_timm_model(model_ref.removeprefix("timm:")), None)
    path = (
        download_hub_repository(model_ref.removeprefix("hf:"))
        if model_ref.startswith("hf:")
        else Path(model_ref).expanduser()
    )
    said = read_config_json(path)  # `open_weights` reports what is wrong with it
    if "architecture" in said:
        model = load_timm_weights(
            build_timm_from_config(said, path), read_weights_file(find_weights_file(path))[0], str(path)
        )
        return wrap_timm_model(model, said.get("label_names"))
    found = open_weights(model_ref)
    return AnyModel(found.build_model(), found.info.preparation, found.info.model.num_classes, found.info.classes)


def wrap_timm_model(timm_model: Any, class_names: list[str] | None) -> AnyModel:
    """Read preparation and classes of a timm model. Channels and image size come from the network itself."""
    from timm.data.config import resolve_model_data_config

    said: dict[str, Any] = resolve_model_data_config(timm_model)
    size = getattr(getattr(timm_model, "patch_embed", None), "img_size", None) or said["input_size"][1:]
    first = next((part for part in timm_model.modules() if isinstance(part, nn.Conv2d)), None)
    channels = first.in_channels if first is not None else said["input_size"][0]
    mean, std = (match_channel_count(said[name], channels) for name in ("mean", "std"))
    usable = class_names is not None and len(class_names) == timm_model.num_classes == len(set(class_names))
    preparation = Preprocessing((int(size[0]), int(size[1])), mean, std)
    return AnyModel(timm_model.eval(), preparation, timm_model.num_classes, class_names if usable else None)
