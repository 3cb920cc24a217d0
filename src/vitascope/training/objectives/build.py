"""The objectives that `train.objective` names."""

from vitascope.training.objectives.classify import Classify
from vitascope.training.objectives.dino import Dino
from vitascope.training.objectives.mae import Mae
from vitascope.training.objectives.objective import Objective

OBJECTIVES: dict[str, type[Objective]] = {"classify": Classify, "dino": Dino, "mae": Mae}
