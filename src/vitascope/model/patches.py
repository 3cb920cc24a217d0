"""Images -> PatchTokens: check images, split them into patches and project them; or tokenise with convolutions."""

from collections.abc import Callable
from itertools import pairwise

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.errors import UserError
from vitascope.model.config import ModelConfig, Size, as_pair, check_and_convert_size
from vitascope.shapes import Images, Patches, PatchTokens


def check_image_shape_and_dtype(images: Tensor, config: ModelConfig, weight_dtype: torch.dtype) -> None:
    """Raise an error unless images are float, batch × channel × height × width, with the model's size and channels."""
    if images.ndim != 4:
        hint = " Add a batch axis: images[None]." if images.ndim == 3 else ""
        raise UserError(
            f"Images must be batch × channel × height × width; these have shape {list(images.shape)}.{hint}"
        )
    if images.shape[1] != config.in_chans:
        raise UserError(
            f"The images have {images.shape[1]} channels, the model was built for in_chans={config.in_chans}. "
            f"Convert the images, or build the model with in_chans={images.shape[1]}."
        )
    height, width = config.image_shape
    if tuple(images.shape[2:]) != (height, width):
        raise UserError(
            f"The images are {images.shape[2]}×{images.shape[3]} pixels, the model was built for {height}×{width}. "
            f"Resize the images, or build the model with img_size=({images.shape[2]}, {images.shape[3]})."
        )
    if not images.is_floating_point():
        raise UserError(f"The images are {images.dtype}; the model needs floats. Convert them: images.float() / 255.")
    if images.dtype != weight_dtype and not torch.is_autocast_enabled(images.device.type):
        raise UserError(f"The images are {images.dtype}, the weights {weight_dtype}. Make them equal: images.to(…).")


def patchify(images: Tensor, patch_size: Size) -> Patches:
    """(batch, channel, height, width) -> (batch, patch, channel · rows · columns), patches in reading order."""
    rows, columns = as_pair(check_and_convert_size("patch_size", patch_size))
    if images.ndim != 4:
        raise UserError(f"Images must be batch × channel × height × width; these have shape {list(images.shape)}.")
    if images.shape[2] % rows or images.shape[3] % columns:
        raise UserError(
            f"patch_size={patch_size} does not divide images of {images.shape[2]}×{images.shape[3]} pixels. "
            "Choose a patch size that divides both sides, or resize or pad the images."
        )
    return rearrange(
        images,
        "batch channel (row height) (column width) -> batch (row column) (channel height width)",
        height=rows,
        width=columns,
    )


def unpatchify(patches: Tensor, patch_size: Size, grid: tuple[int, int] | None = None) -> Images:
    """Invert patchify exactly. `grid` is (rows, columns) in patches; it is needed only if the grid is not square."""
    rows, columns = as_pair(check_and_convert_size("patch_size", patch_size))
    if patches.ndim != 3 or not patches.shape[1] or patches.shape[2] % (rows * columns):
        raise UserError(
            f"Patches must be batch × patch × pixel, with a multiple of {rows}×{columns} pixels; "
            f"these have shape {list(patches.shape)}."
        )
    side = round(patches.shape[1] ** 0.5)
    grid = grid or (side, side)
    if grid[0] * grid[1] != patches.shape[1]:
        raise UserError(
            f"{patches.shape[1]} patches do not fill a grid of {grid[0]}×{grid[1]}. Set grid=(rows, columns)."
        )
    return rearrange(
        patches,
        "batch (row column) (channel height width) -> batch channel (row height) (column width)",
        row=grid[0],
        height=rows,
        width=columns,
    )


def concat_shifted_copies(images: Tensor, patch_size: Size) -> Images:
    """(batch, channel, …) -> (batch, 5 · channel, …): the image and four copies, shifted by half a patch along the
    diagonals, with 0 beyond the border (Lee, Lee & Song 2021, section 3.2)."""
    down, right = (side // 2 for side in as_pair(check_and_convert_size("patch_size", patch_size)))
    if images.ndim != 4:
        raise UserError(f"Images must be batch × channel × height × width; these have shape {list(images.shape)}.")
    height, width = images.shape[2:]
    padded = F.pad(images, (right, right, down, down))
    corners = [(0, 0), (0, 2 * right), (2 * down, 0), (2 * down, 2 * right)]
    return torch.cat([images, *(padded[:, :, y : y + height, x : x + width] for y, x in corners)], dim=1)


class PatchEmbed(nn.Module):
    """Images -> PatchTokens: the same linear map for every patch."""

    def __init__(self, *, patch_size: Size, in_chans: int, embed_dim: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        # Stored as a convolution whose stride is its kernel size, so that weights can be exchanged with timm.
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=as_pair(patch_size), stride=as_pair(patch_size))

    def forward(self, images: Images) -> PatchTokens:
        return F.linear(patchify(images, self.patch_size), self.proj.weight.flatten(1), self.proj.bias)


class ShiftedPatchEmbed(PatchEmbed):
    """Images -> PatchTokens: patches of the image and its shifted copies, normalised, then projected (SPT)."""

    def __init__(self, *, patch_size: Size, in_chans: int, embed_dim: int) -> None:
        super().__init__(patch_size=patch_size, in_chans=5 * in_chans, embed_dim=embed_dim)
        self.norm = nn.LayerNorm(self.proj.weight[0].numel())

    def forward(self, images: Images) -> PatchTokens:
        patches = self.norm(patchify(concat_shifted_copies(images, self.patch_size), self.patch_size))
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class ConvEmbed(nn.Module):
    """Images -> PatchTokens: 3×3 convolutions, each followed by pooling, so that tokens overlap (CCT, section 3.3)."""

    def __init__(self, layer_channels: list[int]) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for before, after in pairwise(layer_channels):
            convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(convolution.weight)
            self.layers.extend([convolution, nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)])

    def forward(self, images: Images) -> PatchTokens:
        if images.is_cuda:  # channels last: faster convolutions, and the features of a token are contiguous
            images = images.contiguous(memory_format=torch.channels_last)
        return rearrange(self.layers(images), "batch feature row column -> batch (row column) feature")


TOKENIZERS: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "patch": lambda c: PatchEmbed(patch_size=c.patch_size, in_chans=c.in_chans, embed_dim=c.embed_dim),
    "spt": lambda c: ShiftedPatchEmbed(patch_size=c.patch_size, in_chans=c.in_chans, embed_dim=c.embed_dim),
    "conv": lambda c: ConvEmbed(c.conv_channels),
}
