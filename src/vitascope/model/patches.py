"""Images -> Patches -> PatchTokens: cut each image into rectangles, flatten them, project them."""

from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.errors import UserError
from vitascope.model.config import Size, as_pair, check_size
from vitascope.shapes import Images, Patches, PatchTokens


def patchify(images: Tensor, patch_size: Size) -> Patches:
    """(batch, channel, height, width) -> (batch, patch, channel · rows · columns), patches in reading order."""
    rows, columns = as_pair(check_size("patch_size", patch_size))
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
    """The exact inverse of patchify; `grid` is (rows, columns) in patches, needed only where it is not square."""
    rows, columns = as_pair(check_size("patch_size", patch_size))
    if patches.ndim != 3 or not patches.shape[1] or patches.shape[2] % (rows * columns):
        raise UserError(
            f"Patches must be batch × patch × pixel, with a multiple of {rows}×{columns} pixels; "
            f"these have shape {list(patches.shape)}."
        )
    side = round(patches.shape[1] ** 0.5)
    grid = grid or (side, side)
    if grid[0] * grid[1] != patches.shape[1]:
        raise UserError(
            f"{patches.shape[1]} patches do not fill {grid[0]}×{grid[1]}. Give grid=(rows, columns) in patches."
        )
    return rearrange(
        patches,
        "batch (row column) (channel height width) -> batch channel (row height) (column width)",
        row=grid[0],
        height=rows,
        width=columns,
    )


class PatchEmbed(nn.Module):
    """Images -> PatchTokens: the same linear map for every patch."""

    def __init__(self, *, patch_size: Size, in_chans: int, embed_dim: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        # A convolution whose stride is its kernel is this linear map; kept 4-d so that weights go to and from timm.
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=as_pair(patch_size), stride=as_pair(patch_size))

    def forward(self, images: Images) -> PatchTokens:
        return F.linear(patchify(images, self.patch_size), self.proj.weight.flatten(1), self.proj.bias)
