"""The settings that are trained, and the names that changed since older commits.

Settings are written in the working tree's names. When you rename a setting, an option, a value or a metric, change it
here and add the old name to the tables below.
"""

from pathlib import Path

import numpy as np

from benchmarks.same_numbers.worker import RUN, Rename, Setting

RENAMES = [
    Rename("train.grad_accum_steps", old="train.accumulate"),
    Rename("train.cuda_graph", old="train.capture"),
    Rename("data.passes_per_epoch", old="data.repeat"),
    Rename("--batch-runs", old="--together"),
]
METRIC_RENAMES: list[Rename] = []  # Rename("batched_runs", old="together")
ADDED_METRICS: frozenset[str] = frozenset()  # only the working tree writes them, and they are meant to be new
REMOVED_METRICS: frozenset[str] = frozenset()  # only older trees write them, and they are meant to be gone

CUDA_STEPS, CUDA_BATCH, CUDA_PASSES = 20, 528, 5  # passes per epoch, whatever the recipe has
NUM_IMAGES = {"cpu": 320, "cuda": CUDA_STEPS * CUDA_BATCH // CUDA_PASSES}

ON_CPU = {"train.device": "cpu", "train.precision": "float32", "train.threads": 1, "train.compile": "never"}
SMALL = ON_CPU | {"model.embed_dim": 16, "model.depth": 2, "model.num_heads": 2, "train.epochs": 2}
DIGITS = SMALL | {"train.batch_size": 64}
ADAMW = DIGITS | {"train.optimizer": "adamw", "train.ema": 0}
PHOTOS = SMALL | {"model.patch_size": 8, "train.batch_size": 32}
MUON = {
    "train.optimizer": "muon",
    "train.ema": 0.9,
    "model.positions": "rotary",
    "model.norm": "rmsnorm",
    "model.mlp": "relu2",
    "model.drop_path_rate": 0.2,
    "data.augment.mixup": 0.4,
}
CLASS_TOKEN = {
    "model.class_token": True,
    "model.global_pool": "token",
    "model.reg_tokens": 2,
    "model.positions": "learned",
    "model.mlp": "swiglu",
    "model.init_values": 0.1,
    "model.grad_checkpointing": True,
}
COLOURS = {
    "data.augment.randaugment": 2,
    "data.augment.brightness": 0.4,
    "data.augment.contrast": 0.4,
    "data.augment.saturation": 0.4,
    "data.augment.hue": 0.1,
    "data.augment.erase": 0.5,
    "data.augment.cutmix": 1.0,
}
ON_CUDA = {
    "train.device": "cuda",
    "train.batch_size": CUDA_BATCH,
    "train.epochs": 1,
    "train.cuda_graph": "always",
    "data.passes_per_epoch": CUDA_PASSES,
    "data.validation": 0,
}

CPU_SETTINGS = [
    Setting("plain", "digits", ADAMW),
    Setting("muon", "digits", DIGITS | MUON),
    Setting("dino", "digits-dino", DIGITS),
    Setting("mae", "digits-mae", DIGITS),
    Setting("distill", "digits", ADAMW | {"train.distill": RUN}, starts_from="plain"),
    Setting(
        "lora", "digits", ADAMW | {"weights": RUN, "train.tune": "lora", "train.lora_rank": 2}, starts_from="plain"
    ),
    Setting("spt-lsa", "digits", ADAMW | {"model.tokenizer": "spt", "model.attention": "lsa"}),
    Setting(
        "study",
        "digits",
        DIGITS | {"train.lr": "0.001,0.004"},
        kind="study",
        options={"--seeds": 2, "--batch-runs": 4},
        expected_metric="together",
    ),
    Setting(
        "accumulate",
        "digits",
        ADAMW | CLASS_TOKEN | {"train.grad_accum_steps": 4, "train.clip_grad": 0.5, "train.layer_decay": 0.8},
    ),
    Setting("resume", "digits", DIGITS | MUON | {"train.epochs": 3, "model.proj_drop_rate": 0.1}, kind="resume"),
    Setting("colours", "cifar10", PHOTOS | COLOURS),
    Setting("whiten", "cifar10-94", PHOTOS | {"data.passes_per_epoch": CUDA_PASSES}),
    Setting("balance", "digits", ADAMW | {"data.balance": "sampling", "model.tokenizer": "conv"}),
    Setting("patches", "digits", ADAMW | {"train.patch_share": 0.5, "model.initialize": "mimetic"}),
]
CUDA_SETTINGS = [
    Setting("graph", "cifar10-94", ON_CUDA),
    Setting("graph-compiled", "cifar10-94", ON_CUDA | {"train.compile": "always"}),
]
SETTINGS = {"cpu": CPU_SETTINGS, "cuda": CUDA_SETTINGS}


def write_random_images(folder: Path, num_images: int) -> None:
    """Write cifar10.npz: noise whose mean depends on the class, the same on every machine."""
    generator = np.random.default_rng(0)
    labels = np.arange(num_images, dtype=np.uint8) % 10
    noise = generator.integers(0, 128, (num_images, 32, 32, 3), dtype=np.uint8)
    shade = (labels[:, None, None, None] * np.array([12, 7, 3])).astype(np.uint8)
    images = noise + shade
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "cifar10.npz", x_train=images, y_train=labels, x_test=images[:20], y_test=labels[:20])
