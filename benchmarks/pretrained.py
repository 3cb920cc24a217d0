"""`python -m benchmarks.pretrained --weights FILE`: training from scratch or from pretrained weights (sheet D).

The same network (DeiT-tiny) is trained on MNIST, CIFAR-10 and tiny10 for equally many epochs, with four starts: from
scratch on the images' own grid; from weights adapted to that grid; from weights adapted to a finer grid; with unchanged
weights on images resized to 224. `--tune` compares learning rates on a tenth of the training images. Without it, all
training images are used, and each run is evaluated once on the test images.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.__main__ import RESULTS
from benchmarks.records import write_record
from vitascope import load, train
from vitascope.model.anatomy import total_flops

SIZES = {  # image, patch of the coarse and of the fine grid, channels, epochs, batch
    "mnist": (28, 4, 2, 1, 5, 256),
    "cifar10": (32, 4, 2, 3, 10, 256),
    "tiny10": (64, 8, 4, 3, 20, 128),
}
SHAPE = {"embed_dim": 192, "depth": 12, "num_heads": 3, "drop_path_rate": 0.1}
ARMS = ("scratch", "adapted", "adapted, fine grid", "resized up")
RATES = {"scratch": 1e-3, "adapted": 1e-3, "adapted, fine grid": 1e-3, "resized up": 5e-4}  # the best of TRIED
TRIED = {
    "scratch": [1e-3],
    "adapted": [5e-4, 1e-3, 2e-3],
    "adapted, fine grid": [3e-4, 1e-3],
    "resized up": [1e-4, 5e-4],
}


def settings(data: str, arm: str, asked: argparse.Namespace, rate: float) -> dict[str, Any]:
    image, coarse, fine, channels, epochs, batch = SIZES[data]
    size = (224, 16) if arm == "resized up" else (image, fine if "fine" in arm else coarse)
    folder = asked.photos / "train" if data == "tiny10" else data
    chosen = {"data.name": folder, "data.validation": 0.1 if asked.tune else 0, "model.in_chans": channels}
    chosen |= {"model.img_size": size[0], "model.patch_size": size[1], "train.epochs": asked.epochs or epochs}
    chosen |= {f"model.{name}": value for name, value in SHAPE.items()} | {"train.batch_size": batch, "train.lr": rate}
    if arm == "scratch":
        return chosen | {"weights": None, "train.layer_decay": 1.0}
    return chosen | {"weights": asked.weights, "train.layer_decay": 0.75}


def measure(data: str, arm: str, seed: int, rate: float, asked: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    chosen = settings(data, arm, asked, rate) | {"train.seed": seed, "train.device": asked.device}
    run = train("cifar10-finetune", runs=asked.runs, quiet=True, **chosen)
    seconds, rows = time.perf_counter() - start, run.metrics
    if asked.tune:
        score = rows[-1]["val_accuracy"]
    else:
        judged = str(asked.photos / "val") if data == "tiny10" else None
        score = load(run.path, device=asked.device).evaluate(data=judged, robust=False).accuracy
    config = run.recipe.model
    row = {"data": data, "arm": arm, "seed": seed, "lr": rate, "epochs": len(rows), "accuracy": round(score, 5)}
    row |= {"first_epoch_train_accuracy": round(rows[0]["train_accuracy"], 4), "cold_seconds": round(seconds, 1)}
    row |= {"seconds": round(sum(line["seconds"] for line in rows), 1), "grid": list(config.grid)}
    row |= {"images_per_second": rows[-1]["images_per_second"], "flops": total_flops(config)}
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--photos", type=Path, default=Path("tiny10"), help="folder with train/ and val/")
    parser.add_argument("--data", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument(
        "--tune", action="store_true", help="try learning rates, compared on a tenth of the training images"
    )
    parser.add_argument("--epochs", type=int, help="fewer epochs, for a trial")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--runs", type=Path, default=Path("runs-pretrained"))
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=RESULTS / "pretrained.json")
    asked = parser.parse_args()
    asked.weights = str(Path(asked.weights).resolve()) if Path(asked.weights).exists() else asked.weights
    rows = []
    for data in asked.data:
        for arm in asked.arms:
            for rate in TRIED[arm] if asked.tune else [RATES[arm]]:
                rows += [measure(data, arm, seed, rate, asked) for seed in ([0] if asked.tune else asked.seeds)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = f"--data {' '.join(asked.data)} --seeds {' '.join(map(str, asked.seeds))}{' --tune' if asked.tune else ''}"
    write_record(
        asked.out,
        asked.commit,
        command=f"python -m benchmarks.pretrained --weights FILE {words}",
        weights=Path(asked.weights).name,
        device=device,
        rows=rows,
    )
    print(f"Record: {asked.out}")


if __name__ == "__main__":
    main()
