"""Copy a model as plain float32, and compare two outputs."""

from torch import Tensor

from vitascope.model.vit import VisionTransformer


def plain_copy(model: VisionTransformer, kind: type[VisionTransformer] = VisionTransformer) -> VisionTransformer:
    """Copy weights and architecture to the CPU, without dropout, custom kernels, gradients or run."""
    twin = kind(model.config)
    twin.load_state_dict(model.state_dict())
    return twin.eval().requires_grad_(False)


def apart(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value."""
    if found.shape != wanted.shape:
        return float("inf")
    return ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12)).item()
