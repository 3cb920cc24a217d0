"""Figures of the sheets: position embedding, causal mask, attention map beside its image."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from vitascope.draw import DIVERGING, SEQUENTIAL
from vitascope.draw.explanation import draw_heat_map_with_image_details, draw_image, draw_patch_grid
from vitascope.draw.images import draw_heatmap
from vitascope.draw.style import add_caption, create_figure
from vitascope.errors import UserError
from vitascope.explain.maps import attention_maps
from vitascope.inference.open_model import open_model
from vitascope.model.positions import make_sinusoidal_table
from vitascope.model.scaled_dot_product import causal_mask, to_additive_mask
from vitascope.number_format import format_number
from vitascope.run.directory import Run
from vitascope.run.images import try_to_sample_run_images

BLOCKED_SCORE = -10_000.0  # sheet C's number for "not allowed"; in the model it is -inf


class AttentionMapFigure(NamedTuple):
    figure: Figure
    attention_map: Float[Tensor, "query key"]


def draw_sinusoidal_positions(position_and_feature_counts: list[tuple[int, int]]) -> Figure:
    """Draw sinusoidal position tables for sheet D: position on the horizontal axis, feature on the vertical axis."""
    figure, panels = create_figure(
        len(position_and_feature_counts), width=5.2 * len(position_and_feature_counts), height=4.4
    )
    for panel, (positions, features) in zip(panels, position_and_feature_counts, strict=True):
        values = make_sinusoidal_table(positions, features).T.numpy()
        title = f"{positions} positions × {features} features"
        draw_heatmap(
            figure,
            panel,
            values,
            title=title,
            x_label="position",
            y_label="feature",
            colormap=DIVERGING,
            colorbar_label="value",
        )
    add_caption(
        figure,
        "Sinusoidal positions: even features are sines, odd features are cosines. The frequency falls from pair to "
        "pair. Together the values identify each position.",
    )
    return figure


def make_additive_causal_mask(num_tokens: int) -> Tensor:
    return to_additive_mask(causal_mask(num_tokens), BLOCKED_SCORE)


def format_additive_causal_mask(num_tokens: int) -> str:
    """Format the values of the mask, one line per query."""
    return "\n".join(
        " ".join(format_number(value, ">7,.0f") for value in row)
        for row in make_additive_causal_mask(num_tokens).tolist()
    )


def draw_additive_causal_mask(num_tokens: int) -> Figure:
    """Draw sheet C's mask, which is added to the scores so that no token attends to a later one."""
    figure, panels = create_figure(1, width=5.6, height=5.0)
    draw_heatmap(
        figure,
        panels[0],
        make_additive_causal_mask(num_tokens).numpy(),
        title=f"Causal mask for {num_tokens} tokens",
        x_label="key",
        y_label="query",
        colormap=SEQUENTIAL,
        colorbar_label="added to the score",
        value_format=",.0f" if num_tokens <= 12 else None,
    )
    add_caption(
        figure,
        "0 keeps a score; −10,000 makes its softmax weight 0. Token 0 attends only to itself, the last token to all. "
        "Equivalent boolean mask: True where the value is 0.",
    )
    return figure


def draw_sample_attention_map(run: Run) -> AttentionMapFigure:
    """Draw for sheet A one image, the last block's attention map as a matrix, and the class token's row over the
    image."""
    model = open_model(run)
    samples = try_to_sample_run_images(run, model.info, 1)
    if samples is None:
        raise UserError(f"The images of {run.path} cannot be found.")
    stored_images, class_name = samples[0].images, model.classes[int(samples[0].labels[0])]
    with torch.inference_mode():
        images = model.info.preparation(stored_images)
        maps = attention_maps(model.model, images)[-1][0].mean(0)
        predicted = model.classes[int(model(images).argmax())]
    figure, panels = create_figure(3, width=13.0, height=4.4)
    picture = stored_images[0].permute(1, 2, 0).float().numpy() / 255
    grid = model.config.grid
    draw_image(panels[0], picture)
    draw_patch_grid(panels[0], picture, grid)
    panels[0].set_title(f"true: {class_name}, predicted: {predicted}", fontsize=11, fontweight="bold")
    text = "key (0 is the class token)"
    draw_heatmap(
        figure,
        panels[1],
        maps.numpy(),
        title="attention map",
        x_label=text,
        y_label="query",
        colormap=SEQUENTIAL,
        colorbar_label="weight",
    )
    drawn = draw_heat_map_with_image_details(panels[2], picture, maps[0, 1:].reshape(grid).numpy())
    panels[2].set_title("attention of the class token", fontsize=11, fontweight="bold")
    figure.colorbar(drawn, ax=panels[2], shrink=0.8, label="weight")
    add_caption(
        figure,
        "Every row of the matrix is one token's attention and sums to 1. The right panel shows the first row without "
        "the class token itself: one weight per patch.",
    )
    return AttentionMapFigure(figure, maps)
