"""`vitascope train`, `resume`, `evaluate`, `lr-find`, `data`, as a user types them."""

import json
import os
import re
import signal
from dataclasses import fields, replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from tests.training.tiny import TINY, untimed
from vitascope.data.config import resolve_augmentation
from vitascope.recipe.reading import list_recipe_names, read_recipe
from vitascope.run.directory import open_run_or_newest
from vitascope.training.messages import describe_default_augmentation
from vitascope.training.objectives.classify import Classify

WORDS = [f"{key}={value}" for key, value in TINY.items()]
STEPS_PER_EPOCH = 808 // 64  # digits' training images, less the validation images, in batches


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_training_evaluating_and_resuming(vitascope, here) -> None:
    answer = vitascope("train", "digits", *WORDS)
    assert answer.code == 0, answer.err
    assert "epoch 3/3" in answer.out and "curves.png" in answer.out
    assert "To measure the test accuracy, once, at the end: vitascope evaluate runs/digits/" in answer.out
    assert re.search(r"For more metrics, run: vitascope evaluate runs/digits/\S+ --split val\n", answer.out)
    assert re.search(r"validation accuracy \d+\.\d\d % \(90 images, last epoch\)", answer.out)
    assert "Training values include augmentation, mixup and label smoothing" in answer.out
    scored = vitascope("evaluate", "runs/digits")
    assert re.search(r"test accuracy \d+\.\d\d % on 899 images", scored.out)
    report = json.loads(vitascope("evaluate", "runs/digits", "--split", "val", "--json").out)
    assert report["images"] == 90 and 0 <= report["accuracy"] <= 1
    assert "Evaluation 2 of this run on these test images." in vitascope("evaluate", "runs/digits").out
    assert "is already finished" in vitascope("resume", "runs/digits").out


@pytest.fixture
def signals():
    """Ctrl-C as in a terminal (tests may run where it is ignored); afterwards all handlers are as before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_ctrl_c_saves_and_prints_how_to_resume(vitascope, here, monkeypatch, signals) -> None:
    """The signal comes in the middle of the third epoch."""
    prepare, steps = Classify.augment_batch, []

    def prepare_and_interrupt(*args):
        steps.append(args)
        if len(steps) == 2 * STEPS_PER_EPOCH + 3:
            signal.raise_signal(signal.SIGINT)
        return prepare(*args)

    monkeypatch.setattr(Classify, "augment_batch", prepare_and_interrupt)
    answer = vitascope("train", "digits", *WORDS, "train.epochs=4000")
    assert answer.code == 130 and "Interrupted. To resume: vitascope resume runs/digits/" in answer.out
    run = open_run_or_newest("runs/digits")
    done = len(run.metrics)
    assert done == 2 and untimed(run) and not run.is_finished and run.get_path("curves.png").is_file()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("train", "digit"), "Did you mean digits?"),
        (("train", "digits", "train.epoch=3"), "There is no setting 'train.epoch'. Did you mean train.epochs?"),
        (("train", "digits", "train.lr=fast"), "train.lr: fast is not a number."),
        (("train", "digits", "train.epochs=0"), "train.epochs=0 must be at least 1"),
        (("train", "digits", "train.optimizer=adam"), "train.optimizer='adam' is unknown. Did you mean adamw?"),
        (("train", "digits", "train.grad_accum_steps=3"), "train.grad_accum_steps=3 does not divide train.batch_size"),
        (("train", "digits", "data.augment.flip=0.5"), "a mirrored digit is a different symbol"),
        (("train", "digits", "train.patience=3", "data.validation=0"), "data.validation=0 holds out none"),
        (("train", "digits", "train.device=mps"), "The device mps is not available"),
        (("train", "digits", "data.fraction=0"), "data.fraction=0"),
        (("train", "digits", "train.seed=99999999999999"), "train.seed=99999999999999 must be at most"),
        (("train", "digits", "data.augment.mixup=.inf"), "data.augment.mixup=inf must be"),
        (("train", "digits", "model.in_chans=4"), "Only 1 channel and 3 channels can be converted"),
        (("train", "digits", "name=../out"), "is not a valid folder name"),
        (("train", "mnist", "data.root=nowhere", "data.download=false"), "There is no mnist in nowhere"),
        (("train", "digits", "data.name=nothing"), "There is no data set and no folder named 'nothing' in "),
        (("resume", "nothing"), "There is no run nothing"),
        (("evaluate", "nothing"), "There is no run nothing"),
        (("data", "describe", "cifar"), "Did you mean cifar10?"),
        (("data", "preview", "digits", "data.augment.flip=1"), "a mirrored digit is a different symbol"),
        (("data", "preview", "digits", "train.lr=3"), "train.lr has no effect on the augmentation"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_mistake_is_one_line_and_exit_code_2(vitascope, here, words, sentence) -> None:
    answer = vitascope(*words)
    assert answer.code == 2, answer.out + answer.err
    assert sentence in answer.err and answer.err.count("\n") == 1


def test_the_precision_of_the_validation_accuracy_is_named_where_it_is_not_float32(vitascope, here) -> None:
    assert "validated in" not in vitascope("train", "digits", *WORDS, "train.precision=float32").out
    answer = vitascope("train", "digits", *WORDS, "train.precision=bfloat16")
    assert re.search(
        r"validation accuracy \d+\.\d\d % \(90 images, last epoch, trained and validated in bfloat16\)", answer.out
    )
    metrics = next(path for path in here.glob("runs/digits/*/metrics.jsonl") if "bfloat16" in _read_machine(path))
    *rows, last = metrics.read_text().splitlines()
    metrics.write_text("\n".join([*rows, json.dumps(json.loads(last) | {"val_accuracy": 0.123})]) + "\n")
    note = "Computed in float32; during training, in bfloat16, it was 12.30 %."
    assert note in vitascope("evaluate", str(metrics.parent), "--split", "val", "--quick").out
    assert note not in vitascope("evaluate", str(metrics.parent), "--split", "train", "--quick").out


def _read_machine(path: Path) -> str:
    return (path.parent / "machine.json").read_text()


def test_without_a_recipe_each_recipe_is_described(vitascope, here) -> None:
    answer = vitascope("train")
    assert answer.code == 2 and answer.err.startswith("vitascope: Give a recipe or images first")
    lines = answer.err.splitlines()[1:]
    assert len(lines) == len(list_recipe_names()) and all(line.endswith(".") for line in lines)
    assert "  mnist              MNIST with a small pure ViT, 49 tokens." in lines


def test_resizing_images_of_a_folder_is_reported(vitascope, here) -> None:
    for name in ("red", "blue"):
        for number in range(4):
            (here / "photos" / name).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (48, 64), name).save(here / "photos" / name / f"{number}.png")
    answer = vitascope("train", "digits", *WORDS, "data.name=photos", "data.validation=0")
    assert answer.code == 0, answer.err
    assert "Images are resized from 64×48 (size of the first image) to 8×8 (model.img_size=8)" in answer.out
    assert "and converted from colour to grayscale (model.in_chans=1)" in answer.out
    note = "augmentation is for digits and is not used. photos gets its defaults: shift up to 1 pixel.\n"
    assert note in answer.out
    answer = vitascope("train", "digits", *WORDS, "data.name=photos", "data.validation=0", "data.augment.flip=1")
    note = (
        "Augmentation from your settings: flip with probability 1. The recipe is for digits, so the other settings "
        "are the defaults of photos: shift up to 1 pixel.\n"
    )
    assert note in answer.out and "ugmentation" not in vitascope("train", "digits", *WORDS).out.split("Training")[0]
    answer = vitascope("train", "digits", *WORDS, "data.name=photos", "data.validation=0", "model.in_chans=2")
    assert answer.code == 2 and "model.in_chans=2 is not possible for image files. Choose 1 (gray" in answer.err
    preview = vitascope("data", "preview", "photos", "model.in_chans=1")
    assert preview.code == 0, preview.err


def test_values_from_the_recipe_are_not_called_defaults_of_the_data() -> None:
    recipe = read_recipe("cifar10", ["data.name=mnist", "data.augment.shift=3"])
    completed = resolve_augmentation(recipe.data.augment, "mnist", 1)
    note = describe_default_augmentation(recipe, completed)
    given, defaults = (note or "").split(". The recipe is for cifar10, so ")
    assert given.startswith("Augmentation from the recipe and your settings: shift up to 3 pixels, ")
    assert "RandAugment" in given and "RandAugment" not in defaults and "shift" not in defaults
    assert defaults.startswith("the other settings are the defaults of mnist: rotation up to 10")


def test_a_folder_that_cannot_be_written_is_an_error(vitascope, here) -> None:
    (here / "runs").write_text("a file, not a folder")
    answer = vitascope("train", "digits", *WORDS)
    assert answer.code == 2 and "could not be created" in answer.err


def test_a_full_disk_is_reported_and_earlier_files_are_kept(vitascope, here, monkeypatch) -> None:
    import vitascope.run.files as files

    real, count = os.fsync, []

    def full(descriptor: int) -> None:
        count.append(descriptor)
        if len(count) > 5:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(files.os, "fsync", full)
    answer = vitascope("train", "digits", *WORDS)
    assert answer.code == 2 and "No space left on device" in answer.err
    monkeypatch.undo()
    os.chdir(here)
    assert vitascope("resume", "runs/digits").code == 0
    assert len(open_run_or_newest("runs/digits").metrics) == 3


def test_finding_a_rate_draws_and_suggests(vitascope, here) -> None:
    easy = [f"data.augment.{name}=0" for name in ("mixup", "shift", "rotate", "scale")]
    answer = vitascope("lr-find", "digits", *WORDS, *easy, "train.optimizer=adamw", "model.embed_dim=32")
    assert answer.code == 0, answer.err
    rate = float(re.search(r"train.lr=([\d.e+-]+)", answer.out).group(1))
    assert 3e-4 < rate < 0.1
    assert "muon" not in answer.out
    muon = vitascope("lr-find", "digits", *WORDS, *easy, "train.optimizer=muon", "train.lr=0.9", "train.muon_lr=2.7")
    assert "The suggested train.muon_lr is scaled by the same factor (" in muon.out
    with Image.open("lr-find.png") as picture:
        assert picture.width > 600


def test_no_rate_is_suggested_if_the_loss_does_not_fall() -> None:
    from vitascope.training.rate_finder import NUM_STEPS, LearningRateCurve

    flat = LearningRateCurve([1e-5, 1e-4, 1e-3, 1e-2], [2.30, 2.29, 2.30, 2.9])
    assert flat.suggested_lr is None and flat.divergence_lr == 1e-2
    steady = LearningRateCurve([1e-3] * NUM_STEPS, [2.0] * NUM_STEPS)
    assert steady.divergence_lr is None and "above its minimum" not in steady._make_caption()
    torn = LearningRateCurve([1e-3, 1e-2], [2.0, 1.0])  # the next loss was NaN
    assert torn.divergence_lr == 1e-2 and "Right of the dotted line" in torn._make_caption()
    assert LearningRateCurve([1e-5, 1e-4, 1e-3, 1e-2], [2.30, 2.0, 1.5, 1.7]).suggested_lr == pytest.approx(1e-3 / 3)


def test_a_loss_that_rounds_to_zero_is_printed_without_a_minus() -> None:
    from vitascope.training.messages import format_epoch_line

    line = format_epoch_line({"epoch": 1, "train_loss": -1e-9, "images_per_second": 1.0}, 1)
    assert "train loss 0.000 " in line


def test_the_preview_says_how_images_are_mixed() -> None:
    from vitascope.cli.data import describe_augmentation
    from vitascope.data.config import NO_AUGMENTATION, POLICIES, SETTING_TEXTS, AugmentConfig

    digits = describe_augmentation(None, [], POLICIES["digits"])
    assert digits.startswith("with the default augmentation of this data (shift up to 1 pixel, rotation up to 6°")
    assert "With mixup, a version is a weighted average" in digits and "CutMix" not in digits
    colour = describe_augmentation(None, [], POLICIES["cifar10"], "colour")
    assert colour.startswith("with the default augmentation for colour images (")
    photos = describe_augmentation(None, ["data.augment.flip=0"], POLICIES["cifar10"])
    assert "changed by data.augment.flip=0" in photos and "With CutMix, a rectangle" in photos
    assert (
        "shift up to 4 pixels" in photos and "crop of 20 % to 100 %" in AugmentConfig(crop_scale=(0.2, 1)).description
    )
    assert "CutMix on 50 % of the images (Beta parameter 1))." in photos
    both = replace(POLICIES["cifar10"], mixup=0.8)
    assert "mixup or CutMix, each on 25 % of the images (Beta parameters 0.8 and 1)" in both.description
    assert AugmentConfig(mixup=0.8).description == "mixup (Beta parameter 0.8)"  # the probability is the data set's
    assert AugmentConfig(cutmix=1, mix_prob=0).description == AugmentConfig(mix_prob=0.5).description == ""
    named = {item.name for item in fields(AugmentConfig)} - {"flip_mode", "shift_fill"}  # the others are numbers
    named -= {"mixup", "cutmix", "mix_prob"}
    assert named == SETTING_TEXTS.keys()
    assert "mixup" not in photos and photos.endswith("The labels are mixed in the same proportion.")
    assert describe_augmentation("digits-dino", [], NO_AUGMENTATION) == "as in recipe digits-dino (no augmentation)."


def test_data_is_listed_described_and_previewed(vitascope, here) -> None:
    listed = vitascope("data", "list", "--root", str(here))
    assert "digits         built in" in listed.out and "cifar10        not found" in listed.out
    report = json.loads(vitascope("data", "describe", "digits", "--json").out)
    assert report["splits"]["train"]["images"] == 898 and report["splits"]["test"]["also_in_train"] == 0
    assert "898 images, 8×8 pixels, 1 channel\n" in vitascope("data", "describe", "digits").out
    assert vitascope("data", "preview", "digits").code == 0
    with Image.open("preview.png") as picture:
        assert picture.width > 1000


def test_a_preview_does_not_overwrite_an_earlier_figure(vitascope, here) -> None:
    (here / "preview.png").write_bytes(b"mine")
    assert vitascope("data", "preview", "digits").out == "Figure: preview-2.png\n"
    assert vitascope("data", "preview", "digits").out == "Figure: preview-3.png\n"
    assert (here / "preview.png").read_bytes() == b"mine"
    assert vitascope("data", "preview", "digits", "--out", "preview.png").out == "Figure: preview.png\n"
    assert (here / "preview.png").read_bytes() != b"mine"


def save_photos(folder: Path, count: int = 4) -> None:
    for name in ("red", "blue"):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (48, 64 + 8 * number), name).save(folder / name / f"{number}.png")


def test_describing_and_previewing_a_folder_use_the_image_size_of_the_model(vitascope, here, monkeypatch) -> None:
    save_photos(here / "photos")
    answer = vitascope("data", "describe", "photos", "model.img_size=50", "model.in_chans=1")
    assert "64×48 to 88×48 pixels (height × width), median 80×48, 1 channel" in answer.out
    assert "after resizing to 50×50\n" in answer.out and "fewer than 5 images: blue (4), red (4)" in answer.out
    refused = vitascope("data", "describe", "photos", "model.depth=3")
    assert refused.code == 2 and "model.depth has no effect on the description" in refused.err
    assert vitascope("data", "describe", "digits", "model.img_size=32").code == 2  # arrays are not resized
    captions = []
    monkeypatch.setattr("vitascope.draw.images.draw_gallery", lambda *args: captions.append(args[3]) or Figure())
    for size in ([], ["model.img_size=50"]):
        assert vitascope("data", "preview", "photos", *size).code == 0
    assert "the image (of 64×48 to 88×48 pixels (height × width), median 80×48) resized to 64×64 (for" in captions[0]
    assert "crop of 35 % to 100 %" in captions[0] and "shift" not in captions[0]
    assert "resized to 50×50, then 8" in captions[1] and "for 50×50 colour images (flip" in captions[1]
    assert "shift up to 6 pixels" in captions[1] and "crop of" not in captions[1]
    assert vitascope("data", "preview", "digits", "model.img_size=16").code == 0
    assert captions[2].startswith("digits: the image resized to 16×16, then 8 augmented versions")


def test_training_names_classes_with_few_images(vitascope, here) -> None:
    save_photos(here / "photos")
    answer = vitascope("train", "digits", *WORDS, "data.name=photos")
    assert "Warning: classes with fewer than 5 images: blue (4), red (4).\n" in answer.out
    save_photos(here / "more", count=5)
    assert "fewer than" not in vitascope("train", "digits", *WORDS, "data.name=more").out


def test_the_class_folders_one_level_down_are_suggested(vitascope, here) -> None:
    save_photos(here / "photos" / "photos")
    answer = vitascope("train", "digits", *WORDS, "data.name=photos")
    assert answer.code == 2 and "it has photos. The class folders (blue, red) are 1 level down: give " in answer.err
    assert f"or with a recipe data.name={Path('photos/photos')})" in answer.err
    assert vitascope("data", "describe", "photos/photos").code == 0
    save_photos(here / "zip" / "a b" / "c" / "train")
    assert "(blue, red) are 2 levels down: give 'zip/a b/c' instead (" in vitascope("data", "describe", "zip").err
    (here / "one" / "cat" / "deep").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(here / "one" / "cat" / "0.png")
    assert "down" not in vitascope("data", "describe", "one").err
