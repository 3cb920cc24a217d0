"""Draw a matrix as a heat map, optionally with its values."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from vitascope.draw.look import label


def heatmap(
    figure: Figure,
    panel: Axes,
    values: NDArray,
    *,
    title: str,
    x: str,
    y: str,
    colours: str,
    bar: str | None = None,
    numbers: str | None = None,
) -> None:
    """Draw rows downwards, columns to the right. `numbers` is a format such as '{:.2f}'; None writes no values."""
    picture = panel.imshow(values, cmap=colours, aspect="auto" if numbers is None else "equal", interpolation="nearest")
    label(panel, title, x, y)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.yaxis.set_major_locator(MaxNLocator(integer=True))
    if bar is not None:
        figure.colorbar(picture, ax=panel, label=bar)
    if numbers is not None:
        middle = (values.max() + values.min()) / 2
        for row, line in enumerate(values):
            for column, value in enumerate(line):
                colour = "black" if value > middle else "white"
                panel.text(column, row, numbers.format(value), ha="center", va="center", color=colour, fontsize=9)
