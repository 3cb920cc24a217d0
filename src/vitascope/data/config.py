"""Settings of the data and its augmentation, checked on construction, without importing torch."""

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
    """Random augmentation of training images, drawn per image. null: the default of the data set."""

    flip: float | None = None  # probability of a left-right flip; must be 0 for digits and mnist
    flip_mode: str | None = None  # random; alternating (random in the first pass, then every other pass; Jordan 2024)
    shift: int | None = None  # random shift: at most this many pixels in each direction
    shift_fill: str | None = None  # fill at the edge after a shift: zero, reflect
    crop_scale: tuple[float, float] | None = None  # random resized crop: range of its area; [1,1]: no crop
    rotate: float | None = None  # random rotation: at most this many degrees in each direction
    scale: float | None = None  # random zoom: factor drawn from 1 ± this value
    brightness: float | None = None  # random factor drawn from 1 ± this value; the same for contrast and saturation
    contrast: float | None = None
    saturation: float | None = None
    hue: float | None = None  # random hue shift: at most this fraction of the colour circle
    grayscale: float | None = None  # probability of conversion to grayscale
    solarize: float | None = None  # probability of solarization: pixels above half brightness are inverted
    randaugment: int | None = None  # RandAugment operations per image (Cubuk et al. 2020); 0: off
    magnitude: float | None = None  # magnitude of RandAugment, 0 to 30, as in torchvision
    erase: float | None = None  # probability of random erasing (Zhong et al. 2020)
    erase_area: float | None = None  # random erasing: largest area, as a fraction of the image
    mixup: float | None = None  # Beta parameter of MixUp (Zhang et al. 2018); 0: off
    cutmix: float | None = None  # Beta parameter of CutMix (Yun et al. 2019); 0: off
    mix_prob: float | None = None  # probability of MixUp or CutMix; with both on, each is equally likely

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
            object.__setattr__(self, "crop_scale", check_scale("data.augment.crop_scale", self.crop_scale))
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
        """The settings that change an image: values other than 0, without details of a setting that is 0."""
        needs = {"magnitude": self.randaugment, "erase_area": self.erase}
        needs["mix_prob"] = self.mixup or self.cutmix
        said = {item.name: getattr(self, item.name) for item in fields(self)}
        used = {k: v for k, v in said.items() if isinstance(v, int | float) and v and needs.get(k, True)}
        return used | ({"crop_scale": self.crop_scale} if self.crop_scale and self.crops else {})

    @property
    def description(self) -> str:
        """The settings that change an image, as text: "flip 0.5, shift 4"."""
        return ", ".join(
            f"{name} {value:g}" if isinstance(value, int | float) else f"{name} {value[0]:g} to {value[1]:g}"
            for name, value in self.in_effect.items()
        )

    def filled_from(self, policy: "AugmentConfig") -> "AugmentConfig":
        """These settings, with missing ones taken from the policy."""
        own = {item.name: getattr(self, item.name) for item in fields(self)}
        return AugmentConfig(**{k: getattr(policy, k) if v is None else v for k, v in own.items()})


@speaks_for_itself
@dataclass(frozen=True)
class DataConfig:
    """The data set and the part of it to use."""

    name: str = "digits"  # digits, mnist, fashion-mnist, cifar10, cifar100, a folder of class folders, or a .npz file
    root: str | None = None  # folder of the named data sets; null: $VITASCOPE_DATA, else the user's cache folder
    download: bool = True  # download a named data set if it is missing
    validation: float = 0.1  # fraction of the training images held out for validation; stratified, drawn from the seed
    fraction: float = 1.0  # fraction of the remaining training images to use; stratified, drawn from the seed
    passes_per_epoch: int = 1  # passes over the training images per epoch; more than 1 saves time on small data sets
    balance: str = "none"  # for imbalanced classes: none, loss (class weights), sampling (classes equally often)
    strict: bool = False  # true: an unreadable image is an error; false: it is reported and skipped
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


def check_scale(name: str, value: tuple[float, float]) -> tuple[float, float]:
    """Return a crop's range of areas as a tuple. Raise an error if it is not a range of fractions."""
    found = tuple(value)
    if len(found) != 2 or not 0 < found[0] <= found[1] <= 1:
        raise UserError(f"{name}={list(found)} must be a range [from,to] of areas with 0 < from ≤ to ≤ 1.")
    return found
