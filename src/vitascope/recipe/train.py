"""Settings of the training, checked on construction, without importing torch."""

from dataclasses import dataclass, field

from vitascope.errors import UserError, skip_beartype, suggest_choice
from vitascope.recipe.choices import LABELLED_OBJECTIVE, OBJECTIVES, OPTIMIZERS

CHOICES = {
    "objective": tuple(OBJECTIVES),
    "optimizer": tuple(OPTIMIZERS),
    "distill_type": ("soft", "hard"),
    "tune": ("full", "head", "lora"),
    "head_init": ("random", "linear_probe"),
    "schedule": ("cosine", "linear", "constant"),
    "precision": ("auto", "float32", "bfloat16", "float16"),
    "compile": ("auto", "always", "never"),  # not yes or no, which YAML reads as true or false
    "cuda_graph": ("auto", "always", "never"),
    "device": ("auto", "cpu", "cuda", "mps"),
}
TRACKER_NAMES = ("wandb", "mlflow")


@skip_beartype
@dataclass(frozen=True)
class TrainConfig:
    """The defaults train a small ViT from scratch on a small data set."""

    objective: str = LABELLED_OBJECTIVE  # classify; without labels: the other names in recipe/choices.py
    epochs: int = 100  # number of epochs, each with data.passes_per_epoch passes over the training images
    batch_size: int = 128  # images per step; reduced if more than 5 % of the images would be left out of an epoch
    grad_accum_steps: int = 1  # gradient accumulation steps (less memory, same result)
    optimizer: str = "adamw"  # the names in recipe/choices.py
    lr: float = 1e-3  # peak learning rate of all optimizers but Muon; see also the notes in recipe/choices.py
    muon_lr: float = 0.02  # peak learning rate of Muon
    momentum: float = 0.95  # momentum of Muon
    betas: tuple[float, float] = (0.9, 0.999)  # of all optimizers but Muon
    weight_decay: float = 0.05  # for matrices only, not for biases, norms, tokens and positions
    final_weight_decay: float | None = None  # weight decay at the end of a cosine schedule; null: constant
    schedule: str = "cosine"  # learning rate after the warm-up: cosine, linear, constant
    warmup: float = 0.1  # fraction of all steps in which the learning rate rises linearly from 0
    final_lr: float = 0.0  # learning rate at the end, as a fraction of the peak
    clip_grad: float = 1.0  # gradient clipping: largest global norm; 0: off
    label_smoothing: float = 0.1  # label smoothing of the cross-entropy
    patch_share: float = (
        1.0  # patch dropout: fraction of the patches kept in the first epochs (Liu et al. 2023); 1: off
    )
    patch_share_until: float = 0.5  # fraction of the epochs with patch_share
    whiten: bool = False  # initialize the patch projection with whitening, computed from training images
    ema: float = 0.0  # EMA decay of the weights, such as 0.999; at step t at most (1 + t) / (10 + t); 0: off
    layer_decay: float = 1.0  # learning rate factor per layer, counted from the head (BEiT); 1: off
    tune: str = "full"  # fine-tuning of pretrained weights: full, head (linear probe), lora (LoRA and the head)
    head_init: str = "random"  # new classifier of pretrained weights: random, linear_probe (Kumar et al. 2022)
    freeze: int = 0  # freeze the patch embedding and this many blocks; 0: none
    lora_rank: int = 8  # rank of LoRA in the query and value projections (Hu et al. 2022)
    lora_alpha: float = 16.0  # LoRA is scaled by lora_alpha / lora_rank
    distill: str | None = None  # distillation teacher: a run, timm:NAME, hf:REPO, a file, a folder; null: none
    distill_type: str = "soft"  # soft (the teacher's probabilities), hard (its predicted class)
    distill_alpha: float = 0.5  # weight of distillation in the loss; the labels have the rest
    distill_temperature: float = 1.0  # temperature of teacher and student, for distill_type=soft
    probe_every: int = 0  # without labels: epochs between evaluations by k-NN and linear probe; 0: about ten in total
    patience: int = 0  # early stopping: epochs without a better validation accuracy; 0: off
    seed: int = 0  # random seed of the split, the initial weights, the order and the augmentation
    device: str = "auto"  # auto, cpu, cuda, mps
    precision: str = "auto"  # auto, float32, bfloat16, float16
    compile: str = "auto"  # torch.compile: auto (only if it saves time), always, never
    cuda_graph: str = "auto"  # run the whole step as one CUDA graph: auto (on CUDA), always, never
    threads: int = 0  # CPU threads; 0: all, or one for small models, which are faster with one
    save_seconds: float = 30.0  # seconds between checkpoints (resume.pt), also within epochs; 0: after every epoch
    weight_snapshots: int = 0  # copies of the weights saved during training, evenly spaced; 0: none
    track: list[str] = field(default_factory=list)  # trackers besides TensorBoard: wandb, mlflow

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        object.__setattr__(self, "track", list(self.track))
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                value = str(getattr(self, name))
                raise UserError(f"train.{name}={value!r} is unknown. {suggest_choice(value, choices)}")
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
                hint = " (a fraction of the training, not epochs)" if name in ("warmup", "patch_share_until") else ""
                raise UserError(f"train.{name}={getattr(self, name)} must be at least 0 and at most 1{hint}.")
        if not 0 < self.patch_share <= 1:
            raise UserError(f"train.patch_share={self.patch_share} must be greater than 0 and at most 1.")
        for name in ("ema", "momentum", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"train.{name}={getattr(self, name)} must be at least 0 and below 1.")
        self._check_setting_combinations()

    def _check_setting_combinations(self) -> None:
        if self.layer_decay > 1:
            raise UserError(
                f"train.layer_decay={self.layer_decay} must be at most 1. 1 gives all layers the same learning rate."
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"train.betas={list(self.betas)} must be at least 0 and below 1.")
        if self.batch_size % self.grad_accum_steps:
            divisors = [str(count) for count in range(1, self.batch_size + 1) if self.batch_size % count == 0]
            raise UserError(
                f"train.grad_accum_steps={self.grad_accum_steps} does not divide train.batch_size={self.batch_size}. "
                f"Each batch is split into {self.grad_accum_steps} parts; choose {', '.join(divisors)}."
            )
        if self.final_lr and self.schedule == "constant":
            raise UserError(
                f"train.final_lr={self.final_lr} has no effect with train.schedule=constant. Remove one of them."
            )
        if self.final_weight_decay is not None and self.final_weight_decay < 0:
            raise UserError(f"train.final_weight_decay={self.final_weight_decay} must be 0 or more.")
        if self.weight_snapshots > self.epochs:
            raise UserError(
                f"train.weight_snapshots={self.weight_snapshots} must be at most train.epochs={self.epochs}."
            )
        if unknown := [name for name in self.track if name not in TRACKER_NAMES]:
            raise UserError(f"train.track={unknown[0]} is unknown. {suggest_choice(unknown[0], TRACKER_NAMES)}")

    @property
    def uses_labels(self) -> bool:
        """Whether the training has labels. Without them, a linear probe is fitted for the evaluation."""
        return self.objective == LABELLED_OBJECTIVE

    @property
    def probe_interval(self) -> int:
        """Epochs between two evaluations of the features."""
        return self.probe_every or max(1, self.epochs // 10)

    @property
    def num_patch_dropout_epochs(self) -> int:
        """Number of epochs with patch dropout: at least one, never the last."""
        if self.patch_share == 1:
            return 0
        return min(self.epochs - 1, max(1, round(self.patch_share_until * self.epochs)))

    def count_kept_patches(self, num_patches: int) -> int:
        """Return the number of patches that patch_share keeps, at least one."""
        return max(1, round(self.patch_share * num_patches))

    @property
    def snapshot_epochs(self) -> set[int]:
        """Epochs after which the weights are saved: the first, the last, and evenly spaced between."""
        if self.weight_snapshots < 2:
            return {self.epochs} if self.weight_snapshots else set()
        return {
            round(1 + step * (self.epochs - 1) / (self.weight_snapshots - 1)) for step in range(self.weight_snapshots)
        }
