"""Draw the figures of an evaluation: confusion matrix, reliability diagram, robustness curves, worst errors."""

import hashlib
import math
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from vitascope.draw.confusion import draw_confusion
from vitascope.draw.decline import draw_decline
from vitascope.draw.gallery import draw_tiles
from vitascope.draw.html import drawn, html_table
from vitascope.draw.look import save, shorten
from vitascope.draw.reliability import draw_reliability
from vitascope.errors import format_count
from vitascope.evaluation.calibration import Bin
from vitascope.evaluation.neighbours import Neighbours
from vitascope.evaluation.report import Evaluation, split_name
from vitascope.evaluation.robustness import Decline
from vitascope.run.files import make_folder, read_json, write_json

NAME_LENGTH = 20
SAME = " (same image)"  # mark of a neighbour with the query's pixels


def write_report(found: Evaluation) -> Path:
    """Write report.json and the figures to `RUN/evaluation/SPLIT/`; other data, views or weights get other folders."""
    choice = found.choice
    parts = [choice.split]
    if not choice.own:  # two folders may have one name
        parts = [Path(choice.data).name, hashlib.blake2b(choice.data.encode(), digest_size=3).hexdigest(), *parts]
    parts += [f"{found.views}-views"] if found.views > 1 else []
    parts += [found.weights] if found.weights != "last" else []
    folder = found.run.file("evaluation") / "-".join(parts)
    make_folder(folder)
    found = found if found.robustness else _add_earlier_robustness(found, folder / "report.json")
    for old in folder.glob("*.png"):
        old.unlink()
    write_json(folder / "report.json", found.as_dict())
    for name, figure in figures(found).items():
        save(figure, folder / f"{name}.png")
    return folder


def _add_earlier_robustness(found: Evaluation, report: Path) -> Evaluation:
    """Add the robustness of an earlier report if it is about the same predictions for the same images."""
    earlier, told = read_json(report), found.as_dict()
    same = all(earlier.get(name) == told[name] for name in ("data", "split", "images", "views", "weights", "confusion"))
    if not same or not math.isclose(earlier["loss"], found.loss, rel_tol=1e-4):
        return found
    declines = {
        name: Decline(**row | {"intervals": [(low, high) for low, high in row["intervals"]]})
        for name, row in earlier["robustness"].items()
    }
    return replace(found, robustness=declines)


def figures(found: Evaluation) -> dict[str, Figure]:
    pictures = {
        "confusion": draw_confusion(
            found.confusion.numpy(),
            found.classes,
            f"{_what(found)}: accuracy {found.accuracy:.2%}, {len(found.choice.images):,} images",
        ),
        "reliability": _reliability(found),
    }
    if found.robustness:
        pictures["robustness"] = _decline(found)
    return pictures | ({"errors": _errors(found)} if found.worst else {})


def as_html(found: Evaluation, *, errors: bool = True) -> str:
    """Return tables and figures; `errors=False` leaves out the worst errors."""
    low, high = found.interval
    views = format_count(found.views, "view")
    rows = [
        ["accuracy", f"{found.accuracy:.2%} (95 % confidence interval {low:.2%} to {high:.2%})"],
        ["top-5 accuracy", f"{found.top5:.2%}"],
        ["expected calibration error", f"{found.calibration.ece:.2%}"],
        ["images", f"{len(found.choice.images):,} {split_name(found.choice.split)} images, {views}"],
    ]
    classes = [
        [name, f"{row.images:,}", *("–" if share is None else f"{share:.1%}" for share in (row.precision, row.recall))]
        for name, row in found.per_class.items()
    ]
    tables = html_table([_what(found), ""], rows) + html_table(["class", "images", "precision", "recall"], classes)
    shown = {name: figure for name, figure in figures(found).items() if errors or name != "errors"}
    return tables + "".join(drawn(figure) for figure in shown.values())


def draw_neighbours(found: Neighbours) -> Figure:
    images = [_pixels(found.image), *(_pixels(image) for image in found.found.images)]
    said = "" if found.said is None else f"\npredicted: {_short(found.said.label)} ({found.said.probability:.0%})"
    words = [f"query{said}"]
    words += [
        f"{_short(name)}{SAME * same}\nsimilarity {value:.3f}"
        for name, value, same in zip(found.labels, found.similarity, found.identical, strict=True)
    ]
    text = (
        f"The query image (framed) and the most similar of {found.searched}, each with its class or folder. "
        "Similarity is the cosine between pooled features: 1 is most similar, 0 is unrelated."
    )
    return draw_tiles(images, words, text, framed=0)


def _reliability(found: Evaluation) -> Figure:
    before, warmth = found.calibration, found.temperature
    text = f"{_what(found)}. Expected calibration error {before.ece:.1%} (15 bins). The model is "
    text += f"{'over' if before.gap > 0 else 'under'}-confident by {100 * abs(before.gap):.1f} percentage points. "
    after, names = None, ("model", "")
    if warmth:
        after, names = _full(warmth.bins), ("without temperature scaling", "after temperature scaling")
        scaling = f"After temperature scaling (logits / {warmth.value:.2f}, {found.temperature_words})"
        text += f"{scaling} the error is {warmth.ece:.1%}. "
    text += "Above the dashed line the model is under-confident, below it over-confident. "
    text += "Bars: gap to perfect calibration."
    return draw_reliability(_full(before.bins), after, names, text)


def _full(bins: list[Bin]) -> list[tuple[float, float, int, float, float]]:
    return [
        (part.low, part.high, part.images, part.confidence, part.accuracy)
        for part in bins
        if part.confidence is not None and part.accuracy is not None
    ]


def _decline(found: Evaluation) -> Figure:
    curves = {
        name: (decline.unit, decline.levels, decline.accuracy, decline.intervals)
        for name, decline in found.robustness.items()
    }
    images = next(iter(found.robustness.values())).images
    text = f"{_what(found)}: accuracy on {images:,} corrupted images, by corruption and level. "
    text += "Shaded: 95 % confidence interval. Dotted: random guessing."
    return draw_decline(curves, 1 / len(found.classes), text)


def _errors(found: Evaluation) -> Figure:
    images = [_pixels(found.choice.images.images[mistake.index]) for mistake in found.worst]
    words = [
        f"true: {_short(item.label)} ({item.probability_of_label:.1%})\n"
        f"predicted: {_short(item.said)} ({item.probability:.0%})"
        + (f"\n{_short(Path(item.file).name)}" if item.file else "")
        for item in found.worst
    ]
    order = ", ordered by the probability of the true class" if len(words) > 1 else ""
    text = f"{_what(found)}: {count_errors(found, len(words))}{order}. The model's probabilities are in parentheses. "
    text += "Some of these images may be mislabelled in the data set."
    return draw_tiles(images, words, text)


def count_errors(found: Evaluation, shown: int) -> str:
    """Return 'all 5 errors', or 'the worst 12 of 50 errors' if only some are shown."""
    count = len(found.choice.images) - found.right
    if shown < count:
        return f"the worst {shown} of {count:,} errors"
    return f"all {count} errors" if count > 1 else "the only error"


def _what(found: Evaluation) -> str:
    views = f", {found.views} views" if found.views > 1 else ""
    recipe, data = found.run.recipe.name, Path(found.choice.data).name
    of = recipe if recipe == data else f"{recipe} on {data}"
    epoch = ", best epoch" if found.weights.startswith("best") else ""
    reduction = f", {found.reduction}" if found.reduction else ""
    return f"{of}, {split_name(found.choice.split)} images{views}{epoch}{reduction}"


def _pixels(image: Tensor) -> NDArray:
    """Return rows × columns × channels between 0 and 1, as `draw` expects."""
    return image.permute(1, 2, 0).numpy() / 255


def _short(name: str) -> str:
    return shorten(name, NAME_LENGTH)
