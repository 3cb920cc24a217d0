"""A recipe's name or path, and key=value words -> a checked Recipe."""

from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from vitascope.errors import UserError, did_you_mean
from vitascope.model.config import ModelConfig
from vitascope.recipe.renames import check_names, convert_settings, is_old
from vitascope.recipe.schema import Recipe
from vitascope.recipe.writing import flat, settings_of

if TYPE_CHECKING:
    from omegaconf import DictConfig

_HOMES = {
    "model": "ModelConfig",
    "data": "DataConfig",
    "train": "TrainConfig",
    "dino": "DinoConfig",
    "mae": "MaeConfig",
}
YES_OR_NO = ("true", "false", "yes", "no", "on", "off", "1", "0")
RECIPES = Path(__file__).parent.parent / "recipes"


def recipe_names() -> list[str]:
    """The recipes that ship with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_recipe(name: str) -> Path:
    """By name from any folder, or by path."""
    if name in recipe_names():
        return RECIPES / f"{name}.yaml"
    if Path(name).is_file():
        return Path(name)
    if Path(name).suffix in (".yaml", ".yml"):
        raise UserError(f"There is no recipe file '{name}'.")
    raise UserError(
        f"There is no recipe '{name}'. {did_you_mean(name, recipe_names())} A path to a .yaml file works too."
    )


def split_words(words: list[str]) -> tuple[str | None, list[str]]:
    """A first word without '=' is a recipe; the rest are settings."""
    if words and "=" not in words[0]:
        return words[0], words[1:]
    return None, words


def recipe_first(words: Sequence[str] | None) -> tuple[str, list[str]]:
    """The recipe that must come first, and the settings after it."""
    if not words or "=" in words[0]:
        raise UserError(f"Name a recipe first: {', '.join(recipe_names())}, or a path to a .yaml file.")
    return words[0], list(words[1:])


def read_recipe(name: str | None, overrides: Sequence[str] = (), *, convert_old: bool = False) -> Recipe:
    """The recipe (or the defaults, without a name) with key=value overrides, every key and value checked.

    Names of older versions are rejected, or with `convert_old` (a run's own recipe) converted."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    for word in overrides:
        if "=" not in word or word.startswith("="):
            hint = " A recipe comes first." if word in recipe_names() else ""
            raise UserError(f"'{word}' is not a setting. Write key=value, such as model.depth=8.{hint}")
        if word == "weights=recipe:":
            raise UserError("weights=recipe: names no recipe. Write weights=recipe:NAME, such as recipe:digits-mae.")
        if "_scale=" in word and not _is_pair(word):
            raise UserError(f"{word} must be a range, such as {word.partition('=')[0]}=[0.4,1].")
        if word.endswith("=???"):  # OmegaConf's sign for "missing", which it would ignore
            raise UserError(f"{word} is not a value. Leave the setting out for its default.")
    schema = _schema()
    try:
        path = find_recipe(name) if name else None
        layers = [OmegaConf.create({"name": path.stem}), _loaded(path, convert_old)] if path else []
        told = settings_of(OmegaConf.to_container(layers[1])) if layers else {}  # pyright: ignore[reportArgumentType]
        settings = [*told.items(), *((key, value) for key, _, value in (word.partition("=") for word in overrides))]
        check_names(settings)
        for key, value in settings:
            if isinstance(OmegaConf.select(schema, key), bool) and value.lower() not in YES_OR_NO:
                raise UserError(f"{key} is true or false, not {value or 'nothing'}.")  # 2 would be taken for true
        merged = OmegaConf.merge(schema, *layers, OmegaConf.from_dotlist(list(overrides)))
        return OmegaConf.to_object(merged)  # pyright: ignore[reportReturnType]
    except OmegaConfBaseException as error:
        raise UserError(_sentence(error, schema)) from error
    except (OSError, UnicodeDecodeError, TypeError) as error:
        raise UserError(f"The recipe {name} cannot be read: it must be a text file of settings ({error}).") from error
    except YAMLError as error:
        raise UserError(f"This cannot be read as YAML: {' '.join(str(error).split())}") from error


@cache
def _schema() -> "DictConfig":
    """Merging leaves it as it is."""
    from omegaconf import OmegaConf

    return OmegaConf.structured(Recipe)


def has_old_names(path: Path) -> bool:
    """Whether a run's recipe was written by an older version, with other names for its settings."""
    from omegaconf import OmegaConf

    return is_old(settings_of(OmegaConf.to_container(_loaded(path))))  # pyright: ignore[reportArgumentType]


def _loaded(path: Path, convert_old: bool = False) -> "DictConfig":
    """Refused where it says nothing, or no settings where a section should be."""
    from omegaconf import DictConfig, OmegaConf

    said = OmegaConf.load(path)
    if not said:
        raise UserError(f"The recipe {path} is empty.")
    if not isinstance(said, DictConfig):
        raise UserError(f"The recipe {path} must hold sections of settings: {', '.join(_HOMES)}.")
    for name in _HOMES:
        if name in said and not isinstance(said[name], DictConfig):
            raise UserError(f"The recipe {path}: {name} must hold settings, each in a line of its own below it.")
    return _converted(said) if convert_old else said


def _converted(recipe: "DictConfig") -> "DictConfig":
    """With the names of this version."""
    from omegaconf import DictConfig, OmegaConf

    new = DictConfig({})
    for name, value in convert_settings(flat(OmegaConf.to_container(recipe))).items():  # pyright: ignore[reportArgumentType]
        OmegaConf.update(new, name, value)
    return new


def _is_pair(word: str) -> bool:
    text = word.partition("=")[2].strip()
    return text[:1] in "[(" and text[-1:] in "])" and text.count(",") == 1


def read_model(name: str | None, overrides: Sequence[str] = ()) -> ModelConfig:
    """The model of a recipe; its settings may be given as bare keys (depth=8)."""
    known = {field.name for field in fields(Recipe)}
    words = [
        word if "=" not in word.lstrip("=") or word.split("=")[0].split(".")[0] in known else f"model.{word}"
        for word in overrides
    ]
    return read_recipe(name, words).model


def _sentence(error: Exception, schema: "DictConfig") -> str:
    """OmegaConf's several lines -> one: the setting, what is wrong, the nearest key."""
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigKeyError

    first = str(error).splitlines()[0]
    key = getattr(error, "full_key", None) or ""
    if isinstance(error, ConfigKeyError):
        *parents, last = key.split(".")
        level = schema
        for parent in parents:
            level = level[parent]
        for part in ("train", "model", "data", "data.augment", "dino", "mae"):
            if last in OmegaConf.select(schema, part):
                return f"There is no setting '{key}'. Did you mean {part}.{last}?"
        return f"There is no setting '{key}'. {did_you_mean(last, map(str, level))}"
    if "could not be converted to Integer" in first:
        first = f"{first.split(chr(39))[1]} is not a whole number"
    if "type hint" in first:  # Python's words for a type say little to a user
        value = first.split("'")[1] if "'" in first else "that"
        first = f"{value} does not fit; {_HOMES.get(key.split('.')[0], 'the schema')} says what does"
        first += ". A pair is written [32,64]" if "size" in key else ""
    return f"{key}: {first}." if key else f"{first}."
