"""Common style of all figures: sizes, labels, captions and saving."""

import os
import textwrap
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vitascope.draw import COLOURS, SEQUENTIAL
from vitascope.errors import UserError

FIGURE_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
CAPTION_CHARACTERS = 14  # per inch of the figure's width
Colour = str | tuple[float, float, float, float]  # a hexadecimal code, or RGBA from 0 to 1


def choose_colours(count: int) -> list[Colour]:
    """Return colours: from the palette for few, from the sequential colour map for many."""
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    return [colormaps[SEQUENTIAL](position) for position in np.linspace(0, 0.92, count)]


class EmptyFigure(NamedTuple):
    figure: Figure
    panels: list[Axes]  # row by row


def create_figure(num_columns: int, width: float = 9.0, height: float = 4.0, num_rows: int = 1) -> EmptyFigure:
    """Create an empty figure (sizes in inches) without pyplot, so that it needs no display and works in threads."""
    with rc_context(FIGURE_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
        panels = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    return EmptyFigure(figure, list(panels))


def set_labels(panel: Axes, title: str, x_label: str, y_label: str) -> None:
    """Set a panel's title and axis labels."""
    panel.set_title(escape_mathtext(title), fontsize=11, fontweight="bold")
    panel.set_xlabel(escape_mathtext(x_label))
    panel.set_ylabel(escape_mathtext(y_label))


def set_integer_ticks(axis: Axis) -> None:
    """Put ticks only at whole numbers, also if the axis shows a single one."""
    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def escape_mathtext(text: str) -> str:
    """Escape $, so that a class name such as a$b$ is not drawn as a formula."""
    return text.replace("$", r"\$")


def wrap_text(text: str, max_line_length: int) -> str:
    """Break each line of the text after at most `max_line_length` characters, between words where possible."""
    return "\n".join("\n".join(textwrap.wrap(line, max_line_length)) for line in text.splitlines())


def shorten_name(name: str, max_length: int) -> str:
    """Shorten a long name; its beginning is kept."""
    return name if len(name) <= max_length else name[: max_length - 1] + "…"


def add_caption(figure: Figure, caption_text: str) -> None:
    """Write a caption under the figure."""
    lines = textwrap.wrap(caption_text, int(figure.get_figwidth() * CAPTION_CHARACTERS))
    figure.supxlabel(escape_mathtext("\n".join(lines)), fontsize=9, color="#444444")


def count_caption_lines(text: str, width: float) -> int:
    """Return the number of lines of a caption under a figure of this width, in inches."""
    return len(textwrap.wrap(text, int(width * CAPTION_CHARACTERS)))


def check_figure_suffix(path: Path) -> None:
    """Raise a UserError if the file ending is not an image format."""
    if path.suffix.lstrip(".").lower() not in FigureCanvasBase.get_supported_filetypes():
        raise UserError(f"A figure cannot be written as '{path.name}'. Choose an ending such as .png, .svg or .pdf.")


def choose_unused_path(path: Path) -> Path:
    """Return the path. If it exists, return the first unused one of NAME-2.png, NAME-3.png and so on."""
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    return next(candidate for candidate in chain([path], numbered) if not candidate.exists())


def save_figure(figure: Figure, path: Path) -> Path:
    """Write the figure and return its path. A process that is killed leaves no incomplete file with this name."""
    check_figure_suffix(path)
    partial_path = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(partial_path)
        partial_path.replace(path)
    except OSError as error:
        partial_path.unlink(missing_ok=True)
        raise UserError(f"The figure could not be written to {path}: {error.strerror}.") from error
    return path
