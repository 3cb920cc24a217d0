"""What a step of learning wants: the same loop for labels, for DINO and for MAE; each objective says its own part."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from vitascope.data.dataset import Labels, UInt8Images
from vitascope.data.preprocessing import DevicePreprocessing
from vitascope.data.sampling import RandomDraws, draw_epoch_augmentation, draw_epoch_noise
from vitascope.data.splits import TrainingData
from vitascope.model.vit import VisionTransformer
from vitascope.recipe.schema import Recipe
from vitascope.training.hardware import Hardware
from vitascope.training.objectives.collapse import Alarm
from vitascope.training.optim.ema import AveragedModel
from vitascope.training.optim.schedule import ScheduleValues

Batch = tuple[Tensor, ...]  # what a step learns from, images along the first axis of each
StepMetrics = dict[str, Tensor]  # what a step tells, the loss among them


@dataclass
class Learning:
    """What an objective works with."""

    recipe: Recipe
    data: TrainingData
    hardware: Hardware
    model: VisionTransformer
    ema: AveragedModel[VisionTransformer] | None

    def __post_init__(self) -> None:
        self.preprocessing = DevicePreprocessing.from_preprocessing(
            self.data.preprocessing, self.hardware.device
        )  # of what a step learns from

    @property
    def eval_model(self) -> VisionTransformer:
        """The model that is evaluated and saved: averaged if averaging is on."""
        return self.ema.model if self.ema else self.model

    @property
    def batch_size(self) -> int:
        return min(self.recipe.train.batch_size, len(self.data.train))


class Objective:
    """One per session. `extra` are modules that belong to the learning alone, such as a decoder; their weights that ask
    for gradients learn with the model's, and all of it is in the checkpoint."""

    metric_names: tuple[str, ...] = ("train_loss",)  # what is averaged over an epoch, the loss first
    selection_metric: str = "val_accuracy"  # the number of a row that the best epoch is chosen by
    fingerprint: str = ""  # a short name for what else the run depends on

    def __init__(self, learning: Learning) -> None:
        self.learning = learning
        self.extra_module = nn.Module()
        self.phase = 0  # a step of another stage does other work: it is recorded anew

    def get_phase(self, epoch: int) -> int:
        """Counted from 0, as epochs are here."""
        return 0

    def make_random_draws(self, num_steps: int, batch_size: int, epoch: int) -> RandomDraws:
        """Every random number of an epoch, step × image (…)."""
        recipe = self.learning.recipe
        return draw_epoch_augmentation(recipe.data.augment, num_steps, batch_size, recipe.train.seed, epoch)

    def make_patch_noise(self, num_steps: int, batch_size: int, epoch: int) -> RandomDraws:
        """A random number for every patch, step × image × patch: which of them are seen."""
        seed, patches = self.learning.recipe.train.seed, self.learning.model.config.num_patches
        return {"noise": draw_epoch_noise(patches, num_steps, batch_size, seed, epoch)}

    def prepare_batch(self, images: UInt8Images, labels: Labels, draws: RandomDraws) -> Batch:
        raise NotImplementedError

    def compute_loss_and_metrics(self, batch: Batch, schedule: ScheduleValues) -> StepMetrics:
        """By the names in `numbers`, each a mean over the images; the first is what is learnt from."""
        raise NotImplementedError

    def adjust_gradients(self, schedule: ScheduleValues) -> None:
        """Gradients are there, weights are still the old ones."""

    def update_teacher(self, schedule: ScheduleValues) -> None:
        """Weights are new; the average has followed."""

    def validate(self, epoch: int) -> dict[str, float]:
        """After an epoch (counted from 1): what the row gets besides, from images that are not learnt from."""
        return {}

    def save_figures(self, run_folder: Path, epoch: int) -> None:
        """After an epoch: pictures for the run's folder."""

    def detect_collapse(self, metrics: dict[str, float]) -> Alarm | None:
        """After an epoch: whether something has gone wrong that its numbers show."""
        return None
