"""Markdown tables of training experiments: ablations, pretraining, tuning."""

from pathlib import Path
from statistics import mean

from vitascope.draw.html import Markdown, format_markdown_table
from vitascope.number_format import format_number, format_percent
from vitascope.records.ablation import (
    MIN_SEEDS_FOR_INTERVAL,
    PairedDifference,
    ResidualNoise,
    compare_arms_with_baselines,
    describe_mean_and_interval_notation,
    estimate_residual_noise,
    format_percent_mean_or_values,
)
from vitascope.records.record import (
    BenchmarkRow,
    format_thousands_or_millions,
    read_benchmark_rows,
)


def format_pretrained_vs_scratch_table(results_folder: Path, record_names: list[str]) -> Markdown:
    """Format results from scratch and from pretrained weights (`python -m benchmarks.pretrained`)."""
    groups: dict[tuple[str, str], list[BenchmarkRow]] = {}
    for row in read_benchmark_rows(results_folder, record_names):
        groups.setdefault((row["data"], row["arm"]), []).append(row)
    lines = []
    for (data, arm), rows in groups.items():
        first_epoch = f"{100 * mean(row['first_epoch_train_accuracy'] for row in rows):.0f} %"
        times = [f"{mean(row[name] for row in rows):.0f}" for name in ("seconds", "cold_seconds")]
        grid, gflops = "×".join(map(str, rows[0]["grid"])), f"{rows[0]['flops'] / 1e9:.2f}"
        accuracy = f"**{_format_column_mean(rows, 'accuracy')}**"
        epochs, seeds = str(rows[0]["epochs"]), str(len(rows))
        lines.append([data, arm, grid, gflops, epochs, seeds, first_epoch, accuracy, *times])
    head = ["data", "start", "grid", "GFLOPs per image", "epochs", "seeds", "training accuracy, first epoch"]
    mean_format = describe_mean_and_interval_notation(map(len, groups.values()))
    return format_markdown_table([*head, f"accuracy ({mean_format})", "seconds", "seconds with set-up"], lines)


def format_chosen_settings_table(results_folder: Path, record_names: list[str]) -> Markdown:
    """Format chosen settings beside a recipe, a linear probe and a timm script (`python -m benchmarks.photos`).

    The difference to the best of the others is paired by seed; its interval is corrected for their number."""
    sets: dict[str, dict[str, list[BenchmarkRow]]] = {}
    for row in read_benchmark_rows(results_folder, record_names):
        sets.setdefault(row["data"], {}).setdefault(row["arm"], []).append(row)
    arms = list(dict.fromkeys(arm for rows_by_arm in sets.values() for arm in rows_by_arm))
    lines = [_format_chosen_settings_row(name, rows_by_arm, arms) for name, rows_by_arm in sets.items()]
    counts = [len(rows) for rows_by_arm in sets.values() for rows in rows_by_arm.values()]
    head = ["images", "training images", "choice", *(f"accuracy, {arm}" for arm in arms)]
    head += [f"{CHOSEN_ARM} − best of the others, points", "verdict", *(f"seconds, {arm}" for arm in arms)]
    head[3] += f" ({describe_mean_and_interval_notation(counts)})"
    return format_markdown_table(head, lines)


CHOSEN_ARM = "chosen"


def _format_chosen_settings_row(
    set_name: str, rows_by_arm: dict[str, list[BenchmarkRow]], arms: list[str]
) -> list[str]:
    chosen = rows_by_arm[CHOSEN_ARM]
    accuracies = [_format_column_mean(rows_by_arm[arm], "accuracy") if arm in rows_by_arm else "–" for arm in arms]
    seconds = [f"{mean(row['seconds'] for row in rows_by_arm[arm]):.0f}" if arm in rows_by_arm else "–" for arm in arms]
    others = {arm: rows for arm, rows in rows_by_arm.items() if arm != CHOSEN_ARM}
    difference, verdict = "–", "–"
    if others:
        best = max(others, key=lambda arm: mean(row["accuracy"] for row in others[arm]))
        accuracy_by_seed = {row["seed"]: row["accuracy"] for row in others[best]}
        pairs = [row["accuracy"] - accuracy_by_seed[row["seed"]] for row in chosen if row["seed"] in accuracy_by_seed]
        if pairs:
            paired = PairedDifference.from_pairs(pairs, len(others))
            difference, verdict = f"{paired.format_with_interval(100)} ({best})", paired.verdict
    start = f"{chosen[0]['start']}, {chosen[0]['image_size']} px, {chosen[0]['passes']} passes"
    return [set_name, f"{chosen[0]['images']:,}", start, *accuracies, difference, verdict, *seconds]


def format_small_data_ablation_table(results_folder: Path, record_names: list[str]) -> Markdown:
    """Format the effect of each change (`python -m benchmarks.small_data`) against the first arm of the record."""
    lines, counts = [], []
    for name in record_names:
        for arm in compare_arms_with_baselines(read_benchmark_rows(results_folder, [name])):
            difference = arm.difference.format_with_interval(100) if arm.difference else "–"
            parameters, num_seeds = format_thousands_or_millions(arm.rows[0]["parameters"]), len(arm.rows)
            accuracy = _format_column_mean(arm.rows, "accuracy")
            counts.append(num_seeds)
            baseline = arm.baseline_name or "–"
            lines.append([arm.name, parameters, str(num_seeds), accuracy, baseline, difference, arm.verdict])
    head = [
        "model",
        "parameters",
        "seeds",
        f"accuracy ({describe_mean_and_interval_notation(counts)})",
        "compared with",
    ]
    return format_markdown_table(
        [*head, "difference in points, seed by seed (± its 95 % confidence interval)", "verdict"], lines
    )


def format_speedrun_ablation_table(results_folder: Path, record_names: list[str]) -> Markdown:
    """Format the effect of each part of a fast recipe (`python -m benchmarks.speedrun`) on accuracy and seconds, paired
    by seed, with confidence intervals from the noise pooled over all arms."""
    rows, lines = read_benchmark_rows(results_folder, record_names), []
    columns = [
        (column, estimate_residual_noise(rows, column), scale)
        for column, scale in (("accuracy", 100.0), ("steady_seconds", 1.0))
    ]
    for arm in compare_arms_with_baselines(rows):
        baseline = {row["seed"]: row for row in rows if row["arm"] == arm.baseline_name}
        pairs = [(row, baseline[row["seed"]]) for row in arm.rows if row["seed"] in baseline]
        differences = [
            _format_difference_with_pooled_interval([row[column] - other[column] for row, other in pairs], noise, scale)
            if pairs
            else "–"
            for column, noise, scale in columns
        ]
        accuracy, seconds = f"{100 * arm.mean_accuracy:.2f} %", f"{mean(row['steady_seconds'] for row in arm.rows):.1f}"
        lines.append([arm.name, str(len(arm.rows)), accuracy, seconds, arm.baseline_name or "–", *differences])
    head = ["change", "seeds", "mean accuracy", "seconds", "compared with"]
    pooled = "± 95 % confidence interval from the noise of all rows"
    return format_markdown_table([*head, f"difference in points ({pooled})", "difference in seconds (same)"], lines)


def format_speedrun_length_and_size_table(results_folder: Path, record_names: list[str]) -> Markdown:
    """Format runs of different length and size (`python -m benchmarks.speedrun --called`)."""
    lines = []
    for arm in compare_arms_with_baselines(read_benchmark_rows(results_folder, record_names)):
        first = arm.rows[0]
        images, num_seeds = format_thousands_or_millions(first["images_seen"]), str(len(arm.rows))
        speed = f"{mean(row['images_per_second'] for row in arm.rows):,.0f}"
        seconds = f"{mean(row['steady_seconds'] for row in arm.rows):.1f}"
        train_accuracy = format_percent(mean(row["train_accuracy"] for row in arm.rows))
        accuracy = f"{100 * arm.mean_accuracy:.2f} %"
        lines.append([arm.name, str(first["tokens"]), images, speed, seconds, num_seeds, train_accuracy, accuracy])
    head = ["run", "tokens", "images seen", "images/s", "seconds", "seeds"]
    return format_markdown_table([*head, "training accuracy", "mean held-out accuracy"], lines)


def _format_difference_with_pooled_interval(differences: list[float], noise: ResidualNoise | None, scale: float) -> str:
    """Format the mean difference with the interval from the pooled noise."""
    interval = ""
    if noise and len(differences) > 1:
        interval = f" ± {scale * noise.compute_ci_half_width(len(differences)):.2f}"
    return f"{format_number(scale * mean(differences), '+z.2f')}{interval}"


def format_accuracy_by_label_fraction_table(results_folder: Path, record_names: list[str]) -> Markdown:
    """Format accuracy by the fraction of the labels and the initial weights (`python -m benchmarks.pretraining`)."""
    rows = [row for row in read_benchmark_rows(results_folder, record_names) if row["kind"] == "fine-tuned"]
    fractions = sorted({row["labels"] for row in rows})
    lines, counts = [], []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        arm_rows = {
            fraction: [row for row in rows if (row["arm"], row["labels"]) == (arm, fraction)] for fraction in fractions
        }
        counts += [len(seed_rows) for seed_rows in arm_rows.values() if seed_rows]
        lines.append([arm, *(_format_mean_accuracy_and_seeds_or_dash(arm_rows[fraction]) for fraction in fractions)])
    head = [
        f"accuracy ({describe_mean_and_interval_notation(counts)})",
        *(f"{format_percent(fraction, 0)} of the labels" for fraction in fractions),
    ]
    return format_markdown_table(head, lines)


def format_feature_probe_table(results_folder: Path, record_names: list[str]) -> Markdown:
    """Format the accuracy of frozen features by k-nearest neighbours and by a linear probe."""
    rows = [row for row in read_benchmark_rows(results_folder, record_names) if row["kind"] == "features"]
    lines, counts = [], []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        arm_rows = [row for row in rows if row["arm"] == arm]
        counts.append(len(arm_rows))
        seconds = f"{mean(row['seconds'] for row in arm_rows):.0f}"
        lines.append(
            [
                arm,
                str(arm_rows[0]["epochs"]),
                str(len(arm_rows)),
                _format_column_mean(arm_rows, "knn"),
                _format_column_mean(arm_rows, "linear"),
                seconds,
            ]
        )
    head = [
        "features",
        "epochs",
        "seeds",
        f"k-nearest neighbours ({describe_mean_and_interval_notation(counts)})",
        "linear probe (same)",
    ]
    return format_markdown_table([*head, "seconds (with compilation)"], lines)


def _format_column_mean(rows: list[BenchmarkRow], column: str) -> str:
    return format_percent_mean_or_values([row[column] for row in rows])


def _format_mean_accuracy_and_seeds_or_dash(rows: list[BenchmarkRow]) -> str:
    if not rows:
        return "–"
    seeds = f" ({len(rows)} seeds)" if len(rows) >= MIN_SEEDS_FOR_INTERVAL else ""
    return _format_column_mean(rows, "accuracy") + seeds
