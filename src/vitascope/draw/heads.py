"""Every block's and head's map from one query -> one picture, all on one scale."""

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitascope.draw.explanation import lay_grid, lay_over, mark_patch, show
from vitascope.draw.look import caption, plain


def draw_heads(
    image: NDArray, maps: NDArray, names: tuple[list[str], list[str]], query: tuple[int, int] | None, text: str
) -> Figure:
    """`maps`: block × head × row × column; `names`: of the blocks and the heads; `query`: the patch that looks, or the
    head's own token. The scale goes to the largest value, at least to twice what even attention would give."""
    blocks, heads, rows, columns = maps.shape
    figure = Figure(figsize=(1.25 * (heads + 2) + 0.8, 1.25 * blocks + 1.1), layout="constrained", dpi=150)
    left, right = figure.subfigures(1, 2, width_ratios=[2, heads + 0.6]).flat  # pyright: ignore[reportAttributeAccessIssue]
    first = left.subplots(1, 1)
    first.axis("off")
    show(first, image)
    lay_grid(first, image, (rows, columns))
    if query is not None:
        mark_patch(first, image, (rows, columns), query)
    panels = right.subplots(blocks, heads, squeeze=False)
    top = max(float(maps.max()), 2 / (rows * columns))
    drawn = None
    for block in range(blocks):
        for head in range(heads):
            panel = panels[block][head]
            panel.set_xticks([])
            panel.set_yticks([])
            show(panel, np.zeros_like(image))
            drawn = lay_over(panel, image, maps[block, head], top)
            drawn.set_alpha(1.0)
            if block == 0:
                panel.set_title(plain(names[1][head]), fontsize=8)
            if head == 0:
                panel.set_ylabel(plain(names[0][block]), fontsize=8)
    if drawn is not None:
        right.colorbar(drawn, ax=panels, shrink=0.6, label="attention", format="%.2g")
    caption(figure, text)
    return figure
