"""Records -> how much arithmetic learning took, whatever the machine."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from vitascope.model.config import ModelConfig
from vitascope.recipe.schema import Recipe
from vitascope.recipe.train import TrainConfig
from vitascope.records.reading import accuracy_words, linked, markdown, millions, records_named, seconds_words
from vitascope.records.record import Record
from vitascope.training.hardware import training_flops


def image_flops(record: Record) -> float:
    """Of an image learnt from, forward and backward; fewer while less of each image is seen."""
    model = ModelConfig(**_section(record, "model", ModelConfig))
    return training_flops(Recipe(name="any", model=model, train=TrainConfig(**_section(record, "train", TrainConfig))))


def _section(record: Record, name: str, kind: type) -> dict[str, Any]:
    """What the record knows of it: older ones have fewer settings, and seeds are many."""
    known = [field.name for field in fields(kind) if field.name != "seed"]
    found = {key: record.settings[f"{name}.{key}"] for key in known if f"{name}.{key}" in record.settings}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}


def work(folder: Path, names: list[str]) -> str:
    """Accuracy beside seconds and arithmetic, one row per record that learnt from labels alone."""
    rows = []
    for path, record in records_named(folder, names):
        if record.track in ("pure", "tokenizer"):
            flops, seen = image_flops(record), record.images_seen
            rows.append(
                [
                    linked(path, record),
                    accuracy_words(record),
                    seconds_words(record.seconds),
                    millions(seen),
                    f"{flops / 1e9:.2f}",
                    f"{flops * seen / 1e15:.2f}",
                ]
            )
    return markdown(["record", "test accuracy", "seconds", "images seen", "GFLOP an image", "PFLOP in all"], rows)
