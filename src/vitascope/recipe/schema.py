"""The schema of a recipe: what can be set, with its defaults; torch-free."""

from dataclasses import dataclass, field

from vitascope.data.config import DataConfig
from vitascope.errors import UserError, speaks_for_itself
from vitascope.model.config import ModelConfig
from vitascope.recipe.pretrain import DinoConfig, MaeConfig
from vitascope.recipe.train import TrainConfig


@speaks_for_itself
@dataclass(frozen=True)
class Recipe:
    """Everything a run is made of."""

    name: str = "run"  # a recipe's file name; runs are kept under it
    weights: str | None = None  # to start from: timm:NAME, hf:REPO, a file, a folder, a run; recipe:NAME: trained first
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    dino: DinoConfig = field(default_factory=DinoConfig)  # for train.objective=dino
    mae: MaeConfig = field(default_factory=MaeConfig)  # for train.objective=mae

    def __post_init__(self) -> None:
        if not self.name or any(sign in self.name for sign in "/\\:") or self.name.startswith("."):
            raise UserError(f"name={self.name!r} cannot name a folder of runs. Use letters, digits, - and _.")
        if self.train.patience and self.data.validation == 0:
            raise UserError("train.patience watches validation images, but data.validation=0 holds none back.")
        if self.weights is None and (self.train.tune != "full" or self.train.freeze):
            what = f"train.tune={self.train.tune}" if self.train.tune != "full" else f"train.freeze={self.train.freeze}"
            raise UserError(f"{what} keeps weights as they are, but there are none to keep. Give weights=….")
        if self.train.objective != "classify":
            self._check_without_labels()
        if self.data.augment.flip_mode == "alternating" and self.data.balance == "sampling":
            raise UserError(
                "data.augment.flip_mode=alternating needs epochs in turn; data.balance=sampling draws by chance: "
                "set data.augment.flip_mode=random."
            )
        if self.train.patch_share < 1:
            _check_patch_share(self.train, self.model)
        if self.train.whiten and (self.model.tokenizer != "patch" or self.weights):
            raise UserError(
                "train.whiten prepares a fresh projection of patches: only model.tokenizer=patch, no weights=…."
            )
        for name, config, plain in (("dino", self.dino, DinoConfig()), ("mae", self.mae, MaeConfig())):
            if config != plain and self.train.objective != name:
                raise UserError(
                    f"{name}.… is for train.objective={name}; this is train.objective={self.train.objective}."
                )

    def _check_without_labels(self) -> None:
        train, model, objective = self.train, self.model, self.train.objective
        plain = {"patience": 0, "distill": None, "tune": "full", "freeze": 0, "patch_share": 1.0}
        for name, wanted in plain.items():
            if getattr(train, name) != wanted:
                raise UserError(
                    f"train.{name}={getattr(train, name)} is for training with labels, not for train.objective="
                    f"{objective}. Leave it out."
                )
        if self.data.balance != "none":
            raise UserError(
                f"data.balance={self.data.balance} weighs labels, and train.objective={objective} has none."
            )
        if model.fewer:
            raise UserError(
                f"model.{next(iter(model.fewer))} is for answering; train.objective={objective} does without."
            )
        if objective == "dino":
            if train.ema:
                raise UserError(f"train.ema={train.ema}: with DINO the average is the teacher. Set train.ema=0.")
            if train.grad_accum_steps > 1 and self.dino.batch_norm:
                raise UserError(
                    f"train.grad_accum_steps={train.grad_accum_steps}: dino.batch_norm needs the whole batch."
                )
            _check_crops(self.dino, model)
        else:
            _check_masking(model)


def _check_patch_share(train: TrainConfig, model: ModelConfig) -> None:
    setting, seen = f"train.patch_share={train.patch_share}", train.seen_patches(model.num_patches)
    if not train.patch_share_until:
        raise UserError(f"{setting} has no effect with train.patch_share_until=0. Leave one of them out.")
    if train.patience:
        raise UserError(f"train.patience would count the epochs of {setting}. Leave one of them out.")
    if model.causal:
        raise UserError(f"{setting} drops patches, but causal=true needs all of them in order. Leave one of them out.")
    if seen == model.num_patches:
        raise UserError(f"{setting} of {model.num_patches} patches is all of them. Choose less, or leave it out.")
    if model.attention == "lsa" and seen + model.num_prefix_tokens < 2:
        raise UserError(
            f"{setting} of {model.num_patches} patches is one token, but attention=lsa needs at least two. Choose more."
        )


def _check_crops(dino: DinoConfig, model: ModelConfig) -> None:
    size, (rows, columns) = dino.local_size, model.patch_shape
    if dino.local_crops:
        if size % rows or size % columns or size > min(model.image_shape):
            raise UserError(
                f"dino.local_size={size} must be a multiple of patch_size={model.patch_size} and at most "
                f"img_size={model.img_size}."
            )
        _check_crop_positions(size, model)
    if dino.teacher_momentum == 1:
        raise UserError("dino.teacher_momentum=1: the teacher would never learn. The default is 0.996.")


def _check_crop_positions(size: int, model: ModelConfig) -> None:
    """Whether a model can take crops that have fewer patches than its own images."""
    rows, columns = model.patch_shape
    if model.absolute_positions == "sinusoidal":
        raise UserError("positions=sinusoidal do not fit smaller crops. Choose positions=sincos2d or learned.")
    if model.attention == "lsa" and (size // rows) * (size // columns) + model.num_prefix_tokens < 2:
        raise UserError(
            f"A crop of dino.local_size={size} is one token, but attention=lsa needs at least two. Choose more."
        )


def _check_masking(model: ModelConfig) -> None:
    if model.tokenizer != "patch":
        raise UserError(
            f"train.objective=mae hides patches, but tokenizer={model.tokenizer} shows each token its neighbours. "
            "Choose model.tokenizer=patch."
        )
    if model.causal:
        raise UserError("train.objective=mae gives the encoder patches from anywhere; causal=true needs all, in order.")
    if model.num_patches < 2:
        raise UserError("train.objective=mae hides some patches and shows others; the model has only one.")
