"""Record the exact attention maps of every block, for any ViT that uses PyTorch's fused attention.

Fused attention does not return its maps. While the model runs, every call of scaled_dot_product_attention is therefore
replaced by an explicit computation that returns them. Both outputs are compared; maps that do not reproduce the block's
output are rejected. The code around the call (packed projections, QK-norm, rotary positions, masks, learned
temperatures) is the model's own, in its own dtype.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitascope.errors import UserError
from vitascope.model.scaled_dot_product import compute_attention_maps
from vitascope.model.vit import VisionTransformer
from vitascope.shapes import AttentionMaps, Images, Logits

BATCH_SIZE = 32
# Largest allowed difference between the explicit and the fused output, relative to its maximum.
MAX_RELATIVE_ERRORS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}

MapEditor = Callable[[int, Tensor], Tensor]  # index of the attention call, maps -> edited maps


class LogitsAndMaps(NamedTuple):
    logits: Logits
    maps: list[AttentionMaps]  # one per block


class AttentionRecorder(TorchFunctionMode):
    """Record attention: while active, `maps` receives one tensor per attention call, in order.

    `edit_maps(call_index, maps)` may return other maps, which the model then uses instead.
    """

    def __init__(self, edit_maps: MapEditor | None = None) -> None:
        super().__init__()
        self.maps: list[Tensor] = []
        self.edit_maps = edit_maps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend_and_record(*args, **(kwargs or {}))

    def _attend_and_record(
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
            raise UserError("Attention maps cannot be recorded with dropout. Call model.eval() first.")
        if enable_gqa and key.shape[1] != query.shape[1]:
            key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
        mask = attn_mask
        if is_causal:
            mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        factor = 1.0 if scale is None else scale * query.shape[-1] ** 0.5
        maps = compute_attention_maps(query * factor if factor != 1.0 else query, key, mask)
        with torch.no_grad():
            fused = F.scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal, scale=scale)
            _check_maps_reproduce_output(maps @ value, fused, len(self.maps))
        if self.edit_maps:
            maps = self.edit_maps(len(self.maps), maps)
        self.maps.append(maps)
        return maps @ value


def _check_maps_reproduce_output(explicit_output: Tensor, fused_output: Tensor, call_index: int) -> None:
    error = (explicit_output - fused_output).abs().max() / fused_output.abs().max().clamp(min=1e-12)
    if not error <= MAX_RELATIVE_ERRORS.get(fused_output.dtype, 1e-4):
        raise UserError(
            f"Block {call_index + 1}: the attention maps do not reproduce the block's output "
            f"(relative error {error:.1e})."
        )


@contextmanager
def force_fused_attention_temporarily(model: nn.Module) -> Iterator[None]:
    """Make every attention layer call PyTorch's fused function, where it can be recorded; undone afterwards.

    timm and transformers can otherwise compute attention themselves, and our models can use other kernels."""
    old_values: list[tuple[Any, str, Any]] = []

    def set_temporarily(owner: Any, name: str, value: Any) -> None:
        old_values.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    for module in model.modules():
        if isinstance(getattr(module, "fused_attn", None), bool):
            set_temporarily(module, "fused_attn", True)
        if isinstance(getattr(module, "kernel", None), str):
            set_temporarily(module, "kernel", "default")
        config: Any = getattr(module, "config", None)
        if isinstance(getattr(config, "_attn_implementation", None), str) and config._attn_implementation != "sdpa":
            set_temporarily(config, "_attn_implementation", "sdpa")
    try:
        yield
    finally:
        for owner, name, value in reversed(old_values):
            setattr(owner, name, value)


def compute_logits_and_maps(model: nn.Module, images: Images, edit_maps: MapEditor | None = None) -> LogitsAndMaps:
    """Return the logits and all attention maps of one forward pass, with gradients."""
    if model.training:
        raise UserError("The model is in training mode, so dropout is active. Call model.eval() first.")
    recorder = AttentionRecorder(edit_maps)
    with force_fused_attention_temporarily(model), recorder:
        logits = compute_logits_with_all_tokens(model, images)
    if not recorder.maps:
        raise UserError(
            f"{type(model).__name__} does not call torch's scaled_dot_product_attention, so its attention maps cannot "
            "be recorded. Models of Vitascope, timm and transformers are supported."
        )
    return LogitsAndMaps(logits, recorder.maps)


def compute_logits_with_all_tokens(model: nn.Module, images: Images) -> Logits:
    """Compute all tokens in every block; our forward pass skips unread tokens in the last block."""
    if isinstance(model, VisionTransformer):
        return model.forward_head(model.forward_features(images))
    return compute_logits(model, images)


def compute_logits(model: nn.Module, images: Images) -> Logits:
    """Return the model's logits; models of transformers wrap them in an object."""
    output = model(images)
    return getattr(output, "logits", output)


@torch.no_grad()
def attention_maps(model: nn.Module, images: Images, *, batch: int = BATCH_SIZE) -> list[AttentionMaps]:
    """One tensor per block, batch × head × query × key, in the model's own dtype; every row sums to 1.

    Works with unchanged models of Vitascope, timm and transformers, including fused attention. Processes `batch` images
    at a time and returns the maps of all images. Use `iterate_logits_and_maps` if they do not fit into memory."""
    parts = [maps for _, maps in iterate_logits_and_maps(model, images, batch=batch)]
    return [torch.cat(blocks) for blocks in zip(*parts, strict=True)]


def iterate_logits_and_maps(model: nn.Module, images: Images, *, batch: int = BATCH_SIZE) -> Iterator[LogitsAndMaps]:
    """Yield logits and maps, `batch` images at a time."""
    if images.ndim != 4 or not len(images):
        raise UserError(f"Images must have shape batch × channels × height × width, not {list(images.shape)}.")
    for batch_images in images.split(batch):
        with torch.no_grad():
            result = compute_logits_and_maps(model, batch_images)
        yield result
