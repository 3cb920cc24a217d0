"""Data sets in memory and in folders that are decoded on demand: the same images, labels, statistics, fingerprint."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitascope import UserError
from vitascope.data import dataset as dataset_module
from vitascope.data import decoding
from vitascope.data.config import DataConfig
from vitascope.data.dataset import MemoryDataset, has_fingerprint, hash_images_and_labels
from vitascope.data.decoding import ImageFormat, decode_files
from vitascope.data.open_data import TrainingData, load_train_and_validation_data, open_data_by_name_or_path
from vitascope.data.sources import folder_dataset

CLASSES = ("ant", "bee", "cat")
SIZE = (6, 8)


def write_photos(folder: Path, per_class: int = 14) -> Path:
    """Write JPEG files of several sizes, some gray, in nested folders."""
    generator = np.random.default_rng(0)
    for index in range(len(CLASSES) * per_class):
        path = folder / CLASSES[index % 3] / ("deep" if index % 2 else "") / f"{index:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (10 + index % 3, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels[..., 0] if index % 5 == 0 else pixels).save(path)
    return folder


def open_split(folder: Path, memory: float | None, **settings):
    config = DataConfig(name=str(folder), memory=memory, **settings)
    source = open_data_by_name_or_path(config, SIZE, 3)
    return source.load_split("train"), source


def open_training_data(folder: Path, memory: float | None, **settings) -> TrainingData:
    return load_train_and_validation_data(DataConfig(name=str(folder), memory=memory, **settings), SIZE, 3, seed=0)


def test_a_folder_decoded_on_demand_has_the_same_images_labels_and_identity(tmp_path) -> None:
    stored, fetched = (open_split(write_photos(tmp_path / "photos"), memory)[0] for memory in (None, 0))
    assert stored.is_in_memory and not fetched.is_in_memory
    assert torch.equal(stored.images, fetched.images) and torch.equal(stored.labels, fetched.labels)
    assert stored.fingerprint() == fetched.fingerprint() and stored.file_paths == fetched.file_paths
    order = torch.tensor([5, 0, 41, 5])
    for one, other in ((stored, fetched), (stored.select(order), fetched.select(order))):
        assert torch.equal(one.fetch(slice(1, 3)), other.fetch(slice(1, 3)))
        assert all(torch.equal(*pair) for pair in zip(one.statistics(), other.statistics(), strict=True))
        assert one.classes == other.classes == list(CLASSES) and one.image_shape == tuple(other.image_shape)


@pytest.mark.parametrize("settings", [{}, {"validation": 0.3}, {"validation": 0.3, "fraction": 0.4}])
def test_splits_and_preprocessing_do_not_depend_on_where_the_images_are(tmp_path, settings) -> None:
    stored, fetched = (open_training_data(write_photos(tmp_path), memory, **settings) for memory in (None, 0))
    assert stored.preprocessing == fetched.preprocessing
    assert stored.full_train_fingerprint == fetched.full_train_fingerprint
    for one, other in ((stored.train, fetched.train), (stored.validation, fetched.validation)):
        assert torch.equal(one.images, other.images) and one.fingerprint() == other.fingerprint()


def test_pixel_counts_of_a_part_are_those_of_its_images(tmp_path) -> None:
    """Of a large part, the counts are the difference of the whole and the rest."""
    _, source = open_split(write_photos(tmp_path), 0)
    for count in (3, 30, 42):
        part = source.load_split("train").select(torch.arange(count))
        assert torch.equal(part.count_pixel_values(), dataset_module.count_pixel_values(part.images))


def test_unreadable_files_are_skipped_in_both_modes_and_found_only_once(tmp_path, monkeypatch) -> None:
    folder = write_photos(tmp_path)
    (folder / "bee" / "broken.jpg").write_bytes(b"no image")
    (stored, source), (fetched, other) = (open_split(folder, memory) for memory in (None, 0))
    assert source.skipped_paths == other.skipped_paths == [str(folder / "bee" / "broken.jpg")]
    assert torch.equal(stored.images, fetched.images) and len(fetched) == 42
    assert all(torch.equal(*pair) for pair in zip(stored.statistics(), fetched.statistics(), strict=True))
    with pytest.raises(UserError, match="In all, 1 image cannot be read"):
        open_split(folder, 0, strict=True)
    monkeypatch.setattr(folder_dataset, "decode_files", lambda *_, **__: pytest.fail("the folder is scanned again"))
    assert open_split(folder, 0)[1].skipped_paths == source.skipped_paths


def test_a_file_that_becomes_unreadable_is_named(tmp_path) -> None:
    fetched, _ = open_split(write_photos(tmp_path), 0)
    Path(fetched.file_paths[2]).write_bytes(b"overwritten")
    with pytest.raises(UserError, match=r"could be read before, but now it cannot \(unknown image format\)"):
        fetched.fetch(slice(0, 4))


def test_the_fingerprint_changes_with_names_sizes_and_labels_and_with_contents_if_wanted(tmp_path) -> None:
    def open_and_fingerprint(folder: Path, mode: str = "names") -> str:
        return open_split(folder, 0, fingerprint=mode)[0].fingerprint()

    first = write_photos(tmp_path / "first")
    same = shutil.copytree(first, tmp_path / "same")
    assert open_and_fingerprint(first) == open_and_fingerprint(same)
    assert open_and_fingerprint(first, "contents") == open_and_fingerprint(same, "contents")
    file = same / "ant" / "000.jpg"
    pixels = bytearray(file.read_bytes())
    pixels[-3] ^= 1  # of the compressed pixels
    file.write_bytes(pixels)
    assert open_and_fingerprint(first) == open_and_fingerprint(same)
    assert open_and_fingerprint(first, "contents") != open_and_fingerprint(same, "contents")
    for change in ("renamed", "moved", "longer"):
        changed = shutil.copytree(first, tmp_path / change)
        file = changed / "ant" / "000.jpg"
        if change == "longer":
            file.write_bytes(file.read_bytes() + b"\0")
        else:
            file.rename(changed / ("ant" if change == "renamed" else "bee") / "0000.jpg")
        assert open_and_fingerprint(changed) != open_and_fingerprint(first), change
    smaller = open_data_by_name_or_path(DataConfig(name=str(first)), (4, 4), 3).load_split("train")
    assert smaller.fingerprint() != open_and_fingerprint(first)


def test_a_fingerprint_of_an_older_version_is_still_recognised(tmp_path) -> None:
    """It was a hash of the pixels, for folders too."""
    data, _ = open_split(write_photos(tmp_path), 0)
    assert has_fingerprint(data, hash_images_and_labels(data.images, data.labels))
    assert not has_fingerprint(data, hash_images_and_labels(data.images, data.labels.flip(0)))
    arrays = MemoryDataset(data.images, data.labels)
    assert arrays.fingerprint() == hash_images_and_labels(data.images, data.labels)


def test_statistics_are_computed_once_per_data_set(monkeypatch) -> None:
    images = torch.randint(0, 256, (5, 3, 4, 4), dtype=torch.uint8)
    first = MemoryDataset(images, torch.arange(5)).statistics()
    assert torch.allclose(first.mean, images.float().mean((0, 2, 3)) / 255)
    monkeypatch.setattr(dataset_module, "compute_mean_and_std", lambda _: pytest.fail("computed again"))
    again = MemoryDataset(images.clone(), torch.arange(5)).statistics()
    assert torch.equal(first.mean, again.mean) and torch.equal(first.std, again.std)


def test_workers_decode_every_file_as_this_process_does(tmp_path) -> None:
    paths = [str(path) for path in sorted(write_photos(tmp_path, per_class=30).rglob("*.jpg"))]
    paths.insert(40, str(tmp_path / "missing.jpg"))
    inline, workers = (decode_files(paths, ImageFormat(1, 7, 5), use_workers=flag) for flag in (False, True))
    assert inline.unreadable == workers.unreadable and list(workers.unreadable) == [40]
    readable = [index for index in range(len(paths)) if index != 40]
    assert (inline.pixels[readable] == workers.pixels[readable]).all()


def test_a_worker_that_is_killed_is_an_error_in_a_sentence(tmp_path, monkeypatch) -> None:
    workers = decoding.DecodeWorkers(1)
    monkeypatch.setattr(decoding, "get_or_start_decode_workers", lambda: workers)
    workers.workers[0].process.kill()
    workers.workers[0].process.wait()
    try:
        with pytest.raises(UserError, match="A process that reads image files ended too early"):
            open_split(write_photos(tmp_path, per_class=15), 0)  # not yet scanned by another test
    finally:
        workers.stop()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"memory": -1}, r"data\.memory=-1 must be at least 0 \(GiB\)"),
        ({"fingerprint": "pixels"}, r"data\.fingerprint='pixels' is unknown\. Choose one of contents, names"),
    ],
)
def test_wrong_settings_are_refused(settings, sentence) -> None:
    with pytest.raises(UserError, match=sentence):
        DataConfig(**settings)
