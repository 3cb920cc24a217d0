"""Damaged or absurd data is refused at once, without exhausting time or memory."""

import io
import warnings

import numpy as np
import pytest
from PIL import Image

from tests.data.test_sources import open_source, save_image
from vitascope.data import decoding
from vitascope.data.decoding import ImageFormat, UnreadableImage, decode_image_or_error_reason
from vitascope.data.sources.folder import read_image_size
from vitascope.data.statistics import open_and_summarize_all_splits
from vitascope.errors import UserError

IMAGES, LABELS = np.zeros((6, 4, 4), np.uint8), np.arange(6) % 3


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ({"x_train": IMAGES, "y_train": np.array([0, 1, 2, 0, 1, 10**8])}, "y_train in .* contains 100000000"),
        ({"x_train": IMAGES, "y_train": LABELS - 1}, "contains -1"),
        ({"x_train": IMAGES, "y_train": LABELS * 3}, "has 3 labels up to 6, but none is 1, 2, 4, 5"),
        ({"x_train": IMAGES[:, :0], "y_train": LABELS}, "its images have no pixels"),
        ({"x_train": IMAGES[:0], "y_train": LABELS[:0]}, "has no images: y_train is empty"),
        ({"x_train": np.uint8(1), "y_train": np.int64(1)}, "y_train in .* is not an array with one entry per image"),
        ({}, "has no x_train and no y_train; it is empty"),
    ],
)
def test_impossible_arrays_are_refused_at_once(tmp_path, arrays, problem) -> None:
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(UserError, match=problem):
        open_source(str(tmp_path / "mine.npz")).load_split("train")


def make_image_bytes(size: tuple[int, int], file_format: str) -> bytes:
    file = io.BytesIO()
    Image.new("L", size, 100).save(file, file_format)
    return file.getvalue()


def test_an_image_of_too_many_pixels_is_not_decoded_and_a_photo_is_reduced(tmp_path, monkeypatch) -> None:
    (tmp_path / "big.png").write_bytes(make_image_bytes((9000, 9000), "PNG"))
    (tmp_path / "photo.jpg").write_bytes(make_image_bytes((400, 300), "JPEG"))
    decoded_sizes, convert = [], decoding.convert_to_8bit_opaque

    def record_size(image: Image.Image) -> Image.Image:
        decoded_sizes.append(image.size)
        return convert(image)

    monkeypatch.setattr(decoding, "convert_to_8bit_opaque", record_size)
    refused = decode_image_or_error_reason(tmp_path / "big.png", ImageFormat(1, 8, 8))
    assert isinstance(refused, UnreadableImage) and "more than 64,000,000 pixels" in refused.reason
    assert decoded_sizes == []
    monkeypatch.setattr(decoding, "MAX_PIXELS", 20_000)
    pixels = decode_image_or_error_reason(tmp_path / "photo.jpg", ImageFormat(1, 8, 8))
    assert decoded_sizes == [(100, 75)] and not isinstance(pixels, UnreadableImage) and (pixels == 100).all()
    assert read_image_size(tmp_path / "photo.jpg") == (300, 400)


def test_a_photo_above_pillows_own_limit_is_read(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    (tmp_path / "photo.jpg").write_bytes(make_image_bytes((400, 300), "JPEG"))
    with warnings.catch_warnings(action="error"):
        assert not isinstance(
            decode_image_or_error_reason(tmp_path / "photo.jpg", ImageFormat(1, 8, 8)), UnreadableImage
        )
    assert read_image_size(tmp_path / "photo.jpg") == (300, 400)


def test_a_summary_says_that_it_names_only_some_unreadable_files(tmp_path) -> None:
    for name in "ab":
        for number in range(2):
            (tmp_path / name).mkdir(exist_ok=True)
            save_image(tmp_path / name / f"{number}.png")
    for number in range(4):
        (tmp_path / "a" / f"broken{number}.png").write_bytes(b"x")
    text = open_and_summarize_all_splits(str(tmp_path), None).format_text()
    assert "4 files could not be read as images, for example: " in text


def test_a_class_folder_with_a_control_character_is_refused(tmp_path) -> None:
    for name in ("a\nb", "c"):
        (tmp_path / name).mkdir()
        save_image(tmp_path / name / "0.png")
    with pytest.raises(UserError, match="has a control character in its name"):
        open_source(str(tmp_path))
