"""A model -> a plain copy that answers in float32; two answers -> how far they are apart."""

from torch import Tensor

from vitascope.model.vit import VisionTransformer


def plain_copy(model: VisionTransformer, kind: type[VisionTransformer] = VisionTransformer) -> VisionTransformer:
    """Weights and structure only, on the CPU: no dropout, kernels of its own, faster ways, gradients or run."""
    twin = kind(model.config)
    twin.load_state_dict(model.state_dict())
    return twin.eval().requires_grad_(False)


def apart(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest value that was wanted."""
    if found.shape != wanted.shape:
        return float("inf")
    return ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12)).item()
