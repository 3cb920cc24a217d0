"""Detect collapse from an epoch's metrics: the outputs are the same for every image. Suggest what to change."""

import math
from dataclasses import dataclass

UNIFORM_ENTROPY_RATIO, LOW_DIVERGENCE_RATIO = (
    0.998,
    0.005,
)  # of ln K, for K prototypes: entropy of the teacher, and KL divergence of teacher and student
MIN_PROTOTYPES_USED = 1.5  # effective number of prototypes over all images
MIN_FEATURE_SPREAD = 0.005  # spread of the features; an untrained ViT has 0.02 to 0.2
IGNORED_EPOCH_FRACTION = 0.1  # fraction of the epochs at the start without alarms


@dataclass(frozen=True)
class Alarm:
    """A warning for the user. Each type is printed once."""

    collapse_type: str
    text: str


def detect_collapse_after_first_epochs(
    metrics: dict[str, float], num_epochs: int, num_prototypes: int | None = None
) -> Alarm | None:
    """Return an alarm if the model has collapsed. `num_prototypes`: None for other objectives than DINO."""
    if metrics["epoch"] <= max(1, IGNORED_EPOCH_FRACTION * num_epochs):
        return None
    if num_prototypes is not None and (alarm := _detect_teacher_output_collapse(metrics, num_prototypes)):
        return alarm
    if metrics.get("feature_spread", 1.0) < MIN_FEATURE_SPREAD:
        return Alarm(
            "features",
            f"Collapse: all images have almost the same features (spread {metrics['feature_spread']:.4f}; 0: "
            "identical). Lower train.lr or train.muon_lr, raise train.warmup, or raise train.batch_size.",
        )
    return None


def _detect_teacher_output_collapse(metrics: dict[str, float], num_prototypes: int) -> Alarm | None:
    """Check DINO's outputs: almost uniform, or the same prototype for every image."""
    max_entropy, entropy = math.log(num_prototypes), metrics["teacher_entropy"]
    if (
        entropy > UNIFORM_ENTROPY_RATIO * max_entropy
        and abs(metrics["divergence"]) < LOW_DIVERGENCE_RATIO * max_entropy
    ):
        return Alarm(
            "uniform",
            "Collapse: the teacher's outputs are almost uniform, so the student cannot learn from them. Their entropy "
            f"is {entropy:.3f} (maximum ln {num_prototypes} = {max_entropy:.3f}) and the loss is "
            f"{metrics['train_loss']:.3f}. Lower dino.teacher_temperature and dino.final_teacher_temperature, for "
            "example to 0.04 and 0.02. Keep dino.batch_norm=true. For short runs, lower dino.teacher_momentum.",
        )
    if metrics["prototypes_used"] < MIN_PROTOTYPES_USED:
        return Alarm(
            "one answer",
            f"Collapse: every image has the same output. Only {metrics['prototypes_used']:.1f} of {num_prototypes} "
            f"prototypes are used, and the loss is {metrics['train_loss']:.3f}. Lower dino.center_momentum, for "
            "example to 0.9. Or raise dino.teacher_temperature, or lower train.lr or train.muon_lr.",
        )
    return None
