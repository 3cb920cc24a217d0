"""Run folders: `runs/<recipe>/<date>-seed<n>/`, created once and never overwritten."""

import os
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from vitascope.data.config import AugmentConfig, DataConfig
from vitascope.draw.html import drawn, html_table
from vitascope.errors import UserError
from vitascope.model.config import ModelConfig
from vitascope.recipe.reading import has_old_names, read_recipe
from vitascope.recipe.schema import Recipe
from vitascope.recipe.writing import recipe_yaml
from vitascope.run.files import make_folder, read_json, write_whole
from vitascope.run.metrics import curves_of, read_metrics

_MIRRORED = AugmentConfig(flip=0.5)


@dataclass(frozen=True)
class Run:
    """A run folder."""

    path: Path

    @property
    def recipe(self) -> Recipe:
        return read_recipe(str(self.file("recipe.yaml")), convert_old=True)

    @property
    def is_from_older_version(self) -> bool:
        return has_old_names(self.file("recipe.yaml"))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One row per finished epoch."""
        return read_metrics(self.file("metrics.jsonl"))

    @property
    def machine(self) -> dict[str, Any]:
        """Machine and versions of the run; empty if they cannot be read."""
        return read_json(self.file("machine.json"))

    @property
    def finished(self) -> bool:
        return self.file("model.safetensors").is_file()

    def file(self, name: str) -> Path:
        return self.path / name

    def _repr_html_(self) -> str:
        """Show path, results and learning curves in a notebook."""
        from vitascope.draw.curves import draw_curves  # imports matplotlib

        rows = self.metrics
        last = {name: f"{value:.4g}" for name, value in (rows[-1] if rows else {}).items()}
        facts = [["run", str(self.path)], ["finished", "yes" if self.finished else "no"], *map(list, last.items())]
        picture = drawn(draw_curves(curves_of(rows), self.recipe.name)) if rows else ""
        return html_table(["run", ""], facts) + picture

    def __fspath__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class Outside(Run):
    """A model from pretrained weights, without a run. `path` is the folder for its evaluations."""

    word: str
    model: ModelConfig

    @property
    def recipe(self) -> Recipe:
        # Published weights were usually trained with flips.
        return Recipe(name=self.path.name, weights=self.word, model=self.model, data=DataConfig(augment=_MIRRORED))


def outside(word: str, model: ModelConfig) -> Outside:
    """Return pretrained weights with a folder for their evaluations: hf:user/model -> evaluated/hf-user-model.

    A file or folder gives its own name. A file called model.safetensors gives the name of its folder too."""
    path, name = Path(word), word
    if path.exists():
        name = path.resolve().name.removesuffix(path.suffix)
        if path.is_file() and name in ("model", "pytorch_model"):
            name = f"{path.resolve().parent.name}-{name}"
    return Outside(Path("evaluated") / re.sub(r"[^\w.-]+", "-", name).strip("-."), word, model)


def refuse_run(folder: Path) -> None:
    """Reject a run as the output folder of a model: both have files of the same names."""
    if (folder / "recipe.yaml").exists():
        raise UserError(f"{folder} is a run, and its files would be overwritten. Choose another folder.")


def new_run(recipe: Recipe, runs: Path) -> Run:
    """Create a new run folder with the complete recipe."""
    stem = f"{datetime.now():%Y-%m-%d_%H-%M-%S}-seed{recipe.train.seed}"
    folder = runs / recipe.name
    make_folder(folder, "Choose another folder with --runs.")
    for extra in ("", *(f"-{number}" for number in range(2, 1000))):
        try:
            (folder / (stem + extra)).mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(
                f"No run can be created in {folder}: {error.strerror}. Choose another folder with --runs."
            ) from error
        run = Run(folder / (stem + extra))
        write_whole(run.file("recipe.yaml"), recipe_yaml(recipe))
        return run
    raise UserError(f"{folder} already has 1,000 runs that started in this second. Try again.")


def is_run(path: Path) -> bool:
    """Return whether a folder is a run: it has a recipe.yaml, and a run's name or a machine.json."""
    named = re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-seed\d+(-\d+)?", path.resolve().name)
    return (path / "recipe.yaml").is_file() and bool(named or (path / "machine.json").is_file())


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open an existing run. A recipe's folder gives its newest run."""
    place = Path(path)
    if (place / "recipe.yaml").is_file():
        return Run(place)
    inside = sorted(file.parent for file in place.glob("*/recipe.yaml")) if place.is_dir() else []
    if inside:
        return Run(inside[-1])
    if not place.exists():
        raise UserError(f"There is no run {place}. Runs are in runs/<recipe>/<date>-seed<n>/.")
    raise UserError(f"{place} is not a run: it has no recipe.yaml. Runs are in runs/<recipe>/<date>-seed<n>/.")
