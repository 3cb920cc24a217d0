"""Load the pretrained weights of a recipe, adapted to its image size and classes."""

from dataclasses import replace
from pathlib import Path

from vitascope.recipe.schema import Recipe
from vitascope.run.directory import is_run, open_run
from vitascope.weights.adaptation import CHANGEABLE, WITHOUT_WEIGHTS, Adapted, adapt
from vitascope.weights.files import ENDINGS
from vitascope.weights.pretrained import ONLINE, open_weights
from vitascope.weights.report import Change, Report


def pretrained(recipe: Recipe, classes: list[str] | None = None) -> Adapted:
    """Load and adapt the weights. `classes`: class names of the data, None if it has none."""
    found = open_weights(settled_word(recipe.weights or ""), img_size=recipe.model.img_size)
    # These settings come from the recipe, all others from the weights.
    settings = {name: getattr(recipe.model, name) for name in (*CHANGEABLE, *WITHOUT_WEIGHTS)}
    # A linear probe was trained with labels that this run may have to do without.
    keep = not found.facts.probe
    made = adapt(found, classes=classes, keep_classifier=keep, seed=recipe.train.seed, **settings)
    made = replace(made, facts=replace(made.facts, probe=False))
    if classes is not None or "head.weight" in made.report.new:
        return made
    note = "the classifier was kept, because the data has no class names to compare"
    return replace(made, report=replace(made.report, notes=[*made.report.notes, note]))


def seen_before(recipe: Recipe) -> str | None:
    """A warning if the weights come from a run on the same data with other validation images."""
    path = Path(recipe.weights or "")
    if recipe.data.validation == 0 or not is_run(path):
        return None
    earlier = open_run(path).recipe
    same = earlier.data.name == recipe.data.name
    ours, theirs = ((one.train.seed, one.data.validation) for one in (recipe, earlier))
    if not same or ours == theirs:
        return None
    return (
        "  note: the weights were trained on some of the validation images, so validation accuracy will be too high. "
        f"For the same validation images, set train.seed={theirs[0]} data.validation={theirs[1]}."
    )


def settled_word(word: str) -> str:
    """Make the path absolute. The folder of a recipe stands for its newest run."""
    path = Path(word).expanduser()
    if word.startswith(ONLINE) or not path.exists():
        return word
    if path.suffix not in ENDINGS and not (path / "config.json").is_file():
        path = open_run(path).path
    return str(path.resolve())


def told(report: Report) -> str:
    """The report as a few lines for the terminal."""
    lines = [f"Weights: {report.weights} (format: {report.library}), {report.kept} tensors unchanged"]
    if (report.image_before, report.patch_before) != (report.image_after, report.patch_after):
        image, patch = (
            rows if rows == columns else f"[{rows},{columns}]"
            for rows, columns in (report.image_before, report.patch_before)
        )
        lines.append(
            f"  image size {_arrow(report.image_before, report.image_after)}, patch size "
            f"{_arrow(report.patch_before, report.patch_after)} pixels, as in the recipe. "
            f"The weights' own sizes: model.img_size={image} model.patch_size={patch}"
        )
    lines += [f"  {_describe_change(change, report)}, relative error {change.lost:.0%}" for change in report.resampled]
    if report.dropped:
        lines.append(f"  removed: {', '.join(report.dropped)}")
    if report.new:
        lines.append(f"  newly initialised: {', '.join(report.new)}")
    lines += [f"  assumed: {words}" for words in report.assumed] + [f"  note: {words}" for words in report.notes]
    return "\n".join(lines)


def _describe_change(change: Change, report: Report) -> str:
    if change.name == "pos_embed":
        how = f"resampled for the grid of patches {_arrow(report.grid_before, report.grid_after)}, {change.how}"
    elif change.before[2:] != change.after[2:]:
        how = f"resampled for patches of {_arrow(report.patch_before, report.patch_after)} pixels, {change.how}"
    else:
        how = change.how
    return f"{change.name}: {how}"


def _arrow(before: list[int], after: list[int]) -> str:
    """14×14 → 8×8."""
    return " → ".join("×".join(map(str, sides)) for sides in (before, after))
