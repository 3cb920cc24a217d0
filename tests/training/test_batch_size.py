"""No more than a twentieth of the images is left out of an epoch: otherwise the batch size is reduced."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import vitascope
from tests.training.killing import interrupt_after_one_epoch
from tests.training.test_runs import same_weights
from tests.training.tiny import TINY, untimed
from vitascope.data.config import DataConfig
from vitascope.data.open_data import load_train_and_validation_data
from vitascope.recipe.reading import list_recipe_names, read_recipe
from vitascope.recipe.schema import Recipe
from vitascope.recipe.train import TrainConfig
from vitascope.training.engines.batched_runs import train_batched_runs
from vitascope.training.messages import choose_batch_size, describe_batch_size_change

IMAGES_PER_CLASS = {"mnist": [6000] * 10, "fashion-mnist": [6000] * 10, "cifar10": [5000] * 10, "tiny10": [500] * 10}


def make_recipe(batch_size: int, *, parts: int = 1, passes: int = 1, balance: str = "none") -> Recipe:
    data = DataConfig(passes_per_epoch=passes, balance=balance)
    return Recipe(data=data, train=TrainConfig(batch_size=batch_size, grad_accum_steps=parts))


@pytest.mark.parametrize(
    ("num_images", "settings", "batch_size"),
    [
        (220, {"batch_size": 128}, 110),  # the 245 photos without 25 for validation: 92 were left out
        (600, {"batch_size": 500}, 300),
        (220, {"batch_size": 128, "parts": 4}, 108),  # 110 is not divisible by 4
        (220, {"batch_size": 128, "passes": 3}, 128),  # 20 of 660
        (220, {"batch_size": 128, "passes": 2}, 110),  # 56 of 440
        (220, {"batch_size": 128, "balance": "sampling"}, 128),  # drawn with replacement
        (220, {"batch_size": 500}, 500),  # each step uses all images
        (100, {"batch_size": 64, "parts": 64}, 64),  # no smaller one is divisible by 64
        (50_010, {"batch_size": 500}, 500),
    ],
)
def test_the_batch_size_is_the_largest_that_leaves_few_images_out(num_images, settings, batch_size) -> None:
    assert choose_batch_size(make_recipe(**settings), num_images) == batch_size


@given(st.integers(1, 2000), st.integers(1, 100), st.integers(1, 8), st.integers(1, 5))
def test_no_larger_batch_size_would_do(num_images, quotient, parts, passes) -> None:
    requested = quotient * parts
    chosen = choose_batch_size(make_recipe(requested, parts=parts, passes=passes), num_images)
    total = num_images * passes
    assert chosen <= requested and chosen % parts == 0
    if requested < num_images:
        fitting = [size for size in range(parts, requested + 1, parts) if total % size <= 0.05 * total]
        assert chosen == (max(fitting) if fitting else requested)


@pytest.mark.parametrize("validation", [0, 0.1])
@pytest.mark.parametrize("name", list_recipe_names())
def test_a_shipped_recipe_keeps_its_batch_size_on_its_own_data(name, validation) -> None:
    recipe = read_recipe(name, [f"data.validation={validation}"])
    if recipe.data.name == "digits":
        num_images = len(load_train_and_validation_data(recipe.data, (8, 8), 1, seed=0).train)
    else:
        num_images = sum(count - round(validation * count) for count in IMAGES_PER_CLASS[recipe.data.name])
    assert choose_batch_size(recipe, num_images) == recipe.train.batch_size
    assert describe_batch_size_change(recipe, num_images) is None


def test_a_changed_batch_size_is_reported_in_one_sentence() -> None:
    text = "train.batch_size: 500 → 300, because 500 would leave 100 of 600 images out of each epoch."
    assert describe_batch_size_change(make_recipe(500), 600) == text
    text = "train.batch_size=500 is larger than the training set: each step uses all 300 images."
    assert describe_batch_size_change(make_recipe(500), 300) == text
    text = "train.batch_size=64: 1 step per epoch; 36 of 100 images are left out of each epoch."
    assert describe_batch_size_change(make_recipe(64, parts=64), 100) == text
    assert describe_batch_size_change(make_recipe(500, balance="sampling"), 600) is None


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for index in range(60):
        path = folder / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("L", (8, 8), 4 * index).save(path)
    return folder


def make_settings(photos: Path) -> dict[str, object]:
    return TINY | {"data.name": str(photos), "train.batch_size": 40, "data.validation": 0.1, "data.augment.shift": 0}


def test_a_run_stores_the_batch_size_it_used_and_is_resumed_with_it(photos, tmp_path, monkeypatch, capsys) -> None:
    run = vitascope.train("digits", runs=tmp_path, **make_settings(photos))
    sentence = "train.batch_size: 40 → 27, because 40 would leave 14 of 54 images out of each epoch."
    assert capsys.readouterr().out.count(sentence) == 1
    assert run.recipe.train.batch_size == 27 and run.metrics[-1]["images_seen"] == 3 * 54
    interrupt_after_one_epoch(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        vitascope.train("digits", runs=tmp_path / "cut", quiet=True, **make_settings(photos))
    monkeypatch.undo()
    resumed = vitascope.resume(tmp_path / "cut" / "digits", quiet=True)
    assert untimed(resumed) == untimed(run) and same_weights(resumed, run)
    again = vitascope.train(str(run.path / "recipe.yaml"), runs=tmp_path / "again", quiet=True)
    assert again.recipe.train == run.recipe.train and same_weights(again, run)


def test_runs_trained_in_one_batch_reduce_it_alike(photos, tmp_path) -> None:
    words = [f"{key}={value}" for key, value in make_settings(photos).items()]
    recipes = [read_recipe("digits", [*words, f"train.seed={seed}"]) for seed in (1, 2)]
    recipes = [replace(recipe, train=replace(recipe.train, ema=0.0)) for recipe in recipes]
    runs = train_batched_runs(recipes, tmp_path)
    single = [
        vitascope.train(
            "digits",
            runs=tmp_path / "single",
            quiet=True,
            **(make_settings(photos) | {"train.seed": seed, "train.ema": 0.0}),
        )
        for seed in (1, 2)
    ]
    for run, alone in zip(runs, single, strict=True):
        assert run.recipe.train.batch_size == alone.recipe.train.batch_size == 27
        assert run.metrics[-1]["images_seen"] == alone.metrics[-1]["images_seen"]
        assert run.metrics[-1]["train_loss"] == pytest.approx(alone.metrics[-1]["train_loss"], rel=1e-3)
