"""Features -> Features of a steady size: LayerNorm, RMSNorm, or none."""

from collections.abc import Callable

from torch import nn

NORMS: dict[str, Callable[[int, float], nn.Module]] = {
    "layernorm": lambda width, eps: nn.LayerNorm(width, eps=eps),
    "rmsnorm": lambda width, eps: nn.RMSNorm(width, eps=eps),
    "none": lambda width, eps: nn.Identity(),
}


def make_norm(name: str, width: int, eps: float) -> nn.Module:
    return NORMS[name](width, eps)
