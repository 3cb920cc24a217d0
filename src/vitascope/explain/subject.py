"""Load the model to explain, from a run, `timm:NAME` or a weights file, with its classes and preprocessing."""

from dataclasses import dataclass, field

from numpy.typing import NDArray
from torch import nn

from vitascope.data.preparation import Preparation
from vitascope.errors import UserError
from vitascope.evaluation.reading import Stored
from vitascope.evaluation.trained import TrainedTransformer, load
from vitascope.model.config import FEWER
from vitascope.run.directory import Outside
from vitascope.shapes import Images
from vitascope.weights.any_model import of_timm
from vitascope.weights.known import class_names
from vitascope.weights.online import fetch_timm


@dataclass(frozen=True)
class Subject:
    name: str
    model: nn.Module
    classes: list[str]
    preparation: Preparation
    stored: Stored
    notes: list[str] = field(default_factory=list)  # what was assumed about external weights

    @property
    def run(self) -> TrainedTransformer | None:
        """The model if it comes from a run, else None."""
        trained = isinstance(self.model, TrainedTransformer) and not isinstance(self.model.run, Outside)
        return self.model if trained else None  # pyright: ignore[reportReturnType]

    def pictures(self, images: Images) -> list[NDArray]:
        """Undo the normalisation: height × width × channel, between 0 and 1."""
        return [image.permute(1, 2, 0).numpy() for image in self.preparation.undone(images)]

    def number_of(self, target: str) -> int:
        """Return the index of a class, given by name or index."""
        if target in self.classes:
            return self.classes.index(target)
        if target.isdigit() and int(target) < len(self.classes):
            return int(target)
        some = ", ".join(self.classes[:10]) + (" …" if len(self.classes) > 10 else "")
        raise UserError(f"There is no class '{target}'. Classes: {some}")


def open_subject(word: str, *, best: bool = False) -> Subject:
    """Load a model. Models of timm are used unchanged; all others are converted to Vitascope's."""
    if word.startswith("timm:"):
        return _from_timm(word.removeprefix("timm:"))
    model = load(word, best=best)
    if model.config.fewer:  # explanations use all tokens
        model.answer_with(**dict.fromkeys(FEWER, 0))
    return Subject(model.name, model, model.classes, model.facts.preparation, model.facts.stored, model.notes)


def _from_timm(name: str) -> Subject:
    found = of_timm(fetch_timm(name), None)
    stored = (len(found.preparation.mean), *found.preparation.size)
    return Subject(f"timm:{name}", found.module, class_names(found.num_classes), found.preparation, stored)
