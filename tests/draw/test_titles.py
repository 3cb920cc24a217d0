"""Titles of figures fit, however long the names of the classes are."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from vitascope.draw.evaluation import draw_confusion_matrix
from vitascope.draw.images import draw_image_tiles
from vitascope.draw.style import wrap_text

NAMES = ["African_elephant", "golden_retriever", "goldfish"]


def title_boxes(figure) -> list:
    FigureCanvasAgg(figure).draw()
    return [panel.title.get_window_extent() for panel in figure.axes if panel.get_title()]


def test_the_title_of_a_confusion_matrix_is_inside_the_figure() -> None:
    figure = draw_confusion_matrix(
        np.eye(3) * 6, NAMES, "cifar10 on photos, validation images: accuracy 27.78%, 18 images"
    )
    [box] = title_boxes(figure)
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1


def test_the_caption_of_a_confusion_matrix_mentions_empty_rows_only_if_there_are_some() -> None:
    full, empty = np.eye(3) * 6, np.diag([6, 0, 6])
    assert "An empty row" not in draw_confusion_matrix(full, NAMES, "").get_supxlabel()
    assert "An empty row" in draw_confusion_matrix(empty, NAMES, "").get_supxlabel().replace("\n", " ")


@pytest.mark.parametrize("count", [3, 6, 12])
def test_titles_of_tiles_do_not_overlap(count) -> None:
    title = "true: African_elephant (23.5%)\npredicted: golden_retriever (39.0%)"
    boxes = title_boxes(draw_image_tiles([np.zeros((8, 8, 1))] * count, [title] * count, "Errors."))
    assert len(boxes) == count
    for number, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[number + 1 :])


def test_a_long_caption_leaves_room_for_the_titles() -> None:
    figure = draw_image_tiles(
        [np.zeros((8, 8, 1))] * 3, ["merged: 8 tokens left\n0, 12%"] * 3, "word " * 60, num_columns=3
    )
    assert all(box.y1 <= figure.bbox.y1 for box in title_boxes(figure))


def test_lines_are_broken_between_words_and_kept_apart() -> None:
    assert wrap_text("one two three\nfour", 8) == "one two\nthree\nfour" and wrap_text("short", 8) == "short"
