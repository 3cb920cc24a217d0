"""Write the metrics of each epoch to metrics.jsonl, TensorBoard and curves.png."""

import json
import math
from pathlib import Path
from statistics import median
from typing import Any

from vitascope.errors import UserError
from vitascope.run.files import write_whole

Row = dict[str, Any]
LOSS_AND_ACCURACY = ("loss", "accuracy")


def read_metrics(path: Path) -> list[Row]:
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


def forget_after(path: Path, epoch: int) -> list[Row]:
    """Delete the lines after an epoch, because a resumed run writes them again."""
    rows = [row for row in read_metrics(path) if row["epoch"] <= epoch]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


class Events:
    """TensorBoard's event file, rewritten from the metrics when a run is resumed, so that no step appears twice."""

    def __init__(self, folder: Path, rows: list[Row]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self.writer = SummaryWriter(str(folder))
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        for name, value in row.items():
            if name not in ("epoch", "step") and isinstance(value, int | float) and math.isfinite(value):
                self.writer.add_scalar(
                    name.replace("train_", "train/").replace("val_", "validation/"), value, row["step"]
                )

    def close(self) -> None:
        self.writer.close()


def draw_run_curves(path: Path, rows: list[Row], title: str) -> None:
    """Draw training and validation loss and accuracy over epochs."""
    from vitascope.draw.curves import draw_curves  # imports matplotlib
    from vitascope.draw.look import save

    save(draw_curves(curves_of(rows), title), path)


def curves_of(rows: list[Row]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return `[loss or accuracy][train or validation]`: (epoch, value), for DINO also `[teacher]`."""
    kinds = {kind: _lines(rows, {"train": f"train_{kind}", "validation": f"val_{kind}"}) for kind in LOSS_AND_ACCURACY}
    if any("knn_accuracy" in row for row in rows):
        kinds["accuracy"] |= _lines(rows, {"k-nearest neighbours": "knn_accuracy"})
    if any("teacher_entropy" in row for row in rows):
        kinds["teacher"] = _lines(
            rows, {"entropy": "teacher_entropy", "KL divergence": "divergence", "ln K (uniform)": "uniform_loss"}
        )
    return kinds


def _lines(rows: list[Row], names: dict[str, str]) -> dict[str, list[tuple[float, float]]]:
    return {word: [(row["epoch"], row[name]) for row in rows if name in row] for word, name in names.items()}


def whole_seconds(rows: list[Row]) -> float:
    """Return the seconds of all epochs, including compilation and CUDA graph capture."""
    return sum(row["seconds"] for row in rows)


def steady_seconds(rows: list[Row]) -> float:
    """Return the seconds of all epochs without set-up: the first epoch counts like the median of the next three."""
    return sum(steady_times(rows))


def steady_times(rows: list[Row], name: str = "seconds") -> list[float]:
    """Return the seconds of each epoch without set-up. Creating and whitening the weights counts."""
    seconds = [row[name] for row in rows]
    prepared = rows[0].get("prepared_seconds", 0.0) if rows and name == "seconds" else 0.0
    if len(seconds) > 1:
        seconds[0] = prepared + min(seconds[0] - prepared, median(seconds[1:4]))
    return seconds
