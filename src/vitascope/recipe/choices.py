"""The objectives and optimizers that a recipe can name, and the augmentation that an objective needs.

An objective or optimizer is one file, imported only when it is used. The files import torch, which takes seconds. So
recipes with labels are read without them: the settings of `train.objective=classify` are in `train.…`, and only the
other objectives have a section of their own.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vitascope.data.config import POLICY_SIDE, AugmentConfig, resolve_augmentation

if TYPE_CHECKING:
    from vitascope.training.objectives.objective import Objective
    from vitascope.training.optim.optimizer import Optimizer

LABELLED_OBJECTIVE = "classify"  # the only objective with labels, and the default
OBJECTIVES = {
    LABELLED_OBJECTIVE: "vitascope.training.objectives.classify.Classify",
    "dino": "vitascope.training.objectives.dino.Dino",
    "mae": "vitascope.training.objectives.mae.Mae",
    "simmim": "vitascope.training.objectives.simmim.SimMim",
}
OPTIMIZERS = {
    "adamw": "vitascope.training.optim.adamw.AdamW",
    "muon": "vitascope.training.optim.muon.Muon",  # for the matrices of the blocks; AdamW for the rest
    "lion": "vitascope.training.optim.lion.Lion",  # train.lr 3 to 10 times smaller than AdamW's, betas=[0.9,0.99]
    "soap": "vitascope.training.optim.soap.Soap",  # for the matrices of the blocks; betas=[0.95,0.95]
}
OBJECTIVE_SECTIONS = tuple(name for name in OBJECTIVES if name != LABELLED_OBJECTIVE)


def load_objective(name: str) -> "type[Objective]":
    """Import the objective that `train.objective` names."""
    return _import_class(OBJECTIVES[name])


def load_optimizer(name: str) -> "type[Optimizer]":
    """Import the optimizer that `train.optimizer` names."""
    return _import_class(OPTIMIZERS[name])


def _import_class(path: str) -> type[Any]:
    module_name, _, class_name = path.rpartition(".")
    return getattr(import_module(module_name), class_name)


def complete_augmentation_for_objective(
    requested: AugmentConfig,
    dataset_name: str,
    num_channels: int,
    objective_name: str,
    image_size: tuple[int, int] = (POLICY_SIDE, POLICY_SIDE),
) -> AugmentConfig:
    """Complete the settings with the policy of the data set and the objective. Reject settings that do not fit.

    `image_size`: rows and columns of the stored images; the default policy of a user's own data depends on it."""
    if objective_name == LABELLED_OBJECTIVE:
        return resolve_augmentation(requested, dataset_name, num_channels, image_size=image_size)
    objective = load_objective(objective_name)
    objective.check_augmentation(requested)
    return resolve_augmentation(requested, dataset_name, num_channels, objective.make_default_augmentation, image_size)
