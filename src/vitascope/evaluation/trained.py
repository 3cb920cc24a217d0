"""A run, or weights from outside -> the trained model, which knows its classes and how its images are prepared."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitascope.draw.html import html_table
from vitascope.errors import UserError
from vitascope.evaluation.evaluate import evaluate
from vitascope.evaluation.fast import Fast, make_fast
from vitascope.evaluation.prediction import Predictions, predictions
from vitascope.evaluation.reading import Pictures, as_stored
from vitascope.evaluation.report import Evaluation
from vitascope.model.anatomy import total_parameters
from vitascope.model.vit import VisionTransformer
from vitascope.run.directory import Outside, Run, open_run, outside
from vitascope.run.weights import load_weights, read_facts
from vitascope.shapes import Features
from vitascope.training.hardware import choose_device, hardware_of
from vitascope.training.scoring import answers, logits_of
from vitascope.training.views import check_views
from vitascope.weights.facts import ModelFacts
from vitascope.weights.files import ENDINGS
from vitascope.weights.pretrained import ONLINE, open_weights


class TrainedTransformer(VisionTransformer):
    """A VisionTransformer (its input are prepared images) that can also be asked about images as they are."""

    def __init__(self, run: Run, facts: ModelFacts, weights: str = "last") -> None:
        super().__init__(facts.model)
        self.run, self.facts, self.weights = run, facts, weights
        self.fast: Fast | None = None
        self.notes: list[str] = []  # of weights from outside: what was assumed, left out or read otherwise

    @property
    def name(self) -> str:
        """As users type it."""
        return self.run.word if isinstance(self.run, Outside) else str(self.run.path)

    @property
    def classes(self) -> list[str]:
        return self.facts.classes

    def pooled(self, images: Tensor) -> Features:
        """What the classifier sees of each image; by the faster way, if there is one and nobody asks for gradients."""
        way = self.fast.pooled if self.fast and not self.training and not torch.is_grad_enabled() else None
        return super().pooled(images) if way is None else way(images)

    def answer_with(self, **fewer: int) -> None:
        """Settings that change how the model answers, not what it has learnt: merge_tokens, drop_tokens."""
        if fewer:
            self.config = replace(self.config, **fewer)
            self.facts = replace(self.facts, model=self.config)
            self.fast = None  # made for other settings
            self.weights = self.weights.split(",")[0] + "".join(
                f", {name}={count}" for name, count in fewer.items() if count
            )

    def predict(self, images: Any, *, views: int = 1) -> Predictions:
        """Paths, Pillow images, arrays (rows × columns × channels) or tensors (channels first), one or many.

        `views`: 1, 2 (with the mirror image), 6 or 10 (also shifted by one pixel); their logits are averaged."""
        if views != 1:
            check_views(self.run.recipe, views)
        pictures = as_stored(images, self.facts.stored)
        logits = logits_of(self, pictures.images, self.facts.preparation, hardware_of(self), views=views)
        return predictions(logits, pictures, self.classes)

    def features(self, images: Any) -> Features:
        """What the classifier sees of each image: one pooled vector."""
        return self.stored_features(as_stored(images, self.facts.stored).images)

    def predict_with_features(self, pictures: Pictures) -> tuple[Predictions | None, Features]:
        """Both from one look; no predictions where there is no classifier."""
        features = self.stored_features(pictures.images)
        if not self.classes:
            return None, features
        with torch.no_grad():
            logits = self.head(features.to(next(self.parameters()).device)).cpu()
        return predictions(logits, pictures, self.classes), features

    def stored_features(self, stored: Tensor) -> Features:
        return answers(self, self.pooled, stored, self.facts.preparation, hardware_of(self))

    def evaluate(
        self, split: str | None = None, *, data: str | None = None, views: int = 1, robust: bool = True
    ) -> Evaluation:
        """On the test images, unless another split or other data is named; each look at test images is noted.

        `views`: as in `predict`.
        `robust=False` leaves out the spoilt images, which take most of the time.
        """
        told = {"split": split, "data": data, "views": views, "robust": robust}
        return evaluate(self, self.run, self.facts, weights=self.weights, **told)

    def save_pretrained(self, folder: str | os.PathLike[str], *, form: str = "vitascope") -> Path:
        """A folder with config.json, model.safetensors and a card: for `load`, or (`form`) for timm or transformers."""
        from vitascope.evaluation.sharing import save_pretrained

        return save_pretrained(self, folder, form=form)

    def push_to_hub(
        self, repository: str, *, form: str = "vitascope", private: bool = False, token: str | None = None
    ) -> str:
        """The same, as a repository on the Hugging Face hub. Its address comes back."""
        from vitascope.evaluation.sharing import push_to_hub

        return push_to_hub(self, repository, form=form, private=private, token=token)

    @classmethod
    def from_pretrained(cls, weights: str | os.PathLike[str], *, device: str = "cpu") -> "TrainedTransformer":
        """The same as `load`: a folder, hf:REPO, timm:NAME, a weights file, or a run."""
        return load(weights, device=device)

    def _repr_html_(self) -> str:
        config = self.config
        rows = [
            ["weights", self.run.word]
            if isinstance(self.run, Outside)
            else ["run", f"{self.run.path}, {self.weights} epoch"],
            ["image", f"{config.in_chans} × {config.image_shape[0]} × {config.image_shape[1]}"],
            ["tokens", str(config.num_tokens)],
            ["blocks", f"{config.depth} of width {config.embed_dim}, {config.num_heads} heads"],
            ["parameters", f"{total_parameters(config):,}"],
            ["answers", self.fast.how if self.fast else "float32, as it is"],
            ["classes", ", ".join(self.classes[:12]) + (" …" if len(self.classes) > 12 else "")],
        ]
        return html_table(["trained model", ""], rows)


def load(
    run: str | os.PathLike[str],
    *,
    best: bool = False,
    device: str = "cpu",
    fast: bool = False,
    merge_tokens: int | None = None,
    drop_tokens: int | None = None,
) -> TrainedTransformer:
    """A trained model, ready to answer: a run's (the last epoch's weights, or the best on validation images), or one
    from outside: timm:NAME, hf:REPO, a weights file, a folder with config.json.

    `fast`: on a GPU compiled, in bfloat16 and recorded (the first answers take a while); on a CPU in int8 or bfloat16
    products where that is measured to be faster and loses at most 0.2 points. `model.fast.how` says what was done.
    `merge_tokens`, `drop_tokens`: answer with so many tokens fewer in each block (instead of the run's own setting).
    """
    model = _from_outside(str(run), best) if is_outside(run) else _from_run(open_run(run), best)
    fewer = {"merge_tokens": merge_tokens, "drop_tokens": drop_tokens}
    model.answer_with(**{name: count for name, count in fewer.items() if count is not None})
    model = model.to(choose_device(device)).eval()
    if fast:
        model.fast = make_fast(model, model.run, model.facts)
    return model


def is_outside(word: str | os.PathLike[str]) -> bool:
    """Weights by name or file, or a folder that is not a run."""
    path = Path(word)
    online = str(word).startswith(ONLINE)
    return (
        online or path.suffix in ENDINGS or ((path / "config.json").is_file() and not (path / "recipe.yaml").exists())
    )


def _from_run(run: Run, best: bool) -> TrainedTransformer:
    model = TrainedTransformer(run, read_facts(run), "best" if best else "last")
    load_weights(model, run, best=best)
    return model


def _from_outside(word: str, best: bool) -> TrainedTransformer:
    if best:
        raise UserError(f"{word} has one set of weights; --best is for runs.")
    found = open_weights(word)
    model = TrainedTransformer(outside(word, found.facts.model), found.facts)
    model.load_state_dict(found.weights)
    model.notes = found.told
    return model


from_pretrained = TrainedTransformer.from_pretrained
