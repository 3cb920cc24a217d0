"""Limits of model settings: larger values are typing errors or damaged files, and would exhaust time or memory."""

from collections.abc import Collection
from typing import Any

from vitascope.errors import UserError

MAX_SIDE, MAX_TOKENS = 2**16, 2**20  # pixels, and tokens; far beyond what attention can compute
MAX_VALUES = {  # larger ones are typing errors or damaged files, and would exhaust time or memory
    "in_chans": 2**12,
    "num_classes": 2**20,
    "embed_dim": 2**17,
    "depth": 10_000,
    "num_heads": 2**17,
    "mlp_ratio": 2**10,
    "reg_tokens": 2**16,
    "norm_eps": 1e6,
    "rotary_base": 1e12,
}


def check_upper_limits(config: Any, num_tokens: int) -> None:
    """Check the numbers of a ModelConfig."""
    for name, largest in MAX_VALUES.items():
        if getattr(config, name) > largest:
            raise UserError(f"{name} is larger than {largest:,}, which no machine can compute. Choose a smaller value.")
    if num_tokens > MAX_TOKENS:
        raise UserError(
            f"img_size={config.img_size} and patch_size={config.patch_size} give {num_tokens:,} tokens; at most "
            f"{MAX_TOKENS:,} are possible. Choose larger patches or smaller images."
        )


def check_sides(setting_name: str, value: Any, sides: Collection[int]) -> None:
    """Check the sides of an image or a patch, in pixels; `value`: as the user wrote them."""
    if min(sides) < 1:
        raise UserError(f"{setting_name}={value} is too small. It must be at least 1.")
    if max(sides) > MAX_SIDE:
        raise UserError(f"{setting_name} is larger than {MAX_SIDE:,} pixels. Choose a smaller size.")
