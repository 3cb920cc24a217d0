"""`python -m benchmarks.speedrun`: the effect of each part of a fast recipe on accuracy and training time.

Each arm changes one part of the recipe. By default, 45,000 training images are used for training and 5,000 are held out
for evaluation. All arms use the same seeds, so differences are taken seed by seed.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.__main__ import RESULTS
from benchmarks.arms import measured
from benchmarks.records import GrowingRecord, add_run_options
from vitascope.data.policy import resolve
from vitascope.draw.arms import draw_arms, draw_speed
from vitascope.draw.look import save
from vitascope.errors import UserError, did_you_mean
from vitascope.recipe.reading import read_recipe
from vitascope.recipe.schema import Recipe
from vitascope.recipe.writing import word
from vitascope.records.arms import arms_of, noise_of, worth_of
from vitascope.records.reading import read_file
from vitascope.records.record import read_record
from vitascope.training.hardware import choose_device
from vitascope.training.views import check_views

PLAIN = "as it is"
PARTS = (
    "Each row changes one part of the recipe, or of the bundle in brackets; the largest loss is first. Dots: mean over "
    "seeds. Bars: 95 % confidence interval of the paired difference, from the noise of all rows, not corrected for the "
    "number of comparisons; none with one seed. Grey: no significant difference. Held-out images."
)
ARMS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "AdamW instead of Muon": {"train.optimizer": "adamw"},
    "no averaging": {"train.ema": 0.0},
    "averaging, final rate 5 %": {"train.final_lr": 0.05},
    "final rate 0": {"train.final_lr": 0.0},
    "warm-up of a tenth": {"train.warmup": 0.1},
    "no clipping": {"train.clip_grad": 0.0},
    "gradients clipped at 1": {"train.clip_grad": 1.0},
    "flips by turns": {"data.augment.flip_mode": "alternating"},
    "flips by chance": {"data.augment.flip_mode": "random"},
    "whitened patches": {"train.whiten": True},
    "patches as they are": {"train.whiten": False},
    "timm's start": {"model.initialize": "timm"},
    "local start": {"model.initialize": "conv_like"},
    "mimetic start": {"model.initialize": "mimetic"},
    "half of the patches at first": {"train.patch_share": 0.5},
    "all patches always": {"train.patch_share": 1.0},
    "half of the patches for two fifths": {"train.patch_share": 0.5, "train.patch_share_until": 0.4},
    "no biases": {"model.qkv_bias": False, "model.proj_bias": False},
    "biases of queries, keys, values only": {"model.proj_bias": False},
    "all biases": {"model.proj_bias": True},
    "batch of 1000": {"train.batch_size": 1000, "train.ema": 0.996},  # the average covers equally many images
    "batch of 500": {"train.batch_size": 500, "train.ema": 0.998},
    "batch of 250": {"train.batch_size": 250, "train.ema": 0.999},
    "Muon's rate 0.03": {"train.muon_lr": 0.03},
    "Muon's rate 0.04": {"train.muon_lr": 0.04},
    "AdamW's rate 0.002": {"train.lr": 2e-3},
    "weight decay 0.02": {"train.weight_decay": 0.02},
    "no stochastic depth": {"model.drop_path_rate": 0.0},
    "stochastic depth 0.1": {"model.drop_path_rate": 0.1},
    "CutMix for a quarter": {"data.augment.mix_prob": 0.25},
    "no colour changes": {"data.augment.brightness": 0, "data.augment.contrast": 0, "data.augment.saturation": 0},
    "zeros come in at the edge": {"data.augment.shift_fill": "zero"},
    "mirrored pixels come in at the edge": {"data.augment.shift_fill": "reflect"},
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
    "average over half as many steps": {"train.ema": 0.996},
    "average over a quarter as many steps": {"train.ema": 0.992},
    "batch of 396": {"train.batch_size": 396},
    "half the label smoothing": {"train.label_smoothing": 0.05},
    "weight decay 0.1": {"train.weight_decay": 0.1},
    "warm-up of a fifth": {"train.warmup": 0.2},
    "batch of 528": {"train.batch_size": 528},  # 64 × 528 rows are whole waves of tiles for 132 processors
}


def applying(recipe: str, common: dict[str, Any], names: list[str], views: list[int]) -> list[str]:
    """The arms that are valid and differ from the recipe; the others are listed before training starts."""
    words = [f"{key}={value}" for key, value in common.items()]
    plain = _whole(read_recipe(recipe, words))
    for number in views:
        check_views(plain, number)
    kept = []
    for name in names:
        try:
            more = [f"{key}={word(value)}" for key, value in ARMS[name].items()]
            changed = _whole(read_recipe(recipe, [*words, *more]))
        except UserError as error:
            print(f"Skipped: {name}. {error}")
            continue
        if changed == plain and ARMS[name]:
            print(f"Skipped: {name}. The recipe already has this setting.")
        else:
            kept.append(name)
    return kept


def called(arm: str, base: str) -> str:
    """The name of a row. With a named `base`, its arms are compared with it instead of the first row."""
    return arm if base == PLAIN else base if arm == PLAIN else f"{base}, {arm}"


def _whole(recipe: Recipe) -> Recipe:
    """The recipe with the data set's default augmentation filled in."""
    augment = resolve(recipe.data.augment, recipe.data.name, recipe.model.in_chans, recipe.train.objective)
    return replace(recipe, data=replace(recipe.data, augment=augment))


def draw(asked: argparse.Namespace) -> None:
    if asked.out.suffix == ".json":
        raise UserError("Give a file for the figure: --out FIGURE.png")
    if asked.draw:
        picture(asked.draw, asked.out)
    if asked.draw_parts:
        parts_picture(asked.draw_parts, asked.out)


def picture(records: list[Path], out: Path) -> None:
    """Accuracy over time: the first seed of every arm as a line, every record of a recipe as a dot."""
    found = {path: read_file(path) for path in records}
    rows = [row for path, said in found.items() if "rows" in said for row in _rows(path, said)]
    lines = {arm.name: arm.rows[0]["curve"] for arm in arms_of(rows)}
    published = [read_record(path) for path, said in found.items() if "rows" not in said]
    dots = {record.name: (mean(record.seconds), record.accuracy) for record in published}
    save(draw_speed(lines, dots), out)


def parts_picture(record: Path, out: Path) -> None:
    """The effect of removing each part."""
    rows = _rows(record, read_file(record))
    arms = arms_of(rows, noise_of(rows))
    worth = sorted(worth_of(arms), key=lambda found: found[1])
    save(draw_arms({f"Effect of each change ({arms[0].name}: {100 * arms[0].accuracy:.2f} %)": worth}, PARTS), out)


def _rows(path: Path, said: dict[str, Any]) -> list[dict[str, Any]]:
    rows = said.get("rows", [])
    if not rows or not all({"arm", "accuracy", "curve"} <= set(row) for row in rows):
        raise UserError(f"{path} is not a record of this benchmark.")
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
    parser.add_argument("--called", default=PLAIN, help="row name of the recipe with these settings")
    add_run_options(parser, runs="runs-speedrun", out=RESULTS / "speedrun.json")
    parser.add_argument("--draw", nargs="+", type=Path, help="draw accuracy over time of these records to --out (.png)")
    parser.add_argument("--draw-parts", type=Path, help="draw the effect of this record's arms to --out (.png)")
    parser.set_defaults(tune=True, compile=None)
    asked = parser.parse_args()
    if unknown := [arm for arm in asked.arms if arm not in ARMS]:
        parser.error(f"There is no arm '{unknown[0]}'. {did_you_mean(unknown[0], ARMS)}")
    if asked.compile not in (None, "always", "never"):
        parser.error(f"--compile {asked.compile}: choose always or never, because auto would compile only some arms")
    try:
        _do(asked)
    except UserError as error:
        parser.error(str(error))


def _do(asked: argparse.Namespace) -> None:
    if asked.draw or asked.draw_parts:
        draw(asked)
        return
    said = read_recipe(asked.recipe, asked.set)  # rejects unknown settings
    asked.data = asked.data or said.data.name
    compiled = asked.compile or ("always" if choose_device(asked.device) == "cuda" else "never")
    common = {"train.device": asked.device, "train.compile": compiled, "data.validation": 0.1}
    common["data.name"] = asked.data
    common |= dict(word.split("=", 1) for word in asked.set)
    record = GrowingRecord("benchmarks.speedrun", asked)
    arms = applying(asked.recipe, common, asked.arms, asked.views)
    for arm, seed in ((arm, seed) for seed in asked.seeds for arm in arms):
        name = called(arm, asked.called)
        if not record.has(arm=name, seed=seed):
            settings = common | ARMS[arm] | {"train.seed": seed}
            found = measured(name, asked.recipe, settings, asked, views=asked.views, curve=True)
            record.add({"arm": name, "seed": seed} | found)
    record.write()
    print(f"Record: {asked.out}")


if __name__ == "__main__":
    main()
