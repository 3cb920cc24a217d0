"""`python -m benchmarks.small_data`: the effect of each method for small data sets, one at a time.

The model of Lee, Lee & Song 2021 (width 192, 9 blocks, 12 heads, MLP width 384) on CIFAR-10. All arms see equally many
images with the same settings and seeds, and their numbers of parameters agree within 3 %. `--tune` evaluates on a tenth
of the training images. Without it, all training images are used, and each run is evaluated once on the test images.
`--base recipe` uses the recipe `cifar10` as the baseline. `--labels 0.1` keeps a tenth of the images and all steps.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.__main__ import RESULTS_FOLDER
from benchmarks.arms import train_and_measure
from benchmarks.figures import SettingEffect, draw_setting_effects
from benchmarks.records import GrowingRecord, add_run_options
from vitascope.draw.style import save_figure
from vitascope.number_format import format_percent
from vitascope.records.ablation import compare_arms_with_baselines, list_gains_in_percentage_points

PLAIN_MODEL = {
    "embed_dim": 192, "depth": 9, "num_heads": 12, "mlp_ratio": 2.0, "class_token": True, "global_pool": "token",
    "positions": "learned", "qk_norm": False, "norm": "layernorm", "mlp": "gelu", "drop_path_rate": 0.0,
    "initialize": "timm",
}  # fmt: skip
PLAIN_TRAINING = {"optimizer": "adamw", "lr": 1e-3, "schedule": "cosine", "ema": 0.0, "batch_size": 250}
PLAIN_AUGMENTATION = {
    "flip_mode": "random",
    "shift_fill": "zero",
    "randaugment": 0,
}  # undo what the recipe adds to the default augmentation
SPT_AND_LSA = {"tokenizer": "spt", "attention": "lsa"}
CONV_TOKENIZER = {"tokenizer": "conv", "global_pool": "seq", "class_token": False}
DROPOUT = {"proj_drop_rate": 0.1, "pos_drop_rate": 0.1}
ARMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "+ SPT": {"tokenizer": "spt"},
    "+ LSA": {"attention": "lsa"},
    "+ SPT + LSA": SPT_AND_LSA,
    "CCT tokenizer and pooling": CONV_TOKENIZER | {"mlp_ratio": 1.9},  # smaller MLPs compensate for the convolutions
    "mimetic initialization": {"initialize": "mimetic"},
    "mimetic initialization, sin-cos positions": {"initialize": "mimetic", "positions": "sincos2d"},
    "plain, dropout 0.1": DROPOUT,
    "plain, attention dropout 0.1": {"attn_drop_rate": 0.1},
    "plain, stochastic depth 0.1": {"drop_path_rate": 0.1},
    "+ SPT + LSA, dropout 0.1": SPT_AND_LSA | DROPOUT,
    "+ SPT + LSA, stochastic depth 0.1": SPT_AND_LSA | {"drop_path_rate": 0.1},
}
CAPTION = (
    "Differences to the plain model, or to the model in brackets. Dots: mean over seeds. Bars: 95 % confidence "
    "interval of the paired difference, not corrected for the number of comparisons."
)
FEW_LABELS_ARMS = ("plain", "+ SPT + LSA", "CCT tokenizer and pooling")
RECIPE_ARMS = ("plain", "+ SPT", "+ LSA", "CCT tokenizer and pooling")


def make_settings(arm_name: str, args: argparse.Namespace) -> dict[str, Any]:
    epochs = round(args.epochs / args.labels)
    settings: dict[str, Any] = {"data.name": args.data, "data.validation": 0.1 if args.tune else 0}
    settings |= {"data.fraction": args.labels, "train.epochs": epochs, "train.device": args.device}
    settings |= {"train.compile": args.compile}
    model_settings = ARMS[arm_name]
    if args.base == "recipe":
        model_settings = {name: value for name, value in model_settings.items() if name not in ("mlp_ratio",)}
    else:
        model_settings = PLAIN_MODEL | model_settings
        settings |= {f"train.{name}": value for name, value in PLAIN_TRAINING.items()}
        settings |= {f"data.augment.{name}": value for name, value in PLAIN_AUGMENTATION.items()}
    if args.lr:
        settings["train.lr"] = args.lr
    return settings | {f"model.{name}": value for name, value in model_settings.items()}


def measure_arm(arm_name: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    row = {"arm": arm_name, "base": args.base, "labels": args.labels, "seed": seed}
    return row | train_and_measure(arm_name, args.recipe, make_settings(arm_name, args) | {"train.seed": seed}, args)


def draw_records(record_paths: list[Path], figure_path: Path) -> None:
    """Draw one panel per record."""
    panels = {}
    for path in record_paths:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        first, arms = rows[0], compare_arms_with_baselines(rows)
        labels = f"{format_percent(first['labels'], 0)} of the labels"
        title = f"{labels}\nplain: {100 * arms[0].mean_accuracy:.1f} %"
        panels[title] = [SettingEffect(*gain) for gain in list_gains_in_percentage_points(arms)]
    save_figure(
        draw_setting_effects(
            panels,
            f"{CAPTION} Grey: no significant difference, or one seed.",
        ),
        figure_path,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", choices=["plain", "recipe"], default="plain")
    parser.add_argument("--recipe", default="cifar10")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS))
    parser.add_argument("--labels", type=float, default=1.0, help="fraction of the training images")
    parser.add_argument(
        "--epochs",
        type=int,
        default=20,
        help="epochs with all images; with fewer images, more epochs keep the number of steps",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--lr", type=float)
    add_run_options(parser, runs_folder="runs-small-data", record_path=RESULTS_FOLDER / "small-data.json")
    parser.add_argument("--draw", nargs="+", type=Path, help="draw these records to --out (.png) instead of training")
    args = parser.parse_args()
    if args.draw:
        draw_records(args.draw, args.out)
        return
    arms = args.arms or (FEW_LABELS_ARMS if args.labels < 1 else RECIPE_ARMS if args.base == "recipe" else list(ARMS))
    record = GrowingRecord("benchmarks.small_data", args)
    for arm, seed in ((arm, seed) for arm in arms for seed in args.seeds):
        if not record.has_row(arm=arm, seed=seed):
            record.add_row(measure_arm(arm, seed, args))
    record.write()
    print(f"Record: {args.out}")


if __name__ == "__main__":
    main()
