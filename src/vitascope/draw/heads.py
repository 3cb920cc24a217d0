"""Draw the attention maps of all blocks and heads for one query; each block has its own labelled scale."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitascope.draw.explanation import lay_grid, lay_over, mark_patch, show
from vitascope.draw.look import caption, plain
from vitascope.draw.palette import SEQUENTIAL


def draw_heads(
    image: NDArray,
    maps: NDArray,
    names: tuple[list[str], list[str]],
    query: tuple[int, int] | None,
    first: str,
    text: str,
) -> Figure:
    """Draw `maps` (block × head × row × column) beside the image; `first` is the image's title.

    `query` is the query patch; None is the token that the classifier reads. A block's scale ends at its largest value,
    but at least at twice the value of uniform attention."""
    blocks, heads, rows, columns = maps.shape
    figure = Figure(figsize=(1.25 * (heads + 2) + 1.0, 1.08 * blocks + 1.0), layout="constrained", dpi=150)
    left, right = figure.subfigures(1, 2, width_ratios=[2, heads + 0.8]).flat  # pyright: ignore[reportAttributeAccessIssue]
    _draw_image(left.subplots(1, 1), image, (rows, columns), query, first)
    panels = right.subplots(blocks, heads, squeeze=False)
    for block in range(blocks):
        top = max(float(maps[block].max()), 2 / (rows * columns))
        for head in range(heads):
            panel = panels[block][head]
            panel.set_xticks([])
            panel.set_yticks([])
            show(panel, np.zeros_like(image))
            lay_over(panel, image, maps[block, head], top).set_alpha(1.0)
            if block == 0:
                panel.set_title(plain(names[1][head]), fontsize=8)
            if head == 0:
                panel.set_ylabel(plain(names[0][block]), fontsize=8)
        panels[block][-1].annotate(
            f"{top:.3f}", (1.08, 0.5), xycoords="axes fraction", fontsize=8, va="center", annotation_clip=False
        )
    bar = right.colorbar(ScalarMappable(cmap=SEQUENTIAL), ax=panels, shrink=0.6, pad=0.09, aspect=40)
    bar.set_ticks([0, 1], labels=["0", "block's\nmaximum"], fontsize=8)
    caption(figure, text)
    return figure


def _draw_image(panel: Axes, image: NDArray, grid: tuple[int, int], query: tuple[int, int] | None, first: str) -> None:
    panel.axis("off")
    panel.set_anchor("N")
    panel.set_title(plain(first), fontsize=8)
    show(panel, image)
    lay_grid(panel, image, grid)
    if query is not None:
        mark_patch(panel, image, grid, query)
