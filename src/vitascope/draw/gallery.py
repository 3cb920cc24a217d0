"""Rows of small images -> one picture, with a name for each row and column."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitascope.draw.look import caption


def draw_gallery(rows: list[list[NDArray]], row_names: Sequence[str], column_names: Sequence[str], text: str) -> Figure:
    """Images are height × width × 1 or 3, between 0 and 1."""
    columns = len(rows[0])
    figure = Figure(figsize=(1.25 * columns, 1.3 * len(rows) + 0.8), layout="constrained", dpi=150)
    panels = figure.subplots(len(rows), columns, squeeze=False)
    for row, images in enumerate(rows):
        for column, image in enumerate(images):
            panel = panels[row][column]
            panel.imshow(image.squeeze(-1) if image.shape[-1] == 1 else image, cmap="gray", vmin=0, vmax=1)
            panel.set_xticks([])
            panel.set_yticks([])
            if row == 0:
                panel.set_title(column_names[column], fontsize=9)
            if column == 0:
                panel.set_ylabel(row_names[row], fontsize=9)
    caption(figure, text)
    return figure
