"""`python -m benchmarks.pretrained --weights FILE`: training from scratch or from pretrained weights (sheet D).

The same network (DeiT-tiny) is trained on MNIST, CIFAR-10 and tiny10 for equally many epochs, with four starts: from
scratch on the images' own grid; from weights adapted to that grid; from weights adapted to a finer grid; with unchanged
weights on images resized to 224. `--tune` compares learning rates on a tenth of the training images. Without it, all
training images are used, and each run is evaluated once on the test images.
"""

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.__main__ import RESULTS_FOLDER
from benchmarks.records import write_record
from vitascope import open_model, train
from vitascope.model.anatomy import count_forward_flops_per_image


class DataSize(NamedTuple):
    image_size: int
    coarse_patch_size: int
    fine_patch_size: int
    num_channels: int
    epochs: int
    batch_size: int


DATA_SIZES = {
    "mnist": DataSize(28, 4, 2, 1, 5, 256),
    "cifar10": DataSize(32, 4, 2, 3, 10, 256),
    "tiny10": DataSize(64, 8, 4, 3, 20, 128),
}
MODEL_SETTINGS = {"embed_dim": 192, "depth": 12, "num_heads": 3, "drop_path_rate": 0.1}
ARMS = ("scratch", "adapted", "adapted, fine grid", "resized up")
BEST_LEARNING_RATES = {
    "scratch": 1e-3,
    "adapted": 1e-3,
    "adapted, fine grid": 1e-3,
    "resized up": 5e-4,
}  # the best of TRIED_LEARNING_RATES
TRIED_LEARNING_RATES = {
    "scratch": [1e-3],
    "adapted": [5e-4, 1e-3, 2e-3],
    "adapted, fine grid": [3e-4, 1e-3],
    "resized up": [1e-4, 5e-4],
}


def make_settings(data_name: str, arm_name: str, args: argparse.Namespace, learning_rate: float) -> dict[str, Any]:
    image, coarse, fine, channels, epochs, batch = DATA_SIZES[data_name]
    size = (224, 16) if arm_name == "resized up" else (image, fine if "fine" in arm_name else coarse)
    folder = args.photos / "train" if data_name == "tiny10" else data_name
    settings = {"data.name": folder, "data.validation": 0.1 if args.tune else 0, "model.in_chans": channels}
    settings |= {"model.img_size": size[0], "model.patch_size": size[1], "train.epochs": args.epochs or epochs}
    settings |= {f"model.{name}": value for name, value in MODEL_SETTINGS.items()} | {
        "train.batch_size": batch,
        "train.lr": learning_rate,
    }
    if data_name == "tiny10":  # the folder's default when the records were made
        settings |= {"data.augment.shift": 4, "data.augment.crop_scale": [1.0, 1.0]}
    if arm_name == "scratch":
        return settings | {"weights": None, "train.layer_decay": 1.0}
    return settings | {"weights": args.weights, "train.layer_decay": 0.75}


def train_and_measure(
    data_name: str, arm_name: str, seed: int, learning_rate: float, args: argparse.Namespace
) -> dict[str, Any]:
    start = time.perf_counter()
    settings = make_settings(data_name, arm_name, args, learning_rate) | {
        "train.seed": seed,
        "train.device": args.device,
    }
    run = train("cifar10-finetune", runs=args.runs, quiet=True, **settings)
    seconds, rows = time.perf_counter() - start, run.metrics
    if args.tune:
        score = rows[-1]["val_accuracy"]
    else:
        test_data = str(args.photos / "val") if data_name == "tiny10" else None
        score = open_model(run.path, device=args.device).evaluate(data=test_data).accuracy
    config = run.recipe.model
    row = {
        "data": data_name,
        "arm": arm_name,
        "seed": seed,
        "lr": learning_rate,
        "epochs": len(rows),
        "accuracy": round(score, 5),
    }
    row |= {"first_epoch_train_accuracy": round(rows[0]["train_accuracy"], 4), "cold_seconds": round(seconds, 1)}
    row |= {"seconds": round(sum(line["seconds"] for line in rows), 1), "grid": list(config.grid)}
    row |= {"images_per_second": rows[-1]["images_per_second"], "flops": count_forward_flops_per_image(config)}
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--photos", type=Path, default=Path("tiny10"), help="folder with train/ and val/")
    parser.add_argument("--data", nargs="+", choices=list(DATA_SIZES), default=list(DATA_SIZES))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument(
        "--tune", action="store_true", help="try learning rates, compared on a tenth of the training images"
    )
    parser.add_argument("--epochs", type=int, help="fewer epochs, for a trial")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--runs", type=Path, default=Path("runs-pretrained"))
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=RESULTS_FOLDER / "pretrained.json")
    args = parser.parse_args()
    args.weights = str(Path(args.weights).resolve()) if Path(args.weights).exists() else args.weights
    rows = []
    for data in args.data:
        for arm in args.arms:
            for rate in TRIED_LEARNING_RATES[arm] if args.tune else [BEST_LEARNING_RATES[arm]]:
                rows += [train_and_measure(data, arm, seed, rate, args) for seed in ([0] if args.tune else args.seeds)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = f"--data {' '.join(args.data)} --seeds {' '.join(map(str, args.seeds))}{' --tune' if args.tune else ''}"
    write_record(
        args.out,
        args.commit,
        command=f"python -m benchmarks.pretrained --weights FILE {options}",
        weights=Path(args.weights).name,
        device=device,
        rows=rows,
    )
    print(f"Record: {args.out}")


if __name__ == "__main__":
    main()
