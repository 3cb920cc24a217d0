"""`vitascope train`, `resume`, `lr-find`, `demo` and `doctor`: train from the command line, and check the machine."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from vitascope.cli.console import create_console, create_table
from vitascope.cli.evaluate import RunPath, print_evaluation_summary
from vitascope.model.config import ModelConfig
from vitascope.recipe.reading import is_data_reference, read_recipe, split_required_recipe_args
from vitascope.recipe.schema import Recipe
from vitascope.run import machine

SMALL_MODEL = ModelConfig(img_size=32, patch_size=4, embed_dim=64, depth=4, num_heads=4, num_classes=10)
COMPARED_SETTINGS = {
    "plain": {},
    "registers": {"reg_tokens": 4},
    "QK-norm, LayerScale": {"qk_norm": True, "init_values": 0.1},
    "mean pooling": {"global_pool": "avg"},
}
RecipeArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE [KEY=VALUE]…",
        help="A recipe name or file, then settings such as train.epochs=20. Without arguments, the recipes are listed.",
    ),
]
TrainArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE|IMAGES [KEY=VALUE]…",
        help="A recipe name or file, or a folder of images, an .npz file or data:NAME; then settings such as "
        "train.epochs=20. Without arguments, the recipes are listed.",
    ),
]


def train(
    recipe_and_settings: TrainArguments = None,
    runs: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs"),
) -> None:
    """Train a model from a recipe (a YAML file of settings) or on your own images. Results go to
    runs/<recipe>/<date>-seed<n>/.

    Instead of a recipe, give images, such as photos/: a folder (one subfolder per class), an .npz file, or data:NAME
    (a published data set). The settings are then chosen from the images, the pretrained weights at hand and this
    machine. They are printed and stored in the run as chosen.yaml. Settings that you add replace chosen ones.

    Example: vitascope train digits train.epochs=20 model.depth=4
    """
    arguments = split_required_recipe_args(recipe_and_settings)
    if is_data_reference(arguments.recipe):
        from vitascope.training.auto.train_images import choose_settings_and_train

        _run_training_or_exit_130_on_sigint_sigterm(
            lambda: choose_settings_and_train(arguments.recipe, arguments.overrides, runs, create_console())
        )
        return
    recipe = read_recipe(*arguments)
    from vitascope.training.train import train_recipe

    _run_training_or_exit_130_on_sigint_sigterm(lambda: train_recipe(recipe, runs, create_console()))


def resume(
    run: RunPath,
    force: Annotated[
        bool,
        typer.Option("--force", help="Resume although a process of another host holds the lock. It must have ended."),
    ] = False,
) -> None:
    """Resume an interrupted run. The result is bit-identical to an uninterrupted run.

    Example: vitascope resume runs/digits
    """
    from vitascope.run.directory import open_run_or_newest
    from vitascope.training.train import resume_run_if_unfinished

    interrupted_run = open_run_or_newest(run)
    _run_training_or_exit_130_on_sigint_sigterm(
        lambda: resume_run_if_unfinished(interrupted_run, create_console(), force=force)
    )


def suggest_learning_rate(
    recipe_and_settings: RecipeArguments = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File for the figure. The extension sets the format. Default: lr-find.png, lr-find-2.png, …"),
    ] = None,
) -> None:
    """Suggest a learning rate: raise it step by step and measure the loss.

    Example: vitascope lr-find digits
    """
    recipe = _read_recipe_arguments(recipe_and_settings)
    from vitascope.draw.style import choose_unused_path
    from vitascope.training.rate_finder import RULE, measure_learning_rate_curve

    out = out or choose_unused_path(Path("lr-find.png"))
    result = measure_learning_rate_curve(recipe, create_console())
    result.save_figure(out)
    end = result.describe_divergence()
    if result.suggested_lr is None:
        print(f"No suggestion: the loss hardly fell in {len(result.learning_rates)} steps. {end}")
    else:
        muon = ""
        if recipe.train.optimizer == "muon":  # lr-find multiplies both rates by the same factor
            muon = f" train.muon_lr={recipe.train.muon_lr * result.suggested_lr / recipe.train.lr:.2g}"
        print(f"Suggested: train.lr={result.suggested_lr:.2g}{muon}\nThis train.lr is {RULE} {end}")
        if muon:
            factor = result.suggested_lr / recipe.train.lr
            print(f"The suggested train.muon_lr is scaled by the same factor ({factor:.2g}) as train.lr. Set both.")
    print(f"Figure: {out}")


def _read_recipe_arguments(arguments: list[str] | None) -> Recipe:
    return read_recipe(*split_required_recipe_args(arguments))


def _run_training_or_exit_130_on_sigint_sigterm(run_training: Callable[[], object]) -> None:
    """Run training. Ctrl-C and SIGTERM stop it after a save, with exit code 130."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run_training()
    except KeyboardInterrupt:
        sys.exit(130)


def run_demo(
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]…", help="Settings, such as train.epochs=20.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs"),
) -> None:
    """Train a model on handwritten digits in under a minute and evaluate it.

    Also compares the logits of four untrained test models with those of timm's models with the same weights.
    """
    recipe = read_recipe("digits", settings or [])
    from vitascope.evaluation.figures import write_evaluation_json_and_figures
    from vitascope.inference.open_model import open_model
    from vitascope.training.train import train_recipe

    run = train_recipe(recipe, runs, create_console(), suggest_evaluation=False)
    evaluation = open_model(run, device="auto").evaluate(robustness=True)
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
    title = "Check on untrained test models: largest absolute difference from timm's model with the same weights"
    create_console().print(create_table(title, columns, rows, right_aligned=set(columns[1:])))


def print_machine_info_and_check_packages() -> None:
    """Check this machine: versions, devices, precision and missing packages."""
    print("Versions")
    for name, version in machine.get_package_versions().items():
        print(f"  {name:<16} {version or 'missing'}")
    missing = machine.list_missing_packages()
    if "torch" not in missing:
        print("Devices (the first is the default)")
        for device, description in machine.get_device_names_by_type().items():
            print(f"  {device:<16} {description}")
        print("Precision")
        for number_format, speed in machine.measure_and_describe_precision_speeds().items():
            print(f"  {number_format:<16} {speed}")
    if missing:
        print(f"Missing: {', '.join(missing)}. Install with: pip install {' '.join(missing)}")
        raise typer.Exit(1)
    print("All required packages are installed.")
