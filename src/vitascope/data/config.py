"""What to train on and how to vary it: every setting of the data, checked when it is made, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from vitascope.errors import UserError, did_you_mean, speaks_for_itself

BALANCES = ("none", "loss", "sampling")
FILLS = ("zero", "reflect")
NO_CROP = (1.0, 1.0)
FLIPS = ("random", "alternating")


@speaks_for_itself
@dataclass(frozen=True)
class AugmentConfig:
    """How images are varied while training, each image by its own draw; null: as the data set's policy says."""

    flip: float | None = None  # probability of a left-right flip (never for digits)
    flip_mode: str | None = None  # random; alternating (random in the first pass, then alternately: Jordan 2024)
    shift: int | None = None  # up to this many pixels in each direction
    shift_fill: str | None = None  # what comes in at the edge: zero, reflect
    crop_scale: tuple[float, float] | None = None  # random resized crop: its area, from … to; [1,1]: no crop
    rotate: float | None = None  # turned by up to this many degrees either way
    scale: float | None = None  # stretched by a factor drawn from 1 ± this
    brightness: float | None = None  # factor drawn from 1 ± this; the same for contrast and saturation
    contrast: float | None = None
    saturation: float | None = None
    hue: float | None = None  # turned by up to this share of the colour circle
    grayscale: float | None = None  # probability that an image loses its colours
    solarize: float | None = None  # probability that the bright half of an image is inverted
    randaugment: int | None = None  # operations per image (Cubuk et al. 2020), 0: none
    magnitude: float | None = None  # RandAugment's strength in torchvision's dialect, of 30
    erase: float | None = None  # probability of random erasing (Zhong et al. 2020)
    erase_area: float | None = None  # its largest area, as a fraction of the image
    mixup: float | None = None  # Beta parameter of MixUp (Zhang et al. 2018), 0: none
    cutmix: float | None = None  # Beta parameter of CutMix (Yun et al. 2019), 0: none
    mix_prob: float | None = None  # probability that an image is mixed; with both kinds, half each

    def __post_init__(self) -> None:
        for name in ("flip", "grayscale", "solarize", "erase", "erase_area", "mix_prob"):
            _check_between(name, getattr(self, name), 0, 1)
        _check_between("rotate", self.rotate, 0, 180)
        _check_between("scale", self.scale, 0, 0.9)
        for name in ("brightness", "contrast", "saturation"):
            _check_between(name, getattr(self, name), 0, 1)
        _check_between("hue", self.hue, 0, 0.5)
        _check_between("magnitude", self.magnitude, 0, 30)
        _check_between("randaugment", self.randaugment, 0, 14)  # as many as there are operations
        for name in ("shift", "mixup", "cutmix"):
            _check_between(name, getattr(self, name), 0, 1000)
        if self.crop_scale is not None:
            object.__setattr__(self, "crop_scale", _check_scale("data.augment.crop_scale", self.crop_scale))
        for name, choices in (("shift_fill", FILLS), ("flip_mode", FLIPS)):
            said = getattr(self, name)
            if said is not None and said not in choices:
                raise UserError(f"data.augment.{name}={said!r} is unknown. {did_you_mean(said, choices)}")

    @property
    def crops(self) -> bool:
        """Whether images are cropped at random."""
        return self.crop_scale is not None and self.crop_scale != NO_CROP

    @property
    def in_effect(self) -> Mapping[str, float | tuple[float, float]]:
        """What really varies an image: not 0, and not the detail of something that is 0."""
        needs = {"magnitude": self.randaugment, "erase_area": self.erase}
        needs["mix_prob"] = self.mixup or self.cutmix
        said = {item.name: getattr(self, item.name) for item in fields(self)}
        used = {k: v for k, v in said.items() if isinstance(v, int | float) and v and needs.get(k, True)}
        return used | ({"crop_scale": self.crop_scale} if self.crop_scale and self.crops else {})

    @property
    def description(self) -> str:
        """What varies an image, with its values: "flip 0.5, shift 4"."""
        return ", ".join(
            f"{name} {value:g}" if isinstance(value, int | float) else f"{name} {value[0]:g} to {value[1]:g}"
            for name, value in self.in_effect.items()
        )

    def filled_from(self, policy: "AugmentConfig") -> "AugmentConfig":
        """What is set here, and the policy for the rest."""
        own = {item.name: getattr(self, item.name) for item in fields(self)}
        return AugmentConfig(**{k: getattr(policy, k) if v is None else v for k, v in own.items()})


@speaks_for_itself
@dataclass(frozen=True)
class DataConfig:
    """Which images, and which part of them."""

    name: str = "digits"  # digits, mnist, fashion-mnist, cifar10, cifar100, a folder of class folders, or a .npz file
    root: str | None = None  # where named data lies; null: $VITASCOPE_DATA, else the user's cache folder
    download: bool = True  # fetch named data that is missing
    validation: float = 0.1  # share of the training images held back to watch the training, stratified, by seed
    fraction: float = 1.0  # share of the remaining training images used, stratified, by seed
    passes_per_epoch: int = 1  # passes over the training images per epoch; more than 1 saves time with few images
    balance: str = "none"  # for unequal classes: none, loss (weighted), sampling (each class equally often)
    strict: bool = False  # true: a broken image is an error; false: it is named and skipped
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise UserError(f"data.validation={self.validation} must be at least 0 and below 1.")
        if not 0 < self.fraction <= 1:
            raise UserError(f"data.fraction={self.fraction} must be greater than 0 and at most 1.")
        if self.passes_per_epoch < 1:
            raise UserError(f"data.passes_per_epoch={self.passes_per_epoch} must be at least 1.")
        if self.balance not in BALANCES:
            raise UserError(f"data.balance={self.balance!r} is unknown. {did_you_mean(self.balance, BALANCES)}")


def _check_between(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise UserError(f"data.augment.{name}={value} must be at least {low:g} and at most {high:g}.")


def _check_scale(name: str, value: tuple[float, float]) -> tuple[float, float]:
    found = tuple(value)
    if len(found) != 2 or not 0 < found[0] <= found[1] <= 1:
        raise UserError(f"{name}={list(found)} must be a range [low,high] of areas with 0 < low ≤ high ≤ 1.")
    return found
