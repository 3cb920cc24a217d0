"""Records -> how much arithmetic learning took, whatever the machine."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from vitascope.model.anatomy import total_flops
from vitascope.model.config import ModelConfig
from vitascope.recipe.train import TrainConfig
from vitascope.records.reading import accuracy_words, markdown, millions, records_named, seconds_words
from vitascope.records.record import Record

BOTH_WAYS = 3  # forward once, backward twice as much


def training_flops(record: Record) -> float:
    """Of all images seen, forward and backward; fewer while less of each image is seen."""
    model, train = ModelConfig(**_section(record, "model")), TrainConfig(**_section(record, "train"))
    whole, less = total_flops(model), 0
    if train.small_size:
        less = total_flops(replace(model, img_size=train.small_size))
    elif train.sees_less:
        height, width = model.patch_shape
        less = total_flops(replace(model, img_size=(height, width * train.seen_patches(model.num_patches))))
    share = train.small_epochs / train.epochs
    return BOTH_WAYS * record.images_seen * (share * less + (1 - share) * whole)


def _section(record: Record, name: str) -> dict[str, Any]:
    """What was set there, of what counts: older records have fewer settings, and seeds are many."""
    known = {field.name for field in fields(ModelConfig if name == "model" else TrainConfig)} - {"seed"}
    found = {key: record.settings[f"{name}.{key}"] for key in sorted(known) if f"{name}.{key}" in record.settings}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}


def work(folder: Path, names: list[str]) -> str:
    """Accuracy beside seconds and arithmetic, one row per record that learnt from labels alone."""
    rows = [
        [
            f"[{record.name}]({{results}}/{path.name})",
            f"**{accuracy_words(record)}**",
            seconds_words(record.seconds),
            millions(record.images_seen),
            f"{training_flops(record) / 1e15:.2f}",
        ]
        for path, record in records_named(folder, names)
        if record.track in ("pure", "tokenizer")
    ]
    return markdown(["record", "test accuracy", "seconds", "images seen", "PFLOP"], rows)
