"""`vitascope anatomy` and `draw`: show every stage from image to logits with its costs, and draw parts of a model."""

import json
from dataclasses import asdict, fields
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from vitascope.cli.console import (
    abbreviate_count,
    create_console,
    create_table,
    format_bytes,
    open_model_and_print_notes_to_stderr,
    reject_settings_without_effect,
)
from vitascope.errors import UserError, suggest_choice
from vitascope.model.anatomy import Stage, list_stages, list_stages_from_first_block
from vitascope.model.config import ModelConfig
from vitascope.recipe.reading import list_recipe_names, read_model_config, split_optional_recipe_args
from vitascope.recipe.schema import format_value_for_command_line

draw = typer.Typer(
    help="Draw position embeddings, masks, patches, and the steps from an image to its prediction.",
    no_args_is_help=True,
)
TABLE_NOTES = (
    "FLOPs count matrix products only, 2 per multiply-add. Activation memory is for float32; its total is the sum of\n"
    "all rows, not the peak memory. Only explicit attention stores attn.maps; the model uses fused attention,\n"
    "which does not. The total contains the row in both cases. "
    "Blocks count from 0, as in the state dict: blocks.0 is block 1 of explain."
)


def show_anatomy(
    recipe_and_settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [KEY=VALUE]…",
            help="A recipe, run or pretrained weights, then model settings. Default: ViT-Base (224×224 images).",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Batch size.")] = 1,
    tokens: Annotated[int | None, typer.Option(help="Start from this many tokens instead of an image.")] = None,
    all_blocks: Annotated[bool, typer.Option("--all", help="Show every block, not only the first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure time and memory of attention for several numbers of tokens.")
    ] = False,
    out: Annotated[Path, typer.Option(help="File for the figure of --measure.")] = Path("attention-cost.png"),
) -> None:
    """Show every stage from image to logits: shape, parameters, FLOPs and memory.

    Example: vitascope anatomy cifar10 model.depth=4
    """
    recipe, settings = split_optional_recipe_args(recipe_and_settings or [])
    config = read_any_model_config(recipe, settings)
    with_section = [setting for setting in settings if "." in setting.partition("=")[0]]
    reject_settings_without_effect(
        with_section, ("model.",), "on the anatomy. Use settings of the model, such as depth=4"
    )
    stages = _list_stages_from_image_or_tokens(config, batch, tokens)
    report: dict[str, object] = {"stages": [asdict(stage) | {"bytes": stage.bytes} for stage in stages]}
    if not as_json:
        changed = f" with {', '.join(settings)}" if settings else ""
        title = f"From {'image' if tokens is None else 'tokens'} to logits: {recipe or 'ViT-Base'}{changed}"
        print_stage_table(stages, config, title, all_blocks=all_blocks)
    if measure:
        from vitascope.cli.figures import measure_attention_cost_and_save_figure

        report["measured"] = measure_attention_cost_and_save_figure(config, out, quiet=as_json)
    if as_json:
        print(json.dumps(report, indent=1))


def read_any_model_config(model_ref: str | None, overrides: list[str]) -> ModelConfig:
    """Return the model configuration of a recipe, a run or pretrained weights, with settings changed."""
    if model_ref is None or model_ref in list_recipe_names() or Path(model_ref).suffix in (".yaml", ".yml"):
        return read_model_config(model_ref, overrides)
    if not (model_ref.startswith(("timm:", "hf:")) or Path(model_ref).exists()):
        return read_model_config(model_ref, overrides)  # raises an error that lists the recipes

    config = open_model_and_print_notes_to_stderr(model_ref).config
    settings = [
        f"{item.name}={format_value_for_command_line(getattr(config, item.name))}" for item in fields(ModelConfig)
    ]
    return read_model_config(None, [*settings, *overrides])


def _list_stages_from_image_or_tokens(config: ModelConfig, batch_size: int, num_tokens: int | None) -> list[Stage]:
    if num_tokens is None:
        return list_stages(config, batch_size=batch_size)
    return list_stages_from_first_block(config, num_tokens, batch_size=batch_size)


def print_stage_table(stages: list[Stage], config: ModelConfig, title: str, *, all_blocks: bool) -> None:
    rows = []
    for block, group in groupby(stages, key=_find_block_index):
        group = list(group)
        if block is None or block == 0 or all_blocks:
            rows += [_format_stage_row(stage) for stage in group]
        elif block == config.depth - 1:
            rows.append(_format_row_for_blocks_after_first(stages, config.depth))
    columns = ["stage", "axes", "shape", "parameters", "FLOPs", "activation memory"]
    rows.append(["total", "", "", *_format_total_parameters_flops_and_bytes(stages)])
    screen = create_console()
    if screen.width < 112:  # print the axes below the names so that numbers are not wrapped
        columns = ["stage", *columns[2:]]
        rows = [[f"{name}\n  {axes}" if axes else name, *rest] for name, axes, *rest in rows]
    screen.print(create_table(title, columns, rows, right_aligned=set(columns[-4:])))
    qk_norm = "\nThe stages query and key include QK-norm." if config.qk_norm else ""
    screen.print(TABLE_NOTES + qk_norm, style="dim", highlight=False)


def _find_block_index(stage: Stage) -> int | None:
    return int(stage.name.split(".")[1]) if stage.name.startswith("blocks.") else None


def _format_stage_row(stage: Stage) -> list[str]:
    shape = "×".join(map(str, stage.shape))
    costs = [
        f"{stage.parameters:,}" if stage.parameters else "",
        abbreviate_count(stage.flops) if stage.flops else "",
    ]
    return [stage.name, " × ".join(stage.axes), shape, *costs, format_bytes(stage.bytes)]


def _format_row_for_blocks_after_first(stages: list[Stage], depth: int) -> list[str]:
    other_blocks = [stage for stage in stages if _find_block_index(stage)]
    name = "blocks.1" if depth == 2 else f"blocks.1 … blocks.{depth - 1}"
    return [
        name,
        "same as blocks.0",
        f"{depth - 1} blocks" if depth > 2 else "1 block",
        *_format_total_parameters_flops_and_bytes(other_blocks),
    ]


def _format_total_parameters_flops_and_bytes(stages: list[Stage]) -> list[str]:
    parameters, flops = sum(stage.parameters for stage in stages), sum(stage.flops for stage in stages)
    return [
        f"{parameters:,}",
        abbreviate_count(flops),
        format_bytes(sum(stage.bytes for stage in stages)),
    ]


@draw.command("positions")
def draw_positions(
    kind: Annotated[str, typer.Option(help="sinusoidal (1-D), sincos2d or rotary.")] = "sinusoidal",
    length: Annotated[
        int | None,
        typer.Option(
            help="Number of positions (sinusoidal only). Default: two figures, 100×16 and 1000×160.",
            min=1,
        ),
    ] = None,
    width: Annotated[
        int | None, typer.Option(help="Number of features. Default: 16 (sincos2d and rotary: 64).", min=1)
    ] = None,
    grid: Annotated[
        str | None, typer.Option(help="Patch grid, rows×columns (sincos2d and rotary only). Default: 8x8.")
    ] = None,
    out: Annotated[Path, typer.Option(help="File for the figure. The extension sets the format.")] = Path(
        "positions.png"
    ),
) -> None:
    """Draw a position embedding as a heat map: positions along x, features along y (sheet D)."""
    from vitascope.cli.figures import draw_and_save_grid_positions, draw_and_save_sinusoidal_tables

    if kind == "sinusoidal" and grid is not None:
        raise UserError("--grid is only for --kind sincos2d and --kind rotary.")
    if kind in ("sincos2d", "rotary") and length is not None:
        raise UserError(f"--length is only for --kind sinusoidal. For {kind}, set --grid.")
    if kind == "sinusoidal":
        print(f"Figure: {draw_and_save_sinusoidal_tables(length, width, out)}")
    elif kind in ("sincos2d", "rotary"):
        position_type = cast(Literal["sincos2d", "rotary"], kind)
        print(f"Figure: {draw_and_save_grid_positions(position_type, _parse_grid(grid or '8x8'), width or 64, out)}")
    else:
        raise UserError(f"--kind {kind} is unknown. {suggest_choice(kind, ('sinusoidal', 'sincos2d', 'rotary'))}")


@draw.command("mask")
def draw_causal_mask(
    tokens: Annotated[int, typer.Option(help="Number of tokens.", min=1, max=1000)] = 5,
    out: Annotated[Path, typer.Option(help="File for the figure. The extension sets the format.")] = Path("mask.png"),
) -> None:
    """Print and draw the causal mask: 0 on and below the diagonal, −10,000 above it (sheet C)."""
    from vitascope.cli.figures import draw_and_save_causal_mask
    from vitascope.coursework.sheets.figures import format_additive_causal_mask

    print(format_additive_causal_mask(tokens) if tokens <= 12 else f"{tokens}×{tokens}: too large to print")
    print(f"Figure: {draw_and_save_causal_mask(tokens, out)}")


@draw.command("story")
def draw_forward_pass(
    recipe_and_settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] [KEY=VALUE]…", help="A recipe and model settings. Default: digits."),
    ] = None,
    run: Annotated[Path | None, typer.Option(help="A trained run. Default: random weights.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    out: Annotated[Path, typer.Option(help="File for the figure. The extension sets the format.")] = Path("story.png"),
) -> None:
    """Draw the steps from an image to its prediction: patches, tokens, attention, class probabilities."""
    from vitascope.cli.figures import draw_and_save_trained_forward_pass, draw_and_save_untrained_forward_pass

    if run is not None:
        print(f"Figure: {draw_and_save_trained_forward_pass(run, out)}")
        return
    recipe, settings = split_optional_recipe_args(recipe_and_settings or [])
    with_section = [setting for setting in settings if "." in setting.partition("=")[0]]
    config = read_model_config(recipe or "digits", settings)
    reject_settings_without_effect(with_section, ("model.",), "on this figure. Use settings of the model")
    print(f"Figure: {draw_and_save_untrained_forward_pass(config, seed, out)}")


@draw.command(name="shifted")
def draw_shifted_images(
    image: Annotated[Path | None, typer.Argument(metavar="IMAGE", help="An image file. Default: a digit.")] = None,
    patch_size: Annotated[
        int,
        typer.Option(
            help="The image is resized to 32×32. Patch size in pixels of that image. The shift is half of it."
        ),
    ] = 4,
    out: Annotated[Path, typer.Option(help="File for the figure. The extension sets the format.")] = Path(
        "shifted.png"
    ),
) -> None:
    """Draw the image and its four shifted copies for shifted patch tokenization (tokenizer=spt)."""
    from vitascope.cli.figures import draw_and_save_shifted_copies

    print(f"Figure: {draw_and_save_shifted_copies(image, patch_size, out)}")


@draw.command("fewer")
def draw_merged_and_dropped_patches(
    model: Annotated[str, typer.Argument(metavar="RUN", help="A run or pretrained weights.")],
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="An image file.")],
    tokens: Annotated[int, typer.Option(help="Number of tokens to remove in each block.", min=1)] = 8,
    out: Annotated[Path, typer.Option(help="File for the figure. The extension sets the format.")] = Path("fewer.png"),
) -> None:
    """Draw which patches are merged or dropped at inference, with the resulting predictions."""
    from vitascope.cli.figures import draw_and_save_token_reduction

    print(f"Figure: {draw_and_save_token_reduction(model, image, tokens, out)}")


def _parse_grid(text: str) -> tuple[int, int]:
    sides = text.lower().replace("×", "x").split("x")
    if len(sides) != 2 or not all(side.isascii() and side.isdigit() and int(side) > 0 for side in sides):
        raise UserError(f"--grid {text} is not a grid. Write rows×columns, such as 8x8.")
    return int(sides[0]), int(sides[1])
