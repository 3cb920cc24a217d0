"""Masked autoencoder: reconstruct hidden patches from visible ones (He et al. 2022, arXiv 2111.06377)."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from vitascope.errors import UserError, skip_beartype
from vitascope.model.anatomy import count_forward_flops_per_image
from vitascope.model.patches import patchify
from vitascope.model.pretraining import (
    MaeDecoder,
    count_visible_patches,
    encode_visible_patches,
    make_decoder_config,
    select_visible_and_restore_indices,
)
from vitascope.model.vit import VisionTransformer
from vitascope.number_format import format_percent
from vitascope.recipe.schema import Recipe
from vitascope.shapes import BlockNoise, DepthNoise, Images, Patches, PatchNoise, TokenIndices
from vitascope.training.objectives.objective import Batch, StepMetrics
from vitascope.training.objectives.self_supervised import MaskedImageModelling, Reconstruction
from vitascope.training.optim.schedule import ScheduleValues

EPS = 1e-6
CAPTION = (
    "{} of the patches are masked (gray). The encoder gets the visible patches; the decoder reconstructs the "
    "masked ones."
)
NORM_PIX_CAPTION = (
    " This run predicts normalised pixels (mae.norm_pix_loss=true), so each reconstructed patch is shown with its true "
    "mean and contrast."
)

if TYPE_CHECKING:
    from vitascope.training.state import TrainState


@skip_beartype
@dataclass(frozen=True)
class MaeConfig:
    """train.objective=mae: most patches are masked, and a small decoder reconstructs them (He et al. 2022)."""

    mask_ratio: float = 0.75  # fraction of the patches that are masked
    decoder_dim: int = 128  # width of the decoder
    decoder_depth: int = 2  # number of decoder blocks
    decoder_heads: int = 4  # attention heads of the decoder
    norm_pix_loss: bool = True  # normalise the target pixels of each patch by its mean and standard deviation
    pictures: int = 8  # number of reconstructions drawn after every epoch; 0: none

    def __post_init__(self) -> None:
        if not 0 < self.mask_ratio < 1:
            raise UserError(f"mae.mask_ratio={self.mask_ratio} must be greater than 0 and below 1.")
        for name in ("decoder_dim", "decoder_depth", "decoder_heads"):
            if getattr(self, name) < 1:
                raise UserError(f"mae.{name}={getattr(self, name)} must be at least 1.")
        if self.decoder_dim % 4 or self.decoder_dim % self.decoder_heads:
            raise UserError(
                f"mae.decoder_dim={self.decoder_dim} must be a multiple of 4 (sin-cos positions) and of "
                f"mae.decoder_heads={self.decoder_heads}."
            )
        if self.pictures < 0:
            raise UserError(f"mae.pictures={self.pictures} is negative. It must be 0 or more.")


class RankedPatches(NamedTuple):
    """The decoder's output for all patches, and each patch's rank in the random order. Small ranks are visible."""

    patches: Patches
    patch_ranks: TokenIndices


def make_target_pixels(patches: Patches, normalise: bool) -> Patches:
    """Return the decoder's target: the pixels of each patch, or normalised by the patch's mean and deviation."""
    if not normalise:
        return patches
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return (patches - mean) / (variance + EPS).sqrt()


def mae_loss(
    predicted_patches: Patches, target_patches: Patches, patch_ranks: TokenIndices, num_visible: int
) -> Tensor:
    """Return the mean squared error over the pixels of the masked patches, in float32."""
    hidden = (patch_ranks >= num_visible).float()
    errors = (predicted_patches.float() - target_patches.float()).square().mean(-1)
    return (errors * hidden).sum() / hidden.sum()


class MaskedAutoencoder(nn.Module):
    """Images and a random number per patch -> predicted pixels of all patches, and their ranks."""

    def __init__(self, model: VisionTransformer, decoder: MaeDecoder, num_visible: int) -> None:
        super().__init__()
        self.model, self.decoder, self.num_visible = model, decoder, num_visible

    def forward(self, images: Tensor, patch_noise: PatchNoise, depth_noise: DepthNoise | None = None) -> RankedPatches:
        visible, patch_ranks = select_visible_and_restore_indices(patch_noise, self.num_visible)
        patches = self.decoder(encode_visible_patches(self.model, images, visible, depth_noise), patch_ranks)
        return RankedPatches(patches, patch_ranks)


class Mae(MaskedImageModelling):
    """Masked autoencoder. `extra_module` is the decoder."""

    name = "mae"
    config_class = MaeConfig
    loss_name = "mean squared error on the masked patches"
    min_eager_step_seconds = 0.012  # many small kernels

    def __init__(self, state: "TrainState") -> None:
        super().__init__(state)
        config: MaeConfig = state.recipe.objective_config
        model = state.model
        decoder = MaeDecoder(
            model.config, embed_dim=config.decoder_dim, depth=config.decoder_depth, num_heads=config.decoder_heads
        ).to(state.hardware.device)
        self.config, self.extra_module = config, decoder
        self.num_pictures, self.num_masked_units = config.pictures, model.config.num_patches
        self.num_visible = count_visible_patches(model.config.num_patches, config.mask_ratio)
        self.autoencoder = MaskedAutoencoder(model, decoder, self.num_visible)
        self.compiled_autoencoder = state.hardware.compile(self.autoencoder)

    @classmethod
    def count_equivalent_forward_passes(cls, recipe: Recipe) -> float:
        """The encoder with the visible patches, and the decoder, whose output layer counts like an embedding."""
        model, mae = recipe.model, recipe.objective_config
        num_visible = count_visible_patches(model.num_patches, mae.mask_ratio)
        decoder = make_decoder_config(model, mae.decoder_dim, mae.decoder_depth, mae.decoder_heads)
        encoder_flops = count_forward_flops_per_image(replace(model, num_classes=0), num_visible)
        decoder_flops = count_forward_flops_per_image(replace(decoder, num_classes=0))
        decoder_flops += 2 * (model.num_prefix_tokens + num_visible) * model.embed_dim * mae.decoder_dim
        return (encoder_flops + decoder_flops) / count_forward_flops_per_image(model)

    def compute_loss_and_metrics(self, batch: Batch, schedule: ScheduleValues, phase: int = 0) -> StepMetrics:
        images, *noise = batch  # of patches, and of stochastic depth
        with self.state.hardware.autocast():
            predicted, patch_ranks = self.compiled_autoencoder(images, *noise)
        target = make_target_pixels(patchify(images, self.state.model.config.patch_size), self.config.norm_pix_loss)
        return {"train_loss": mae_loss(predicted, target, patch_ranks, self.num_visible)}

    def make_caption(self) -> str:
        return CAPTION.format(format_percent(self.config.mask_ratio, 0)) + (
            NORM_PIX_CAPTION if self.config.norm_pix_loss else ""
        )

    def predict_pixels(self, images: Images, noise: BlockNoise) -> Reconstruction:
        """With norm_pix_loss each reconstructed patch gets its true mean and standard deviation."""
        predicted, patch_ranks = self.autoencoder(images, noise)
        if self.config.norm_pix_loss:
            variance, mean = torch.var_mean(patchify(images, self.state.model.config.patch_size), -1, keepdim=True)
            predicted = predicted * (variance + EPS).sqrt() + mean
        return Reconstruction(predicted, patch_ranks >= self.num_visible)
