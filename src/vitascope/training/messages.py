"""Sentences about a run for the terminal and for its figures: images, batches, training values, and the result."""

from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

from vitascope.data.config import AugmentConfig
from vitascope.data.sources.folder import image_file_has_colour, read_image_size
from vitascope.data.splits import TrainingData
from vitascope.errors import UserError, format_count
from vitascope.model.config import ModelConfig
from vitascope.recipe.augmentation import resolve_augmentation_for_objective
from vitascope.recipe.choices import load_objective
from vitascope.recipe.reading import list_recipe_names, read_recipe
from vitascope.recipe.schema import Recipe, format_value_for_command_line
from vitascope.run.directory import Run

EMA_NOTE = "Validation uses the averaged weights (EMA)"
MAX_LEFT_OUT_FRACTION = 0.05  # of the images of an epoch: more are reported


def describe_image_file_conversion(file: Path, model: ModelConfig) -> str | None:
    """Describe how the images of a folder are resized and converted, judged by one of them; None if they are not."""
    parts, to_grey = [], model.in_chans == 1 and image_file_has_colour(file)
    before, after = ("×".join(map(str, size)) for size in (read_image_size(file), model.image_shape))
    if before != after:
        setting = f"model.img_size={format_value_for_command_line(model.img_size)}"
        parts.append(f"resized from {before} (size of the first image) to {after} ({setting})")
    if to_grey:
        parts.append("converted from colour to grayscale (model.in_chans=1)")
    if not parts:
        return None
    return f"Images are {' and '.join(parts)}.{' To keep colours, set model.in_chans=3.' if to_grey else ''}"


def describe_image_shape(shape: tuple[int, ...]) -> str:
    """Return for example '28×28 with 1 channel'. `shape`: channels, rows, columns."""
    if len(shape) != 3:
        raise UserError(f"Images have the unexpected shape {shape}.")
    return f"{shape[1]}×{shape[2]} with {format_count(shape[0], 'channel')}"


def describe_incomplete_batch(recipe: Recipe, num_images: int) -> str | None:
    """Say how many training images each epoch leaves out; None if few, or if images are drawn with replacement."""
    images = num_images * recipe.data.passes_per_epoch
    batch_size = min(recipe.train.batch_size, num_images)
    if recipe.data.balance == "sampling" or images % batch_size <= MAX_LEFT_OUT_FRACTION * images:
        return None
    return (
        f"train.batch_size={batch_size}: {format_count(images // batch_size, 'step')} per epoch; "
        f"{images % batch_size:,} of {images:,} images are left out of each epoch."
    )


def describe_default_augmentation(recipe: Recipe, completed: AugmentConfig) -> str | None:
    """Say that a built-in recipe gets the default augmentation of other data; None if its defaults are the same.

    Settings of the recipe and the user's own are named separately from the defaults."""
    if recipe.name not in list_recipe_names():
        return None
    base, requested = read_recipe(recipe.name), recipe.data.augment
    if base.data.name == recipe.data.name:
        return None
    with suppress(UserError):  # the requested settings may not be allowed for the recipe's own data
        objective = recipe.train.objective
        if resolve_augmentation_for_objective(requested, base.data.name, base.model.in_chans, objective) == completed:
            return None
    data_name = Path(recipe.data.name).name
    if requested == AugmentConfig():
        return (
            f"The recipe's augmentation is for {base.data.name} and is not used. {data_name} gets its defaults: "
            f"{completed.description or 'none'}."
        )
    sources = ["the recipe"] if base.data.augment != AugmentConfig() else []
    sources += ["your settings"] if requested != base.data.augment else []
    given = {item.name for item in fields(requested) if getattr(requested, item.name) is not None}
    defaults = replace(completed, **dict.fromkeys(given))
    return (
        f"Augmentation from {' and '.join(sources)}: {requested.description or 'none'}. The recipe is for "
        f"{base.data.name}, so the other settings are the defaults of {data_name}: {defaults.description or 'none'}."
    )


def describe_teacher(recipe: Recipe) -> str | None:
    """Name the teacher and the weight of the distillation loss; None without distillation."""
    train = recipe.train
    if not train.distill:
        return None
    return f"Teacher: {train.distill} ({train.distill_type} distillation, train.distill_alpha={train.distill_alpha:g})"


def make_curves_title(recipe: Recipe) -> str:
    """Return the caption's first words for curves.png: recipe, seed, and what the training values include."""
    notes = ["Training loss includes class weights (data.balance=loss)"] if recipe.data.balance == "loss" else []
    notes += [EMA_NOTE] if load_objective(recipe.train.objective).needs_ema else []
    notes += [note.rstrip(".")] if (note := explain_worse_training_metrics(recipe)) else []
    return ". ".join([f"{recipe.name}, seed {recipe.train.seed}", *notes])


def explain_worse_training_metrics(recipe: Recipe) -> str | None:
    """Explain why training and validation values differ: augmentation, losses, EMA. None if there is no reason."""
    train, augment = recipe.train, recipe.data.augment
    if not train.uses_labels:
        return None
    ema_note = f"{EMA_NOTE}." if train.ema else None
    mixes = [name for name, value in (("mixup", augment.mixup), ("CutMix", augment.cutmix)) if value]
    mixing = ("mixup", "cutmix", "mix_prob")
    names = ["augmentation"] if any(name not in mixing for name in augment.active_settings) else []
    names += mixes if augment.mix_prob else []
    names += ["label smoothing"] if train.label_smoothing else []
    names += ["distillation"] if train.distill else []
    if not names:
        return ema_note
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    note = f"Training values include {listed}, so they can be worse than validation values."
    return f"{note} {ema_note}" if ema_note else note


def format_training_summary(run: Run, data: TrainingData, *, suggest_evaluation: bool = True) -> str:
    """Return the result of a run, the path of its curves, and the command that evaluates it."""
    rows = run.metrics
    if not rows:
        return f"{run.path} has no metrics."
    last, seconds = rows[-1], sum(row["seconds"] for row in rows)
    text = f"{format_count(last['epoch'], 'epoch')} in {seconds:.1f} s, training loss {last['train_loss']:z.3f}"
    train = run.recipe.train
    text += "" if train.uses_labels else f" ({load_objective(train.objective).loss_name})"
    if "val_accuracy" in last and data.validation is not None:
        metric = "validation accuracy" if "train_accuracy" in last else "linear-probe validation accuracy"
        text += f", {metric} {last['val_accuracy']:.2%} ({format_count(len(data.validation), 'image')}, last epoch"
        precision = run.training_precision
        text += f", computed in {precision})" if precision not in (None, "float32") else ")"
    text += f"\nCurves: {run.get_path('curves.png')}"
    if not suggest_evaluation:
        return text
    has_test = "test" in data.source.split_names
    purpose = "To measure the test accuracy, run:" if has_test else "There are no test images. For more metrics, run:"
    end = "" if has_test else " --split val" if "val_accuracy" in last else " --split train"
    return f"{text}\n{purpose} vitascope evaluate {run.path}{end}"
