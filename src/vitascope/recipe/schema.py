"""The schema of a recipe: all settings with their defaults, and how they are written, without importing torch."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from vitascope.data.config import DataConfig
from vitascope.errors import UserError, skip_beartype
from vitascope.model.config import ModelConfig
from vitascope.recipe.train import DinoConfig, MaeConfig, TrainConfig

OBJECTIVE_SECTIONS = ("dino", "mae")  # each is for the objective of the same name


@skip_beartype
@dataclass(frozen=True)
class Recipe:
    """All settings of a run."""

    name: str = "run"  # name of the folder for the runs; by default the recipe's file name
    weights: str | None = None  # pretrained: timm:NAME, hf:REPO, a file, a folder, a run; recipe:NAME (trained first)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    dino: DinoConfig = field(default_factory=DinoConfig)  # for train.objective=dino
    mae: MaeConfig = field(default_factory=MaeConfig)  # for train.objective=mae

    def __post_init__(self) -> None:
        if not self.name or any(sign in self.name for sign in "/\\:") or self.name.startswith("."):
            raise UserError(f"name={self.name!r} is not a valid folder name. Use letters, digits, - and _.")
        if self.train.patience and self.data.validation == 0:
            raise UserError("train.patience needs validation images, but data.validation=0 holds out none.")
        if self.weights is None and (self.train.tune != "full" or self.train.freeze):
            tune, freeze = self.train.tune, self.train.freeze
            setting = f"train.tune={tune}" if tune != "full" else f"train.freeze={freeze}"
            raise UserError(f"{setting} freezes pretrained weights, but there are none. Set weights=….")
        if self.train.objective != "classify":
            self._check_self_supervised()
        if self.data.augment.flip_mode == "alternating" and self.data.balance == "sampling":
            raise UserError(
                "data.augment.flip_mode=alternating does not work with data.balance=sampling, which draws images at "
                "random. Set data.augment.flip_mode=random."
            )
        if self.train.patch_share < 1:
            _check_patch_share(self.train, self.model)
        if self.train.whiten and (self.model.tokenizer != "patch" or self.weights):
            raise UserError(
                "train.whiten initializes the patch projection. It needs model.tokenizer=patch and no weights=…."
            )
        for name, config, defaults in (("dino", self.dino, DinoConfig()), ("mae", self.mae, MaeConfig())):
            if config != defaults and self.train.objective != name:
                raise UserError(
                    f"{name}.… needs train.objective={name}, but train.objective={self.train.objective} is set."
                )

    def _check_self_supervised(self) -> None:
        train, model, objective = self.train, self.model, self.train.objective
        defaults = {"patience": 0, "distill": None, "tune": "full", "freeze": 0, "patch_share": 1.0}
        for name, default in defaults.items():
            if getattr(train, name) != default:
                raise UserError(
                    f"train.{name}={getattr(train, name)} needs labels, but train.objective={objective} has none. "
                    "Remove it."
                )
        if self.data.balance != "none":
            raise UserError(
                f"data.balance={self.data.balance} needs labels, but train.objective={objective} has none. Remove it."
            )
        if model.token_reduction:
            setting = f"model.{next(iter(model.token_reduction))}"
            raise UserError(f"{setting} is for inference, not for train.objective={objective}. Remove it.")
        if objective == "dino":
            if train.ema:
                raise UserError(
                    f"train.ema={train.ema} does not work with DINO: its teacher is the EMA. Set train.ema=0."
                )
            if train.grad_accum_steps > 1 and self.dino.batch_norm:
                raise UserError(
                    f"train.grad_accum_steps={train.grad_accum_steps} does not work with dino.batch_norm, which needs "
                    "the whole batch. Set train.grad_accum_steps=1 or dino.batch_norm=false."
                )
            _check_dino_settings(self.dino, model)
        else:
            _check_mae_masking(model)


def _check_patch_share(train: TrainConfig, model: ModelConfig) -> None:
    setting, num_kept = f"train.patch_share={train.patch_share}", train.count_kept_patches(model.num_patches)
    if not train.patch_share_until:
        raise UserError(f"{setting} has no effect with train.patch_share_until=0. Remove one of them.")
    if train.patience:
        raise UserError(f"train.patience does not work with {setting}. Remove one of them.")
    if model.causal:
        raise UserError(f"{setting} drops patches, but causal=true needs all of them. Remove one of them.")
    if num_kept == model.num_patches:
        raise UserError(f"{setting} keeps all {model.num_patches} patches. Choose a smaller value or remove it.")
    if model.attention == "lsa" and num_kept + model.num_prefix_tokens < 2:
        raise UserError(f"{setting} keeps one token, but attention=lsa needs at least two. Choose a larger value.")


def _check_dino_settings(dino: DinoConfig, model: ModelConfig) -> None:
    size, (rows, columns) = dino.local_size, model.patch_shape
    if dino.local_crops:
        if size % rows or size % columns or size > min(model.image_shape):
            raise UserError(
                f"dino.local_size={size} must be a multiple of patch_size={model.patch_size} and at most "
                f"img_size={model.img_size}."
            )
        _check_model_accepts_crops(size, model)
    if dino.teacher_momentum == 1:
        raise UserError("dino.teacher_momentum=1 never updates the teacher. The default is 0.996.")


def _check_model_accepts_crops(crop_size: int, model: ModelConfig) -> None:
    """Check that the model works with crops that have fewer patches than its images."""
    rows, columns = model.patch_shape
    if model.absolute_positions == "sinusoidal":
        raise UserError("positions=sinusoidal does not work with local crops. Choose positions=sincos2d or learned.")
    if model.attention == "lsa" and (crop_size // rows) * (crop_size // columns) + model.num_prefix_tokens < 2:
        raise UserError(
            f"A crop of dino.local_size={crop_size} is one token, but attention=lsa needs two or more. "
            "Choose a larger size."
        )


def _check_mae_masking(model: ModelConfig) -> None:
    if model.tokenizer != "patch":
        raise UserError(
            f"train.objective=mae masks patches, but with tokenizer={model.tokenizer} tokens overlap. "
            "Choose model.tokenizer=patch."
        )
    if model.causal:
        raise UserError(
            "train.objective=mae masks random patches, but causal=true needs all patches in order. Remove one of them."
        )
    if model.num_patches < 2:
        raise UserError(
            "train.objective=mae needs at least two patches, but the model has one. Choose a smaller model.patch_size."
        )


def format_recipe_yaml(recipe: Recipe) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(convert_recipe_to_dict(recipe))


def convert_recipe_to_dict(recipe: Recipe, all_sections: bool = False) -> dict[str, Any]:
    """Return all settings as plain values, without the sections of unused objectives unless `all_sections`."""
    unused = [] if all_sections else [name for name in OBJECTIVE_SECTIONS if name != recipe.train.objective]
    return {key: value for key, value in asdict(recipe).items() if key not in unused}


def find_non_default_settings(recipe: Recipe, all_sections: bool = False) -> dict[str, Any]:
    """Return the settings that differ from the defaults. They identify a run or a study across versions."""
    return _remove_defaults(convert_recipe_to_dict(recipe, all_sections), _get_default_settings())


@cache
def _get_default_settings() -> dict[str, Any]:
    return convert_recipe_to_dict(Recipe(), all_sections=True)


def flatten_sections(sections: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten sections to `section.setting` -> value."""
    settings: dict[str, Any] = {}
    for name, value in sections.items():
        settings |= (
            flatten_sections(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
        )
    return settings


def flatten_and_format_settings(sections: dict[str, Any]) -> dict[str, str]:
    """Return `section.setting` -> value as typed on the command line."""
    return {name: format_value(value) for name, value in flatten_sections(sections).items()}


def hash_values(values: Any, num_digits: int = 16) -> str:
    """Return a hash of plain values in hexadecimal digits."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=num_digits // 2).hexdigest()


def _remove_defaults(settings: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return only the values that differ from the defaults, section by section."""
    changed = {key: value for key, value in settings.items() if value != defaults[key]}
    return {
        key: _remove_defaults(value, defaults[key]) if isinstance(value, dict) else value
        for key, value in changed.items()
    }


def format_value(value: Any) -> str:
    """Format a value as typed on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(format_value, value))}]"
    return "null" if value is None else str(value)
