"""`vitascope draw`: draw parts of a model."""

from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from vitascope.errors import UserError, suggest_choice

app = typer.Typer(
    help="Draw position embeddings, masks, patches, and the steps from an image to its prediction.",
    no_args_is_help=True,
)


@app.command("positions")
def draw_positions(
    kind: Annotated[str, typer.Option(help="sinusoidal (1-D), sincos2d or rotary.")] = "sinusoidal",
    length: Annotated[int | None, typer.Option(help="Number of positions (sinusoidal only).", min=1)] = None,
    width: Annotated[int | None, typer.Option(help="Number of features.", min=1)] = None,
    grid: Annotated[
        str | None, typer.Option(help="Patch grid, rows×columns (sincos2d and rotary only). Default: 8x8.")
    ] = None,
    out: Annotated[Path, typer.Option(help="File for the figure. The extension sets the format.")] = Path(
        "positions.png"
    ),
) -> None:
    """Draw a position embedding as a heat map: positions along x, features along y (sheet D)."""
    from vitascope.cli.figures import draw_grid_positions, draw_sinusoidal_tables

    if kind == "sinusoidal" and grid is not None:
        raise UserError("--grid is only for --kind sincos2d and --kind rotary.")
    if kind in ("sincos2d", "rotary") and length is not None:
        raise UserError(f"--length is only for --kind sinusoidal. For {kind}, set --grid.")
    if kind == "sinusoidal":
        print(f"Figure: {draw_sinusoidal_tables(length, width, out)}")
    elif kind in ("sincos2d", "rotary"):
        position_type = cast(Literal["sincos2d", "rotary"], kind)
        print(f"Figure: {draw_grid_positions(position_type, _parse_grid(grid or '8x8'), width or 64, out)}")
    else:
        raise UserError(f"--kind {kind} is unknown. {suggest_choice(kind, ('sinusoidal', 'sincos2d', 'rotary'))}")


@app.command("mask")
def draw_mask(
    tokens: Annotated[int, typer.Option(help="Number of tokens.", min=1, max=1000)] = 5,
    out: Annotated[Path, typer.Option(help="File for the figure. The extension sets the format.")] = Path("mask.png"),
) -> None:
    """Print and draw the causal mask: 0 on and below the diagonal, −10,000 above it (sheet C)."""
    from vitascope.cli.figures import draw_causal_mask
    from vitascope.coursework.sheets.figures import format_additive_causal_mask

    print(format_additive_causal_mask(tokens) if tokens <= 12 else f"{tokens}×{tokens}: too large to print")
    print(f"Figure: {draw_causal_mask(tokens, out)}")


@app.command("story")
def draw_forward_pass(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] [KEY=VALUE]…", help="A recipe and model settings. Default: digits."),
    ] = None,
    run: Annotated[Path | None, typer.Option(help="A trained run. Default: random weights.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    out: Annotated[Path, typer.Option(help="File for the figure. The extension sets the format.")] = Path("story.png"),
) -> None:
    """Draw the steps from an image to its prediction: patches, tokens, attention, class probabilities."""
    from vitascope.cli.console import reject_settings_without_effect
    from vitascope.cli.figures import draw_trained_forward_pass, draw_untrained_forward_pass
    from vitascope.recipe.reading import read_model_config, split_optional_recipe_args

    if run is not None:
        print(f"Figure: {draw_trained_forward_pass(run, out)}")
        return
    recipe, settings = split_optional_recipe_args(words or [])
    with_section = [setting for setting in settings if "." in setting.partition("=")[0]]
    config = read_model_config(recipe or "digits", settings)
    reject_settings_without_effect(with_section, ("model.",), "on this figure. Use settings of the model")
    print(f"Figure: {draw_untrained_forward_pass(config, seed, out)}")


@app.command(name="shifted")
def draw_shifted_images(
    image: Annotated[Path | None, typer.Argument(help="An image file. Default: a digit.")] = None,
    patch_size: Annotated[int, typer.Option(help="Patch size in the 32×32 image. The shift is half of it.")] = 4,
    out: Annotated[Path, typer.Option(help="File for the figure. The extension sets the format.")] = Path(
        "shifted.png"
    ),
) -> None:
    """Draw the image and its four shifted copies, from which tokenizer=spt cuts its patches."""
    from vitascope.cli.figures import draw_shifted_copies

    print(f"Figure: {draw_shifted_copies(image, patch_size, out)}")


@app.command("fewer")
def draw_fewer_tokens(
    model: Annotated[str, typer.Argument(help="A run or pretrained weights.")],
    image: Annotated[Path, typer.Argument(help="An image file.")],
    tokens: Annotated[int, typer.Option(help="Number of tokens to remove in each block.", min=1)] = 8,
    out: Annotated[Path, typer.Option(help="File for the figure. The extension sets the format.")] = Path("fewer.png"),
) -> None:
    """Draw which patches are merged or dropped at inference, with the resulting predictions."""
    from vitascope.cli.figures import draw_token_reduction

    print(f"Figure: {draw_token_reduction(model, image, tokens, out)}")


def _parse_grid(text: str) -> tuple[int, int]:
    sides = text.lower().replace("×", "x").split("x")
    if len(sides) != 2 or not all(side.isascii() and side.isdigit() and int(side) > 0 for side in sides):
        raise UserError(f"--grid {text} is not a grid. Write rows×columns, such as 8x8.")
    return int(sides[0]), int(sides[1])
