"""A trained model with its classes and image preprocessing: immutable, and safe to call from several threads."""

import os
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from vitascope.data.dataset import Dataset, UInt8Images
from vitascope.data.preprocessing import Preprocessing
from vitascope.errors import UserError
from vitascope.inference import scoring
from vitascope.inference.fast import FastInference
from vitascope.inference.hardware import disable_tf32_for_float32, make_float32_inference_hardware
from vitascope.inference.prediction import (
    ImagesInput,
    Predictions,
    StoredShape,
    build_predictions,
    check_threshold_and_temperature,
    load_or_convert_input_images,
)
from vitascope.model.config import ModelConfig
from vitascope.model.replay import Replay, replay_forward_pass
from vitascope.model.token_merging import describe_token_reduction
from vitascope.model.vit import VisionTransformer
from vitascope.run.directory import ExternalWeightsRun, Run
from vitascope.run.temperature import RunTemperature, find_run_temperature, get_temperature_value_or_1
from vitascope.shapes import AttentionMaps, Features, Images, Logits, PatchHeatmap, Tokens
from vitascope.weights.model_info import ModelInfo

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitascope.evaluation.report import Evaluation

REPLAY_BATCH_SIZE = 32  # images whose attention maps are computed at once


@dataclass(frozen=True, eq=False, repr=False)
class Classifier:
    """A trained model that predicts from paths, Pillow images, arrays and tensors. `open_model` builds it.

    No method changes the object or its model. `classifier(images)` expects preprocessed images."""

    model: nn.Module  # in eval mode, without gradients of the weights
    run: Run  # ExternalWeightsRun: pretrained weights, without a run
    classes: list[str]
    preprocessing: Preprocessing
    stored_shape: StoredShape  # of an image before preprocessing
    notes: tuple[str, ...] = ()  # of external weights: what was assumed, left out or converted
    weights_label: str = "last"  # last or best epoch, and the token reduction
    fast: FastInference | None = None
    is_linear_probe: bool = False  # trained without labels; the classifier is a linear probe
    has_assumed_classes: bool = False  # the class names are ImageNet's, because there are 1000 classes

    @property
    def name(self) -> str:
        """The run's path, or the name of the external weights."""
        return self.run.model_ref if isinstance(self.run, ExternalWeightsRun) else str(self.run.path)

    @property
    def is_run(self) -> bool:
        return not isinstance(self.run, ExternalWeightsRun)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def vision_transformer(self) -> VisionTransformer:
        """The model, if it is Vitascope's; a UserError for another network of timm."""
        if isinstance(self.model, VisionTransformer):
            return self.model
        raise UserError(
            f"{self.name} is not a plain ViT, so it can only predict, compute features and teach. Use a model that "
            "Vitascope can convert, such as timm:vit_tiny_patch16_224."
        )

    @property
    def config(self) -> ModelConfig:
        return self.vision_transformer.config

    @property
    def info(self) -> ModelInfo:
        """Settings, classes and preprocessing, as in config.json, and the run's temperature."""
        facts = (self.config, self.classes, self.preprocessing, self.stored_shape, self.is_linear_probe)
        return ModelInfo(*facts, temperature=get_temperature_value_or_1(self.find_temperature()))

    def __call__(self, images: Tensor) -> Logits:
        """Return the logits of preprocessed images. Without gradients, the fast version computes them."""
        if isinstance(self.model, VisionTransformer):
            return self.model.head(self.compute_pooled_features(images))
        return self.model(images)

    @property
    def head(self) -> nn.Module:
        """The layer that computes the logits from the features."""
        return self.model.head if isinstance(self.model, VisionTransformer) else cast(Any, self.model).get_classifier()

    def compute_pooled_features(self, images: Tensor) -> Features:
        """Return the classifier's input for preprocessed images. Without gradients, the fast version computes it."""
        if self.fast and self.fast.compute_pooled and not torch.is_grad_enabled():
            return self.fast.compute_pooled(images)
        if isinstance(self.model, VisionTransformer):
            return self.model.compute_pooled_features(images)
        network = cast(Any, self.model)  # of timm
        return network.forward_head(network.forward_features(images), pre_logits=True)

    def preprocess(self, images: ImagesInput) -> Images:
        """Return the network's input for images as in `predict`, on its device: `model(model.preprocess("a.jpg"))`."""
        loaded = load_or_convert_input_images(images, self.stored_shape)
        return self.preprocessing(loaded.images.to(self.device))

    def find_temperature(self, views: int = 1) -> RunTemperature | None:
        """Return the temperature that `evaluate` fitted on the run's validation images; None if there is none."""
        return find_run_temperature(self.run, self.weights_label, views)

    def predict(
        self,
        images: ImagesInput,
        *,
        views: Literal[1, 2, 6, 10] = 1,
        threshold: float = 0.0,
        temperature: float | None = None,
    ) -> Predictions:
        """Predict one or many images: paths, Pillow images, arrays (channels last) or tensors (channels first).

        `views`: 1, 2 (with the mirror image), 6 or 10 (also shifted by one pixel); their logits are averaged.
        `threshold`: less probable predictions are unsure. `temperature`: divides the logits; None: the run's own."""
        check_threshold_and_temperature(threshold, temperature)
        if views != 1:
            scoring.check_views_match_training(self.run.recipe, views)
        loaded = load_or_convert_input_images(images, self.stored_shape)
        logits = self.compute_logits_of_stored_images(loaded.images, views=views)
        temperature = temperature or get_temperature_value_or_1(self.find_temperature(views))
        return build_predictions(logits, loaded, self.classes, temperature=temperature, threshold=threshold)

    def features(self, images: ImagesInput) -> Features:
        """Return the pooled feature vector of each image, i.e. the classifier's input. `images`: as in `predict`."""
        return self.compute_features_of_stored_images(load_or_convert_input_images(images, self.stored_shape).images)

    def attention_maps(self, images: ImagesInput) -> list[AttentionMaps]:
        """Return one tensor per block, batch × head × query × key; every row sums to 1. `images`: as in `predict`.

        The patches of a merged token share its attention; rows and columns of dropped patches are zero."""
        parts = [part.expand_maps_to_all_tokens() for part in self._replay_batches(images)]
        return [torch.cat(blocks).cpu() for blocks in zip(*parts, strict=True)]

    def hidden_states(self, images: ImagesInput) -> list[Tokens]:
        """Return all tokens before the first block, then after each block. `images`: as in `predict`.

        The patches of a merged token have equal ones; dropped patches keep their last."""
        parts = [part.expand_hidden_states_to_all_tokens() for part in self._replay_batches(images)]
        return [torch.cat(states).cpu() for states in zip(*parts, strict=True)]

    def explain(
        self, images: ImagesInput, method: str = "relevance", *, target: str | int | None = None
    ) -> PatchHeatmap:
        """Return the importance of each patch for a class, by default the predicted one: batch × row × column.

        `images`: as in `predict`. `method`: a name in `vitascope.explain.METHODS`. `target`: a class name or index."""
        from vitascope.explain.methods import explain_predictions

        return explain_predictions(self, images, method, target)

    def plot_attention(
        self,
        image: ImagesInput,
        *,
        blocks: list[int] | None = None,
        heads: list[int] | None = None,
        query: tuple[int, int] | None = None,
    ) -> "Figure":
        """Draw the attention maps of one image: a row per block and a column per head, counted from 1.

        `query`: row and column of the query patch, counted from 1; None: what the classifier reads."""
        from vitascope.explain.attention_figure import draw_attention_of_one_image

        return draw_attention_of_one_image(self, image, blocks, heads, query)

    @torch.no_grad()
    def _replay_batches(self, images: ImagesInput) -> list[Replay]:
        batches = load_or_convert_input_images(images, self.stored_shape).images.split(REPLAY_BATCH_SIZE)
        with disable_tf32_for_float32(make_float32_inference_hardware(self.model)):
            return [replay_forward_pass(self.model, self.preprocessing(batch.to(self.device))) for batch in batches]

    def compute_features_of_stored_images(self, stored_images: UInt8Images | Dataset) -> Features:
        """Return the features of stored images, in float32 on the CPU."""
        hardware = make_float32_inference_hardware(self.model)
        return scoring.check_outputs_are_finite(
            scoring.compute_outputs_in_batches(
                self.model, self.compute_pooled_features, stored_images, self.preprocessing, hardware
            ),
            self.name,
        )

    def compute_logits_of_stored_images(
        self,
        stored_images: UInt8Images | Dataset,
        *,
        views: int = 1,
        preprocess: Callable[[UInt8Images], Images] | None = None,
    ) -> Logits:
        """Return the logits of stored images, in float32 on the CPU. `preprocess` replaces the preprocessing."""
        logits = scoring.compute_outputs_in_batches(
            self.model,
            lambda images: scoring.average_logits_over_views(self, images, views),
            stored_images,
            preprocess or self.preprocessing,
            make_float32_inference_hardware(self.model),
        )
        return scoring.check_outputs_are_finite(logits, self.name)

    @property
    def token_reduction_description(self) -> str:
        """Token merging or dropping at inference, such as "2 tokens merged per block"; empty if all are used."""
        return describe_token_reduction(self.config) if isinstance(self.model, VisionTransformer) else ""

    def with_token_reduction(self, *, merge_tokens: int | None = None, drop_tokens: int | None = None) -> "Classifier":
        """Return a classifier in float32 with the same weights that merges or drops tokens. None: as it is."""
        counts = {"merge_tokens": merge_tokens, "drop_tokens": drop_tokens}.items()
        tokens_per_block = {name: count for name, count in counts if count is not None}
        if not any(tokens_per_block.values()) and not self.token_reduction_description:
            return self
        model = copy(self.vision_transformer)  # shares all weights
        model.config = replace(model.config, **tokens_per_block)
        label = self.weights_label.split(",")[0]
        label += "".join(f", {name}={count}" for name, count in tokens_per_block.items() if count)
        return replace(self, model=model, weights_label=label, fast=None)

    def find_class_index(self, class_name_or_index: str) -> int:
        """Return the index of a class, given by name or index."""
        if class_name_or_index in self.classes:
            return self.classes.index(class_name_or_index)
        if class_name_or_index.isdigit() and int(class_name_or_index) < len(self.classes):
            return int(class_name_or_index)
        some_classes = ", ".join(self.classes[:10]) + (" …" if len(self.classes) > 10 else "")
        raise UserError(f"There is no class '{class_name_or_index}'. Classes: {some_classes}")

    def evaluate(
        self,
        split: str | None = None,
        *,
        data: str | None = None,
        views: int = 1,
        robustness: bool = False,
        target_error: float = 0.02,
        robust: bool | None = None,  # old name of `robustness`; rejected
    ) -> "Evaluation":
        """Evaluate on the test images, or on another split or other data. Each use of test images is logged in the run.

        `views`: as in `predict`. `robustness`: also measure the accuracy on corrupted images (slow).
        `target_error`: the error rate for which `coverage.suggestion` is the lowest threshold of `predict`."""
        from vitascope.evaluation.evaluate import evaluate_and_log_test_use

        if robust is not None:
            raise UserError("robust was renamed to robustness, and its default is now False: omit it, or write …=True.")
        return evaluate_and_log_test_use(
            self, split, data=data, views=views, robustness=robustness, target_error=target_error
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
    def from_pretrained(cls, weights: str | os.PathLike[str], *, device: str = "cpu") -> "Classifier":
        """Same as `open_model`."""
        from vitascope.inference.open_model import open_model

        return open_model(weights, device=device)

    def __repr__(self) -> str:
        return f"Classifier({self.name}, {len(self.classes)} classes, {self.device})"

    def _repr_html_(self) -> str:
        from vitascope.inference.classifier_table import make_classifier_html_table

        return make_classifier_html_table(self)
