"""What to train on and how to vary it: every setting of the data, checked when it is made, without torch."""

from dataclasses import dataclass, field, fields

from vitascope.errors import UserError, did_you_mean, speaks_for_itself

BALANCES = ("none", "loss", "sampling")
FILLS = ("zero", "reflect")
FLIPS = ("chance", "turns")


@speaks_for_itself
@dataclass(frozen=True)
class AugmentConfig:
    """How images are varied while training, each image by its own draw; null: as the data set's policy says."""

    flip: float | None = None  # share of images mirrored left to right (never for digits)
    flip_by: str | None = None  # chance, turns (by chance at first, then every other epoch: Jordan 2024)
    shift: int | None = None  # up to this many pixels in each direction
    shift_fill: str | None = None  # what comes in at the edge: zero, reflect
    crop: float | None = None  # smallest share of the area that is cut out and enlarged, 0: the whole image stays
    crop_most: float | None = None  # largest such share
    rotate: float | None = None  # turned by up to this many degrees either way
    scale: float | None = None  # stretched by a factor drawn from 1 ± this
    brightness: float | None = None  # factor drawn from 1 ± this; the same for contrast and saturation
    contrast: float | None = None
    saturation: float | None = None
    hue: float | None = None  # turned by up to this share of the colour circle
    grey: float | None = None  # share of images that lose their colours
    solarize: float | None = None  # share of images whose bright half is inverted
    randaugment: int | None = None  # operations per image (Cubuk et al. 2020), 0: none
    magnitude: float | None = None  # RandAugment's strength in torchvision's dialect, of 30
    erase: float | None = None  # share of images with a rectangle wiped out (Zhong et al. 2020)
    erase_area: float | None = None  # largest wiped share of an image
    mixup: float | None = None  # Beta parameter of MixUp (Zhang et al. 2018), 0: none
    cutmix: float | None = None  # Beta parameter of CutMix (Yun et al. 2019), 0: none
    mix_share: float | None = None  # share of images that are mixed; with both kinds, half each
    mix_until: float | None = None  # share of the training after which nothing is mixed any more

    def __post_init__(self) -> None:
        for name in ("flip", "crop", "crop_most", "grey", "solarize", "erase", "erase_area", "mix_share", "mix_until"):
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
        if self.crop and self.crop_most is not None and self.crop > self.crop_most:
            raise UserError(
                f"data.augment.crop={self.crop} is the smallest share, crop_most={self.crop_most} the largest."
            )
        for name, choices in (("shift_fill", FILLS), ("flip_by", FLIPS)):
            said = getattr(self, name)
            if said is not None and said not in choices:
                raise UserError(f"data.augment.{name}={said!r} is unknown. {did_you_mean(said, choices)}")

    @property
    def in_effect(self) -> dict[str, float]:
        """What really varies an image: not 0, and not the detail of something that is 0."""
        needs = {"crop_most": self.crop, "magnitude": self.randaugment, "erase_area": self.erase}
        needs["mix_share"] = self.mixup or self.cutmix
        needs["mix_until"] = needs["mix_share"] and self.mix_until != 1
        said = {item.name: getattr(self, item.name) for item in fields(self)}
        return {k: v for k, v in said.items() if isinstance(v, int | float) and v and needs.get(k, True)}

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
    repeat: int = 1  # an epoch goes over them so often: of few images an epoch's end costs more than its steps
    balance: str = "none"  # for unequal classes: none, loss (weighted), sampling (each class equally often)
    strict: bool = False  # true: a broken image is an error; false: it is named and skipped
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise UserError(f"data.validation={self.validation} must be at least 0 and below 1.")
        if not 0 < self.fraction <= 1:
            raise UserError(f"data.fraction={self.fraction} must be greater than 0 and at most 1.")
        if self.repeat < 1:
            raise UserError(f"data.repeat={self.repeat} must be at least 1.")
        if self.balance not in BALANCES:
            raise UserError(f"data.balance={self.balance!r} is unknown. {did_you_mean(self.balance, BALANCES)}")


def _check_between(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise UserError(f"data.augment.{name}={value} must be at least {low:g} and at most {high:g}.")
