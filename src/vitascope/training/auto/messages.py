"""What is printed about a choice of settings and its result: five lines before training, and three after it."""

from pathlib import Path

from vitascope.errors import format_count
from vitascope.inference.scoring import wilson_interval
from vitascope.model.anatomy import count_forward_flops_per_image
from vitascope.number_format import format_percent, format_rough_duration
from vitascope.recipe.schema import Recipe
from vitascope.run.directory import Run
from vitascope.training.auto.choose_settings import FINE_TUNING, Choice, MachineFacts
from vitascope.training.auto.find_weights import WeightsAtHand
from vitascope.training.auto.image_facts import ImageFacts

CHOSEN_FILE = "chosen.yaml"
MAX_TINY_PHOTO_SIDE = 8  # pixels; of colour images up to this size a warning is printed
START_SECONDS = {"cpu": 3.0, "cuda": 25.0}  # before the first step; on CUDA with the capture of the step


def estimate_run_seconds(recipe: Recipe, images: ImageFacts, machine: MachineFacts) -> float:
    """Estimate the duration of a run with its final settings: training, validation and linear probe."""
    passes, flops = recipe.data.passes_per_epoch, count_forward_flops_per_image(recipe.model)
    forward_passes = (
        1 if recipe.train.tune == "head" else 3
    ) * passes * images.num_images_after_holdout + images.num_validation
    total = recipe.train.epochs * forward_passes + (
        images.num_images_after_holdout if recipe.train.head_init != "random" else 0
    )
    return START_SECONDS.get(machine.device, START_SECONDS["cpu"]) + total * flops / machine.flops_per_second


def describe_choice(
    images: ImageFacts, weights: WeightsAtHand, machine: MachineFacts, choice: Choice, recipe: Recipe
) -> list[str]:
    """Return five lines: images, weights, choice, settings, expected duration; and a warning about tiny photos."""
    start, reasons, seconds = choice.start, choice.reasons, estimate_run_seconds(recipe, images, machine)
    if start == FINE_TUNING and recipe.train.head_init == "linear_probe":
        start = "fine-tuning, first the classifier (linear probe), then all weights"
    duration = f"{format_rough_duration(seconds)} on {machine.name}, at the speed measured now"
    return [
        f"Images: {_describe_images(images)}",
        f"Weights: {_describe_weights(weights)}",
        f"Choice: {start}, because {reasons['start']}",
        f"Settings: {_describe_settings(images, choice, recipe)}",
        f"Expected duration: {duration}" + (f" ({reasons['length']})" if "length" in reasons else ""),
        *_warn_of_tiny_photos(images),
    ]


def _warn_of_tiny_photos(images: ImageFacts) -> list[str]:
    """Warn of colour images of at most 8 pixels. Gray symbols of this size can be recognised (recipe digits)."""
    if images.num_channels == 1 or images.short_side > MAX_TINY_PHOTO_SIDE:
        return []
    size = "×".join(map(str, images.image_size))
    return [
        f"Warning: photos of {size} pixels contain very little information. Check that these are the original files."
    ]


def _describe_weights(weights: WeightsAtHand) -> str:
    if not weights.ref:
        return f"none; {weights.origin}"
    size = "×".join(map(str, weights.model.image_shape))
    num_classes = weights.model.num_classes
    classifier = f" with the classifier of {num_classes:,} classes"
    millions = f"{weights.num_parameters / 1e6:.1f} M parameters{classifier if num_classes else ''}"
    return f"{Path(weights.ref).name} ({weights.origin}), {millions}, {size} pixels"


def _describe_images(images: ImageFacts) -> str:
    held_out = f"{images.num_validation:,} for validation" if images.num_validation else "none for validation"
    counts = sorted({min(images.class_counts), max(images.class_counts)})
    per_class = " to ".join(f"{count:,}" for count in counts)
    colours = "gray" if images.num_channels == 1 else "colour"
    size, noun = "×".join(map(str, images.image_size)), "file" if images.counts_are_files else "image"
    return (
        f"{format_count(images.num_images_after_holdout, noun)} for training, {held_out}; "
        f"{images.num_classes} classes of {per_class} {noun}s; {colours}, {size} pixels (height × width, median)"
    )


def _describe_settings(images: ImageFacts, choice: Choice, recipe: Recipe) -> str:
    train, size = recipe.train, "×".join(map(str, recipe.model.image_shape))
    steps = (
        images.num_images_after_holdout
        * recipe.data.passes_per_epoch
        // min(train.batch_size, images.num_images_after_holdout)
    )
    num_passes = train.epochs * recipe.data.passes_per_epoch
    passes = f" ({num_passes:,} passes over the images)" if recipe.data.passes_per_epoch > 1 else ""
    why_size = f" ({choice.reasons['resolution']})" if "resolution" in choice.reasons else ""
    return (
        f"{size} pixels{why_size}, {format_count(train.epochs, 'epoch')} of {format_count(steps, 'step')}{passes}, "
        f"batch size {train.batch_size}, learning rate {train.lr:g}"
    )


def describe_result(run: Run, images: ImageFacts) -> str:
    """Return the validation accuracy with its interval and number of images, and the next command."""
    rows, num_images = run.metrics, run.machine.get("validation_images", images.num_validation)
    lines = []
    if rows and "val_accuracy" in rows[-1] and num_images:
        accuracy = rows[-1]["val_accuracy"]
        low, high = wilson_interval(round(accuracy * num_images), num_images)
        interval = f"{format_percent(low)} to {format_percent(high)}"
        images_text = format_count(num_images, "image")
        lines.append(
            f"Validation accuracy: {format_percent(accuracy)} (95 % confidence interval {interval}, {images_text})"
        )
    split = " --split val" if lines else "" if images.has_test else " --split train"
    test = f". For the test accuracy, once, at the end: vitascope evaluate {run.path}"
    lines.append(f"Settings: {run.get_path(CHOSEN_FILE)}")
    lines.append(
        f"Next: vitascope evaluate {run.path}{split}, or vitascope predict {run.path} PHOTO"
        f"{test if images.has_test and split else ''}"
    )
    return "\n".join(lines)
