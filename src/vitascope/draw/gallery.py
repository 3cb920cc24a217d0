"""Draw small images as one figure: in named rows and columns, or as tiles with titles."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from vitascope.draw.look import caption, count_caption_lines, plain, wrap
from vitascope.draw.palette import COLOURS

TITLE_WIDTH = 26  # characters of a tile's title that fit above it


def draw_gallery(rows: list[list[NDArray]], row_names: Sequence[str], column_names: Sequence[str], text: str) -> Figure:
    """Draw rows of images (height × width × 1 or 3, from 0 to 1) with row and column names."""
    columns = len(rows[0])
    figure = Figure(figsize=(1.25 * columns, 1.3 * len(rows) + 0.8), layout="constrained", dpi=150)
    panels = figure.subplots(len(rows), columns, squeeze=False)
    for row, images in enumerate(rows):
        for column, image in enumerate(images):
            panel = panels[row][column]
            _show(panel, image)
            if row == 0:
                panel.set_title(plain(column_names[column]), fontsize=9)
            if column == 0:
                panel.set_ylabel(plain(row_names[row]), fontsize=9)
    caption(figure, text)
    return figure


def draw_tiles(
    images: list[NDArray], words: Sequence[str], text: str, *, framed: int | None = None, columns: int = 6
) -> Figure:
    """Draw images as tiles, each with its title; the tile `framed` gets a frame."""
    columns = min(columns, max(len(images), 3))
    rows = -(-len(images) // columns)
    words = [wrap(title, TITLE_WIDTH) for title in words]
    lines = max(title.count("\n") for title in words)
    height = (2.0 + 0.15 * lines) * rows + 0.4 + 0.15 * count_caption_lines(text, 1.75 * columns)
    figure = Figure(figsize=(1.75 * columns, height), layout="constrained", dpi=150)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel in panels[len(images) :]:
        panel.axis("off")
    for panel, image, said in zip(panels, images, words, strict=False):
        _show(panel, image)
        panel.set_title(plain(said), fontsize=8)
    if framed is not None:
        panels[framed].spines[:].set(color=COLOURS[1], linewidth=3)
    caption(figure, text)
    return figure


def save_mosaic(rows: Sequence[NDArray], path: Path, zoom: int = 4, gap: int = 2) -> Path:
    """Rows of images (image × height × width × 1 or 3, between 0 and 1) as one small PNG without text."""
    lines = []
    for images in rows:
        wide = np.pad(images, ((0, 0), (gap, gap), (gap, gap), (0, 0)), constant_values=1.0)
        lines.append(np.concatenate(list(wide), axis=1))
    pixels = (np.concatenate(lines) * 255).round().astype(np.uint8).repeat(zoom, 0).repeat(zoom, 1)
    Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(path)
    return path


def _show(panel: Axes, image: NDArray) -> None:
    panel.imshow(
        image.squeeze(-1) if image.shape[-1] == 1 else image, cmap="gray", vmin=0, vmax=1, interpolation="nearest"
    )
    panel.set_xticks([])
    panel.set_yticks([])
