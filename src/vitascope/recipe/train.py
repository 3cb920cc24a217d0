"""How to train: every setting of the optimisation, checked when it is made, without torch."""

from dataclasses import dataclass, field

from vitascope.errors import UserError, did_you_mean, speaks_for_itself

OBJECTIVES = ("classify", "dino", "mae")
CHOICES = {
    "objective": OBJECTIVES,
    "optimizer": ("adamw", "muon"),
    "distill_type": ("soft", "hard"),
    "tune": ("full", "head", "lora"),
    "schedule": ("cosine", "linear", "constant"),
    "precision": ("auto", "float32", "bfloat16", "float16"),
    "compile": ("auto", "always", "never"),  # not yes and no: YAML reads those as true and false
    "cuda_graph": ("auto", "always", "never"),
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
    grad_accum_steps: int = 1  # gradient accumulation steps (less memory, same result)
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
    patch_share: float = 1.0  # fraction of each image's patches used at first, at random (Liu et al. 2023); 1: all
    patch_share_until: float = 0.5  # fraction of the epochs for which patch_share holds
    whiten: bool = False  # the patch projection starts on whitened patches: as if all directions varied equally
    ema: float = 0.0  # decay of the averaged weights, 0: none; such as 0.999; at step t at most (1 + t) / (10 + t)
    layer_decay: float = 1.0  # rate factor per layer counted from the head (BEiT); 1: all equal
    tune: str = "full"  # what of pretrained weights learns: full (all), head (linear probe), lora (and the head)
    freeze: int = 0  # the embedding and so many blocks stay as they are, 0: none
    lora_rank: int = 8  # LoRA (Hu et al. 2022): width of what is added to the query and value projections
    lora_alpha: float = 16.0  # its strength is lora_alpha / lora_rank
    distill: str | None = None  # a teacher whose answers are learnt too: a run, timm:NAME, hf:REPO, a file, a folder
    distill_type: str = "soft"  # soft (its probabilities), hard (its choice)
    distill_alpha: float = 0.5  # of the loss; the rest is the labels'
    distill_temperature: float = 1.0  # softens both sides' probabilities; for soft
    probe_every: int = 0  # dino, mae: epochs between two evaluations by k-NN and linear probe; 0: about ten in all
    patience: int = 0  # stop after so many epochs without a better validation accuracy, 0: never
    seed: int = 0  # for the split, the start weights, the order and every draw
    device: str = "auto"  # auto, cpu, cuda, mps
    precision: str = "auto"  # auto, float32, bfloat16, float16
    compile: str = "auto"  # auto (only where it pays back), always, never
    cuda_graph: str = "auto"  # run the whole step as one CUDA graph: auto (on CUDA), always, never
    threads: int = 0  # of the CPU, 0: all, or one for small models, which would only wait for each other
    save_seconds: float = 30.0  # how often resume.pt is written, at the end of an epoch
    weight_snapshots: int = 0  # copies of the weights saved during training, evenly over the epochs; 0: none
    track: list[str] = field(default_factory=list)  # besides TensorBoard: wandb, mlflow (extras)

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        object.__setattr__(self, "track", list(self.track))
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                said = str(getattr(self, name))
                raise UserError(f"train.{name}={said!r} is unknown. {did_you_mean(said, choices)}")
        for name in ("epochs", "batch_size", "grad_accum_steps", "lora_rank"):
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
            "weight_snapshots",
            "freeze",
            "probe_every",
        ):
            if not getattr(self, name) >= 0:
                raise UserError(f"train.{name}={getattr(self, name)} must be 0 or more.")
        for name, most in (("seed", 2**31), ("threads", 1024)):
            if getattr(self, name) > most:
                raise UserError(f"train.{name}={getattr(self, name)} must be at most {most}.")
        for name in ("warmup", "final_lr", "distill_alpha", "patch_share_until"):
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
        if self.batch_size % self.grad_accum_steps:
            raise UserError(
                f"train.grad_accum_steps={self.grad_accum_steps} does not divide train.batch_size={self.batch_size}."
            )
        if self.final_lr and self.schedule == "constant":
            raise UserError(f"train.final_lr={self.final_lr}: with train.schedule=constant the rate never falls.")
        if self.final_weight_decay is not None and self.final_weight_decay < 0:
            raise UserError(f"train.final_weight_decay={self.final_weight_decay} must be 0 or more.")
        if self.weight_snapshots > self.epochs:
            raise UserError(
                f"train.weight_snapshots={self.weight_snapshots} must be at most train.epochs={self.epochs}."
            )
        if unknown := [name for name in self.track if name not in TRACKERS]:
            raise UserError(f"train.track: there is no {unknown[0]!r}. {did_you_mean(unknown[0], TRACKERS)}")

    @property
    def watched_every(self) -> int:
        """Epochs from one look at the features to the next."""
        return self.probe_every or max(1, self.epochs // 10)

    @property
    def patch_share_epochs(self) -> int:
        """How many epochs use only patch_share of the patches: at least one, never the last."""
        if self.patch_share == 1:
            return 0
        return min(self.epochs - 1, max(1, round(self.patch_share_until * self.epochs)))

    def seen_patches(self, patches: int) -> int:
        """patch_share: how many of an image's patches that is, one at least."""
        return max(1, round(self.patch_share * patches))

    @property
    def kept_epochs(self) -> set[int]:
        """After which epochs the weights are kept: the first, the last, and evenly between."""
        if self.weight_snapshots < 2:
            return {self.epochs} if self.weight_snapshots else set()
        return {
            round(1 + step * (self.epochs - 1) / (self.weight_snapshots - 1)) for step in range(self.weight_snapshots)
        }
