"""Data sources: every layout, unusual images, missing files."""

import gzip
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitascope import UserError
from vitascope.data.config import DataConfig
from vitascope.data.dataset import compute_pixel_mean_and_std
from vitascope.data.open_data import open_data_by_name_or_path
from vitascope.data.sources.folder import image_file_has_colour, read_image_or_error_reason
from vitascope.data.sources.named import PUBLISHED_DATASETS, open_or_download_published_dataset
from vitascope.data.statistics import (
    count_also_in_reference,
    count_duplicates,
    hash_each_image,
)

SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the real data sets are not on this machine")


def open_source(name: str, root: Path | None = None, size=(8, 8), channels: int = 3, **settings):
    return open_data_by_name_or_path(
        DataConfig(name=str(name), root=root and str(root), download=False, **settings), size, channels
    )


def test_digits_are_embedded_in_two_fixed_stratified_halves() -> None:
    digits = open_source("digits")
    train, test = digits.load_split("train"), digits.load_split("test")
    assert (len(train), len(test)) == (898, 899)
    assert train.images.shape[1:] == (1, 8, 8) and train.images.max() == 255
    assert (torch.bincount(train.labels) - torch.bincount(test.labels)).abs().max() <= 1
    assert torch.equal(train.images, open_source("digits").load_split("train").images)


def test_the_shipped_digits_are_scikit_learn_s() -> None:
    """Pixels, labels and the split are those of scikit-learn."""
    datasets = pytest.importorskip("sklearn.datasets")
    from sklearn.model_selection import train_test_split

    pixels, labels = datasets.load_digits(return_X_y=True)
    halves = train_test_split(np.arange(len(labels)), test_size=0.5, random_state=0, stratify=labels)
    for split, index in zip(("train", "test"), halves, strict=True):
        data = open_source("digits").load_split(split)
        expected = (torch.as_tensor(pixels[index]).reshape(-1, 1, 8, 8) * (255 / 16)).round().to(torch.uint8)
        assert torch.equal(data.images, expected) and data.labels.tolist() == labels[index].tolist()


def write_idx(path: Path, values: np.ndarray) -> None:
    raw = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}i", *values.shape) + values.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw"])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_files_are_read_in_both_layouts_zipped_or_not(tmp_path, folder, ending) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 6), dtype=np.uint8)
    for part in ("train", "t10k"):
        write_idx(tmp_path / folder / f"{part}-images-idx3-ubyte{ending}", images)
        write_idx(tmp_path / folder / f"{part}-labels-idx1-ubyte{ending}", np.arange(5, dtype=np.uint8))
    split = open_source("mnist", tmp_path).load_split("test")
    assert torch.equal(split.images[:, 0], torch.from_numpy(images))
    assert split.labels.tolist() == [0, 1, 2, 3, 4]


def test_an_incomplete_idx_file_is_an_error(tmp_path) -> None:
    for part in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            write_idx(tmp_path / "mnist" / f"{part}-{kind}-ubyte.gz", np.zeros((3, 2, 2), np.uint8))
    torn = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    torn.write_bytes(torn.read_bytes()[:-9])
    with pytest.raises(UserError, match="is not a complete idx file"):
        open_source("mnist", tmp_path).load_split("train")


def test_cifar_is_read_in_torchvisions_layout(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3072), dtype=np.uint8)
    for name in (*[f"data_batch_{number}" for number in range(1, 6)], "test_batch"):
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": [3, 7]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": PUBLISHED_DATASETS["cifar10"].class_names}))
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    split = open_source("cifar10", tmp_path).load_split("train")
    assert split.images.shape == (10, 3, 32, 32) and split.labels.tolist() == [3, 7] * 5
    assert torch.equal(split.images[0].flatten(), torch.from_numpy(pixels[0]))


def test_an_npz_file_is_read_by_path_and_by_name(tmp_path) -> None:
    x, y = np.zeros((4, 5, 6, 3), np.uint8), np.array([[0], [1], [2], [1]], np.uint8)
    np.savez(tmp_path / "cifar10.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2])
    by_path, by_name = open_source(tmp_path / "cifar10.npz"), open_source("cifar10", tmp_path)
    assert (by_path.classes, by_name.classes) == (["0", "1", "2"], PUBLISHED_DATASETS["cifar10"].class_names)
    assert by_path.load_split("test").images.shape == by_name.load_split("test").images.shape == (2, 3, 5, 6)
    np.savez(tmp_path / "grey.npz", x_train=x[..., 0], y_train=y)
    grey = open_source(tmp_path / "grey.npz")
    assert grey.load_split("train").images.shape == (4, 1, 5, 6) and grey.split_names == ("train",)


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"x": np.zeros(3)}, "has no x_train and no y_train; it contains x"),
        ({"x_train": np.zeros((2, 4, 4)), "y_train": np.arange(2)}, "images must be uint8"),
        ({"x_train": np.zeros((2, 4), np.uint8), "y_train": np.arange(2)}, "it must be image × height × width"),
        ({"x_train": np.zeros((2, 4, 4), np.uint8), "y_train": np.arange(3)}, "2 images and 3 labels"),
        ({"x_train": np.zeros((2, 4, 4), np.uint8), "y_train": np.array([1, -1])}, "integers from 0 to 1"),
        ({"x_train": np.zeros((2, 4, 4), np.uint8), "y_train": np.array(["a", "b"])}, "must contain integers, one"),
        ({"x_train": np.zeros((2, 4, 4), np.uint8), "y_train": np.zeros(2, int)}, "has only one class"),
    ],
)
def test_an_npz_file_with_wrong_arrays_is_an_error(tmp_path, arrays, sentence) -> None:
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(UserError, match=sentence):
        open_source(tmp_path / "data.npz").load_split("train")


def test_a_test_label_that_no_training_image_has_is_named(tmp_path) -> None:
    x = np.zeros((3, 4, 4), np.uint8)
    np.savez(tmp_path / "lab.npz", x_train=x, y_train=np.array([0, 2, 1]), x_test=x, y_test=np.array([0, 6, 1]))
    with pytest.raises(UserError, match="from 0 to 2, the largest label in y_train; it contains 6"):
        open_source(tmp_path / "lab.npz").load_split("test")


def test_a_file_that_is_no_npz_is_an_error(tmp_path) -> None:
    (tmp_path / "data.npz").write_text("hello")
    with pytest.raises(UserError, match=r"is not a complete \.npz file"):
        open_source(tmp_path / "data.npz")


def save_image(path: Path, mode: str = "RGB", size=(12, 8), **settings) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size).save(path, **settings)


def test_a_folder_of_class_folders_with_unusual_images(tmp_path) -> None:
    for name, mode in (
        ("a.png", "RGB"),
        ("b.png", "L"),
        ("c.png", "RGBA"),
        ("d.png", "P"),
        ("e.png", "I;16"),
        ("f.jpg", "RGB"),
    ):
        save_image(tmp_path / "cat" / name, mode)
        save_image(tmp_path / "dog" / "deep" / name, mode)
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    data = open_source(tmp_path)
    split = data.load_split("train")
    assert data.classes == ["cat", "dog"] and data.skipped_paths == []
    assert split.images.shape == (12, 3, 8, 8) and torch.bincount(split.labels).tolist() == [6, 6]
    assert open_source(tmp_path, channels=1).load_split("train").images.shape == (12, 1, 8, 8)


def test_gray_images_in_colour_files_are_recognised(tmp_path) -> None:
    shades = np.tile(np.arange(64, dtype=np.uint8)[:, None] * 3, (1, 64))
    tinted = np.stack([shades, shades + 8, shades], axis=2)  # as paper in a scanner
    Image.fromarray(tinted).save(tmp_path / "grey.jpg")
    Image.fromarray(np.stack([shades, shades.T, shades], axis=2)).save(tmp_path / "colours.jpg")
    assert not image_file_has_colour(tmp_path / "grey.jpg") and image_file_has_colour(tmp_path / "colours.jpg")


def test_unreadable_images_are_reported_and_skipped_or_an_error_when_strict(tmp_path) -> None:
    for name in ("cat", "dog"):
        save_image(tmp_path / name / "good.png")
    png_bytes = (tmp_path / "cat" / "good.png").read_bytes()
    (tmp_path / "cat" / "torn.png").write_bytes(png_bytes[: len(png_bytes) // 2])
    (tmp_path / "dog" / "empty.jpg").write_bytes(b"")
    data = open_source(tmp_path)
    assert len(data.load_split("train")) == 2
    assert sorted(Path(name).name for name in data.skipped_paths) == ["empty.jpg", "torn.png"]
    with pytest.raises(UserError, match=r"torn.png cannot be read .*In all, 2 images cannot be read"):
        open_source(tmp_path, strict=True).load_split("train")


def test_an_image_is_rotated_by_exif_and_keeps_its_range(tmp_path) -> None:
    wide = Image.new("L", (8, 4))
    wide.paste(255, (0, 0, 4, 4))  # left half white
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90° clockwise: the left becomes the top
    wide.save(tmp_path / "turned.png", exif=exif)
    upright = read_image_or_error_reason(tmp_path / "turned.png", (8, 4), 1)
    assert upright[0, :4].min() == 255 and upright[0, 4:].max() == 0
    deep = np.full((4, 4), 32768, np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert read_image_or_error_reason(tmp_path / "deep.png", (4, 4), 1).unique().tolist() == [128]
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert read_image_or_error_reason(tmp_path / "clear.png", (4, 4), 3).unique().tolist() == [255]


def test_train_val_and_test_folders_are_the_splits(tmp_path) -> None:
    for split, count in (("train", 3), ("val", 2), ("test", 1)):
        for name in ("cat", "dog"):
            for number in range(count):
                save_image(tmp_path / split / name / f"{number}.png")
    data = open_source(tmp_path)
    assert data.split_names == ("train", "val", "test")
    assert [len(data.load_split(split)) for split in data.split_names] == [6, 4, 2]


def test_a_class_may_be_called_train(tmp_path) -> None:
    for name in ("bus", "train"):
        save_image(tmp_path / name / "a.png")
    assert open_source(tmp_path).classes == ["bus", "train"]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda root: save_image(root / "cat" / "a.png"), "needs at least two class folders; it has cat"),
        (
            lambda root: root.mkdir(exist_ok=True),
            r"it has no images and no class folder\. If a table lists the class of each file, set data\.labels=TABLE\.",
        ),
        (lambda root: (save_image(root / "cat" / "a.png"), (root / "dog").mkdir()), "has no readable image for dog"),
        (
            lambda root: [
                save_image(root / part / "a.png") for part in ("train/cat", "train/dog", "test/cat", "test/cow")
            ],
            "must have the same classes as train. Found in only one of them: cow, dog",
        ),
    ],
    ids=["one class", "empty", "empty class", "other classes"],
)
def test_a_folder_without_training_classes_is_an_error(tmp_path, make, sentence) -> None:
    make(tmp_path / "data")
    with pytest.raises(UserError, match=sentence):
        open_source(tmp_path / "data").load_split("train")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "cifar",
            "Did you mean cifar10? To use your own data, give the path of its folder (in training: data.name=FOLDER).",
        ),
        ("mnist", ": mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz"),
        ("cifar10", "cifar-10-batches-py/"),
        (__file__, "neither a folder of class folders nor an .npz file"),
    ],
)
def test_missing_data_is_an_error_that_names_the_files_to_add(tmp_path, name, sentence) -> None:
    with pytest.raises(UserError) as caught:
        open_source(name, tmp_path)
    assert sentence in str(caught.value)


def test_a_failed_download_names_the_files_and_the_folder(tmp_path, monkeypatch, capsys) -> None:
    def no_network(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr("torchvision.datasets.mnist.MNIST.download", no_network)
    with pytest.raises(UserError, match="no route to host") as caught:
        open_or_download_published_dataset("mnist", tmp_path / "new", download=True)
    assert str(caught.value).startswith("mnist could not be downloaded (no route to host). Put into ")
    assert str(tmp_path / "new") in str(caught.value) and "four files" in str(caught.value)


def test_the_reason_of_a_failed_download_is_the_last_line(tmp_path, monkeypatch) -> None:
    def no_mirror(*args, **kwargs):
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz:\nTried https://a, got:\n<no route to host>\n")

    monkeypatch.setattr("torchvision.datasets.mnist.MNIST.download", no_mirror)
    with pytest.raises(UserError, match=r"^mnist could not be downloaded \(no route to host\)\. "):
        open_or_download_published_dataset("mnist", tmp_path, download=True)


def test_the_reason_of_a_failed_download_has_no_dangling_colon(tmp_path, monkeypatch) -> None:
    def no_mirror(*args, **kwargs):
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz:\n")

    monkeypatch.setattr("torchvision.datasets.mnist.MNIST.download", no_mirror)
    with pytest.raises(UserError, match=r"\(Error downloading train-images-idx3-ubyte.gz\)\. "):
        open_or_download_published_dataset("mnist", tmp_path, download=True)


def test_statistics_by_hand() -> None:
    images = torch.tensor([0, 255, 255, 255], dtype=torch.uint8).view(2, 1, 1, 2)
    mean, std = compute_pixel_mean_and_std(images)
    assert mean.item() == pytest.approx(0.75) and std.item() == pytest.approx(0.75**0.5 * 0.5)
    fingerprints = hash_each_image(torch.stack([images[0], images[1], images[0]]))
    assert count_duplicates(fingerprints) == 1 and count_also_in_reference(fingerprints[:1], fingerprints) == 2


@needs_shared
@pytest.mark.parametrize(("name", "mean", "std"), [("mnist", 0.1307, 0.3081), ("fashion-mnist", 0.2860, 0.3530)])
def test_the_real_gray_sets_are_read_completely(name, mean, std) -> None:
    train, test = (open_source(name, SHARED).load_split(split) for split in ("train", "test"))
    assert (len(train), len(test)) == (60000, 10000)
    data = compute_pixel_mean_and_std(train.images)
    assert [value.item() for value in data] == pytest.approx([mean, std], abs=1e-4)


@needs_shared
def test_the_real_cifar10_is_read_completely(tmp_path) -> None:
    subprocess.run([sys.executable, SHARED / "unpack.py", tmp_path / "cifar10.npz"], check=True)
    train = open_source("cifar10", tmp_path).load_split("train")
    mean, std = compute_pixel_mean_and_std(train.images)
    assert mean.tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)
    assert std.tolist() == pytest.approx([0.2470, 0.2435, 0.2616], abs=1e-4)
    assert torch.bincount(train.labels).tolist() == [5000] * 10


@needs_shared
def test_real_photos_are_read_from_their_folders() -> None:
    photos = open_source(SHARED / "photos" / "tiny10", size=(32, 32))
    assert photos.split_names == ("train", "val") and len(photos.classes) == 10
    assert photos.load_split("val").images.shape == (500, 3, 32, 32) and photos.skipped_paths == []
