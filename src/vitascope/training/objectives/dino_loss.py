"""The loss of DINO: cross-entropy of student and teacher over all pairs of different crops (Caron et al. 2021)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

StudentLogits = Float[Tensor, "view image prototype"]
TeacherLogits = Float[Tensor, "large image prototype"]


@dataclass(frozen=True)
class DinoLoss:
    """Means over images and views. `loss` = `teacher_entropy` + `divergence` (section 5.3), in nats."""

    loss: Tensor
    teacher_entropy: Tensor
    divergence: Tensor  # KL(teacher ‖ student)
    prototypes_used: Tensor  # exp of the entropy of the teacher's mean distribution


def dino_loss(
    student_logits: StudentLogits,
    teacher_logits: TeacherLogits,
    centre: Tensor,
    student_temperature: float,
    teacher_temperature: float | Tensor,
) -> DinoLoss:
    """Return the mean cross-entropy of student and teacher over all pairs of different views, in float32.

    With V views of the student and 2 of the teacher these are 2 (V - 1) pairs: the first views of both are the same
    crops and not compared."""
    student_log_probs = (student_logits.float() / student_temperature).log_softmax(-1)
    teacher_log_probs = ((teacher_logits.float() - centre) / teacher_temperature).log_softmax(-1)
    teacher_probs = teacher_log_probs.exp()
    # For each view of the teacher, the sum over all other views of the student.
    other_views = student_log_probs.sum(0) - student_log_probs[: len(teacher_logits)]
    loss = -(teacher_probs * other_views).sum(-1).mean() / (len(student_logits) - 1)
    entropy = -(teacher_probs * teacher_log_probs).sum(-1).mean()
    mean_probs = teacher_probs.mean((0, 1))
    used = torch.exp(-torch.xlogy(mean_probs, mean_probs).sum())
    return DinoLoss(loss, entropy, loss - entropy, used)
