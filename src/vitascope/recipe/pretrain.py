"""Settings of DINO and MAE, the two ways to train without labels, checked on construction, without importing torch."""

from dataclasses import dataclass

from vitascope.data.config import NO_CROP, check_scale
from vitascope.errors import UserError, speaks_for_itself


@speaks_for_itself
@dataclass(frozen=True)
class DinoConfig:
    """train.objective=dino: a student predicts the output of its EMA, the teacher, on other crops (Caron 2021)."""

    prototypes: int = 1024  # output width of the head; the paper has 65,536 for ImageNet
    hidden: int = 512  # width of the head's two hidden layers; the paper has 2048
    bottleneck: int = 256  # width of the normalised features before the prototypes
    batch_norm: bool = True  # batch norm in the head's hidden layers; without it, small ViTs collapse (see docs)
    local_crops: int = 4  # number of local crops besides the two global crops; 0: none
    local_size: int = 16  # side of a local crop in pixels; a multiple of model.patch_size
    global_crops_scale: tuple[float, float] = (0.4, 1.0)  # global crops: range of their area, as fractions of the image
    local_crops_scale: tuple[float, float] = (0.15, 0.4)  # local crops: the same
    student_temperature: float = 0.1  # softmax temperature of the student
    teacher_temperature: float = 0.04  # softmax temperature of the teacher at the start
    final_teacher_temperature: float = 0.07  # softmax temperature of the teacher after teacher_warmup
    teacher_warmup: float = 0.1  # fraction of all steps in which the teacher's temperature rises linearly
    teacher_momentum: float = 0.996  # EMA decay of the teacher; rises to 1 by a cosine
    center_momentum: float = 0.9  # EMA decay of the center (the teacher's mean output, subtracted); 1: no centering
    freeze_last: float = 0.01  # fraction of all steps in which the prototypes are frozen

    def __post_init__(self) -> None:
        for name in ("global_crops_scale", "local_crops_scale"):
            object.__setattr__(self, name, check_scale(f"dino.{name}", getattr(self, name)))
        if self.local_crops and self.local_crops_scale == NO_CROP:
            raise UserError("dino.local_crops_scale=[1,1] uses the whole image. Choose a range such as [0.15,0.4].")
        for name in ("prototypes", "hidden", "bottleneck", "local_size"):
            if getattr(self, name) < (2 if name == "prototypes" else 1):
                raise UserError(f"dino.{name}={getattr(self, name)} is too small.")
        if self.local_crops < 0:
            raise UserError(f"dino.local_crops={self.local_crops} is negative. It must be 0 or more.")
        for name in ("student_temperature", "teacher_temperature", "final_teacher_temperature"):
            if not getattr(self, name) > 0:
                raise UserError(f"dino.{name}={getattr(self, name)} must be greater than 0.")
        _check_shares("dino", self, ("teacher_warmup", "teacher_momentum", "center_momentum", "freeze_last"))


@speaks_for_itself
@dataclass(frozen=True)
class MaeConfig:
    """train.objective=mae: most patches are masked, and a small decoder reconstructs them (He et al. 2022)."""

    mask_ratio: float = 0.75  # fraction of the patches that are masked
    decoder_dim: int = 128  # width of the decoder
    decoder_depth: int = 2  # number of decoder blocks
    decoder_heads: int = 4  # attention heads of the decoder
    norm_pix_loss: bool = True  # normalise the target pixels of each patch by its mean and standard deviation
    pictures: int = 8  # number of reconstructions drawn after every epoch; 0: none

    def __post_init__(self) -> None:
        if not 0 < self.mask_ratio < 1:
            raise UserError(f"mae.mask_ratio={self.mask_ratio} must be greater than 0 and below 1.")
        for name in ("decoder_dim", "decoder_depth", "decoder_heads"):
            if getattr(self, name) < 1:
                raise UserError(f"mae.{name}={getattr(self, name)} must be at least 1.")
        if self.decoder_dim % 4 or self.decoder_dim % self.decoder_heads:
            raise UserError(
                f"mae.decoder_dim={self.decoder_dim} must be a multiple of 4 (sin-cos positions) and of "
                f"mae.decoder_heads={self.decoder_heads}."
            )
        if self.pictures < 0:
            raise UserError(f"mae.pictures={self.pictures} is negative. It must be 0 or more.")


def _check_shares(section: str, config: object, names: tuple[str, ...]) -> None:
    for name in names:
        if not 0 <= getattr(config, name) <= 1:
            raise UserError(f"{section}.{name}={getattr(config, name)} must be at least 0 and at most 1.")
