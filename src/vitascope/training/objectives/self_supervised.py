"""Base class of the objectives without labels: checks, augmentation, evaluation of features, detection of collapse."""

from dataclasses import replace
from typing import TYPE_CHECKING

from vitascope.data.config import AugmentConfig
from vitascope.errors import UserError
from vitascope.recipe.schema import Recipe
from vitascope.training.objectives.feature_metrics import FeatureEvaluator
from vitascope.training.objectives.objective import Alarm, Objective

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
    def adapt_augmentation(cls, policy: AugmentConfig, num_channels: int) -> AugmentConfig:
        """Return the policy without mixing and erasing; for photos also without shifts and changes of colour."""
        policy = replace(policy, mixup=0.0, cutmix=0.0, erase=0.0, randaugment=0)
        photo_settings = {"shift": 0, "brightness": 0.0, "contrast": 0.0, "saturation": 0.0}
        return replace(policy, **photo_settings) if num_channels == 3 else policy

    def validate(self, epoch: int) -> dict[str, float]:
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
