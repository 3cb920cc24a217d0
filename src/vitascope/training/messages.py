"""What a run prints: sentences about its images, batches, training values and result; and its progress.

Progress is a live bar on a terminal or in a notebook, elsewhere one line per epoch. Captions use some of the sentences.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vitascope.data.config import AugmentConfig
from vitascope.data.open_data import TrainingData
from vitascope.data.sources.folder import image_file_has_colour, read_image_size
from vitascope.errors import UserError, format_count
from vitascope.model.config import ModelConfig
from vitascope.number_format import format_percent, format_rough_duration
from vitascope.recipe.choices import complete_augmentation_for_objective, load_objective
from vitascope.recipe.reading import list_recipe_names, read_recipe
from vitascope.recipe.schema import Recipe, format_value_for_command_line
from vitascope.run.directory import Run
from vitascope.training.loop import EpochRecord, StepProgress

EMA_NOTE = "Validation uses the averaged weights (EMA)"
MAX_LEFT_OUT_FRACTION = 0.05  # of the images of an epoch: if it would be more, the batch size is reduced


def describe_image_file_conversion(file: Path, model: ModelConfig) -> str | None:
    """Describe how the images of a folder are resized and converted, judged by one of them; None if they are not."""
    parts, to_gray = [], model.in_chans == 1 and image_file_has_colour(file)
    before, after = ("×".join(map(str, size)) for size in (read_image_size(file), model.image_shape))
    if before != after:
        setting = f"model.img_size={format_value_for_command_line(model.img_size)}"
        parts.append(f"resized from {before} (size of the first image) to {after} ({setting})")
    if to_gray:
        parts.append("converted from colour to grayscale (model.in_chans=1)")
    if not parts:
        return None
    return f"Images are {' and '.join(parts)}.{' To keep colours, set model.in_chans=3.' if to_gray else ''}"


def describe_image_shape(shape: tuple[int, ...]) -> str:
    """Return for example '28×28 with 1 channel'. `shape`: channels, rows, columns."""
    if len(shape) != 3:
        raise UserError(f"Images have the unexpected shape {shape}.")
    return f"{shape[1]}×{shape[2]} with {format_count(shape[0], 'channel')}"


def choose_batch_size(recipe: Recipe, num_images: int) -> int:
    """Return train.batch_size, or the largest smaller one that leaves few images out of an epoch.

    It is divisible by train.grad_accum_steps. If there is none, or if images are drawn with replacement, the batch size
    is unchanged."""
    train, num_epoch_images = recipe.train, num_images * recipe.data.passes_per_epoch
    if recipe.data.balance == "sampling" or train.batch_size >= num_images:
        return train.batch_size
    sizes = range(train.batch_size, 0, -train.grad_accum_steps)
    fitting = (size for size in sizes if num_epoch_images % size <= MAX_LEFT_OUT_FRACTION * num_epoch_images)
    return next(fitting, train.batch_size)


def describe_batch_size_change(recipe: Recipe, num_images: int) -> str | None:
    """Say that the batch size is changed, or that images are left out of each epoch; None if neither is the case."""
    num_epoch_images = num_images * recipe.data.passes_per_epoch
    requested, chosen = recipe.train.batch_size, choose_batch_size(recipe, num_images)
    used = min(requested, num_images)
    num_left_out = num_epoch_images % used
    left_out = f"{num_left_out:,} of {format_count(num_epoch_images, 'image')}"
    if chosen != requested:
        return (
            f"train.batch_size: {requested} → {chosen}, because {requested} would leave {left_out} out of each epoch."
        )
    if requested > num_images:
        return (
            f"train.batch_size={requested} is larger than the training set: each step uses all "
            f"{format_count(num_images, 'image')}."
        )
    if recipe.data.balance == "sampling" or num_left_out <= MAX_LEFT_OUT_FRACTION * num_epoch_images:
        return None
    steps = format_count(num_epoch_images // used, "step")
    return f"train.batch_size={used}: {steps} per epoch; {left_out} are left out of each epoch."


def describe_default_augmentation(recipe: Recipe, completed: AugmentConfig) -> str | None:
    """Say that a built-in recipe gets the default augmentation of other data; None if its defaults are the same.

    Settings of the recipe and the user's own are named separately from the defaults."""
    if recipe.name not in list_recipe_names():
        return None
    base, requested = read_recipe(recipe.name), recipe.data.augment
    if base.data.name == recipe.data.name:
        return None
    with suppress(UserError):  # the requested settings may not be allowed for the recipe's own data
        base_defaults = complete_augmentation_for_objective(
            requested, base.data.name, base.model.in_chans, recipe.train.objective, base.model.image_shape
        )
        if base_defaults == completed:
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
    train, passes = run.recipe.train, run.recipe.data.passes_per_epoch
    epochs = format_count(last["epoch"], "epoch")
    epochs += f" ({last['epoch'] * passes:,} passes over the training images)" if passes > 1 else ""
    text = f"{epochs} in {seconds:.1f} s, training loss {last['train_loss']:z.3f}"
    text += "" if train.uses_labels else f" ({load_objective(train.objective).loss_name})"
    if "val_accuracy" in last and data.validation is not None:
        metric = "validation accuracy" if "train_accuracy" in last else "linear-probe validation accuracy"
        accuracy = format_percent(last["val_accuracy"], 2)
        text += f", {metric} {accuracy} ({format_count(len(data.validation), 'image')}, last epoch"
        precision = run.training_precision
        text += f", trained and validated in {precision})" if precision not in (None, "float32") else ")"
    text += f"\nCurves: {run.get_path('curves.png')}"
    if not suggest_evaluation:
        return text
    has_test = "test" in data.source.split_names
    purpose = "For more metrics, run:" if has_test else "There are no test images. For more metrics, run:"
    end = " --split val" if "val_accuracy" in last else "" if has_test else " --split train"
    text += f"\n{purpose} vitascope evaluate {run.path}{end}"
    return (
        f"{text}\nTo measure the test accuracy, once, at the end: vitascope evaluate {run.path}"
        if has_test and end
        else text
    )


LONG_RUN_SECONDS = 3600.0  # seconds; a longer run prints its estimated duration
ESTIMATE_AFTER_SECONDS = 10.0  # seconds of training for the estimate
SHOWN_SECONDS_LEFT = 30.0  # seconds; a shorter rest of the run is not announced
WIDE_TERMINAL = 120  # columns; a narrower terminal shows a short line, so that the remaining time is visible
ACCURACY_LABELS = {"train_accuracy": "train acc", "knn_accuracy": "k-NN", "val_accuracy": "val acc"}
SHORT_ACCURACY_LABELS = {"train_accuracy": "train", "knn_accuracy": "k-NN", "val_accuracy": "val"}


def show_progress_and_yield_epochs(
    records: Iterator[StepProgress | EpochRecord], num_epochs: int, epochs_done: int, console: Console
) -> Iterator[EpochRecord]:
    """Yield the epoch records and show progress. Each kind of alarm is printed once."""
    records = _yield_records_printing_long_run_estimate(
        _yield_records_printing_new_alarms(records, console), num_epochs, console
    )
    if not (console.is_terminal or console.is_jupyter):
        yield from _yield_epochs_printing_throttled_lines(records, num_epochs, console)
        return
    is_wide = console.width >= WIDE_TERMINAL
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20 if is_wide else 10),
        *([TimeElapsedColumn()] if is_wide else []),
        TextColumn("remaining" if is_wide else "left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("starting", total=num_epochs, completed=epochs_done)
        for record in records:
            if isinstance(record, EpochRecord):
                text = format_epoch_line(record.metrics, num_epochs, short=not is_wide)
                bar.update(task, completed=record.metrics["epoch"], description=text)
                yield record
            else:
                bar.update(task, completed=record.epoch + record.step / record.num_steps)
                if record.epoch == epochs_done:  # there is no loss before the end of the first epoch
                    bar.update(
                        task,
                        description=f"epoch {epochs_done + 1}/{num_epochs}  {record.images_per_second:,.0f} images/s",
                    )


def _yield_records_printing_long_run_estimate(
    records: Iterator[StepProgress | EpochRecord], num_epochs: int, console: Console
) -> Iterator[StepProgress | EpochRecord]:
    """Print the estimated duration of a long run once, after the first seconds. The first step is not counted."""
    first: tuple[float, float] | None = None  # time and epochs done at the first report
    estimated = False
    for record in records:
        if not estimated and isinstance(record, StepProgress):
            now, done = time.monotonic(), record.epoch + record.step / record.num_steps
            if first is None:
                first = now, done
            elif now - first[0] >= ESTIMATE_AFTER_SECONDS:
                estimated, left = True, (num_epochs - done) * (now - first[0]) / (done - first[1])
                if left > LONG_RUN_SECONDS:
                    console.print(make_long_training_notice(left), style="yellow", soft_wrap=True, highlight=False)
        yield record


def make_long_training_notice(estimated_seconds: float) -> str:
    hours = estimated_seconds / 3600
    duration = f"{hours:.0f} hours" if hours >= 2 else f"{60 * hours:.0f} minutes"
    return (
        f"Estimated duration: about {duration}. For a quick trial, stop with Ctrl-C and run: "
        "vitascope train RECIPE train.epochs=1 data.fraction=0.1"
    )


def _yield_records_printing_new_alarms(
    records: Iterator[StepProgress | EpochRecord], console: Console
) -> Iterator[StepProgress | EpochRecord]:
    """Print each kind of alarm once; yield all records."""
    printed_types: set[str] = set()
    for record in records:
        if isinstance(record, EpochRecord) and record.alarm and record.alarm.collapse_type not in printed_types:
            printed_types.add(record.alarm.collapse_type)
            console.print(f"Epoch {record.metrics['epoch']}: {record.alarm.text}", style="bold red", soft_wrap=True)
        yield record


def _yield_epochs_printing_throttled_lines(
    records: Iterator[StepProgress | EpochRecord], num_epochs: int, console: Console
) -> Iterator[EpochRecord]:
    """Print one line per epoch, at most two per second; after the second epoch, the remaining time."""
    last, ends = 0.0, list[float]()
    for record in records:
        if isinstance(record, EpochRecord):
            ends.append(time.monotonic())
            if record.metrics["epoch"] == num_epochs or ends[-1] - last > 0.5:
                console.print(format_epoch_line(record.metrics, num_epochs), highlight=False, soft_wrap=True)
                last = ends[-1]
            left = (num_epochs - record.metrics["epoch"]) * (ends[-1] - ends[0])
            if len(ends) == 2 and left >= SHOWN_SECONDS_LEFT:
                console.print(f"Remaining: {format_rough_duration(left)}, at the speed of this epoch", highlight=False)
            yield record


def format_epoch_line(metrics: dict[str, float], num_epochs: int, *, short: bool = False) -> str:
    """Return for example 'epoch 3/20  train loss 1.234  train acc 56.7 %  val acc 55.1 %  12,345 images/s'.

    Without labels, the accuracies are those of k-NN and a linear probe. `short`: shorter labels, without the speed."""
    labels = dict(SHORT_ACCURACY_LABELS if short else ACCURACY_LABELS)
    if "train_accuracy" not in metrics:
        labels["val_accuracy"] = "probe" if short else "linear probe"
    loss_label = "loss" if short else "train loss"
    text = f"epoch {metrics['epoch']:>{len(str(num_epochs))}}/{num_epochs}  {loss_label} {metrics['train_loss']:z.3f}"
    text += "".join(f"  {label} {format_percent(metrics[name])}" for name, label in labels.items() if name in metrics)
    return text if short else f"{text}  {metrics['images_per_second']:,.0f} images/s"
