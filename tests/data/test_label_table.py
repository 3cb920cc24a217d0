"""Labels from a table: every form of it, what is refused and named, and the same data as from class folders."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitascope
from tests.training.killing import interrupt_after_one_epoch
from tests.training.test_runs import same_weights
from tests.training.tiny import TINY, untimed
from vitascope import UserError
from vitascope.data.config import DataConfig
from vitascope.data.dataset import DataSource
from vitascope.data.open_data import load_train_and_validation_data, open_data_by_name_or_path
from vitascope.data.sources.label_table import read_label_rows
from vitascope.run.directory import Run

SHARED = Path(__file__).parents[3] / "shared" / "data" / "photos" / "imagenet"
ROWS = [("a.png", "cat"), ("deep/b.png", "dog"), ("c.png", "cat"), ("deep/d.png", "dog")]


def save_images(folder: Path, names: list[str]) -> None:
    for index, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 12 * index + 10, np.uint8)).save(path)


@pytest.fixture
def photos(tmp_path) -> Path:
    save_images(tmp_path / "photos", [file for file, _ in ROWS])
    return tmp_path / "photos"


def open_table(folder: Path, labels: object = "labels.csv", **settings) -> DataSource:
    return open_data_by_name_or_path(DataConfig(name=str(folder), labels=str(labels), **settings), (8, 8), 3)


def write_rows(path: Path, rows: list[tuple[str, ...]]) -> Path:
    path.write_text("".join(",".join(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "text",
    [
        b"a.png,cat\nb.png,dog\n",
        b"file,class\na.png,cat\nb.png,dog",
        b"class;file\r\ncat;a.png\r\n\r\ndog;b.png\r\n",
        b"\xef\xbb\xbfLabel\tFile name\ncat\ta.png\ndog\tb.png\n",
        b'"image","class","note"\n"a.png","cat","striped, old"\n"b.png","dog",""\n',
        b"picture;kind\na.png; cat\nb.png; dog\n",
        b"a.png,cat,train\nb.png,dog,\n",
        b"id,label_id,label_name\na.png,7,cat\nb.png,3,dog\n",
    ],
    ids=["plain", "header", "semicolon", "tab and BOM", "quoted", "unknown words", "split", "index and name"],
)
def test_a_table_is_read_in_every_form(tmp_path, text) -> None:
    (tmp_path / "labels.csv").write_bytes(text)
    rows = read_label_rows(tmp_path / "labels.csv")
    assert [(row.file, row.class_name, row.split) for row in rows] == [
        ("a.png", "cat", "train"),
        ("b.png", "dog", "train"),
    ]


def test_names_may_contain_the_delimiter_and_letters_of_any_language(tmp_path) -> None:
    (tmp_path / "labels.csv").write_text('"a, b.png","käfer; groß"\n"c.png","ant"\n', encoding="utf-8")
    rows = read_label_rows(tmp_path / "labels.csv")
    assert (rows[0].file, rows[0].class_name, rows[0].line) == ("a, b.png", "käfer; groß", 1)


@pytest.mark.parametrize("memory", [None, 0])
def test_a_table_that_repeats_the_class_folders_gives_the_same_data(tmp_path, memory) -> None:
    names = [f"{name}/{index}.png" for name in ("cat", "dog", "eel") for index in (10, 2, 1)]
    save_images(tmp_path / "photos", names)
    rows = [(name, name.split("/")[0]) for name in reversed(names)]
    write_rows(tmp_path / "photos" / "labels.csv", rows)
    folder = open_data_by_name_or_path(DataConfig(name=str(tmp_path / "photos")), (8, 8), 3)
    table = open_table(tmp_path / "photos", memory=memory)
    assert table.classes == folder.classes and table.split_names == ("train",) and table.notes == []
    first, second = folder.load_split("train"), table.load_split("train")
    assert second.is_in_memory == (memory is None)
    assert torch.equal(first.images, second.images) and torch.equal(first.labels, second.labels)
    assert first.fingerprint() == second.fingerprint()


@pytest.mark.parametrize("place", ["photos/labels.csv", "labels.csv", "tables/labels.csv"])
def test_paths_are_relative_to_the_table_or_to_the_folder(photos, tmp_path, place, monkeypatch) -> None:
    table = tmp_path / place
    table.parent.mkdir(exist_ok=True)
    for rows in (
        ROWS,
        [(f"./{file}", name) for file, name in ROWS],
        [(file.replace("/", "\\"), name) for file, name in ROWS],
        [(str(photos / file), name) for file, name in ROWS],
        [(Path("../" * place.count("/") + "photos", file).as_posix(), name) for file, name in ROWS],
    ):
        write_rows(table, rows)
        assert open_table(photos, table).load_split("train").labels.tolist() == [0, 0, 1, 1]
    monkeypatch.chdir(tmp_path)
    assert len(open_table(Path("photos"), place).load_split("train")) == 4


def test_class_indices_are_sorted_by_value(photos) -> None:
    write_rows(photos / "labels.csv", [(file, {"cat": "10", "dog": "9"}[name]) for file, name in ROWS])
    source = open_table(photos)
    assert source.classes == ["9", "10"] and source.load_split("train").labels.tolist() == [0, 0, 1, 1]


def test_missing_files_and_images_without_a_row_are_counted_and_named(photos) -> None:
    write_rows(photos / "labels.csv", [*ROWS[:3], ("gone.png", "dog"), ("away.png", "dog"), ("../x.png", "cat")])
    source = open_table(photos)
    assert source.notes == [
        f"3 files in labels.csv are not in {photos}: gone.png (line 4), away.png (line 5), ../x.png (line 6).",
        f"1 image of {photos} has no row in labels.csv and will not be used: deep/d.png.",
    ]
    assert len(source.load_split("train")) == 3
    with pytest.raises(UserError, match=r"3 files in labels.csv .*To skip them, set data\.strict=false"):
        open_table(photos, strict=True)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty. Each row must contain a file and its class"),
        ("file,class\n", "has only a header"),
        ("a.png\n", "Line 1 of .*has no second column"),
        ("a.png,cat\nc.png\n", "Line 2 of .*has no second column"),
        ("a.png,cat\nc.png,\n", r"Line 2 of .*has no class: c\.png"),
        ("a.png,cat\n,dog\n", "Line 2 of .*has no file: dog"),
        ("a.png,cat\na.png,dog\n", r"gives a\.png two classes: cat \(line 1\) and dog \(line 2\)"),
        ("a.png,cat\n./a.png,dog\n", r"gives \./a\.png two classes"),
        ("file,class,split\na.png,cat,train\na.png,cat,test\n", r"a\.png two splits: train \(line 2\) and test"),
        ("file,class,split\na.png,cat,holdout\n", "Line 2 of .*unknown split 'holdout'. Choose train, val or test"),
        (
            "a.png,cat,train\nc.png,dog,train\ndeep/b.png,fox,test\n",
            r"class fox in the test split \(line 3\), but not in",
        ),
        ("a.png,cat\nc.png,cat\n", "has only one class, cat"),
        ("a.png,cat,test\nc.png,dog,test\n", "has no training images: all rows are of the splits test"),
        ("x/a.png,cat\nx/b.png,dog\n", r"None of the files in .* is in .*; the first is x/a\.png"),
    ],
)
def test_a_table_that_cannot_be_used_is_an_error(photos, text, sentence) -> None:
    (photos / "labels.csv").write_text(text)
    with pytest.raises(UserError, match=sentence):
        open_table(photos)


def test_the_same_row_twice_is_no_error(photos) -> None:
    write_rows(photos / "labels.csv", [*ROWS, *ROWS])
    assert len(open_table(photos).load_split("train")) == 4


def test_a_table_needs_a_folder_of_images(photos, tmp_path) -> None:
    with pytest.raises(UserError, match=r"There is no table 'labels\.csv' in .* or .*photos"):
        open_table(photos)
    (photos / "latin.csv").write_bytes("a.png,k\xe4fer".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.csv cannot be read as UTF-8 text"):
        open_table(photos, "latin.csv")
    np.savez(tmp_path / "x.npz", x_train=np.zeros((2, 4, 4), np.uint8), y_train=np.arange(2))
    for name in ("digits", tmp_path / "x.npz"):
        with pytest.raises(UserError, match=f"needs a folder of images, but data.name={name} has its own labels"):
            open_table(name)
    with pytest.raises(UserError, match="There is no data set and no folder named"):
        open_table(tmp_path / "nothing")


def test_the_split_column_gives_the_splits(tmp_path) -> None:
    rows = [(f"{index}.png", "ab"[index % 2], ["", "valid", "Test"][index // 4]) for index in range(10)]
    save_images(tmp_path, [row[0] for row in rows])
    write_rows(tmp_path / "labels.csv", [("file", "class", "split"), *rows])
    source = open_table(tmp_path)
    assert source.split_names == ("train", "val", "test")
    assert [len(source.load_split(split)) for split in source.split_names] == [4, 4, 2]
    data = load_train_and_validation_data(DataConfig(name=str(tmp_path), labels="labels.csv"), (8, 8), 3, seed=0)
    assert data.validation is not None and len(data.validation) == 4 and len(data.train) == 4


def test_a_table_as_the_data_set_means_the_images_beside_it(photos) -> None:
    """The test images need not be of every class."""
    write_rows(photos / "labels.csv", [(*row, "train") for row in ROWS[:3]] + [(*ROWS[3], "test")])
    source = open_data_by_name_or_path(DataConfig(name=str(photos / "labels.csv")), (8, 8), 3)
    assert (source.name, source.classes, len(source.load_split("test"))) == ("photos", ["cat", "dog"], 1)


def test_the_commands_print_what_is_not_used(photos, vitascope, monkeypatch) -> None:
    monkeypatch.chdir(photos.parent)
    write_rows(photos / "labels.csv", [*ROWS[:3], ("gone.png", "dog")])
    notes = [
        "1 file in labels.csv is not in photos: gone.png (line 4).\n",
        "1 image of photos has no row in labels.csv and will not be used: deep/d.png.\n",
    ]
    described = vitascope("data", "describe", "photos", "data.labels=labels.csv").out
    settings = [f"{key}={value}" for key, value in (TINY | {"train.epochs": 1, "data.validation": 0}).items()]
    trained = vitascope("train", "digits", *settings, "data.name=photos", "data.labels=photos/labels.csv").out
    for note in notes:
        assert note in described and note in trained
    assert "train: 3 images" in described and "images per class: 1 to 2" in described
    assert f"labels: {photos / 'labels.csv'}" in next(Path("runs").rglob("recipe.yaml")).read_text()


@pytest.fixture
def twenty(tmp_path) -> Path:
    """20 images without class folders and their table, which is also their order by class."""
    folder = tmp_path / "twenty"
    rows = [(f"{index:02d}.png", "ab"[index % 2], "test" if index >= 16 else "train") for index in range(20)]
    save_images(folder, [row[0] for row in rows])
    write_rows(folder / "labels.csv", [("file", "class", "split"), *rows])
    return folder


def train_twenty(folder: Path, runs: Path, **settings) -> Run:
    data = {"data.name": str(folder), "data.labels": "labels.csv", "data.validation": 0.25, "train.batch_size": 4}
    return vitascope.train("digits", runs=runs, quiet=True, **(TINY | data | settings))


def test_a_run_with_a_table_is_the_same_in_memory_and_on_demand(twenty, tmp_path) -> None:
    stored, fetched = (train_twenty(twenty, tmp_path / "runs", **{"data.memory": memory}) for memory in (None, 0))
    assert untimed(stored) == untimed(fetched) and same_weights(stored, fetched)
    assert stored.recipe.data.labels == str(twenty / "labels.csv")
    assert stored.machine["data_hash"] == fetched.machine["data_hash"] and stored.machine["training_images"] == 12
    model = vitascope.load(stored)
    assert model.evaluate("val").accuracy == pytest.approx(stored.metrics[-1]["val_accuracy"])
    assert model.evaluate("test").confusion_matrix.sum(1).tolist() == [2, 2]
    save_images(twenty.parent / "other", ["x.png", "y.png"])
    write_rows(twenty.parent / "other" / "their.csv", [("x.png", "b"), ("y.png", "a")])
    other = model.evaluate(data=str(twenty.parent / "other" / "their.csv"))
    assert other.confusion_matrix.sum(1).tolist() == [1, 1]


def test_a_run_is_not_resumed_with_other_labels(twenty, tmp_path, monkeypatch) -> None:
    interrupt_after_one_epoch(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train_twenty(twenty, tmp_path / "runs", **{"data.validation": 0})
    monkeypatch.undo()
    table = twenty / "labels.csv"
    right = table.read_text()
    table.write_text(right.replace("00.png,a", "00.png,b").replace("01.png,b", "01.png,a"))
    with pytest.raises(UserError, match="cannot be resumed: the training images have changed"):
        vitascope.resume(tmp_path / "runs" / "digits", quiet=True)
    table.write_text(right)
    assert vitascope.resume(tmp_path / "runs" / "digits", quiet=True).is_finished


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real photos are not on this machine")
def test_a_real_table_of_class_indices_is_read() -> None:
    source = open_table(SHARED)
    assert len(source.classes) == 40 and source.classes[:3] == ["12", "37", "62"] and source.notes == []
    assert len(source.load_split("train")) == 40
