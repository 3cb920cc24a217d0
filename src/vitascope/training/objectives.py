"""train.objective -> the objective of that name."""

from vitascope.training.classify import Classify
from vitascope.training.dino import Dino
from vitascope.training.mae import Mae
from vitascope.training.objective import Learning, Objective

OBJECTIVES: dict[str, type[Objective]] = {"classify": Classify, "dino": Dino, "mae": Mae}


def make_objective(learning: Learning) -> Objective:
    return OBJECTIVES[learning.recipe.train.objective](learning)
