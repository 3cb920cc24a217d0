"""What a step of learning wants: the same loop for labels, for DINO and for MAE; each objective says its own part."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from vitascope.data.draws import Draws, epoch_draws, epoch_noise
from vitascope.data.preparation import Placed
from vitascope.data.source import Labels, UInt8Images
from vitascope.data.training_data import TrainingData
from vitascope.model.vit import VisionTransformer
from vitascope.recipe.schema import Recipe
from vitascope.training.alarm import Alarm
from vitascope.training.averaging import Average
from vitascope.training.hardware import Hardware
from vitascope.training.schedule import Values

Inputs = tuple[Tensor, ...]  # what a step learns from, images along the first axis of each
Numbers = dict[str, Tensor]  # what a step tells, the loss among them


@dataclass
class Learning:
    """What an objective works with."""

    recipe: Recipe
    data: TrainingData
    hardware: Hardware
    model: VisionTransformer
    average: Average[VisionTransformer] | None

    def __post_init__(self) -> None:
        self.preparation = Placed.of(self.data.preparation, self.hardware.device)  # of what a step learns from

    @property
    def answering(self) -> VisionTransformer:
        """The model that is evaluated and saved: averaged if averaging is on."""
        return self.average.model if self.average else self.model

    @property
    def batch(self) -> int:
        return min(self.recipe.train.batch_size, len(self.data.train))


class Objective:
    """One per session. `extra` are modules that belong to the learning alone, such as a decoder; their weights that ask
    for gradients learn with the model's, and all of it is in the checkpoint."""

    numbers: tuple[str, ...] = ("train_loss",)  # what is averaged over an epoch, the loss first
    measure: str = "val_accuracy"  # the number of a row that the best epoch is chosen by
    fingerprint: str = ""  # a short name for what else the run depends on

    def __init__(self, learning: Learning) -> None:
        self.learning = learning
        self.extra = nn.Module()
        self.stage = 0  # a step of another stage does other work: it is recorded anew

    def stage_of(self, epoch: int) -> int:
        """Counted from 0, as epochs are here."""
        return 0

    def draws(self, steps: int, batch: int, epoch: int) -> Draws:
        """Every random number of an epoch, step × image (…)."""
        recipe = self.learning.recipe
        return epoch_draws(recipe.data.augment, steps, batch, recipe.train.seed, epoch)

    def patch_noise(self, steps: int, batch: int, epoch: int) -> Draws:
        """A random number for every patch, step × image × patch: which of them are seen."""
        seed, patches = self.learning.recipe.train.seed, self.learning.model.config.num_patches
        return {"noise": epoch_noise(patches, steps, batch, seed, epoch)}

    def prepare(self, images: UInt8Images, labels: Labels, draws: Draws) -> Inputs:
        raise NotImplementedError

    def told(self, inputs: Inputs, values: Values) -> Numbers:
        """By the names in `numbers`, each a mean over the images; the first is what is learnt from."""
        raise NotImplementedError

    def before_update(self, values: Values) -> None:
        """Gradients are there, weights are still the old ones."""

    def after_update(self, values: Values) -> None:
        """Weights are new; the average has followed."""

    def look(self, epoch: int) -> dict[str, float]:
        """After an epoch (counted from 1): what the row gets besides, from images that are not learnt from."""
        return {}

    def draw(self, folder: Path, epoch: int) -> None:
        """After an epoch: pictures for the run's folder."""

    def alarm(self, row: dict[str, float]) -> Alarm | None:
        """After an epoch: whether something has gone wrong that its numbers show."""
        return None
