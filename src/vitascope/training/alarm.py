"""An epoch's numbers -> a warning where the answers have become the same for every image, and what to change."""

import math
from dataclasses import dataclass

UNIFORM, TOGETHER = 0.998, 0.005  # of ln K; nats per ln K between teacher and student
ONE = 1.5  # prototypes in use, all images together
SAME = 0.005  # spread of the features; a random ViT has 0.02 to 0.2
EARLY = 0.1  # share of the training in which nothing can be told yet


@dataclass(frozen=True)
class Alarm:
    kind: str
    text: str


def alarm(row: dict[str, float], epochs: int, prototypes: int | None = None) -> Alarm | None:
    """`prototypes`: how many DINO's head has; None for other objectives."""
    if row["epoch"] <= max(1, EARLY * epochs):
        return None
    if prototypes is not None and (found := _of_answers(row, prototypes)):
        return found
    if row.get("feature_spread", 1.0) < SAME:
        return Alarm(
            "features",
            f"Collapse: different images have the same features (spread {row['feature_spread']:.4f}; 0 is the same "
            "for all). Lower train.lr or train.muon_lr, lengthen train.warmup, raise train.batch_size.",
        )
    return None


def _of_answers(row: dict[str, float], prototypes: int) -> Alarm | None:
    most, entropy = math.log(prototypes), row["teacher_entropy"]
    if entropy > UNIFORM * most and abs(row["divergence"]) < TOGETHER * most:
        return Alarm(
            "uniform",
            f"Collapse: the teacher's answers are all alike (entropy {entropy:.3f} of at most ln {prototypes} = "
            f"{most:.3f}, the loss is {row['train_loss']:.3f}), so there is nothing to learn from them. Sharpen them: "
            "dino.teacher_temperature and dino.final_teacher_temperature lower (0.04, 0.02); keep "
            "dino.batch_norm=true; where there are few steps, let the teacher follow faster (dino.teacher_momentum).",
        )
    if row["prototypes_used"] < ONE:
        return Alarm(
            "one answer",
            f"Collapse: every image gets the same answer ({row['prototypes_used']:.1f} of {prototypes} prototypes are "
            f"used, the loss is {row['train_loss']:.3f}). Centre faster (dino.center_momentum lower, such as 0.9), "
            "raise dino.teacher_temperature, lower train.lr or train.muon_lr.",
        )
    return None
