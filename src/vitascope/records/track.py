"""A run -> which runs it may be compared with: its track, the stage before it, and its recipe without this machine.

pure: patches that do not overlap, attention, MLP, from scratch; tokenizer: shifted patches or convolutions; ssl: first
without labels on the same data; teacher: with another model's answers; pretrained: from weights that were made
elsewhere; staged: with labels on the same data first.
"""

from dataclasses import replace
from pathlib import Path

from vitascope.errors import UserError
from vitascope.recipe.schema import Recipe
from vitascope.run.directory import Run, is_run


def stage_before(run: Run) -> Run | None:
    """The run whose weights this one began with; None where it began with none, or with weights from elsewhere."""
    word = run.recipe.weights
    if not word:
        return None
    path = Path(word)
    if is_run(path):
        return Run(path)
    if path.is_absolute() and not path.exists():
        raise UserError(f"{run.path} began with the weights of {word}, which are gone: nobody can tell what they were.")
    return None


def stages_before(run: Run) -> list[Run]:
    """All of them, the first one first."""
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
    """The run's recipe; where it has a stage before it, that one's name instead of its place."""
    before = stage_before(run)
    return run.recipe if before is None else replace(run.recipe, weights=f"recipe:{before.recipe.name}")
