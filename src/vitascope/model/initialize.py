"""Weights before the first step: timm's rule, or PyTorch's with tokens from N(0, 1)."""

from collections.abc import Callable

from torch import nn


def like_timm(model: nn.Module) -> None:
    """Linear layers and learned positions from N(0, 0.02²), biases 0, class and register tokens almost 0.

    timm truncates at ±2, which is 100 standard deviations: a plain normal.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    _fill_tokens(model, token_std=1e-6, position_std=0.02)


def like_torch(model: nn.Module) -> None:
    """Layers keep PyTorch's defaults; class token, registers and learned positions from N(0, 1) (sheet A)."""
    _fill_tokens(model, token_std=1.0, position_std=1.0)


INITIALIZERS: dict[str, Callable[[nn.Module], None]] = {"timm": like_timm, "torch": like_torch}


def _fill_tokens(model: nn.Module, *, token_std: float, position_std: float) -> None:
    for name, std in (("cls_token", token_std), ("reg_token", token_std), ("pos_embed", position_std)):
        parameter = getattr(model, name)
        if isinstance(parameter, nn.Parameter):
            nn.init.normal_(parameter, std=std)
