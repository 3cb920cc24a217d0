"""A recipe's `weights` -> the weights a training starts from, fitted to the recipe's images and classes."""

from dataclasses import replace
from pathlib import Path

from vitascope.recipe.schema import Recipe
from vitascope.run.directory import is_run, open_run
from vitascope.weights.adaptation import CHANGEABLE, WITHOUT_WEIGHTS, Adapted, adapt
from vitascope.weights.files import ENDINGS
from vitascope.weights.pretrained import ONLINE, open_weights
from vitascope.weights.report import Report


def pretrained(recipe: Recipe, classes: list[str] | None = None) -> Adapted:
    """`classes`: what the data calls them; None where it does not say."""
    found = open_weights(settled_word(recipe.weights or ""), img_size=recipe.model.img_size)
    # What of recipe.model stays the recipe's; the rest is as the weights are.
    settings = {name: getattr(recipe.model, name) for name in (*CHANGEABLE, *WITHOUT_WEIGHTS)}
    # A linear probe has seen labels that this training may be meant to do without.
    keep = not found.facts.probe
    made = adapt(found, classes=classes, keep_classifier=keep, seed=recipe.train.seed, **settings)
    made = replace(made, facts=replace(made.facts, probe=False))
    if classes is not None or "head.weight" in made.report.new:
        return made
    note = "the classifier was kept: nothing tells what the data's classes are called"
    return replace(made, report=replace(made.report, notes=[*made.report.notes, note]))


def seen_before(recipe: Recipe) -> str | None:
    """A warning where the weights come from a run on the same data that held other images back."""
    path = Path(recipe.weights or "")
    if recipe.data.validation == 0 or not is_run(path):
        return None
    earlier = open_run(path).recipe
    same = earlier.data.name == recipe.data.name
    ours, theirs = ((one.train.seed, one.data.validation) for one in (recipe, earlier))
    if not same or ours == theirs:
        return None
    return (
        "  note: the weights have learnt from some of the images held back here, so validation will look too good. "
        f"With train.seed={theirs[0]} data.validation={theirs[1]} the same images are held back."
    )


def settled_word(word: str) -> str:
    """The same weights from wherever the program is started; a recipe's folder means its newest run."""
    path = Path(word).expanduser()
    if word.startswith(ONLINE) or not path.exists():
        return word
    if path.suffix not in ENDINGS and not (path / "config.json").is_file():
        path = open_run(path).path
    return str(path.resolve())


def told(report: Report) -> str:
    """In a few lines, for the terminal."""
    before, after = ("×".join(map(str, grid)) for grid in (report.grid_before, report.grid_after))
    first = f"Weights: {report.weights} ({report.library}'s names), grid {before} → {after}"
    lines = [f"{first}, {report.kept} tensors as they were"]
    for change in report.resampled:
        lines.append(f"  {change.name}: {change.how}, {change.lost:.0%} lost")
    if report.dropped:
        lines.append(f"  left out: {', '.join(report.dropped)}")
    if report.new:
        lines.append(f"  new: {', '.join(report.new)}")
    lines += [f"  assumed: {words}" for words in report.assumed] + [f"  note: {words}" for words in report.notes]
    return "\n".join(lines)
