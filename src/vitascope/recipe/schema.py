"""The schema of a recipe: all settings with their defaults, how they are written, and its sections for OmegaConf.

Neither torch nor OmegaConf is imported before it is needed. An objective's section has its name.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields, make_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from vitascope.data.config import DataConfig
from vitascope.errors import UserError, skip_beartype
from vitascope.model.config import ModelConfig
from vitascope.recipe.choices import OBJECTIVE_SECTIONS, load_objective
from vitascope.recipe.train import TrainConfig

if TYPE_CHECKING:
    from omegaconf import DictConfig

SectionSettings = dict[str, Any]  # setting -> value; a section is a dictionary of its own
DottedSettings = dict[str, Any]  # `section.setting` -> value


MAX_NAME_BYTES = 200  # file systems allow 255


@skip_beartype
@dataclass(frozen=True)
class Recipe:
    """All settings of a run."""

    name: str = "run"  # name of the folder for the runs; by default the recipe's file name
    weights: str | None = None  # pretrained: timm:NAME, hf:REPO, a file, a folder, a run; recipe:NAME (trained first)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    objective_config: Any = None  # the section of an objective without labels, such as dino; None: its defaults

    def __post_init__(self) -> None:
        if not self.name or any(sign in self.name for sign in "/\\:") or self.name.startswith("."):
            raise UserError(f"name={self.name!r} is not a valid folder name. Use letters, digits, - and _.")
        if not self.name.isprintable() or len(self.name.encode(errors="replace")) > MAX_NAME_BYTES:
            raise UserError(
                f"name={self.name[:40]!r} has a control character or is too long. Use letters, digits, - and _."
            )
        if self.weights is not None and not self.weights.strip():
            raise UserError("weights is empty. Name the pretrained weights, or leave it out to train from scratch.")
        if self.train.patience and self.data.validation == 0:
            raise UserError("train.patience needs validation images, but data.validation=0 holds out none.")
        if self.weights is None and (self.train.tune != "full" or self.train.freeze):
            tune, freeze = self.train.tune, self.train.freeze
            setting = f"train.tune={tune}" if tune != "full" else f"train.freeze={freeze}"
            raise UserError(f"{setting} freezes pretrained weights, but there are none. Set weights=….")
        if self.train.head_init == "linear_probe":
            self._check_linear_probe_head()
        self._set_default_objective_config_and_check()
        if self.data.augment.flip_mode == "alternating" and self.data.balance == "sampling":
            raise UserError(
                "data.augment.flip_mode=alternating does not work with data.balance=sampling, which draws images at "
                "random. Set data.augment.flip_mode=random."
            )
        if self.train.patch_share < 1:
            _check_patch_dropout_settings(self.train, self.model)
        if self.train.whiten and (self.model.tokenizer != "patch" or self.weights):
            raise UserError(
                "train.whiten initializes the patch projection. It needs model.tokenizer=patch and no weights=…."
            )

    def _check_linear_probe_head(self) -> None:
        if self.weights is None:
            raise UserError(
                "train.head_init=linear_probe fits the classifier to the features of pretrained weights, but there are "
                "none. Set weights=…."
            )
        if not self.train.uses_labels:
            raise UserError(
                f"train.head_init=linear_probe needs labels, but train.objective={self.train.objective} uses none. "
                "Leave it out."
            )

    def _set_default_objective_config_and_check(self) -> None:
        """Fill in the defaults of the objective's section, and check it against the rest of the recipe."""
        name, config = self.train.objective, self.objective_config
        objective = None if self.train.uses_labels else load_objective(name)
        if objective is not None and config is None:
            object.__setattr__(self, "objective_config", objective.config_class())
        elif config is not None and (objective is None or type(config) is not objective.config_class):
            raise UserError(f"{type(config).__name__} does not belong to train.objective={name}. Leave it out.")
        if objective is not None:
            objective.check_recipe(self)


def _check_patch_dropout_settings(train: TrainConfig, model: ModelConfig) -> None:
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


def format_recipe_yaml(recipe: Recipe) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(convert_recipe_to_dict(recipe))


def convert_recipe_to_dict(recipe: Recipe) -> SectionSettings:
    """Return all settings as plain values. The section of the objective has its name."""
    settings = asdict(recipe)
    section = settings.pop("objective_config")
    return settings if section is None else settings | {recipe.train.objective: section}


def find_non_default_settings(recipe: Recipe) -> SectionSettings:
    """Return the settings that differ from the defaults. They identify a run or a study across versions."""
    return _remove_defaults(convert_recipe_to_dict(recipe), _get_default_settings(recipe.train.objective))


@cache
def _get_default_settings(objective_name: str) -> SectionSettings:
    """Return the defaults, with the section of this objective."""
    of_objective = convert_recipe_to_dict(Recipe(train=TrainConfig(objective=objective_name)))
    return of_objective | convert_recipe_to_dict(Recipe())


def flatten_sections(sections: SectionSettings, prefix: str = "") -> DottedSettings:
    """Flatten sections to `section.setting` -> value."""
    settings: DottedSettings = {}
    for name, value in sections.items():
        settings |= (
            flatten_sections(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
        )
    return settings


def flatten_and_format_settings(sections: SectionSettings) -> dict[str, str]:
    """Return `section.setting` -> value as typed on the command line."""
    return {name: format_value_for_command_line(value) for name, value in flatten_sections(sections).items()}


def format_keyword_settings(settings: dict[str, Any]) -> list[str]:
    """Return key=value texts of settings that are sections (train={"epochs": 5}) or full names ("train.epochs": 5)."""
    overrides: dict[str, str] = {}
    for keyword, value in settings.items():
        if keyword in ("model", "data", "train", *OBJECTIVE_SECTIONS) and not isinstance(value, dict):
            raise UserError(f'{keyword}={value!r} is not a section of settings. Write {keyword}={{"NAME": VALUE}}.')
        for name, text in flatten_and_format_settings({keyword: value}).items():
            if name in overrides:
                raise UserError(f"{name} is given twice: {overrides[name]} and {text}. Give it once.")
            overrides[name] = text
    return [f"{name}={text}" for name, text in overrides.items()]


def hash_values(values: Any, num_digits: int = 16) -> str:
    """Return a hash of plain values in hexadecimal digits."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=num_digits // 2).hexdigest()


def _remove_defaults(settings: SectionSettings, defaults: SectionSettings) -> SectionSettings:
    """Return only the values that differ from the defaults, section by section."""
    changed = {key: value for key, value in settings.items() if value != defaults[key]}
    return {
        key: _remove_defaults(value, defaults[key]) if isinstance(value, dict) else value
        for key, value in changed.items()
    }


def format_value_for_command_line(value: Any) -> str:
    """Format a value as typed on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(format_value_for_command_line, value))}]"
    return "null" if value is None else str(value)


NameAndText = tuple[str, str]  # a setting's name with its section, and its value as typed

# A setting's name in a sentence: a name that is also a plain word, such as depth, only before "=".
_MODEL_SETTINGS = [item.name + ("" if "_" in item.name else "(?==)") for item in fields(ModelConfig)]
MODEL_SETTING_WITHOUT_SECTION = re.compile(rf"(?<![\w.])({'|'.join(_MODEL_SETTINGS)})(?![\w.])")


def find_needed_objective_sections(settings: Iterable[NameAndText]) -> tuple[str, ...]:
    """Return the objectives that need their section: the one that is trained, and those with settings."""
    used = {value if name == "train.objective" else name.partition(".")[0] for name, value in settings}
    return tuple(name for name in OBJECTIVE_SECTIONS if name in used)


@cache
def build_omegaconf_schema(objective_sections: tuple[str, ...] = ()) -> "DictConfig":
    """Return the schema with these sections, built once. Merging does not change it."""
    from omegaconf import OmegaConf

    parts: list[tuple[str, Any, Any]] = [
        (item.name, item.type, field(default=item.default))
        if item.default_factory is MISSING
        else (item.name, item.type, field(default_factory=item.default_factory))
        for item in fields(Recipe)
        if item.name != "objective_config"
    ]
    for name in objective_sections:
        config_class = load_objective(name).config_class
        parts.append((name, config_class, field(default_factory=config_class)))
    return OmegaConf.structured(make_dataclass("RecipeSections", parts))


def make_recipe_from_sections(sections: Any) -> Recipe:
    """Return the recipe of these sections. Reject settings of an objective that is not trained."""
    values = {item.name: getattr(sections, item.name) for item in fields(sections)}
    configs = {name: values.pop(name) for name in OBJECTIVE_SECTIONS if name in values}
    used = values["train"].objective
    for name, config in configs.items():
        if name != used and config != type(config)():
            raise UserError(f"{name}.… needs train.objective={name}, but train.objective={used} is set.")
    return Recipe(**values, objective_config=configs.get(used))


@contextmanager
def spell_out_model_settings_in_errors() -> Iterator[None]:
    """Write model.patch_size instead of patch_size in an error: commands need the section."""
    try:
        yield
    except UserError as error:
        raise UserError(MODEL_SETTING_WITHOUT_SECTION.sub(r"model.\g<0>", str(error))) from error
