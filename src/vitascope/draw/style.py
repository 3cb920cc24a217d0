"""Common style of all figures: sizes, labels, captions and saving."""

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from vitascope.draw.palette import COLOURS, SEQUENTIAL
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


def choose_colours(count: int) -> list[Any]:
    """Return colours: from the palette for few, from the sequential colour map for many."""
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    return [colormaps[SEQUENTIAL](place) for place in np.linspace(0, 0.92, count)]


def create_figure(
    num_columns: int, width: float = 9.0, height: float = 4.0, num_rows: int = 1
) -> tuple[Figure, list[Axes]]:
    """Return an empty figure and its panels, row by row. Without pyplot: needs no display, works in threads."""
    with rc_context(FIGURE_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
        panels = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    return figure, list(panels)


def set_labels(panel: Axes, title: str, x_label: str, y_label: str) -> None:
    """Set a panel's title and axis labels."""
    panel.set_title(escape_mathtext(title), fontsize=11, fontweight="bold")
    panel.set_xlabel(escape_mathtext(x_label))
    panel.set_ylabel(escape_mathtext(y_label))


def escape_mathtext(text: str) -> str:
    """Escape $, so that a class name such as a$b$ is not drawn as a formula."""
    return text.replace("$", r"\$")


def wrap_text(text: str, max_line_length: int) -> str:
    """Break each line of the text after at most `width` characters, between words where possible."""
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


def save_figure(figure: Figure, path: Path) -> Path:
    """Write the figure."""
    check_figure_suffix(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise UserError(f"The figure could not be written to {path}: {error.strerror}.") from error
    return path
