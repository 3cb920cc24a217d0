"""Draw the figures of an evaluation: confusion matrix, reliability diagram, robustness curves, worst errors."""

import hashlib
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
from vitascope.run.files import make_folder, write_json

NAME_LENGTH = 20


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
    for old in folder.glob("*.png"):
        old.unlink()
    write_json(folder / "report.json", found.as_dict())
    for name, figure in figures(found).items():
        save(figure, folder / f"{name}.png")
    return folder


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


def as_html(found: Evaluation) -> str:
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
    return tables + "".join(drawn(figure) for figure in figures(found).values())


def draw_neighbours(found: Neighbours) -> Figure:
    images = [_pixels(found.image), *(_pixels(image) for image in found.found.images)]
    said = "" if found.said is None else f"\npredicted: {_short(found.said.label)} ({found.said.probability:.0%})"
    words = [f"query{said}"]
    words += [
        f"{_short(name)}\nsimilarity {value:.3f}" for name, value in zip(found.labels, found.similarity, strict=True)
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
    after, name = None, ""
    if warmth:
        after, name = _full(warmth.bins), f"with temperature {warmth.value:.2f}"
        text += f"With temperature {warmth.value:.2f} ({found.temperature_words}) the error is {warmth.ece:.1%}. "
    text += "Above the dashed line the model is under-confident, below it over-confident."
    return draw_reliability(_full(before.bins), after, ("without temperature", name), text)


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
    count = len(found.choice.images) - found.right
    text = (
        f"{_what(found)}: the worst {len(words)} of {count:,} errors, ordered by the probability of the true class. "
        "The model's probabilities are in parentheses. Wrong labels are often among these images."
    )
    return draw_tiles(images, words, text)


def _what(found: Evaluation) -> str:
    views = f", {found.views} views" if found.views > 1 else ""
    recipe, data = found.run.recipe.name, Path(found.choice.data).name
    of = recipe if recipe == data else f"{recipe} on {data}"
    epoch = found.weights.replace("best", ", best epoch").removeprefix("last")  # and token reduction
    return f"{of}, {split_name(found.choice.split)} images{views}{epoch}"


def _pixels(image: Tensor) -> NDArray:
    """Return rows × columns × channels between 0 and 1, as `draw` expects."""
    return image.permute(1, 2, 0).numpy() / 255


def _short(name: str) -> str:
    return shorten(name, NAME_LENGTH)
