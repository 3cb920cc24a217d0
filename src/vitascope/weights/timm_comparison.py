"""Compare Vitascope's model with timm's: logits and gradients for the same weights and images."""

from dataclasses import dataclass
from typing import Any

import timm
import torch
from timm.layers.mlp import SwiGLUPacked
from timm.layers.norm import RmsNorm
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.model.config import ModelConfig
from vitascope.model.vit import VisionTransformer
from vitascope.weights.write_formats import check_timm_support, make_timm_settings


@dataclass(frozen=True)
class TimmComparison:
    """The largest difference over all logits, and over the gradients of all parameters."""

    max_logit_difference: float
    max_gradient_difference: float


def build_timm_model(config: ModelConfig) -> nn.Module:
    """timm's VisionTransformer with the same settings, where timm has them."""
    check_timm_support(config)
    settings: dict[str, Any] = make_timm_settings(config) | {"num_classes": config.num_classes}
    norm = nn.LayerNorm if config.norm == "layernorm" else RmsNorm
    settings["norm_layer"] = lambda width, **where: norm(width, eps=config.norm_eps, **where)
    if config.mlp == "swiglu":
        settings |= {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU}
    return timm.models.VisionTransformer(**settings)


def compare_with_timm(config: ModelConfig, dtype: torch.dtype, *, batch_size: int = 2, seed: int = 0) -> TimmComparison:
    """Load timm's weights into Vitascope's model, run both, and compare."""
    generator = torch.Generator().manual_seed(seed)
    theirs = build_timm_model(config).to(dtype)
    for parameter in theirs.parameters():  # zeros and ones of the initialisation would hide mistakes
        parameter.data.add_(torch.randn(parameter.shape, generator=generator, dtype=dtype), alpha=0.05)
    ours = VisionTransformer(config).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(batch_size, config.in_chans, *config.image_shape, generator=generator, dtype=dtype)
    our_logits, our_gradients = _compute_logits_and_gradients(ours.eval(), images)
    their_logits, their_gradients = _compute_logits_and_gradients(theirs.eval(), images)
    gradients = torch.stack(
        [_compute_max_difference(our_gradients[name], their_gradients[name]) for name in their_gradients]
    )
    return TimmComparison(
        max_logit_difference=_compute_max_difference(our_logits, their_logits).item(),
        max_gradient_difference=gradients.max().item(),
    )


def _compute_logits_and_gradients(model: nn.Module, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(images)
    F.cross_entropy(logits, torch.arange(len(images)) % logits.shape[1]).backward()
    return logits.detach(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def _compute_max_difference(vitascope_values: Tensor, timm_values: Tensor) -> Tensor:
    return (vitascope_values - timm_values).abs().max()  # a tensor: its max keeps NaN, Python's does not
