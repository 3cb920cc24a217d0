"""The description of a data set: duplicates within and between splits."""

from pathlib import Path

import numpy as np
from PIL import Image

from vitascope.data.sources.folder import read_image_size
from vitascope.data.statistics import count_label_conflicts, open_and_summarize_all_splits


def save_random_image(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def test_label_conflicts_are_copies_with_another_label_than_the_first() -> None:
    assert count_label_conflicts([b"a", b"b", b"a", b"a"], [0, 1, 0, 1]) == 1


def test_a_description_names_the_sizes_of_the_files_and_the_size_after_resizing(tmp_path) -> None:
    for name, size in (("cat", (64, 64)), ("dog", (500, 416))):
        (tmp_path / name).mkdir()
        Image.new("RGB", size).save(tmp_path / name / "0.png")
    rotated = Image.Exif()
    rotated[0x0112] = 6  # orientation: a quarter turn
    Image.new("RGB", (300, 100)).save(tmp_path / "dog" / "1.jpg", exif=rotated)
    summary = open_and_summarize_all_splits(str(tmp_path), None)
    assert "grayscale" not in summary.format_text()
    sizes = "64×64 to 416×500 pixels (height × width), median 300×100, 3 channels; statistics and duplicates after "
    sizes += "resizing to 64×64 (for another size, add model.img_size=…)"
    assert f"train: 3 images, {sizes}\n" in summary.format_text()
    split = summary.as_dict()["splits"]["train"]
    assert (
        split["sizes"] == [(64, 64), (416, 500)]
        and split["median_size"] == (300, 100)
        and (split["height"], split["width"]) == (64, 64)
    )
    assert read_image_size(tmp_path / "dog" / "1.jpg") == (300, 100)
    small = open_and_summarize_all_splits(str(tmp_path), None, (8, 10), 1)
    assert "; statistics and duplicates after resizing to 8×10\n" in small.format_text()
    assert (small.splits["train"].height, small.splits["train"].width, small.splits["train"].channels) == (8, 10, 1)
    assert "classes with fewer than 5 images: cat (1), dog (2)\n" in small.format_text()


def test_a_description_counts_copies_in_train_and_val_and_under_different_labels(tmp_path) -> None:
    for seed in range(4):
        save_random_image(tmp_path / "train" / "cat" / f"{seed}.png", seed)
    save_random_image(tmp_path / "train" / "dog" / "0.png", 0)  # the first cat again
    for split in ("val", "test"):
        save_random_image(tmp_path / split / "cat" / "10.png", 10)
        save_random_image(tmp_path / split / "dog" / "11.png", 11)
    summary = open_and_summarize_all_splits(str(tmp_path), None)
    assert (summary.splits["test"].also_in_train, summary.splits["test"].also_in_val) == (0, 2)
    text = summary.format_text()
    assert "exact duplicates: 1 (with different labels: 1)" in text
    assert "also in the training split: 0; also in the validation split: 2" in text
    assert "(imbalanced: try data.balance=loss or sampling)" in text
    assert "images per class: 1 to 4 (imbalanced" in text and "images per class: 1\n" in text
