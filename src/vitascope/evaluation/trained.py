"""Load a trained model, from a run or from external weights, with its classes and image preprocessing."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vitascope.draw.html import make_html_table
from vitascope.errors import UserError
from vitascope.evaluation.evaluate import evaluate_and_log_test_use
from vitascope.evaluation.fast import FastInference, choose_fast_or_float32_inference
from vitascope.evaluation.prediction import (
    ImagesInput,
    LoadedImages,
    Predictions,
    build_predictions,
    load_or_convert_input_images,
)
from vitascope.evaluation.report import Evaluation, describe_token_reduction
from vitascope.model.anatomy import count_parameters
from vitascope.model.config import ModelConfig
from vitascope.model.vit import VisionTransformer
from vitascope.run.checkpoint import load_run_weights_into_model, read_model_info
from vitascope.run.directory import ExternalModel, Run, make_external_model, open_run_or_newest
from vitascope.shapes import Features
from vitascope.training.hardware import choose_or_check_device, make_float32_inference_hardware
from vitascope.training.scoring import check_views_match_training, compute_logits, compute_outputs_in_eval_mode
from vitascope.weights.files import WEIGHTS_SUFFIXES
from vitascope.weights.model_info import ModelInfo
from vitascope.weights.pretrained import ONLINE_PREFIXES, open_weights


class PredictionsWithFeatures(NamedTuple):
    predictions: Predictions | None  # None: the model has no classifier
    features: Features


class TrainedTransformer(VisionTransformer):
    """A VisionTransformer that also predicts from unprepared images; `model(images)` expects normalised ones."""

    def __init__(self, run: Run, model_info: ModelInfo, weights_label: str = "last") -> None:
        super().__init__(model_info.model)
        self.run, self.info, self.weights_label = run, model_info, weights_label
        self.fast: FastInference | None = None
        self.notes: list[str] = []  # of external weights: what was assumed, left out or converted

    @property
    def name(self) -> str:
        """The run's path, or the name of the external weights."""
        return self.run.model_ref if isinstance(self.run, ExternalModel) else str(self.run.path)

    @property
    def classes(self) -> list[str]:
        return self.info.classes

    def compute_pooled_features(self, images: Tensor, depth_noise: Tensor | None = None) -> Features:
        """Return the pooled features of each image; uses the fast version in evaluation mode without gradients."""
        compute_fast = (
            self.fast.compute_pooled if self.fast and not self.training and not torch.is_grad_enabled() else None
        )
        return super().compute_pooled_features(images, depth_noise) if compute_fast is None else compute_fast(images)

    def set_token_reduction(self, **tokens_per_block: int) -> None:
        """Set merge_tokens or drop_tokens for inference; the weights do not change."""
        if tokens_per_block:
            self.config = replace(self.config, **tokens_per_block)
            self.info = replace(self.info, model=self.config)
            self.fast = None  # made for other settings
            self.weights_label = self.weights_label.split(",")[0] + "".join(
                f", {name}={count}" for name, count in tokens_per_block.items() if count
            )

    def predict(self, images: ImagesInput, *, views: Literal[1, 2, 6, 10] = 1) -> Predictions:
        """Predict one or many images: paths, Pillow images, arrays (channels last) or tensors (channels first).

        `views`: 1, 2 (with the mirror image), 6 or 10 (also shifted by one pixel); their logits are averaged."""
        if views != 1:
            check_views_match_training(self.run.recipe, views)
        loaded = load_or_convert_input_images(images, self.info.stored)
        logits = compute_logits(
            self, loaded.images, self.info.preparation, make_float32_inference_hardware(self), num_views=views
        )
        return build_predictions(logits, loaded, self.classes)

    def features(self, images: ImagesInput) -> Features:
        """Return the pooled feature vector of each image, i.e. the classifier's input."""
        return self.compute_stored_features(load_or_convert_input_images(images, self.info.stored).images)

    def predict_with_features(self, loaded_images: LoadedImages) -> PredictionsWithFeatures:
        """Return predictions and features from one forward pass; predictions are None without a classifier."""
        features = self.compute_stored_features(loaded_images.images)
        if not self.classes:
            return PredictionsWithFeatures(None, features)
        with torch.no_grad():
            logits = self.head(features.to(next(self.parameters()).device)).cpu()
        return PredictionsWithFeatures(build_predictions(logits, loaded_images, self.classes), features)

    def compute_stored_features(self, stored_images: Tensor) -> Features:
        return compute_outputs_in_eval_mode(
            self,
            self.compute_pooled_features,
            stored_images,
            self.info.preparation,
            make_float32_inference_hardware(self),
        )

    def evaluate(
        self, split: str | None = None, *, data: str | None = None, views: int = 1, robust: bool = True
    ) -> Evaluation:
        """Evaluate on the test images, or on another split or other data. Each use of test images is logged in the run.

        `views`: as in `predict`.
        `robust=False` skips the corruption tests, which take most of the time.
        """
        return evaluate_and_log_test_use(
            self,
            self.run,
            self.info,
            split=split,
            data=data,
            views=views,
            weights_label=self.weights_label,
            robust=robust,
        )

    def save_pretrained(self, folder: str | os.PathLike[str], *, library: str = "vitascope") -> Path:
        """Save config.json, model.safetensors and a model card in a folder.

        `library`: the library that will load it: vitascope, timm or transformers."""
        from vitascope.evaluation.sharing import save_pretrained

        return save_pretrained(self, folder, library=library)

    def push_to_hub(
        self, repository: str, *, library: str = "vitascope", private: bool = False, token: str | None = None
    ) -> str:
        """Upload the files of `save_pretrained` as a repository to the Hugging Face hub. Return its URL."""
        from vitascope.evaluation.sharing import push_to_hub

        return push_to_hub(self, repository, library=library, private=private, token=token)

    @classmethod
    def from_pretrained(cls, weights: str | os.PathLike[str], *, device: str = "cpu") -> "TrainedTransformer":
        """Same as `load`: a folder, hf:REPO, timm:NAME, a weights file, or a run."""
        return load(weights, device=device)

    def _repr_html_(self) -> str:
        config, reduction = self.config, describe_token_reduction(self.config)
        rows = [
            ["weights", self.run.model_ref]
            if isinstance(self.run, ExternalModel)
            else ["run", f"{self.run.path}, {self.weights_label.split(',')[0]} epoch"],
            ["image", f"{config.in_chans} × {config.image_shape[0]} × {config.image_shape[1]}"],
            ["tokens", f"{config.num_tokens}{f', {reduction}' if reduction else ''}"],
            ["blocks", f"{config.depth}, width {config.embed_dim}, {config.num_heads} heads"],
            ["parameters", f"{count_parameters(config):,}"],
            ["inference", self.fast.description if self.fast else "float32"],
            ["classes", ", ".join(self.classes[:12]) + (" …" if len(self.classes) > 12 else "")],
        ]
        return make_html_table(["property", "value"], rows)


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
    bfloat16, if measured to be faster with an accuracy loss of at most 0.2 percentage points.
    `model.fast.description` says which.
    `merge_tokens`, `drop_tokens`: tokens to merge or drop in each block, instead of the run's own setting.
    """
    model = (
        _load_external_weights(str(run), best)
        if refers_to_external_weights(run)
        else _load_from_run(open_run_or_newest(run), best)
    )
    overrides = {"merge_tokens": merge_tokens, "drop_tokens": drop_tokens}
    if reduction := {name: count for name, count in overrides.items() if count is not None}:
        model.set_token_reduction(**reduction)
        _check_num_removed_tokens(model.config)
    model = model.to(choose_or_check_device(device)).eval()
    if fast:
        model.fast = choose_fast_or_float32_inference(model, model.run, model.info)
    return model


def _check_num_removed_tokens(config: ModelConfig) -> None:
    """Raise a UserError if a block cannot merge or drop so many tokens."""
    for name, count in config.token_reduction.items():
        if count > (max_count := config.num_removed_per_block[0]):
            verb = "merge" if name == "merge_tokens" else "drop"
            raise UserError(
                f"{name}={count} is too large: the model has {config.num_patches} patches, and a block can {verb} at "
                f"most {max_count} of them."
            )


def refers_to_external_weights(model_ref: str | os.PathLike[str]) -> bool:
    """Whether this names external weights (a name, a file, or a folder that is not a run)."""
    path = Path(model_ref)
    online = str(model_ref).startswith(ONLINE_PREFIXES)
    return (
        online
        or path.suffix in WEIGHTS_SUFFIXES
        or ((path / "config.json").is_file() and not (path / "recipe.yaml").exists())
    )


def _load_from_run(run: Run, best: bool) -> TrainedTransformer:
    model = TrainedTransformer(run, read_model_info(run), "best" if best else "last")
    load_run_weights_into_model(model, run, use_best_epoch=best)
    return model


def _load_external_weights(model_ref: str, best: bool) -> TrainedTransformer:
    if best:
        raise UserError(f"{model_ref} has only one set of weights. Omit --best, which works only for runs.")
    pretrained = open_weights(model_ref)
    model = TrainedTransformer(make_external_model(model_ref, pretrained.info.model), pretrained.info)
    model.load_state_dict(pretrained.weights)
    model.notes = pretrained.user_messages
    if pretrained.library != "vitascope":  # a folder of Vitascope stores its preprocessing
        size = "×".join(str(side) for side in dict.fromkeys(pretrained.info.preparation.size))
        crop_note = f"assumed crop_pct=1.0 (images resized to {size} and centre-cropped)"
        model.notes.insert(len(pretrained.assumptions), crop_note)
    return model


from_pretrained = TrainedTransformer.from_pretrained
