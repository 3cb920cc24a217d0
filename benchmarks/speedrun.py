"""`python -m benchmarks.speedrun`: the effect of each part of a fast recipe on accuracy and training time.

Each arm changes one part of the recipe. By default, 45,000 training images are used for training and 5,000 are held out
for evaluation. All arms use the same seeds, so differences are taken seed by seed.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.__main__ import RESULTS_FOLDER
from benchmarks.arms import train_and_measure
from benchmarks.figures import RecordPoint, SettingEffect, draw_accuracy_over_time, draw_setting_effects
from benchmarks.records import GrowingRecord, add_run_options
from vitascope.draw.style import save_figure
from vitascope.errors import UserError, suggest_choice
from vitascope.inference.hardware import choose_or_check_device
from vitascope.inference.scoring import check_views_match_training
from vitascope.recipe.choices import complete_augmentation_for_objective
from vitascope.recipe.reading import read_recipe
from vitascope.recipe.schema import Recipe, format_value_for_command_line
from vitascope.records.ablation import (
    compare_arms_with_baselines,
    estimate_residual_noise,
    list_gains_in_percentage_points,
)
from vitascope.records.record import read_record, read_record_or_benchmark_file

BASELINE = "unchanged"
EFFECTS_CAPTION = (
    "Each row changes one part of the recipe. The largest loss is first. Dots: mean over seeds. Bars: 95 % confidence "
    "interval of the paired difference, from the noise of all rows, not corrected for the number of comparisons. Grey: "
    "no significant difference. Accuracy on held-out images."
)
ARMS: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "AdamW instead of Muon": {"train.optimizer": "adamw"},
    "no EMA": {"train.ema": 0.0},
    "final rate 5 %": {"train.final_lr": 0.05},
    "final rate 0": {"train.final_lr": 0.0},
    "warm-up of 10 %": {"train.warmup": 0.1},
    "no clipping": {"train.clip_grad": 0.0},
    "gradients clipped at 1": {"train.clip_grad": 1.0},
    "alternating flips": {"data.augment.flip_mode": "alternating"},
    "random flips": {"data.augment.flip_mode": "random"},
    "whitened patches": {"train.whiten": True},
    "no whitening": {"train.whiten": False},
    "timm's initialization": {"model.initialize": "timm"},
    "convolution-like initialization": {"model.initialize": "conv_like"},
    "mimetic initialization": {"model.initialize": "mimetic"},
    "half of the patches in the first epochs": {"train.patch_share": 0.5},
    "all patches in every epoch": {"train.patch_share": 1.0},
    "half of the patches for 40 % of the epochs": {"train.patch_share": 0.5, "train.patch_share_until": 0.4},
    "no biases": {"model.qkv_bias": False, "model.proj_bias": False},
    "biases of queries, keys, values only": {"model.proj_bias": False},
    "with all biases": {"model.proj_bias": True},
    "batch of 1000": {"train.batch_size": 1000, "train.ema": 0.996},  # the average covers equally many images
    "batch of 500": {"train.batch_size": 500, "train.ema": 0.998},
    "batch of 250": {"train.batch_size": 250, "train.ema": 0.999},
    "Muon's rate 0.03": {"train.muon_lr": 0.03},
    "Muon's rate 0.04": {"train.muon_lr": 0.04},
    "AdamW's rate 0.002": {"train.lr": 2e-3},
    "weight decay 0.02": {"train.weight_decay": 0.02},
    "no stochastic depth": {"model.drop_path_rate": 0.0},
    "stochastic depth 0.1": {"model.drop_path_rate": 0.1},
    "CutMix on 25 % of images": {"data.augment.mix_prob": 0.25},
    "no colour changes": {"data.augment.brightness": 0, "data.augment.contrast": 0, "data.augment.saturation": 0},
    "shift filled with zeros": {"data.augment.shift_fill": "zero"},
    "shift filled by reflection": {"data.augment.shift_fill": "reflect"},
    "shifted by 2": {"data.augment.shift": 2},
    "no label smoothing": {"train.label_smoothing": 0.0},
    "no QK-norm": {"model.qk_norm": False},
    "no rotary positions": {"model.positions": "learned"},
    "GELU": {"model.mlp": "gelu"},
    "class token": {"model.class_token": True, "model.global_pool": "token"},
    "8 heads": {"model.num_heads": 8},
    "384 x 4": {"model.embed_dim": 384, "model.depth": 4, "model.num_heads": 6},
    "384 x 5": {"model.embed_dim": 384, "model.depth": 5, "model.num_heads": 6},
    "384 x 7": {"model.embed_dim": 384, "model.depth": 7, "model.num_heads": 6},
    "512 x 3": {"model.embed_dim": 512, "model.depth": 3, "model.num_heads": 8},
    "256 x 6": {"model.depth": 6},
    "256 x 10": {"model.depth": 10},
    "MLP of 3": {"model.mlp_ratio": 3.0},
    "warm-up of 3 %": {"train.warmup": 0.03},
    "momentum 0.9": {"train.momentum": 0.9},
    "momentum 0.85": {"train.momentum": 0.85},
    "EMA over half as many steps": {"train.ema": 0.996},
    "EMA over a quarter as many steps": {"train.ema": 0.992},
    "batch of 396": {"train.batch_size": 396},
    "half the label smoothing": {"train.label_smoothing": 0.05},
    "weight decay 0.1": {"train.weight_decay": 0.1},
    "warm-up of 20 %": {"train.warmup": 0.2},
    "batch of 528": {"train.batch_size": 528},  # 64 × 528 rows are whole waves of tiles for 132 processors
}


def select_valid_arms(
    recipe_name: str, common_settings: dict[str, Any], arm_names: list[str], view_counts: list[int]
) -> list[str]:
    """The arms that are valid and differ from the recipe; the others are listed before training starts."""
    words = [f"{key}={value}" for key, value in common_settings.items()]
    plain = _fill_in_augmentation(read_recipe(recipe_name, words))
    for number in view_counts:
        check_views_match_training(plain, number)
    kept = []
    for name in arm_names:
        try:
            more = [f"{key}={format_value_for_command_line(value)}" for key, value in ARMS[name].items()]
            changed = _fill_in_augmentation(read_recipe(recipe_name, [*words, *more]))
        except UserError as error:
            print(f"Skipped: {name}. {error}")
            continue
        if changed == plain and ARMS[name]:
            print(f"Skipped: {name}. The recipe already has this setting.")
        else:
            kept.append(name)
    return kept


def make_row_name(arm_name: str, base_name: str) -> str:
    """The name of a row. With a named `base`, its arms are compared with it instead of the first row."""
    return arm_name if base_name == BASELINE else base_name if arm_name == BASELINE else f"{base_name}, {arm_name}"


def _fill_in_augmentation(recipe: Recipe) -> Recipe:
    """The recipe with the data set's default augmentation filled in."""
    augment = complete_augmentation_for_objective(
        recipe.data.augment,
        recipe.data.name,
        recipe.model.in_chans,
        recipe.train.objective,
        recipe.model.image_shape,
    )
    return replace(recipe, data=replace(recipe.data, augment=augment))


def draw_requested_figures(args: argparse.Namespace) -> None:
    if args.out.suffix == ".json":
        raise UserError("Give a file for the figure: --out FIGURE.png")
    if args.draw:
        draw_speed_records(args.draw, args.out)
    if args.draw_parts:
        draw_part_effects(args.draw_parts, args.out)


def draw_speed_records(record_paths: list[Path], figure_path: Path) -> None:
    """Accuracy over time: the first seed of every arm as a line, every record of a recipe as a dot."""
    contents_by_path = {path: read_record_or_benchmark_file(path) for path in record_paths}
    rows = [
        row
        for path, contents in contents_by_path.items()
        if "rows" in contents
        for row in _get_checked_rows(path, contents)
    ]
    lines = {arm.name: arm.rows[0]["curve"] for arm in compare_arms_with_baselines(rows)}
    published = [read_record(path) for path, contents in contents_by_path.items() if "rows" not in contents]
    dots = {
        record.name: RecordPoint(mean(record.seconds), record.mean_test_accuracy, record.views) for record in published
    }
    save_figure(draw_accuracy_over_time(lines, dots), figure_path)


def draw_part_effects(record_path: Path, figure_path: Path) -> None:
    """Draw the effect of removing each part."""
    rows = _get_checked_rows(record_path, read_record_or_benchmark_file(record_path))
    arms = compare_arms_with_baselines(rows, estimate_residual_noise(rows))
    effects = [SettingEffect(*gain) for gain in list_gains_in_percentage_points(arms)]
    effects.sort(key=lambda effect: effect.difference_points)
    save_figure(
        draw_setting_effects(
            {f"Effect of each change ({arms[0].name}: {100 * arms[0].mean_accuracy:.2f} %)": effects}, EFFECTS_CAPTION
        ),
        figure_path,
    )


def _get_checked_rows(record_path: Path, record: dict[str, Any]) -> list[dict[str, Any]]:
    rows = record.get("rows", [])
    if not rows or not all({"arm", "accuracy", "curve"} <= set(row) for row in rows):
        raise UserError(f"{record_path} is not a record of this benchmark.")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="cifar10")
    parser.add_argument("--data", help="data set; default: the recipe's")
    parser.add_argument(
        "--arms",
        nargs="+",
        default=list(ARMS),
        metavar="ARM",
        help=f"one or more of: {'; '.join(ARMS).replace('%', '%%')}",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[101, 102],
        help="seeds for tuning, other than those of published records",
    )
    parser.add_argument(
        "--views",
        nargs="+",
        type=int,
        default=[2],
        help="test-time views: 1, 2, 6 or 10; the first gives the accuracy, all are recorded",
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings for all arms")
    parser.add_argument("--called", default=BASELINE, help="row name of the recipe with these settings")
    add_run_options(parser, runs_folder="runs-speedrun", record_path=RESULTS_FOLDER / "speedrun.json")
    parser.add_argument("--draw", nargs="+", type=Path, help="draw accuracy over time of these records to --out (.png)")
    parser.add_argument("--draw-parts", type=Path, help="draw the effect of this record's arms to --out (.png)")
    parser.set_defaults(tune=True, compile=None)
    args = parser.parse_args()
    if unknown := [arm for arm in args.arms if arm not in ARMS]:
        parser.error(f"There is no arm '{unknown[0]}'. {suggest_choice(unknown[0], ARMS)}")
    if args.compile not in (None, "always", "never"):
        parser.error(f"--compile {args.compile}: choose always or never, because auto would compile only some arms")
    try:
        _run_benchmark(args)
    except UserError as error:
        parser.error(str(error))


def _run_benchmark(args: argparse.Namespace) -> None:
    if args.draw or args.draw_parts:
        draw_requested_figures(args)
        return
    recipe = read_recipe(args.recipe, args.set)  # rejects unknown settings
    args.data = args.data or recipe.data.name
    compiled = args.compile or ("always" if choose_or_check_device(args.device) == "cuda" else "never")
    common = {"train.device": args.device, "train.compile": compiled, "data.validation": 0.1}
    common["data.name"] = args.data
    common |= dict(setting.split("=", 1) for setting in args.set)
    record = GrowingRecord("benchmarks.speedrun", args)
    arms = select_valid_arms(args.recipe, common, args.arms, args.views)
    for arm, seed in ((arm, seed) for seed in args.seeds for arm in arms):
        name = make_row_name(arm, args.called)
        if not record.has_row(arm=name, seed=seed):
            settings = common | ARMS[arm] | {"train.seed": seed}
            row = train_and_measure(name, args.recipe, settings, args, view_counts=args.views, with_curve=True)
            record.add_row({"arm": name, "seed": seed} | row)
    record.write()
    print(f"Record: {args.out}")


if __name__ == "__main__":
    main()
