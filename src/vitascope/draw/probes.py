"""Draw statistics of a model: heads by depth, similarity of blocks, positions, filters, features."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitascope.draw import COLOURS, DIVERGING, SEQUENTIAL
from vitascope.draw.images import draw_heatmap
from vitascope.draw.style import add_caption, create_figure, escape_mathtext, set_integer_ticks, set_labels
from vitascope.number_format import format_percent

MAX_STATE_TICKS = 9


def draw_block_statistics(
    attention_distance: NDArray,
    attention_entropy: NDArray,
    token_norms: NDArray,
    block_similarity: NDArray,
    logit_lens_agreement: NDArray,
    num_tokens: int,
    caption_text: str,
) -> Figure:
    """Draw one panel per statistic, over the blocks. State 0 is the input of block 1, its tick is "input".

    Distance and entropy: block × head. Norms: state × median, 95th percentile, maximum.
    Similarity: state × state. Agreement of the logit lens with the final prediction: state."""
    figure, panels = create_figure(3, width=12.0, height=7.4, num_rows=2)
    panels[5].axis("off")
    _draw_head_values(panels[0], attention_distance)
    set_labels(panels[0], "attention distance", "block", "mean distance in patches")
    _draw_head_values(panels[1], attention_entropy)
    set_labels(panels[1], "attention entropy", "block", "entropy in nats")
    panels[1].axhline(np.log(num_tokens), color="#999999", linestyle=":", label="uniform attention")
    for panel in panels[:2]:
        panel.legend(fontsize=8, loc="upper right")
    for column, (name, style) in enumerate((("median", "-"), ("95th percentile", "--"), ("maximum", ":"))):
        panels[2].plot(range(len(token_norms)), token_norms[:, column], style, color=COLOURS[0], label=name)
    set_labels(panels[2], "token norms", "after block", "L2 norm")
    panels[2].legend(fontsize=8)
    panels[2].set_ylim(0)
    labels = {"title": "similarity between blocks", "x_label": "after block", "y_label": "after block"}
    colorbar_label = "linear CKA (1: same representation)"
    draw_heatmap(figure, panels[3], block_similarity, colormap=SEQUENTIAL, colorbar_label=colorbar_label, **labels)
    panels[4].plot(range(len(logit_lens_agreement)), 100 * logit_lens_agreement, "o-", color=COLOURS[0])
    set_labels(panels[4], "early predictions (logit lens)", "after block", "agreement with final prediction in %")
    panels[4].set_ylim(0, 102)
    for panel in panels[:2]:
        set_integer_ticks(panel.xaxis)
    for axis in (panels[2].xaxis, panels[3].xaxis, panels[3].yaxis, panels[4].xaxis):
        _set_state_ticks(axis, len(token_norms))
    add_caption(figure, caption_text)
    return figure


def _set_state_ticks(axis: Axis, num_states: int) -> None:
    """Label the state before block 1 "input" and the others by their block: 0 would look like blocks.0, the first."""
    step = -(-num_states // MAX_STATE_TICKS)
    states = range(0, num_states, step)
    axis.set_ticks(states, labels=["input", *map(str, states[1:])])


def _draw_head_values(panel: Axes, values: NDArray) -> None:
    """Draw values (block × head) as dots, and their mean over the heads as a line."""
    blocks = np.arange(1, len(values) + 1)
    for head in range(values.shape[1]):
        panel.plot(blocks, values[:, head], "o", color=COLOURS[0], alpha=0.6)
    panel.plot(blocks, values.mean(1), "-", color=COLOURS[1], label="mean over heads")
    panel.set_ylim(0, 1.3 * float(values.max()))


def draw_position_similarity(similarity: NDArray, num_rows: int, num_columns: int, caption_text: str) -> Figure:
    """Draw a grid of grids: each small grid shows one patch's position similarity to all patches."""
    figure = Figure(figsize=(0.72 * num_columns + 1.6, 0.72 * num_rows + 0.9), layout="constrained", dpi=150)
    panels = figure.subplots(num_rows, num_columns, squeeze=False)
    grids, low = similarity.reshape(num_rows, num_columns, num_rows, num_columns), float(similarity.min())
    scale = {"cmap": DIVERGING, "vmin": -1, "vmax": 1} if low < 0 else {"cmap": SEQUENTIAL, "vmin": low, "vmax": 1}
    drawn = None
    for row in range(num_rows):
        for column in range(num_columns):
            panel = panels[row][column]
            drawn = panel.imshow(grids[row, column], interpolation="nearest", **scale)
            panel.set_xticks([])
            panel.set_yticks([])
    if drawn is not None:
        figure.colorbar(drawn, ax=panels, shrink=0.6, label="cosine similarity")
    add_caption(figure, caption_text)
    return figure


def draw_filter_components(components: NDArray, variance_fractions: NDArray, caption_text: str) -> Figure:
    """Draw each component (height × width × 1 or 3), scaled around grey, with its fraction of the variance."""
    columns = min(7, len(components))
    rows = -(-len(components) // columns)
    figure = Figure(figsize=(1.15 * columns, 1.3 * rows + 0.8), layout="constrained", dpi=150)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel in panels[len(components) :]:
        panel.axis("off")
    for panel, component, fraction in zip(panels, components, variance_fractions, strict=False):
        scaled = 0.5 + component / (2 * max(float(np.abs(component).max()), 1e-12))
        panel.imshow(
            scaled[..., 0] if scaled.shape[-1] == 1 else scaled, cmap="gray", vmin=0, vmax=1, interpolation="nearest"
        )
        panel.set_title(format_percent(fraction), fontsize=8)
        panel.set_xticks([])
        panel.set_yticks([])
    add_caption(figure, caption_text)
    return figure


def draw_tsne_points(points: NDArray, labels: list[int], class_names: list[str], caption_text: str) -> Figure:
    """Draw one point per image; colour and marker show the class."""
    figure, panels = create_figure(1, width=7.5, height=6.0)
    markers = "os^vDPX*<>"
    for index, name in enumerate(class_names):
        class_points = points[np.array(labels) == index]
        if len(class_points):
            colour, marker = COLOURS[index % len(COLOURS)], markers[index % len(markers)]
            panels[0].scatter(
                class_points[:, 0],
                class_points[:, 1],
                s=14,
                color=colour,
                marker=marker,
                label=escape_mathtext(name),
                alpha=0.7,
            )
    panels[0].set_xticks([])
    panels[0].set_yticks([])
    set_labels(panels[0], "t-SNE of pooled features", "", "")
    panels[0].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), title="class")
    add_caption(figure, caption_text)
    return figure
