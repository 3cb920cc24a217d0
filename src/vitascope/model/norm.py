"""Features -> Features of a steady size: LayerNorm, RMSNorm, or none."""

from collections.abc import Callable

from torch import nn

from vitascope.errors import UserError, did_you_mean

NORMS: dict[str, Callable[[int, float], nn.Module]] = {
    "layernorm": lambda width, eps: nn.LayerNorm(width, eps=eps),
    "rmsnorm": lambda width, eps: nn.RMSNorm(width, eps=eps),
    "none": lambda width, eps: nn.Identity(),
}


def make_norm(name: str, width: int, eps: float) -> nn.Module:
    if name not in NORMS:
        raise UserError(f"norm={name!r} is unknown. {did_you_mean(name, NORMS)}")
    return NORMS[name](width, eps)
