"""The schema of a recipe: what can be set, with its defaults; torch-free."""

from dataclasses import dataclass, field

from vitascope.data.config import DataConfig
from vitascope.errors import UserError, speaks_for_itself
from vitascope.model.config import ModelConfig
from vitascope.recipe.train import TrainConfig


@speaks_for_itself
@dataclass(frozen=True)
class Recipe:
    """Everything a run is made of."""

    name: str = "run"  # a recipe's file name; runs are kept under it
    weights: str | None = None  # to start from: timm:NAME, hf:REPO, a file, a folder, a run; none: from scratch
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if not self.name or any(sign in self.name for sign in "/\\:") or self.name.startswith("."):
            raise UserError(f"name={self.name!r} cannot name a folder of runs. Use letters, digits, - and _.")
        if self.train.patience and self.data.validation == 0:
            raise UserError("train.patience watches validation images, but data.validation=0 holds none back.")
        if self.weights is None and (self.train.tune != "full" or self.train.freeze):
            what = f"train.tune={self.train.tune}" if self.train.tune != "full" else f"train.freeze={self.train.freeze}"
            raise UserError(f"{what} keeps weights as they are, but there are none to keep. Give weights=….")
