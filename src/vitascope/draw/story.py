"""Draw the stages of a forward pass in five panels: image, patches, tokens, attention, prediction."""

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitascope.draw.look import caption, label, new_figure, plain, shorten
from vitascope.draw.palette import COLOURS, DIVERGING, SEQUENTIAL

MOST_CLASSES = 12


def draw_story(
    image: NDArray,
    grid: tuple[int, int],
    tokens: NDArray,
    attention: NDArray,
    answer: NDArray,
    text: str,
    classes: list[str] | None = None,
) -> Figure:
    """`image`: height × width (× 3); `tokens`: token × feature; `attention`: query × key; `answer`: probabilities."""
    figure, panels = new_figure(5, width=15.0, height=3.7)
    height, width = image.shape[:2]
    for panel in panels[:2]:
        panel.imshow(image, cmap="gray", interpolation="nearest")
    label(panels[0], "1  image", f"{width} pixels", f"{height} pixels")
    label(panels[1], "2  patches", f"grid of {grid[0]}×{grid[1]} patches", "")
    for row in range(1, grid[0]):
        panels[1].axhline(row * height / grid[0] - 0.5, color=COLOURS[4], linewidth=1.5)
    for column in range(1, grid[1]):
        panels[1].axvline(column * width / grid[1] - 0.5, color=COLOURS[4], linewidth=1.5)
    limit = float(np.abs(tokens).max())
    panels[2].imshow(tokens, cmap=DIVERGING, aspect="auto", vmin=-limit, vmax=limit, interpolation="nearest")
    label(panels[2], "3  tokens", f"{tokens.shape[1]} features", f"{tokens.shape[0]} tokens")
    top = max(
        float(attention.max()), 2 / len(attention)
    )  # at least twice uniform attention, so that noise does not look like structure
    shown = panels[3].imshow(attention, cmap=SEQUENTIAL, vmin=0, vmax=top, interpolation="nearest")
    figure.colorbar(shown, ax=panels[3], shrink=0.8)
    label(panels[3], "4  attention", "key token", "query token")
    shown_classes = np.sort(np.argsort(-answer)[:MOST_CLASSES])  # the most probable classes, in class order
    names = [shorten(classes[number], 14) if classes else str(number) for number in shown_classes]
    panels[4].barh(range(len(names)), answer[shown_classes] * 100, color=COLOURS[0])
    panels[4].invert_yaxis()
    panels[4].set_yticks(range(len(names)), [plain(name) for name in names])
    label(panels[4], "5  prediction", "probability in %", "class")
    for panel in panels[:4]:
        panel.set_xticks([])
        panel.set_yticks([])
    caption(figure, text)
    return figure
