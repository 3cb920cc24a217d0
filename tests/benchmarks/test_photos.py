"""The benchmark of chosen settings: all arms see the same images, and an interrupted record is continued."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks import photos
from vitascope.recipe.reading import read_recipe, split_required_recipe_args


@pytest.fixture
def data_folder(tmp_path) -> Path:
    """A stand-in for tiny10 with three classes."""
    pixels = np.zeros((8, 8, 3), dtype=np.uint8)
    for split, count in (("train", 20), ("val", 4)):
        for name in "abc":
            (tmp_path / "photos/tiny10" / split / name).mkdir(parents=True)
            for number in range(count):
                Image.fromarray(pixels).save(tmp_path / "photos/tiny10" / split / name / f"{number}.jpg")
    return tmp_path


def count_files(folder: Path) -> list[int]:
    return [len(list(path.iterdir())) for path in sorted(folder.iterdir())]


def test_a_subset_has_the_wanted_images_and_the_whole_test_part(data_folder, tmp_path) -> None:
    image_set = photos.ImageSet("tiny10", "tiny10-finetune", images=10)
    folder = photos.write_image_folder(image_set, data_folder, tmp_path / "ten")
    assert count_files(folder / "train") == [4, 3, 3] and count_files(folder / "test") == [4, 4, 4]
    two = photos.ImageSet("tiny10", "tiny10-finetune", images=9, classes=2)
    folder = photos.write_image_folder(two, data_folder, tmp_path / "two")
    assert count_files(folder / "train") == [5, 4] and count_files(folder / "test") == [4, 4]
    half = photos.ImageSet("digits", "digits", fraction=0.1)
    folder = photos.write_image_folder(half, data_folder, tmp_path / "half")
    assert sum(count_files(folder / "train")) in range(85, 95) and sum(count_files(folder / "test")) == 899


@pytest.mark.parametrize("set_name", photos.IMAGE_SETS)
@pytest.mark.parametrize("arm", ["recipe", "linear probe"])
def test_every_arm_is_a_valid_recipe(set_name, arm) -> None:
    args = Namespace(data=Path("data"), device="cpu", epochs=None)
    words = photos.make_vitascope_arguments(arm, photos.IMAGE_SETS[set_name], Path("folder"), args)
    recipe = read_recipe(*split_required_recipe_args(words))
    assert recipe.data.validation == 0 and (recipe.train.head_init == "linear_probe") == (arm == "linear probe")


def test_an_interrupted_record_is_continued_without_repeating_its_runs(tmp_path, monkeypatch) -> None:
    measured = []

    def measure(set_name, arm, seed, args):
        measured.append((set_name, arm, seed))
        if len(measured) == 3:
            raise KeyboardInterrupt
        return {"data": set_name, "arm": arm, "seed": seed, "accuracy": 0.5}

    monkeypatch.setattr(photos, "measure_arm", measure)
    record = tmp_path / "photos.json"
    words = ["--data", str(tmp_path), "--folders", "digits", "--arms", "chosen", "timm script", "--seeds", "1", "2"]
    monkeypatch.setattr(sys, "argv", ["photos", *words, "--out", str(record), "--commit", "abc"])
    with pytest.raises(KeyboardInterrupt):
        photos.main()
    assert len(json.loads(record.read_text())["rows"]) == 2
    photos.main()
    rows = json.loads(record.read_text())["rows"]
    assert [(row["arm"], row["seed"]) for row in rows] == [
        ("chosen", 1), ("timm script", 1), ("chosen", 2), ("timm script", 2),
    ]  # fmt: skip
    assert len(measured) == 5 and str(tmp_path) not in record.read_text()
