"""Settings of the data, and the default augmentation of each data set, checked on construction, without torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

from vitascope.errors import UserError, skip_beartype, suggest_choice
from vitascope.number_format import format_percent

BALANCE_MODES = ("none", "loss", "sampling")
FINGERPRINT_MODES = ("names", "contents")
FILL_MODES = ("zero", "reflect")
NO_CROP = (1.0, 1.0)
FLIP_MODES = ("random", "alternating")
SETTING_TEXTS = {  # setting of AugmentConfig -> text with its unit
    "flip": "flip with probability {:g}",
    "shift": "shift up to {:g} pixels",
    "crop_scale": "crop of {} to {} of the area",
    "rotate": "rotation up to {:g}°",
    "scale": "zoom by 1 ± {:g}",
    "brightness": "brightness × (1 ± {:g})",
    "contrast": "contrast × (1 ± {:g})",
    "saturation": "saturation × (1 ± {:g})",
    "hue": "hue shift up to {:g} of the colour circle",
    "grayscale": "grayscale with probability {:g}",
    "solarize": "solarization with probability {:g}",
    "randaugment": "{:g} RandAugment operations",
    "magnitude": "RandAugment magnitude {:g} of 30",
    "erase": "random erasing with probability {:g}",
    "erase_area": "erased area up to {} of the image",
}  # `description` has those of mixup, cutmix and mix_prob in one phrase
MIXING_NAMES = {"mixup": "mixup", "cutmix": "CutMix"}


@skip_beartype
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
            _check_range(name, getattr(self, name), 0, 1)
        _check_range("rotate", self.rotate, 0, 180)
        _check_range("scale", self.scale, 0, 0.9)
        for name in ("brightness", "contrast", "saturation"):
            _check_range(name, getattr(self, name), 0, 1)
        _check_range("hue", self.hue, 0, 0.5)
        _check_range("magnitude", self.magnitude, 0, 30)
        _check_range("randaugment", self.randaugment, 0, 14)  # as many as there are operations
        for name in ("shift", "mixup", "cutmix"):
            _check_range(name, getattr(self, name), 0, 1000)
        if self.crop_scale is not None:
            object.__setattr__(
                self, "crop_scale", check_and_convert_crop_scale("data.augment.crop_scale", self.crop_scale)
            )
        for name, choices in (("shift_fill", FILL_MODES), ("flip_mode", FLIP_MODES)):
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise UserError(f"data.augment.{name}={value!r} is unknown. {suggest_choice(value, choices)}")

    @property
    def uses_crops(self) -> bool:
        """Whether images are cropped at random."""
        return self.crop_scale is not None and self.crop_scale != NO_CROP

    @property
    def active_settings(self) -> Mapping[str, float | tuple[float, float]]:
        """The settings that change an image: values other than 0, without details of a setting that is 0."""
        required = {"magnitude": self.randaugment, "erase_area": self.erase, "mix_prob": self.mixup or self.cutmix}
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        active = {k: v for k, v in values.items() if isinstance(v, int | float) and v and required.get(k, True)}
        return active | ({"crop_scale": self.crop_scale} if self.crop_scale and self.uses_crops else {})

    @property
    def description(self) -> str:
        """The settings that change an image, as text: "flip probability 0.5, shift up to 4 pixels"."""
        texts, active = [], self.active_settings
        for name, value in active.items():
            if name not in SETTING_TEXTS:
                continue
            values = (value,) if isinstance(value, int | float) else value
            if name in ("crop_scale", "erase_area"):
                values = (format_percent(fraction, 0) for fraction in values)
            text = SETTING_TEXTS[name].format(*values)
            texts.append(text.removesuffix("s") if text.endswith(" 1 pixels") else text)
        return ", ".join([*texts, *self._describe_mixing()])

    def _describe_mixing(self) -> list[str]:
        """Return for example ["CutMix on 50 % of the images (Beta parameter 1)"]; empty without mixing."""
        betas = {name: getattr(self, setting) for setting, name in MIXING_NAMES.items() if getattr(self, setting)}
        if not betas or self.mix_prob == 0:
            return []
        each = "" if len(betas) == 1 else ", each"
        where = "" if self.mix_prob is None else f"{each} on {100 * self.mix_prob / len(betas):.3g} % of the images"
        parameters = f"Beta parameter{'' if len(betas) == 1 else 's'} {' and '.join(f'{b:g}' for b in betas.values())}"
        return [f"{' or '.join(betas)}{where} ({parameters})"]

    def fill_missing_from(self, policy: "AugmentConfig") -> "AugmentConfig":
        """Return these settings, with missing ones taken from the policy."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return AugmentConfig(**{k: getattr(policy, k) if v is None else v for k, v in values.items()})


@skip_beartype
@dataclass(frozen=True)
class DataConfig:
    """The data set and the part of it to use."""

    name: str = "digits"  # digits, mnist, fashion-mnist, cifar10, cifar100, a folder of class folders, or a .npz file
    labels: str | None = None  # table of file, class (and split) for a folder of images without class folders
    root: str | None = None  # folder of the named data sets; null: $VITASCOPE_DATA, else the user's cache folder
    download: bool = True  # download a named data set if it is missing
    validation: float = 0.1  # fraction of the training images held out for validation; stratified, drawn from the seed
    fraction: float = 1.0  # fraction of the remaining training images to use; stratified, drawn from the seed
    passes_per_epoch: int = 1  # passes over the training images per epoch; more than 1 saves time on small data sets
    balance: str = "none"  # for imbalanced classes: none, loss (class weights), sampling (classes equally often)
    memory: float | None = None  # GiB: a larger folder is not loaded into memory; null: half of the free memory
    fingerprint: str = "names"  # of a folder: names (file names and sizes) or contents (all bytes); resume compares it
    strict: bool = False  # true: an unreadable image is an error; false: it is reported and skipped
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise UserError("data.name is empty. Set it to the name of a data set, a folder or an .npz file.")
        if not 0 <= self.validation < 1:
            raise UserError(f"data.validation={self.validation} must be at least 0 and below 1.")
        if not 0 < self.fraction <= 1:
            raise UserError(f"data.fraction={self.fraction} must be greater than 0 and at most 1.")
        if self.passes_per_epoch < 1:
            raise UserError(f"data.passes_per_epoch={self.passes_per_epoch} must be at least 1.")
        if self.balance not in BALANCE_MODES:
            raise UserError(f"data.balance={self.balance!r} is unknown. {suggest_choice(self.balance, BALANCE_MODES)}")
        if self.fingerprint not in FINGERPRINT_MODES:
            choices = suggest_choice(self.fingerprint, FINGERPRINT_MODES)
            raise UserError(f"data.fingerprint={self.fingerprint!r} is unknown. {choices}")
        if self.memory is not None and self.memory < 0:
            raise UserError(f"data.memory={self.memory} must be at least 0 (GiB).")


def _check_range(setting_name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise UserError(f"data.augment.{setting_name}={value} must be at least {low:g} and at most {high:g}.")


def check_and_convert_crop_scale(setting_name: str, crop_scale: tuple[float, float]) -> tuple[float, float]:
    """Return a crop's range of areas as a tuple. Raise an error if it is not a range of fractions."""
    areas = tuple(crop_scale)
    if len(areas) != 2 or not 0 < areas[0] <= areas[1] <= 1:
        raise UserError(f"{setting_name}={list(areas)} must be a range [from,to] of areas with 0 < from ≤ to ≤ 1.")
    return areas


NO_AUGMENTATION = AugmentConfig(
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
PHOTO_POLICY = replace(
    NO_AUGMENTATION, flip=0.5, shift=4, brightness=0.2, contrast=0.2, saturation=0.2, cutmix=1.0, mix_prob=0.5
)
SYMBOL_POLICY = replace(NO_AUGMENTATION, shift=2)  # a user's grayscale images may be symbols: no flips by default
POLICY_SIDE = 32  # pixels: the shifts of these two policies are for images with this side, and scale with it
MIN_CROP_SIDE = 64  # pixels: a user's photos of at least this side are cropped at random instead of shifted
PHOTO_CROP_SCALE = (0.35, 1.0)
POLICIES = {
    "digits": replace(NO_AUGMENTATION, shift=1, rotate=6.0, scale=0.05, mixup=0.8, mix_prob=0.8),
    "mnist": replace(NO_AUGMENTATION, shift=2, rotate=10.0, scale=0.1),
    "fashion-mnist": replace(NO_AUGMENTATION, flip=0.5, shift=2, erase=0.25, cutmix=1.0, mix_prob=0.5),
    "cifar10": PHOTO_POLICY,
    "cifar100": PHOTO_POLICY,
    "tiny10": PHOTO_POLICY,  # the folder of the recipe tiny10-finetune
}
DATASETS_WITHOUT_FLIPS = ("digits", "mnist")


def choose_default_policy(dataset_name: str, num_channels: int, image_size: tuple[int, int]) -> AugmentConfig:
    """Return the data set's policy. A user's own data gets that of photos or symbols, for this image size.

    `image_size`: rows and columns of the stored images, whose pixels are shifted."""
    if dataset_name in POLICIES:
        return POLICIES[dataset_name]
    policy, side = PHOTO_POLICY if num_channels == 3 else SYMBOL_POLICY, min(image_size)
    if num_channels == 3 and side >= MIN_CROP_SIDE:
        return replace(policy, shift=0, crop_scale=PHOTO_CROP_SCALE)
    return replace(policy, shift=max(1, round((policy.shift or 0) * side / POLICY_SIDE)))


def resolve_augmentation(
    requested: AugmentConfig,
    dataset_name: str,
    num_channels: int = 3,
    adapt_policy: Callable[[AugmentConfig, int], AugmentConfig] | None = None,
    image_size: tuple[int, int] = (POLICY_SIDE, POLICY_SIDE),
) -> AugmentConfig:
    """Complete the settings with the default policy for the data set and the size of its images.

    `adapt_policy` changes the policy for an objective, given the number of channels."""
    policy = choose_default_policy(dataset_name, num_channels, image_size)
    settings = requested.fill_missing_from(adapt_policy(policy, num_channels) if adapt_policy else policy)
    if dataset_name in DATASETS_WITHOUT_FLIPS and settings.flip:
        raise UserError(
            f"data.augment.flip={settings.flip} is not allowed for {dataset_name}: "
            "a mirrored digit is a different symbol. Set it to 0."
        )
    if settings.flip_mode == "alternating" and settings.flip not in (0.0, 0.5):
        raise make_alternating_flip_error(f"data.augment.flip={settings.flip} is not 0.5")
    return settings


def make_alternating_flip_error(reason: str) -> UserError:
    return UserError(
        f"data.augment.flip_mode=alternating flips an image in every other pass, but {reason}. Use flip_mode=random."
    )
