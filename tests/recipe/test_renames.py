"""Settings of older versions: rejected in one sentence where they are typed, converted where an old run is read."""

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

import vitascope
from tests.training.tiny import shared_run
from vitascope import UserError
from vitascope.data.config import AugmentConfig, DataConfig
from vitascope.model.config import OLD_INITIALIZERS, ModelConfig
from vitascope.recipe.old_settings import RENAMED, RENAMED_VALUES, convert_old_settings
from vitascope.recipe.reading import read_recipe
from vitascope.recipe.train import TrainConfig
from vitascope.run.directory import Run
from vitascope.training.objectives.dino import DinoConfig
from vitascope.training.objectives.mae import MaeConfig

SECTIONS = {
    "data": DataConfig, "data.augment": AugmentConfig, "model": ModelConfig, "train": TrainConfig, "dino": DinoConfig,
    "mae": MaeConfig,
}  # fmt: skip
CHANGELOG = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")
# What an older version wrote into a run's recipe.yaml, where it differs from today's.
OLD = {
    "data.repeat": 2, "data.augment.flip_by": "chance", "data.augment.crop": 0.5, "data.augment.crop_most": 0.9,
    "data.augment.grey": 0.0, "data.augment.mix_share": 0.8, "data.augment.mix_until": 1.0, "train.accumulate": 1,
    "train.capture": "auto", "train.keep": 0, "train.watch": 0, "train.distill_how": "soft", "train.distill_share": 0.5,
    "train.small_size": 0, "train.small_share": 0.5, "model.initialize": "silent",
}  # fmt: skip


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_name_is_rejected_with_the_new_one_which_exists_and_is_in_the_changelog(old, new) -> None:
    with pytest.raises(UserError, match=rf"^{old} was renamed to {new}\.".replace(".", r"\.").replace(r"\\.", r"\.")):
        read_recipe("digits", [f"{old}=1"])
    section, _, name = new.rpartition(".")
    assert name in {item.name for item in fields(SECTIONS[section])}
    assert f"`{old}` → `{new}`" in CHANGELOG


@pytest.mark.parametrize(("name", "values"), RENAMED_VALUES.items())
def test_an_old_value_is_rejected_with_the_new_one(name, values) -> None:
    for old, new in values.items():
        with pytest.raises(UserError, match=f"{name}={old} was renamed to {name}={new}."):
            read_recipe("cifar10", [f"{name}={old}"])
        assert f"`{name}={old}` → `{name}={new}`" in CHANGELOG or "flip_by" in CHANGELOG


@pytest.mark.parametrize("word", ["train.small_size=16", "data.augment.mix_until=0.8", "model.initialize=silent"])
def test_a_removed_setting_is_rejected_as_removed(word) -> None:
    with pytest.raises(UserError, match=r"was removed\. Leave it out"):
        read_recipe("cifar10", [word])


def test_a_recipe_file_with_an_old_name_is_rejected_too(tmp_path) -> None:
    (tmp_path / "mine.yaml").write_text("train:\n  accumulate: 2\n")
    with pytest.raises(UserError, match=r"train\.accumulate was renamed to train\.grad_accum_steps\."):
        read_recipe(str(tmp_path / "mine.yaml"))


def test_ranges_of_crops_are_converted() -> None:
    for old, new in (((0.0, 1.0), [1.0, 1.0]), ((0.5, None), [0.5, 1.0]), ((0.5, 0.9), [0.5, 0.9])):
        made = convert_old_settings({"data.augment.crop": old[0], "data.augment.crop_most": old[1]})
        assert made == {"data.augment.crop_scale": new}
    assert convert_old_settings({"data.augment.crop": None, "data.augment.crop_most": None}) == {
        "data.augment.crop_scale": None
    }


@pytest.fixture
def old_run(tmp_path) -> Run:
    """A run as an older version left it, under the old names."""
    run = shared_run(tmp_path)
    sections = yaml.safe_load(run.get_path("recipe.yaml").read_text())
    new = {*RENAMED.values(), "model.initialize"}
    for setting in new & {f"{name}.{key}" for name in ("data", "train", "model") for key in sections[name]}:
        section, _, key = setting.partition(".")
        del sections[section][key]
    for key in ("flip_mode", "crop_scale", "grayscale", "mix_prob"):
        del sections["data"]["augment"][key]
    for setting, value in OLD.items():
        *parents, last = setting.split(".")
        level = sections
        for parent in parents:
            level = level[parent]
        level[last] = value
    run.get_path("recipe.yaml").write_text(yaml.safe_dump(sections))
    config = json.loads(run.get_path("config.json").read_text())
    config["model"]["initialize"] = "silent"
    run.get_path("config.json").write_text(json.dumps(config))
    return run


def test_an_old_run_is_read_with_the_new_names(old_run) -> None:
    recipe = old_run.recipe
    assert (recipe.data.passes_per_epoch, recipe.data.augment.crop_scale) == (2, (0.5, 0.9))
    assert recipe.data.augment.flip_mode == "random" and recipe.data.augment.mix_prob == 0.8
    assert recipe.model.initialize == OLD_INITIALIZERS["silent"] == "timm"


def test_an_old_run_predicts_evaluates_and_explains(old_run, vitascope, tmp_path) -> None:
    image = Path(__file__).parents[2] / "docs/images/mask.png"
    assert vitascope("predict", str(old_run.path), str(image)).code == 0
    assert vitascope("evaluate", str(old_run.path), "--split", "val", "--quick").code == 0
    answer = vitascope("explain", str(old_run.path), str(image), "--out", str(tmp_path / "explained"))
    assert answer.code == 0, answer.err


def test_an_old_run_that_was_interrupted_is_not_resumed(old_run) -> None:
    old_run.get_path("model.safetensors").unlink()
    with pytest.raises(UserError, match="was made by an older version of Vitascope and cannot be resumed"):
        vitascope.resume(old_run.path, quiet=True)


def test_a_run_of_this_version_is_not_called_old(tmp_path) -> None:
    run = shared_run(tmp_path)
    assert not run.is_from_older_version
    shutil.rmtree(run.path)
