"""Features -> normalised Features: LayerNorm, RMSNorm, or none."""

from collections.abc import Callable

from torch import Tensor, nn

from vitascope import kernels
from vitascope.errors import UserError, suggest_choice
from vitascope.model.precision import get_autocast_or_own_dtype


class LayerNorm(nn.LayerNorm):
    """PyTorch's LayerNorm with a choice of kernel: "fused" writes the autocast dtype directly, if available."""

    KERNELS = ("default", "fused")
    kernel = "default"

    def forward(self, features: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.kernel == "fused" and kernels.can_run_triton(features):
            return apply_fused_norm(features, self.weight, self.bias, self.eps)
        return super().forward(features)


class RMSNorm(nn.RMSNorm):
    """PyTorch's RMSNorm with a choice of kernel, as LayerNorm."""

    KERNELS = ("default", "fused")
    kernel = "default"

    def forward(self, features: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.kernel == "fused" and kernels.can_run_triton(features):
            return apply_fused_norm(features, self.weight, None, self.eps or 0.0)
        if features.dtype.itemsize < self.weight.dtype.itemsize:  # same result as PyTorch's, faster
            return super().forward(features.to(self.weight.dtype)).to(features.dtype)
        return super().forward(features)


NORMS: dict[str, Callable[[int, float], nn.Module]] = {
    "layernorm": lambda width, eps: LayerNorm(width, eps=eps),
    "rmsnorm": lambda width, eps: RMSNorm(width, eps=eps),
    "none": lambda width, eps: nn.Identity(),
}


def make_norm(norm_name: str, width: int, eps: float) -> nn.Module:
    """Return the norm layer of this name."""
    if norm_name not in NORMS:
        raise UserError(f"norm={norm_name!r} is unknown. {suggest_choice(norm_name, NORMS)}")
    return NORMS[norm_name](width, eps)


def apply_fused_norm(features: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Apply the Triton kernel: LayerNorm if there is a bias, else RMSNorm."""
    from vitascope.kernels.norm import layer_or_rms_norm

    return layer_or_rms_norm(features, weight, bias, eps, get_autocast_or_own_dtype(features))
