"""Attribution methods: importance of each patch for a class, by attention, rollout, relevance, gradients or occlusion.

Every method returns batch × row × column, not normalised; larger is more important. A model with merged or dropped
tokens is explained as it predicts. Maps are spread over all tokens: the patches of a merged token share its attention
equally, and a dropped patch has none from then on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitascope.errors import UserError, suggest_choice
from vitascope.explain.maps import (
    MapsStatesAndPoolWeights,
    PatchPosition,
    TokenLayout,
    compute_maps_states_and_pool_weights,
    get_token_layout,
)
from vitascope.model.replay import compute_logits, make_logits_function_with_fixed_token_groups, replay_forward_pass
from vitascope.model.token_merging import expand_map_gradients_to_all_tokens
from vitascope.model.vit import VisionTransformer
from vitascope.shapes import (
    AttentionMaps,
    Images,
    PatchHeatmap,
    Probabilities,
    TargetClasses,
    TokenRelevance,
    TokenWeights,
)

HEAD_FUSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda maps: maps.mean(1),
    "max": lambda maps: maps.amax(1),
    "min": lambda maps: maps.amin(1),
}
NUM_STEPS = 32  # between the baseline and the image
OCCLUSION_BATCH_SIZE = 256  # images


def rollout(maps: list[AttentionMaps], *, fusion: str = "mean", discard: float = 0.0) -> TokenRelevance:
    """Attention rollout through all blocks (Abnar & Zuidema 2020): batch × token × token, rows sum to 1.

    Per block, the fused heads plus the identity (residual connection), with rows normalised to sum to 1. Later blocks
    are multiplied from the left. `discard` first sets this fraction of each row's smallest entries to zero."""
    if fusion not in HEAD_FUSIONS:
        raise UserError(f"fusion={fusion!r} is unknown. {suggest_choice(fusion, HEAD_FUSIONS)}")
    if not 0 <= discard < 1:
        raise UserError(f"discard={discard} must be at least 0 and less than 1: it is a fraction of each row.")
    tokens = maps[0].shape[-1]
    identity = torch.eye(tokens, dtype=maps[0].dtype, device=maps[0].device)
    total = identity.expand(len(maps[0]), tokens, tokens)
    for block in maps:
        fused = HEAD_FUSIONS[fusion](block)
        discarded = fused.argsort(-1)[..., : int(discard * tokens)]
        fused = fused.scatter(-1, discarded, 0.0) + identity
        total = fused / fused.sum(-1, keepdim=True) @ total
    return total


def relevance(maps: list[AttentionMaps], gradients: list[AttentionMaps]) -> TokenRelevance:
    """Class-specific relevance (Chefer et al. 2021, ICCV, self-attention): R ← R + mean over heads of (∇A · A)⁺ · R."""
    tokens = maps[0].shape[-1]
    total = torch.eye(tokens, dtype=maps[0].dtype, device=maps[0].device).expand(len(maps[0]), tokens, tokens)
    for block, gradient in zip(maps, gradients, strict=True):
        total = total + (gradient * block).clamp(min=0).mean(1) @ total
    return total


class MapsAndGradients(NamedTuple):
    maps: list[AttentionMaps]  # one per block
    gradients: list[AttentionMaps]


@dataclass(frozen=True)
class AttributionInputs:
    """Images and the classes to explain; intermediate results that several methods share are computed once."""

    model: nn.Module
    images: Images
    targets: TargetClasses
    layout: TokenLayout

    @cached_property
    def maps_and_states(self) -> MapsStatesAndPoolWeights:
        return compute_maps_states_and_pool_weights(self.model, self.images)

    @property
    def maps(self) -> list[AttentionMaps]:
        return self.maps_and_states.maps

    @cached_property
    def query_weights(self) -> TokenWeights:
        """The weight of each token in what the classifier reads."""
        weights = self.maps_and_states.pool_weights
        return _make_class_token_or_mean_weights(self.layout, self.maps[-1]) if weights is None else weights

    def average_query_rows(self, token_matrix: Tensor) -> Float[Tensor, "batch key"]:
        """Average the rows of the tokens that the classifier reads, with its weights: image × query × key -> × key."""
        return torch.einsum("bq,bqk->bk", self.query_weights, token_matrix)

    @cached_property
    def maps_and_gradients(self) -> MapsAndGradients:
        return compute_maps_and_gradients(self.model, self.images, self.targets)

    @cached_property
    def relevance_without_identity(self) -> TokenRelevance:
        """Relevance without the identity, which is equal for all patches if the head reads their mean."""
        total = relevance(*self.maps_and_gradients)
        return total - torch.eye(total.shape[-1], dtype=total.dtype, device=total.device)


def _make_class_token_or_mean_weights(layout: TokenLayout, maps: AttentionMaps) -> TokenWeights:
    """Return the weights of a class token, or equal weights of all patches."""
    weights = maps.new_zeros(len(maps), maps.shape[-1])
    if layout.reads_class_token:
        weights[:, 0] = 1.0
    else:
        weights[:, layout.num_prefix_tokens :] = 1 / layout.num_patches
    return weights


def uses_sequence_pooling(model: nn.Module) -> bool:
    """Return whether the classifier reads a mean of the patches with learned weights, which depend on the image."""
    return isinstance(model, VisionTransformer) and model.config.global_pool == "seq"


def extract_query_or_classifier_attention(
    maps: Tensor, layout: TokenLayout, query_patch: PatchPosition | None, query_weights: Tensor
) -> Float[Tensor, "block head row column"]:
    """Return the attention of the query patch, or of what the classifier reads, as (block, head, row, column)."""
    if query_patch is None:
        row = torch.einsum("q,bhqk->bhk", query_weights, maps)
    else:
        row = maps[..., layout.get_token_index(*query_patch), :]
    return row[..., layout.num_prefix_tokens :].unflatten(-1, (layout.rows, layout.columns))


def build_attribution_inputs(model: nn.Module, images: Images, target: int | None = None) -> AttributionInputs:
    """Explain the class `target`, or by default each image's predicted class."""
    return AttributionInputs(
        model, images, choose_target_or_predicted_classes(model, images, target), get_token_layout(model)
    )


def attribute_by_last_block_attention(inputs: AttributionInputs) -> PatchHeatmap:
    """Attention of the token that the classifier reads, last block, averaged over heads. Equal for all classes."""
    return inputs.layout.reshape_patches_to_grid(inputs.average_query_rows(inputs.maps[-1].mean(1)))


def attribute_by_rollout(inputs: AttributionInputs, fusion: str = "mean", discard: float = 0.0) -> PatchHeatmap:
    """Attention rollout of the token that the classifier reads. Equal for all classes."""
    return inputs.layout.reshape_patches_to_grid(
        inputs.average_query_rows(rollout(inputs.maps, fusion=fusion, discard=discard))
    )


def attribute_by_gradient_times_attention(inputs: AttributionInputs) -> PatchHeatmap:
    """Gradient times attention in the last block: mean over heads of (∇A · A)⁺."""
    maps, gradients = inputs.maps_and_gradients
    return inputs.layout.reshape_patches_to_grid(
        inputs.average_query_rows((maps[-1] * gradients[-1]).clamp(min=0).mean(1))
    )


def attribute_by_relevance(inputs: AttributionInputs) -> PatchHeatmap:
    return inputs.layout.reshape_patches_to_grid(inputs.average_query_rows(inputs.relevance_without_identity))


def compute_maps_and_gradients(model: nn.Module, images: Images, targets: TargetClasses) -> MapsAndGradients:
    """Return all maps and the gradient of each image's target logit with respect to them."""
    with torch.enable_grad():
        # The input requires gradients, because otherwise the first map of a frozen model has none.
        result = replay_forward_pass(model, images.detach().requires_grad_())
        target_logits = result.logits.gather(1, targets[:, None]).sum()
        gradients = list(torch.autograd.grad(target_logits, result.maps))
    if result.memberships is not None:
        gradients = [
            expand_map_gradients_to_all_tokens(*pair) for pair in zip(gradients, result.memberships, strict=False)
        ]
    return MapsAndGradients([block.detach() for block in result.expand_maps_to_all_tokens()], gradients)


def integrated_gradients(
    model: nn.Module, images: Images, targets: TargetClasses, *, steps: int = NUM_STEPS, baseline: float = 0.0
) -> Images:
    """Integrated gradients (Sundararajan et al. 2017) of the class's logit, from a grey baseline image to this image.

    Per pixel and channel. With more steps, their sum approaches the difference of the logits. `baseline` is the
    normalised value of the grey image: 0 is the mean that the normalisation subtracts. On the whole path the same
    tokens are merged or dropped as for the image, so that the logit has a gradient everywhere."""
    difference = images - baseline
    compute_frozen_logits = make_logits_function_with_fixed_token_groups(model, images)
    total = torch.zeros_like(images)
    for step in range(steps):  # midpoints
        interpolated = (baseline + difference * ((step + 0.5) / steps)).detach().requires_grad_()
        with torch.enable_grad():
            target_logits = compute_frozen_logits(interpolated).gather(1, targets[:, None]).sum()
            total += torch.autograd.grad(target_logits, interpolated)[0]
    return difference * total / steps


def attribute_by_integrated_gradients(inputs: AttributionInputs) -> PatchHeatmap:
    return sum_pixels_per_patch(integrated_gradients(inputs.model, inputs.images, inputs.targets), inputs.layout)


def sum_pixels_per_patch(pixel_values: Images, layout: TokenLayout) -> PatchHeatmap:
    """Sum over the pixels and channels of each patch."""
    rows = pixel_values.sum(1).unflatten(2, (layout.columns, -1)).sum(3)
    return rows.unflatten(1, (layout.rows, -1)).sum(2)


@torch.no_grad()
def attribute_by_occlusion(inputs: AttributionInputs) -> PatchHeatmap:
    """Occlusion: how much the class's probability falls when a patch is made grey."""
    images, layout = inputs.images, inputs.layout
    height, width = images.shape[2] // layout.rows, images.shape[3] // layout.columns
    drops = []
    for image, target in zip(images, inputs.targets.tolist(), strict=True):
        occluded = image.repeat(layout.num_patches, 1, 1, 1)
        for patch in range(layout.num_patches):
            row, column = patch // layout.columns * height, patch % layout.columns * width
            occluded[patch, :, row : row + height, column : column + width] = 0.0
        views = torch.cat([image[None], occluded])
        probabilities = torch.cat(
            [predict_probabilities(inputs.model, batch)[:, target] for batch in views.split(OCCLUSION_BATCH_SIZE)]
        )
        drops.append(probabilities[0] - probabilities[1:])
    return torch.stack(drops).unflatten(1, (layout.rows, layout.columns))


def predict_probabilities(model: nn.Module, images: Images) -> Probabilities:
    return compute_logits(model, images).softmax(1)


@torch.no_grad()
def choose_target_or_predicted_classes(model: nn.Module, images: Images, target: int | None) -> TargetClasses:
    """Return one class per image: `target`, or the predicted class."""
    logits = compute_logits(model, images)
    if target is None:
        return logits.argmax(1)
    if not 0 <= target < logits.shape[1]:
        raise UserError(f"There is no class {target}: the model has classes 0 to {logits.shape[1] - 1}.")
    return torch.full((len(images),), target, device=images.device)
