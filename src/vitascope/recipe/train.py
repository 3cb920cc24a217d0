"""How to train: every setting of the optimisation, checked when it is made, without torch."""

from dataclasses import dataclass, field

from vitascope.errors import UserError, did_you_mean, speaks_for_itself

OBJECTIVES = ("classify", "dino", "mae")
CHOICES = {
    "objective": OBJECTIVES,
    "optimizer": ("adamw", "muon"),
    "distill_how": ("soft", "hard"),
    "tune": ("full", "head", "lora"),
    "schedule": ("cosine", "linear", "constant"),
    "precision": ("auto", "float32", "bfloat16", "float16"),
    "compile": ("auto", "always", "never"),  # not yes and no: YAML reads those as true and false
    "capture": ("auto", "always", "never"),
    "device": ("auto", "cpu", "cuda", "mps"),
}
TRACKERS = ("wandb", "mlflow")


@speaks_for_itself
@dataclass(frozen=True)
class TrainConfig:
    """The defaults train a small ViT from scratch on a small data set."""

    objective: str = "classify"  # classify (by labels); without labels: dino (Caron et al. 2021), mae (He et al. 2022)
    epochs: int = 100  # passes over the training images
    batch_size: int = 128  # images per step of the optimizer; the last, smaller batch of an epoch is left out
    accumulate: int = 1  # parts in which a batch is worked off: less memory, same result
    optimizer: str = "adamw"  # adamw, muon (block matrices by Muon, the rest by AdamW)
    lr: float = 1e-3  # AdamW's peak rate
    muon_lr: float = 0.02  # Muon's peak rate
    momentum: float = 0.95  # Muon's
    betas: tuple[float, float] = (0.9, 0.999)  # AdamW's
    weight_decay: float = 0.05  # on matrices only: not on biases, norms, tokens, positions
    final_weight_decay: float | None = None  # reached by a cosine at the end; none: weight_decay throughout
    schedule: str = "cosine"  # after the warm-up: cosine, linear, constant
    warmup: float = 0.1  # share of all steps in which the rate rises linearly from 0
    final_lr: float = 0.0  # the rate at the end, as a share of the peak
    clip_grad: float = 1.0  # largest norm of all gradients together, 0: no limit
    label_smoothing: float = 0.1
    small_size: int = 0  # pixels of a side at first: images are made smaller, so learning is faster; 0: never
    patch_share: float = 1.0  # of an image's patches that are seen at first, by chance (Liu et al. 2023); 1: all
    small_share: float = 0.5  # of the epochs: how long small_size or patch_share last
    whiten: bool = False  # the patch projection starts on whitened patches: as if all directions varied equally
    ema: float = 0.0  # decay of the averaged weights, 0: none; such as 0.999; at step t at most (1 + t) / (10 + t)
    layer_decay: float = 1.0  # rate factor per layer counted from the head (BEiT); 1: all equal
    tune: str = "full"  # what of pretrained weights learns: full (all), head (linear probe), lora (and the head)
    freeze: int = 0  # the embedding and so many blocks stay as they are, 0: none
    lora_rank: int = 8  # LoRA (Hu et al. 2022): width of what is added to the query and value projections
    lora_alpha: float = 16.0  # its strength is lora_alpha / lora_rank
    distill: str | None = None  # a teacher whose answers are learnt too: a run, timm:NAME, hf:REPO, a file, a folder
    distill_how: str = "soft"  # soft (its probabilities), hard (its choice)
    distill_share: float = 0.5  # of the loss; the rest is the labels'
    distill_temperature: float = 1.0  # softens both sides' probabilities; for soft
    watch: int = 0  # without labels: neighbours and linear probe every so many epochs, 0: about ten times in all
    patience: int = 0  # stop after so many epochs without a better validation accuracy, 0: never
    seed: int = 0  # for the split, the start weights, the order and every draw
    device: str = "auto"  # auto, cpu, cuda, mps
    precision: str = "auto"  # auto, float32, bfloat16, float16
    compile: str = "auto"  # auto (only where it pays back), always, never
    capture: str = "auto"  # record the whole step as one CUDA graph: auto (on CUDA), always, never
    threads: int = 0  # of the CPU, 0: all, or one for small models, which would only wait for each other
    save_seconds: float = 30.0  # how often resume.pt is written, at the end of an epoch
    keep: int = 0  # copies of the weights kept on the way, evenly over the epochs, to see what changed; 0: none
    track: list[str] = field(default_factory=list)  # besides TensorBoard: wandb, mlflow (extras)

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        object.__setattr__(self, "track", list(self.track))
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                said = str(getattr(self, name))
                raise UserError(f"train.{name}={said!r} is unknown. {did_you_mean(said, choices)}")
        for name in ("epochs", "batch_size", "accumulate", "lora_rank"):
            if getattr(self, name) < 1:
                raise UserError(f"train.{name}={getattr(self, name)} must be at least 1.")
        for name in ("lr", "muon_lr", "layer_decay", "lora_alpha", "distill_temperature"):
            if not getattr(self, name) > 0:
                raise UserError(f"train.{name}={getattr(self, name)} must be greater than 0.")
        for name in (
            "weight_decay",
            "clip_grad",
            "patience",
            "save_seconds",
            "seed",
            "threads",
            "keep",
            "freeze",
            "watch",
            "small_size",
        ):
            if not getattr(self, name) >= 0:
                raise UserError(f"train.{name}={getattr(self, name)} must be 0 or more.")
        for name, most in (("seed", 2**31), ("threads", 1024)):
            if getattr(self, name) > most:
                raise UserError(f"train.{name}={getattr(self, name)} must be at most {most}.")
        for name in ("warmup", "final_lr", "distill_share", "small_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"train.{name}={getattr(self, name)} is a share: at least 0 and at most 1.")
        if not 0 < self.patch_share <= 1:
            raise UserError(f"train.patch_share={self.patch_share} is a share: above 0 and at most 1.")
        for name in ("ema", "momentum", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"train.{name}={getattr(self, name)} must be at least 0 and below 1.")
        self._check_together()

    def _check_together(self) -> None:
        if self.layer_decay > 1:
            raise UserError(
                f"train.layer_decay={self.layer_decay} is a factor per layer, at most 1: 1 makes all equal."
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"train.betas={list(self.betas)} must be at least 0 and below 1.")
        if self.batch_size % self.accumulate:
            raise UserError(f"train.accumulate={self.accumulate} does not divide train.batch_size={self.batch_size}.")
        if self.final_lr and self.schedule == "constant":
            raise UserError(f"train.final_lr={self.final_lr}: with train.schedule=constant the rate never falls.")
        if self.final_weight_decay is not None and self.final_weight_decay < 0:
            raise UserError(f"train.final_weight_decay={self.final_weight_decay} must be 0 or more.")
        if self.keep > self.epochs:
            raise UserError(f"train.keep={self.keep} must be at most train.epochs={self.epochs}.")
        if unknown := [name for name in self.track if name not in TRACKERS]:
            raise UserError(f"train.track: there is no {unknown[0]!r}. {did_you_mean(unknown[0], TRACKERS)}")

    @property
    def watched_every(self) -> int:
        """Epochs from one look at the features to the next."""
        return self.watch or max(1, self.epochs // 10)

    @property
    def sees_less(self) -> bool:
        """Whether less of each image is seen at first, by either setting."""
        return bool(self.small_size) or self.patch_share < 1

    @property
    def small_epochs(self) -> int:
        """How many epochs are learnt on less of each image: one at least, and the last never."""
        return min(self.epochs - 1, max(1, round(self.small_share * self.epochs))) if self.sees_less else 0

    def seen_patches(self, patches: int) -> int:
        """patch_share: how many of an image's patches that is, one at least."""
        return max(1, round(self.patch_share * patches))

    @property
    def kept_epochs(self) -> set[int]:
        """After which epochs the weights are kept: the first, the last, and evenly between."""
        if self.keep < 2:
            return {self.epochs} if self.keep else set()
        return {round(1 + step * (self.epochs - 1) / (self.keep - 1)) for step in range(self.keep)}
