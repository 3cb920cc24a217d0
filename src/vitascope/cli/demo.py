"""`vitascope demo`: train a small ViT on the built-in digits, evaluate it, and compare the model with timm's."""

from pathlib import Path
from typing import Annotated

import typer

from vitascope.cli.evaluate import print_summary
from vitascope.cli.tables import console, table
from vitascope.model.config import ModelConfig
from vitascope.recipe.reading import read_recipe

SMALL = ModelConfig(img_size=32, patch_size=4, embed_dim=64, depth=4, num_heads=4, num_classes=10)
SETTINGS = {
    "plain": {},
    "registers": {"reg_tokens": 4},
    "QK-norm, LayerScale": {"qk_norm": True, "init_values": 0.1},
    "mean pooling": {"global_pool": "avg"},
}


def demo(
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]…", help="Settings, such as train.epochs=20.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs"),
) -> None:
    """Train a model on handwritten digits in under a minute, evaluate it, and compare the model with timm's."""
    recipe = read_recipe("digits", settings or [])
    from vitascope.evaluation.figures import write_report
    from vitascope.evaluation.trained import load
    from vitascope.training.train import train_recipe

    run = train_recipe(recipe, runs, console(), suggest_evaluation=False)
    found = load(run, device="auto").evaluate()
    print_summary(found)
    print(f"Misclassified images: {write_report(found) / 'errors.png'}\n")
    _print_agreement()
    print("Next commands: vitascope train --help, vitascope anatomy digits, vitascope data preview digits")


def _print_agreement() -> None:
    from dataclasses import replace

    import torch

    from vitascope.weights.agreement import agreement_with_timm

    columns = ["model", "logits, float64", "gradients, float64", "logits, float32", "gradients, float32"]
    rows = []
    for name, changes in SETTINGS.items():
        both = [agreement_with_timm(replace(SMALL, **changes), dtype) for dtype in (torch.float64, torch.float32)]
        rows.append([name, *[f"{number:.0e}" for found in both for number in (found.logits, found.gradients)]])
    title = "Correctness check: largest difference from timm's model with the same weights"
    console().print(table(title, columns, rows, right=set(columns[1:])))
