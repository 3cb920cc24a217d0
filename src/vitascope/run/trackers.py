"""Send metrics to wandb or mlflow if `train.track` names them; nothing is sent otherwise."""

from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from types import ModuleType
from typing import Protocol, runtime_checkable

from vitascope.errors import UserError
from vitascope.recipe.schema import Recipe
from vitascope.run.directory import Run
from vitascope.run.metrics import MetricsRow


@runtime_checkable
class Tracker(Protocol):
    """Receives the metrics of every epoch."""

    def log_epoch(self, metrics: MetricsRow) -> None: ...
    def close(self) -> None: ...


class WandbTracker:
    """Send metrics to Weights & Biases; a resumed run keeps its id."""

    def __init__(self, wandb: ModuleType, recipe: Recipe, run: Run) -> None:
        self.wandb_run = wandb.init(
            project="vitascope",
            name=run.path.name,
            id=run.path.name,
            resume="allow",
            config=asdict(recipe),
            dir=str(run.path),
        )

    def log_epoch(self, metrics: MetricsRow) -> None:
        self.wandb_run.log(metrics, step=metrics["step"])

    def close(self) -> None:
        self.wandb_run.finish()


class MlflowTracker:
    """Send metrics to MLflow."""

    def __init__(self, mlflow: ModuleType, recipe: Recipe, run: Run) -> None:
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


TRACKER_CLASSES: dict[str, Callable[[ModuleType, Recipe, Run], Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}


def open_trackers(recipe: Recipe, run: Run) -> list[Tracker]:
    """Open the trackers that `train.track` names."""
    return [TRACKER_CLASSES[name](_import_tracker_package(name), recipe, run) for name in recipe.train.track]


def _import_tracker_package(package: str) -> ModuleType:
    try:
        return import_module(package)
    except ImportError as error:
        raise UserError(
            f"train.track names {package}, which is not installed. Install it with: pip install 'vitascope[{package}]'"
        ) from error
