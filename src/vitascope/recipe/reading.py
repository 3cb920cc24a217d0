"""Read a recipe by name or path, apply key=value settings, and check the result."""

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
    """Return the names of the recipes that ship with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def describe_recipe(name: str) -> str:
    """Return the first comment line of a recipe that ships with the package."""
    with (RECIPES / f"{name}.yaml").open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()


def find_recipe(name: str) -> Path:
    """Return the path of a recipe, given its name or path."""
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
    """Split arguments into recipe and settings. A first argument without '=' is the recipe."""
    if words and "=" not in words[0]:
        return words[0], words[1:]
    return None, words


def recipe_first(words: Sequence[str] | None) -> tuple[str, list[str]]:
    """Split arguments into recipe and settings; the recipe is required."""
    if not words or "=" in words[0]:
        width = max(map(len, recipe_names()))
        listed = "\n".join(f"  {name:<{width}}  {describe_recipe(name)}" for name in recipe_names())
        raise UserError(f"Give a recipe first: one of these, or a path to a .yaml file.\n{listed}")
    return words[0], list(words[1:])


def read_recipe(name: str | None, overrides: Sequence[str] = (), *, convert_old: bool = False) -> Recipe:
    """Return a recipe, or the defaults if `name` is None, with key=value overrides. All keys and values are checked.

    Setting names of older versions are rejected, or converted with `convert_old` (for the recipe of an old run)."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    for word in overrides:
        if "=" not in word or word.startswith("="):
            hint = " The recipe must come first." if word in recipe_names() else ""
            raise UserError(f"'{word}' is not a setting. Write key=value, such as model.depth=8.{hint}")
        if word == "weights=recipe:":
            raise UserError("weights=recipe: names no recipe. Write weights=recipe:NAME, such as recipe:digits-mae.")
        if "_scale=" in word and not _is_pair(word):
            raise UserError(f"{word} must be a range, such as {word.partition('=')[0]}=[0.4,1].")
        if word.endswith("=???"):  # OmegaConf's marker for a missing value, which it would ignore
            raise UserError(f"{word} is not a value. Leave the setting out for its default.")
    schema = _schema()
    try:
        path = find_recipe(name) if name else None
        layers = [OmegaConf.create({"name": path.stem}), _load_file(path, convert_old)] if path else []
        told = settings_of(OmegaConf.to_container(layers[1])) if layers else {}  # pyright: ignore[reportArgumentType]
        settings = [*told.items(), *((key, value) for key, _, value in (word.partition("=") for word in overrides))]
        check_names(settings)
        for key, value in settings:
            if isinstance(OmegaConf.select(schema, key), bool) and value.lower() not in YES_OR_NO:
                raise UserError(f"{key} must be true or false, not {value or 'empty'}.")  # OmegaConf reads 2 as true
        merged = OmegaConf.merge(schema, *layers, OmegaConf.from_dotlist(list(overrides)))
        return OmegaConf.to_object(merged)  # pyright: ignore[reportReturnType]
    except OmegaConfBaseException as error:
        raise UserError(_sentence(error, schema)) from error
    except (OSError, UnicodeDecodeError, TypeError) as error:
        raise UserError(
            f"The recipe {name} cannot be read ({error}). It must be a YAML text file of settings."
        ) from error
    except YAMLError as error:
        raise UserError(f"This cannot be read as YAML: {' '.join(str(error).split())}") from error


@cache
def _schema() -> "DictConfig":
    """Return the schema, built once. Merging does not change it."""
    from omegaconf import OmegaConf

    return OmegaConf.structured(Recipe)


def has_old_names(path: Path) -> bool:
    """Return whether a run's recipe has setting names of an older version."""
    from omegaconf import OmegaConf

    return is_old(settings_of(OmegaConf.to_container(_load_file(path))))  # pyright: ignore[reportArgumentType]


def _load_file(path: Path, convert_old: bool = False) -> "DictConfig":
    """Load a recipe file. Reject an empty file, and sections without settings."""
    from omegaconf import DictConfig, OmegaConf

    said = OmegaConf.load(path)
    if not said:
        raise UserError(f"The recipe {path} is empty.")
    if not isinstance(said, DictConfig):
        raise UserError(f"The recipe {path} must contain sections of settings: {', '.join(_HOMES)}.")
    for name in _HOMES:
        if name in said and not isinstance(said[name], DictConfig):
            raise UserError(f"The recipe {path}: {name} must contain settings, one per line below it.")
    return _convert_file(said) if convert_old else said


def _convert_file(recipe: "DictConfig") -> "DictConfig":
    """Convert a recipe to the setting names of this version."""
    from omegaconf import DictConfig, OmegaConf

    new = DictConfig({})
    for name, value in convert_settings(flat(OmegaConf.to_container(recipe))).items():  # pyright: ignore[reportArgumentType]
        OmegaConf.update(new, name, value)
    return new


def _is_pair(word: str) -> bool:
    text = word.partition("=")[2].strip()
    return text[:1] in "[(" and text[-1:] in "])" and text.count(",") == 1


def read_model(name: str | None, overrides: Sequence[str] = ()) -> ModelConfig:
    """Return the model of a recipe. Model settings may omit the section: depth=8."""
    known = {field.name for field in fields(Recipe)}
    words = [
        word if "=" not in word.lstrip("=") or word.split("=")[0].split(".")[0] in known else f"model.{word}"
        for word in overrides
    ]
    return read_recipe(name, words).model


def _sentence(error: Exception, schema: "DictConfig") -> str:
    """Convert OmegaConf's error to one sentence: the setting, the problem and the nearest key."""
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
        section = "".join(f"{parent}." for parent in parents)
        return f"There is no setting '{key}'. {did_you_mean(last, [str(name) for name in level], section)}"
    for kind, words in (("Integer", "a whole number"), ("Float", "a number")):
        if f"could not be converted to {kind}" in first:
            first = f"{first.split(chr(39))[1]} is not {words}"
    if "type hint" in first:  # Python's type hints do not help users
        value = first.split("'")[1] if "'" in first else "that"
        first = f"{value} has the wrong type. See {_HOMES.get(key.split('.')[0], 'Recipe')}"
        first += ". Write a pair as [32,64]" if "size" in key else ""
    return f"{key}: {first}." if key else f"{first}."
