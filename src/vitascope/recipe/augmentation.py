"""Complete the augmentation of a recipe: the data set's policy, as its objective changes it."""

from vitascope.data.config import AugmentConfig, resolve_augmentation
from vitascope.recipe.choices import LABELLED_OBJECTIVE, load_objective


def resolve_augmentation_for_objective(
    requested: AugmentConfig, dataset_name: str, num_channels: int, objective_name: str
) -> AugmentConfig:
    """Complete the settings with the policy of the data set and the objective. Reject settings that do not fit."""
    if objective_name == LABELLED_OBJECTIVE:
        return resolve_augmentation(requested, dataset_name, num_channels)
    objective = load_objective(objective_name)
    objective.check_augmentation(requested)
    return resolve_augmentation(requested, dataset_name, num_channels, objective.adapt_augmentation)
