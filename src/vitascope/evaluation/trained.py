"""Load a trained model, from a run or from external weights, with its classes and image preprocessing."""

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
from vitascope.evaluation.report import Evaluation, describe_reduction
from vitascope.model.anatomy import total_parameters
from vitascope.model.config import ModelConfig
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
    """A VisionTransformer that also predicts from unprepared images; `model(images)` expects normalised ones."""

    def __init__(self, run: Run, facts: ModelFacts, weights: str = "last") -> None:
        super().__init__(facts.model)
        self.run, self.facts, self.weights = run, facts, weights
        self.fast: Fast | None = None
        self.notes: list[str] = []  # of external weights: what was assumed, left out or converted

    @property
    def name(self) -> str:
        """The run's path, or the name of the external weights."""
        return self.run.word if isinstance(self.run, Outside) else str(self.run.path)

    @property
    def classes(self) -> list[str]:
        return self.facts.classes

    def pooled(self, images: Tensor) -> Features:
        """Return the pooled features of each image; uses the fast version in evaluation mode without gradients."""
        way = self.fast.pooled if self.fast and not self.training and not torch.is_grad_enabled() else None
        return super().pooled(images) if way is None else way(images)

    def answer_with(self, **fewer: int) -> None:
        """Set merge_tokens or drop_tokens for inference; the weights do not change."""
        if fewer:
            self.config = replace(self.config, **fewer)
            self.facts = replace(self.facts, model=self.config)
            self.fast = None  # made for other settings
            self.weights = self.weights.split(",")[0] + "".join(
                f", {name}={count}" for name, count in fewer.items() if count
            )

    def predict(self, images: Any, *, views: int = 1) -> Predictions:
        """Predict one or many images: paths, Pillow images, arrays (channels last) or tensors (channels first).

        `views`: 1, 2 (with the mirror image), 6 or 10 (also shifted by one pixel); their logits are averaged."""
        if views != 1:
            check_views(self.run.recipe, views)
        pictures = as_stored(images, self.facts.stored)
        logits = logits_of(self, pictures.images, self.facts.preparation, hardware_of(self), views=views)
        return predictions(logits, pictures, self.classes)

    def features(self, images: Any) -> Features:
        """Return the pooled feature vector of each image, i.e. the classifier's input."""
        return self.stored_features(as_stored(images, self.facts.stored).images)

    def predict_with_features(self, pictures: Pictures) -> tuple[Predictions | None, Features]:
        """Return predictions and features from one forward pass; predictions are None without a classifier."""
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
        """Evaluate on the test images, or on another split or other data. Each use of test images is logged in the run.

        `views`: as in `predict`.
        `robust=False` skips the corruption tests, which take most of the time.
        """
        told = {"split": split, "data": data, "views": views, "robust": robust}
        return evaluate(self, self.run, self.facts, weights=self.weights, **told)

    def save_pretrained(self, folder: str | os.PathLike[str], *, form: str = "vitascope") -> Path:
        """Save config.json, model.safetensors and a model card in a folder; `form`: vitascope, timm or transformers."""
        from vitascope.evaluation.sharing import save_pretrained

        return save_pretrained(self, folder, form=form)

    def push_to_hub(
        self, repository: str, *, form: str = "vitascope", private: bool = False, token: str | None = None
    ) -> str:
        """Upload this folder as a repository to the Hugging Face hub. Returns its URL."""
        from vitascope.evaluation.sharing import push_to_hub

        return push_to_hub(self, repository, form=form, private=private, token=token)

    @classmethod
    def from_pretrained(cls, weights: str | os.PathLike[str], *, device: str = "cpu") -> "TrainedTransformer":
        """Same as `load`: a folder, hf:REPO, timm:NAME, a weights file, or a run."""
        return load(weights, device=device)

    def _repr_html_(self) -> str:
        config, reduction = self.config, describe_reduction(self.config)
        rows = [
            ["weights", self.run.word]
            if isinstance(self.run, Outside)
            else ["run", f"{self.run.path}, {self.weights.split(',')[0]} epoch"],
            ["image", f"{config.in_chans} × {config.image_shape[0]} × {config.image_shape[1]}"],
            ["tokens", f"{config.num_tokens}{f', {reduction}' if reduction else ''}"],
            ["blocks", f"{config.depth}, width {config.embed_dim}, {config.num_heads} heads"],
            ["parameters", f"{total_parameters(config):,}"],
            ["inference", self.fast.how if self.fast else "float32"],
            ["classes", ", ".join(self.classes[:12]) + (" …" if len(self.classes) > 12 else "")],
        ]
        return html_table(["property", "value"], rows)


def load(
    run: str | os.PathLike[str],
    *,
    best: bool = False,
    device: str = "cpu",
    fast: bool = False,
    merge_tokens: int | None = None,
    drop_tokens: int | None = None,
) -> TrainedTransformer:
    """Load a trained model for inference: a run, timm:NAME, hf:REPO, a weights file, or a folder with config.json.

    `best`: a run's best epoch on validation images instead of the last.
    `fast`: on a GPU compiled, in bfloat16, with CUDA graphs; the first predictions take a while. On a CPU int8 or
    bfloat16, if measured to be faster with an accuracy loss of at most 0.2 percentage points. See `model.fast.how`.
    `merge_tokens`, `drop_tokens`: tokens to merge or drop in each block, instead of the run's own setting.
    """
    model = _from_outside(str(run), best) if is_outside(run) else _from_run(open_run(run), best)
    given = {"merge_tokens": merge_tokens, "drop_tokens": drop_tokens}
    if fewer := {name: count for name, count in given.items() if count is not None}:
        model.answer_with(**fewer)
        _check_reduction(model.config)
    model = model.to(choose_device(device)).eval()
    if fast:
        model.fast = make_fast(model, model.run, model.facts)
    return model


def _check_reduction(config: ModelConfig) -> None:
    """Raise a UserError if a block cannot merge or drop so many tokens."""
    for name, count in config.fewer.items():
        if count > (most := config.fewer_per_block[0]):
            verb = "merge" if name == "merge_tokens" else "drop"
            raise UserError(
                f"{name}={count} is too large: the model has {config.num_patches} patches, and a block can {verb} at "
                f"most {most} of them."
            )


def is_outside(word: str | os.PathLike[str]) -> bool:
    """Whether this names external weights (a name, a file, or a folder that is not a run)."""
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
        raise UserError(f"{word} has only one set of weights. Omit --best, which works only for runs.")
    found = open_weights(word)
    model = TrainedTransformer(outside(word, found.facts.model), found.facts)
    model.load_state_dict(found.weights)
    model.notes = found.told
    return model


from_pretrained = TrainedTransformer.from_pretrained
