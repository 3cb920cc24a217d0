"""Markdown tables and sentences from records, for README and docs."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from vitascope.draw.html import Markdown, format_markdown_table
from vitascope.errors import format_count
from vitascope.model.config import ModelConfig
from vitascope.recipe.schema import Recipe
from vitascope.recipe.train import TrainConfig
from vitascope.records import benchmark_tables, training_tables
from vitascope.records.ablation import CI_LABEL, MIN_SEEDS_FOR_INTERVAL, describe_mean_and_interval_notation
from vitascope.records.record import (
    Record,
    format_longest_wall_seconds_or_dash,
    format_mean_test_accuracy,
    format_record_link,
    format_seconds_range,
    format_thousands_or_millions,
    read_named_or_all_records,
)
from vitascope.training.hardware import count_train_flops_per_image


def compute_train_flops_per_image(record: Record) -> float:
    """Compute training FLOPs per image, forward and backward, averaged over epochs that see only part of each image."""
    model = ModelConfig(**_get_section_settings_of_record(record, "model", ModelConfig))
    return count_train_flops_per_image(
        Recipe(
            name="any", model=model, train=TrainConfig(**_get_section_settings_of_record(record, "train", TrainConfig))
        )
    )


def _get_section_settings_of_record(
    record: Record, section: str, config_class: type[ModelConfig] | type[TrainConfig]
) -> dict[str, Any]:
    """Return the settings of one section that the record has; older records have fewer."""
    names = [field.name for field in fields(config_class) if field.name != "seed"]
    settings = {name: record.settings[f"{section}.{name}"] for name in names if f"{section}.{name}" in record.settings}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


def format_from_scratch_flops_table(results_folder: Path, record_names: list[str]) -> Markdown:
    """Format accuracy, seconds and FLOPs, one row per record trained from scratch with labels."""
    rows, counts = [], []
    for path, record in read_named_or_all_records(results_folder, record_names):
        if record.track in ("pure", "tokenizer"):
            counts.append(len(record.seeds))
            flops, images_seen = compute_train_flops_per_image(record), record.images_seen
            rows.append(
                [
                    format_record_link(path, record),
                    str(len(record.seeds)),
                    format_mean_test_accuracy(record),
                    format_seconds_range(record.seconds),
                    format_thousands_or_millions(images_seen),
                    _format_significant(flops / 1e9),
                    _format_significant(flops * images_seen / 1e15),
                ]
            )
    head = [
        "record",
        "seeds",
        f"test accuracy ({describe_mean_and_interval_notation(counts)})",
        "seconds",
        "images seen",
    ]
    return format_markdown_table([*head, "training GFLOPs per image", "training PFLOPs"], rows)


def _format_significant(value: float) -> str:
    """Format with two decimals, or with two significant digits below 0.1."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def format_records_table(results_folder: Path, record_names: list[str]) -> Markdown:
    """Format one row per record and machine, with a wall-clock column if any record has that time."""
    rows, records = [], read_named_or_all_records(results_folder, record_names)
    accuracy = f"test accuracy ({describe_mean_and_interval_notation(len(record.seeds) for _, record in records)})"
    head = [
        "record",
        "parameters",
        "tokens",
        "images seen",
        "views",
        "seeds",
        accuracy,
        "seconds",
        "seconds with set-up",
    ]
    has_wall = any(record.known_wall_seconds for _, record in records)
    for path, record in records:
        rows.append(
            [
                format_record_link(path, record),
                format_thousands_or_millions(record.params),
                str(record.tokens),
                format_thousands_or_millions(record.images_seen),
                str(record.views),
                str(len(record.seeds)),
                f"**{format_mean_test_accuracy(record)}**",
                format_seconds_range(record.seconds),
                format_seconds_range([max(record.cold_seconds)]),
                *([format_longest_wall_seconds_or_dash(record)] if has_wall else []),
                record.machine_name,
            ]
        )
    return format_markdown_table([*head, *(["wall clock"] if has_wall else []), "machine"], rows)


def format_accuracy_and_time_targets_table(results_folder: Path, target_specs: list[str]) -> Markdown:
    """Format targets (RECORD:PERCENT:SECONDS:SEEDS) and whether they were reached; the slowest seed counts."""
    rows, counts = [], []
    targets = [
        (spec.split(":"), stored_record)
        for spec in target_specs
        for stored_record in read_named_or_all_records(results_folder, [spec.partition(":")[0]])
    ]
    has_wall = any(record.known_wall_seconds for _, (_, record) in targets)
    for (_, percent, max_seconds, seeds), (path, record) in targets:
        counts.append(len(record.seeds))
        reached = (
            100 * record.mean_test_accuracy >= float(percent)
            and max(record.seconds) <= float(max_seconds)
            and len(record.seeds) >= int(seeds)
        )
        rows.append(
            [
                format_record_link(path, record),
                f"{percent} % in {max_seconds} s, {_format_seed_count(int(seeds))}",
                f"**{format_mean_test_accuracy(record)}**",
                f"**{max(record.seconds):.1f}**",
                f"{max(record.cold_seconds):.0f}",
                *([format_longest_wall_seconds_or_dash(record)] if has_wall else []),
                _format_seed_count(len(record.seeds)),
                "yes" if reached else "no",
            ]
        )
    head = [
        "record",
        "target",
        f"test accuracy ({describe_mean_and_interval_notation(counts)})",
        "seconds (slowest seed)",
        "with set-up",
    ]
    return format_markdown_table([*head, *(["wall clock"] if has_wall else []), "seeds", "reached"], rows)


def format_model_card_links(results_folder: Path, record_names: list[str]) -> Markdown:
    """Format links to the model cards."""
    names = [path.stem for path, _ in read_named_or_all_records(results_folder, record_names)]
    return ", ".join(f"[{name}]({{cards}}/{name}.md)" for name in names)


def format_result_sentence(results_folder: Path, record_names: list[str]) -> Markdown:
    """Format accuracy, time and machine, for the comment at the top of a recipe."""
    return "; ".join(
        f"{format_mean_test_accuracy(record)} test accuracy on {record.data} "
        f"({_format_seeds_and_interval(record)}, last epoch, "
        f"{record.training_images:,} training images, {format_count(record.views, 'view')}) in "
        f"{format_seconds_range(record.seconds)} s "
        f"({format_seconds_range([max(record.cold_seconds)])} s with {_describe_set_up(record)}), "
        f"{f'{format_longest_wall_seconds_or_dash(record)} s wall clock, ' if record.known_wall_seconds else ''}"
        f"{record.machine_name}"
        for _, record in read_named_or_all_records(results_folder, record_names)
    )


def _describe_set_up(record: Record) -> str:
    return "compilation and set-up" if record.hardware.get("compiled") else "set-up"


def _format_seeds_and_interval(record: Record) -> str:
    seeds = len(record.seeds)
    return f"{CI_LABEL}, {seeds} seeds" if seeds >= MIN_SEEDS_FOR_INTERVAL else _format_seed_count(seeds)


def _format_seed_count(num_seeds: int) -> str:
    return "1 seed" if num_seeds == 1 else f"{num_seeds} seeds"


def format_mean_test_accuracies(results_folder: Path, record_names: list[str]) -> Markdown:
    return "; ".join(
        format_mean_test_accuracy(record) for _, record in read_named_or_all_records(results_folder, record_names)
    )


ResultFormatter = Callable[[Path, list[str]], Markdown]  # of the results folder and the records' names
TRAINING_RECORD_KINDS = ("table", "targets", "cards", "sentence", "accuracy", "work")  # the others are for benchmarks
RESULT_FORMATTERS: dict[str, ResultFormatter] = {  # kind of a results mark -> formatter
    "table": format_records_table,
    "targets": format_accuracy_and_time_targets_table,
    "cards": format_model_card_links,
    "sentence": format_result_sentence,
    "accuracy": format_mean_test_accuracies,
    "bench": benchmark_tables.format_library_speed_table,
    "bars": benchmark_tables.format_seconds_to_target_accuracy_table,
    "races": benchmark_tables.format_gpu_library_speed_table,
    "growth": benchmark_tables.format_scaling_exponent_table,
    "faithfulness": benchmark_tables.format_explanation_faithfulness_table,
    "cost": benchmark_tables.format_attention_map_cost_factors,
    "pretrained": training_tables.format_pretrained_vs_scratch_table,
    "photos": training_tables.format_chosen_settings_table,
    "faults": benchmark_tables.format_fault_table,
    "odd-size": benchmark_tables.format_result_at_other_image_sizes_table,
    "small-data": training_tables.format_small_data_ablation_table,
    "speedrun": training_tables.format_speedrun_ablation_table,
    "tuning": training_tables.format_speedrun_length_and_size_table,
    "together": benchmark_tables.format_batched_training_speed_table,
    "fewer-tokens": benchmark_tables.format_token_merging_and_dropping_table,
    "pretraining": training_tables.format_accuracy_by_label_fraction_table,
    "features": training_tables.format_feature_probe_table,
    "work": format_from_scratch_flops_table,
}
