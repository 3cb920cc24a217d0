"""A model and images -> who looked at whom in every block, exactly, for any ViT that uses PyTorch's fused attention.

Fused attention never shows its maps. So while the model runs, every call of PyTorch's scaled dot-product attention is
answered by the same thing written out, which has maps; the two answers are compared, so a map that did not make the
block's output is never given out. Whatever stands around the call (packed projections, QK-norm, rotary positions,
masks, learned temperatures) is the model's own code, in its own dtype.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitascope.errors import UserError
from vitascope.model.scaled_dot_product import attention_maps as maps_of
from vitascope.model.vit import VisionTransformer
from vitascope.shapes import Images, Logits, Maps

BATCH = 32
# How far the written-out answer may be from the fused one, relative to its largest value.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


class Watching(TorchFunctionMode):
    """While it is on, attention is written out: `maps` holds one tensor per call, in order.

    `edit`, given a call's number and its maps, may return others, and the model goes on with those.
    """

    def __init__(self, edit: Callable[[int, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.maps: list[Tensor] = []
        self.edit = edit

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p:
            raise UserError("Attention maps are drawn without dropout. Call model.eval() first.")
        if enable_gqa and key.shape[1] != query.shape[1]:
            key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
        mask = attn_mask
        if is_causal:
            mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        factor = 1.0 if scale is None else scale * query.shape[-1] ** 0.5
        maps = maps_of(query * factor if factor != 1.0 else query, key, mask)
        with torch.no_grad():
            fused = F.scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal, scale=scale)
            _check(maps @ value, fused, len(self.maps))
        if self.edit:
            maps = self.edit(len(self.maps), maps)
        self.maps.append(maps)
        return maps @ value


def _check(written: Tensor, fused: Tensor, call: int) -> None:
    far = (written - fused).abs().max() / fused.abs().max().clamp(min=1e-12)
    if not far <= TOLERANCE.get(fused.dtype, 1e-4):
        raise UserError(
            f"Block {call + 1}: the maps rebuild the block's output only to {far:.1e}. They would not be its own maps."
        )


@contextmanager
def written_out(model: nn.Module) -> Iterator[None]:
    """Every attention of the model through PyTorch's fused function, where we can see it; put back afterwards.

    timm's layers and transformers' models can be told to write attention out themselves, and ours to use a kernel."""
    before: list[tuple[Any, str, Any]] = []

    def change(owner: Any, name: str, value: Any) -> None:
        before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    for module in model.modules():
        if isinstance(getattr(module, "fused_attn", None), bool):
            change(module, "fused_attn", True)
        if isinstance(getattr(module, "kernel", None), str):
            change(module, "kernel", "default")
        config: Any = getattr(module, "config", None)
        if isinstance(getattr(config, "_attn_implementation", None), str) and config._attn_implementation != "sdpa":
            change(config, "_attn_implementation", "sdpa")
    try:
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


def logits_and_maps(
    model: nn.Module, images: Images, edit: Callable[[int, Tensor], Tensor] | None = None
) -> tuple[Logits, list[Maps]]:
    """One forward pass with attention written out: what the model answers, and all maps on the way, with gradients."""
    if model.training:
        raise UserError("The model is in training mode, where chance has its say. Call model.eval() first.")
    watching = Watching(edit)
    with written_out(model), watching:
        answer = whole_forward(model, images)
    if not watching.maps:
        raise UserError(
            f"{type(model).__name__} made no call of torch's scaled_dot_product_attention, so its maps cannot be seen. "
            "Models of Vitascope, timm and transformers work; another must use that function."
        )
    return answer, watching.maps


def whole_forward(model: nn.Module, images: Images) -> Logits:
    """All tokens in every block: ours would leave out those of the last block that its head does not read."""
    if isinstance(model, VisionTransformer):
        return model.forward_head(model.forward_features(images))
    return model_answer(model, images)


def model_answer(model: nn.Module, images: Images) -> Logits:
    """The model's own logits; transformers' models wrap theirs."""
    answer = model(images)
    return getattr(answer, "logits", answer)


@torch.no_grad()
def attention_maps(model: nn.Module, images: Images, *, batch: int = BATCH) -> list[Maps]:
    """One tensor per block, batch × head × query × key, in the model's own dtype; every row sums to 1.

    For any model of Vitascope, timm or transformers as it is, fused attention and all. Goes through `batch` images at a
    time; the maps of all are given out together: use `each_batch` where they would not fit into memory."""
    parts = [maps for _, maps in each_batch(model, images, batch=batch)]
    return [torch.cat(blocks) for blocks in zip(*parts, strict=True)]


def each_batch(model: nn.Module, images: Images, *, batch: int = BATCH) -> Iterator[tuple[Logits, list[Maps]]]:
    """Logits and maps, a few images at a time."""
    if images.ndim != 4 or not len(images):
        raise UserError(f"Images must be batch × channel × height × width; these have shape {list(images.shape)}.")
    for some in images.split(batch):
        with torch.no_grad():
            found = logits_and_maps(model, some)
        yield found
