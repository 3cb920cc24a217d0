"""Read pretrained weights of a ViT: `timm:NAME`, `hf:REPO`, `bundled:NAME`, a file or a folder."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from vitascope.data.preprocessing import Preprocessing
from vitascope.errors import UserError
from vitascope.model.config import ModelConfig, Size, check_and_convert_size
from vitascope.model.vit import VisionTransformer
from vitascope.weights.files import (
    WEIGHTS_SUFFIXES,
    download_hub_repository,
    download_timm_model,
    read_float32_weights_and_extra_names,
    read_plain_timm_vit_metadata,
)
from vitascope.weights.folders import (
    is_model_folder,
    load_weights_into_timm_model,
    read_model_folder,
)
from vitascope.weights.infer_config import check_weights_fit_config, guess_num_heads, infer_config_and_assumptions
from vitascope.weights.model_info import (
    ModelInfo,
    StateDict,
    WeightsMetadata,
    get_default_normalisation,
    make_imagenet_or_numeric_class_names,
    make_names_unique,
)
from vitascope.weights.parameter_names import convert_weights_to_timm_format

MODEL_PREFIXES = ("timm:", "hf:", "bundled:")  # all other names are paths
MAX_RELATIVE_DIFFERENCE = 1e-4  # relative to the largest logit: rounding is far below, another activation above
IMAGENET_CLASSES = "class names of ImageNet, because there are 1000 classes"
BUNDLED_FOLDER = Path(__file__).parents[1] / "bundled"  # one model folder per name
ACCEPTED_WEIGHTS_HELP = "Use timm:NAME, hf:REPO, a file (.safetensors, .pth), a folder with config.json, or a run."


@dataclass(frozen=True)
class PretrainedModel:
    """A trained model: weights in float32, settings, classes, preprocessing, and the assumptions made."""

    name: str
    library: str  # whose parameter names the weights had
    info: ModelInfo
    weights: StateDict
    assumptions: list[str] = field(default_factory=list)
    dropped_names: list[str] = field(default_factory=list)  # weights that the model does not have
    notes: list[str] = field(default_factory=list)

    @property
    def user_messages(self) -> list[str]:
        """Lines for the user: assumptions, dropped weights and notes."""
        assumed = [f"assumed {text}" for text in self.assumptions]
        dropped = [f"dropped {', '.join(self.dropped_names)}"] if self.dropped_names else []
        return [*assumed, *dropped, *self.notes]

    def build_model(self) -> VisionTransformer:
        """Build the model with these weights, in eval mode."""
        return build_eval_model(self.info.model, self.weights)


def build_eval_model(config: ModelConfig, weights: StateDict) -> VisionTransformer:
    model = VisionTransformer(config)
    model.load_state_dict(weights)
    return model.eval()


def read_pretrained_model(
    model_ref: str, *, num_heads: int | None = None, img_size: Size | None = None
) -> PretrainedModel:
    """Read what `weights=` accepts. `num_heads`, `img_size`: used if the weights do not define them."""
    if img_size is not None:
        img_size = check_and_convert_size("img_size", img_size)
    overrides = UserOverrides(num_heads, img_size)
    if model_ref.startswith("timm:"):
        timm_model = download_timm_model(model_ref.removeprefix("timm:"))
        return convert_and_verify_timm_model(model_ref, timm_model, overrides)
    if model_ref.startswith("hf:"):
        return _open_model_folder(download_hub_repository(model_ref.removeprefix("hf:")), model_ref, overrides)
    if model_ref.startswith("bundled:"):
        return _open_model_folder(get_bundled_folder(model_ref.removeprefix("bundled:")), model_ref, overrides)
    path = Path(model_ref).expanduser()
    if path.is_dir():
        return _open_model_folder(path, model_ref, overrides)
    if path.suffix in WEIGHTS_SUFFIXES and is_model_folder(path.parent):
        return _open_weights_beside_config(path, model_ref, overrides)
    if path.suffix in WEIGHTS_SUFFIXES:
        return _open_file_without_config(path, model_ref, overrides)
    if path.exists():
        raise UserError(
            f"{model_ref} is not a weights file: its name must end in {', '.join(WEIGHTS_SUFFIXES)}. "
            f"{ACCEPTED_WEIGHTS_HELP}"
        )
    raise UserError(f"There are no weights '{model_ref}'. {ACCEPTED_WEIGHTS_HELP}")


def get_bundled_folder(bundled_name: str) -> Path:
    """Return the folder of a model that is part of the package."""
    names = sorted(path.parent.name for path in BUNDLED_FOLDER.glob("*/config.json"))
    if bundled_name in names:
        return BUNDLED_FOLDER / bundled_name
    available = f"Bundled models: {', '.join(names)}." if names else "This version bundles no models."
    raise UserError(f"There is no bundled model '{bundled_name}'. {available}")


@dataclass(frozen=True)
class UserOverrides:
    """Settings of the weights that the user gives."""

    num_heads: int | None = None
    img_size: Size | None = None  # used only if nothing else defines it

    def add_num_heads_to_metadata(self, metadata: WeightsMetadata, model_ref: str) -> WeightsMetadata:
        """Add the user's settings to `metadata`. A contradiction with config.json is an error."""
        if self.num_heads is None:
            return metadata
        self.check_num_heads(metadata.settings.get("num_heads", self.num_heads), model_ref)
        return replace(metadata, settings=metadata.settings | {"num_heads": self.num_heads})

    def check_num_heads(self, actual_num_heads: int, model_ref: str) -> None:
        if self.num_heads not in (None, actual_num_heads):
            raise UserError(
                f"{model_ref} has num_heads={actual_num_heads}, so num_heads={self.num_heads} would be a different "
                "model. Leave num_heads out."
            )


def build_pretrained_from_state_dict(
    state_dict: StateDict,
    name: str,
    metadata: WeightsMetadata | None = None,
    *,
    extra_dropped: list[str] | None = None,
    requested_size: Size | None = None,
) -> PretrainedModel:
    """Convert the state dict of any library. `metadata`: what is known from config.json or from the user."""
    metadata = metadata or WeightsMetadata()
    renamed = convert_weights_to_timm_format(state_dict, name)
    settings = renamed.settings | metadata.settings
    config, assumptions = infer_config_and_assumptions(
        renamed.weights, renamed.library, name, requested_size=requested_size, **settings
    )
    info, dropped = (
        complete_model_info_and_add_assumptions(config, metadata, assumptions),
        [*(extra_dropped or []), *renamed.dropped_names],
    )
    return PretrainedModel(
        name, metadata.library or renamed.library, info, renamed.weights, assumptions, dropped, renamed.notes
    )


def complete_model_info_and_add_assumptions(
    config: ModelConfig, metadata: WeightsMetadata, assumptions: list[str]
) -> ModelInfo:
    """Combine settings and metadata. Default normalisation and class names are appended to `assumptions`."""
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
        classes = make_imagenet_or_numeric_class_names(config.num_classes)
        if config.num_classes == 1000:
            assumptions.append(IMAGENET_CLASSES)
    stored = metadata.stored or (config.in_chans, *config.image_shape)
    return ModelInfo(config, classes, Preprocessing(config.image_shape, tuple(mean), tuple(std)), stored)


def _open_model_folder(
    folder: Path, model_ref: str, overrides: UserOverrides, weights_path: Path | None = None
) -> PretrainedModel:
    contents = read_model_folder(folder, weights_path)
    info, tensors, extra_names = contents.metadata, contents.tensors, contents.extra_names
    source_name = str(weights_path or folder)
    if isinstance(info, ModelInfo):
        overrides.check_num_heads(info.model.num_heads, model_ref)
        check_weights_fit_config(tensors, info.model, source_name)
        return PretrainedModel(model_ref, "vitascope", info, tensors, dropped_names=extra_names)
    metadata = overrides.add_num_heads_to_metadata(info, model_ref)
    pretrained = build_pretrained_from_state_dict(
        tensors, source_name, metadata, extra_dropped=extra_names, requested_size=overrides.img_size
    )
    pretrained = replace(pretrained, name=model_ref)
    if contents.timm_model is not None:
        check_same_output_as_reference(
            pretrained, load_weights_into_timm_model(contents.timm_model, pretrained.weights, source_name)
        )
    return pretrained


def _open_file_without_config(weights_path: Path, model_ref: str, overrides: UserOverrides) -> PretrainedModel:
    tensors, extra_names = read_float32_weights_and_extra_names(weights_path)
    metadata = overrides.add_num_heads_to_metadata(WeightsMetadata(), model_ref)
    pretrained = build_pretrained_from_state_dict(
        tensors, str(weights_path), metadata, extra_dropped=extra_names, requested_size=overrides.img_size
    )
    usual_heads = guess_num_heads(pretrained.info.model.embed_dim)
    if overrides.num_heads is None or usual_heads in (None, overrides.num_heads):
        return pretrained
    return replace(
        pretrained, notes=[*pretrained.notes, make_num_heads_override_warning(overrides.num_heads, usual_heads)]
    )


def make_num_heads_override_warning(num_heads: int, pretrained_num_heads: int) -> str:
    return (
        f"num_heads={num_heads} instead of {pretrained_num_heads} regroups the pretrained heads, which changes the "
        "attention. Set it only to correct a wrongly guessed head count."
    )


def _open_weights_beside_config(weights_path: Path, model_ref: str, overrides: UserOverrides) -> PretrainedModel:
    """Open a weights file in a folder with config.json, such as best.safetensors of a run."""
    config_path = weights_path.parent / "config.json"
    try:
        pretrained = _open_model_folder(weights_path.parent, model_ref, overrides, weights_path)
    except UserError as error:
        hint = (
            f"It was read with {config_path}. If that belongs to another model, move the weights to their own folder."
        )
        raise UserError(f"{error} {hint}") from error
    note = f"sizes, classes and normalisation are from {config_path}"
    return replace(pretrained, notes=[*pretrained.notes, note])


def convert_and_verify_timm_model(
    model_ref: str, timm_model: nn.Module, overrides: UserOverrides | None = None
) -> PretrainedModel:
    """Convert a plain ViT of timm and compare the outputs. Any other network is a UserError."""
    metadata = read_plain_timm_vit_metadata(timm_model)
    metadata = overrides.add_num_heads_to_metadata(metadata, model_ref) if overrides else metadata
    pretrained = build_pretrained_from_state_dict(timm_model.state_dict(), model_ref, metadata)
    check_same_output_as_reference(pretrained, timm_model)
    return pretrained


def check_same_output_as_reference(pretrained: PretrainedModel, reference_model: nn.Module) -> None:
    """Compare the outputs for one image, and raise an error if the model is not a plain ViT."""
    config = pretrained.info.model
    images = torch.randn(1, config.in_chans, *config.image_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, output = reference_model.eval()(images), pretrained.build_model()(images)
    tolerance = MAX_RELATIVE_DIFFERENCE * expected.abs().max().clamp(min=1e-6)
    if expected.shape != output.shape or not (expected - output).abs().max() <= tolerance:
        raise UserError(
            f"{pretrained.name} is not a plain ViT: with the same weights, Vitascope's model gives a different output."
        )


def _format_values(values: Sequence[float]) -> str:
    return "/".join(f"{value:.3g}" for value in values)
