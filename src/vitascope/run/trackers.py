"""Send metrics to wandb or mlflow if `train.track` names them; nothing is sent otherwise."""

from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from vitascope.errors import UserError
from vitascope.recipe.schema import Recipe
from vitascope.run.directory import Run


@runtime_checkable
class Tracker(Protocol):
    """Receives the metrics of every epoch."""

    def add(self, row: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class Wandb:
    """Keeps the same id when a run is resumed."""

    def __init__(self, wandb: ModuleType, recipe: Recipe, run: Run) -> None:
        self.session = wandb.init(
            project="vitascope",
            name=run.path.name,
            id=run.path.name,
            resume="allow",
            config=asdict(recipe),
            dir=str(run.path),
        )

    def add(self, row: dict[str, Any]) -> None:
        self.session.log(row, step=row["step"])

    def close(self) -> None:
        self.session.finish()


class Mlflow:
    def __init__(self, mlflow: ModuleType, recipe: Recipe, run: Run) -> None:
        self.mlflow = mlflow
        mlflow.set_experiment(f"vitascope-{recipe.name}")
        mlflow.start_run(run_name=run.path.name)
        parts = {"data": recipe.data, "model": recipe.model, "train": recipe.train}
        mlflow.log_params(
            {f"{part}.{key}": value for part, config in parts.items() for key, value in asdict(config).items()}
        )

    def add(self, row: dict[str, Any]) -> None:
        self.mlflow.log_metrics({key: value for key, value in row.items() if key != "step"}, step=row["step"])

    def close(self) -> None:
        self.mlflow.end_run()


TRACKERS: dict[str, Callable[[ModuleType, Recipe, Run], Tracker]] = {"wandb": Wandb, "mlflow": Mlflow}


def open_trackers(recipe: Recipe, run: Run) -> list[Tracker]:
    return [TRACKERS[name](_module(name), recipe, run) for name in recipe.train.track]


def _module(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(
            f"train.track names {name}, which is not installed. Install it with: pip install 'vitascope[{name}]'"
        ) from error
