"""A model and images -> numbers about the model itself: how far heads look, how sharply, how tokens change."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vitascope.errors import UserError
from vitascope.explain.layout import Layout
from vitascope.explain.maps import BATCH, Watching, whole_forward, written_out
from vitascope.model.vit import VisionTransformer
from vitascope.shapes import Features, HeadNumbers, Images, Logits, Maps, Tokens


def attention_distance(maps: Maps, layout: Layout) -> HeadNumbers:
    """How far each head looks, in patches: the mean distance from a patch to what it looks at, image × head.

    Attention to tokens without a place is left out and the rest scaled to sum to 1, so that a head which mostly looks
    at the class token does not seem to look nearby (keras' well-known figure does not do that)."""
    rows = torch.arange(layout.rows, dtype=maps.dtype, device=maps.device)
    columns = torch.arange(layout.columns, dtype=maps.dtype, device=maps.device)
    places = torch.cartesian_prod(rows, columns)
    distance = torch.cdist(places, places)
    between = maps[..., layout.prefix :, layout.prefix :]
    between = between / between.sum(-1, keepdim=True).clamp(min=1e-12)
    return (between * distance).sum(-1).mean(-1)


def head_entropy(maps: Maps) -> HeadNumbers:
    """How widely each head spreads, in nats: 0 where every query looks at one token, ln(tokens) where at all alike."""
    return -torch.xlogy(maps, maps).sum(-1).mean(-1)


def position_similarity(model: nn.Module, layout: Layout) -> Tensor:
    """Cosine between the learned or fixed positions of every two patches: patch × patch."""
    table = getattr(model, "pos_embed", None)
    if table is None:
        embeddings = getattr(getattr(model, "vit", None), "embeddings", None)
        table = getattr(embeddings, "position_embeddings", None)
    if not isinstance(table, Tensor):
        raise UserError("The model adds no position table; there is nothing to compare.")
    table = table.detach().flatten(0, -2)[-layout.patches :]
    table = table / table.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return table @ table.T


def patch_filters(model: nn.Module, count: int = 28) -> tuple[Images, Tensor]:
    """Principal components of the patch embedding's filters, count × channel × height × width, and their shares.

    Of a model that sees shifted images too (SPT): what its filters do with the image itself."""
    weight = next((m.weight for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    if weight is None:
        raise UserError(f"{type(model).__name__} has no convolution that embeds patches.")
    if isinstance(model, VisionTransformer):
        weight = weight[:, : model.config.in_chans]
    flat = weight.detach().float().flatten(1)
    _, sizes, parts = torch.linalg.svd(flat - flat.mean(0), full_matrices=False)
    shares = sizes**2 / (sizes**2).sum()
    return parts[:count].unflatten(1, weight.shape[1:]), shares[:count]


@torch.no_grad()
def states(model: nn.Module, images: Images) -> list[Tokens]:
    """All tokens as the first block gets them, and after each block."""
    watching, seen, hooks = Watching(), [], []
    blocks = blocks_of(model)

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen.append(inputs[0])

    def after(_: nn.Module, __: object, output: Any) -> None:
        seen.append(output if isinstance(output, Tensor) else output[0])

    hooks = [blocks[0].register_forward_pre_hook(before), *(block.register_forward_hook(after) for block in blocks)]
    try:
        with written_out(model), watching:
            whole_forward(model, images)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The longest list of like modules: a transformer's blocks."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential) and len(module)]
    alike = [found for found in lists if len({type(part) for part in found}) == 1]
    if not alike:
        raise UserError(f"{type(model).__name__} has no list of blocks to look between.")
    return list(max(alike, key=len))


def token_norms(tokens: Tokens) -> Tensor:
    """The length of each token: outliers are tokens the model uses as notebooks (Darcet et al. 2024)."""
    return tokens.norm(dim=-1)


def read_features(tokens: Tokens, layout: Layout) -> Features:
    """What the head would read: the class token, or the patches' mean."""
    return tokens[:, 0] if layout.reads_class else tokens[:, layout.prefix :].mean(1)


def lens(model: nn.Module, tokens: Tokens) -> Logits:
    """If the model had to answer now: the final norm, pooling and head on an earlier block's tokens."""
    final, classify = _ending(model)
    return classify(final(tokens))


def lens_of_tokens(model: Any, tokens: Tokens) -> Tensor:
    """If each token alone were what the head reads: batch × token × class."""
    final, _ = _ending(model)
    if hasattr(model, "vit"):
        return model.classifier(final(tokens))
    return model.head(model.fc_norm(final(tokens)))


def _ending(model: Any) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The final norm, and what comes after it as a function of all tokens: ours, timm's, transformers'."""
    if hasattr(model, "forward_head") and isinstance(getattr(model, "norm", None), nn.Module):
        return model.norm, model.forward_head
    if hasattr(model, "vit") and hasattr(model, "classifier"):
        return model.vit.layernorm, lambda tokens: model.classifier(tokens[:, 0])
    raise UserError(f"It is not known how {type(model).__name__} ends. Models of Vitascope, timm and transformers are.")


def colours(tokens: Tokens, layout: Layout) -> Tensor:
    """The patches' three largest principal components as red, green and blue: image × row × column × 3."""
    patches = tokens[:, layout.prefix :].flatten(0, 1).double()
    centred = patches - patches.mean(0)
    _, _, parts = torch.linalg.svd(centred, full_matrices=False)
    found = centred @ parts[:3].T
    low, high = found.quantile(0.02, dim=0), found.quantile(0.98, dim=0)
    found = ((found - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    return found.unflatten(0, (len(tokens), layout.rows, layout.columns))


class SimilarityOfBlocks:
    """Linear CKA between every two blocks, batch by batch with the unbiased HSIC (Nguyen et al. 2021)."""

    def __init__(self, blocks: int) -> None:
        self.total = torch.zeros(blocks, blocks, dtype=torch.float64)

    def add(self, features: list[Features]) -> None:
        """One row per image, at least four images."""
        if len(features[0]) < 4:
            raise UserError(f"Similarity of blocks needs at least 4 images at a time; these are {len(features[0])}.")
        grams = [_without_diagonal(part.double().cpu()) for part in features]
        self.total += torch.tensor([[_hsic(first, second) for second in grams] for first in grams], dtype=torch.float64)

    def matrix(self) -> Tensor:
        own = self.total.diagonal().clamp(min=1e-12).sqrt()
        return self.total / (own[:, None] * own)


def _without_diagonal(features: Tensor) -> Tensor:
    gram = features @ features.T
    return gram - torch.diag(gram.diagonal())


def _hsic(first: Tensor, second: Tensor) -> float:
    n = len(first)
    trace, sums = (first * second).sum(), first.sum() * second.sum() / ((n - 1) * (n - 2))
    cross = 2 / (n - 2) * (first.sum(0) * second.sum(0)).sum()
    return float((trace + sums - cross) / (n * (n - 3)))


def batches(images: Images, size: int = BATCH) -> Iterator[Images]:
    """All of one size, so that each weighs the same; a smaller rest joins nothing where there are others."""
    parts = images.split(size)
    yield from parts if len(parts) == 1 or len(parts[-1]) == size else parts[:-1]
