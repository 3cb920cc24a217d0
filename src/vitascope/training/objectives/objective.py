"""Base class of the training objectives: classification, DINO and MAE share one training loop."""

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from vitascope.data.dataset import Labels, UInt8Images
from vitascope.data.sampling import (
    RandomDraws,
    draw_epoch_augmentation_parameters,
    draw_epoch_depth_noise,
    draw_epoch_patch_noise,
)
from vitascope.training.objectives.collapse import Alarm
from vitascope.training.optim.schedule import ScheduleValues

if TYPE_CHECKING:
    from vitascope.training.state import TrainState

Batch = tuple[Tensor, ...]  # the inputs of a step; the first axis of each tensor is the image
StepMetrics = dict[str, Tensor]  # metric name -> mean over the batch; the first is the loss


class Objective:
    """Loss, metrics and validation of a run. One object per run.

    `extra_module` holds modules that only the training uses, such as a decoder. They are trained with the model and
    stored in the checkpoint."""

    metric_names: tuple[str, ...] = ("train_loss",)  # averaged over an epoch; the first is the loss
    selection_metric: str = "val_accuracy"  # metric that selects the best epoch
    needs_ema: bool = False  # even if train.ema=0
    fingerprint: str = ""  # hash of other inputs of the run, such as a teacher's weights

    def __init__(self, state: "TrainState") -> None:
        self.state = state
        self.extra_module = nn.Module()

    def get_phase(self, epoch: int) -> int:
        """Return the phase of an epoch. Both count from 0. Each phase has its own training step."""
        return 0

    def draw_random_numbers_of_epoch(self, num_steps: int, batch_size: int, epoch: int) -> RandomDraws:
        """Draw all random numbers of an epoch for augmentation and stochastic depth, step × image (…)."""
        policy, seed = self.state.recipe.data.augment, self.state.recipe.train.seed
        augmentation = draw_epoch_augmentation_parameters(policy, num_steps, batch_size, seed, epoch)
        return augmentation | self.draw_depth_noise_of_epoch(num_steps, batch_size, epoch)

    def draw_patch_noise_of_epoch(self, num_steps: int, batch_size: int, epoch: int) -> RandomDraws:
        """Draw a random number per patch, step × image × patch; it decides which patches are used."""
        seed, patches = self.state.recipe.train.seed, self.state.model.config.num_patches
        return {"noise": draw_epoch_patch_noise(patches, num_steps, batch_size, seed, epoch)}

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
        """Return the training loss and the metrics to log (`metric_names`), each averaged over the batch."""
        raise NotImplementedError

    def adjust_gradients(self, schedule: ScheduleValues) -> None:
        """Change the gradients before the optimizer step."""

    def update_teacher(self, schedule: ScheduleValues) -> None:
        """Update state that follows the weights, after the optimizer step and the EMA update."""

    def validate(self, epoch: int) -> dict[str, float]:
        """Return the validation metrics after an epoch, counted from 1."""
        return {}

    def save_figures(self, run_folder: Path, epoch: int) -> None:
        """Save figures to the run folder after an epoch."""

    def detect_collapse(self, metrics: dict[str, float]) -> Alarm | None:
        """Return an alarm if the metrics of an epoch show a collapse."""
        return None
