"""`vitascope train FOLDER`, `FILE.npz` and `data:NAME`, as a user types them."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

import vitascope as library
from tests.training.test_auto import write_images
from vitascope import ModelConfig, VisionTransformer
from vitascope.run.directory import open_run_or_newest
from vitascope.training.auto import find_weights, train_images
from vitascope.training.auto.choose_settings import MachineFacts
from vitascope.training.auto.find_weights import WeightsAtHand

QUICK = ("train.device=cpu", "train.precision=float32")
CONFIG = ModelConfig(img_size=16, patch_size=4, embed_dim=64, depth=1, num_heads=1, num_classes=7)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder with photos and a weights file, on a machine of known speed without a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITASCOPE_DATA", str(tmp_path / "root"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(find_weights, "is_hub_reachable", lambda: False)
    monkeypatch.setattr(train_images, "measure_machine", lambda *_: MachineFacts("cpu", "two cores", 1e12))
    write_images(tmp_path / "photos", {"ants": 30, "bees": 33})
    (tmp_path / "weights").mkdir()
    save_file(VisionTransformer(CONFIG).state_dict(), tmp_path / "weights/tiny.safetensors")
    return tmp_path


def test_a_folder_is_trained_with_chosen_settings_that_can_be_repeated(vitascope, here) -> None:
    answer = vitascope("train", "photos/", *QUICK, "train.epochs=2")
    assert answer.code == 0, answer.err
    lines = answer.out.splitlines()
    assert lines[0].startswith(
        "Images: 50 files for training, 13 for validation; 2 classes of 30 to 33 files; colour, 14×20"
    )
    assert re.fullmatch(
        r"Weights: tiny\.safetensors \(found in .*\), 0\.1 M parameters with the classifier of 7 classes, 16×16 pixels",
        lines[1],
    )
    assert lines[2].startswith("Choice: fine-tuning, first the classifier (linear probe), then all weights, because")
    assert (
        "2 epochs of 12 steps (4 passes over the images), batch size 8" in lines[3]
        and "on two cores, at the speed measured now" in lines[4]
    )
    run = open_run_or_newest("runs/photos")
    assert re.search(
        r"Validation accuracy: \d+\.\d % \(95 % confidence interval \d+\.\d % to \d+\.\d %, 13 images\)\n", answer.out
    )
    assert lines[-1] == f"Next: vitascope evaluate {run.path} --split val, or vitascope predict {run.path} PHOTO"
    assert (run.recipe.train.epochs, run.recipe.train.head_init, run.recipe.name) == (2, "linear_probe", "photos")
    assert vitascope("train", str(run.get_path("chosen.yaml"))).code == 0
    again = open_run_or_newest("runs/photos")
    assert again.path != run.path and again.recipe == run.recipe
    assert again.metrics[-1]["train_loss"] == run.metrics[-1]["train_loss"]


def test_an_npz_file_and_data_by_name_are_trained_from_python_too(here) -> None:
    generator = np.random.default_rng(0)
    arrays = {"x_train": generator.integers(0, 256, (40, 8, 8), dtype=np.uint8), "y_train": np.arange(40) % 2}
    np.savez("mine.npz", **arrays)
    settings = {"weights": None, "train.epochs": 1, "train.device": "cpu", "train.precision": "float32"}
    run = library.train(here / "mine.npz", quiet=True, **settings)
    assert run.recipe.weights is None and run.recipe.model.in_chans == 1 and run.path.parent.name == "mine"
    assert run.recipe.data.validation == 0.2
    run = library.train("data:digits", quiet=True, **settings)
    assert run.path.parent.name == "digits-auto" and run.recipe.model.embed_dim == 32


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("data:nosuch",), "There is no data set and no folder named 'nosuch'"),
        (("data:",), "data: names no data set. Write data:NAME"),
        (("nothing.npz",), "There is no data set and no file named 'nothing.npz'"),
        (("nothing",), "train also accepts a folder of images, an .npz file and data:NAME"),
        (("empty",), "needs at least two class folders; it has no images and no class folder."),
        (("flat",), "needs at least two class folders; it has 1 file, but no class folder."),
        (("photoss/",), "There is no folder 'photoss/'. Did you mean photos/?"),
        (("./elsewhere/",), "There is no folder './elsewhere/'. Check the path."),
        (("wrapped",), "down: give wrapped/inner instead (vitascope train wrapped/inner, or with a recipe"),
        (("unreadable",), "none of the files can be read as an image"),
        (("notes.txt",), "notes.txt is not a recipe: a recipe's file name ends in .yaml or .yml. To train on images"),
        (("data:notes.txt",), "neither a folder of class folders nor an .npz file"),
        (("runs/digits",), "contains a run, not images. To resume it: vitascope resume runs/digits"),
        (("photos", "weights="), "weights= is empty. Use timm:NAME"),
        (("photos", "weights=nowhere"), "There are no weights 'nowhere'"),
        (("photos", "data.name=other"), "data.name is given twice"),
        (("photos", "train.epoch=3"), "There is no setting 'train.epoch'. Did you mean train.epochs?"),
        (("photos", "model.img_size=15"), "does not divide"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_mistake_is_one_line_and_exit_code_2(vitascope, here, words, sentence) -> None:
    for folder in (
        "empty",
        "flat",
        "wrapped/inner/a",
        "wrapped/inner/b",
        "unreadable/a",
        "unreadable/b",
        "runs/digits/2026-11-19_10-00-00-seed0",
    ):
        (here / folder).mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(here / "flat/a.png")
    for name in ("unreadable/a/a.jpg", "unreadable/b/b.jpg", "notes.txt"):
        (here / name).write_text("no image")
    (here / "runs/digits/2026-11-19_10-00-00-seed0/recipe.yaml").write_text("name: digits\n")
    answer = vitascope("train", *words)
    assert answer.code == 2, answer.out + answer.err
    assert sentence in answer.err and answer.err.count("\n") == 1


def test_an_offline_machine_without_weights_says_so_and_trains_from_scratch(vitascope, here) -> None:
    (here / "weights/tiny.safetensors").unlink()
    small = ("train.epochs=1", "model.embed_dim=16", "model.depth=1")
    answer = vitascope("train", "photos", *QUICK, *small)
    assert answer.code == 0, answer.err
    assert "Weights: none; none are on this machine, and the Hugging Face Hub cannot be reached" in answer.out
    assert "Choice: from scratch" in answer.out


def test_the_speed_of_a_small_model_is_measured_and_leaves_the_random_state_alone() -> None:
    import torch

    before = torch.get_rng_state()
    assert train_images.measure_training_flops_per_second("cpu", CONFIG, 1) > 0
    assert torch.equal(before, torch.get_rng_state())


def test_weights_at_hand_that_are_no_vit_are_none(here) -> None:
    (here / "weights/tiny.safetensors").write_bytes(b"no weights")
    assert find_weights.find_weights(None, None) == WeightsAtHand(
        origin="none are on this machine, and the Hugging Face Hub cannot be reached"
    )
