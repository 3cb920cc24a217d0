"""One augmentation policy per data set: what may vary without changing the answer."""

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
SIGNS = replace(NOTHING, shift=2)  # grey images of one's own may be signs: not flipped unless asked
POLICIES = {
    "digits": replace(NOTHING, shift=1, rotate=6.0, scale=0.05, mixup=0.8, mix_prob=0.8),
    "mnist": replace(NOTHING, shift=2, rotate=10.0, scale=0.1),
    "fashion-mnist": replace(NOTHING, flip=0.5, shift=2, erase=0.25, cutmix=1.0, mix_prob=0.5),
    "cifar10": PHOTOS,
    "cifar100": PHOTOS,
}
NEVER_FLIPPED = ("digits", "mnist")


def resolve(asked: AugmentConfig, name: str, channels: int = 3, objective: str = "classify") -> AugmentConfig:
    """The settings in full: what was asked, and the data set's policy for the rest (photos' for one's own)."""
    policy = POLICIES.get(name, PHOTOS if channels == 3 else SIGNS)
    if objective != "classify":
        _check_unmixed(asked, objective)
        policy = _without_labels(policy, objective, channels)
    whole = asked.filled_from(policy)
    if name in NEVER_FLIPPED and whole.flip:
        raise UserError(
            f"data.augment.flip={whole.flip}: a mirrored digit is another sign. {name} is never flipped; set 0."
        )
    if whole.flip_mode == "alternating" and (objective == "dino" or whole.flip not in (0.0, 0.5)):
        why = "DINO draws each crop anew" if objective == "dino" else f"data.augment.flip={whole.flip} is not 0.5"
        raise UserError(
            f"data.augment.flip_mode=alternating flips an image in every other pass, but {why}. Use random."
        )
    return whole


def _without_labels(policy: AugmentConfig, objective: str, channels: int) -> AugmentConfig:
    """Nothing is mixed or wiped out. MAE: crops and mirror images only (He et al. 2022, appendix A.1). DINO: other
    light and colours as well (Caron et al. 2021; no blur, which leaves little of 32 pixels); `dino` says the crops."""
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
        raise UserError(f"data.augment.{name} mixes labels, and train.objective={objective} has none. Leave it out.")
    for name in ("crop_scale",) if objective == "dino" else ("erase",):
        if getattr(asked, name):
            why = (
                "DINO's crops are set by dino.global_crops_scale and dino.local_crops_scale"
                if objective == "dino"
                else "MAE would have to reconstruct what was erased"
            )
            raise UserError(f"data.augment.{name}={getattr(asked, name)}: {why}.")
