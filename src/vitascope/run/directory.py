"""A run's directory: `runs/<recipe>/<when>-seed<n>/`, made once and never overwritten."""

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
    """What a run left on disk."""

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
        """What the run wrote about where and with what it was made; empty where it cannot be read."""
        return read_json(self.file("machine.json"))

    @property
    def finished(self) -> bool:
        return self.file("model.safetensors").is_file()

    def file(self, name: str) -> Path:
        return self.path / name

    def _repr_html_(self) -> str:
        """For a notebook: where it is, what it came to, its curves."""
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
    """A model that was not trained here: `path` is only for what is found out about it."""

    word: str
    model: ModelConfig

    @property
    def recipe(self) -> Recipe:
        # Published weights have seen mirror images; those of grey digits are hardly published.
        return Recipe(name=self.path.name, weights=self.word, model=self.model, data=DataConfig(augment=_MIRRORED))


def outside(word: str, model: ModelConfig) -> Outside:
    """hf:someone/something -> evaluated/hf-someone-something; a file or folder by its own name, with its folder's where
    every such file has the same (model.safetensors)."""
    path, name = Path(word), word
    if path.exists():
        name = path.resolve().name.removesuffix(path.suffix)
        if path.is_file() and name in ("model", "pytorch_model"):
            name = f"{path.resolve().parent.name}-{name}"
    return Outside(Path("evaluated") / re.sub(r"[^\w.-]+", "-", name).strip("-."), word, model)


def refuse_run(folder: Path) -> None:
    """Before a model is written into a folder: a run has files of the same names."""
    if (folder / "recipe.yaml").exists():
        raise UserError(f"{folder} is a run, and its own files would be overwritten. Name another folder.")


def new_run(recipe: Recipe, runs: Path) -> Run:
    """An empty directory of its own, with the complete recipe in it."""
    stem = f"{datetime.now():%Y-%m-%d_%H-%M-%S}-seed{recipe.train.seed}"
    folder = runs / recipe.name
    make_folder(folder, "Choose another place with --runs.")
    for extra in ("", *(f"-{number}" for number in range(2, 1000))):
        try:
            (folder / (stem + extra)).mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(
                f"No run can be made in {folder}: {error.strerror}. Choose another place with --runs."
            ) from error
        run = Run(folder / (stem + extra))
        write_whole(run.file("recipe.yaml"), recipe_yaml(recipe))
        return run
    raise UserError(f"{folder} already has a thousand runs of this second.")


def is_run(path: Path) -> bool:
    """Not every folder with a recipe.yaml: runs have a name of their own, or have said what they run on."""
    named = re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-seed\d+(-\d+)?", path.resolve().name)
    return (path / "recipe.yaml").is_file() and bool(named or (path / "machine.json").is_file())


def open_run(path: str | os.PathLike[str]) -> Run:
    """An existing run; a recipe's folder means its newest run."""
    place = Path(path)
    if (place / "recipe.yaml").is_file():
        return Run(place)
    inside = sorted(file.parent for file in place.glob("*/recipe.yaml")) if place.is_dir() else []
    if inside:
        return Run(inside[-1])
    raise UserError(f"{place} is not a run: it has no recipe.yaml. Runs lie in runs/<recipe>/<when>-seed<n>/.")
