"""Write a study's report.md, report.html and figures."""

from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from vitascope.data.config import resolve_augmentation
from vitascope.draw.curves import METRIC_UNITS
from vitascope.draw.html import encode_figure_as_html, make_html_page, make_html_table
from vitascope.draw.study import draw_accuracy_by_setting, draw_accuracy_heatmap, draw_curve_bands, draw_pareto_fronts
from vitascope.draw.style import save_figure
from vitascope.errors import format_count
from vitascope.records.ablation import MIN_SEEDS_FOR_INTERVAL
from vitascope.records.reading import abbreviate_count, format_markdown_table
from vitascope.run.files import make_folder, write_atomically, write_json
from vitascope.study.design import Design
from vitascope.study.results import CombinationResults, PairedDifference, StudyResults

MAX_CURVES = 12
COST_NAMES = {"parameters": "parameters", "FLOPs per image": "flops", "seconds of training": "seconds"}


def write_report(results: StudyResults, folder: Path) -> Path:
    """report.html contains the figures; report.md links to the PNG files; answer.json has the numbers."""
    make_folder(folder)
    pictures = draw_figures(results)
    for name, figure in pictures.items():
        save_figure(figure, folder / f"{name}.png")
    head, rows = build_results_table(results)
    title = f"Study: {results.design.recipe}, {' and '.join(results.design.varied_settings)}"
    words = [results.conclusion, *format_notes(results)]
    images = [f"![{name}]({name}.png)" for name in pictures]
    write_atomically(
        folder / "report.md", "\n\n".join([f"# {title}", *words, format_markdown_table(head, rows), *images]) + "\n"
    )
    body = "".join(f"<p>{escape(line)}</p>" for line in words) + make_html_table(head, rows)
    body += "".join(f"<p>{encode_figure_as_html(figure)}</p>" for figure in pictures.values())
    write_atomically(folder / "report.html", make_html_page(title, f"<h1>{escape(title)}</h1>{body}"))
    write_json(folder / "answer.json", convert_results_to_dict(results))
    return folder / "report.html"


def build_results_table(results: StudyResults) -> tuple[list[str], list[list[str]]]:
    """One row per combination."""
    seeds = {tuple(cell.results) for cell in results.combinations}
    two = next(iter(seeds)) if len(seeds) == 1 and len(min(seeds)) == 2 else ()  # both values are printed
    head = [
        *results.design.varied_settings,
        "seeds",
        f"{results.accuracy_label} (seeds {two[0]}, {two[1]})" if two else results.accuracy_label,
        "difference to the best",
        "verdict",
        "training accuracy",
        "parameters",
        "FLOPs",
        "seconds",
    ]
    rows = []
    for cell in results.combinations:
        other = results.compare_with_best(cell)
        train = cell.compute_mean_last_value("train_accuracy")
        rows.append(
            [
                *(cell.settings.get(key, "") for key in results.design.varied_settings),
                str(len(cell.results)),
                cell.formatted_accuracy,
                "–" if other is None else _format_difference(other),
                "best" if cell is results.best_combination else "" if other is None else other.verdict,
                "–" if train is None else f"{100 * train:.1f} %",
                abbreviate_count(round(cell.compute_mean("parameters"))),
                abbreviate_count(round(cell.compute_mean("flops"))),
                cell.formatted_seconds,
            ]
        )
    return head, rows


def format_notes(results: StudyResults) -> list[str]:
    """How the combinations were compared, what the numbers mean, and what is missing."""
    which = "held-out validation images" if results.design.eval_split == "val" else "test images"
    probed = (
        ""
        if results.accuracy_label == "accuracy"
        else " Training used no labels, so a linear probe measures the features."
    )
    fixed = " ".join(results.design.fixed_overrides) or "those of the recipe"
    lines = [
        f"Fixed settings: {fixed}. Accuracy is measured on {which} after the last epoch.{probed}",
        _explain_numbers(results),
    ]
    if any((other := results.compare_with_best(cell)) and other.has_no_spread for cell in results.combinations):
        lines.append("No variation: the difference is equal in all seeds, so its significance cannot be tested.")
    if results.timing_note:
        lines.append(results.timing_note)
    if results.num_unfinished:
        left = format_count(results.num_unfinished, f"unfinished {results.design.unit}")
        lines.append(f"{left}. Run the same command again to continue.")
    if results.num_pruned:
        lines.append(f"The search stopped {format_count(results.num_pruned, 'combination')} early.")
    lines += [f"Failed: {which}: {why}" for which, why in results.failed_trials]
    if results.failed_trials:
        lines.append("To repeat failed runs, add --retry.")
    return [line for line in lines if line]


def _explain_numbers(found: StudyResults) -> str:
    """Explain what the table contains: intervals from three seeds on, differences from two combinations on."""
    counts = {len(cell.results) for cell in found.combinations}
    intervals = max(counts, default=0) >= MIN_SEEDS_FOR_INTERVAL
    text = ["± is the 95 % confidence interval of the mean over seeds (Student's t)."] if intervals else []
    text += ["With two seeds, both values are shown, in the order of the seeds."] if 2 in counts else []
    if len(found.combinations) > 1:
        paired = " and paired by seed" if max(counts) > 1 else ""
        text.append(f"Differences from the best are in percentage points{paired}.")
        if len(found.combinations) > 2 and paired:
            what = "Their intervals" if intervals else "The verdicts"
            text.append(f"{what} are corrected for multiple comparisons (Bonferroni).")
        text.append("The best accuracy is subject to selection bias: it is probably slightly too high.")
    return " ".join(text)


def draw_figures(results: StudyResults) -> dict[str, Figure]:
    if not results.combinations:
        return {}
    pictures = {"curves": draw_study_curves(results)}
    scales = {key: "log" if span.is_log_scale else "linear" for key, span in results.design.ranges_by_setting.items()}
    text = "Dots: all runs with this value. Bars: their means."
    if len(scales) == len(results.design.varied_settings):
        text = "Dots: runs." if len(scales) == 1 else "Dots: runs, which differ in the other settings too."
    pictures["effects"] = draw_accuracy_by_setting(_group_accuracies_by_setting(results), text, scales)
    if len(results.design.values_by_setting) == 2 and not results.design.ranges_by_setting:
        pictures["grid"] = _draw_accuracy_grid(results)
    points = {}
    for title, cost in COST_NAMES.items():
        front = results.compute_pareto_front(cost)
        halves = [
            cell.ci_half_width if len(cell.results) >= MIN_SEEDS_FOR_INTERVAL else None for cell in results.combinations
        ]
        points[title] = [
            (cell.compute_mean(cost), cell.mean_accuracy, half, cell.name, cell in front)
            for cell, half in zip(results.combinations, halves, strict=True)
        ]
    text = "Orange: Pareto front."
    if any(len(cell.results) >= MIN_SEEDS_FOR_INTERVAL for cell in results.combinations):
        text += " Bars: 95 % confidence interval of the mean (three seeds or more)."
    pictures["pareto"] = draw_pareto_fronts(points, text)
    return pictures


def draw_study_curves(results: StudyResults, labels: dict[str, str] | None = None) -> Figure:
    """Curves over epochs; `names` replaces the names of the cells."""
    shown = sorted(results.combinations, key=lambda cell: -cell.mean_accuracy)[:MAX_CURVES]
    shown = [cell for cell in results.combinations if cell in shown]
    text = "Lines: means over seeds. Bands: lowest to highest seed, validation images."
    text += f" Training values are averages during the epoch{_explain_augmentation(results.design, shown)}."
    text += (
        f" The best {MAX_CURVES} of {len(results.combinations)} combinations are shown."
        if len(shown) < len(results.combinations)
        else ""
    )
    units = METRIC_UNITS | (
        {} if results.accuracy_label == "accuracy" else {"loss": "loss", "accuracy": f"{results.accuracy_label} in %"}
    )
    return draw_curve_bands(
        {(labels or {}).get(cell.name, cell.name): _get_all_curves(cell) for cell in shown}, text, units
    )


def _explain_augmentation(design: Design, cells: list[CombinationResults]) -> str:
    """Say that training images are augmented, where they are."""
    augmented = []
    for cell in cells:
        recipe = design.build_recipe(cell.settings, design.seeds[0])
        policy = resolve_augmentation(
            recipe.data.augment, recipe.data.name, recipe.model.in_chans, recipe.train.objective
        )
        augmented.append(bool(policy.active_settings))
    if not any(augmented):
        return ""
    return ", on augmented images" if all(augmented) else ", on augmented images where augmentation is used"


def convert_results_to_dict(results: StudyResults) -> dict[str, object]:
    cells = [
        {
            "settings": cell.settings,
            "accuracy": cell.mean_accuracy,
            "half_of_interval": cell.ci_half_width,
            "by_seed": {seed: result["accuracy"] for seed, result in cell.results.items()},
            **{name: cell.compute_mean(name) for name in ("parameters", "flops", "seconds", "images_seen")},
        }
        for cell in results.combinations
    ]
    design = results.design
    told = {
        "recipe": design.recipe,
        "fixed": list(design.fixed_overrides),
        "varied": design.varied_settings,
        "judge": design.eval_split,
    }
    return told | {
        "sentence": results.conclusion,
        "cells": cells,
        "failed": results.failed_trials,
        "waiting": results.num_unfinished,
    }


def _get_all_curves(combination: CombinationResults) -> dict[str, list[list[float]]]:
    names = dict.fromkeys(name for found in combination.results.values() for name in found["curves"])
    return {name: combination.get_curves(name) for name in names}


def _group_accuracies_by_setting(results: StudyResults) -> dict[str, dict[str, list[float]]]:
    effects: dict[str, dict[str, list[float]]] = {}
    for key in results.design.varied_settings:
        values = results.design.values_by_setting.get(key) or sorted(
            {cell.settings[key] for cell in results.combinations}, key=float
        )
        by_value = {
            value: [a for cell in results.combinations if cell.settings[key] == value for a in cell.accuracies]
            for value in values
        }
        effects[key] = {value: accuracies for value, accuracies in by_value.items() if accuracies}
    return effects


def _draw_accuracy_grid(results: StudyResults) -> Figure:
    (down, rows), (across, columns) = results.design.values_by_setting.items()
    known = {(cell.settings[down], cell.settings[across]): cell.mean_accuracy for cell in results.combinations}
    values = [[known.get((row, column), float("nan")) for column in columns] for row in rows]
    text = "Means over seeds. The table shows which differences are significant."
    return draw_accuracy_heatmap(rows, columns, values, (down, across), text)


def _format_difference(difference: PairedDifference) -> str:
    return (
        f"{100 * difference.mean_difference:+.2f}, no variation"
        if difference.has_no_spread
        else difference.format_with_interval(100)
    )
