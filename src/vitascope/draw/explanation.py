"""Draw explanations over an image: one panel per method with the patch grid and a colour bar."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitascope.draw.look import caption, plain
from vitascope.draw.palette import COLOURS, DIVERGING, SEQUENTIAL

LAID_OVER = 0.65


def draw_explanations(image: NDArray, heats: dict[str, NDArray], first: str, text: str, columns: int = 4) -> Figure:
    """Draw `image` (height × width × 1 or 3, 0 to 1) and heat maps (row × column); `first` is the image's title."""
    rows = -(-(len(heats) + 1) // columns)
    figure = Figure(figsize=(3.0 * columns, 2.9 * rows + 0.6), layout="constrained", dpi=150)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel in panels:
        panel.axis("off")
    show(panels[0], image)
    lay_grid(panels[0], image, next(iter(heats.values())).shape)
    panels[0].set_title(plain(first), fontsize=9)
    for panel, (name, heat) in zip(panels[1:], heats.items(), strict=False):
        show(panel, 0.45 + 0.4 * image.mean(-1, keepdims=True))  # faint and grey, so that colours show only the map
        drawn = lay_over(panel, image, heat)
        panel.set_title(plain(name), fontsize=9)
        figure.colorbar(drawn, ax=panel, shrink=0.8, format="%.2g")
    caption(figure, text)
    return figure


def show(panel: Axes, image: NDArray) -> None:
    shown = image if image.shape[-1] == 3 else image[..., 0]
    panel.imshow(shown, cmap="gray", vmin=0, vmax=1, interpolation="nearest", extent=_extent(image))


def lay_over(panel: Axes, image: NDArray, heat: NDArray, top: float | None = None):
    """Draw a map over the image, one colour per patch: signed maps from blue to red, others from 0 up."""
    if heat.min() < 0:
        limit = top or max(float(np.abs(heat).max()), 1e-12)
        scale = {"cmap": DIVERGING, "vmin": -limit, "vmax": limit}
    else:
        scale = {"cmap": SEQUENTIAL, "vmin": 0.0, "vmax": top or max(float(heat.max()), 1e-12)}
    return panel.imshow(heat, alpha=LAID_OVER, interpolation="nearest", extent=_extent(image), **scale)


def lay_grid(panel: Axes, image: NDArray, grid: tuple[int, ...]) -> None:
    height, width = image.shape[:2]
    for row in range(1, grid[0]):
        panel.axhline(row * height / grid[0], color=COLOURS[4], linewidth=0.6)
    for column in range(1, grid[1]):
        panel.axvline(column * width / grid[1], color=COLOURS[4], linewidth=0.6)


def mark_patch(panel: Axes, image: NDArray, grid: tuple[int, int], place: tuple[int, int]) -> None:
    """Draw a white frame with a black edge, visible on any colour."""
    height, width = image.shape[0] / grid[0], image.shape[1] / grid[1]
    left, top = place[1] * width, place[0] * height
    x, y = [left, left + width, left + width, left, left], [top, top, top + height, top + height, top]
    panel.plot(x, y, color="black", linewidth=3)
    panel.plot(x, y, color="white", linewidth=1.2)


def _extent(image: NDArray) -> tuple[float, float, float, float]:
    return (0.0, image.shape[1], image.shape[0], 0.0)
