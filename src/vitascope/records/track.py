"""The track of a run, which says which runs it may be compared with, and its earlier stages.

pure: non-overlapping patches, attention and MLP, trained from scratch. tokenizer: shifted patches or convolutions. ssl:
self-supervised pretraining on the same data. teacher: distillation from another model. pretrained: weights from another
data set. staged: supervised pretraining on the same data.
"""

from dataclasses import replace
from pathlib import Path

from vitascope.errors import UserError
from vitascope.recipe.schema import Recipe
from vitascope.run.directory import Run, is_run


def stage_before(run: Run) -> Run | None:
    """The run whose weights this one started from; None if it started from scratch or from a weights file."""
    word = run.recipe.weights
    if not word:
        return None
    path = Path(word)
    if is_run(path):
        return Run(path)
    if path.is_absolute() and not path.exists():
        raise UserError(
            f"{run.path} started from the weights of {word}, which no longer exist. Restore them or train again."
        )
    return None


def stages_before(run: Run) -> list[Run]:
    """All earlier stages, the first one first."""
    before = stage_before(run)
    return [] if before is None else [*stages_before(before), before]


def track_of(run: Run) -> str:
    recipe, before = run.recipe, stage_before(run)
    if recipe.train.distill:
        return "teacher"
    if before is not None:
        if before.recipe.data.name != recipe.data.name:
            return "pretrained"
        earlier = track_of(before)
        return "staged" if earlier in ("pure", "tokenizer") else earlier
    if recipe.weights:
        return "pretrained"
    if recipe.train.objective != "classify":
        return "ssl"
    return "pure" if recipe.model.tokenizer == "patch" else "tokenizer"


def published(run: Run) -> Recipe:
    """The run's recipe; an earlier stage is given by its recipe name instead of its path."""
    before = stage_before(run)
    return run.recipe if before is None else replace(run.recipe, weights=f"recipe:{before.recipe.name}")
