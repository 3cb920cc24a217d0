"""The floating-point operations of a training run, independent of the machine."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from vitascope.model.config import ModelConfig
from vitascope.recipe.schema import Recipe
from vitascope.recipe.train import TrainConfig
from vitascope.records.arms import explain_mean
from vitascope.records.reading import accuracy_words, linked, markdown, millions, records_named, seconds_words
from vitascope.records.record import Record
from vitascope.training.hardware import training_flops


def image_flops(record: Record) -> float:
    """Training FLOPs per image, forward and backward, averaged over epochs that see only part of each image."""
    model = ModelConfig(**_section(record, "model", ModelConfig))
    return training_flops(Recipe(name="any", model=model, train=TrainConfig(**_section(record, "train", TrainConfig))))


def _section(record: Record, name: str, kind: type) -> dict[str, Any]:
    """The settings of one section that the record has; older records have fewer."""
    known = [field.name for field in fields(kind) if field.name != "seed"]
    found = {key: record.settings[f"{name}.{key}"] for key in known if f"{name}.{key}" in record.settings}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}


def work(folder: Path, names: list[str]) -> str:
    """Accuracy, seconds and FLOPs, one row per record trained from scratch with labels."""
    rows, counts = [], []
    for path, record in records_named(folder, names):
        if record.track in ("pure", "tokenizer"):
            counts.append(len(record.seeds))
            flops, seen = image_flops(record), record.images_seen
            rows.append(
                [
                    linked(path, record),
                    str(len(record.seeds)),
                    accuracy_words(record),
                    seconds_words(record.seconds),
                    millions(seen),
                    f"{flops / 1e9:.2f}",
                    f"{flops * seen / 1e15:.2f}",
                ]
            )
    head = ["record", "seeds", f"test accuracy ({explain_mean(counts)})", "seconds", "images seen"]
    return markdown([*head, "training GFLOPs per image", "training PFLOPs"], rows)
