"""`vitascope demo` and `doctor`: the first commands on a new machine."""

from pathlib import Path
from typing import Annotated

import typer

from vitascope.cli.console import create_console, create_table
from vitascope.cli.evaluate import print_evaluation_summary
from vitascope.model.config import ModelConfig
from vitascope.recipe.reading import read_recipe
from vitascope.run import machine

SMALL_MODEL = ModelConfig(img_size=32, patch_size=4, embed_dim=64, depth=4, num_heads=4, num_classes=10)
COMPARED_SETTINGS = {
    "plain": {},
    "registers": {"reg_tokens": 4},
    "QK-norm, LayerScale": {"qk_norm": True, "init_values": 0.1},
    "mean pooling": {"global_pool": "avg"},
}


def run_demo(
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]…", help="Settings, such as train.epochs=20.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs"),
) -> None:
    """Train a model on handwritten digits in under a minute, evaluate it, and compare the model with timm's."""
    recipe = read_recipe("digits", settings or [])
    from vitascope.evaluation.figures import write_evaluation_report
    from vitascope.evaluation.trained import load
    from vitascope.training.train import train_recipe

    run = train_recipe(recipe, runs, create_console(), suggest_evaluation=False)
    found = load(run, device="auto").evaluate()
    print_evaluation_summary(found)
    print(f"Misclassified images: {write_evaluation_report(found) / 'errors.png'}\n")
    _print_timm_comparison()
    print("Next commands: vitascope train --help, vitascope anatomy digits, vitascope data preview digits")


def _print_timm_comparison() -> None:
    from dataclasses import replace

    import torch

    from vitascope.weights.timm_comparison import compare_with_timm

    columns = ["model", "logits, float64", "gradients, float64", "logits, float32", "gradients, float32"]
    rows = []
    for name, changes in COMPARED_SETTINGS.items():
        both = [compare_with_timm(replace(SMALL_MODEL, **changes), dtype) for dtype in (torch.float64, torch.float32)]
        rows.append(
            [
                name,
                *[
                    f"{number:.0e}"
                    for found in both
                    for number in (found.max_logit_difference, found.max_gradient_difference)
                ],
            ]
        )
    title = "Correctness check: largest difference from timm's model with the same weights"
    create_console().print(create_table(title, columns, rows, right_aligned=set(columns[1:])))


def check_machine() -> None:
    """Check this machine: versions, devices, precision and missing packages."""
    print("Versions")
    for name, version in machine.get_package_versions().items():
        print(f"  {name:<16} {version or 'missing'}")
    lacking = machine.list_missing_packages()
    if "torch" not in lacking:
        print("Devices (the first is the default)")
        for name, words in machine.get_device_names().items():
            print(f"  {name:<16} {words}")
        print("Precision")
        for name, words in machine.describe_precision_speeds().items():
            print(f"  {name:<16} {words}")
    if lacking:
        print(f"Missing: {', '.join(lacking)}. Install with: pip install {' '.join(lacking)}")
        raise typer.Exit(1)
    print("All required packages are installed.")
