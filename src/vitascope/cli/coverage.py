"""Print which accuracy `predict --threshold` reaches, and the suggested threshold."""

from vitascope.cli.console import create_console, create_table
from vitascope.evaluation.coverage import CoverageRow, SuggestedThreshold
from vitascope.evaluation.report import Evaluation, spell_out_split_name
from vitascope.number_format import format_percent
from vitascope.run.temperature import RunTemperature


def print_coverage_table_and_threshold(evaluation: Evaluation) -> None:
    """Print which accuracy `predict --threshold` reaches, and the suggested threshold."""
    coverage = evaluation.coverage
    images = _format_evaluated_images(evaluation)
    rows = [
        [f"{row.threshold:g}", f"{row.answered:,}", format_percent(row.coverage), *_format_accuracy_and_interval(row)]
        for row in coverage.table_rows
    ]
    columns = ["threshold", "answered", "coverage", "accuracy of the answered", "95 % CI"]
    scaling = f", probabilities with temperature {coverage.temperature:.2f}" if coverage.temperature != 1 else ""
    title = f"If predict answers only at or above a threshold ({images}{scaling})"
    create_console().print(create_table(title, columns, rows, right_aligned=set(columns)))
    if evaluation.run_temperature:
        print(f"predict uses {_describe_temperature(evaluation.run_temperature)}.")
    print(describe_suggested_threshold(evaluation))


def _format_accuracy_and_interval(row: CoverageRow) -> list[str]:
    if row.accuracy is None:
        return ["–", "–"]
    return [
        format_percent(row.accuracy, 2),
        f"{format_percent(row.interval.low)} to {format_percent(row.interval.high)}",
    ]


def _describe_temperature(temperature: RunTemperature) -> str:
    if temperature.value == 1:
        return "no temperature: none lowers the validation loss"
    return f"{temperature.description}: their loss falls from {temperature.loss:.3f} to {temperature.scaled_loss:.3f}"


def _format_evaluated_images(evaluation: Evaluation) -> str:
    split = "" if evaluation.eval_data.split == "all" else f"{spell_out_split_name(evaluation.eval_data.split)} "
    return f"{len(evaluation.eval_data.samples):,} {split}images"


def describe_suggested_threshold(evaluation: Evaluation) -> str:
    """Name the threshold, the images it was chosen on, and what it gives on them and on the evaluated images."""
    coverage, suggestion = evaluation.coverage, evaluation.coverage.suggestion
    is_other_split = suggestion.split == "val" and not evaluation.eval_data.is_run_validation
    chosen_on = f"{suggestion.images:,} validation images" if is_other_split else _format_evaluated_images(evaluation)
    target = f"an error rate of at most {100 * suggestion.target_error:g} %"
    if suggestion.row is None:
        return f"No threshold gives {target} on the {chosen_on}."
    option = f"--threshold {suggestion.row.threshold:g}" if suggestion.row.threshold else "no threshold is needed"
    text = f"For {target}: {option}, chosen on the {chosen_on}: "
    text += f"{_format_coverage_and_error(suggestion.row, suggestion.images)}. {_describe_reliability(suggestion)}"
    on_evaluated, num_evaluated = coverage.row_at_suggested_threshold, len(evaluation.eval_data.samples)
    if is_other_split and on_evaluated:
        result = _format_coverage_and_error(on_evaluated, num_evaluated)
        return f"{text}On the {_format_evaluated_images(evaluation)}: {result}."
    fitted = "Temperature and threshold were" if coverage.temperature != 1 else "The threshold was"
    return f"{text}{fitted} fitted on these same images: on new images, the error rate can be higher."


def _describe_reliability(suggestion: SuggestedThreshold) -> str:
    """Say if the threshold rests on too few images, and which targets would give it; empty, or ends in a space."""
    text, row, error_below = "", suggestion.row, suggestion.min_error_below
    if row and suggestion.is_from_too_few_images:
        text += f"{row.answered:,} of {suggestion.images:,} images answered: too few to rely on. "
    elif row and 1 - row.interval.low > suggestion.target_error:
        text += "The interval includes error rates above the target. "
    if error_below is not None and error_below > suggestion.target_error + 0.01:
        text += f"All lower thresholds have error rates of at least {format_percent(error_below, 2)}, so every target "
        text += "below that gives this threshold or a higher one. "
    return text


def _format_coverage_and_error(row: CoverageRow, num_images: int) -> str:
    if row.accuracy is None:
        return "no image is answered"
    low, high = 1 - row.interval.high, 1 - row.interval.low
    return (
        f"{row.answered:,} of {num_images:,} images answered ({format_percent(row.coverage)}), "
        f"error rate {format_percent(1 - row.accuracy, 2)} "
        f"(95 % confidence interval {format_percent(low, 2)} to {format_percent(high, 2)})"
    )
