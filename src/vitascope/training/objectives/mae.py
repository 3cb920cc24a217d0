"""Masked autoencoder: reconstruct hidden patches from visible ones (He et al. 2022, arXiv 2111.06377)."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from vitascope.data.dataset import Labels, UInt8Images
from vitascope.data.sampling import RandomDraws
from vitascope.model.patches import patchify, unpatchify
from vitascope.model.pretraining import (
    MaeDecoder,
    count_visible_patches,
    encode_visible_patches,
    select_visible_and_restore_indices,
)
from vitascope.model.vit import VisionTransformer
from vitascope.run.files import make_folder
from vitascope.shapes import DepthNoise, Images, Patches, PatchNoise, TokenIndices
from vitascope.training.objectives.collapse import Alarm, detect_collapse_after_first_epochs
from vitascope.training.objectives.feature_metrics import FeatureEvaluator
from vitascope.training.objectives.objective import Batch, Objective, StepMetrics
from vitascope.training.optim.schedule import ScheduleValues

EPS = 1e-6
FIGURE_FOLDER = "reconstructions"  # a folder of the run
ROW_TITLES = ("image", "visible", "reconstructed")
CAPTION = (
    "{:.0%} of the patches are hidden (grey). The encoder gets the visible patches; the decoder reconstructs the "
    "hidden ones."
)
NORM_PIX_CAPTION = (
    " This run predicts normalised pixels (mae.norm_pix_loss=true), so each reconstructed patch is shown with its true "
    "mean and contrast."
)

if TYPE_CHECKING:
    from vitascope.training.state import TrainState


class Reconstruction(NamedTuple):
    """The decoder's output for all patches, and each patch's rank in the random order. Small ranks are visible."""

    patches: Patches
    patch_ranks: TokenIndices


class ReconstructionImages(NamedTuple):
    """The rows of the figure (`ROW_TITLES`)."""

    images: Images
    visible: Images  # hidden patches are 0
    reconstructed: Images


def make_target_pixels(patches: Patches, normalise: bool) -> Patches:
    """Return the decoder's target: the pixels of each patch, or normalised by the patch's mean and deviation."""
    if not normalise:
        return patches
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return (patches - mean) / (variance + EPS).sqrt()


def mae_loss(
    predicted_patches: Patches, target_patches: Patches, patch_ranks: TokenIndices, num_visible: int
) -> Tensor:
    """Return the mean squared error over the pixels of hidden patches, in float32."""
    hidden = (patch_ranks >= num_visible).float()
    errors = (predicted_patches.float() - target_patches.float()).square().mean(-1)
    return (errors * hidden).sum() / hidden.sum()


class MaskedAutoencoder(nn.Module):
    """Images and a random number per patch -> predicted pixels of all patches, and their ranks."""

    def __init__(self, model: VisionTransformer, decoder: MaeDecoder, num_visible: int) -> None:
        super().__init__()
        self.model, self.decoder, self.num_visible = model, decoder, num_visible

    def forward(self, images: Tensor, patch_noise: PatchNoise, depth_noise: DepthNoise | None = None) -> Reconstruction:
        visible, patch_ranks = select_visible_and_restore_indices(patch_noise, self.num_visible)
        patches = self.decoder(encode_visible_patches(self.model, images, visible, depth_noise), patch_ranks)
        return Reconstruction(patches, patch_ranks)


class Mae(Objective):
    """Masked autoencoder. `extra_module` is the decoder. Augmentation: crops and mirror images (appendix A.1)."""

    selection_metric = "knn_accuracy"

    def __init__(self, state: "TrainState") -> None:
        super().__init__(state)
        config, model = state.recipe.mae, state.model
        decoder = MaeDecoder(
            model.config, embed_dim=config.decoder_dim, depth=config.decoder_depth, num_heads=config.decoder_heads
        ).to(state.hardware.device)
        self.config, self.extra_module = config, decoder
        self.num_visible = count_visible_patches(model.config.num_patches, config.mask_ratio)
        self.autoencoder = MaskedAutoencoder(model, decoder, self.num_visible)
        self.compiled_autoencoder = state.hardware.compile(self.autoencoder)
        self.feature_evaluator = FeatureEvaluator(state)

    def draw_random_numbers_of_epoch(self, num_steps: int, batch_size: int, epoch: int) -> RandomDraws:
        return super().draw_random_numbers_of_epoch(num_steps, batch_size, epoch) | self.draw_patch_noise_of_epoch(
            num_steps, batch_size, epoch
        )

    def augment_batch(self, images: UInt8Images, labels: Labels, draws: RandomDraws) -> Batch:
        policy = self.state.recipe.data.augment
        noise = [draws[name] for name in ("noise", "depth") if name in draws]
        return self.state.preprocessing.augment(images, draws, policy), *noise

    def compute_loss_and_metrics(self, batch: Batch, schedule: ScheduleValues, phase: int = 0) -> StepMetrics:
        images, *noise = batch  # of patches, and of stochastic depth
        with self.state.hardware.autocast():
            predicted, patch_ranks = self.compiled_autoencoder(images, *noise)
        target = make_target_pixels(patchify(images, self.state.model.config.patch_size), self.config.norm_pix_loss)
        return {"train_loss": mae_loss(predicted, target, patch_ranks, self.num_visible)}

    def validate(self, epoch: int) -> dict[str, float]:
        return self.feature_evaluator.evaluate_features_and_set_probe_heads(epoch)

    def detect_collapse(self, metrics: dict[str, float]) -> Alarm | None:
        return detect_collapse_after_first_epochs(metrics, self.state.recipe.train.epochs)

    def save_figures(self, run_folder: Path, epoch: int) -> None:
        """Draw reconstructions, always of the same images with the same hidden patches."""
        if not self.config.pictures:
            return
        from vitascope.draw.images import draw_gallery, save_mosaic  # imports matplotlib
        from vitascope.draw.style import save_figure

        data = self.state.data
        split = (data.validation or data.train).select_evenly(self.config.pictures)
        images = data.preprocessing(split.images.to(self.state.hardware.device))
        rows = [
            data.preprocessing.denormalize(part).permute(0, 2, 3, 1).cpu().numpy()
            for part in self.reconstruct_images(images)
        ]
        make_folder(run_folder / FIGURE_FOLDER)
        save_mosaic(rows, run_folder / FIGURE_FOLDER / f"epoch-{epoch:04d}.png")
        if epoch == self.state.recipe.train.epochs:
            gallery = draw_gallery([list(row) for row in rows], ROW_TITLES, [""] * len(images), self._make_caption())
            save_figure(gallery, run_folder / "reconstructions.png")

    def _make_caption(self) -> str:
        return CAPTION.format(self.config.mask_ratio) + (NORM_PIX_CAPTION if self.config.norm_pix_loss else "")

    @torch.no_grad()
    def reconstruct_images(self, images: Images) -> ReconstructionImages:
        """Hide random patches, always the same, and reconstruct them.

        With norm_pix_loss each reconstructed patch gets its true mean and standard deviation."""
        config = self.state.model.config
        patches = patchify(images, config.patch_size)
        noise = torch.rand(patches.shape[:2], generator=torch.Generator().manual_seed(0)).to(images.device)
        was_training = self.autoencoder.training
        predicted, patch_ranks = self.autoencoder.eval()(images, noise)
        self.autoencoder.train(was_training)
        if self.config.norm_pix_loss:
            variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
            predicted = predicted * (variance + EPS).sqrt() + mean
        hidden = (patch_ranks >= self.num_visible)[..., None]
        parts = (torch.where(hidden, 0.0, patches), torch.where(hidden, predicted, patches))
        visible, reconstructed = (unpatchify(part, config.patch_size, config.grid) for part in parts)
        return ReconstructionImages(images, visible, reconstructed)
