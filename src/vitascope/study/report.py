"""Write a study's report.md, report.html and figures."""

from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from vitascope.data.policy import resolve
from vitascope.draw.curves import UNITS
from vitascope.draw.html import drawn, html_page, html_table
from vitascope.draw.look import save
from vitascope.draw.study import draw_bands, draw_effects, draw_grid, draw_pareto
from vitascope.errors import format_count
from vitascope.records.arms import ENOUGH
from vitascope.records.reading import markdown, millions
from vitascope.run.files import make_folder, write_json, write_whole
from vitascope.study.answer import Answer, Cell, Difference
from vitascope.study.design import Design

MOST_CURVES = 12
COSTS = {"parameters": "parameters", "FLOPs per image": "flops", "seconds of training": "seconds"}


def write_report(found: Answer, folder: Path) -> Path:
    """report.html contains the figures; report.md links to the PNG files; answer.json has the numbers."""
    make_folder(folder)
    pictures = figures(found)
    for name, figure in pictures.items():
        save(figure, folder / f"{name}.png")
    head, rows = table(found)
    title = f"Study: {found.design.recipe}, {' and '.join(found.design.varied)}"
    words = [found.sentence, *notes(found)]
    images = [f"![{name}]({name}.png)" for name in pictures]
    write_whole(folder / "report.md", "\n\n".join([f"# {title}", *words, markdown(head, rows), *images]) + "\n")
    body = "".join(f"<p>{escape(line)}</p>" for line in words) + html_table(head, rows)
    body += "".join(f"<p>{drawn(figure)}</p>" for figure in pictures.values())
    write_whole(folder / "report.html", html_page(title, f"<h1>{escape(title)}</h1>{body}"))
    write_json(folder / "answer.json", as_dict(found))
    return folder / "report.html"


def table(found: Answer) -> tuple[list[str], list[list[str]]]:
    """One row per combination."""
    seeds = {tuple(cell.results) for cell in found.cells}
    two = next(iter(seeds)) if len(seeds) == 1 and len(min(seeds)) == 2 else ()  # both values are printed
    head = [
        *found.design.varied,
        "seeds",
        f"{found.measure} (seeds {two[0]}, {two[1]})" if two else found.measure,
        "difference to the best",
        "verdict",
        "training accuracy",
        "parameters",
        "FLOPs",
        "seconds",
    ]
    rows = []
    for cell in found.cells:
        other = found.against_best(cell)
        train = cell.last("train_accuracy")
        rows.append(
            [
                *(cell.settings.get(key, "") for key in found.design.varied),
                str(len(cell.results)),
                cell.percent,
                "–" if other is None else _points(other),
                "best" if cell is found.best else "" if other is None else other.verdict,
                "–" if train is None else f"{100 * train:.1f} %",
                millions(round(cell.number("parameters"))),
                millions(round(cell.number("flops"))),
                cell.seconds,
            ]
        )
    return head, rows


def notes(found: Answer) -> list[str]:
    """How the combinations were compared, what the numbers mean, and what is missing."""
    which = "held-out validation images" if found.design.judge == "val" else "test images"
    probed = "" if found.measure == "accuracy" else " Training used no labels, so a linear probe measures the features."
    fixed = " ".join(found.design.fixed) or "those of the recipe"
    lines = [
        f"Fixed settings: {fixed}. Accuracy is measured on {which} after the last epoch.{probed}",
        _explain_numbers(found),
    ]
    if any((other := found.against_best(cell)) and other.no_spread for cell in found.cells):
        lines.append("No variation: the difference is equal in all seeds, so its significance cannot be tested.")
    if found.clock:
        lines.append(found.clock)
    if found.waiting:
        left = format_count(found.waiting, f"unfinished {found.design.unit}")
        lines.append(f"{left}. Run the same command again to continue.")
    if found.left_off:
        lines.append(f"The search stopped {format_count(found.left_off, 'combination')} early.")
    lines += [f"Failed: {which}: {why}" for which, why in found.failed]
    if found.failed:
        lines.append("To repeat failed runs, add --retry.")
    return [line for line in lines if line]


def _explain_numbers(found: Answer) -> str:
    """Explain what the table contains: intervals from three seeds on, differences from two combinations on."""
    counts = {len(cell.results) for cell in found.cells}
    intervals = max(counts, default=0) >= ENOUGH
    text = ["± is the 95 % confidence interval of the mean over seeds (Student's t)."] if intervals else []
    text += ["With two seeds, both values are shown, in the order of the seeds."] if 2 in counts else []
    if len(found.cells) > 1:
        paired = " and paired by seed" if max(counts) > 1 else ""
        text.append(f"Differences from the best are in percentage points{paired}.")
        if len(found.cells) > 2 and paired:
            what = "Their intervals" if intervals else "The verdicts"
            text.append(f"{what} are corrected for multiple comparisons (Bonferroni).")
        text.append("The best accuracy is subject to selection bias: it is probably slightly too high.")
    return " ".join(text)


def figures(found: Answer) -> dict[str, Figure]:
    if not found.cells:
        return {}
    pictures = {"curves": bands(found)}
    scales = {key: "log" if span.log else "linear" for key, span in found.design.ranges.items()}
    text = "Dots: all runs with this value. Bars: their means."
    if len(scales) == len(found.design.varied):
        text = "Dots: runs." if len(scales) == 1 else "Dots: runs, which differ in the other settings too."
    pictures["effects"] = draw_effects(_effects(found), text, scales)
    if len(found.design.axes) == 2 and not found.design.ranges:
        pictures["grid"] = _grid(found)
    points = {}
    for title, cost in COSTS.items():
        front = found.front(cost)
        halves = [cell.half if len(cell.results) >= ENOUGH else None for cell in found.cells]
        points[title] = [
            (cell.number(cost), cell.accuracy, half, cell.name, cell in front)
            for cell, half in zip(found.cells, halves, strict=True)
        ]
    text = "Orange: Pareto front."
    if any(len(cell.results) >= ENOUGH for cell in found.cells):
        text += " Bars: 95 % confidence interval of the mean (three seeds or more)."
    pictures["pareto"] = draw_pareto(points, text)
    return pictures


def bands(found: Answer, names: dict[str, str] | None = None) -> Figure:
    """Curves over epochs; `names` replaces the names of the cells."""
    shown = sorted(found.cells, key=lambda cell: -cell.accuracy)[:MOST_CURVES]
    shown = [cell for cell in found.cells if cell in shown]
    text = "Lines: means over seeds. Bands: lowest to highest seed, validation images."
    text += f" Training values are averages during the epoch{_explain_augmentation(found.design, shown)}."
    text += (
        f" The best {MOST_CURVES} of {len(found.cells)} combinations are shown."
        if len(shown) < len(found.cells)
        else ""
    )
    units = UNITS | ({} if found.measure == "accuracy" else {"loss": "loss", "accuracy": f"{found.measure} in %"})
    return draw_bands({(names or {}).get(cell.name, cell.name): _curves(cell) for cell in shown}, text, units)


def _explain_augmentation(design: Design, cells: list[Cell]) -> str:
    """Say that training images are augmented, where they are."""
    augmented = []
    for cell in cells:
        recipe = design.recipe_for(cell.settings, design.seeds[0])
        policy = resolve(recipe.data.augment, recipe.data.name, recipe.model.in_chans, recipe.train.objective)
        augmented.append(bool(policy.in_effect))
    if not any(augmented):
        return ""
    return ", on augmented images" if all(augmented) else ", on augmented images where augmentation is used"


def as_dict(found: Answer) -> dict[str, object]:
    cells = [
        {
            "settings": cell.settings,
            "accuracy": cell.accuracy,
            "half_of_interval": cell.half,
            "by_seed": {seed: result["accuracy"] for seed, result in cell.results.items()},
            **{name: cell.number(name) for name in ("parameters", "flops", "seconds", "images_seen")},
        }
        for cell in found.cells
    ]
    design = found.design
    told = {"recipe": design.recipe, "fixed": list(design.fixed), "varied": design.varied, "judge": design.judge}
    return told | {"sentence": found.sentence, "cells": cells, "failed": found.failed, "waiting": found.waiting}


def _curves(cell: Cell) -> dict[str, list[list[float]]]:
    names = dict.fromkeys(name for found in cell.results.values() for name in found["curves"])
    return {name: cell.curves(name) for name in names}


def _effects(found: Answer) -> dict[str, dict[str, list[float]]]:
    effects: dict[str, dict[str, list[float]]] = {}
    for key in found.design.varied:
        values = found.design.axes.get(key) or sorted({cell.settings[key] for cell in found.cells}, key=float)
        by_value = {
            value: [a for cell in found.cells if cell.settings[key] == value for a in cell.accuracies]
            for value in values
        }
        effects[key] = {value: accuracies for value, accuracies in by_value.items() if accuracies}
    return effects


def _grid(found: Answer) -> Figure:
    (down, rows), (across, columns) = found.design.axes.items()
    known = {(cell.settings[down], cell.settings[across]): cell.accuracy for cell in found.cells}
    values = [[known.get((row, column), float("nan")) for column in columns] for row in rows]
    text = "Means over seeds. The table shows which differences are significant."
    return draw_grid(rows, columns, values, (down, across), text)


def _points(other: Difference) -> str:
    return f"{100 * other.points:+.2f}, no variation" if other.no_spread else other.told(100)
