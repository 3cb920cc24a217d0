"""The attribution methods by name, and how figures, tables and messages describe each."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn

from vitascope.errors import UserError, suggest_choice
from vitascope.explain.attribution import (
    NUM_STEPS,
    AttributionInputs,
    attribute_by_gradient_times_attention,
    attribute_by_integrated_gradients,
    attribute_by_last_block_attention,
    attribute_by_occlusion,
    attribute_by_relevance,
    attribute_by_rollout,
    build_attribution_inputs,
)
from vitascope.explain.maps import BATCH_SIZE
from vitascope.inference.classifier import Classifier
from vitascope.inference.hardware import disable_tf32_for_float32, make_float32_inference_hardware
from vitascope.inference.prediction import ImagesInput
from vitascope.shapes import Images, PatchHeatmap

MAX_PATCHES_WITH_ALL_METHODS = 64
RANDOM_DESCRIPTION = "baseline: a random order of the patches"


@dataclass(frozen=True)
class AttributionMethod:
    """A function that computes the importance of each patch, and its description."""

    compute: Callable[[AttributionInputs], PatchHeatmap]
    panel_note: str  # below the name in figures: a reminder of what is shown
    description: str  # one line, printed where methods are compared
    is_class_specific: bool = True
    score: Literal["logit", "probability"] = "logit"  # of the class; signed maps increase or decrease it
    label: str | None = None  # the name that figures and tables show; None: the key in METHODS
    num_passes: int = (
        0  # forward passes per image that do not depend on the number of patches; one or two are not counted
    )
    needs_pass_per_patch: bool = False  # slow on large grids

    def __call__(self, inputs: AttributionInputs) -> PatchHeatmap:
        return self.compute(inputs)


METHODS: dict[str, AttributionMethod] = {
    "attention": AttributionMethod(
        attribute_by_last_block_attention,
        "last block",
        "attention from the class token (without one: mean over all patches), last block, mean over heads",
        is_class_specific=False,
    ),
    "rollout": AttributionMethod(
        attribute_by_rollout,
        "all blocks, mean over heads",
        "attention multiplied through all blocks, mean over heads (Abnar & Zuidema 2020)",
        is_class_specific=False,
    ),
    "rollout-max": AttributionMethod(
        partial(attribute_by_rollout, fusion="max", discard=0.9),
        "smallest 90 % of each row set to 0",
        "rollout with the maximum over heads; the smallest 90 % of each attention row are set to 0",
        is_class_specific=False,
    ),
    "gradient": AttributionMethod(
        attribute_by_gradient_times_attention,
        "last block",
        "gradient-weighted attention: attention × gradient of the logit, positive part, last block",
        label="attention-gradient",  # elsewhere, "gradient" is the gradient of the input
    ),
    "relevance": AttributionMethod(
        attribute_by_relevance,
        "gradient × attention, all blocks",
        "attention × gradient of the logit, positive part, through all blocks (Chefer et al. 2021)",
    ),
    "integrated-gradients": AttributionMethod(
        attribute_by_integrated_gradients,
        "of the logit",
        "(image − grey) × mean gradient of the logit on the path from grey to the image (Sundararajan et al. 2017)",
        num_passes=NUM_STEPS,
    ),
    "occlusion": AttributionMethod(
        attribute_by_occlusion,
        "drop in probability",
        "drop in the class's probability if the patch is made grey",
        score="probability",
        needs_pass_per_patch=True,
    ),
}


def list_default_methods(num_patches: int) -> list[str]:
    """Return the methods that `vitascope explain` computes by default: all, or the fast ones on a large grid."""
    is_large = num_patches > MAX_PATCHES_WITH_ALL_METHODS
    return [key for key, method in METHODS.items() if not (is_large and method.needs_pass_per_patch)]


def get_method_label(method_key: str) -> str:
    """Return the name that figures and tables show."""
    return (METHODS[method_key].label if method_key in METHODS else None) or method_key


def make_panel_title(method_key: str) -> str:
    """Return the title of a method's panel: its name and a reminder of what it shows."""
    return f"{get_method_label(method_key)}\n({METHODS[method_key].panel_note})"


def describe_method_or_random(method_key: str) -> str:
    """Return one line about a method, or about the random baseline."""
    return METHODS[method_key].description if method_key in METHODS else RANDOM_DESCRIPTION


def get_method_key(name_or_label: str) -> str:
    """Return the key in `METHODS` of a method's name or label. Raise an error if there is none."""
    labels = {get_method_label(method): method for method in METHODS}
    method = labels.get(name_or_label, name_or_label)
    if method not in METHODS:
        raise UserError(f"The method '{name_or_label}' is unknown. {suggest_choice(name_or_label, labels)}")
    return method


def explain(model: nn.Module, images: Images, method: str = "relevance", *, target: int | None = None) -> PatchHeatmap:
    """Importance of each patch for the class `target` (default: the predicted class): batch × row × column."""
    return METHODS[get_method_key(method)](build_attribution_inputs(model, images, target))


def explain_predictions(
    classifier: Classifier, images: ImagesInput, method_name: str, target: str | int | None
) -> PatchHeatmap:
    """Explain the predictions of images that are given as in `predict`; the result is on the CPU."""
    method = METHODS[get_method_key(method_name)]
    if not classifier.classes:
        raise UserError("The model has no classifier, so it has no predictions to explain. Add one with `train`.")
    class_index = classifier.find_class_index(target) if isinstance(target, str) else target
    with disable_tf32_for_float32(make_float32_inference_hardware(classifier.model)):
        return torch.cat(
            [
                method(build_attribution_inputs(classifier.model, batch, class_index)).cpu()
                for batch in classifier.preprocess(images).split(BATCH_SIZE)
            ]
        )
