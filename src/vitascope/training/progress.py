"""Show training progress: a live bar on a terminal or in a notebook, elsewhere one line per epoch."""

import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vitascope.training.loop import EpochRecord, StepProgress

LONG_RUN_SECONDS = 3600.0  # seconds; a longer run prints its estimated duration
ESTIMATE_AFTER_SECONDS = 10.0  # seconds of training for the estimate
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
    """Print one line per epoch, at most two per second."""
    last = 0.0
    for record in records:
        if isinstance(record, EpochRecord):
            if record.metrics["epoch"] == num_epochs or time.monotonic() - last > 0.5:
                console.print(format_epoch_line(record.metrics, num_epochs), highlight=False, soft_wrap=True)
                last = time.monotonic()
            yield record


def format_epoch_line(metrics: dict[str, float], num_epochs: int, *, short: bool = False) -> str:
    """Return for example 'epoch 3/20  train loss 1.234  train acc 56.7%  val acc 55.1%  12,345 images/s'.

    Without labels, the accuracies are those of k-NN and a linear probe. `short`: shorter labels, without the speed."""
    labels = dict(SHORT_ACCURACY_LABELS if short else ACCURACY_LABELS)
    if "train_accuracy" not in metrics:
        labels["val_accuracy"] = "probe" if short else "linear probe"
    loss_label = "loss" if short else "train loss"
    text = f"epoch {metrics['epoch']:>{len(str(num_epochs))}}/{num_epochs}  {loss_label} {metrics['train_loss']:z.3f}"
    text += "".join(f"  {label} {metrics[name]:.1%}" for name, label in labels.items() if name in metrics)
    return text if short else f"{text}  {metrics['images_per_second']:,.0f} images/s"
