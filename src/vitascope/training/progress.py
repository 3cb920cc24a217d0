"""Show training progress: a live bar on a terminal or in a notebook, elsewhere one line per epoch."""

import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vitascope.training.loop import EpochRecord
from vitascope.training.loop import Progress as Between

LONG = 3600.0  # seconds; a longer run prints its estimated duration
LOOKING = 10.0  # seconds of training for the estimate
SHARES = {
    "train_accuracy": "train acc",
    "knn_accuracy": "k-NN",
    "val_accuracy": "val acc",
}


def shown(records: Iterator[Between | EpochRecord], epochs: int, done: int, console: Console) -> Iterator[EpochRecord]:
    """Yield the epoch records and show progress. Each kind of alarm is printed once."""
    records = _foretelling(_sounding(records, console), epochs, console)
    if not (console.is_terminal or console.is_jupyter):
        yield from _as_lines(records, epochs, console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("remaining"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("starting", total=epochs, completed=done)
        for record in records:
            if isinstance(record, EpochRecord):
                bar.update(task, completed=record.row["epoch"], description=describe(record.row, epochs))
                yield record
            else:
                bar.update(task, completed=record.epoch + record.step / record.steps)
                if record.epoch == done:  # there is no loss before the end of the first epoch
                    bar.update(task, description=f"epoch {done + 1}/{epochs}  {record.images_per_second:,.0f} images/s")


def _foretelling(
    records: Iterator[Between | EpochRecord], epochs: int, console: Console
) -> Iterator[Between | EpochRecord]:
    """Print the estimated duration of a long run once, after the first seconds. The first step is not counted."""
    first: tuple[float, float] | None = None
    looking = True
    for record in records:
        if looking and isinstance(record, Between):
            now, done = time.monotonic(), record.epoch + record.step / record.steps
            if first is None:
                first = now, done
            elif now - first[0] >= LOOKING:
                looking, left = False, (epochs - done) * (now - first[0]) / (done - first[1])
                if left > LONG:
                    console.print(long_run(left), style="yellow", soft_wrap=True, highlight=False)
        yield record


def long_run(seconds: float) -> str:
    hours = seconds / 3600
    said = f"{hours:.0f} hours" if hours >= 2 else f"{60 * hours:.0f} minutes"
    return (
        f"Estimated duration: about {said}. For a quick trial, stop with Ctrl-C and start again with "
        "train.epochs=1 data.fraction=0.1."
    )


def _sounding(records: Iterator[Between | EpochRecord], console: Console) -> Iterator[Between | EpochRecord]:
    told: set[str] = set()
    for record in records:
        if isinstance(record, EpochRecord) and record.alarm and record.alarm.kind not in told:
            told.add(record.alarm.kind)
            console.print(f"Epoch {record.row['epoch']}: {record.alarm.text}", style="bold red", soft_wrap=True)
        yield record


def _as_lines(records: Iterator[Between | EpochRecord], epochs: int, console: Console) -> Iterator[EpochRecord]:
    """Print one line per epoch, at most two per second."""
    last = 0.0
    for record in records:
        if isinstance(record, EpochRecord):
            if record.row["epoch"] == epochs or time.monotonic() - last > 0.5:
                console.print(describe(record.row, epochs), highlight=False, soft_wrap=True)
                last = time.monotonic()
            yield record


def describe(row: dict[str, float], epochs: int) -> str:
    """epoch 3/20  loss 1.234  train acc 56.7 %  val acc 55.1 %  12,345 images/s. Without labels, the accuracies are
    those of k-NN and a linear probe."""
    width = len(str(epochs))
    text = f"epoch {row['epoch']:>{width}}/{epochs}  loss {row['train_loss']:.3f}"
    words = SHARES | ({"val_accuracy": "linear probe"} if "train_accuracy" not in row else {})
    text += "".join(f"  {word} {row[name]:.1%}" for name, word in words.items() if name in row)
    return f"{text}  {row['images_per_second']:,.0f} images/s"
