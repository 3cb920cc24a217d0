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
    from vitascope.evaluation.figures import write_evaluation_json_and_figures
    from vitascope.evaluation.trained import load
    from vitascope.training.train import train_recipe

    run = train_recipe(recipe, runs, create_console(), suggest_evaluation=False)
    evaluation = load(run, device="auto").evaluate()
    print_evaluation_summary(evaluation)
    print(f"Misclassified images: {write_evaluation_json_and_figures(evaluation) / 'errors.png'}\n")
    _print_differences_from_timm()
    print("Next commands: vitascope train --help, vitascope anatomy digits, vitascope data preview digits")


def _print_differences_from_timm() -> None:
    from dataclasses import replace

    import torch

    from vitascope.weights.write_formats import compare_outputs_gradients_with_timm

    columns = ["model", "logits, float64", "gradients, float64", "logits, float32", "gradients, float32"]
    rows = []
    for name, changes in COMPARED_SETTINGS.items():
        row = [name]
        for dtype in (torch.float64, torch.float32):
            comparison = compare_outputs_gradients_with_timm(replace(SMALL_MODEL, **changes), dtype)
            row += [f"{comparison.max_logit_difference:.0e}", f"{comparison.max_gradient_difference:.0e}"]
        rows.append(row)
    title = "Correctness check: largest difference from timm's model with the same weights"
    create_console().print(create_table(title, columns, rows, right_aligned=set(columns[1:])))


def check_machine() -> None:
    """Check this machine: versions, devices, precision and missing packages."""
    print("Versions")
    for name, version in machine.get_package_versions().items():
        print(f"  {name:<16} {version or 'missing'}")
    missing = machine.list_missing_packages()
    if "torch" not in missing:
        print("Devices (the first is the default)")
        for device, description in machine.get_device_names().items():
            print(f"  {device:<16} {description}")
        print("Precision")
        for number_format, speed in machine.describe_precision_speeds().items():
            print(f"  {number_format:<16} {speed}")
    if missing:
        print(f"Missing: {', '.join(missing)}. Install with: pip install {' '.join(missing)}")
        raise typer.Exit(1)
    print("All required packages are installed.")
