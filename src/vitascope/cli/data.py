"""`vitascope data list | describe | preview`: list data sets, describe them and preview augmentation."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from vitascope.cli.console import reject_settings_without_effect
from vitascope.data.config import AugmentConfig
from vitascope.recipe.choices import complete_augmentation_for_objective, load_objective
from vitascope.recipe.reading import list_recipe_names, read_recipe

app = typer.Typer(help="List, describe and preview data sets.", no_args_is_help=True)
DataName = Annotated[
    str, typer.Argument(help="A data set name, a folder with one subfolder per class, or an .npz file.")
]
DataRoot = Annotated[
    str | None, typer.Option(help="Folder of the named data sets. Default: $VITASCOPE_DATA, or the cache folder.")
]
NUM_IMAGES = 6  # of the preview


@app.command("list")
def print_data_sets(root: DataRoot = None) -> None:
    """List the named data sets and show which are on this machine."""
    from vitascope.data.data_root import choose_data_root
    from vitascope.data.sources.named import PUBLISHED_DATASETS, open_published_dataset_if_found

    data_root = choose_data_root(root)
    print(f"Data root: {data_root}")
    print(f"  {'digits':<14} {'built in':<10} handwritten digits, 8×8 grayscale, 898 training and 899 test images")
    for name, dataset in PUBLISHED_DATASETS.items():
        status = "available" if open_published_dataset_if_found(name, data_root) else "not found"
        print(f"  {name:<14} {status:<10} {dataset.description}")
    print("Your own data: a folder with one subfolder of images per class, or an .npz file with the arrays")
    print("x_train, y_train, x_test and y_test.")


@app.command("describe")
def print_data_summary(
    name: DataName,
    root: DataRoot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Show image counts and sizes, class balance, pixel mean and standard deviation, and duplicate images."""
    from vitascope.data.statistics import open_and_summarize_all_splits

    summary = open_and_summarize_all_splits(name, root)
    print(json.dumps(summary.as_dict(), indent=1) if as_json else summary.format_text())


@app.command("preview")
def save_preview_figure(
    name: DataName,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]…", help="Settings, such as data.augment.flip=0.")
    ] = None,
    root: DataRoot = None,
    seed: Annotated[int, typer.Option(help="Random seed of the augmentation.", min=0)] = 0,
    out: Annotated[Path, typer.Option(help="File for the figure. The extension sets the format.")] = Path(
        "preview.png"
    ),
) -> None:
    """Draw some images and augmented versions of them, with the data's default augmentation or your settings.

    A recipe can have its own augmentation. To see it, repeat the recipe's settings here.

    Example: vitascope data preview cifar10 data.augment.flip=0
    """
    print(f"Figure: {draw_and_save_augmentation_preview(name, settings or [], root, seed, out)}")


def draw_and_save_augmentation_preview(
    data_name: str, overrides: list[str], data_root: str | None, seed: int, figure_path: Path
) -> Path:
    """Draw each image in a row with eight augmented versions, or as the objective needs them."""
    from vitascope.data.open_data import load_train_and_validation_data
    from vitascope.data.sources.named import PUBLISHED_DATASETS
    from vitascope.data.statistics import PREVIEW_SIZE, PREVIEW_SIZE_NOTE
    from vitascope.draw.images import draw_gallery
    from vitascope.draw.style import save_figure

    base_recipe = _find_self_supervised_recipe_name(data_name, overrides)
    recipe = read_recipe(base_recipe, overrides)
    objective = load_objective(recipe.train.objective)
    is_folder = data_name not in ("digits", *PUBLISHED_DATASETS) and not data_name.endswith(".npz")
    channels_settings = ["model.in_chans"] if is_folder else []
    used_settings = ("data.", "train.objective", *objective.preview_sections, *channels_settings)
    reject_settings_without_effect(overrides, used_settings, "on the augmentation. Use settings of data.augment")
    config = replace(recipe.data, name=data_name, root=data_root or recipe.data.root, validation=0.0)
    sets_channels = any(override.startswith("model.in_chans=") for override in overrides)
    channels = recipe.model.in_chans if sets_channels else PREVIEW_SIZE[1]
    data = load_train_and_validation_data(config, PREVIEW_SIZE[0], channels, seed)
    policy = complete_augmentation_for_objective(
        config.augment, data_name, data.train.image_shape[0], recipe.train.objective
    )
    height, width = data.train.images.shape[2:]
    preprocessing = replace(data.preprocessing, size=(height, width))
    samples = data.train.select_evenly(NUM_IMAGES)
    recipe = replace(recipe, data=replace(config, augment=policy))
    versions, titles = objective.augment_preview_images(samples, preprocessing, recipe, seed)
    columns = [preprocessing.denormalize(images) for images in (preprocessing(samples.images), *versions)]
    rows = [[column[row].permute(1, 2, 0).numpy() for column in columns] for row in range(len(samples))]
    class_names = [data.classes[label] for label in samples.labels.tolist()]
    augmentation = describe_augmentation(
        base_recipe, overrides, policy, ("grayscale" if channels == 1 else "colour") if is_folder else ""
    )
    resized = f"the image resized to {height}×{width} pixels ({PREVIEW_SIZE_NOTE})"
    original = resized if is_folder else "the original image"
    text = f"{data.source.name}: {original}, then {len(versions)} {objective.preview_name} {augmentation}"
    return save_figure(draw_gallery(rows, class_names, ["original", *titles], text), figure_path)


def describe_augmentation(
    base_recipe: str | None, overrides: list[str], policy: AugmentConfig, image_kind: str = ""
) -> str:
    """Describe where the augmentation comes from, its settings, and how images are mixed.

    `image_kind`: colour or grayscale, on which the default augmentation of files depends; empty for other data."""
    changed = ", ".join(override for override in overrides if override.startswith("data.augment."))
    default = f"default augmentation for {image_kind} images" if image_kind else "default augmentation of this data"
    source = f"as in recipe {base_recipe}" if base_recipe else f"with the {default}"
    source += f", changed by {changed}" if changed else ""
    text = f"{source} ({policy.description or 'no augmentation'})."
    mixes = {
        "mixup": "With mixup, a version is a weighted average of two images.",
        "cutmix": "With CutMix, a rectangle comes from another image.",
    }
    used = [sentence for name, sentence in mixes.items() if policy.mix_prob and getattr(policy, name)]
    return " ".join([text, *used, *(["The labels are mixed in the same proportion."] if used else [])])


def _find_self_supervised_recipe_name(data_name: str, overrides: list[str]) -> str | None:
    """Return the shipped self-supervised recipe for this data if `train.objective` names one: it has the crop sizes."""
    objectives = [text.partition("=")[2] for text in overrides if text.startswith("train.objective=")]
    names = [f"{data_name}-{objective}" for objective in objectives]
    return next((name for name in names if name in list_recipe_names()), None)
