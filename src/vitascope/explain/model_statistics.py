"""Statistics of a model: attention distance and entropy of heads, token norms, similarity of blocks."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitascope.errors import UserError
from vitascope.explain.maps import BATCH_SIZE, TokenLayout
from vitascope.model.head import MeanPool
from vitascope.model.replay import replay_forward_pass
from vitascope.model.vit import VisionTransformer
from vitascope.shapes import AttentionMaps, Features, Images, Logits, Tokens, TokenSizes


def compute_mean_attention_distance(maps: AttentionMaps, layout: TokenLayout) -> Float[Tensor, "image head"]:
    """Mean attention distance of each head, in patches: image × head.

    Attention to class and register tokens is excluded and the rest normalised to sum to 1. Otherwise a head that mostly
    attends to the class token would seem local (the well-known figure of Keras does not exclude them). The mean is over
    the queries that attend to a patch: the rows of dropped patches are zero."""
    rows = torch.arange(layout.rows, dtype=maps.dtype, device=maps.device)
    columns = torch.arange(layout.columns, dtype=maps.dtype, device=maps.device)
    positions = torch.cartesian_prod(rows, columns)
    distance = torch.cdist(positions, positions)
    patch_maps = maps[..., layout.num_prefix_tokens :, layout.num_prefix_tokens :]
    totals = patch_maps.sum(-1)
    distances = (patch_maps / totals[..., None].clamp(min=1e-12) * distance).sum(-1)
    return distances.sum(-1) / (totals > 0).sum(-1).clamp(min=1)


def compute_attention_entropy(maps: AttentionMaps) -> Float[Tensor, "image head"]:
    """Attention entropy of each head in nats: 0 if every query attends to one token, ln(tokens) if uniform."""
    return -torch.xlogy(maps, maps).sum(-1).mean(-1)


def compute_position_similarity_matrix(model: nn.Module, num_patches: int) -> Float[Tensor, "patch patch"]:
    """Cosine similarity between the position embeddings of every two patches: patch × patch."""
    table = _find_position_embedding(model)
    if table is None:
        raise UserError("The model has no position embedding, so there is nothing to compare.")
    table = table.detach().flatten(0, -2)[-num_patches:]
    table = table / table.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return table @ table.T


def _find_position_embedding(model: nn.Module) -> Tensor | None:
    table = getattr(model, "pos_embed", None)
    if table is None:
        embeddings = getattr(getattr(model, "vit", None), "embeddings", None)
        table = getattr(embeddings, "position_embeddings", None)
    return table if isinstance(table, Tensor) else None


def describe_tokens_before_first_block(model: nn.Module) -> str:
    """Say what the patch tokens contain before the first block. Rotary positions enter later, in the attention."""
    return "patch embedding" + ("" if _find_position_embedding(model) is None else " plus position embedding")


class FilterComponents(NamedTuple):
    filters: Images  # component × channel × height × width
    variance_fractions: Tensor


def compute_patch_filter_pca(model: nn.Module, num_components: int = 28) -> FilterComponents:
    """Compute the principal components of the patch embedding's filters.

    With shifted patch tokenization (SPT) only the filters of the unshifted image are used."""
    weight = next((m.weight for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    if weight is None:
        raise UserError(f"{type(model).__name__} has no convolutional patch embedding.")
    if isinstance(model, VisionTransformer):
        weight = weight[:, : model.config.in_chans]
    flat = weight.detach().float().flatten(1)
    _, singular_values, components = torch.linalg.svd(flat - flat.mean(0), full_matrices=False)
    variance_fractions = singular_values**2 / (singular_values**2).sum()
    return FilterComponents(
        components[:num_components].unflatten(1, weight.shape[1:]), variance_fractions[:num_components]
    )


@torch.no_grad()
def compute_hidden_states_of_all_tokens(model: nn.Module, images: Images) -> list[Tokens]:
    """Return all tokens at the input of the first block and after each block.

    The patches of a merged token have equal states; a dropped patch keeps its last state."""
    states = replay_forward_pass(model, images).expand_hidden_states_to_all_tokens()
    if not states:
        raise UserError(f"{type(model).__name__} has no list of blocks.")
    return states


def compute_token_norms(tokens: Tokens) -> Float[Tensor, "batch token"]:
    """L2 norm of each token; very large norms often hold information about the whole image (Darcet et al. 2024)."""
    return tokens.norm(dim=-1)


def pool_class_token_or_mean(tokens: Tokens, layout: TokenLayout, token_sizes: TokenSizes | None = None) -> Features:
    """Return the class token if the classifier reads it, else the mean of the patches."""
    if layout.reads_class_token:
        return tokens[:, 0]
    return MeanPool(layout.num_prefix_tokens)(tokens, token_sizes)


def apply_logit_lens(model: nn.Module, tokens: Tokens, token_sizes: TokenSizes | None = None) -> Logits:
    """Logit lens: apply the final norm, pooling and head to an earlier block's tokens."""
    final_layers = _get_norm_and_classifier(model)
    normalized_tokens = final_layers.norm(tokens)
    if isinstance(model, VisionTransformer):
        return model.forward_head(normalized_tokens, token_sizes=token_sizes)
    return final_layers.classify(normalized_tokens)


def apply_logit_lens_per_token(model: Any, tokens: Tokens) -> Float[Tensor, "batch token class"]:
    """Logit lens of single tokens: batch × token × class."""
    norm = _get_norm_and_classifier(model).norm
    if hasattr(model, "vit"):
        return model.classifier(norm(tokens))
    return model.head(model.fc_norm(norm(tokens)))


class FinalLayers(NamedTuple):
    norm: nn.Module
    classify: Callable[[Tensor], Tensor]  # normalised tokens -> logits


def _get_norm_and_classifier(model: Any) -> FinalLayers:
    """Return the final norm and the classifier of a model of Vitascope, timm or transformers."""
    if hasattr(model, "forward_head") and isinstance(getattr(model, "norm", None), nn.Module):
        return FinalLayers(model.norm, model.forward_head)
    if hasattr(model, "vit") and hasattr(model, "classifier"):
        return FinalLayers(model.vit.layernorm, lambda tokens: model.classifier(tokens[:, 0]))
    raise UserError(
        f"The classifier of {type(model).__name__} is unknown. Use a model of Vitascope, timm or transformers."
    )


def project_patches_to_pca_rgb(tokens: Tokens, layout: TokenLayout) -> Float[Tensor, "image row column 3"]:
    """Return the patches' three largest principal components as red, green and blue: image × row × column × 3."""
    patches = tokens[:, layout.num_prefix_tokens :].flatten(0, 1).double()
    centred = patches - patches.mean(0)
    _, _, components = torch.linalg.svd(centred, full_matrices=False)
    colours = centred @ components[:3].T
    low, high = colours.quantile(0.02, dim=0), colours.quantile(0.98, dim=0)
    colours = ((colours - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    return colours.unflatten(0, (len(tokens), layout.rows, layout.columns))


class MinibatchCKA:
    """Linear CKA between every two blocks, batch by batch with the unbiased HSIC (Nguyen et al. 2021)."""

    def __init__(self, num_states: int) -> None:
        self.hsic_sums = torch.zeros(num_states, num_states, dtype=torch.float64)
        self.varies = torch.zeros(num_states, dtype=torch.bool)

    def add_batch(self, features_per_state: list[Features]) -> None:
        """Add the features of one batch: per state, one row per image, at least four images."""
        if len(features_per_state[0]) < 4:
            raise UserError(
                f"The similarity of blocks needs batches of at least 4 images, not {len(features_per_state[0])}."
            )
        self.varies |= torch.tensor([not torch.allclose(part, part[:1]) for part in features_per_state])
        grams = [_compute_gram_without_diagonal(part.double().cpu()) for part in features_per_state]
        self.hsic_sums += torch.tensor(
            [[_compute_unbiased_hsic(first, second) for second in grams] for first in grams], dtype=torch.float64
        )

    def compute_cka_matrix(self) -> Float[Tensor, "state state"]:
        """Return the CKA of every two states; NaN where a state has equal features for all images."""
        norms = self.hsic_sums.diagonal().clamp(min=1e-12).sqrt()
        matrix = self.hsic_sums / (norms[:, None] * norms)
        return matrix.where(self.varies[:, None] & self.varies, torch.nan)


def _compute_gram_without_diagonal(features: Tensor) -> Float[Tensor, "image image"]:
    gram = features @ features.T
    return gram - torch.diag(gram.diagonal())


def _compute_unbiased_hsic(first_gram_without_diagonal: Tensor, second_gram_without_diagonal: Tensor) -> float:
    first, second, n = first_gram_without_diagonal, second_gram_without_diagonal, len(first_gram_without_diagonal)
    trace, sums = (first * second).sum(), first.sum() * second.sum() / ((n - 1) * (n - 2))
    cross = 2 / (n - 2) * (first.sum(0) * second.sum(0)).sum()
    return float((trace + sums - cross) / (n * (n - 3)))


def iterate_equal_batches_dropping_rest(images: Images, batch_size: int = BATCH_SIZE) -> Iterator[Images]:
    """Yield batches of equal size, so that each has the same weight; a smaller last batch is dropped."""
    parts = images.split(batch_size)
    yield from parts if len(parts) == 1 or len(parts[-1]) == batch_size else parts[:-1]
