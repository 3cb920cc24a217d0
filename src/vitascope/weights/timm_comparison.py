"""Compare Vitascope's model with timm's: logits and gradients for the same weights and images."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import timm
import torch
from timm.layers.mlp import SwiGLUPacked
from timm.layers.norm import RmsNorm
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.model.config import ModelConfig
from vitascope.model.vit import VisionTransformer
from vitascope.weights.model_info import StateDict
from vitascope.weights.write_formats import check_timm_support, make_timm_constructor_settings


@dataclass(frozen=True)
class TimmComparison:
    """The largest difference over all logits, and over the gradients of all parameters."""

    max_logit_difference: float
    max_gradient_difference: float


def build_timm_model(config: ModelConfig) -> nn.Module:
    """Build timm's VisionTransformer with the same settings. Unsupported settings raise an error."""
    check_timm_support(config)
    settings: dict[str, Any] = make_timm_constructor_settings(config) | {"num_classes": config.num_classes}
    norm = nn.LayerNorm if config.norm == "layernorm" else RmsNorm
    settings["norm_layer"] = lambda width, **options: norm(width, eps=config.norm_eps, **options)
    if config.mlp == "swiglu":
        settings |= {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU}
    return timm.models.VisionTransformer(**settings)


def compare_outputs_gradients_with_timm(
    config: ModelConfig, dtype: torch.dtype, *, batch_size: int = 2, seed: int = 0
) -> TimmComparison:
    """Load timm's weights into Vitascope's model, run both, and compare."""
    generator = torch.Generator().manual_seed(seed)
    timm_model = build_timm_model(config).to(dtype)
    for parameter in timm_model.parameters():  # zeros and ones of the initialisation would hide mistakes
        parameter.data.add_(torch.randn(parameter.shape, generator=generator, dtype=dtype), alpha=0.05)
    model = VisionTransformer(config).to(dtype)
    model.load_state_dict(timm_model.state_dict())
    images = torch.randn(batch_size, config.in_chans, *config.image_shape, generator=generator, dtype=dtype)
    output = _compute_logits_and_parameter_gradients(model.eval(), images)
    timm_output = _compute_logits_and_parameter_gradients(timm_model.eval(), images)
    differences = [
        _compute_max_difference(output.gradients[name], gradient) for name, gradient in timm_output.gradients.items()
    ]
    return TimmComparison(
        max_logit_difference=_compute_max_difference(output.logits, timm_output.logits).item(),
        max_gradient_difference=torch.stack(differences).max().item(),
    )


class LogitsAndGradients(NamedTuple):
    logits: Tensor
    gradients: StateDict  # of the parameters


def _compute_logits_and_parameter_gradients(model: nn.Module, images: Tensor) -> LogitsAndGradients:
    logits = model(images)
    F.cross_entropy(logits, torch.arange(len(images)) % logits.shape[1]).backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return LogitsAndGradients(logits.detach(), gradients)


def _compute_max_difference(vitascope_values: Tensor, timm_values: Tensor) -> Tensor:
    return (vitascope_values - timm_values).abs().max()  # a tensor: its max keeps NaN, unlike Python's
