"""`vitascope draw`: pictures of the parts that can be seen before anything is trained."""

from pathlib import Path
from typing import Annotated

import typer

from vitascope.errors import UserError, did_you_mean

app = typer.Typer(
    help="Pictures of positions, masks, shifted and merged patches, and one image's way through a model.",
    no_args_is_help=True,
)


@app.command()
def positions(
    kind: Annotated[str, typer.Option(help="sinusoidal (1-d), sincos2d or rotary.")] = "sinusoidal",
    length: Annotated[int | None, typer.Option(help="Positions to draw (sinusoidal).", min=1)] = None,
    width: Annotated[int | None, typer.Option(help="Features to draw.", min=1)] = None,
    grid: Annotated[str, typer.Option(help="Rows×columns of patches (sincos2d, rotary).")] = "8x8",
    out: Annotated[Path, typer.Option(help="Where the picture goes; the ending is the format.")] = Path(
        "positions.png"
    ),
) -> None:
    """Heat maps of a position embedding: position across, feature down (sheet D)."""
    from vitascope.cli.pictures import draw_grid_positions, draw_sinusoidal

    if kind == "sinusoidal":
        print(f"Picture: {draw_sinusoidal(length, width, out)}")
    elif kind in ("sincos2d", "rotary"):
        print(f"Picture: {draw_grid_positions(kind, _grid(grid), width or 64, out)}")
    else:
        raise UserError(f"--kind {kind} cannot be drawn. {did_you_mean(kind, ('sinusoidal', 'sincos2d', 'rotary'))}")


@app.command()
def mask(
    tokens: Annotated[int, typer.Option(help="How many tokens.", min=1, max=1000)] = 5,
    out: Annotated[Path, typer.Option(help="Where the picture goes; the ending is the format.")] = Path("mask.png"),
) -> None:
    """The causal mask, as numbers and as a picture: 0 on and below the diagonal, −10,000 above (sheet C)."""
    from vitascope.cli.pictures import draw_causal_mask
    from vitascope.sheets.pictures import mask_as_text

    print(mask_as_text(tokens) if tokens <= 12 else f"{tokens}×{tokens}: too large to print")
    print(f"Picture: {draw_causal_mask(tokens, out)}")


@app.command()
def story(
    words: Annotated[list[str] | None, typer.Argument(metavar="[RECIPE] [KEY=VALUE]…", help="Else digits.")] = None,
    run: Annotated[Path | None, typer.Option(help="A trained run instead of fresh weights.")] = None,
    seed: Annotated[int, typer.Option(help="For fresh weights.")] = 0,
    out: Annotated[Path, typer.Option(help="Where the picture goes; the ending is the format.")] = Path("story.png"),
) -> None:
    """One image's way through a model: image, patches, tokens, attention, answer."""
    from vitascope.cli.pictures import draw_fresh_story, draw_trained_story
    from vitascope.recipe.reading import read_model, split_words

    if run is not None:
        print(f"Picture: {draw_trained_story(run, out)}")
        return
    recipe, settings = split_words(words or [])
    print(f"Picture: {draw_fresh_story(read_model(recipe or 'digits', settings), seed, out)}")


@app.command(name="shifted")
def shifted_images(
    image: Annotated[Path | None, typer.Argument(help="A picture; else a digit.")] = None,
    patch_size: Annotated[int, typer.Option(help="Of a 32×32 picture; the shift is half of it.")] = 4,
    out: Annotated[Path, typer.Option(help="Where the picture goes; the ending is the format.")] = Path("shifted.png"),
) -> None:
    """The five shifted images that tokenizer=spt cuts its patches from."""
    from vitascope.cli.small_data import draw_shifted

    print(f"Picture: {draw_shifted(image, patch_size, out)}")


@app.command()
def fewer(
    model: Annotated[str, typer.Argument(help="A run, or weights from outside.")],
    image: Annotated[Path, typer.Argument(help="A picture.")],
    tokens: Annotated[int, typer.Option(help="How many less in each block.", min=1)] = 8,
    out: Annotated[Path, typer.Option(help="Where the picture goes; the ending is the format.")] = Path("fewer.png"),
) -> None:
    """Which patches merge into one token, and which are dropped, at inference; and what is answered then."""
    from vitascope.cli.small_data import draw_fewer

    print(f"Picture: {draw_fewer(model, image, tokens, out)}")


def _grid(text: str) -> tuple[int, int]:
    sides = text.lower().replace("×", "x").split("x")
    if len(sides) != 2 or not all(side.isascii() and side.isdigit() and int(side) > 0 for side in sides):
        raise UserError(f"--grid {text} is not a grid. Write rows×columns, such as 8x8.")
    return int(sides[0]), int(sides[1])
