"""Figures of explanations: maps over images, marked patches, deletion and insertion curves, heads, stages of a pass."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from numpy.typing import NDArray

from vitascope.draw import COLOURS, DIVERGING, SEQUENTIAL
from vitascope.draw.style import add_caption, create_figure, escape_mathtext, set_labels, shorten_name
from vitascope.number_format import format_number

MAX_DETAIL_ALPHA = 0.2  # of the image's strongest details, drawn in white and black over a map
LINE_COLOURS = (*COLOURS, "#000000")


def draw_heat_maps_over_image(
    image: NDArray, heat_maps: dict[str, NDArray], image_title: str, caption_text: str, num_columns: int = 4
) -> Figure:
    """Draw `image` (height × width × 1 or 3, 0 to 1) and heat maps (row × column); `image_title` is above the image.

    A sentence on the image's details in the maps is added to the caption."""
    rows = -(-(len(heat_maps) + 1) // num_columns)
    figure = Figure(figsize=(3.0 * num_columns, 2.9 * rows + 0.6), layout="constrained", dpi=150)
    panels = figure.subplots(rows, num_columns, squeeze=False).flatten()
    for panel in panels:
        panel.axis("off")
    draw_image(panels[0], image)
    draw_patch_grid(panels[0], image, next(iter(heat_maps.values())).shape)
    panels[0].set_title(escape_mathtext(image_title), fontsize=9)
    for panel, (name, heat) in zip(panels[1:], heat_maps.items(), strict=False):
        drawn = draw_heat_map_with_image_details(panel, image, heat)
        panel.set_title(escape_mathtext(name), fontsize=9)
        figure.colorbar(drawn, ax=panel, shrink=0.8, format=lambda value, _: format_number(value, ".2g"))
    add_caption(figure, f"{caption_text} Light and dark details inside a patch are the image, not the map.")
    return figure


def draw_image(panel: Axes, image: NDArray) -> None:
    pixels = image if image.shape[-1] == 3 else image[..., 0]
    panel.imshow(pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest", extent=_compute_image_extent(image))


def draw_heat_map_with_image_details(
    panel: Axes, image: NDArray, heat_map: NDArray, max_value: float | None = None
) -> AxesImage:
    """Draw a map in the colours of its colour bar, and over it the image's details inside each patch.

    The details are relative to the patch's mean brightness: patches with equal values look alike in light and dark
    parts of the image, and a patch without details has exactly its colour in the bar."""
    drawn = draw_patch_heat_map(panel, image, heat_map, max_value)
    panel.imshow(
        _make_rgba_detail_layer(image, heat_map.shape), interpolation="nearest", extent=_compute_image_extent(image)
    )
    return drawn


def _make_rgba_detail_layer(image: NDArray, grid_shape: tuple[int, ...]) -> NDArray:
    """Return the brightness relative to the patch's mean as RGBA: white where lighter, black where darker."""
    brightness = image.mean(-1)
    patch_rows, patch_columns = (
        np.arange(pixels) * patches // pixels for pixels, patches in zip(brightness.shape, grid_shape, strict=True)
    )
    patch_indices = patch_rows[:, None] * grid_shape[1] + patch_columns
    sums = np.bincount(patch_indices.ravel(), weights=brightness.ravel())
    details = brightness - (sums / np.bincount(patch_indices.ravel()))[patch_indices]
    strongest = max(float(np.quantile(np.abs(details), 0.99)), 0.05)  # at least 0.05: no noise from a uniform image
    layer = np.zeros((*brightness.shape, 4))
    layer[..., :3] = (details > 0)[..., None]
    layer[..., 3] = MAX_DETAIL_ALPHA * np.minimum(np.abs(details) / strongest, 1)
    return layer


def draw_patch_heat_map(panel: Axes, image: NDArray, heat_map: NDArray, max_value: float | None = None) -> AxesImage:
    """Draw a map of the image's size, one colour per patch: signed maps from blue to red, others from 0 up."""
    if heat_map.min() < 0:
        limit = max_value or max(float(np.abs(heat_map).max()), 1e-12)
        scale = {"cmap": DIVERGING, "vmin": -limit, "vmax": limit}
    else:
        scale = {"cmap": SEQUENTIAL, "vmin": 0.0, "vmax": max_value or max(float(heat_map.max()), 1e-12)}
    return panel.imshow(heat_map, interpolation="nearest", extent=_compute_image_extent(image), **scale)


def draw_patch_grid(panel: Axes, image: NDArray, grid_shape: tuple[int, ...]) -> None:
    height, width = image.shape[:2]
    for row in range(1, grid_shape[0]):
        panel.axhline(row * height / grid_shape[0], color=COLOURS[4], linewidth=0.6)
    for column in range(1, grid_shape[1]):
        panel.axvline(column * width / grid_shape[1], color=COLOURS[4], linewidth=0.6)


def outline_patch(panel: Axes, image: NDArray, grid_shape: tuple[int, int], patch_position: tuple[int, int]) -> None:
    """Draw a white frame with a black edge, visible on any colour."""
    height, width = image.shape[0] / grid_shape[0], image.shape[1] / grid_shape[1]
    left, top = patch_position[1] * width, patch_position[0] * height
    x, y = [left, left + width, left + width, left, left], [top, top, top + height, top + height, top]
    panel.plot(x, y, color="black", linewidth=3)
    panel.plot(x, y, color="white", linewidth=1.2)


def _compute_image_extent(image: NDArray) -> tuple[float, float, float, float]:
    return (0.0, image.shape[1], image.shape[0], 0.0)


def draw_deletion_and_insertion(
    deletion_curves: dict[str, NDArray],
    insertion_curves: dict[str, NDArray],
    colour_order: list[str],
    caption_text: str,
) -> Figure:
    """Draw the mean probability after each step. `colour_order` fixes the colours; a random order is grey."""
    figure, panels = create_figure(2, width=11.0, height=6.0)
    titles = ("deletion (a lower curve is better)", "insertion (a higher curve is better)")
    highest = 1.05 * max(float(curve.max()) for curve in (*deletion_curves.values(), *insertion_curves.values()))
    for panel, curves, title, change in zip(
        panels, (deletion_curves, insertion_curves), titles, ("made grey", "restored"), strict=True
    ):
        for name, curve in sorted(
            curves.items(), key=lambda item: _compute_area_under_curve(item[1]), reverse=curves is insertion_curves
        ):
            colour = LINE_COLOURS[colour_order.index(name) % len(LINE_COLOURS)] if name in colour_order else "#999999"
            style = "-" if name in colour_order else ":"
            steps = np.linspace(0, 100, len(curve))
            panel.plot(
                steps, curve, color=colour, linestyle=style, label=f"{name}  {_compute_area_under_curve(curve):.3f}"
            )
        panel.set_ylim(0, highest)
        panel.legend(  # below the panel: curves can be anywhere inside
            loc="upper center",
            bbox_to_anchor=(0.5, -0.16),
            ncols=2,
            fontsize=8,
            title="method, AUC (area under the curve)",
            title_fontsize=8,
        )
        set_labels(panel, title, f"patches {change}, in %", "probability of the explained class")
    add_caption(figure, caption_text)
    return figure


def _compute_area_under_curve(curve: NDArray) -> float:
    return float((curve.sum() - (curve[0] + curve[-1]) / 2) / (len(curve) - 1))


def draw_attention_heads(
    image: NDArray,
    attention_maps: NDArray,
    block_and_head_names: tuple[list[str], list[str]],
    query_patch: tuple[int, int] | None,
    image_title: str,
    caption_text: str,
) -> Figure:
    """Draw the attention maps (block × head × row × column) beside the image; `image_title` is above the image.

    `query_patch`: row and column; None is the token that the classifier reads. A block's scale ends at its largest
    value, but at least at twice the value of uniform attention."""
    blocks, heads, rows, columns = attention_maps.shape
    figure = Figure(figsize=(1.25 * (heads + 2) + 1.0, 1.08 * blocks + 1.0), layout="constrained", dpi=150)
    left, right = figure.subfigures(1, 2, width_ratios=[2, heads + 0.8]).flat  # pyright: ignore[reportAttributeAccessIssue]
    _draw_image_with_query(left.subplots(1, 1), image, (rows, columns), query_patch, image_title)
    panels = right.subplots(blocks, heads, squeeze=False)
    for block in range(blocks):
        top = max(float(attention_maps[block].max()), 2 / (rows * columns))
        for head in range(heads):
            panel = panels[block][head]
            panel.set_xticks([])
            panel.set_yticks([])
            draw_patch_heat_map(panel, image, attention_maps[block, head], top)
            if block == 0:
                panel.set_title(escape_mathtext(block_and_head_names[1][head]), fontsize=8)
            if head == 0:
                panel.set_ylabel(escape_mathtext(block_and_head_names[0][block]), fontsize=8)
        panels[block][-1].annotate(
            f"max {top:.3f}", (1.08, 0.5), xycoords="axes fraction", fontsize=8, va="center", annotation_clip=False
        )
    bar = right.colorbar(ScalarMappable(cmap=SEQUENTIAL), ax=panels, shrink=0.6, pad=0.09, aspect=40)
    bar.set_ticks([0, 1], labels=["0", "row\nmaximum"], fontsize=8)
    add_caption(figure, caption_text)
    return figure


def _draw_image_with_query(
    panel: Axes, image: NDArray, grid_shape: tuple[int, int], query_patch: tuple[int, int] | None, image_title: str
) -> None:
    panel.axis("off")
    panel.set_anchor("N")
    panel.set_title(escape_mathtext(image_title), fontsize=8)
    draw_image(panel, image)
    draw_patch_grid(panel, image, grid_shape)
    if query_patch is not None:
        outline_patch(panel, image, grid_shape, query_patch)


MAX_CLASSES = 12


def draw_forward_pass(
    image: NDArray,
    grid_shape: tuple[int, int],
    tokens: NDArray,
    attention_map: NDArray,
    probabilities: NDArray,
    caption_text: str,
    class_names: list[str] | None = None,
) -> Figure:
    """Draw five panels: image (height × width (× 3)), patches, tokens (token × feature), attention map (query × key)
    and probabilities."""
    figure, panels = create_figure(5, width=15.0, height=3.7)
    height, width = image.shape[:2]
    for panel in panels[:2]:
        panel.imshow(image, cmap="gray", interpolation="nearest")
    set_labels(panels[0], "1  image", f"{width} pixels", f"{height} pixels")
    set_labels(panels[1], "2  patches", f"grid of {grid_shape[0]}×{grid_shape[1]} patches", "")
    draw_patch_borders(panels[1], grid_shape, (height / grid_shape[0], width / grid_shape[1]), line_width=1.5)
    limit = float(np.abs(tokens).max())
    token_map = panels[2].imshow(
        tokens, cmap=DIVERGING, aspect="auto", vmin=-limit, vmax=limit, interpolation="nearest"
    )
    figure.colorbar(token_map, ax=panels[2], shrink=0.8)
    set_labels(panels[2], "3  tokens", f"{tokens.shape[1]} features", f"{tokens.shape[0]} tokens")
    # The scale ends at least at twice uniform attention, so that noise does not look like structure.
    max_attention = max(float(attention_map.max()), 2 / len(attention_map))
    heat_map = panels[3].imshow(attention_map, cmap=SEQUENTIAL, vmin=0, vmax=max_attention, interpolation="nearest")
    figure.colorbar(heat_map, ax=panels[3], shrink=0.8)
    set_labels(panels[3], "4  attention", "key token", "query token")
    _draw_probabilities(panels[4], probabilities, class_names)
    for panel in panels[:4]:
        panel.set_xticks([])
        panel.set_yticks([])
    add_caption(figure, caption_text)
    return figure


def _draw_probabilities(panel: Axes, probabilities: NDArray, class_names: list[str] | None) -> None:
    """Draw a bar for each of the most probable classes, in class order."""
    indices = np.sort(np.argsort(-probabilities)[:MAX_CLASSES])
    names = [shorten_name(class_names[index], 14) if class_names else str(index) for index in indices]
    panel.barh(range(len(names)), probabilities[indices] * 100, color=COLOURS[0])
    panel.invert_yaxis()
    panel.set_yticks(range(len(names)), [escape_mathtext(name) for name in names])
    set_labels(panel, "5  prediction", "probability in %", "class")


def draw_patch_borders(
    panel: Axes, grid_shape: tuple[int, int], patch_size: tuple[float, float], line_width: float = 0.8
) -> None:
    """Draw lines between all patches. `patch_size`: rows, columns in pixels."""
    for row in range(1, grid_shape[0]):
        panel.axhline(row * patch_size[0] - 0.5, color=COLOURS[4], linewidth=line_width)
    for column in range(1, grid_shape[1]):
        panel.axvline(column * patch_size[1] - 0.5, color=COLOURS[4], linewidth=line_width)
