"""Mark patches on a drawn image: outlines around groups of patches, a hatch over removed patches."""

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from vitascope.draw.palette import COLOURS

REMOVED = "#888888"
GOLDEN_RATIO = (5**0.5 - 1) / 2


def outline_groups(panel: Axes, owner: NDArray, patch: tuple[int, int]) -> None:
    """Draw white lines with a black edge between patches of different groups. `owner`: group of each patch."""
    height, width = patch
    lines = []
    for row, column in np.argwhere(owner[:, 1:] != owner[:, :-1]):
        x, y = (column + 1) * width - 0.5, row * height - 0.5  # pixel 0 is drawn from -0.5 to 0.5
        lines.append([(x, y), (x, y + height)])
    for row, column in np.argwhere(owner[1:] != owner[:-1]):
        x, y = column * width - 0.5, (row + 1) * height - 0.5
        lines.append([(x, y), (x + width, y)])
    panel.add_collection(LineCollection(lines, colors="black", linewidths=3))
    panel.add_collection(LineCollection(lines, colors="white", linewidths=1.2))


def draw_grid(panel: Axes, grid: tuple[int, int], patch: tuple[int, int]) -> None:
    """Draw thin lines between all patches."""
    for row in range(1, grid[0]):
        panel.axhline(row * patch[0] - 0.5, color=COLOURS[4], linewidth=0.8)
    for column in range(1, grid[1]):
        panel.axvline(column * patch[1] - 0.5, color=COLOURS[4], linewidth=0.8)


def hatch_patches(panel: Axes, removed: NDArray, patch: tuple[int, int]) -> None:
    """Cover the patches with a grey hatch. `removed`: true or false, row × column."""
    height, width = patch
    for row, column in np.argwhere(removed):
        corner = (column * width - 0.5, row * height - 0.5)
        panel.add_patch(
            Rectangle(corner, width, height, facecolor=REMOVED, edgecolor="white", hatch="///", linewidth=0)
        )


def shades_of_groups(count: int) -> NDArray:
    """Return different colours, group × RGB. Successive hues are a golden ratio apart, so they differ clearly."""
    return np.array([colormaps["hsv"](number * GOLDEN_RATIO % 1)[:3] for number in range(count)]).reshape(count, 3)
