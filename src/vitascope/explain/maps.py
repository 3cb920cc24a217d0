"""The layout of a model's tokens, and the attention maps of every block, for any ViT that `replay` can run.

A model with merged or dropped tokens is explained as it predicts. Its maps are spread over all tokens: the patches of a
merged token share its attention equally, and the rows and columns of dropped patches are zero.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitascope.data.preprocessing import Preprocessing
from vitascope.errors import UserError
from vitascope.model.explicit_blocks import MapEditor
from vitascope.model.replay import replay_forward_pass
from vitascope.model.vit import VisionTransformer
from vitascope.shapes import AttentionMaps, Images, Logits, PatchHeatmap, Tokens, TokenWeights


class PatchPosition(NamedTuple):
    row: int
    column: int


@dataclass(frozen=True)
class TokenLayout:
    """`num_prefix_tokens` come before the patches; the last `registers` of them are register tokens.

    `reads_class_token`: the head reads the class token (index 0), else all patches."""

    num_prefix_tokens: int
    rows: int
    columns: int
    reads_class_token: bool
    registers: int = 0

    @property
    def num_patches(self) -> int:
        return self.rows * self.columns

    @property
    def prefix_name(self) -> str:
        """The name of the tokens before the patches, for sentences; empty if there are none."""
        names = [
            name
            for name, count in (("class", self.num_prefix_tokens - self.registers), ("register", self.registers))
            if count
        ]
        return f"{' and '.join(names)} token{'s' if self.num_prefix_tokens > 1 else ''}" if names else ""

    def get_token_index(self, row: int, column: int) -> int:
        """Return the token index of the patch in this row and column, both counted from 0."""
        if not (0 <= row < self.rows and 0 <= column < self.columns):
            raise UserError(
                f"There is no patch in row {row}, column {column}: the grid has rows 0 to {self.rows - 1} and columns "
                f"0 to {self.columns - 1}."
            )
        return self.num_prefix_tokens + row * self.columns + column

    def reshape_patches_to_grid(self, tokens: Tensor) -> PatchHeatmap:
        """Arrange tokens as (batch, row, column), without the prefix tokens."""
        return tokens[:, self.num_prefix_tokens :].unflatten(1, (self.rows, self.columns))


def get_token_layout(model: nn.Module) -> TokenLayout:
    """Return the layout of the tokens of a model of Vitascope, timm or transformers."""
    if isinstance(model, VisionTransformer):
        rows, columns = model.config.grid
        config = model.config
        return TokenLayout(config.num_prefix_tokens, rows, columns, config.global_pool == "token", config.reg_tokens)
    embed: Any = getattr(model, "patch_embed", None)
    if hasattr(embed, "grid_size") and hasattr(model, "num_prefix_tokens"):  # timm
        prefix, pool = int(model.num_prefix_tokens), getattr(model, "global_pool", "token")  # pyright: ignore
        rows, columns = embed.grid_size
        register_tokens: Any = getattr(model, "reg_token", None)
        registers = 0 if register_tokens is None else register_tokens.shape[1]
        return TokenLayout(prefix, rows, columns, pool == "token" and prefix > 0, registers)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "patch_size") and hasattr(config, "image_size"):  # transformers
        sides = [
            _expand_to_pair(config.image_size)[axis] // _expand_to_pair(config.patch_size)[axis] for axis in (0, 1)
        ]
        registers = int(getattr(config, "num_register_tokens", 0) or 0)
        return TokenLayout(1 + registers, sides[0], sides[1], reads_class_token=True, registers=registers)
    raise UserError(
        f"The patch grid of {type(model).__name__} is unknown. Use a model of Vitascope, timm or transformers."
    )


def _expand_to_pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def denormalize_images(preprocessing: Preprocessing, images: Images) -> list[NDArray]:
    """Undo the normalisation: height × width × channel, between 0 and 1."""
    return [image.permute(1, 2, 0).numpy() for image in preprocessing.denormalize(images)]


BATCH_SIZE = 32


class LogitsAndMaps(NamedTuple):
    logits: Logits
    maps: list[AttentionMaps]  # one per block


class MapsStatesAndPoolWeights(NamedTuple):
    """Of all tokens, also if tokens are merged or dropped: see `Replay`."""

    maps: list[AttentionMaps]  # one per block
    hidden_states: list[Tokens]  # before block 1 and after every block
    pool_weights: TokenWeights | None  # None: unknown


def compute_logits_and_maps(model: nn.Module, images: Images, edit_maps: MapEditor | None = None) -> LogitsAndMaps:
    """Return the logits and all attention maps of one forward pass, with gradients."""
    result = replay_forward_pass(model, images, edit_maps=edit_maps)
    return LogitsAndMaps(result.logits, result.expand_maps_to_all_tokens())


@torch.no_grad()
def attention_maps(model: nn.Module, images: Images, *, batch: int = BATCH_SIZE) -> list[AttentionMaps]:
    """One tensor per block, batch × head × query × key, in the model's own dtype; every row sums to 1.

    Works with unchanged models of Vitascope, timm and transformers, including fused attention. Processes `batch` images
    at a time and returns the maps of all images. Use `iterate_logits_and_maps` if they do not fit into memory. The
    patches of a merged token share its attention; rows and columns of dropped patches are zero."""
    parts = [maps for _, maps in iterate_logits_and_maps(model, images, batch=batch)]
    return [torch.cat(blocks) for blocks in zip(*parts, strict=True)]


@torch.no_grad()
def compute_maps_states_and_pool_weights(model: nn.Module, images: Images) -> MapsStatesAndPoolWeights:
    """Return the maps, the hidden states and the pooling weights of all images, without gradients."""
    parts = [replay_forward_pass(model, batch_images) for batch_images in images.split(BATCH_SIZE)]
    maps = [torch.cat(blocks) for blocks in zip(*(part.expand_maps_to_all_tokens() for part in parts), strict=True)]
    states = zip(*(part.expand_hidden_states_to_all_tokens() for part in parts), strict=True)
    weights = [part.expand_pool_weights_to_all_tokens() for part in parts]
    known_weights = [part for part in weights if part is not None]
    return MapsStatesAndPoolWeights(
        maps, [torch.cat(state) for state in states], torch.cat(known_weights) if known_weights else None
    )


def iterate_logits_and_maps(model: nn.Module, images: Images, *, batch: int = BATCH_SIZE) -> Iterator[LogitsAndMaps]:
    """Yield logits and maps, `batch` images at a time."""
    if images.ndim != 4 or not len(images):
        raise UserError(f"Images must have shape batch × channels × height × width, not {list(images.shape)}.")
    for batch_images in images.split(batch):
        with torch.no_grad():
            result = compute_logits_and_maps(model, batch_images)
        yield result
