"""Base classes of the objectives without labels, and of those that reconstruct hidden patches (MAE, SimMIM).

They have checks, augmentation, evaluation of features, detection of collapse, masks and figures.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from vitascope.data.config import NO_CROP, AugmentConfig
from vitascope.data.dataset import Labels, UInt8Images
from vitascope.data.sampling import RandomDraws
from vitascope.errors import UserError
from vitascope.model.patches import patchify, unpatchify
from vitascope.recipe.schema import Recipe
from vitascope.run.files import make_folder
from vitascope.shapes import BlockNoise, Images, Patches, PatchMask
from vitascope.training.objectives.feature_metrics import FeatureEvaluator
from vitascope.training.objectives.objective import Alarm, Batch, Objective, ValidationMetrics

if TYPE_CHECKING:
    from vitascope.training.state import TrainState

LABEL_SETTINGS = {"patience": 0, "distill": None, "tune": "full", "freeze": 0, "patch_share": 1.0}  # with defaults
MIN_FEATURE_SPREAD = 0.005  # spread of the features; an untrained ViT has 0.02 to 0.2
IGNORED_EPOCH_FRACTION = 0.1  # fraction of the epochs at the start without alarms


class SelfSupervised(Objective):
    """An objective without labels. The classifier is a linear probe of the features."""

    selection_metric = "knn_accuracy"

    def __init__(self, state: "TrainState") -> None:
        super().__init__(state)
        self.feature_evaluator = FeatureEvaluator(state)

    @classmethod
    def check_recipe(cls, recipe: Recipe) -> None:
        train, objective = recipe.train, cls.name
        for name, default in LABEL_SETTINGS.items():
            if getattr(train, name) != default:
                raise UserError(
                    f"train.{name}={getattr(train, name)} needs labels, but train.objective={objective} has none. "
                    "Remove it."
                )
        if recipe.data.balance != "none":
            raise UserError(
                f"data.balance={recipe.data.balance} needs labels, but train.objective={objective} has none. Remove it."
            )
        if recipe.model.token_reduction:
            setting = f"model.{next(iter(recipe.model.token_reduction))}"
            raise UserError(f"{setting} is for inference, not for train.objective={objective}. Remove it.")

    @classmethod
    def check_augmentation(cls, requested: AugmentConfig) -> None:
        if requested.mixup or requested.cutmix:
            name = "mixup" if requested.mixup else "cutmix"
            raise UserError(
                f"data.augment.{name} mixes labels, but train.objective={cls.name} uses none. Leave it out."
            )

    @classmethod
    def make_default_augmentation(cls, dataset_policy: AugmentConfig, num_channels: int) -> AugmentConfig:
        """Return the policy without mixing and erasing; for photos also without shifts, crops and changes of colour."""
        policy = replace(dataset_policy, mixup=0.0, cutmix=0.0, erase=0.0, randaugment=0)
        photo_settings = {"shift": 0, "brightness": 0.0, "contrast": 0.0, "saturation": 0.0}
        policy = replace(policy, crop_scale=NO_CROP)
        return replace(policy, **photo_settings) if num_channels == 3 else policy

    def validate(self, epoch: int) -> ValidationMetrics:
        return self.feature_evaluator.evaluate_features_and_set_probe_heads(epoch)

    def detect_collapse(self, metrics: dict[str, float]) -> Alarm | None:
        return detect_feature_collapse(metrics, self.state.recipe.train.epochs)


def is_after_first_epochs(metrics: dict[str, float], num_epochs: int) -> bool:
    """Return whether the model has trained long enough for an alarm."""
    return metrics["epoch"] > max(1, IGNORED_EPOCH_FRACTION * num_epochs)


def detect_feature_collapse(metrics: dict[str, float], num_epochs: int) -> Alarm | None:
    """Return an alarm if all images have almost the same features."""
    if not is_after_first_epochs(metrics, num_epochs) or metrics.get("feature_spread", 1.0) >= MIN_FEATURE_SPREAD:
        return None
    return Alarm(
        "features",
        f"Collapse: all images have almost the same features (spread {metrics['feature_spread']:.4f}; 0: "
        "identical). Lower train.lr or train.muon_lr, raise train.warmup, or raise train.batch_size.",
    )


CROP_SCALE = (0.2, 1.0)  # of photos
FIGURE_FOLDER = "reconstructions"  # a folder of the run
ROW_TITLES = ("image", "visible", "reconstructed")


class Reconstruction(NamedTuple):
    """The predicted pixels of all patches, and which patches are hidden."""

    patches: Patches
    hidden: PatchMask


class ReconstructionImages(NamedTuple):
    """The rows of the figure (`ROW_TITLES`)."""

    images: Images
    visible: Images  # hidden patches are 0
    reconstructed: Images


class MaskedImageModelling(SelfSupervised):
    """Hide random patches of each image and predict their pixels."""

    num_pictures: int  # reconstructions drawn after every epoch; 0: none
    num_masked_units: int  # patches or blocks of patches that are hidden independently

    @classmethod
    def check_recipe(cls, recipe: Recipe) -> None:
        super().check_recipe(recipe)
        model, objective = recipe.model, f"train.objective={cls.name}"
        if model.tokenizer != "patch":
            raise UserError(
                f"{objective} masks patches, but with tokenizer={model.tokenizer} tokens overlap. "
                "Choose model.tokenizer=patch."
            )
        if model.causal:
            raise UserError(
                f"{objective} masks random patches, but causal=true needs all patches in order. Remove one of them."
            )
        if model.num_patches < 2:
            raise UserError(
                f"{objective} needs at least two patches, but the model has one. Choose a smaller model.patch_size."
            )

    @classmethod
    def check_augmentation(cls, requested: AugmentConfig) -> None:
        super().check_augmentation(requested)
        if requested.erase:
            raise UserError(
                f"data.augment.erase={requested.erase} cannot be used with train.objective={cls.name}: it would have "
                "to reconstruct erased pixels."
            )

    @classmethod
    def make_default_augmentation(cls, dataset_policy: AugmentConfig, num_channels: int) -> AugmentConfig:
        """Photos get only crops and flips (He et al. 2022, appendix A.1; Xie et al. 2022, section 4.1)."""
        dataset_policy = super().make_default_augmentation(dataset_policy, num_channels)
        return replace(dataset_policy, crop_scale=CROP_SCALE) if num_channels == 3 else dataset_policy

    def draw_random_numbers_of_epoch(self, num_steps: int, batch_size: int, epoch: int) -> RandomDraws:
        draws = super().draw_random_numbers_of_epoch(num_steps, batch_size, epoch)
        return draws | self.draw_patch_noise_of_epoch(num_steps, batch_size, epoch, self.num_masked_units)

    def augment_batch(self, images: UInt8Images, labels: Labels, draws: RandomDraws) -> Batch:
        policy = self.state.recipe.data.augment
        noise = [draws[name] for name in ("noise", "depth") if name in draws]
        return self.state.preprocessing.augment(images, draws, policy), *noise

    def predict_pixels(self, images: Images, noise: BlockNoise) -> Reconstruction:
        """Return the pixels that the current model predicts, for figures. It is in eval mode."""
        raise NotImplementedError

    def make_caption(self) -> str:
        """Return the caption of the figure."""
        raise NotImplementedError

    def save_figures(self, run_folder: Path, epoch: int) -> None:
        """Draw reconstructions, always of the same images with the same hidden patches."""
        if not self.num_pictures:
            return
        from vitascope.draw.images import draw_gallery, save_mosaic  # imports matplotlib
        from vitascope.draw.style import save_figure

        data = self.state.data
        split = (data.validation or data.train).select_evenly(self.num_pictures)
        images = data.preprocessing(split.images.to(self.state.hardware.device))
        rows = [
            data.preprocessing.denormalize(part).permute(0, 2, 3, 1).cpu().numpy()
            for part in self.reconstruct_images_with_fixed_masks(images)
        ]
        make_folder(run_folder / FIGURE_FOLDER)
        save_mosaic(rows, run_folder / FIGURE_FOLDER / f"epoch-{epoch:04d}.png")
        if epoch == self.state.recipe.train.epochs:
            gallery = draw_gallery([list(row) for row in rows], ROW_TITLES, [""] * len(images), self.make_caption())
            save_figure(gallery, run_folder / "reconstructions.png")

    @torch.no_grad()
    def reconstruct_images_with_fixed_masks(self, images: Images) -> ReconstructionImages:
        """Hide random patches, always the same, and reconstruct them."""
        config, modules = self.state.model.config, (self.state.model, self.extra_module)
        noise = torch.rand((len(images), self.num_masked_units), generator=torch.Generator().manual_seed(0))
        train_modes = [module.training for module in modules]
        for module in modules:
            module.eval()
        predicted, hidden_patches = self.predict_pixels(images, noise.to(images.device))
        for module, mode in zip(modules, train_modes, strict=True):
            module.train(mode)
        patches, hidden = patchify(images, config.patch_size), hidden_patches[..., None]
        parts = (torch.where(hidden, 0.0, patches), torch.where(hidden, predicted, patches))
        visible, reconstructed = (unpatchify(part, config.patch_size, config.grid) for part in parts)
        return ReconstructionImages(images, visible, reconstructed)
