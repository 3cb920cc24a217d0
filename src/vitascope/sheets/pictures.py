"""Figures of the sheets: position embedding, causal mask, attention map beside its image."""

import torch
from matplotlib.figure import Figure
from torch import Tensor

from vitascope.draw.explanation import lay_grid, lay_over, show
from vitascope.draw.heatmap import heatmap
from vitascope.draw.look import caption, new_figure
from vitascope.draw.palette import DIVERGING, SEQUENTIAL
from vitascope.errors import UserError
from vitascope.evaluation.choosing import some_own_images
from vitascope.evaluation.trained import load
from vitascope.explain.maps import attention_maps
from vitascope.model.masks import additive, causal_mask
from vitascope.model.positions import sinusoidal
from vitascope.run.directory import Run

BLOCKED = -10_000.0  # sheet C's number for "not allowed"; in the model it is -inf


def positions_figure(sizes: list[tuple[int, int]]) -> Figure:
    """Sheet D: position on the horizontal axis, feature on the vertical axis."""
    figure, panels = new_figure(len(sizes), width=5.2 * len(sizes), height=4.4)
    for panel, (positions, features) in zip(panels, sizes, strict=True):
        values = sinusoidal(positions, features).T.numpy()
        title = f"{positions} positions × {features} features"
        heatmap(figure, panel, values, title=title, x="position", y="feature", colours=DIVERGING, bar="value")
    caption(
        figure,
        "Sinusoidal positions: even features are sines, odd features are cosines. The frequency falls from pair to "
        "pair, so every position has a unique column. A longer sequence adds columns.",
    )
    return figure


def mask_numbers(tokens: int) -> Tensor:
    return additive(causal_mask(tokens), BLOCKED)


def mask_as_text(tokens: int) -> str:
    """The values of the mask, one line per query."""
    return "\n".join(" ".join(f"{value:>7,.0f}" for value in row) for row in mask_numbers(tokens).tolist())


def mask_figure(tokens: int) -> Figure:
    """Sheet C: the mask that is added to the scores so that no token attends to a later one."""
    figure, panels = new_figure(1, width=5.6, height=5.0)
    heatmap(
        figure,
        panels[0],
        mask_numbers(tokens).numpy(),
        title=f"Causal mask for {tokens} tokens",
        x="key",
        y="query",
        colours=SEQUENTIAL,
        bar="added to the score",
        numbers="{:,.0f}" if tokens <= 12 else None,
    )
    caption(
        figure,
        "0 keeps a score; −10,000 makes its softmax weight 0. Token 0 attends only to itself, the last token to all. "
        "Equivalent boolean mask: True where the value is 0.",
    )
    return figure


def map_figure(run: Run) -> tuple[Figure, Tensor]:
    """Sheet A: one image, the last block's attention map as a matrix, and the class token's row over the image. Return
    the figure and the map (query × key)."""
    model = load(run)
    found = some_own_images(run, model.facts, 1)
    if found is None:
        raise UserError(f"The images of {run.path} cannot be found.")
    stored, label_ = found[0].images, model.classes[int(found[0].labels[0])]
    with torch.inference_mode():
        images = model.facts.preparation(stored)
        maps = attention_maps(model, images)[-1][0].mean(0)
        answer = model.classes[int(model(images).argmax())]
    figure, panels = new_figure(3, width=13.0, height=4.4)
    picture = stored[0].permute(1, 2, 0).float().numpy() / 255
    grid = model.config.grid
    show(panels[0], picture)
    lay_grid(panels[0], picture, grid)
    panels[0].set_title(f"true: {label_}, predicted: {answer}", fontsize=11, fontweight="bold")
    text = "key (0 is the class token)"
    heatmap(figure, panels[1], maps.numpy(), title="attention map", x=text, y="query", colours=SEQUENTIAL, bar="weight")
    show(panels[2], 0.45 + 0.4 * picture)
    drawn = lay_over(panels[2], picture, maps[0, 1:].reshape(grid).numpy())
    panels[2].set_title("attention of the class token", fontsize=11, fontweight="bold")
    figure.colorbar(drawn, ax=panels[2], shrink=0.8, label="weight")
    caption(
        figure,
        "Every row of the matrix is one token's attention and sums to 1. The right panel shows the first row without "
        "the class token itself: one weight per patch.",
    )
    return figure, maps
