"""Detect collapse from an epoch's metrics: the outputs are the same for every image. Suggest what to change."""

import math
from dataclasses import dataclass

UNIFORM, TOGETHER = 0.998, 0.005  # of ln K; nats per ln K between teacher and student
ONE = 1.5  # prototypes in use over all images
SAME = 0.005  # spread of the features; an untrained ViT has 0.02 to 0.2
EARLY = 0.1  # fraction of the epochs at the start without alarms


@dataclass(frozen=True)
class Alarm:
    kind: str
    text: str


def alarm(row: dict[str, float], epochs: int, prototypes: int | None = None) -> Alarm | None:
    """Return an alarm if the model has collapsed. `prototypes`: number in DINO's head, None for other objectives."""
    if row["epoch"] <= max(1, EARLY * epochs):
        return None
    if prototypes is not None and (found := _of_answers(row, prototypes)):
        return found
    if row.get("feature_spread", 1.0) < SAME:
        return Alarm(
            "features",
            f"Collapse: all images have almost the same features (spread {row['feature_spread']:.4f}; 0: identical). "
            "Lower train.lr or train.muon_lr, raise train.warmup, or raise train.batch_size.",
        )
    return None


def _of_answers(row: dict[str, float], prototypes: int) -> Alarm | None:
    most, entropy = math.log(prototypes), row["teacher_entropy"]
    if entropy > UNIFORM * most and abs(row["divergence"]) < TOGETHER * most:
        return Alarm(
            "uniform",
            f"Collapse: the teacher's outputs are almost uniform, so the student cannot learn from them. Their entropy "
            f"is {entropy:.3f} (maximum ln {prototypes} = {most:.3f}) and the loss is {row['train_loss']:.3f}. Lower "
            "dino.teacher_temperature and dino.final_teacher_temperature, for example to 0.04 and 0.02. Keep "
            "dino.batch_norm=true. For short runs, lower dino.teacher_momentum.",
        )
    if row["prototypes_used"] < ONE:
        return Alarm(
            "one answer",
            f"Collapse: every image has the same output. Only {row['prototypes_used']:.1f} of {prototypes} prototypes "
            f"are used, and the loss is {row['train_loss']:.3f}. Lower dino.center_momentum, for example to 0.9. Or "
            "raise dino.teacher_temperature, or lower train.lr or train.muon_lr.",
        )
    return None
