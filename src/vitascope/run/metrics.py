"""Write the metrics of each epoch to metrics.jsonl, TensorBoard and curves.png, and to trackers such as wandb."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from vitascope.draw import CurvePanel
from vitascope.errors import JSON_ERRORS, UserError
from vitascope.recipe.choices import load_objective
from vitascope.recipe.schema import convert_recipe_to_dict
from vitascope.run.files import write_atomically
from vitascope.run.stored_values import find_problem_of_epoch, find_problem_of_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitascope.recipe.schema import Recipe
    from vitascope.run.directory import Run

MetricsRow = dict[str, Any]  # one line of metrics.jsonl: metric -> value
CurvePoints = list[tuple[float, float]]  # (epoch, value)
LearningCurves = dict[str, dict[str, CurvePoints]]  # metric -> split -> points
LOSS_AND_ACCURACY = ("loss", "accuracy")


def read_metrics(path: Path) -> list[MetricsRow]:
    """Read all complete lines; skip an incomplete last line. Reject a line that is not the metrics of an epoch."""
    return _read_epoch_lines(path, find_problem_of_metrics)


def _read_epoch_lines(path: Path, find_problem: Callable[[Any], str | None]) -> list[dict[str, Any]]:
    """Read all complete lines. `find_problem` returns what is wrong with a line's content, or None."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    rows = []
    for line_number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
            problem = find_problem(row)
        except JSON_ERRORS:
            if line_number == len(lines):
                break
            row, problem = None, "is not valid JSON for an epoch"
        if problem:
            raise UserError(f"{path}, line {line_number} {problem}. Repair or delete the line.")
        rows.append(row)
    return rows


def truncate_metrics_file_after_epoch(path: Path, epoch: int) -> list[MetricsRow]:
    """Delete the lines after an epoch, because a resumed run writes them again."""
    rows = [row for row in _read_epoch_lines(path, find_problem_of_epoch) if row["epoch"] <= epoch]
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


class TensorBoardWriter:
    """TensorBoard's event file, rewritten from the metrics when a run is resumed, so that no step appears twice."""

    def __init__(self, folder: Path, rows: list[MetricsRow]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for old_file in folder.glob("events.out.tfevents.*"):
            old_file.unlink()
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


def save_run_curves_figure(run_folder: Path, rows: list[MetricsRow], recipe: "Recipe", title: str) -> None:
    """Draw training and validation loss and accuracy over epochs as curves.png."""
    from vitascope.draw.style import save_figure

    save_figure(draw_run_curves(rows, recipe, title), run_folder / "curves.png")


def draw_run_curves(rows: list[MetricsRow], recipe: "Recipe", title: str) -> "Figure":
    """Draw loss and accuracy over epochs, and the further panels of the objective."""
    from vitascope.draw.curves import draw_learning_curves  # imports matplotlib

    objective = load_objective(recipe.train.objective)
    curves = extract_learning_curves(rows, objective.curve_panels)
    return draw_learning_curves(curves, title, objective.loss_name, objective.curve_panels)


def extract_learning_curves(
    rows: list[MetricsRow], extra_panels: Mapping[str, CurvePanel] | None = None
) -> LearningCurves:
    """Return `[loss or accuracy][train or validation]`, and the lines of each further panel."""
    curves = {
        quantity: _extract_metric_points(rows, {"train": f"train_{quantity}", "validation": f"val_{quantity}"})
        for quantity in LOSS_AND_ACCURACY
    }
    if any("knn_accuracy" in row for row in rows):
        curves["accuracy"] |= _extract_metric_points(rows, {"k-nearest neighbours": "knn_accuracy"})
    further = {
        name: _extract_metric_points(rows, panel.metric_by_label) for name, panel in (extra_panels or {}).items()
    }
    return curves | {name: lines for name, lines in further.items() if any(lines.values())}


def _extract_metric_points(rows: list[MetricsRow], metric_by_label: dict[str, str]) -> dict[str, CurvePoints]:
    return {
        label: [(row["epoch"], row[metric]) for row in rows if metric in row]
        for label, metric in metric_by_label.items()
    }


def sum_epoch_seconds(rows: list[MetricsRow]) -> float:
    """Return the seconds of all epochs, including compilation and CUDA graph capture."""
    return sum(row["seconds"] for row in rows)


def sum_seconds_without_setup(rows: list[MetricsRow]) -> float:
    """Return the seconds of all epochs without set-up: the first epoch counts like the median of the next three."""
    return sum(list_epoch_seconds_without_setup(rows))


def list_epoch_seconds_without_setup(rows: list[MetricsRow], column: str = "seconds") -> list[float]:
    """Return the seconds of each epoch without set-up. Creating and whitening the weights counts."""
    seconds = [row[column] for row in rows]
    init_seconds = rows[0].get("prepared_seconds", 0.0) if rows and column == "seconds" else 0.0
    if len(seconds) > 1:
        seconds[0] = init_seconds + min(seconds[0] - init_seconds, median(seconds[1:4]))
    return seconds


@runtime_checkable
class Tracker(Protocol):
    """Receives the metrics of every epoch."""

    def log_epoch(self, metrics: MetricsRow) -> None: ...
    def close(self) -> None: ...


class WandbTracker:
    """Send metrics to Weights & Biases; a resumed run keeps its id."""

    def __init__(self, wandb: ModuleType, recipe: "Recipe", run: "Run") -> None:
        self.wandb_run = wandb.init(
            project="vitascope",
            name=run.path.name,
            id=run.path.name,
            resume="allow",
            config=convert_recipe_to_dict(recipe),
            dir=str(run.path),
        )

    def log_epoch(self, metrics: MetricsRow) -> None:
        self.wandb_run.log(metrics, step=metrics["step"])

    def close(self) -> None:
        self.wandb_run.finish()


class MlflowTracker:
    """Send metrics to MLflow."""

    def __init__(self, mlflow: ModuleType, recipe: "Recipe", run: "Run") -> None:
        self.mlflow = mlflow
        mlflow.set_experiment(f"vitascope-{recipe.name}")
        mlflow.start_run(run_name=run.path.name)
        sections = {"data": recipe.data, "model": recipe.model, "train": recipe.train}
        mlflow.log_params(
            {f"{name}.{key}": value for name, section in sections.items() for key, value in asdict(section).items()}
        )

    def log_epoch(self, metrics: MetricsRow) -> None:
        self.mlflow.log_metrics({key: value for key, value in metrics.items() if key != "step"}, step=metrics["step"])

    def close(self) -> None:
        self.mlflow.end_run()


TRACKER_CLASSES: dict[str, Callable[[ModuleType, "Recipe", "Run"], Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}


def open_trackers(recipe: "Recipe", run: "Run") -> list[Tracker]:
    """Open the trackers that `train.track` names."""
    return [TRACKER_CLASSES[name](_import_tracker_package(name), recipe, run) for name in recipe.train.track]


def _import_tracker_package(package: str) -> ModuleType:
    try:
        return import_module(package)
    except ImportError as error:
        raise UserError(
            f"train.track names {package}, which is not installed. Install it with: pip install 'vitascope[{package}]'"
        ) from error
