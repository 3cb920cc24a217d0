"""Titles of figures fit, however long the names of the classes are; maps have the colours of their colour bars."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from vitascope.draw.curves import draw_learning_curves, draw_run_comparison
from vitascope.draw.evaluation import CoveragePoint, draw_confusion_matrix, draw_coverage_curve
from vitascope.draw.explanation import draw_heat_maps_over_image
from vitascope.draw.images import draw_image_tiles
from vitascope.draw.style import wrap_text
from vitascope.recipe.choices import load_objective

NAMES = ["African_elephant", "golden_retriever", "goldfish"]


def title_boxes(figure) -> list:
    FigureCanvasAgg(figure).draw()
    return [panel.title.get_window_extent() for panel in figure.axes if panel.get_title()]


def test_the_title_of_a_confusion_matrix_is_inside_the_figure() -> None:
    figure = draw_confusion_matrix(
        np.eye(3) * 6, NAMES, "cifar10 on photos, validation images: accuracy 27.78 %, 18 images"
    )
    [box] = title_boxes(figure)
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1


def test_the_caption_of_a_confusion_matrix_mentions_empty_rows_only_if_there_are_some() -> None:
    full, empty = np.eye(3) * 6, np.diag([6, 0, 6])
    assert "An empty row" not in draw_confusion_matrix(full, NAMES, "").get_supxlabel()
    assert "An empty row" in draw_confusion_matrix(empty, NAMES, "").get_supxlabel().replace("\n", " ")


@pytest.mark.parametrize("count", [3, 6, 12])
def test_titles_of_tiles_do_not_overlap(count) -> None:
    title = "true: African_elephant (23.5 %)\npredicted: golden_retriever (39.0 %)"
    boxes = title_boxes(draw_image_tiles([np.zeros((8, 8, 1))] * count, [title] * count, "Errors."))
    assert len(boxes) == count
    for number, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[number + 1 :])


def test_a_long_caption_leaves_room_for_the_titles() -> None:
    figure = draw_image_tiles(
        [np.zeros((8, 8, 1))] * 3, ["merged: 8 tokens left\n0, 12 %"] * 3, "word " * 60, num_columns=3
    )
    assert all(box.y1 <= figure.bbox.y1 for box in title_boxes(figure))


def test_lines_are_broken_between_words_and_kept_apart() -> None:
    assert wrap_text("one two three\nfour", 8) == "one two\nthree\nfour" and wrap_text("short", 8) == "short"


@pytest.mark.parametrize("lowest", [0.0, -1.0], ids=["unsigned", "signed"])
def test_a_patch_without_details_has_its_colour_of_the_colour_bar(lowest) -> None:
    """In dark and in light parts of the image."""
    image = np.zeros((8, 8, 1))
    image[:, 4:] = 1.0
    image[7, 7] = 0.0  # a detail, in the last patch
    values = np.array([[lowest, 0.25], [0.5, 1.0]])
    figure = draw_heat_maps_over_image(image, {"map": values}, "image", "caption.", num_columns=2)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[::-1].astype(int)  # row 0 at the bottom, as in matplotlib
    _, panel, bar = figure.axes

    def look_up_map(x: float, y: float) -> np.ndarray:
        column, row = panel.transData.transform((x, y)).astype(int)
        return pixels[row, column]

    def look_up_bar(value: float) -> np.ndarray:
        column, row = bar.transData.transform((0.5, value)).astype(int)
        return pixels[row, column]

    places = {(2, 2): lowest, (6, 2): 0.25, (2, 6): 0.5}
    low, high = bar.get_ylim()
    margin = 0.01 * (high - low)  # away from the bar's frame
    for place, value in places.items():
        difference = look_up_map(*place) - look_up_bar(np.clip(value, low + margin, high - margin))
        assert np.abs(difference).max() <= 6, f"{place}: {difference}"
    assert np.abs(look_up_map(7.5, 7.5) - look_up_map(5.5, 5.5)).max() > 20  # the detail shows through
    assert "Light and dark details inside a patch are the image" in figure.get_supxlabel().replace("\n", " ")


def test_the_loss_axis_names_the_loss() -> None:
    loss, accuracy = {"train": [(1, 1.0)], "validation": []}, {"train": [(1, 0.5)], "validation": [(1, 0.5)]}
    labelled = {"loss": loss, "accuracy": accuracy}
    mae = {"loss": loss, "accuracy": accuracy | {"k-nearest neighbours": [(1, 0.5)]}}
    dino = mae | {"teacher": {"entropy": [(1, 1.0)]}}
    runs = {"classify": labelled, "mae": mae, "dino": dino}
    objectives = {name: load_objective(name) for name in runs}
    figures = [
        draw_learning_curves(curves, "run", objectives[name].loss_name, objectives[name].curve_panels)
        for name, curves in runs.items()
    ]
    axes = [figure.axes[0].get_ylabel() for figure in figures]
    assert axes == [
        "cross-entropy",
        "training loss:\nmean squared error on the masked patches",
        "training loss:\ncross-entropy of teacher and student",
    ]
    compared = (
        draw_run_comparison(
            {"a": labelled, "b": mae}, "two runs", [objectives["classify"].loss_name, objectives["mae"].loss_name]
        )
        .axes[0]
        .get_ylabel()
    )
    assert compared == "cross-entropy\nor mean squared error on the masked patches"


def test_white_cells_of_the_confusion_matrix_are_explained() -> None:
    few, many = np.array([[2, 0], [1, 3]]), np.array([[9999, 1], [0, 10]])
    assert "White: 0." in draw_confusion_matrix(few, ["a", "b"], "").get_supxlabel().replace("\n", " ")
    assert "White: less than 0.05 %." in draw_confusion_matrix(many, ["a", "b"], "").get_supxlabel().replace("\n", " ")


def test_close_points_of_the_coverage_curve_have_their_thresholds_and_equal_ones_a_range() -> None:
    points = [
        CoveragePoint(*row, (0.0, 1.0)) for row in ((0, 1, 0.5), (0.8, 0.067, 0.5), (0.89, 0.013, 1), (0.9, 0.013, 1))
    ]
    figure = draw_coverage_curve(points, [0, 0.8, 0.89, 0.9], 0.89, "")
    assert {text.get_text() for text in figure.axes[0].texts} == {"0", "0.8", "0.89–0.9"}
