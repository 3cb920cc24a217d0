"""The sections of a recipe as OmegaConf's schema, and a recipe from them. An objective's section has its name."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, field, fields, make_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from vitascope.errors import UserError
from vitascope.model.config import ModelConfig
from vitascope.recipe.choices import OBJECTIVE_SECTIONS, load_objective
from vitascope.recipe.schema import Recipe

if TYPE_CHECKING:
    from omegaconf import DictConfig

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
