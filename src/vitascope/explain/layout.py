"""The layout of a model's tokens: prefix tokens, the grid of patches, and which tokens the classifier reads."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vitascope.errors import UserError
from vitascope.model.vit import VisionTransformer
from vitascope.shapes import Grid


@dataclass(frozen=True)
class Layout:
    """`prefix` tokens come before the patches, the last `registers` of them are register tokens.

    `reads_class`: the head reads the class token (0), else all patches."""

    prefix: int
    rows: int
    columns: int
    reads_class: bool
    registers: int = 0

    @property
    def patches(self) -> int:
        return self.rows * self.columns

    @property
    def prefix_name(self) -> str:
        """The name of the tokens before the patches, for sentences; empty if there are none."""
        names = [
            name for name, count in (("class", self.prefix - self.registers), ("register", self.registers)) if count
        ]
        return f"{' and '.join(names)} token{'s' if self.prefix > 1 else ''}" if names else ""

    def token(self, row: int, column: int) -> int:
        """Return the token index of the patch in this row and column, both counted from 0."""
        if not (0 <= row < self.rows and 0 <= column < self.columns):
            raise UserError(
                f"There is no patch in row {row}, column {column}: the grid has rows 0 to {self.rows - 1} and columns "
                f"0 to {self.columns - 1}."
            )
        return self.prefix + row * self.columns + column

    def answer_row(self, square: Tensor) -> Tensor:
        """Return the row of the token that the head reads, or the mean over patches: (…, query, key) -> (…, key)."""
        return square[..., 0, :] if self.reads_class else square[..., self.prefix :, :].mean(-2)

    def grid(self, tokens: Tensor) -> Grid:
        """Arrange tokens as (batch, row, column), without the prefix tokens."""
        return tokens[:, self.prefix :].unflatten(1, (self.rows, self.columns))


def layout_of(model: nn.Module) -> Layout:
    if isinstance(model, VisionTransformer):
        rows, columns = model.config.grid
        config = model.config
        return Layout(config.num_prefix_tokens, rows, columns, config.global_pool == "token", config.reg_tokens)
    embed: Any = getattr(model, "patch_embed", None)
    if hasattr(embed, "grid_size") and hasattr(model, "num_prefix_tokens"):  # timm
        prefix, pool = int(model.num_prefix_tokens), getattr(model, "global_pool", "token")  # pyright: ignore
        rows, columns = embed.grid_size
        register_tokens: Any = getattr(model, "reg_token", None)
        registers = 0 if register_tokens is None else register_tokens.shape[1]
        return Layout(prefix, rows, columns, pool == "token" and prefix > 0, registers)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "patch_size") and hasattr(config, "image_size"):  # transformers
        sides = [_pair(config.image_size)[axis] // _pair(config.patch_size)[axis] for axis in (0, 1)]
        registers = int(getattr(config, "num_register_tokens", 0) or 0)
        return Layout(1 + registers, sides[0], sides[1], reads_class=True, registers=registers)
    raise UserError(
        f"The patch grid of {type(model).__name__} is unknown. Use a model of Vitascope, timm or transformers."
    )


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
