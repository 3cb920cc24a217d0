"""Predictions: for each image a class and the probability of every class."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from vitascope.data.source import UInt8Images
from vitascope.draw.html import bar, html_table, picture
from vitascope.errors import UserError
from vitascope.evaluation.reading import Pictures
from vitascope.shapes import Logits

SHOWN = 24  # in a notebook


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image."""

    file: str | None
    label: str
    probability: float
    probabilities: dict[str, float]  # of every class, in the order of the run's classes

    @property
    def likeliest(self) -> list[tuple[str, float]]:
        """All classes, the most probable first."""
        return sorted(self.probabilities.items(), key=lambda item: -item[1])

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON; the predicted class has the key `class`."""
        return {
            "file": self.file,
            "class": self.label,
            "probability": self.probability,
            "probabilities": self.probabilities,
        }


@dataclass(frozen=True)
class Predictions(Sequence[Prediction]):
    """One prediction per image, in order; shown as a table with thumbnails in a notebook."""

    items: list[Prediction]
    images: UInt8Images
    broken: list[str] = field(default_factory=list)  # files of a folder that could not be read

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Prediction: ...
    @overload
    def __getitem__(self, index: slice) -> "Predictions": ...
    def __getitem__(self, index: int | slice) -> "Prediction | Predictions":
        if isinstance(index, slice):
            return Predictions(self.items[index], self.images[index], self.broken)
        return self.items[index]

    def __iter__(self) -> Iterator[Prediction]:
        return iter(self.items)

    @property
    def labels(self) -> list[str]:
        return [item.label for item in self.items]

    def _repr_html_(self) -> str:
        rows = []
        for item, image in list(zip(self.items, self.images, strict=True))[:SHOWN]:
            likely = "<br>".join(bar(name, share) for name, share in item.likeliest[:3])
            rows.append([picture(image.permute(1, 2, 0).numpy()), item.file or "", likely])
        more = f"<p>… and {len(self) - SHOWN} more</p>" if len(self) > SHOWN else ""
        return html_table(["image", "file", "prediction"], rows, raw=("image", "prediction")) + more


def predictions(logits: Logits, pictures: Pictures, classes: list[str]) -> Predictions:
    """Convert logits to predictions; the softmax is in float64, so that probabilities sum to 1."""
    if not classes:
        raise UserError(
            "The model has no classifier. Compute features with `vitascope embed`, or add a classifier with `train`."
        )
    items = []
    for number, shares in enumerate(logits.double().softmax(1).tolist()):
        named = dict(zip(classes, shares, strict=True))
        label = max(named, key=named.__getitem__)
        items.append(Prediction(pictures.files[number] if pictures.files else None, label, named[label], named))
    return Predictions(items, pictures.images, pictures.broken)
