"""Mark patches on a drawn image: outlines around groups of patches, a hatch over removed patches."""

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from vitascope.draw.palette import COLOURS

REMOVED_COLOUR = "#888888"
GOLDEN_RATIO = (5**0.5 - 1) / 2


def outline_patch_groups(panel: Axes, group_map: NDArray, patch_size: tuple[int, int]) -> None:
    """Draw white lines with a black edge between groups. `group_map`: group of each patch, row × column."""
    height, width = patch_size
    lines = []
    for row, column in np.argwhere(group_map[:, 1:] != group_map[:, :-1]):
        x, y = (column + 1) * width - 0.5, row * height - 0.5  # pixel 0 is drawn from -0.5 to 0.5
        lines.append([(x, y), (x, y + height)])
    for row, column in np.argwhere(group_map[1:] != group_map[:-1]):
        x, y = column * width - 0.5, (row + 1) * height - 0.5
        lines.append([(x, y), (x + width, y)])
    panel.add_collection(LineCollection(lines, colors="black", linewidths=3))
    panel.add_collection(LineCollection(lines, colors="white", linewidths=1.2))


def draw_patch_borders(
    panel: Axes, grid_shape: tuple[int, int], patch_size: tuple[float, float], line_width: float = 0.8
) -> None:
    """Draw lines between all patches. `patch_size`: rows, columns in pixels."""
    for row in range(1, grid_shape[0]):
        panel.axhline(row * patch_size[0] - 0.5, color=COLOURS[4], linewidth=line_width)
    for column in range(1, grid_shape[1]):
        panel.axvline(column * patch_size[1] - 0.5, color=COLOURS[4], linewidth=line_width)


def hatch_patches(panel: Axes, patch_mask: NDArray, patch_size: tuple[int, int]) -> None:
    """Cover the patches where `patch_mask` (row × column) is true with a grey hatch."""
    height, width = patch_size
    for row, column in np.argwhere(patch_mask):
        corner = (column * width - 0.5, row * height - 0.5)
        panel.add_patch(
            Rectangle(corner, width, height, facecolor=REMOVED_COLOUR, edgecolor="white", hatch="///", linewidth=0)
        )


def choose_group_colours(num_groups: int) -> NDArray:
    """Return different colours, group × RGB. Successive hues are a golden ratio apart, so they differ clearly."""
    colours = [colormaps["hsv"](group * GOLDEN_RATIO % 1)[:3] for group in range(num_groups)]
    return np.array(colours).reshape(num_groups, 3)
