"""Default augmentation of each data set: changes that keep the label correct."""

from dataclasses import replace

from vitascope.data.config import NO_CROP, AugmentConfig
from vitascope.errors import UserError

NOTHING = AugmentConfig(
    flip=0.0,
    flip_mode="random",
    shift=0,
    shift_fill="zero",
    crop_scale=NO_CROP,
    rotate=0.0,
    scale=0.0,
    brightness=0.0,
    contrast=0.0,
    saturation=0.0,
    hue=0.0,
    grayscale=0.0,
    solarize=0.0,
    randaugment=0,
    magnitude=9.0,
    erase=0.0,
    erase_area=0.33,
    mixup=0.0,
    cutmix=0.0,
    mix_prob=1.0,
)
PHOTOS = replace(NOTHING, flip=0.5, shift=4, brightness=0.2, contrast=0.2, saturation=0.2, cutmix=1.0, mix_prob=0.5)
SIGNS = replace(NOTHING, shift=2)  # a user's grayscale images may be symbols: no flips by default
POLICIES = {
    "digits": replace(NOTHING, shift=1, rotate=6.0, scale=0.05, mixup=0.8, mix_prob=0.8),
    "mnist": replace(NOTHING, shift=2, rotate=10.0, scale=0.1),
    "fashion-mnist": replace(NOTHING, flip=0.5, shift=2, erase=0.25, cutmix=1.0, mix_prob=0.5),
    "cifar10": PHOTOS,
    "cifar100": PHOTOS,
}
NEVER_FLIPPED = ("digits", "mnist")


def resolve(asked: AugmentConfig, name: str, channels: int = 3, objective: str = "classify") -> AugmentConfig:
    """Complete the settings with the data set's policy; a user's own data gets the policy of photos or symbols."""
    policy = POLICIES.get(name, PHOTOS if channels == 3 else SIGNS)
    if objective != "classify":
        _check_unmixed(asked, objective)
        policy = _without_labels(policy, objective, channels)
    whole = asked.filled_from(policy)
    if name in NEVER_FLIPPED and whole.flip:
        raise UserError(
            f"data.augment.flip={whole.flip} is not allowed for {name}: a mirrored digit is a different symbol. "
            "Set it to 0."
        )
    if whole.flip_mode == "alternating" and (objective == "dino" or whole.flip not in (0.0, 0.5)):
        why = "DINO draws a new crop each time" if objective == "dino" else f"data.augment.flip={whole.flip} is not 0.5"
        raise UserError(
            f"data.augment.flip_mode=alternating flips an image in every other pass, but {why}. Use flip_mode=random."
        )
    return whole


def _without_labels(policy: AugmentConfig, objective: str, channels: int) -> AugmentConfig:
    """The policy without mixing and erasing. MAE uses only crops and flips (He et al. 2022, appendix A.1). DINO adds
    colour jitter (Caron et al. 2021), without blur, which removes too much of 32 pixels; `dino` sets its crops."""
    plain = replace(policy, mixup=0.0, cutmix=0.0, erase=0.0, randaugment=0)
    if channels != 3:
        return plain
    plain = replace(plain, shift=0, brightness=0.0, contrast=0.0, saturation=0.0)
    if objective == "mae":
        return replace(plain, crop_scale=(0.2, 1.0))
    return replace(plain, brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1, grayscale=0.2, solarize=0.2)


def _check_unmixed(asked: AugmentConfig, objective: str) -> None:
    if asked.mixup or asked.cutmix:
        name = "mixup" if asked.mixup else "cutmix"
        raise UserError(f"data.augment.{name} mixes labels, but train.objective={objective} uses none. Leave it out.")
    for name in ("crop_scale",) if objective == "dino" else ("erase",):
        if getattr(asked, name):
            why = (
                "its crops are set by dino.global_crops_scale and dino.local_crops_scale"
                if objective == "dino"
                else "it would have to reconstruct erased pixels"
            )
            value = getattr(asked, name)
            raise UserError(f"data.augment.{name}={value} cannot be used with train.objective={objective}: {why}.")
