"""Show training progress: a live bar on a terminal or in a notebook, elsewhere one line per epoch."""

import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vitascope.training.loop import EpochRecord
from vitascope.training.loop import StepProgress as Between

LONG_RUN_SECONDS = 3600.0  # seconds; a longer run prints its estimated duration
ESTIMATE_AFTER_SECONDS = 10.0  # seconds of training for the estimate
ACCURACY_LABELS = {
    "train_accuracy": "train acc",
    "knn_accuracy": "k-NN",
    "val_accuracy": "val acc",
}


def show_progress(
    records: Iterator[Between | EpochRecord], num_epochs: int, epochs_done: int, console: Console
) -> Iterator[EpochRecord]:
    """Yield the epoch records and show progress. Each kind of alarm is printed once."""
    records = _print_duration_estimate(_print_alarms(records, console), num_epochs, console)
    if not (console.is_terminal or console.is_jupyter):
        yield from _print_epoch_lines(records, num_epochs, console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("remaining"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("starting", total=num_epochs, completed=epochs_done)
        for record in records:
            if isinstance(record, EpochRecord):
                bar.update(
                    task, completed=record.metrics["epoch"], description=format_epoch_line(record.metrics, num_epochs)
                )
                yield record
            else:
                bar.update(task, completed=record.epoch + record.step / record.num_steps)
                if record.epoch == epochs_done:  # there is no loss before the end of the first epoch
                    bar.update(
                        task,
                        description=f"epoch {epochs_done + 1}/{num_epochs}  {record.images_per_second:,.0f} images/s",
                    )


def _print_duration_estimate(
    records: Iterator[Between | EpochRecord], num_epochs: int, console: Console
) -> Iterator[Between | EpochRecord]:
    """Print the estimated duration of a long run once, after the first seconds. The first step is not counted."""
    first: tuple[float, float] | None = None
    looking = True
    for record in records:
        if looking and isinstance(record, Between):
            now, done = time.monotonic(), record.epoch + record.step / record.num_steps
            if first is None:
                first = now, done
            elif now - first[0] >= ESTIMATE_AFTER_SECONDS:
                looking, left = False, (num_epochs - done) * (now - first[0]) / (done - first[1])
                if left > LONG_RUN_SECONDS:
                    console.print(format_duration_estimate(left), style="yellow", soft_wrap=True, highlight=False)
        yield record


def format_duration_estimate(remaining_seconds: float) -> str:
    hours = remaining_seconds / 3600
    said = f"{hours:.0f} hours" if hours >= 2 else f"{60 * hours:.0f} minutes"
    return (
        f"Estimated duration: about {said}. For a quick trial, stop with Ctrl-C and start again with "
        "train.epochs=1 data.fraction=0.1."
    )


def _print_alarms(records: Iterator[Between | EpochRecord], console: Console) -> Iterator[Between | EpochRecord]:
    told: set[str] = set()
    for record in records:
        if isinstance(record, EpochRecord) and record.alarm and record.alarm.collapse_type not in told:
            told.add(record.alarm.collapse_type)
            console.print(f"Epoch {record.metrics['epoch']}: {record.alarm.text}", style="bold red", soft_wrap=True)
        yield record


def _print_epoch_lines(
    records: Iterator[Between | EpochRecord], num_epochs: int, console: Console
) -> Iterator[EpochRecord]:
    """Print one line per epoch, at most two per second."""
    last = 0.0
    for record in records:
        if isinstance(record, EpochRecord):
            if record.metrics["epoch"] == num_epochs or time.monotonic() - last > 0.5:
                console.print(format_epoch_line(record.metrics, num_epochs), highlight=False, soft_wrap=True)
                last = time.monotonic()
            yield record


def format_epoch_line(metrics: dict[str, float], num_epochs: int) -> str:
    """epoch 3/20  loss 1.234  train acc 56.7 %  val acc 55.1 %  12,345 images/s. Without labels, the accuracies are
    those of k-NN and a linear probe."""
    width = len(str(num_epochs))
    text = f"epoch {metrics['epoch']:>{width}}/{num_epochs}  loss {metrics['train_loss']:.3f}"
    words = ACCURACY_LABELS | ({"val_accuracy": "linear probe"} if "train_accuracy" not in metrics else {})
    text += "".join(f"  {word} {metrics[name]:.1%}" for name, word in words.items() if name in metrics)
    return f"{text}  {metrics['images_per_second']:,.0f} images/s"
