"""How to learn without labels: the settings of DINO and MAE, checked when they are made, without torch."""

from dataclasses import dataclass

from vitascope.errors import UserError, speaks_for_itself


@speaks_for_itself
@dataclass(frozen=True)
class DinoConfig:
    """train.objective=dino: a student learns to say of every crop what its own average says of others (Caron 2021)."""

    prototypes: int = 1024  # answers to choose from, the width of the head; the paper's 65,536 are for ImageNet
    hidden: int = 512  # width of the head's two hidden layers; the paper's 2048
    bottleneck: int = 256  # features before the prototypes, normalised
    batch_norm: bool = True  # in the head's hidden layers; the paper's ViTs do without, small ones collapse (see docs)
    local_crops: int = 4  # small crops besides the two large ones, 0: none
    local_size: int = 16  # pixels of a small crop's sides; a multiple of the patch
    global_crops_scale: tuple[float, float] = (0.4, 1.0)  # share of the image's area in a large crop, from … to
    local_crops_scale: tuple[float, float] = (0.15, 0.4)  # the same of a small crop
    student_temperature: float = 0.1
    teacher_temperature: float = 0.04  # lower: surer targets; at the start
    final_teacher_temperature: float = 0.07  # reached in a line after the warm-up
    teacher_warmup: float = 0.1  # share of all steps
    teacher_momentum: float = 0.996  # decay of the average that teaches, rising to 1 by a cosine
    center_momentum: float = 0.9  # of the mean answer that is subtracted from the teacher's; 1: no centring
    freeze_last: float = 0.01  # share of all steps in which the prototypes stay as they were drawn

    def __post_init__(self) -> None:
        for name in ("global_crops_scale", "local_crops_scale"):
            low, high = _pair(name, getattr(self, name))
            object.__setattr__(self, name, (low, high))
            if not 0 < low <= high <= 1:
                raise UserError(f"dino.{name}=[{low},{high}] are shares of an image: 0 < from ≤ to ≤ 1.")
        if self.local_crops and self.local_crops_scale == (1.0, 1.0):
            raise UserError("dino.local_crops_scale=[1,1] crops nothing. Choose a range such as [0.15,0.4].")
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
    """train.objective=mae: most patches are hidden, and a small decoder paints them from the others (He 2022)."""

    mask_ratio: float = 0.75  # fraction of the patches that is masked
    decoder_dim: int = 128  # width of the decoder
    decoder_depth: int = 2  # its blocks
    decoder_heads: int = 4
    norm_pix_loss: bool = True  # the loss compares pixels normalised by each patch's own mean and deviation
    pictures: int = 8  # images whose reconstruction is drawn after every epoch, 0: none

    def __post_init__(self) -> None:
        if not 0 < self.mask_ratio < 1:
            raise UserError(f"mae.mask_ratio={self.mask_ratio} is a share: greater than 0 and below 1.")
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


def _pair(name: str, value: tuple[float, float]) -> tuple[float, float]:
    found = tuple(value)
    if len(found) != 2:
        raise UserError(f"dino.{name}={list(found)} is a pair: from, to.")
    return found


def _check_shares(section: str, config: object, names: tuple[str, ...]) -> None:
    for name in names:
        if not 0 <= getattr(config, name) <= 1:
            raise UserError(f"{section}.{name}={getattr(config, name)} must be at least 0 and at most 1.")
