"""Draw the figures of `vitascope draw`, and measure and draw the cost of attention for `anatomy --measure`."""

from dataclasses import asdict
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitascope.cli.console import create_console, create_table, format_bytes, format_duration
from vitascope.coursework.sheets.figures import draw_additive_causal_mask, draw_sinusoidal_positions
from vitascope.data.sources.arrays import open_builtin_digits
from vitascope.draw import DIVERGING
from vitascope.draw.explanation import draw_forward_pass, draw_patch_borders
from vitascope.draw.images import (
    MIN_FONT_SIZE,
    choose_group_colours,
    compute_group_number_font_size,
    draw_group_numbers_on_patches,
    draw_heatmap,
    draw_image_tiles,
    hatch_patches,
    outline_patch_groups,
)
from vitascope.draw.style import add_caption, create_figure, save_figure
from vitascope.errors import UserError, format_count
from vitascope.inference.classifier import Classifier
from vitascope.inference.open_model import open_model
from vitascope.inference.prediction import check_one_or_three_channels, load_or_convert_input_images
from vitascope.model.attention_cost import (
    IMPLEMENTATIONS,
    LABELS,
    THEORY,
    AttentionCost,
    choose_token_counts_to_measure,
    describe_fitted_token_range,
    draw_attention_costs,
    fit_exponents_by_implementation,
    measure_attention_costs,
)
from vitascope.model.block import Block
from vitascope.model.config import ModelConfig
from vitascope.model.explicit_blocks import compute_final_token_index_per_patch
from vitascope.model.patches import concat_shifted_copies
from vitascope.model.positions import make_rotary_table, make_sincos2d_table
from vitascope.model.vit import VisionTransformer
from vitascope.number_format import format_percent
from vitascope.run.directory import open_run_or_newest
from vitascope.run.images import try_to_sample_run_images


def draw_and_save_sinusoidal_tables(num_positions: int | None, num_features: int | None, figure_path: Path) -> Path:
    """Draw one table of this size. Without a size, draw the two tables of sheet D, 100 × 16 and 1000 × 160."""
    has_size = num_positions is not None or num_features is not None
    sizes = [(num_positions or 100, num_features or 16)] if has_size else [(100, 16), (1000, 160)]
    return save_figure(draw_sinusoidal_positions(sizes), figure_path)


def draw_and_save_grid_positions(
    position_type: Literal["sincos2d", "rotary"], grid_shape: tuple[int, int], num_features: int, figure_path: Path
) -> Path:
    """Draw the 2-D positions of a patch grid, row by row."""
    if num_features < 4 or num_features % 4:
        raise UserError(
            f"--width {num_features} must be a multiple of 4: rows and columns each need sines and cosines."
        )
    figure, panels = create_figure(1, width=7.5, height=4.6)
    if position_type == "rotary":
        cosines = make_rotary_table(grid_shape, num_features, base=100.0)[0]
        values, colorbar_label = cosines.repeat_interleave(2, dim=1).T.numpy(), "cosine of the angle"
        text = (
            "Rotary positions: queries and keys are rotated by an angle. The colour shows the cosine of the rotation "
            "angle. The first half of the features encodes the row, the second half the column."
        )
    else:
        values, colorbar_label = make_sincos2d_table(grid_shape, num_features).T.numpy(), "value"
        text = "2-D sin-cos positions: the first half of the features encodes the column, the second half the row."
    title = f"{position_type}, grid of {grid_shape[0]}×{grid_shape[1]} patches, {num_features} features"
    draw_heatmap(
        figure,
        panels[0],
        values,
        title=title,
        x_label="patch index (row by row)",
        y_label="feature",
        colormap=DIVERGING,
        colorbar_label=colorbar_label,
    )
    add_caption(figure, text)
    return save_figure(figure, figure_path)


def draw_and_save_causal_mask(num_tokens: int, figure_path: Path) -> Path:
    return save_figure(draw_additive_causal_mask(num_tokens), figure_path)


def draw_and_save_untrained_forward_pass(config: ModelConfig, seed: int, figure_path: Path) -> Path:
    """Draw the steps from a handwritten digit to its prediction, with random weights."""
    torch.manual_seed(seed)
    _check_image_classifier(config)
    digit = F.interpolate(open_builtin_digits().load_split("train").images[:1].float(), size=config.image_shape).byte()
    raw_image = digit.expand(1, config.in_chans, -1, -1)
    note = "The weights are random, so all classes are about equally likely."
    return _draw_and_save_model_forward_pass(
        VisionTransformer(config).eval(), raw_image, raw_image.float() / 255, "A digit", note, None, figure_path
    )


def draw_and_save_trained_forward_pass(run_path: Path, figure_path: Path) -> Path:
    """Draw the steps from one of a run's images to its prediction, with the trained weights."""
    model = open_model(open_run_or_newest(run_path))
    _check_image_classifier(model.config)
    sample = try_to_sample_run_images(model.run, model.info, 1)
    if sample is None:
        raise UserError(
            f"The images of {run_path} are not available. See data.name and data.root in {run_path}/recipe.yaml."
        )
    raw_image, class_name = sample[0].images, model.classes[int(sample[0].labels[0])]
    note = f"The model was trained on {Path(model.run.recipe.data.name).name}."
    description = f"An image of class {class_name}"
    return _draw_and_save_model_forward_pass(
        model.vision_transformer,
        raw_image,
        model.preprocessing(raw_image),
        description,
        note,
        model.classes,
        figure_path,
    )


def _check_image_classifier(config: ModelConfig) -> None:
    if config.in_chans not in (1, 3) or not config.num_classes:
        raise UserError("draw story needs an image model with classes: in_chans=1 or 3, and num_classes of at least 1.")


def _draw_and_save_model_forward_pass(
    model: VisionTransformer,
    raw_image: Tensor,
    model_input: Tensor,
    image_description: str,
    weights_note: str,
    class_names: list[str] | None,
    figure_path: Path,
) -> Path:
    config = model.config
    with torch.inference_mode():
        tokens = model.embed(model_input)
        block = cast(Block, model.blocks[0])
        maps = block.attn.maps(block.norm1(tokens), rotation=model.rotation)
        probabilities = model(model_input).softmax(-1)
    first = " (row 0 is the class token)" if config.class_token else ""
    text = (
        f"{image_description} is cut into patches. Each patch becomes a token{first}. The attention map shows the "
        "first head of the first block: how much each token attends to every token. The output is a probability per "
        f"class. {weights_note}"
    )
    image = raw_image[0].permute(1, 2, 0).squeeze(-1).numpy()
    stages = (tokens[0].numpy(), maps[0, 0].numpy(), probabilities[0].numpy())
    return save_figure(draw_forward_pass(image, config.grid, *stages, text, class_names), figure_path)


SHIFT_TITLES = ("original", "shifted down, right", "shifted down, left", "shifted up, right", "shifted up, left")
TINT = 0.55  # weight of the group's colour
IMAGE_SIZE = 32  # side of the drawn image in pixels
REDUCTION_TILE_WIDTH = 2.7  # inches


def draw_and_save_shifted_copies(image_path: Path | None, patch_size: int, figure_path: Path) -> Path:
    """Draw the five images whose patches tokenizer=spt concatenates."""
    if not 2 <= patch_size <= IMAGE_SIZE // 2 or IMAGE_SIZE % patch_size:
        raise UserError(
            f"--patch-size {patch_size}: choose 2, 4, 8 or 16, which divide the image of {IMAGE_SIZE}×{IMAGE_SIZE} "
            "pixels."
        )
    if image_path is None:
        raw_image = F.interpolate(
            open_builtin_digits().load_split("train").images[:1].float(), size=(IMAGE_SIZE, IMAGE_SIZE)
        )
    else:
        raw_image = load_or_convert_input_images(image_path, (3, IMAGE_SIZE, IMAGE_SIZE)).images.float()
    copies = concat_shifted_copies(raw_image / 255, patch_size)[0].unflatten(0, (5, -1))
    text = (
        f"The image is {'enlarged' if image_path is None else 'resized'} to {IMAGE_SIZE}×{IMAGE_SIZE} pixels. "
        f"Shifted patch tokenization: each patch of {patch_size}×{patch_size} pixels is cut from all five images at "
        f"the same position. The five patches are concatenated into one token, which so covers {patch_size // 2} more "
        "pixels on each side. Pixels outside the image are black (0)."
    )
    figure = draw_image_tiles([_move_channels_last(copy) for copy in copies], SHIFT_TITLES, text, num_columns=5)
    for panel in figure.axes:
        draw_patch_borders(panel, (IMAGE_SIZE // patch_size, IMAGE_SIZE // patch_size), (patch_size, patch_size))
    return save_figure(figure, figure_path)


def draw_and_save_token_reduction(model_ref: str, image_path: Path, tokens_per_block: int, figure_path: Path) -> Path:
    """Draw the image, its merged patches as coloured and numbered groups, and its dropped patches hatched."""
    model = open_model(model_ref, merge_tokens=0, drop_tokens=0)
    check_one_or_three_channels(model.stored_shape)
    raw_image = load_or_convert_input_images(image_path, model.stored_shape).images[:1]
    pixels, patch_size = model.preprocessing.scale_and_resize(raw_image)[0], model.config.patch_shape
    titles = [_predict_and_format_title(model, raw_image, f"all {model.config.num_patches} patches")]
    group_maps: list[NDArray] = []
    for setting, participle in (("merge_tokens", "merged"), ("drop_tokens", "dropped")):
        reduced = model.with_token_reduction(**{setting: tokens_per_block})
        groups = compute_final_token_index_per_patch(reduced.vision_transformer, model.preprocessing(raw_image))[0]
        group_maps.append(groups.unflatten(0, model.config.grid).numpy())
        num_left = len(set(groups[groups >= 0].tolist()))
        title = f"{participle}: {num_left} of {model.config.num_patches} tokens remain"
        titles.append(_predict_and_format_title(reduced, raw_image, title))
    merged, dropped = group_maps
    image, font_size = _move_channels_last(pixels), compute_group_number_font_size(merged, REDUCTION_TILE_WIDTH)
    number_note = "" if font_size >= MIN_FONT_SIZE else " (only the first patch of each token has its number)"
    is_limited = len(np.unique(merged)) > model.config.num_patches - model.config.depth * tokens_per_block
    halving_note = "In one block, merging can at most halve the patch tokens. " if is_limited else ""
    text = (
        f"Each of the {model.config.depth} blocks removes up to {format_count(tokens_per_block, 'patch token')}. "
        f"{halving_note}Middle: patches with the same number and colour "
        f"were merged into one token{number_note}. Patches without a colour were not merged. Right: hatched "
        "patches were dropped."
    )
    figure = draw_image_tiles(
        [image, _tint_patch_groups(image, merged, patch_size), image],
        titles,
        text,
        num_columns=3,
        tile_width=REDUCTION_TILE_WIDTH,
    )
    outline_patch_groups(figure.axes[1], merged, patch_size)
    draw_group_numbers_on_patches(figure.axes[1], merged, patch_size, font_size)
    hatch_patches(figure.axes[2], dropped < 0, patch_size)
    return save_figure(figure, figure_path)


def _predict_and_format_title(model: Classifier, raw_image: Tensor, first_line: str) -> str:
    prediction = model.predict(raw_image, temperature=1)[0]  # with fewer tokens there is none
    return f"{first_line}\nprediction: {prediction.label} ({format_percent(prediction.probability, 0)})"


def _tint_patch_groups(image: NDArray, group_map: NDArray, patch_size: tuple[int, int]) -> NDArray:
    """Tint each group of several patches in its own colour. `group_map`: group of each patch, row × column."""
    groups, sizes = np.unique(group_map, return_counts=True)
    colours = choose_group_colours(int((sizes > 1).sum()))
    tinted = np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image.copy()
    pixel_groups = group_map.repeat(patch_size[0], 0).repeat(patch_size[1], 1)
    for group, colour in zip(groups[sizes > 1], colours, strict=True):
        tinted[pixel_groups == group] = (1 - TINT) * tinted[pixel_groups == group] + TINT * colour
    return tinted


def _move_channels_last(image: Tensor) -> NDArray:
    return image.clamp(0, 1).permute(1, 2, 0).numpy()


def measure_attention_cost_and_save_figure(config: ModelConfig, figure_path: Path, *, quiet: bool) -> dict[str, object]:
    """Measure and draw the cost, print it unless `quiet`, and return the values for --json."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    counts = choose_token_counts_to_measure(config.num_heads, device)
    costs = measure_attention_costs(config.num_heads, config.head_width, counts, device)
    fits = fit_exponents_by_implementation(costs)
    model_description = f"{format_count(config.num_heads, 'head')} of width {config.head_width}"
    figure = draw_attention_costs(costs, model_description)
    save_figure(figure, figure_path)
    if not quiet:
        _print_attention_cost_table(costs, fits, model_description)
        print(f"Figure: {figure_path}")
    return {"costs": [asdict(cost) for cost in costs], "exponents": fits, "device": device, "picture": str(figure_path)}


def _print_attention_cost_table(
    costs: list[AttentionCost], fitted_exponents: dict[str, dict[str, float]], model_description: str
) -> None:
    columns = ["tokens", *[f"{LABELS[name]}: {cost}" for name in IMPLEMENTATIONS for cost in ("time", "memory")]]
    rows = []
    for tokens in sorted({cost.tokens for cost in costs}):
        cells = {cost.way: _format_time_and_memory_cells(cost) for cost in costs if cost.tokens == tokens}
        rows.append([str(tokens), *[text for name in IMPLEMENTATIONS for text in cells[name]]])
    fitted = [
        f"tokens^{fitted_exponents[name][field]:.2f}" for name in IMPLEMENTATIONS for field in ("seconds", "peak_bytes")
    ]
    rows.append(["fitted growth", *fitted])
    create_console().print(
        create_table(
            f"Measured cost of attention on this machine ({model_description}, forward pass, batch size 1)",
            columns,
            rows,
            right_aligned=set(columns),
        )
    )
    print(f"Fitted growth: {describe_fitted_token_range(costs)} {THEORY}")


def _format_time_and_memory_cells(cost: AttentionCost) -> tuple[str, str]:
    return format_duration(cost.seconds), format_bytes(cost.peak_bytes)
