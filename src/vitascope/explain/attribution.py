"""Attribution methods: importance of each patch for a class, by attention, rollout, relevance, gradients or occlusion.

Every method returns batch × row × column, not normalised; larger is more important.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from vitascope.errors import UserError, did_you_mean
from vitascope.explain.layout import Layout, layout_of
from vitascope.explain.maps import attention_maps, logits_and_maps, model_answer, whole_forward
from vitascope.shapes import Grid, Images, Logits, Maps, Square, Targets

FUSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda maps: maps.mean(1),
    "max": lambda maps: maps.amax(1),
    "min": lambda maps: maps.amin(1),
}
STEPS = 32  # between the baseline and the image
HIDDEN_AT_ONCE = 256  # images


def rollout(maps: list[Maps], *, fusion: str = "mean", discard: float = 0.0) -> Square:
    """Attention rollout through all blocks (Abnar & Zuidema 2020): batch × token × token, rows sum to 1.

    Per block, the fused heads plus the identity (residual connection), with rows normalised to sum to 1. Later blocks
    are multiplied from the left. `discard` first sets this fraction of each row's smallest entries to zero."""
    if fusion not in FUSIONS:
        raise UserError(f"fusion={fusion!r} is unknown. {did_you_mean(fusion, FUSIONS)}")
    if not 0 <= discard < 1:
        raise UserError(f"discard={discard} must be at least 0 and less than 1: it is a fraction of each row.")
    tokens = maps[0].shape[-1]
    kept = torch.eye(tokens, dtype=maps[0].dtype, device=maps[0].device)
    through = kept.expand(len(maps[0]), tokens, tokens)
    for block in maps:
        mixed = FUSIONS[fusion](block)
        dropped = mixed.argsort(-1)[..., : int(discard * tokens)]
        mixed = mixed.scatter(-1, dropped, 0.0) + kept
        through = mixed / mixed.sum(-1, keepdim=True) @ through
    return through


def relevance(maps: list[Maps], gradients: list[Maps]) -> Square:
    """Class-specific relevance (Chefer et al. 2021, ICCV, self-attention): R ← R + mean over heads of (∇A · A)⁺ · R."""
    tokens = maps[0].shape[-1]
    total = torch.eye(tokens, dtype=maps[0].dtype, device=maps[0].device).expand(len(maps[0]), tokens, tokens)
    for block, gradient in zip(maps, gradients, strict=True):
        total = total + (gradient * block).clamp(min=0).mean(1) @ total
    return total


@dataclass(frozen=True)
class Question:
    """Images and the classes to explain; intermediate results that several methods share are computed once."""

    model: nn.Module
    images: Images
    targets: Targets
    layout: Layout

    @cached_property
    def maps(self) -> list[Maps]:
        return attention_maps(self.model, self.images)

    @cached_property
    def graded(self) -> tuple[list[Maps], list[Maps]]:
        return maps_and_gradients(self.model, self.images, self.targets)

    @cached_property
    def relevance(self) -> Square:
        """Relevance without the identity, which is equal for all patches if the head reads their mean."""
        total = relevance(*self.graded)
        return total - torch.eye(total.shape[-1], dtype=total.dtype, device=total.device)


def question(model: nn.Module, images: Images, target: int | None = None) -> Question:
    """Explain the class `target`, or by default each image's predicted class."""
    return Question(model, images, targets_for(model, images, target), layout_of(model))


def by_attention(asked: Question) -> Grid:
    """Attention of the token that the classifier reads, last block, averaged over heads. Equal for all classes."""
    return asked.layout.grid(asked.layout.answer_row(asked.maps[-1].mean(1)))


def by_rollout(asked: Question, fusion: str = "mean", discard: float = 0.0) -> Grid:
    """Attention rollout of the token that the classifier reads. Equal for all classes."""
    return asked.layout.grid(asked.layout.answer_row(rollout(asked.maps, fusion=fusion, discard=discard)))


def by_gradient(asked: Question) -> Grid:
    """Gradient times attention in the last block: mean over heads of (∇A · A)⁺."""
    maps, gradients = asked.graded
    return asked.layout.grid(asked.layout.answer_row((maps[-1] * gradients[-1]).clamp(min=0).mean(1)))


def by_relevance(asked: Question) -> Grid:
    return asked.layout.grid(asked.layout.answer_row(asked.relevance))


def maps_and_gradients(model: nn.Module, images: Images, targets: Targets) -> tuple[list[Maps], list[Maps]]:
    """Return all maps and the gradient of each image's target logit with respect to them."""
    with torch.enable_grad():
        # The input requires gradients, because otherwise the first map of a frozen model has none.
        logits, maps = logits_and_maps(model, images.detach().requires_grad_())
        chosen = logits.gather(1, targets[:, None]).sum()
        gradients = torch.autograd.grad(chosen, maps)
    return [block.detach() for block in maps], list(gradients)


def integrated_gradients(
    model: nn.Module, images: Images, targets: Targets, *, steps: int = STEPS, baseline: float = 0.0
) -> Images:
    """Integrated gradients (Sundararajan 2017) of the class's logit, from a grey baseline image to this image.

    Per pixel and channel. With more steps, their sum approaches the difference of the logits. `baseline` is the
    normalised value of the grey image: 0 is the mean of the training images."""
    way = images - baseline
    total = torch.zeros_like(images)
    for step in range(steps):  # midpoints
        here = (baseline + way * ((step + 0.5) / steps)).detach().requires_grad_()
        with torch.enable_grad():
            chosen = whole_forward(model, here).gather(1, targets[:, None]).sum()
            total += torch.autograd.grad(chosen, here)[0]
    return way * total / steps


def by_integrated_gradients(asked: Question) -> Grid:
    return per_patch(integrated_gradients(asked.model, asked.images, asked.targets), asked.layout)


def per_patch(pixels: Images, layout: Layout) -> Grid:
    """Sum over the pixels and channels of each patch."""
    rows = pixels.sum(1).unflatten(2, (layout.columns, -1)).sum(3)
    return rows.unflatten(1, (layout.rows, -1)).sum(2)


@torch.no_grad()
def by_hiding(asked: Question) -> Grid:
    """Occlusion: how much the class's probability falls when a patch is made grey."""
    images, layout = asked.images, asked.layout
    height, width = images.shape[2] // layout.rows, images.shape[3] // layout.columns
    fallen = []
    for image, target in zip(images, asked.targets.tolist(), strict=True):
        hidden = image.repeat(layout.patches, 1, 1, 1)
        for place in range(layout.patches):
            row, column = place // layout.columns * height, place % layout.columns * width
            hidden[place, :, row : row + height, column : column + width] = 0.0
        views = torch.cat([image[None], hidden])
        chances = torch.cat([probabilities(asked.model, some)[:, target] for some in views.split(HIDDEN_AT_ONCE)])
        fallen.append(chances[0] - chances[1:])
    return torch.stack(fallen).unflatten(1, (layout.rows, layout.columns))


def probabilities(model: nn.Module, images: Images) -> Logits:
    return model_answer(model, images).softmax(1)


METHODS: dict[str, Callable[[Question], Tensor]] = {
    "attention": by_attention,
    "rollout": by_rollout,
    "rollout-max": partial(by_rollout, fusion="max", discard=0.9),
    "gradient": by_gradient,
    "relevance": by_relevance,
    "integrated-gradients": by_integrated_gradients,
    "occlusion": by_hiding,
}


CLASS_INDEPENDENT = ("attention", "rollout", "rollout-max")
# One line for each method, printed where methods are compared.
DESCRIPTIONS = {
    "attention": "attention from the tokens that the classifier reads, last block, mean over heads",
    "rollout": "attention multiplied through all blocks, mean over heads (Abnar & Zuidema 2020)",
    "rollout-max": "rollout with the maximum over heads; the smallest 90 % of each attention row are set to 0",
    "gradient": "attention × gradient of the logit, positive part, last block, mean over heads",
    "relevance": "attention × gradient of the logit, positive part, through all blocks (Chefer et al. 2021)",
    "integrated-gradients": "pixels × gradient of the logit, averaged from grey to the image (Sundararajan 2017)",
    "occlusion": "drop in the class's probability if the patch is made grey",
    "random": "baseline: a random order of the patches",
}


def explain(model: nn.Module, images: Images, method: str = "relevance", *, target: int | None = None) -> Grid:
    """Importance of each patch for the class `target` (default: the predicted class): batch × row × column."""
    if method not in METHODS:
        raise UserError(f"The method {method!r} is unknown. {did_you_mean(method, METHODS)}")
    return METHODS[method](question(model, images, target))


@torch.no_grad()
def targets_for(model: nn.Module, images: Images, target: int | None) -> Targets:
    """Return one class per image: `target`, or the predicted class."""
    logits = model_answer(model, images)
    if target is None:
        return logits.argmax(1)
    if not 0 <= target < logits.shape[1]:
        raise UserError(f"There is no class {target}: the model has classes 0 to {logits.shape[1] - 1}.")
    return torch.full((len(images),), target, device=images.device)
