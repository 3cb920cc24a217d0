"""Markdown tables and sentences from records, for README and docs."""

from collections.abc import Callable
from pathlib import Path

from vitascope.records import measured
from vitascope.records.arms import CONFIDENCE, ENOUGH, explain_mean
from vitascope.records.reading import (
    accuracy_words,
    linked,
    markdown,
    millions,
    records_named,
    seconds_words,
    wall_words,
)
from vitascope.records.record import Record
from vitascope.records.work import work


def table(folder: Path, names: list[str]) -> str:
    """One row per record and machine; a wall-clock column if any record has that time."""
    rows, found = [], records_named(folder, names)
    accuracy = f"test accuracy ({explain_mean(len(record.seeds) for _, record in found)})"
    head = ["record", "parameters", "tokens", "images seen", "views", "seeds", accuracy, "seconds", "cold"]
    has_wall = any(record.known_wall_seconds for _, record in found)
    for path, record in found:
        rows.append(
            [
                linked(path, record),
                millions(record.params),
                str(record.tokens),
                millions(record.images_seen),
                str(record.views),
                str(len(record.seeds)),
                f"**{accuracy_words(record)}**",
                seconds_words(record.seconds),
                seconds_words([max(record.cold_seconds)]),
                *([wall_words(record)] if has_wall else []),
                record.machine_name,
            ]
        )
    return markdown([*head, *(["wall clock"] if has_wall else []), "machine"], rows)


def targets(folder: Path, names: list[str]) -> str:
    """Targets and what was recorded. A name is RECORD:PERCENT:SECONDS:SEEDS; the slowest seed counts."""
    rows, counts = [], []
    found = [(word.split(":"), item) for word in names for item in records_named(folder, [word.partition(":")[0]])]
    has_wall = any(record.known_wall_seconds for _, (_, record) in found)
    for (_, percent, most, seeds), (path, record) in found:
        counts.append(len(record.seeds))
        reached = (
            100 * record.accuracy >= float(percent)
            and max(record.seconds) <= float(most)
            and len(record.seeds) >= int(seeds)
        )
        rows.append(
            [
                linked(path, record),
                f"{percent} % in {most} s, {_counted(int(seeds))}",
                f"**{accuracy_words(record)}**",
                f"**{max(record.seconds):.1f}**",
                f"{max(record.cold_seconds):.0f}",
                *([wall_words(record)] if has_wall else []),
                _counted(len(record.seeds)),
                "yes" if reached else "no",
            ]
        )
    head = ["record", "target", f"test accuracy ({explain_mean(counts)})", "seconds (slowest seed)", "cold"]
    return markdown([*head, *(["wall clock"] if has_wall else []), "seeds", "reached"], rows)


def cards(folder: Path, names: list[str]) -> str:
    """Links to the model cards."""
    found = [path.stem for path, _ in records_named(folder, names)]
    return ", ".join(f"[{stem}]({{cards}}/{stem}.md)" for stem in found)


def sentence(folder: Path, names: list[str]) -> str:
    """Accuracy, time and machine, for the comment at the top of a recipe."""
    return "; ".join(
        f"{accuracy_words(record)} test accuracy on {record.data} ({_interval_words(record)}, last epoch, "
        f"{record.training_images:,} training images, {record.views} view{'s' if record.views > 1 else ''}) in "
        f"{seconds_words(record.seconds)} s{' (compiled)' if record.hardware.get('compiled') else ''}, "
        f"{seconds_words([max(record.cold_seconds)])} s cold, "
        f"{f'{wall_words(record)} s wall clock, ' if record.known_wall_seconds else ''}{record.machine_name}"
        for _, record in records_named(folder, names)
    )


def _interval_words(record: Record) -> str:
    seeds = len(record.seeds)
    return f"{CONFIDENCE}, {seeds} seeds" if seeds >= ENOUGH else _counted(seeds)


def _counted(seeds: int) -> str:
    return "1 seed" if seeds == 1 else f"{seeds} seeds"


def accuracy(folder: Path, names: list[str]) -> str:
    return "; ".join(accuracy_words(record) for _, record in records_named(folder, names))


KINDS: dict[str, Callable[[Path, list[str]], str]] = {
    "table": table,
    "targets": targets,
    "cards": cards,
    "sentence": sentence,
    "accuracy": accuracy,
    "bench": measured.bench,
    "bars": measured.bars,
    "races": measured.races,
    "growth": measured.growth,
    "faithfulness": measured.faithfulness,
    "cost": measured.cost,
    "pretrained": measured.pretrained,
    "odd-size": measured.odd_size,
    "small-data": measured.small_data,
    "speedrun": measured.speedrun,
    "tuning": measured.tuning,
    "together": measured.together,
    "fewer-tokens": measured.fewer_tokens,
    "pretraining": measured.pretraining,
    "features": measured.features,
    "work": work,
}
