"""Write a study's report.md, report.html and figures."""

import math
from pathlib import Path
from typing import get_args

from matplotlib.figure import Figure

from vitascope.draw.curves import METRIC_UNITS
from vitascope.draw.html import Document, Picture, Table, Text, write_picture
from vitascope.draw.study import (
    ParetoPoint,
    draw_accuracy_by_setting,
    draw_accuracy_heatmap,
    draw_pareto_fronts,
    draw_seed_curve_bands,
)
from vitascope.errors import format_count
from vitascope.number_format import format_number
from vitascope.recipe.choices import complete_augmentation_for_objective, load_objective
from vitascope.records.ablation import MIN_SEEDS_FOR_INTERVAL, PairedDifference
from vitascope.records.record import format_thousands_or_millions
from vitascope.run.files import make_folder, write_atomically, write_json
from vitascope.study.design import Design
from vitascope.study.results import CombinationResults, ResultName, StudyResults

MAX_CURVES = 12
COST_NAMES: dict[str, ResultName] = {  # title of a panel -> name of the result
    "parameters": "parameters",
    "FLOPs per image": "flops",
    "seconds of training": "seconds",
}


def write_html_markdown_and_json_report(results: StudyResults, folder: Path) -> Path:
    """Write report.html (with the figures), report.md (with links to the PNG files) and answer.json (the numbers).
    Return the path of report.html."""
    make_folder(folder)
    pictures = [
        Picture.from_figure(name, figure, f"{name}.png") for name, figure in draw_study_figures(results).items()
    ]
    for picture in pictures:
        write_picture(picture, folder)
    title = f"Study: {results.design.recipe}, {' and '.join(results.design.varied_settings)}"
    paragraphs = [Text(line) for line in (results.conclusion, *format_notes(results))]
    document = Document(title, [*paragraphs, build_results_table(results), *pictures])
    write_atomically(folder / "report.md", document.format_markdown())
    write_atomically(folder / "report.html", document.format_html_page())
    write_json(folder / "answer.json", convert_results_to_dict(results))
    return folder / "report.html"


def build_results_table(results: StudyResults) -> Table:
    """Build a table with one row per combination."""
    seeds = {tuple(cell.results) for cell in results.combinations}
    two_seeds = next(iter(seeds)) if len(seeds) == 1 and len(min(seeds)) == 2 else ()  # both values are printed
    score_name = results.design.score_name
    header = [
        *results.design.varied_settings,
        "seeds",
        f"{score_name} (seeds {two_seeds[0]}, {two_seeds[1]})" if two_seeds else score_name,
        _format_difference_header(results, two_seeds),
        "verdict",
        "training accuracy",
        "parameters",
        "FLOPs per image",
        "training seconds",
    ]
    rows = []
    for cell in results.combinations:
        difference = results.compute_corrected_difference_from_best(cell)
        train_accuracy = cell.compute_mean_last_value("train_accuracy")
        rows.append(
            [
                *(cell.settings.get(key, "") for key in results.design.varied_settings),
                str(len(cell.results)),
                cell.formatted_accuracy,
                "–" if difference is None else _format_difference_in_points(difference),
                results.best_or_highest_mean_label
                if cell is results.best_combination
                else ""
                if difference is None
                else difference.verdict,
                "–" if train_accuracy is None else f"{100 * train_accuracy:.1f} %",
                format_thousands_or_millions(round(cell.compute_mean("parameters"))),
                format_thousands_or_millions(round(cell.compute_mean("flops"))),
                cell.formatted_mean_seconds,
            ]
        )
    return Table(header, rows)


def _format_difference_header(results: StudyResults, two_seeds: tuple[int, ...]) -> str:
    """With several seeds the difference is paired; with two seeds both values are shown, so the seeds are named."""
    paired = "paired " if max((len(cell.results) for cell in results.combinations), default=1) > 1 else ""
    seeds = f", seeds {two_seeds[0]}, {two_seeds[1]}" if two_seeds else ""
    return f"{paired}difference from the {results.best_combination_label} (points{seeds})"


def format_notes(results: StudyResults) -> list[str]:
    """Explain how the combinations were compared, what the numbers mean, and what is missing."""
    images = "validation images" if results.design.eval_split == "val" else "test images"
    probe = " Training used no labels, so a linear probe measures the features." if results.uses_linear_probe else ""
    fixed = " ".join(results.design.fixed_overrides) or "those of the recipe"
    lines = [
        f"Fixed settings: {fixed}. Accuracy is measured on {images} after the last epoch.{probe}",
        _explain_intervals_and_differences(results),
        "FLOPs are those of the matrix products, 2 per multiply-add.",
    ]
    differences = [results.compute_corrected_difference_from_best(cell) for cell in results.combinations]
    if any(difference is not None and difference.has_no_spread for difference in differences):
        lines.append("Not testable: the difference is equal in all seeds, so its significance cannot be tested.")
    if results.timing_note:
        lines.append(results.timing_note)
    if results.num_unfinished:
        unfinished = format_count(results.num_unfinished, f"unfinished {results.design.item_name}")
        lines.append(f"{unfinished}. Run the same command again to continue.")
    if results.num_pruned:
        lines.append(f"The search stopped {format_count(results.num_pruned, 'combination')} early.")
    lines += [f"Failed: {combination}: {reason}" for combination, reason in results.failed_trials]
    if results.failed_trials:
        lines.append("To repeat failed runs, add --retry.")
    return [line for line in lines if line]


def _explain_intervals_and_differences(results: StudyResults) -> str:
    """Explain what the table contains: intervals from three seeds on, differences from two combinations on."""
    seed_counts = {len(cell.results) for cell in results.combinations}
    has_intervals = max(seed_counts, default=0) >= MIN_SEEDS_FOR_INTERVAL
    sentences = ["± is the 95 % confidence interval of the mean over seeds (Student's t)."] if has_intervals else []
    sentences += ["With two seeds, both values are shown, in the order of the seeds."] if 2 in seed_counts else []
    if len(results.combinations) > 1:
        paired = "taken seed by seed, " if max(seed_counts) > 1 else ""
        sentences.append(
            f"Differences from the {results.best_combination_label} are {paired}in percentage points (points)."
        )
        if len(results.combinations) > 2 and paired:
            corrected = "Their intervals" if has_intervals else "The verdicts"
            num_pairs = math.comb(len(results.combinations), 2)
            sentences.append(f"{corrected} are corrected for all {num_pairs:,} pairs of combinations (Bonferroni).")
        sentences.append(
            "The highest mean was selected after the runs, so it is probably too high (selection bias). Train that "
            "combination again with new seeds."
        )
    return " ".join(sentences)


def draw_study_figures(results: StudyResults) -> dict[str, Figure]:
    """Draw curves, accuracy by setting, a grid for two settings, and accuracy against cost. Keys are file names."""
    if not results.combinations:
        return {}
    figures = {"curves": draw_study_curves(results)}
    ranges = results.design.ranges_by_setting
    axis_scales = {setting: "log" if bounds.is_log_scale else "linear" for setting, bounds in ranges.items()}
    caption = "Dots: all runs with this value, spread sideways to be visible. Bars: their means."
    if len(axis_scales) == len(results.design.varied_settings):
        caption = "Dots: runs." if len(axis_scales) == 1 else "Dots: runs, which differ in the other settings too."
    figures["effects"] = draw_accuracy_by_setting(
        _group_accuracies_by_setting_and_value(results), caption, axis_scales, results.design.score_name
    )
    if len(results.design.values_by_setting) == 2 and not ranges:
        figures["grid"] = _draw_accuracy_grid(results)
    figures["pareto"] = _draw_accuracy_and_cost_pareto_fronts(results)
    return figures


def _draw_accuracy_and_cost_pareto_fronts(results: StudyResults) -> Figure:
    points = {}
    has_interval = [len(cell.results) >= MIN_SEEDS_FOR_INTERVAL for cell in results.combinations]
    for title, cost_name in COST_NAMES.items():
        front = results.compute_pareto_front(cost_name)
        points[title] = [
            ParetoPoint(
                cell.compute_mean(cost_name),
                cell.mean_accuracy,
                cell.ci_half_width if draw_interval else None,
                cell.name,
                cell in front,
            )
            for cell, draw_interval in zip(results.combinations, has_interval, strict=True)
        ]
    caption = (
        "Orange: the Pareto front. Any combination that is more accurate than one of these costs more, and any that is "
        "cheaper is less accurate."
    )
    if any(has_interval):
        caption += " Bars: 95 % confidence interval of the mean (three seeds or more)."
    return draw_pareto_fronts(points, caption, results.design.score_name)


def draw_study_curves(results: StudyResults, labels_by_combination: dict[str, str] | None = None) -> Figure:
    """Draw curves over epochs. `labels_by_combination`: combination name -> label in the legend."""
    best = sorted(results.combinations, key=lambda cell: -cell.mean_accuracy)[:MAX_CURVES]
    shown = [cell for cell in results.combinations if cell in best]
    num_seeds = max(len(cell.results) for cell in shown)
    caption = "Lines: means over seeds. Bands: range over seeds (validation)." if num_seeds > 1 else "One seed."
    caption += f" Training values are averages during the epoch{_format_augmentation_clause(results.design, shown)}."
    if len(shown) < len(results.combinations):
        caption += f" The best {MAX_CURVES} of {len(results.combinations)} combinations are shown."
    units = METRIC_UNITS | ({"accuracy": "linear probe accuracy in %"} if results.uses_linear_probe else {})
    units["loss"] = "\nor ".join(
        load_objective(objective).loss_name for objective in sorted(results.design.objective_names)
    )
    curves = {(labels_by_combination or {}).get(cell.name, cell.name): _collect_curves_by_name(cell) for cell in shown}
    return draw_seed_curve_bands(curves, caption, units)


def _format_augmentation_clause(design: Design, cells: list[CombinationResults]) -> str:
    """Return whether the training images of these combinations are augmented, as the end of a sentence."""
    augmented = []
    for cell in cells:
        recipe = design.build_recipe(cell.settings, design.seeds[0])
        policy = complete_augmentation_for_objective(
            recipe.data.augment,
            recipe.data.name,
            recipe.model.in_chans,
            recipe.train.objective,
            recipe.model.image_shape,
        )
        augmented.append(bool(policy.active_settings))
    if not any(augmented):
        return ""
    return ", on augmented images" if all(augmented) else ", on augmented images where augmentation is used"


def convert_results_to_dict(results: StudyResults) -> dict[str, object]:
    """Convert the results for answer.json."""
    cells = [
        {
            "settings": cell.settings,
            "accuracy": cell.mean_accuracy,
            "half_of_interval": cell.ci_half_width,
            "by_seed": {seed: result["accuracy"] for seed, result in cell.results.items()},
            **{name: cell.compute_mean(name) for name in get_args(ResultName)},
        }
        for cell in results.combinations
    ]
    design = results.design
    return {
        "recipe": design.recipe,
        "fixed": list(design.fixed_overrides),
        "varied": design.varied_settings,
        "judge": design.eval_split,
        "sentence": results.conclusion,
        "cells": cells,
        "failed": results.failed_trials,
        "waiting": results.num_unfinished,
    }


def _collect_curves_by_name(combination: CombinationResults) -> dict[str, list[list[float]]]:
    names = dict.fromkeys(name for result in combination.results.values() for name in result["curves"])
    return {name: combination.get_curves_of_all_seeds(name) for name in names}


def _group_accuracies_by_setting_and_value(results: StudyResults) -> dict[str, dict[str, list[float]]]:
    """Return setting -> value -> the accuracies of all runs with this value."""
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
    """Draw a heat map of the mean accuracies for two settings."""
    (row_setting, row_values), (column_setting, column_values) = results.design.values_by_setting.items()
    accuracies = {
        (cell.settings[row_setting], cell.settings[column_setting]): cell.mean_accuracy for cell in results.combinations
    }
    grid = [[accuracies.get((row, column), float("nan")) for column in column_values] for row in row_values]
    one_seed = max(len(cell.results) for cell in results.combinations) == 1
    caption = (
        "One seed."
        if one_seed
        else "Means over seeds. For the significance of the differences, see the table in report.html."
    )
    if len(accuracies) < len(row_values) * len(column_values):
        caption += " White, –: no result, because the run failed or has not finished."
    return draw_accuracy_heatmap(
        row_values, column_values, grid, (row_setting, column_setting), caption, results.design.score_name
    )


def _format_difference_in_points(difference: PairedDifference) -> str:
    return (
        f"{format_number(100 * difference.mean_difference, '+z.2f')} in every seed"
        if difference.has_no_spread and len(difference.differences) >= MIN_SEEDS_FOR_INTERVAL
        else difference.format_with_interval(100)
    )
