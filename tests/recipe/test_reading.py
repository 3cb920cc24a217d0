"""Recipes: found by name or path, overridden strictly."""

import json
import re
from dataclasses import asdict

import pytest
from omegaconf import OmegaConf

from vitascope import UserError
from vitascope.recipe.reading import (
    SETTING_ALIASES,
    list_recipe_names,
    read_builtin_recipe_description,
    read_model_config,
    read_recipe,
)
from vitascope.recipe.schema import (
    Recipe,
    build_omegaconf_schema,
    convert_recipe_to_dict,
    find_non_default_settings,
    format_keyword_settings,
)


@pytest.mark.parametrize("name", list_recipe_names())
def test_every_recipe_that_ships_can_be_read(name) -> None:
    assert read_recipe(name).model.num_classes == 10


def test_overrides_change_the_recipe_and_bare_keys_mean_the_model() -> None:
    assert read_recipe("cifar10", ["model.depth=3"]).model.depth == 3
    model = read_model_config("cifar10", ["depth=3", "model.img_size=[32,16]", "init_values=1e-4"])
    assert (model.depth, model.img_size, model.init_values, model.embed_dim) == (3, (32, 16), 1e-4, 256)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# nothing", "is empty"),
        ("train: 5", "train must contain settings"),
    ],
)
def test_an_empty_recipe_is_rejected_by_its_name(text, message, tmp_path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=f"mine.yaml.* {message}"):
        read_recipe(str(tmp_path / "mine.yaml"))


def test_a_recipe_may_be_a_path(tmp_path, monkeypatch) -> None:
    (tmp_path / "mine.yaml").write_text("model: {depth: 5, positions: none}")
    monkeypatch.chdir(tmp_path)
    assert read_model_config("mine.yaml").depth == 5


@pytest.mark.parametrize("name", list_recipe_names())
def test_the_passes_in_a_description_are_epochs_times_passes_per_epoch(name: str) -> None:
    recipe, text = read_recipe(name), read_builtin_recipe_description(name)
    epochs, passes = recipe.train.epochs, recipe.data.passes_per_epoch
    stated = re.search(r"(\d+) (passes|epochs)", text)
    assert stated or passes == 1, "an epoch of several passes is not what the field calls an epoch"
    assert stated is None or stated[0] == (f"{epochs} epochs" if passes == 1 else f"{epochs * passes} passes")


@pytest.mark.parametrize(
    ("name", "words", "sentence"),
    [
        ("cifar11", [], "There is no recipe 'cifar11'. Did you mean cifar10?"),
        ("cifar10", ["model.foo=1"], "There is no setting 'model.foo'. Choose one of model.attention, "),
        ("none.yaml", [], "There is no recipe file 'none.yaml'"),
        ("cifar10", ["model.depht=3"], "There is no setting 'model.depht'. Did you mean model.depth?"),
        ("cifar10", ["modle.depth=3"], "There is no setting 'modle'. Did you mean model?"),
        ("cifar10", ["train.learning_rate=0.1"], "There is no setting 'train.learning_rate'. Did you mean train.lr?"),
        ("cifar10", ["train.bs=32"], "There is no setting 'train.bs'. Did you mean train.batch_size?"),
        ("cifar10", ["train.far=1"], "There is no setting 'train.far'. Choose one of train.batch_size, "),
        ("cifar10", ["model.depth=many"], "model.depth: many is not a whole number."),
        ("cifar10", ["model.depth=[1"], "cannot be read as YAML"),
        ("cifar10", ["depth"], "'depth' is not a setting"),
        ("cifar10", ["train.epochs", "3"], "'train.epochs' has no value. Write train.epochs=3, without spaces."),
        ("cifar10", ["train.epochs", "train.lr=1"], "'train.epochs' has no value. Write train.epochs=VALUE"),
        ("cifar10-mae", ["mae.mask_ratio", "0.5"], "Write mae.mask_ratio=0.5, without spaces."),
        (
            "cifar10",
            ["weights="],
            "weights= is empty. Set weights to timm:NAME, hf:REPO, recipe:NAME, a file, a folder",
        ),
        ("cifar10", ["weights=' '"], "weights is empty. Name the pretrained weights, or leave it out to train from"),
        ("cifar10", ["weights=timm:"], "weights=timm: is empty. Set weights to timm:NAME"),
        ("cifar10", ["train.distill="], "train.distill= is empty. Set train.distill to "),
        ("cifar10", ["data.name="], "data.name= is empty. Set data.name to "),
        ("cifar10", ["data.name=''"], "data.name is empty."),
        ("cifar10", ["model.depth=???"], "model.depth=??? is not a value"),
        ("cifar10", ["model.img_size=big"], "Write a pair as [32,64]"),
        (
            "cifar10",
            ["model.patch_size=5"],
            "model.patch_size=5 does not divide model.img_size=32. Choose model.patch_size from 1, 2, 4, 8, 16, 32.",
        ),
    ],
)
def test_an_invalid_setting_is_rejected_in_one_line(name, words, sentence) -> None:
    with pytest.raises(UserError) as caught:
        read_recipe(name, words)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_every_alias_of_a_setting_names_a_setting_that_exists() -> None:
    settings = build_omegaconf_schema()
    for alias, setting in SETTING_ALIASES.items():
        section, name = setting.split(".")
        assert name in settings[section] and alias not in settings[section]


def test_a_broken_file_is_rejected(tmp_path) -> None:
    path = tmp_path / "broken.yaml"
    for content, sentence in (
        (b"model: [", "YAML"),
        (b"- 1\n- 2", "must contain sections of settings: model, data, train"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"train:\n  whiten: 2", "train.whiten must be true or false, not 2"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=sentence):
            read_recipe(str(path))


def test_plain_settings_are_those_that_omegaconf_would_write() -> None:
    """Runs and studies are known by them, to the type of a number."""
    recipes = [Recipe(), *map(read_recipe, list_recipe_names())]
    recipes += [read_recipe("digits", ["train.lr=1", "model.img_size=[8,8]", "train.betas=[0,0.5]"])]
    for recipe in recipes:
        ours, theirs = convert_recipe_to_dict(recipe), OmegaConf.to_container(OmegaConf.structured(recipe))
        section = theirs.pop("objective_config")
        theirs |= {} if section is None else {recipe.train.objective: section}
        assert ours == theirs and json.dumps(ours) == json.dumps(theirs)


@pytest.mark.parametrize("name", ["cifar10", "digits-dino", "sheet-a"])
def test_a_recipe_is_identified_by_the_settings_that_differ_from_the_defaults(name) -> None:
    """So a run or a study that was begun before a setting existed can go on."""
    recipe = read_recipe(name)
    chosen, plain = find_non_default_settings(recipe), convert_recipe_to_dict(Recipe())
    plain |= {recipe.train.objective: asdict(type(recipe.objective_config)())} if recipe.objective_config else {}
    assert find_non_default_settings(Recipe()) == {} and chosen["model"]["embed_dim"] == recipe.model.embed_dim
    assert all(value != plain["train"][key] for key, value in chosen["train"].items())
    for section, values in convert_recipe_to_dict(recipe).items():  # nothing is lost
        if isinstance(values, dict):
            parts = chosen.get(section, {})
            for key, value in plain[section].items():
                whole = value | parts.get(key, {}) if isinstance(value, dict) else parts.get(key, value)
                assert whole == values[key]


def test_nested_keywords_and_full_names_are_the_same_settings() -> None:
    def read(**settings):
        return read_recipe("digits", format_keyword_settings(settings))

    nested = read(train={"epochs": 5, "lr": 1e-3}, model={"depth": 2}, data={"augment": {"flip": 0.5}})
    flat = {"train.epochs": 5, "train.lr": 1e-3, "model.depth": 2, "data.augment.flip": 0.5}
    assert (
        nested
        == read(**flat)
        == read(train={"epochs": 5}, **{"train.lr": 1e-3, "model.depth": 2}, data={"augment.flip": 0.5})
    )
    assert read(model={"img_size": (16, 8)}, train={}, data={"root": None}).model.image_shape == (16, 8)
    for settings, sentence in (
        ({"train": {"epochs": 5}, "train.epochs": 6}, r"train\.epochs is given twice: 5 and 6"),
        ({"train": {"epoch": 5}}, r"There is no setting 'train\.epoch'\. Did you mean train\.epochs"),
        ({"trian": {"epochs": 5}}, "There is no setting 'trian'. Did you mean train"),
        ({"epochs": 5}, r"Did you mean train\.epochs"),
        ({"train": 5}, r"train=5 is not a section of settings\. Write train=\{\"NAME\": VALUE\}"),
        ({"train": {"watch": 1}}, r"train\.watch was renamed to train\.probe_every"),
    ):
        with pytest.raises(UserError, match=sentence):
            read(**settings)
