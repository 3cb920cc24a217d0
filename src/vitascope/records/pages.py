"""Fill the numbers of pages from records, and write model cards.

In Markdown a mark is `<!-- results: KIND NAME… -->` … `<!-- end results -->`, within a line or across lines. In a
recipe it is the comment `# Recorded: …`, filled from the record with the recipe's name.
"""

import os
import re
import textwrap
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from vitascope.draw.html import Markdown, escape_markdown, format_markdown_table
from vitascope.errors import UserError, format_count, suggest_choice
from vitascope.evaluation.model_card import ModelCard
from vitascope.inference.scoring import VIEW_DESCRIPTIONS
from vitascope.number_format import format_percent
from vitascope.records.ablation import CI_LABEL, MIN_SEEDS_FOR_INTERVAL
from vitascope.records.record import (
    Record,
    find_record_files_by_name,
    format_mean_test_accuracy,
    read_record,
    read_record_or_benchmark_file,
)
from vitascope.records.tables import RESULT_FORMATTERS, TRAINING_RECORD_KINDS, format_result_sentence

RESULTS_MARK = re.compile(r"(<!-- results: (?P<words>[^>]*?) -->)(?P<old>.*?)(<!-- end results -->)", re.DOTALL)
MARK_START = re.compile(r"<!--\s*results\b")
MARK_EXAMPLE = "<!-- results: KIND NAME… --> and then <!-- end results -->."
RECORDED_COMMENT = re.compile(r"^# Recorded:.*\n(?:#   .*\n)*", re.MULTILINE)


class FilledPage(NamedTuple):
    text: str
    num_marks: int


def read_page_and_fill_results_marks(
    page_path: Path, results_folder: Path, cards_folder: Path | None = None
) -> FilledPage:
    """Return the file's text with every mark filled."""
    text = page_path.read_text(encoding="utf-8")
    if page_path.suffix in (".yaml", ".yml"):
        comment = _format_recorded_comment(page_path.stem, results_folder)
        return FilledPage(*RECORDED_COMMENT.subn(lambda _: comment, text))
    cards_folder = cards_folder or results_folder.parent / "docs/cards"
    page = FilledPage(
        *RESULTS_MARK.subn(lambda match: _fill_results_mark(match, page_path, results_folder, cards_folder), text)
    )
    if num_unreadable := len(MARK_START.findall(text)) - page.num_marks:
        marks = format_count(num_unreadable, "results mark")
        raise UserError(f"{page_path} has {marks} that cannot be read. Write {MARK_EXAMPLE}")
    return page


def format_model_cards_of_all_records(results_folder: Path, cards_folder: Path) -> dict[Path, Markdown]:
    """Return the path and text of a model card for every record."""
    return {
        cards_folder / f"{path.stem}.md": make_model_card_of_record(
            read_record(path), _make_path_relative_to_project(path, cards_folder)
        ).format_markdown()
        for paths in find_record_files_by_name(results_folder).values()
        for path in paths
    }


def _make_path_relative_to_project(record_path: Path, cards_folder: Path) -> str:
    """Return the path from the folder that contains both the records and the cards, such as results/mnist.json."""
    record_path = record_path.resolve()
    return record_path.relative_to(os.path.commonpath([record_path, cards_folder.resolve()])).as_posix()


def _fill_results_mark(match: re.Match[str], page_path: Path, results_folder: Path, cards_folder: Path) -> str:
    """Return the mark with the text that its kind and names give."""
    kind, *names = match["words"].split() or [""]
    if kind not in RESULT_FORMATTERS:
        raise UserError(f"{page_path}: there is no kind of results '{kind}'. {suggest_choice(kind, RESULT_FORMATTERS)}")
    text = _check_and_format_results_of_kind(kind, results_folder, names, page_path)
    for placeholder, folder in (("{results}", results_folder), ("{cards}", cards_folder)):
        relative_path = os.path.relpath(folder.resolve(), page_path.resolve().parent).replace(os.sep, "/")
        text = text.replace(placeholder, relative_path)
    text = f"\n{text}\n" if "\n" in text or "\n" in match["old"] else text
    return f"{match[1]}{text}{match[4]}"


def _check_and_format_results_of_kind(kind: str, results_folder: Path, names: list[str], page_path: Path) -> Markdown:
    """Return the text of a mark; refuse a record that is of another kind."""
    if kind not in TRAINING_RECORD_KINDS:
        if not names:
            raise UserError(f"{page_path}: KIND {kind} needs the name of a record.")
        for name in names:
            if "test_accuracy" in read_record_or_benchmark_file(results_folder / f"{name}.json"):
                raise UserError(
                    f"{page_path}: {name} is a training record, and KIND {kind} needs a benchmark's. Choose one of "
                    f"{', '.join(TRAINING_RECORD_KINDS)}."
                )
    if kind == "targets" and any(name.count(":") != 3 for name in names):
        raise UserError(f"{page_path}: KIND targets needs RECORD:PERCENT:SECONDS:SEEDS, such as mnist:99:60:5.")
    try:
        return RESULT_FORMATTERS[kind](results_folder, names)
    except UserError:  # also a ValueError
        raise
    except (LookupError, ValueError, TypeError) as error:
        raise UserError(f"{page_path}: KIND {kind} needs another kind of record than {', '.join(names)}.") from error


def _format_recorded_comment(record_name: str, results_folder: Path) -> str:
    """Return the `# Recorded:` comment of a recipe."""
    has_record = record_name in find_record_files_by_name(results_folder)
    sentence = format_result_sentence(results_folder, [record_name]) if has_record else "not yet"
    lines = textwrap.wrap(f"Recorded: {sentence}.", 114, subsequent_indent="  ")
    return "".join(f"# {line}\n" for line in lines)


TRACK_DESCRIPTIONS = {
    "pure": "Trained from scratch on",
    "tokenizer": "Trained from scratch on",
    "ssl": "Pretrained without labels and then fine-tuned with labels on",
    "staged": "Trained with labels in several stages, the last one on",
    "teacher": "Distilled from another model on",
    "pretrained": "Fine-tuned from pretrained weights on",
}


TRACK_NAMES = {
    "pure": "pure ViT",
    "tokenizer": "ViT with another tokenizer",
    "ssl": "ViT pretrained without labels",
    "staged": "ViT trained in stages",
    "teacher": "distilled ViT",
    "pretrained": "ViT with pretrained weights",
}


def make_model_card_of_record(record: Record, record_file: str) -> ModelCard:
    """Collect the facts of a record for its model card; every number is from the record."""
    no_other_data = "" if record.track in ("pretrained", "teacher") else " No other data was used."
    return ModelCard(
        name=record.name,
        num_parameters=record.params,
        num_tokens=record.tokens,
        settings=record.settings,
        classes=list(record.recall),
        results=[_format_record_results_for_card(record)],
        origin=_describe_machine_and_versions(record),
        origin_code=record.command,
        origin_language="bash",
        data_name=record.data,
        starts_from_weights=record.track == "pretrained",
        kind=TRACK_NAMES[record.track],
        training=f"{TRACK_DESCRIPTIONS[record.track]} {escape_markdown(record.data)}: {record.training_images:,} "
        f"images; {record.images_seen:,} images seen in total.{no_other_data}",
        record_file=record_file,
    )


def _format_record_results_for_card(record: Record) -> Markdown:
    num_seeds = len(record.seeds)
    seeds = "both seeds" if num_seeds == 2 else "one seed"
    seeds = f"{CI_LABEL}, {num_seeds} seeds" if num_seeds >= MIN_SEEDS_FOR_INTERVAL else seeds
    columns = {
        "seed": map(str, record.seeds),
        "test accuracy": (f"{100 * accuracy:.2f} %" for accuracy in record.test_accuracy),
        **({"top-5": (f"{100 * accuracy:.2f} %" for accuracy in record.top5)} if len(record.recall) > 5 else {}),
        "calibration error (15 bins)": (f"{100 * error:.1f} %" for error in record.ece),
        "seconds": (f"{seconds:.1f}" for seconds in record.seconds),
        "seconds with set-up": (f"{seconds:.1f}" for seconds in record.cold_seconds),
        "evaluation on the test set": map(str, record.openings),
    }
    wall_note = ""
    if record.wall_seconds and record.known_wall_seconds:
        columns["wall clock"] = ("–" if seconds is None else f"{seconds:.1f}" for seconds in record.wall_seconds)
        wall_note = " Wall clock: the whole training process plus the evaluation process."
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    recalls = {name: [value for value in values if value is not None] for name, values in record.recall.items()}
    means = {name: mean(values) for name, values in recalls.items() if values}
    lowest = ", ".join(f"{name} ({format_percent(means[name])})" for name in sorted(means, key=means.__getitem__)[:3])
    return (
        f"Test accuracy **{format_mean_test_accuracy(record)}** ({seeds}, last epoch, "
        f"{VIEW_DESCRIPTIONS[record.views]}).\n\n"
        f"{format_markdown_table(list(columns), rows)}\n\n"
        f"Classes with the lowest recall: {lowest}. Seconds: from the images on the "
        "device to the last test logits, without set-up. Set-up: compilation and CUDA graph recording. Evaluation 1 is "
        f"the first evaluation of that run on the test set.{wall_note}"
    )


def _describe_machine_and_versions(record: Record) -> str:
    versions = ", ".join(f"{name} {record.versions.get(name)}" for name in ("vitascope", "python", "torch"))
    hardware = record.hardware
    modes = [hardware["precision"], "compiled" if hardware["compiled"] else "not compiled"]
    modes += ["CUDA graph"] if hardware["captured"] else []
    return f"{record.machine_name} ({', '.join(modes)}); {versions}; commit `{record.commit}`; {record.date}."
