"""Settings chosen from images, weights and machine: laws of the rules, the classifier's start, and what is found."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

import vitascope
from tests.training.test_finetuning import assert_same, stopped_run
from tests.training.tiny import tiny_run
from vitascope import ModelConfig, UserError, VisionTransformer
from vitascope.data.config import DataConfig, resolve_augmentation
from vitascope.data.open_data import load_train_and_validation_data
from vitascope.inference.hardware import InferenceHardware
from vitascope.number_format import format_rough_duration
from vitascope.recipe.reading import is_data_reference, read_recipe
from vitascope.recipe.schema import Recipe, format_value_for_command_line
from vitascope.run.directory import Run
from vitascope.training.auto import find_weights as finding
from vitascope.training.auto import train_images
from vitascope.training.auto.choose_settings import (
    FINE_TUNING,
    LINEAR_PROBE,
    MAX_RESIZE_SECONDS,
    MAX_SECONDS,
    MIN_STEPS_PER_EPOCH,
    SCRATCH,
    Choice,
    MachineFacts,
    adapt_resolution,
    choose_batch_size,
    choose_passes_per_epoch,
    choose_settings,
    estimate_seconds,
)
from vitascope.training.auto.find_weights import WeightsAtHand, find_weights
from vitascope.training.auto.image_facts import ImageFacts, collect_image_facts
from vitascope.training.auto.messages import describe_choice, describe_result
from vitascope.training.initial_weights import fit_head_by_linear_probe

DEIT = ModelConfig(embed_dim=192, num_heads=3)
WEIGHTS = WeightsAtHand("deit.safetensors", "given", DEIT)
NO_WEIGHTS = WeightsAtHand(origin="none are on this machine")
FAST, SLOW = MachineFacts("cuda", "H200", 1e14), MachineFacts("cpu", "two cores", 1e11)
PHOTOS = ImageFacts("photos", (123, 122), (375, 500), 3, validation=0.2)
TINY_CONFIG = ModelConfig(img_size=8, patch_size=2, in_chans=1, embed_dim=64, depth=2, num_heads=1, num_classes=7)

METRIC_NAMES = ("step", "train_loss", "train_accuracy", "val_loss", "images_seen", "images_per_second", "seconds", "lr")
METRICS_ROW = {"epoch": 1, "val_accuracy": 0.5} | dict.fromkeys(METRIC_NAMES, 1)

facts = st.builds(
    lambda count, num_classes, side, channels, validation: ImageFacts(
        "photos", (count,) * num_classes, (side, side), channels, validation=validation
    ),
    st.integers(2, 20_000),
    st.integers(2, 20),
    st.sampled_from([8, 28, 32, 50, 64, 100, 128, 224, 500]),
    st.sampled_from([1, 3]),
    st.sampled_from([0.0, 0.1, 0.2]),
)
machines = st.floats(1e10, 1e15).map(lambda speed: MachineFacts("cpu", "cores", speed))


def read_choice(choice: Choice) -> Recipe:
    return read_recipe(
        None, [f"{key}={format_value_for_command_line(value)}" for key, value in choice.settings.items()]
    )


@given(facts, st.sampled_from([WEIGHTS, NO_WEIGHTS]), machines)
def test_every_choice_is_a_valid_recipe_with_at_least_ten_steps_an_epoch(images, weights, machine) -> None:
    choice = choose_settings(images, weights, machine)
    recipe = read_choice(choice)
    batch_size = min(recipe.train.batch_size, images.num_images_after_holdout)
    assert images.num_images_after_holdout * recipe.data.passes_per_epoch // batch_size >= MIN_STEPS_PER_EPOCH
    assert recipe.model.num_classes == images.num_classes and recipe.data.validation == images.validation
    assert choice.reasons["start"] and choice.seconds > 0
    assert resolve_augmentation(recipe.data.augment, "photos", images.num_channels)
    assert (recipe.weights is None) == (choice.start == SCRATCH)
    assert ("classifier" in choice.reasons) == (choice.start == FINE_TUNING)
    assert "classifier" not in choice.reasons or recipe.train.head_init == "linear_probe"


@given(st.integers(1, 100_000))
def test_batches_are_powers_of_two_and_as_large_as_ten_steps_allow(num_images_after_holdout) -> None:
    batch_size = choose_batch_size(num_images_after_holdout)
    passes = choose_passes_per_epoch(num_images_after_holdout, batch_size)
    assert num_images_after_holdout * passes // batch_size >= MIN_STEPS_PER_EPOCH
    assert batch_size == num_images_after_holdout or math.log2(batch_size).is_integer()
    if 80 <= num_images_after_holdout < 1280:
        assert passes == 1 and num_images_after_holdout // (2 * batch_size) < MIN_STEPS_PER_EPOCH


@given(machines, st.sampled_from([224, 300, 4000]))
def test_photos_at_least_as_large_as_the_weights_keep_their_resolution_on_every_machine(machine, side) -> None:
    settings = choose_settings(replace(PHOTOS, image_size=(side, side + 100)), WEIGHTS, machine).settings
    assert (settings["model.img_size"], settings["model.patch_size"]) == (224, 16)


def test_small_photos_are_enlarged_where_that_takes_minutes_and_else_their_patches_are_adapted() -> None:
    images = replace(PHOTOS, class_counts=(500,) * 10, image_size=(64, 64))
    fast, slow = (choose_settings(images, WEIGHTS, machine) for machine in (FAST, SLOW))
    assert estimate_seconds(images, DEIT, SLOW, 5) > MAX_RESIZE_SECONDS > estimate_seconds(images, DEIT, FAST, 5)
    assert (fast.settings["model.img_size"], fast.settings["model.patch_size"]) == (224, 16)
    assert (slow.settings["model.img_size"], slow.settings["model.patch_size"]) == (64, 8)
    assert "not enlarged to 224×224: 5 passes would take" in slow.reasons["resolution"]
    assert "to enlarge: model.img_size=224 model.patch_size=16" in slow.reasons["resolution"]
    fewer = choose_settings(replace(images, class_counts=(50,) * 10), WEIGHTS, SLOW)
    assert fewer.settings["model.img_size"] == 224 and fewer.seconds <= MAX_RESIZE_SECONDS
    assert "18 instead of 20 passes, to end within 10 minutes" in fewer.reasons["length"]


@given(st.integers(2, 223))
def test_an_adapted_resolution_covers_the_photo_with_whole_patches(side) -> None:
    model = adapt_resolution(DEIT, side)
    assert model.num_patches <= 100 and abs(model.image_shape[0] - side) <= max(1, model.patch_shape[0] // 2)


def test_a_machine_that_is_too_slow_for_fine_tuning_trains_the_classifier() -> None:
    images = replace(PHOTOS, class_counts=(50_000,) * 2)
    assert choose_settings(images, WEIGHTS, FAST).start == FINE_TUNING
    choice = choose_settings(images, WEIGHTS, SLOW)
    assert choice.start == LINEAR_PROBE and choice.settings["train.tune"] == "head"
    assert "more than 30 minutes" in choice.reasons["start"]
    shortened = choose_settings(replace(images, class_counts=(3000,) * 2), WEIGHTS, MachineFacts("cpu", "cores", 2e11))
    assert shortened.start == FINE_TUNING and "8 instead of 15 passes" in shortened.reasons["length"]
    assert shortened.seconds <= MAX_SECONDS


def test_many_small_gray_images_need_no_pretrained_weights_and_get_the_recipe_of_the_same_data() -> None:
    images = ImageFacts("mnist", (6000,) * 10, (28, 28), 1, has_default_augmentation=True)
    choice, recipe = choose_settings(images, WEIGHTS, FAST), read_recipe("mnist")
    chosen = read_choice(choice)
    assert choice.start == SCRATCH and "60,000" not in choice.reasons["start"] and "gray" in choice.reasons["start"]
    assert (chosen.model, chosen.train) == (recipe.model, recipe.train)
    digits = ImageFacts("digits", (80,) * 10, (8, 8), 1, has_default_augmentation=True)
    assert choose_settings(digits, WEIGHTS, SLOW).start == SCRATCH
    assert choose_settings(replace(digits, class_counts=(8,) * 10), WEIGHTS, SLOW).start == FINE_TUNING
    assert choose_settings(replace(digits, num_channels=3), WEIGHTS, FAST).start == FINE_TUNING


def test_few_classes_and_colour_choose_the_network_from_scratch() -> None:
    small = choose_settings(replace(PHOTOS, image_size=(64, 64)), NO_WEIGHTS, FAST)
    assert small.settings["model.embed_dim"] == 128 and small.settings["model.img_size"] == 64
    assert small.settings["train.optimizer"] == "muon" and small.reasons["start"] == NO_WEIGHTS.origin
    gray = choose_settings(replace(PHOTOS, image_size=(8, 8), num_channels=1), NO_WEIGHTS, FAST)
    assert gray.settings["model.in_chans"] == 1 and gray.settings["model.embed_dim"] == 32


def test_a_recipe_s_name_wins_over_data_of_the_same_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("digits", "photos"):
        (tmp_path / name).mkdir()
    assert not is_data_reference("digits") and not is_data_reference("nothing")
    for images in ("data:digits", "./digits", "digits/", "photos", "images.npz"):
        assert is_data_reference(images)


def test_the_user_s_settings_win_and_the_stored_recipe_repeats_the_choice(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos [1]").mkdir()
    choice = choose_settings(PHOTOS, WEIGHTS, SLOW)
    user = Recipe(data=DataConfig(name="photos [1]"))
    text = train_images.format_chosen_recipe("photos [1]", user, choice, ["train.lr=0.5", "data.augment.flip=0"])
    (tmp_path / "chosen.yaml").write_text(text)
    recipe = read_recipe("chosen.yaml")
    assert (recipe.train.lr, recipe.data.augment.flip) == (0.5, 0) and recipe.name == "photos-1"
    assert recipe.data.name == str((tmp_path / "photos [1]").resolve())
    assert recipe.train.batch_size == choice.settings["train.batch_size"] and "resolution: the weights'" in text
    reasons = train_images.remove_reasons_of_given_settings(choice, {"model.img_size": "96"}).reasons
    assert "resolution" not in reasons and "batch size" in reasons


def test_a_choice_is_told_in_five_lines_with_the_duration_of_the_final_settings() -> None:
    choice = choose_settings(PHOTOS, WEIGHTS, SLOW)
    recipe = read_choice(choice)
    lines = describe_choice(PHOTOS, WEIGHTS, SLOW, choice, recipe)
    assert len(lines) == 5 and lines[0].startswith(
        "Images: 196 images for training, 49 for validation; 2 classes of 122 to 123"
    )
    assert "first the classifier" in lines[2] and "12 steps, batch size 16" in lines[3]
    tiny = replace(PHOTOS, image_size=(3, 3), counts_are_files=True)
    lines_of_tiny = describe_choice(tiny, WEIGHTS, SLOW, choice, recipe)
    assert lines_of_tiny[0].startswith("Images: 196 files for training") and "photos of 3×3 pixels" in lines_of_tiny[5]
    assert len(describe_choice(replace(tiny, num_channels=1), WEIGHTS, SLOW, choice, recipe)) == 5
    shorter = replace(recipe, train=replace(recipe.train, epochs=1))
    assert describe_choice(PHOTOS, WEIGHTS, SLOW, choice, shorter)[4] != lines[4]
    assert [format_rough_duration(seconds) for seconds in (3, 44, 119, 7000)] == [
        "about 10 seconds", "about 40 seconds", "about 2 minutes", "about 1.9 hours",
    ]  # fmt: skip


def test_the_result_counts_the_validation_images_that_could_be_read(tmp_path) -> None:
    (tmp_path / "machine.json").write_text('{"validation_images": 20}')
    (tmp_path / "metrics.jsonl").write_text(json.dumps(METRICS_ROW) + "\n")
    images = replace(PHOTOS, counts_are_files=True, has_test=True)
    text = describe_result(Run(tmp_path), images)
    assert images.num_validation == 49 and ", 20 images)" in text
    assert f"evaluate {tmp_path} --split val," in text and text.endswith(f"at the end: vitascope evaluate {tmp_path}")


def write_images(folder: Path, classes: dict[str, int], size: tuple[int, int] = (20, 14), gray: bool = False) -> Path:
    """Images of one colour per class, with noise. `size`: columns and rows."""
    generator = np.random.default_rng(0)
    for index, (name, count) in enumerate(classes.items()):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = generator.integers(0, 100, (size[1], size[0], 3), dtype=np.uint8)
            pixels[..., index % 3] += 120
            image = Image.fromarray(pixels)
            (image.convert("L") if gray else image).save(folder / name / f"{number}.png")
    return folder


def test_the_facts_are_those_of_the_files(tmp_path) -> None:
    write_images(tmp_path / "photos/train", {"a": 30, "b": 10})
    write_images(tmp_path / "photos/val", {"a": 3, "b": 3})
    (tmp_path / "photos/train/a/broken.jpg").write_text("no image")
    (tmp_path / "photos/train/notes.txt").write_text("no class")
    images = collect_image_facts(DataConfig(name=str(tmp_path / "photos")), is_validation_given=False)
    assert images.class_counts == (31, 10) and images.image_size == (14, 20) and images.num_channels == 3
    assert (images.num_images_after_holdout, images.num_validation, images.has_test) == (41, 6, False)
    gray = write_images(tmp_path / "gray", {"a": 5, "b": 5}, gray=True)
    images = collect_image_facts(DataConfig(name=str(gray), validation=0.4), is_validation_given=True)
    assert (images.num_channels, images.num_images_after_holdout, images.num_validation) == (1, 6, 4)
    assert collect_image_facts(DataConfig(name=str(gray)), is_validation_given=False).validation == 0.2
    digits = collect_image_facts(DataConfig(name="digits"), is_validation_given=False)
    assert digits.image_size == (8, 8) and digits.has_test and digits.num_channels == 1


@pytest.fixture
def weights_file(tmp_path) -> Path:
    path = tmp_path / "tiny.safetensors"
    save_file(VisionTransformer(TINY_CONFIG).state_dict(), path)
    return path


@pytest.fixture
def bare_machine(tmp_path, monkeypatch) -> Path:
    """No weights in the data root, the working directory or a cache, and no network."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("VITASCOPE_DATA", str(tmp_path / "root"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(finding, "is_hub_reachable", lambda: False)
    return tmp_path


def test_weights_are_taken_as_given_then_from_a_file_then_from_the_cache(
    bare_machine, weights_file, monkeypatch
) -> None:
    assert find_weights(None, None) == WeightsAtHand(
        origin="none are on this machine, and the Hugging Face Hub cannot be reached"
    )
    assert "data.download=false" in find_weights(None, None, may_download=False).origin
    cached = bare_machine / "hub/models--timm--deit_tiny_patch16_224.fb_in1k"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("abc")
    (cached / "snapshots/abc").mkdir(parents=True)
    (cached / "snapshots/abc/model.safetensors").write_bytes(weights_file.read_bytes())
    asked = []
    monkeypatch.setattr(
        finding, "_try_to_read", lambda ref, origin: asked.append(ref) or WeightsAtHand(ref, origin, TINY_CONFIG)
    )
    assert find_weights(None, None).ref == "timm:deit_tiny_patch16_224.fb_in1k"
    (bare_machine / "root/weights").mkdir(parents=True)
    other = bare_machine / "root/weights/mine.safetensors"
    other.write_bytes(weights_file.read_bytes())
    assert find_weights(None, None).ref == str(other.resolve())
    known = Path("deit_tiny_patch16_224-a1.safetensors").resolve()
    known.write_bytes(weights_file.read_bytes())
    assert find_weights(None, None).ref == str(known)
    assert find_weights(str(weights_file), None).ref == str(weights_file)
    assert find_weights("null", None).ref is None


def test_files_that_are_not_a_vit_are_passed_over(bare_machine) -> None:
    Path("weights").mkdir()
    Path("weights/other.safetensors").write_bytes(b"no weights")
    Path("deit_tiny_patch16_224.pth").write_bytes(b"no weights")
    assert find_weights(None, None).ref is None


def test_weights_that_were_given_wrongly_are_refused(bare_machine) -> None:
    for given_ref, sentence in (
        ("", "weights= is empty"),
        ("nowhere", "There are no weights 'nowhere'"),
        ("recipe:digits-mae", "works only with a recipe"),
    ):
        with pytest.raises(UserError, match=sentence):
            find_weights(given_ref, None)


def test_the_classifier_starts_as_an_independent_logistic_regression_on_the_features() -> None:
    data = load_train_and_validation_data(DataConfig(name="digits"), (8, 8), 1, 0)
    model = VisionTransformer(replace(TINY_CONFIG, num_classes=10)).train()
    fit_head_by_linear_probe(model, data, InferenceHardware("cpu", "float32"))
    assert model.training
    model.eval()
    assert data.validation is not None
    with torch.no_grad():
        train, val = (
            model.compute_pooled_features(data.preprocessing(part.images)) for part in (data.train, data.validation)
        )
        logits = model.head(val)
    scaler = StandardScaler().fit(train)
    regression = LogisticRegression(C=1.0, max_iter=2000, tol=1e-6).fit(scaler.transform(train), data.train.labels)
    expected = regression.predict_proba(scaler.transform(val))
    np.testing.assert_allclose(logits.softmax(1).numpy(), expected, atol=0.02)
    assert (logits.argmax(1).numpy() == expected.argmax(1)).mean() > 0.97


def test_a_probed_classifier_learns_faster_and_goes_on_exactly(tmp_path, monkeypatch) -> None:
    plain = {f"data.augment.{name}": 0 for name in ("mixup", "shift", "rotate", "scale")}
    first = {"model.embed_dim": 64, "model.num_heads": 1, "train.optimizer": "muon", "train.epochs": 10}
    earlier = load_file(tiny_run(tmp_path / "earlier", **first, **plain).get_path("model.safetensors"))
    save_file({name: weight for name, weight in earlier.items() if name[:5] != "head."}, tmp_path / "w.safetensors")
    settings = plain | {"weights": tmp_path / "w.safetensors", "train.epochs": 2, "train.lr": 1e-4, "train.ema": 0.9}
    random_start = tiny_run(tmp_path / "random", **settings)
    settings["train.head_init"] = "linear_probe"
    probed = tiny_run(tmp_path / "probed", **settings)
    assert probed.metrics[0]["train_accuracy"] > random_start.metrics[0]["train_accuracy"] + 0.1
    run = stopped_run(tmp_path / "stopped", monkeypatch, 2, **settings)
    assert_same(vitascope.resume(run.path, quiet=True), probed)
    run = stopped_run(tmp_path / "killed", monkeypatch, 1, **settings)
    run.get_path("resume.pt").unlink()  # as if killed before the first checkpoint
    assert_same(vitascope.resume(run.path, quiet=True), probed)


def test_a_probe_needs_weights_and_labels() -> None:
    with pytest.raises(
        UserError, match=r"fits the classifier to the features of pretrained weights, but there are none"
    ):
        read_recipe("digits", ["train.head_init=linear_probe"])
    with pytest.raises(UserError, match=r"needs labels, but train\.objective=mae"):
        read_recipe("digits-mae", ["weights=x", "train.head_init=linear_probe"])
    with pytest.raises(UserError, match=r"train\.head_init='probe' is unknown"):
        read_recipe("digits", ["train.head_init=probe"])
