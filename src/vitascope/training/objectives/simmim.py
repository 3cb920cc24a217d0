"""SimMIM: predict the pixels of masked patches by a linear layer (Xie et al. 2022, arXiv 2111.09886).

The encoder receives all patches. A learned token replaces each masked one, in front of the positions.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vitascope.errors import UserError, skip_beartype
from vitascope.model.anatomy import count_forward_flops_per_image
from vitascope.model.norm import make_norm
from vitascope.model.patches import patchify
from vitascope.model.precision import to_autocast_dtype
from vitascope.model.pretraining import count_visible_patches, select_visible_and_restore_indices
from vitascope.model.tokens import concat_prefix_tokens, prepend_prefix_and_add_positions
from vitascope.model.vit import VisionTransformer
from vitascope.number_format import format_percent
from vitascope.recipe.schema import Recipe
from vitascope.shapes import BlockNoise, DepthNoise, Images, Patches, PatchMask
from vitascope.training.objectives.objective import Batch, StepMetrics
from vitascope.training.objectives.self_supervised import MaskedImageModelling, Reconstruction
from vitascope.training.optim.schedule import ScheduleValues

if TYPE_CHECKING:
    from vitascope.training.state import TrainState

CAPTION = (
    "{} of the patches are masked (gray). The encoder gets a mask token for each of them, and a linear layer "
    "predicts their pixels. In the last row, the visible patches are copied from the image."
)


@skip_beartype
@dataclass(frozen=True)
class SimMimConfig:
    """train.objective=simmim: masked patches are predicted from the encoder's tokens by a linear layer."""

    mask_ratio: float = 0.6  # fraction of the patches that are masked
    block_size: int = 2  # side of a masked block in patches; blocks are masked as a whole; 1: single patches
    pictures: int = 8  # number of reconstructions drawn after every epoch; 0: none

    def __post_init__(self) -> None:
        if not 0 < self.mask_ratio < 1:
            raise UserError(f"simmim.mask_ratio={self.mask_ratio} must be greater than 0 and below 1.")
        if self.block_size < 1:
            raise UserError(f"simmim.block_size={self.block_size} must be at least 1.")
        if self.pictures < 0:
            raise UserError(f"simmim.pictures={self.pictures} is negative. It must be 0 or more.")


def expand_block_mask(block_mask: Tensor, block_grid: tuple[int, int], block_size: int) -> PatchMask:
    """(batch, block) -> (batch, patch): every block is a square of patches."""
    rows = block_mask.unflatten(1, block_grid).repeat_interleave(block_size, 1)
    return rows.repeat_interleave(block_size, 2).flatten(1)


def simmim_loss(predicted_patches: Patches, target_patches: Patches, mask: PatchMask) -> Tensor:
    """Return the mean absolute error over the pixels of masked patches, in float32."""
    errors = (predicted_patches.float() - target_patches.float()).abs().mean(-1)
    return (errors * mask).sum() / mask.sum()


class PixelPredictor(nn.Module):
    """The mask token, and the linear layer from an encoder's patch tokens to pixels."""

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        config = model.config
        self.mask_token = nn.Parameter(torch.zeros(1, 1, config.embed_dim))
        nn.init.normal_(self.mask_token, std=0.02)
        # With mean pooling, the encoder has no final norm.
        has_norm = config.global_pool != "avg"
        self.norm = nn.Identity() if has_norm else make_norm(config.norm, config.embed_dim, config.norm_eps)
        self.pred = nn.Linear(config.embed_dim, config.in_chans * config.patch_shape[0] * config.patch_shape[1])


class MaskedPixelModel(nn.Module):
    """Images and masks -> predicted pixels of all patches."""

    def __init__(self, model: VisionTransformer, predictor: PixelPredictor) -> None:
        super().__init__()
        self.model, self.predictor = model, predictor

    def forward(self, images: Tensor, mask: PatchMask, depth_noise: DepthNoise | None = None) -> Patches:
        model, patch_tokens = self.model, self.model.patch_embed(images)
        patch_tokens = torch.where(mask[..., None], self.predictor.mask_token.to(patch_tokens.dtype), patch_tokens)
        prefix = concat_prefix_tokens(model.cls_token, model.reg_token)
        tokens = model.pos_drop(prepend_prefix_and_add_positions(patch_tokens, prefix, model.pos_embed))
        tokens = model.encode(to_autocast_dtype(tokens), depth_noise=depth_noise)
        return self.predictor.pred(self.predictor.norm(tokens[:, model.config.num_prefix_tokens :]))


class SimMim(MaskedImageModelling):
    """Masked image modelling with a linear decoder. `extra_module` has the mask token and the linear layer."""

    name = "simmim"
    config_class = SimMimConfig
    loss_name = "mean absolute error of masked patches"

    def __init__(self, state: "TrainState") -> None:
        super().__init__(state)
        config: SimMimConfig = state.recipe.objective_config
        rows, columns = state.model.config.grid
        self.config, self.num_pictures = config, config.pictures
        self.block_grid = (rows // config.block_size, columns // config.block_size)
        self.num_masked_units = self.block_grid[0] * self.block_grid[1]
        self.num_visible = count_visible_patches(self.num_masked_units, config.mask_ratio)
        self.extra_module = predictor = PixelPredictor(state.model).to(state.hardware.device)
        self.pixel_model = MaskedPixelModel(state.model, predictor)
        self.compiled_pixel_model = state.hardware.compile(self.pixel_model)

    @classmethod
    def check_recipe(cls, recipe: Recipe) -> None:
        super().check_recipe(recipe)
        (rows, columns), size = recipe.model.grid, recipe.objective_config.block_size
        if rows % size or columns % size or rows * columns < 2 * size**2:
            sizes = [
                n for n in range(1, max(rows, columns)) if rows % n == columns % n == 0 < rows * columns // n**2 - 1
            ]
            raise UserError(
                f"simmim.block_size={size} must divide the grid of {rows}×{columns} patches into at least two blocks. "
                f"Choose {' or '.join(map(str, sizes))}."
            )

    @classmethod
    def count_equivalent_forward_passes(cls, recipe: Recipe) -> float:
        """The encoder with all patches, and the linear layer."""
        model = recipe.model
        num_pixels = model.in_chans * model.patch_shape[0] * model.patch_shape[1]
        encoder_flops = count_forward_flops_per_image(replace(model, num_classes=0), model.num_patches)
        flops = encoder_flops + 2 * model.num_patches * model.embed_dim * num_pixels
        return flops / count_forward_flops_per_image(model)

    def compute_loss_and_metrics(self, batch: Batch, schedule: ScheduleValues, phase: int = 0) -> StepMetrics:
        images, noise, *depth_noise = batch
        mask = self.make_patch_mask(noise)
        with self.state.hardware.autocast():
            predicted = self.compiled_pixel_model(images, mask, *depth_noise)
        return {"train_loss": simmim_loss(predicted, patchify(images, self.state.model.config.patch_size), mask)}

    def make_patch_mask(self, noise: BlockNoise) -> PatchMask:
        """Mask the blocks with the most noise. `noise`: a random number per block."""
        block_ranks = select_visible_and_restore_indices(noise, self.num_visible).restore_indices
        return expand_block_mask(block_ranks >= self.num_visible, self.block_grid, self.config.block_size)

    def make_caption(self) -> str:
        return CAPTION.format(format_percent(1 - self.num_visible / self.num_masked_units, 0))

    def predict_pixels(self, images: Images, noise: BlockNoise) -> Reconstruction:
        mask = self.make_patch_mask(noise)
        return Reconstruction(self.pixel_model(images, mask), mask)
