"""`vitascope anatomy`: show every stage from image to logits, with shapes and costs."""

import json
from dataclasses import asdict, fields
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from vitascope.cli import numbers
from vitascope.cli.loading import loaded
from vitascope.cli.tables import console, table
from vitascope.model.anatomy import Stage
from vitascope.model.anatomy import anatomy as stages_of
from vitascope.model.config import ModelConfig
from vitascope.recipe.reading import read_model, recipe_names, split_words
from vitascope.recipe.writing import word

NOTES = (
    "FLOPs count matrix products only, 2 per multiply-add. Activation sizes are for float32.\n"
    "The model uses fused attention, which never writes attn.maps to memory. Explicit attention does."
)


def anatomy(
    words: Annotated[
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
        bool, typer.Option("--measure", help="Measure time and memory of attention over token counts.")
    ] = False,
    out: Annotated[Path, typer.Option(help="File for the figure of --measure.")] = Path("attention-cost.png"),
) -> None:
    """Show every stage from image to logits: shape, parameters, FLOPs and memory.

    Example: vitascope anatomy cifar10 model.depth=4
    """
    recipe, settings = split_words(words or [])
    config = read_any_model(recipe, settings)
    stages = stages_of(config, batch=batch, tokens=tokens)
    answer: dict[str, object] = {"stages": [asdict(stage) | {"bytes": stage.bytes} for stage in stages]}
    if not as_json:
        changed = f" with {', '.join(settings)}" if settings else ""
        title = f"From {'image' if tokens is None else 'tokens'} to logits: {recipe or 'ViT-Base'}{changed}"
        print_stages(stages, config, title, all_blocks=all_blocks)
    if measure:
        from vitascope.cli.attention_cost import measure_and_draw

        answer["measured"] = measure_and_draw(config, out, quiet=as_json)
    if as_json:
        print(json.dumps(answer, indent=1))


def read_any_model(name: str | None, settings: list[str]) -> ModelConfig:
    """Return the model configuration of a recipe, a run or pretrained weights, with settings changed."""
    if name is None or name in recipe_names() or Path(name).suffix in (".yaml", ".yml"):
        return read_model(name, settings)
    if not (name.startswith(("timm:", "hf:")) or Path(name).exists()):
        return read_model(name, settings)  # raises an error that lists the recipes

    config = loaded(name).config
    known = {item.name: word(getattr(config, item.name)) for item in fields(ModelConfig)}
    return read_model(None, [*(f"{key}={value}" for key, value in known.items()), *settings])


def print_stages(stages: list[Stage], config: ModelConfig, title: str, *, all_blocks: bool) -> None:
    rows = []
    for block, group in groupby(stages, key=_block_of):
        group = list(group)
        if block is None or block == 0 or all_blocks:
            rows += [_row(stage) for stage in group]
        elif block == config.depth - 1:
            rows.append(_folded_row(stages, config.depth))
    columns = ["stage", "axes", "shape", "parameters", "FLOPs", "activations"]
    rows.append(["total", "", "", *_sums(stages)])
    screen = console()
    if screen.width < 112:  # print the axes below the names so that numbers are not wrapped
        columns = ["stage", *columns[2:]]
        rows = [[f"{name}\n  [dim]{axes}[/dim]" if axes else name, *rest] for name, axes, *rest in rows]
    screen.print(table(title, columns, rows, right=set(columns[-4:])))
    screen.print(NOTES, style="dim", highlight=False)


def _block_of(stage: Stage) -> int | None:
    return int(stage.name.split(".")[1]) if stage.name.startswith("blocks.") else None


def _row(stage: Stage) -> list[str]:
    shape = "×".join(map(str, stage.shape))
    costs = [f"{stage.parameters:,}" if stage.parameters else "", numbers.count(stage.flops) if stage.flops else ""]
    return [stage.name, " × ".join(stage.axes), shape, *costs, numbers.size(stage.bytes)]


def _folded_row(stages: list[Stage], depth: int) -> list[str]:
    rest = [stage for stage in stages if _block_of(stage)]
    name = "blocks.1" if depth == 2 else f"blocks.1 … blocks.{depth - 1}"
    return [name, "same as blocks.0", f"{depth - 1} blocks" if depth > 2 else "1 block", *_sums(rest)]


def _sums(stages: list[Stage]) -> list[str]:
    parameters, flops = sum(stage.parameters for stage in stages), sum(stage.flops for stage in stages)
    return [f"{parameters:,}", numbers.count(flops), numbers.size(sum(stage.bytes for stage in stages))]
