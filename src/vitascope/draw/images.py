"""Draw small images in rows, columns or tiles, matrices as heat maps, and groups of patches on an image."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray
from PIL import Image

from vitascope.draw import COLOURS
from vitascope.draw.style import (
    add_caption,
    count_caption_lines,
    escape_mathtext,
    set_integer_ticks,
    set_labels,
    wrap_text,
)
from vitascope.number_format import format_number

REMOVED_COLOUR = "#888888"
GOLDEN_RATIO = (5**0.5 - 1) / 2
NUMBER_POINTS_PER_INCH, MIN_FONT_SIZE = 74, 3.5  # font size of a digit as wide as one inch; smallest font size
TILE_WIDTH = 1.75  # inches
TITLE_CHARACTERS = 15  # per inch of a tile's width


def draw_gallery(
    image_rows: list[list[NDArray]], row_names: Sequence[str], column_names: Sequence[str], caption_text: str
) -> Figure:
    """Draw rows of images (height × width × 1 or 3, from 0 to 1) with row and column names."""
    columns = len(image_rows[0])
    figure = Figure(figsize=(1.25 * columns, 1.3 * len(image_rows) + 0.8), layout="constrained", dpi=150)
    panels = figure.subplots(len(image_rows), columns, squeeze=False)
    for row, images in enumerate(image_rows):
        for column, image in enumerate(images):
            panel = panels[row][column]
            _draw_image(panel, image)
            if row == 0:
                panel.set_title(escape_mathtext(column_names[column]), fontsize=9)
            if column == 0:
                panel.set_ylabel(escape_mathtext(row_names[row]), fontsize=9)
    add_caption(figure, caption_text)
    return figure


def draw_image_tiles(
    images: list[NDArray],
    titles: Sequence[str],
    caption_text: str,
    *,
    framed_index: int | None = None,
    num_columns: int = 6,
    tile_width: float = TILE_WIDTH,
) -> Figure:
    """Draw images as tiles (`tile_width` in inches), each with its title; the tile `framed_index` gets a frame."""
    num_columns = min(num_columns, max(len(images), 3))
    rows = -(-len(images) // num_columns)
    titles = [wrap_text(title, int(TITLE_CHARACTERS * tile_width)) for title in titles]
    lines = max(title.count("\n") for title in titles)
    width = tile_width * num_columns
    height = (tile_width + 0.25 + 0.15 * lines) * rows + 0.4 + 0.15 * count_caption_lines(caption_text, width)
    figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
    panels = figure.subplots(rows, num_columns, squeeze=False).flatten()
    for panel in panels[len(images) :]:
        panel.axis("off")
    for panel, image, title in zip(panels, images, titles, strict=False):
        _draw_image(panel, image)
        panel.set_title(escape_mathtext(title), fontsize=8)
    if framed_index is not None:
        panels[framed_index].spines[:].set(color=COLOURS[1], linewidth=3)
    add_caption(figure, caption_text)
    return figure


def save_mosaic(image_rows: Sequence[NDArray], path: Path, zoom_factor: int = 4, gap_pixels: int = 2) -> Path:
    """Save rows of images (image × height × width × 1 or 3, between 0 and 1) as one small PNG without text."""
    strips = []
    for images in image_rows:
        padded = np.pad(
            images, ((0, 0), (gap_pixels, gap_pixels), (gap_pixels, gap_pixels), (0, 0)), constant_values=1.0
        )
        strips.append(np.concatenate(list(padded), axis=1))
    pixels = (np.concatenate(strips) * 255).round().astype(np.uint8).repeat(zoom_factor, 0).repeat(zoom_factor, 1)
    Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(path)
    return path


def _draw_image(panel: Axes, image: NDArray) -> None:
    panel.imshow(
        image.squeeze(-1) if image.shape[-1] == 1 else image, cmap="gray", vmin=0, vmax=1, interpolation="nearest"
    )
    panel.set_xticks([])
    panel.set_yticks([])


def draw_heatmap(
    figure: Figure,
    panel: Axes,
    values: NDArray,
    *,
    title: str,
    x_label: str,
    y_label: str,
    colormap: str,
    colorbar_label: str | None = None,
    value_format: str | None = None,
) -> None:
    """Draw rows downwards, columns to the right. `value_format`: such as '.2f'; None writes no values."""
    picture = panel.imshow(
        values, cmap=colormap, aspect="auto" if value_format is None else "equal", interpolation="nearest"
    )
    set_labels(panel, title, x_label, y_label)
    set_integer_ticks(panel.xaxis)
    set_integer_ticks(panel.yaxis)
    if colorbar_label is not None:
        figure.colorbar(picture, ax=panel, label=colorbar_label)
    if value_format is not None:
        for row, line in enumerate(values):
            for column, value in enumerate(line):
                text = "–" if np.isnan(value) else format_number(value, value_format)
                colour = "black" if np.isnan(value) else choose_text_colour(picture.to_rgba(value))
                panel.text(column, row, text, ha="center", va="center", color=colour, fontsize=9)


def choose_text_colour(background: Sequence[float] | NDArray) -> Literal["black", "white"]:
    """Return black or white, whichever is easier to read on this RGBA colour (Rec. 709 luminance)."""
    red, green, blue, _ = background
    return "black" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.5 else "white"


def outline_patch_groups(panel: Axes, group_map: NDArray, patch_size: tuple[int, int]) -> None:
    """Draw white lines with a black edge around the groups of several patches; thinner lines where patches are small.

    `group_map`: group of each patch, row × column."""
    height, width = patch_size
    groups, sizes = np.unique(group_map, return_counts=True)
    merged = np.where(np.isin(group_map, groups[sizes > 1]), group_map, -1)
    lines = []
    for row, column in np.argwhere(merged[:, 1:] != merged[:, :-1]):
        x, y = (column + 1) * width - 0.5, row * height - 0.5  # pixel 0 is drawn from -0.5 to 0.5
        lines.append([(x, y), (x, y + height)])
    for row, column in np.argwhere(merged[1:] != merged[:-1]):
        x, y = column * width - 0.5, (row + 1) * height - 0.5
        lines.append([(x, y), (x + width, y)])
    line_width = min(1.2, 12 / max(group_map.shape))
    panel.add_collection(LineCollection(lines, colors="black", linewidths=2.5 * line_width))
    panel.add_collection(LineCollection(lines, colors="white", linewidths=line_width))


def compute_group_number_font_size(group_map: NDArray, panel_width: float) -> float:
    """Return the font size of a group's number that fits a patch in a panel of this width, in inches."""
    num_groups = int((np.unique(group_map, return_counts=True)[1] > 1).sum())
    return NUMBER_POINTS_PER_INCH * panel_width / (max(group_map.shape) * len(str(num_groups)))


def draw_group_numbers_on_patches(
    panel: Axes, group_map: NDArray, patch_size: tuple[int, int], font_size: float
) -> None:
    """Write a number on the patches of each group of several; if the font is too small, only on a group's first."""
    groups, first_indices, sizes = np.unique(group_map, return_index=True, return_counts=True)
    numbers = {group: number for number, group in enumerate(groups[sizes > 1].tolist(), start=1)}
    size = min(max(font_size, MIN_FONT_SIZE), 9)
    for index, ((row, column), group) in enumerate(np.ndenumerate(group_map)):
        if group in numbers and (font_size >= MIN_FONT_SIZE or index in first_indices):
            x, y = (column + 0.5) * patch_size[1] - 0.5, (row + 0.5) * patch_size[0] - 0.5
            text = panel.text(x, y, str(numbers[group]), ha="center", va="center", fontsize=size, color="white")
            text.set_path_effects([withStroke(linewidth=1, foreground="black")])


def hatch_patches(panel: Axes, patch_mask: NDArray, patch_size: tuple[int, int]) -> None:
    """Cover the patches where `patch_mask` (row × column) is true with a grey hatch."""
    height, width = patch_size
    for row, column in np.argwhere(patch_mask):
        corner = (column * width - 0.5, row * height - 0.5)
        rectangle = Rectangle(
            corner, width, height, facecolor=REMOVED_COLOUR, linewidth=0, edgecolor="white", hatch="///"
        )
        panel.add_patch(rectangle)


def choose_group_colours(num_groups: int) -> NDArray:
    """Return different colours, group × RGB. Successive hues are a golden ratio apart, so they differ clearly."""
    colours = [colormaps["hsv"](group * GOLDEN_RATIO % 1)[:3] for group in range(num_groups)]
    return np.array(colours).reshape(num_groups, 3)
