"""Read a recipe by name or path, apply key=value overrides, and check the result."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vitascope.errors import UserError, suggest_choice
from vitascope.model.config import ModelConfig
from vitascope.recipe.choices import OBJECTIVE_SECTIONS
from vitascope.recipe.missing_path import explain_missing_path
from vitascope.recipe.old_settings import convert_old_settings, has_renamed_settings, reject_outdated_settings
from vitascope.recipe.plain_yaml import check_override_is_plain, read_plain_yaml
from vitascope.recipe.schema import (
    NameAndText,
    Recipe,
    build_omegaconf_schema,
    find_needed_objective_sections,
    flatten_and_format_settings,
    flatten_sections,
    make_recipe_from_sections,
    spell_out_model_settings_in_errors,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

SETTING_ALIASES = {  # names of other libraries -> the setting
    "learning_rate": "train.lr",
    "batch": "train.batch_size",
    "bs": "train.batch_size",
    "num_epochs": "train.epochs",
    "wd": "train.weight_decay",
    "warmup_epochs": "train.warmup",
    "warmup_steps": "train.warmup",
    "gradient_clip": "train.clip_grad",
    "grad_clip": "train.clip_grad",
    "accumulation_steps": "train.grad_accum_steps",
    "smoothing": "train.label_smoothing",
    "scheduler": "train.schedule",
    "random_seed": "train.seed",
    "amp": "train.precision",
    "dtype": "train.precision",
    "dim": "model.embed_dim",
    "hidden_size": "model.embed_dim",
    "heads": "model.num_heads",
    "layers": "model.depth",
    "num_layers": "model.depth",
    "image_size": "model.img_size",
    "channels": "model.in_chans",
    "classes": "model.num_classes",
    "pool": "model.global_pool",
    "dropout": "model.drop_rate",
    "drop_path": "model.drop_path_rate",
    "dataset": "data.name",
    "val_split": "data.validation",
}
SOURCE_SETTINGS = {  # setting -> what it names; empty, as with an unset variable of the shell, it would mean "none"
    "weights": "timm:NAME, hf:REPO, recipe:NAME, a file, a folder or a run",
    "train.distill": "timm:NAME, hf:REPO, a file, a folder or a run",
    "data.name": "the name of a data set, a folder or an .npz file",
    "data.labels": "a table of files and classes",
}
SECTION_NAMES = ("model", "data", "train", *OBJECTIVE_SECTIONS)
BOOLEAN_VALUES = ("true", "false", "yes", "no", "on", "off", "1", "0")
DATA_PREFIX = "data:"  # before the name of a data set, because a recipe may have the same name
RECIPE_SUFFIXES = (".yaml", ".yml")
DATA_SUFFIXES = (".npz", ".csv")  # files that train accepts instead of a recipe
RECIPES_FOLDER = Path(__file__).parent.parent / "recipes"


def list_recipe_names() -> list[str]:
    """Return the names of the recipes that ship with the package."""
    return sorted(path.stem for path in RECIPES_FOLDER.glob("*.yaml"))


def read_builtin_recipe_description(name: str) -> str:
    """Return the first comment line of a recipe that ships with the package."""
    with (RECIPES_FOLDER / f"{name}.yaml").open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()


def get_recipe_path(name_or_path: str) -> Path:
    """Return the path of a recipe, given its name or path."""
    if name_or_path in list_recipe_names():
        return RECIPES_FOLDER / f"{name_or_path}.yaml"
    suffix = Path(name_or_path).suffix
    if Path(name_or_path).is_file():
        if suffix not in (*RECIPE_SUFFIXES, ""):
            raise UserError(
                f"{name_or_path} is not a recipe: a recipe's file name ends in {' or '.join(RECIPE_SUFFIXES)}. "
                "To train on images, give their folder, with one subfolder per class, or an .npz file."
            )
        return Path(name_or_path)
    if message := explain_missing_path(name_or_path, RECIPE_SUFFIXES):
        raise UserError(message)
    raise UserError(
        f"There is no recipe '{name_or_path}'. {suggest_choice(name_or_path, list_recipe_names())} "
        "A path to a .yaml file works too; train also accepts a folder of images, an .npz file and data:NAME."
    )


def is_data_reference(name_or_path: str) -> bool:
    """Return whether `train` should choose the settings: data:NAME, a folder or an .npz file instead of a recipe."""
    if name_or_path in list_recipe_names():
        return False
    path = Path(name_or_path)
    return name_or_path.startswith(DATA_PREFIX) or path.is_dir() or path.suffix in DATA_SUFFIXES


class OptionalRecipeArgs(NamedTuple):
    """Command-line arguments: a recipe, if one is given, and settings (key=value)."""

    recipe: str | None
    overrides: list[str]


class RequiredRecipeArgs(NamedTuple):
    recipe: str
    overrides: list[str]


def split_optional_recipe_args(args: list[str]) -> OptionalRecipeArgs:
    """Split arguments into recipe and settings. A first argument without '=' is the recipe."""
    if args and "=" not in args[0]:
        return OptionalRecipeArgs(args[0], args[1:])
    return OptionalRecipeArgs(None, args)


def split_required_recipe_args(args: Sequence[str] | None) -> RequiredRecipeArgs:
    """Split arguments into recipe and settings; the recipe is required."""
    if not args or "=" in args[0]:
        width = max(map(len, list_recipe_names()))
        listed = "\n".join(
            f"  {name:<{width}}  {read_builtin_recipe_description(name)}" for name in list_recipe_names()
        )
        raise UserError(
            "Give a recipe or images first: one of these recipes, a path to a .yaml file, a folder of images, an .npz "
            f"file or data:NAME.\n{listed}"
        )
    return RequiredRecipeArgs(args[0], list(args[1:]))


def read_recipe(name_or_path: str | None, overrides: Sequence[str] = (), *, convert_old_names: bool = False) -> Recipe:
    """Return a recipe, or the defaults if `name_or_path` is None, with key=value overrides, and check all settings.

    Setting names of older versions are rejected; `convert_old_names` converts them (for the recipe of an old run)."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    for override in overrides:
        check_override_is_plain(override)
        _check_override_has_usable_value(override, overrides)
    schema = build_omegaconf_schema()
    try:
        path = get_recipe_path(name_or_path) if name_or_path else None
        layers = [OmegaConf.create({"name": path.stem}), _load_recipe_file(path, convert_old_names)] if path else []
        file_settings = flatten_and_format_settings(OmegaConf.to_container(layers[1])) if layers else {}  # pyright: ignore[reportArgumentType]
        settings = [*file_settings.items(), *(_split_override(override) for override in overrides)]
        reject_outdated_settings(settings)
        file_sections = [(str(name), "") for name in layers[1]] if layers else []  # also those without settings
        schema = build_omegaconf_schema(find_needed_objective_sections([*settings, *file_sections]))
        for key, value in settings:
            if isinstance(OmegaConf.select(schema, key), bool) and value.lower() not in BOOLEAN_VALUES:
                raise UserError(f"{key} must be true or false, not {value or 'empty'}.")  # OmegaConf reads 2 as true
        merged = OmegaConf.merge(schema, *layers, OmegaConf.from_dotlist(list(overrides)))
        with spell_out_model_settings_in_errors():
            return make_recipe_from_sections(OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise UserError(_format_omegaconf_error(error, schema)) from error
    except (OSError, UnicodeDecodeError, TypeError) as error:
        raise UserError(
            f"The recipe {name_or_path} cannot be read ({error}). It must be a YAML text file of settings."
        ) from error
    except (YAMLError, RecursionError) as error:
        raise UserError(f"This cannot be read as YAML: {' '.join(str(error).split())}") from error


def _check_override_has_usable_value(override: str, overrides: Sequence[str]) -> None:
    """Reject what OmegaConf would misread: an empty value as null, and a value that ends with a colon as a section."""
    key, value = _split_override(override)
    if "=" not in override or not key:
        raise UserError(explain_override_without_value(override, overrides, "such as model.depth=8"))
    if override == "weights=recipe:":
        raise UserError("weights=recipe: names no recipe. Write weights=recipe:NAME, such as recipe:digits-mae.")
    if key in SOURCE_SETTINGS and value.strip() in ("", "timm:", "hf:"):
        raise UserError(f"{override} is empty. Set {key} to {SOURCE_SETTINGS[key]}, or leave it out.")
    if "_scale=" in override and not _has_bracketed_pair_value(override):
        raise UserError(f"{override} must be a range, such as {key}=[0.4,1].")
    if override.endswith("=???"):  # OmegaConf's marker for a missing value, which it would ignore
        raise UserError(f"{override} is not a value. Leave the setting out for its default.")


def has_old_setting_names(recipe_path: Path) -> bool:
    """Return whether a run's recipe has setting names of an older version."""
    from omegaconf import OmegaConf

    return has_renamed_settings(flatten_and_format_settings(OmegaConf.to_container(_load_recipe_file(recipe_path))))  # pyright: ignore[reportArgumentType]


def _load_recipe_file(path: Path, convert_old_names: bool = False) -> "DictConfig":
    """Load a recipe file. Reject an empty file, and sections without settings."""
    from omegaconf import DictConfig, OmegaConf
    from yaml import YAMLError

    try:
        text = read_plain_yaml(path)
        config = OmegaConf.create(text) if text.strip() else None
    except (YAMLError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"The recipe {path} cannot be read ({error}). It must be a YAML text file of settings."
        ) from error
    if not config:
        raise UserError(f"The recipe {path} is empty.")
    if not isinstance(config, DictConfig):
        raise UserError(f"The recipe {path} must contain sections of settings: {', '.join(SECTION_NAMES)}.")
    for name in SECTION_NAMES:
        if name in config and not isinstance(config[name], DictConfig):
            raise UserError(f"The recipe {path}: {name} must contain settings, one per line below it.")
    return _rename_old_settings(config) if convert_old_names else config


def _rename_old_settings(recipe: "DictConfig") -> "DictConfig":
    """Convert a recipe to the setting names of this version."""
    from omegaconf import DictConfig, OmegaConf

    new = DictConfig({})
    for name, value in convert_old_settings(flatten_sections(OmegaConf.to_container(recipe))).items():  # pyright: ignore[reportArgumentType]
        OmegaConf.update(new, name, value)
    return new


def explain_override_without_value(name: str, overrides: Sequence[str], example: str) -> str:
    """Say what is missing, for an error. If `name` is a setting, its value may follow after a space."""
    from omegaconf import OmegaConf

    section = name.partition(".")[0]
    schema = build_omegaconf_schema((section,) if section in OBJECTIVE_SECTIONS else ())
    if name in flatten_sections(OmegaConf.to_container(schema)):  # pyright: ignore[reportArgumentType]
        following = list(overrides)[list(overrides).index(name) + 1 :]
        value = following[0] if following and "=" not in following[0] else "VALUE"
        return f"'{name}' has no value. Write {name}={value}, without spaces."
    hint = " The recipe must come first." if name in list_recipe_names() else ""
    return f"'{name}' is not a setting. Write key=value, {example}.{hint}"


def _split_override(override: str) -> NameAndText:
    """Split key=value."""
    key, _, value = override.partition("=")
    return key, value


def _has_bracketed_pair_value(override: str) -> bool:
    text = override.partition("=")[2].strip()
    return text[:1] in "[(" and text[-1:] in "])" and text.count(",") == 1


def read_model_config(name_or_path: str | None, overrides: Sequence[str] = ()) -> ModelConfig:
    """Return the model of a recipe. Model settings may omit the section: depth=8."""
    sections = {"name", "weights", *SECTION_NAMES}
    full_overrides = [
        text if "=" not in text.lstrip("=") or text.split("=")[0].split(".")[0] in sections else f"model.{text}"
        for text in overrides
    ]
    return read_recipe(name_or_path, full_overrides).model


def _format_omegaconf_error(error: Exception, schema: "DictConfig") -> str:
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
        sections = [name for name in OBJECTIVE_SECTIONS if name in schema]
        for part in ("train", "model", "data", "data.augment", *sections):
            if last in OmegaConf.select(schema, part):
                return f"There is no setting '{key}'. Did you mean {part}.{last}?"
        if last in SETTING_ALIASES:
            return f"There is no setting '{key}'. Did you mean {SETTING_ALIASES[last]}?"
        section = "".join(f"{parent}." for parent in parents)
        names = {str(name) for name in level} | (set() if parents else set(OBJECTIVE_SECTIONS))
        return f"There is no setting '{key}'. {suggest_choice(last, names, section)}"
    for kind, words in (("Integer", "a whole number"), ("Float", "a number")):
        if f"could not be converted to {kind}" in first:
            first = f"{first.split(chr(39))[1]} is not {words}"
    if "type hint" in first:  # Python's type hints do not help users
        value = first.split("'")[1] if "'" in first else "that"
        section_class = OmegaConf.get_type(schema, key.split(".")[0]) or Recipe
        first = f"{value} has the wrong type. See {section_class.__name__}"
        first += ". Write a pair as [32,64]" if "size" in key else ""
    return f"{key}: {first}." if key else f"{first}."
