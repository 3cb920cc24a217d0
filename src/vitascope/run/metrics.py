"""Write the metrics of each epoch to metrics.jsonl, TensorBoard and curves.png."""

import json
import math
from pathlib import Path
from statistics import median
from typing import Any

from vitascope.errors import UserError
from vitascope.run.files import write_atomically

MetricsRow = dict[str, Any]
LOSS_AND_ACCURACY = ("loss", "accuracy")


def read_metrics(path: Path) -> list[MetricsRow]:
    """Read all complete lines; skip an incomplete last line."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                rows.append({**json.loads(line)})
        except (json.JSONDecodeError, TypeError) as error:
            if number < len(lines):
                raise UserError(
                    f"{path}, line {number} is not valid JSON for an epoch. Repair or delete the line."
                ) from error
    return rows


def truncate_metrics_after(path: Path, epoch: int) -> list[MetricsRow]:
    """Delete the lines after an epoch, because a resumed run writes them again."""
    rows = [row for row in read_metrics(path) if row["epoch"] <= epoch]
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


class TensorBoardWriter:
    """TensorBoard's event file, rewritten from the metrics when a run is resumed, so that no step appears twice."""

    def __init__(self, folder: Path, rows: list[MetricsRow]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self.writer = SummaryWriter(str(folder))
        for row in rows:
            self.log_epoch(row)

    def log_epoch(self, metrics: MetricsRow) -> None:
        for name, value in metrics.items():
            if name not in ("epoch", "step") and isinstance(value, int | float) and math.isfinite(value):
                self.writer.add_scalar(
                    name.replace("train_", "train/").replace("val_", "validation/"), value, metrics["step"]
                )

    def close(self) -> None:
        self.writer.close()


def draw_run_curves(path: Path, rows: list[MetricsRow], title: str) -> None:
    """Draw training and validation loss and accuracy over epochs."""
    from vitascope.draw.curves import draw_learning_curves  # imports matplotlib
    from vitascope.draw.style import save_figure

    save_figure(draw_learning_curves(extract_curves(rows), title), path)


def extract_curves(rows: list[MetricsRow]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return `[loss or accuracy][train or validation]`: (epoch, value), for DINO also `[teacher]`."""
    kinds = {
        kind: _extract_lines(rows, {"train": f"train_{kind}", "validation": f"val_{kind}"})
        for kind in LOSS_AND_ACCURACY
    }
    if any("knn_accuracy" in row for row in rows):
        kinds["accuracy"] |= _extract_lines(rows, {"k-nearest neighbours": "knn_accuracy"})
    if any("teacher_entropy" in row for row in rows):
        kinds["teacher"] = _extract_lines(
            rows, {"entropy": "teacher_entropy", "KL divergence": "divergence", "ln K (uniform)": "uniform_loss"}
        )
    return kinds


def _extract_lines(rows: list[MetricsRow], metric_by_label: dict[str, str]) -> dict[str, list[tuple[float, float]]]:
    return {word: [(row["epoch"], row[name]) for row in rows if name in row] for word, name in metric_by_label.items()}


def sum_epoch_seconds(rows: list[MetricsRow]) -> float:
    """Return the seconds of all epochs, including compilation and CUDA graph capture."""
    return sum(row["seconds"] for row in rows)


def sum_seconds_without_setup(rows: list[MetricsRow]) -> float:
    """Return the seconds of all epochs without set-up: the first epoch counts like the median of the next three."""
    return sum(list_seconds_without_setup(rows))


def list_seconds_without_setup(rows: list[MetricsRow], column: str = "seconds") -> list[float]:
    """Return the seconds of each epoch without set-up. Creating and whitening the weights counts."""
    seconds = [row[column] for row in rows]
    prepared = rows[0].get("prepared_seconds", 0.0) if rows and column == "seconds" else 0.0
    if len(seconds) > 1:
        seconds[0] = prepared + min(seconds[0] - prepared, median(seconds[1:4]))
    return seconds
