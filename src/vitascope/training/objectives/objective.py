"""Base class of the training objectives: all that differs between them. They share one training loop."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor, nn

from vitascope.data.config import AugmentConfig
from vitascope.data.dataset import Dataset, Labels, UInt8Images
from vitascope.data.preprocessing import Preprocessing
from vitascope.data.sampling import (
    RandomDraws,
    draw_epoch_augmentation_parameters,
    draw_epoch_depth_noise,
    draw_epoch_patch_noise,
    select_step_draws,
)
from vitascope.draw import CROSS_ENTROPY, CurvePanel
from vitascope.recipe.schema import Recipe
from vitascope.training.optim.schedule import ScheduleValues

if TYPE_CHECKING:
    from vitascope.training.state import TrainState

NUM_PREVIEW_VERSIONS = 8
Batch = tuple[Tensor, ...]  # the inputs of a step; the first axis of each tensor is the image
StepMetrics = dict[str, Tensor]  # metric name -> mean over the batch; the first is the loss
ValidationMetrics = dict[str, float]  # metric name -> value on the validation images


class Alarm(NamedTuple):
    """A warning for the user. Each type is printed once."""

    collapse_type: str
    text: str


class TitledVersions(NamedTuple):
    """Augmented versions of the same images: one batch per version, and its title."""

    images: list[Tensor]
    titles: list[str]


class Objective:
    """Loss, metrics and validation of a run. One object per run; class methods need only a recipe.

    `extra_module` holds modules that only the training uses, such as a decoder. They are trained with the model and
    stored in the checkpoint."""

    name: ClassVar[str]  # as in train.objective
    config_class: ClassVar[Any] = None  # dataclass of the recipe's section with the objective's name; None: no section
    loss_name: ClassVar[str] = CROSS_ENTROPY  # in figures
    curve_panels: ClassVar[dict[str, CurvePanel]] = {}  # further panels of the learning curves, by name
    metric_names: tuple[str, ...] = ("train_loss",)  # averaged over an epoch; the first is the loss
    selection_metric: str = "val_accuracy"  # metric that selects the best epoch
    needs_ema: bool = False  # even if train.ema=0
    num_whole_views: int = 1  # views of each image in one forward pass of the model, for the choice of kernels
    min_eager_step_seconds: float = 0.003  # shortest uncompiled CUDA graph step on an H200
    lr_find_problem: str = ""  # why the loss cannot show a good learning rate
    preview_name: str = "augmented versions"  # what `vitascope data preview` draws
    preview_sections: tuple[str, ...] = ()  # sections whose settings change the preview, such as "dino."
    fingerprint: str = ""  # hash of other inputs of the run, such as a teacher's weights
    can_accumulate: bool = True  # whether train.grad_accum_steps gives the same result

    def __init__(self, state: "TrainState") -> None:
        self.state = state
        self.extra_module = nn.Module()

    @classmethod
    def check_recipe(cls, recipe: Recipe) -> None:
        """Reject settings of other sections that do not work with this objective."""

    @classmethod
    def check_augmentation(cls, requested: AugmentConfig) -> None:
        """Reject augmentation that the user requests and that does not work with this objective."""

    @classmethod
    def make_default_augmentation(cls, dataset_policy: AugmentConfig, num_channels: int) -> AugmentConfig:
        """Return the default augmentation, given the data set's policy."""
        return dataset_policy

    @classmethod
    def compute_own_schedule_values(cls, step: int, num_steps: int, recipe: Recipe) -> dict[str, float]:
        """Return schedule values of a step that are added to those of all objectives, or replace them."""
        return {}

    @classmethod
    def count_equivalent_forward_passes(cls, recipe: Recipe) -> float:
        """Return the cost per training image in forward passes of a whole image; the backward pass costs two."""
        return 1.0

    @classmethod
    def augment_preview_images(
        cls, samples: Dataset, preprocessing: Preprocessing, recipe: Recipe, seed: int
    ) -> TitledVersions:
        """Return augmented versions of a few images for `vitascope data preview`."""
        policy = recipe.data.augment
        draws = draw_epoch_augmentation_parameters(policy, NUM_PREVIEW_VERSIONS, len(samples), seed, epoch=0)
        versions = [
            preprocessing.augment_and_mix(samples.images, samples.labels, select_step_draws(draws, step), policy)[0]
            for step in range(NUM_PREVIEW_VERSIONS)
        ]
        return TitledVersions(versions, [f"augmented {step + 1}" for step in range(NUM_PREVIEW_VERSIONS)])

    def get_phase_of_epoch(self, epoch: int) -> int:
        """Return the phase of an epoch. Both count from 0. Each phase has its own training step."""
        return 0

    def draw_random_numbers_of_epoch(self, num_steps: int, batch_size: int, epoch: int) -> RandomDraws:
        """Draw all random numbers of an epoch for augmentation and stochastic depth, step × image (…)."""
        policy, seed = self.state.recipe.data.augment, self.state.recipe.train.seed
        augmentation = draw_epoch_augmentation_parameters(policy, num_steps, batch_size, seed, epoch)
        return augmentation | self.draw_depth_noise_of_epoch(num_steps, batch_size, epoch)

    def draw_patch_noise_of_epoch(
        self, num_steps: int, batch_size: int, epoch: int, num_patches: int | None = None
    ) -> RandomDraws:
        """Draw a random number per patch, step × image × patch; it decides which patches are used."""
        seed, num_patches = self.state.recipe.train.seed, num_patches or self.state.model.config.num_patches
        return {"noise": draw_epoch_patch_noise(num_patches, num_steps, batch_size, seed, epoch)}

    def draw_depth_noise_of_epoch(
        self, num_steps: int, batch_size: int, epoch: int, *, view_index: int = 0
    ) -> RandomDraws:
        """Draw a random number per residual branch, step × image × branch; nothing without stochastic depth."""
        seed, config = self.state.recipe.train.seed, self.state.model.config
        if not config.drop_path_rate:
            return {}
        noise = draw_epoch_depth_noise(2 * config.depth, num_steps, batch_size, seed, epoch, view_index=view_index)
        return {"depth": noise}

    def augment_batch(self, images: UInt8Images, labels: Labels, draws: RandomDraws) -> Batch:
        """Augment the stored images of a step and return the inputs of the loss."""
        raise NotImplementedError

    def compute_loss_and_metrics(self, batch: Batch, schedule: ScheduleValues, phase: int = 0) -> StepMetrics:
        """Return the training loss and the metrics to log (`metric_names`), each averaged over the batch.

        It is called once per training step and part of the batch. It may collect statistics for
        `update_teacher_after_step`, such as the mean of DINO's teacher."""
        raise NotImplementedError

    def adjust_gradients_before_update(self, schedule: ScheduleValues) -> None:
        """Change the gradients before the optimizer step."""

    def update_teacher_after_step(self, schedule: ScheduleValues) -> None:
        """Update state that follows the weights, after the optimizer step and the EMA update."""

    def validate(self, epoch: int) -> ValidationMetrics:
        """Return the validation metrics after an epoch, counted from 1."""
        return {}

    def save_figures(self, run_folder: Path, epoch: int) -> None:
        """Save figures to the run folder after an epoch."""

    def detect_collapse(self, metrics: dict[str, float]) -> Alarm | None:
        """Return an alarm if the metrics of an epoch show a collapse."""
        return None
