"""Epochs -> lines in metrics.jsonl, TensorBoard events and curves.png."""

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
    """All whole lines; a last line torn by a kill is left out."""
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
                raise UserError(f"{path}, line {number} is not an epoch. Mend or delete the line.") from error
    return rows


def forget_after(path: Path, epoch: int) -> list[Row]:
    """Keep the lines up to an epoch: a resumed run writes the later ones again."""
    rows = [row for row in read_metrics(path) if row["epoch"] <= epoch]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


class Events:
    """TensorBoard's event file, written anew from the metrics when a run is resumed, so that no step is doubled."""

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
    """Loss and accuracy, train and validation, over epochs."""
    from vitascope.draw.curves import draw_curves  # imports matplotlib
    from vitascope.draw.look import save

    save(draw_curves(curves_of(rows), title), path)


def curves_of(rows: list[Row]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """`[loss or accuracy][train or validation]`: (epoch, value); of DINO also `[teacher]`, how its answers are."""
    kinds = {kind: _lines(rows, {"train": f"train_{kind}", "validation": f"val_{kind}"}) for kind in LOSS_AND_ACCURACY}
    if any("knn_accuracy" in row for row in rows):
        kinds["accuracy"] |= _lines(rows, {"nearest neighbours": "knn_accuracy"})
    if any("teacher_entropy" in row for row in rows):
        kinds["teacher"] = _lines(
            rows, {"entropy": "teacher_entropy", "student's distance": "divergence", "ln K: all alike": "uniform_loss"}
        )
    return kinds


def _lines(rows: list[Row], names: dict[str, str]) -> dict[str, list[tuple[float, float]]]:
    return {word: [(row["epoch"], row[name]) for row in rows if name in row] for word, name in names.items()}


def whole_seconds(rows: list[Row]) -> float:
    """From images on the device to the last epoch's end, with compiling and recording the step."""
    return sum(row["seconds"] for row in rows)


def steady_seconds(rows: list[Row]) -> float:
    """The same without setting up: the first epoch, which holds it, counts like the median of the few that follow
    (later ones may be of larger images)."""
    return sum(steady_times(rows))


def steady_times(rows: list[Row], name: str = "seconds") -> list[float]:
    """Epoch by epoch. Making the weights, and what was learnt from the images before the first step (whitening), is no
    setting up: it counts."""
    seconds = [row[name] for row in rows]
    prepared = rows[0].get("prepared_seconds", 0.0) if rows and name == "seconds" else 0.0
    if len(seconds) > 1:
        seconds[0] = prepared + min(seconds[0] - prepared, median(seconds[1:4]))
    return seconds
