"""Masked autoencoder: reconstruct hidden patches from visible ones (He et al. 2022, arXiv 2111.06377)."""

from pathlib import Path

import torch
from torch import Tensor, nn

from vitascope.data.draws import Draws
from vitascope.data.source import Labels, UInt8Images
from vitascope.model.masked import Decoder, encode_visible, visible_count, visible_patches
from vitascope.model.patches import patchify, unpatchify
from vitascope.model.vit import VisionTransformer
from vitascope.run.files import make_folder
from vitascope.shapes import Images, Noise, Order, Patches
from vitascope.training.alarm import Alarm, alarm
from vitascope.training.evidence import Evidence
from vitascope.training.objective import Inputs, Learning, Numbers, Objective
from vitascope.training.schedule import Values

EPS = 1e-6
PICTURES = "reconstructions"  # a folder of the run
ROWS = ("image", "visible", "reconstructed")
TEXT = (
    "{:.0%} of the patches are hidden (grey). The encoder gets the visible patches; the decoder reconstructs the "
    "hidden ones. With mae.norm_pix_loss, reconstructed patches are shown with their true mean and contrast."
)


def wanted_pixels(patches: Patches, normalise: bool) -> Patches:
    """The decoder's target: the pixels of each patch, normalised by the patch's mean and standard deviation or not."""
    if not normalise:
        return patches
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return (patches - mean) / (variance + EPS).sqrt()


def mae_loss(said: Patches, wanted: Patches, places: Order, visible: int) -> Tensor:
    """Mean squared error over the pixels of hidden patches, in float32."""
    hidden = (places >= visible).float()
    wrong = (said.float() - wanted.float()).square().mean(-1)
    return (wrong * hidden).sum() / hidden.sum()


class Autoencoder(nn.Module):
    """Images and a random number per patch -> pixels of all patches, and which of them were hidden."""

    def __init__(self, model: VisionTransformer, decoder: Decoder, visible: int) -> None:
        super().__init__()
        self.model, self.decoder, self.visible = model, decoder, visible

    def forward(self, images: Tensor, noise: Noise) -> tuple[Patches, Order]:
        visible, places = visible_patches(noise, self.visible)
        return self.decoder(encode_visible(self.model, images, visible), places), places


class Mae(Objective):
    """`extra` is the decoder. No mixing, no colour changes: crops and mirror images (appendix A.1)."""

    measure = "knn_accuracy"

    def __init__(self, learning: Learning) -> None:
        super().__init__(learning)
        config, model = learning.recipe.mae, learning.model
        decoder = Decoder(
            model.config, embed_dim=config.decoder_dim, depth=config.decoder_depth, num_heads=config.decoder_heads
        ).to(learning.hardware.device)
        self.config, self.extra = config, decoder
        self.visible = visible_count(model.config.num_patches, config.mask_ratio)
        self.painter = Autoencoder(model, decoder, self.visible)
        self.network = learning.hardware.compile(self.painter)
        self.evidence = Evidence(learning)

    def draws(self, steps: int, batch: int, epoch: int) -> Draws:
        return super().draws(steps, batch, epoch) | self.patch_noise(steps, batch, epoch)

    def prepare(self, images: UInt8Images, labels: Labels, draws: Draws) -> Inputs:
        policy = self.learning.recipe.data.augment
        return self.learning.preparation.view(images, draws, policy), draws["noise"]

    def told(self, inputs: Inputs, values: Values) -> Numbers:
        images, noise = inputs
        with self.learning.hardware.autocast():
            said, places = self.network(images, noise)
        wanted = wanted_pixels(patchify(images, self.learning.model.config.patch_size), self.config.norm_pix_loss)
        return {"train_loss": mae_loss(said, wanted, places, self.visible)}

    def look(self, epoch: int) -> dict[str, float]:
        return self.evidence.look(epoch)

    def alarm(self, row: dict[str, float]) -> Alarm | None:
        return alarm(row, self.learning.recipe.train.epochs)

    def draw(self, folder: Path, epoch: int) -> None:
        """Draw reconstructions, always of the same images with the same hidden patches."""
        if not self.config.pictures:
            return
        from vitascope.draw.gallery import draw_gallery, save_mosaic  # imports matplotlib
        from vitascope.draw.look import save

        data = self.learning.data
        split = (data.validation or data.train).evenly(self.config.pictures)
        images = data.preparation(split.images.to(self.learning.hardware.device))
        rows = [data.preparation.undone(part).permute(0, 2, 3, 1).cpu().numpy() for part in self.painted(images)]
        make_folder(folder / PICTURES)
        save_mosaic(rows, folder / PICTURES / f"epoch-{epoch:04d}.png")
        if epoch == self.learning.recipe.train.epochs:
            gallery = draw_gallery(
                [list(row) for row in rows], ROWS, [""] * len(images), TEXT.format(self.config.mask_ratio)
            )
            save(gallery, folder / "reconstructions.png")

    @torch.no_grad()
    def painted(self, images: Images) -> tuple[Images, Images, Images]:
        """The images, their visible patches (the rest is 0), and the reconstruction of the hidden patches. With
        norm_pix_loss each patch gets its true mean and standard deviation back."""
        config = self.learning.model.config
        patches = patchify(images, config.patch_size)
        noise = torch.rand(patches.shape[:2], generator=torch.Generator().manual_seed(0)).to(images.device)
        was_training = self.painter.training
        said, places = self.painter.eval()(images, noise)
        self.painter.train(was_training)
        if self.config.norm_pix_loss:
            variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
            said = said * (variance + EPS).sqrt() + mean
        hidden = (places >= self.visible)[..., None]
        parts = (torch.where(hidden, 0.0, patches), torch.where(hidden, said, patches))
        visible, whole = (unpatchify(part, config.patch_size, config.grid) for part in parts)
        return images, visible, whole
