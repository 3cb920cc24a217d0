"""Run folders: `runs/<recipe>/<date>-seed<n>/`, created once and never overwritten."""

import os
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from vitascope.data.config import AugmentConfig, DataConfig
from vitascope.draw.html import Part, Picture, Table, format_parts_for_notebook
from vitascope.errors import UserError
from vitascope.model.config import ModelConfig
from vitascope.recipe.reading import has_old_setting_names, read_recipe
from vitascope.recipe.schema import Recipe, format_recipe_yaml
from vitascope.run.files import make_folder, read_json_object_or_empty, write_atomically
from vitascope.run.machine import RunMachineInfo
from vitascope.run.metrics import MetricsRow, draw_run_curves, read_metrics
from vitascope.run.stored_values import keep_valid_machine_fields

_FLIP_AUGMENTATION = AugmentConfig(flip=0.5)


@dataclass(frozen=True)
class Run:
    """A run folder."""

    path: Path

    @property
    def recipe(self) -> Recipe:
        return read_recipe(str(self.get_path("recipe.yaml")), convert_old_names=True)

    @property
    def is_from_older_version(self) -> bool:
        return has_old_setting_names(self.get_path("recipe.yaml"))

    @property
    def metrics(self) -> list[MetricsRow]:
        """One row per finished epoch."""
        return read_metrics(self.get_path("metrics.jsonl"))

    @property
    def machine(self) -> RunMachineInfo:
        """Machine and versions of the run, without fields that cannot be read."""
        return keep_valid_machine_fields(read_json_object_or_empty(self.get_path("machine.json")))

    @property
    def training_precision(self) -> str | None:
        """The precision of training and validation, such as bfloat16; None if it is not known."""
        return self.machine.get("hardware", {}).get("precision")

    @property
    def is_finished(self) -> bool:
        return self.get_path("model.safetensors").is_file()

    def get_path(self, file_name: str) -> Path:
        return self.path / file_name

    def _repr_html_(self) -> str:
        """Show path, results and learning curves in a notebook."""
        rows = self.metrics
        last_metrics = {name: f"{value:.4g}" for name, value in (rows[-1] if rows else {}).items()}
        finished = "yes" if self.is_finished else "no"
        parts: list[Part] = [
            Table(["run", ""], [["run", str(self.path)], ["finished", finished], *map(list, last_metrics.items())])
        ]
        if rows:
            parts.append(Picture.from_figure("curves", draw_run_curves(rows, self.recipe, self.recipe.name)))
        return format_parts_for_notebook(parts)

    def __fspath__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class ExternalWeightsRun(Run):
    """A model from pretrained weights, without a run. `path` is the folder for its evaluations."""

    model_ref: str
    model_config: ModelConfig

    @property
    def recipe(self) -> Recipe:
        # Published weights were usually trained with flips.
        return Recipe(
            name=self.path.name,
            weights=self.model_ref,
            model=self.model_config,
            data=DataConfig(augment=_FLIP_AUGMENTATION),
        )


def make_run_for_external_weights(model_ref: str, model_config: ModelConfig) -> ExternalWeightsRun:
    """Return pretrained weights with a folder for their evaluations: hf:user/model -> evaluated/hf-user-model.

    A file or folder gives its own name. A file called model.safetensors gives the name of its folder too."""
    path, name = Path(model_ref), model_ref
    if path.exists():
        name = path.resolve().name.removesuffix(path.suffix)
        if path.is_file() and name in ("model", "pytorch_model"):
            name = f"{path.resolve().parent.name}-{name}"
    return ExternalWeightsRun(Path("evaluated") / re.sub(r"[^\w.-]+", "-", name).strip("-."), model_ref, model_config)


def check_not_run_folder(folder: Path) -> None:
    """Reject a run as the output folder of a model: both have files of the same names."""
    if (folder / "recipe.yaml").exists():
        raise UserError(f"{folder} is a run, and its files would be overwritten. Choose another folder.")


def create_run_folder(recipe: Recipe, runs_folder: Path) -> Run:
    """Create a new run folder with the complete recipe."""
    stem = f"{datetime.now():%Y-%m-%d_%H-%M-%S}-seed{recipe.train.seed}"
    folder = runs_folder / recipe.name
    make_folder(folder, "Choose another folder with --runs.")
    for suffix in ("", *(f"-{count}" for count in range(2, 1000))):
        try:
            (folder / (stem + suffix)).mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(
                f"No run can be created in {folder}: {error.strerror}. Choose another folder with --runs."
            ) from error
        run = Run(folder / (stem + suffix))
        write_atomically(run.get_path("recipe.yaml"), format_recipe_yaml(recipe))
        return run
    raise UserError(f"{folder} already has 1,000 runs that started in this second. Try again.")


def is_run_folder(path: Path) -> bool:
    """Return whether a folder is a run: it has a recipe.yaml, and a run's name or a machine.json."""
    has_run_name = re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-seed\d+(-\d+)?", path.resolve().name)
    return (path / "recipe.yaml").is_file() and bool(has_run_name or (path / "machine.json").is_file())


def open_run_or_newest(path: str | os.PathLike[str]) -> Run:
    """Open an existing run. A recipe's folder gives its newest run."""
    folder = Path(path)
    if (folder / "recipe.yaml").is_file():
        return Run(folder)
    runs = sorted(file.parent for file in folder.glob("*/recipe.yaml")) if folder.is_dir() else []
    if runs:
        return Run(runs[-1])
    if not folder.exists():
        raise UserError(f"There is no run {folder}. Runs are in runs/<recipe>/<date>-seed<n>/.")
    raise UserError(f"{folder} is not a run: it has no recipe.yaml. Runs are in runs/<recipe>/<date>-seed<n>/.")
