"""`vitascope data list | describe | preview`: list data sets, describe them and preview augmentation."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from vitascope.cli.console import reject_settings_without_effect
from vitascope.data.config import AugmentConfig
from vitascope.recipe.choices import complete_augmentation_for_objective, load_objective
from vitascope.recipe.reading import list_recipe_names, read_recipe
from vitascope.recipe.schema import Recipe

if TYPE_CHECKING:
    from vitascope.data.dataset import ImageSize
    from vitascope.data.open_data import TrainingData

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
    print("Your own data: a folder with one subfolder of images per class, a folder of images with a table of their")
    print("classes (data.labels=TABLE), or an .npz file with the arrays x_train, y_train, x_test and y_test.")


@app.command("describe")
def print_data_summary(
    name: DataName,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]…", help="Settings, such as model.img_size=224.")
    ] = None,
    root: DataRoot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Show image counts and sizes, class balance, pixel mean and standard deviation, and duplicate images.

    Example: vitascope data describe photos model.img_size=224
    """
    from vitascope.data.statistics import open_and_summarize_all_splits

    overrides = settings or []
    used_settings = ("data.labels", "data.strict", *(["model.img_size", "model.in_chans"] if _is_folder(name) else []))
    reject_settings_without_effect(overrides, used_settings, "on the description of this data")
    recipe = _read_recipe_of_any_image_size(None, overrides)
    size, channels = _choose_image_size_and_channels(recipe, overrides)
    summary = open_and_summarize_all_splits(name, root, size, channels, recipe.data)
    print(json.dumps(summary.as_dict(), indent=1) if as_json else summary.format_text())


@app.command("preview")
def save_preview_figure(
    name: DataName,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]…", help="Settings, such as data.augment.flip=0.")
    ] = None,
    root: DataRoot = None,
    seed: Annotated[int, typer.Option(help="Random seed of the augmentation.", min=0)] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="File for the figure. The extension sets the format. Default: preview.png, preview-2.png, …"),
    ] = None,
) -> None:
    """Draw some images and augmented versions of them, with the data's default augmentation or your settings.

    A recipe can have its own augmentation. To see it, repeat the recipe's settings here.

    Example: vitascope data preview cifar10 data.augment.flip=0
    """
    from vitascope.draw.style import choose_unused_path

    path = out or choose_unused_path(Path("preview.png"))
    print(f"Figure: {draw_and_save_augmentation_preview(name, settings or [], root, seed, path)}")


def draw_and_save_augmentation_preview(
    data_name: str, overrides: list[str], data_root: str | None, seed: int, figure_path: Path
) -> Path:
    """Draw each image in a row with eight augmented versions, or as the objective needs them."""
    from vitascope.data.open_data import load_train_and_validation_data
    from vitascope.draw.images import draw_gallery
    from vitascope.draw.style import save_figure

    base_recipe = _find_self_supervised_recipe_name(data_name, overrides)
    recipe = _read_recipe_of_any_image_size(base_recipe, overrides)
    objective = load_objective(recipe.train.objective)
    channels_settings = ["model.in_chans"] if _is_folder(data_name) else []
    used_settings = ("data.", "train.objective", "model.img_size", *objective.preview_sections, *channels_settings)
    reject_settings_without_effect(overrides, used_settings, "on the augmentation. Use settings of data.augment")
    config = replace(recipe.data, name=data_name, root=data_root or recipe.data.root, validation=0.0)
    size, channels = _choose_image_size_and_channels(recipe, overrides)
    data = load_train_and_validation_data(config, size, channels, seed)
    stored_size = data.train.image_shape[1:]
    policy = complete_augmentation_for_objective(
        config.augment, data_name, data.train.image_shape[0], recipe.train.objective, stored_size
    )
    preprocessing = replace(data.preprocessing, size=size if _sets(overrides, "model.img_size") else stored_size)
    samples = data.train.select_evenly(NUM_IMAGES)
    recipe = replace(recipe, data=replace(config, augment=policy))
    versions, titles = objective.augment_preview_images(samples, preprocessing, recipe, seed)
    columns = [preprocessing.denormalize(images) for images in (preprocessing(samples.images), *versions)]
    rows = [[column[row].permute(1, 2, 0).numpy() for column in columns] for row in range(len(samples))]
    class_names = [data.classes[label] for label in samples.labels.tolist()]
    rows_text, columns_text = map(str, stored_size)
    image_kind = f"{rows_text}×{columns_text} {'grayscale' if channels == 1 else 'colour'}"
    augmentation = describe_augmentation(base_recipe, overrides, policy, image_kind if data.train.files else "")
    text = f"{data.source.name}: {_describe_original(data, preprocessing.size)}, then {len(versions)} "
    text += f"{objective.preview_name} {augmentation}"
    return save_figure(draw_gallery(rows, class_names, ["original", *titles], text), figure_path)


def _describe_original(data: "TrainingData", size: "ImageSize") -> str:
    """Name the sizes of the image files, or of the stored images, and the size to which they are resized."""
    from vitascope.data.statistics import format_size_with_note, measure_file_sizes

    if data.train.file_paths:
        file_sizes = measure_file_sizes(data.train.file_paths).text
        return f"the image (of {file_sizes}) resized to {format_size_with_note(size)}"
    is_resized = data.train.image_shape[1:] != size
    return f"the image resized to {format_size_with_note(size)}" if is_resized else "the original image"


def _is_folder(data_name: str) -> bool:
    from vitascope.data.sources.named import PUBLISHED_DATASETS

    return data_name not in ("digits", *PUBLISHED_DATASETS) and not data_name.endswith(".npz")


def _sets(overrides: list[str], key: str) -> bool:
    return any(override.startswith(f"{key}=") for override in overrides)


def _read_recipe_of_any_image_size(base_recipe: str | None, overrides: list[str]) -> Recipe:
    """Read the settings. Without a recipe, the patch size fits every image size, because it has no effect here."""
    if base_recipe is None and _sets(overrides, "model.img_size"):
        overrides = ["model.patch_size=1", *overrides]
    return read_recipe(base_recipe, overrides)


class ImageFormatChoice(NamedTuple):
    size: "ImageSize"
    channels: int


def _choose_image_size_and_channels(recipe: Recipe, overrides: list[str]) -> ImageFormatChoice:
    """Return the size and channels that the settings name, else those of previews."""
    from vitascope.data.statistics import PREVIEW_SIZE

    return ImageFormatChoice(
        recipe.model.image_shape if _sets(overrides, "model.img_size") else PREVIEW_SIZE[0],
        recipe.model.in_chans if _sets(overrides, "model.in_chans") else PREVIEW_SIZE[1],
    )


def describe_augmentation(
    base_recipe: str | None, overrides: list[str], policy: AugmentConfig, image_kind: str = ""
) -> str:
    """Describe where the augmentation comes from, its settings, and how images are mixed.

    `image_kind`: size and colour of image files, on which their default depends ("64×64 colour"); else empty."""
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
