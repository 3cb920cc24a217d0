"""`python -m benchmarks.photos --data FOLDER`: chosen settings beside a recipe, a linear probe and a plain timm script.

FOLDER has the named data sets (as data.root), photos/tiny10 and weights/deit_tiny_patch16_224.safetensors. Every set of
images is written once as a folder of PNG or JPEG files with train/ and test/, which all arms read; full named sets are
trained by name in our arms. Each arm is a process of its own, and its seconds last from its start to its test accuracy.
The record is written after every run; the same command continues an interrupted record.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from benchmarks.__main__ import RESULTS_FOLDER
from benchmarks.records import Row, write_record
from vitascope.data.config import POLICIES, DataConfig
from vitascope.data.open_data import open_data_by_name_or_path
from vitascope.recipe.schema import format_value_for_command_line
from vitascope.run.directory import open_run_or_newest

WEIGHTS = "weights/deit_tiny_patch16_224.safetensors"
ARMS = ("chosen", "recipe", "linear probe", "timm script")
SPLITS = ("train", "test")
SUBSET_SEED = 0  # of the images of a fraction: the same for all seeds and arms


@dataclass(frozen=True)
class ImageSet:
    """A set of images: of a named data set or of tiny10, all of them or fewer."""

    source: str  # name of the data set; tiny10: the folder of photos
    recipe: str  # the built-in recipe for such images
    fraction: float = 1.0  # of the training images of each class
    images: int | None = None  # training images in all, instead of a fraction
    classes: int | None = None  # only the first classes

    @property
    def is_whole_named_set(self) -> bool:
        return self.source in POLICIES and self.fraction == 1 and not self.images and not self.classes


IMAGE_SETS = {
    "digits": ImageSet("digits", "digits"),
    **{
        f"{name}{ending}": ImageSet(name, recipe, fraction)
        for name, recipe in (("mnist", "mnist"), ("fashion-mnist", "fashion-mnist"), ("cifar10", "cifar10-finetune"))
        for ending, fraction in (("", 1.0), ("-10%", 0.1), ("-1%", 0.01))
    },
    "tiny10": ImageSet("tiny10", "tiny10-finetune"),
    **{f"tiny10-{count}": ImageSet("tiny10", "tiny10-finetune", images=count) for count in (50, 200, 500)},
    "two-classes-245": ImageSet("tiny10", "tiny10-finetune", images=245, classes=2),
}


def write_image_folder(image_set: ImageSet, data_folder: Path, folder: Path) -> Path:
    """Write train/CLASS/… and test/CLASS/…, once."""
    if folder.is_dir():
        return folder
    partial = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    write = _copy_photos if image_set.source == "tiny10" else _write_arrays
    for split in SPLITS:
        write(image_set, split, data_folder, partial / split)
    partial.rename(folder)
    return folder


def _copy_photos(image_set: ImageSet, split: str, data_folder: Path, target: Path) -> None:
    source = data_folder / "photos/tiny10" / {"train": "train", "test": "val"}[split]
    names = sorted(path.name for path in source.iterdir())[: image_set.classes]
    for index, name in enumerate(names):
        (target / name).mkdir(parents=True)
        files = sorted((source / name).iterdir())
        for file in _choose_subset(files, image_set, index, len(names)) if split == "train" else files:
            shutil.copy(file, target / name / file.name)


def _write_arrays(image_set: ImageSet, split: str, data_folder: Path, target: Path) -> None:
    config = DataConfig(name=image_set.source, root=str(data_folder), download=False)
    dataset = open_data_by_name_or_path(config, (32, 32), 3).load_split(split)
    for index, name in enumerate(dataset.classes):
        (target / name).mkdir(parents=True)
        members = (dataset.labels == index).nonzero().flatten().tolist()
        members = _choose_subset(members, image_set, index, len(dataset.classes)) if split == "train" else members
        for member in members:
            pixels = dataset.fetch(torch.tensor([member]))[0].permute(1, 2, 0).squeeze(2).numpy()
            Image.fromarray(pixels).save(target / name / f"{member:05d}.png")


def _choose_subset(members: list[Any], image_set: ImageSet, class_index: int, num_classes: int) -> list[Any]:
    """Return the training images of a class. `images` are divided among the classes; the first get the rest."""
    count = round(image_set.fraction * len(members))
    if image_set.images:
        count = image_set.images // num_classes + (class_index < image_set.images % num_classes)
    return sorted(random.Random(SUBSET_SEED + class_index).sample(members, min(count, len(members))))


def make_vitascope_arguments(arm: str, image_set: ImageSet, folder: Path, args: argparse.Namespace) -> list[str]:
    """Return the arguments of `vitascope train` for one of our arms."""
    weights, settings = args.data / WEIGHTS, {"data.validation": 0, "train.device": args.device}
    is_named = image_set.is_whole_named_set
    settings |= {"data.root": args.data} if is_named else {}
    settings |= {"train.epochs": args.epochs} if args.epochs else {}
    if arm == "chosen":
        first = f"data:{image_set.source}" if is_named else str(folder)
        return [first, *_format_settings({"weights": weights} | settings)]
    settings["data.name"] = image_set.source if is_named else folder
    if arm == "linear probe":
        settings |= {"weights": weights, "train.tune": "head", "train.head_init": "linear_probe", "train.epochs": 1}
        settings |= {"model.img_size": 224, "model.patch_size": 16, "model.in_chans": 3, "train.lr": 1e-6}
        return ["tiny10-finetune", *_format_settings(settings)]
    if image_set.recipe.endswith("finetune"):
        settings["weights"] = weights
    elif not is_named:  # a folder's default augmentation is not that of the recipe's data
        policy = POLICIES[image_set.source]
        settings |= {f"data.augment.{name}": getattr(policy, name) for name in vars(policy)}
    return [image_set.recipe, *_format_settings(settings)]


def _format_settings(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={format_value_for_command_line(value)}" for key, value in settings.items()]


def run_vitascope_arm(arm: str, image_set: ImageSet, folder: Path, seed: int, args: argparse.Namespace) -> Row:
    """Train and evaluate with the command line."""
    runs = args.runs / f"{folder.name}-{arm.replace(' ', '-')}-seed{seed}"
    shutil.rmtree(runs, ignore_errors=True)
    command = [sys.executable, "-m", "vitascope"]
    arguments = make_vitascope_arguments(arm, image_set, folder, args)
    _run([*command, "train", *arguments, f"train.seed={seed}", "--runs", str(runs)])
    run = open_run_or_newest(next(runs.iterdir()))
    output = _run([*command, "evaluate", str(run.path), "--quick", "--json"])
    evaluation, recipe = json.loads(output), run.recipe
    chosen_path = run.get_path("chosen.yaml")
    start = chosen_path.read_text(encoding="utf-8").partition(",")[0].removeprefix("# ") if arm == "chosen" else arm
    return {
        "accuracy": evaluation["accuracy"],
        "test_images": evaluation["images"],
        "start": start,
        "image_size": recipe.model.image_shape[0],
        "passes": len(run.metrics) * recipe.data.passes_per_epoch,
    }


def run_timm_script(arm: str, image_set: ImageSet, folder: Path, seed: int, args: argparse.Namespace) -> Row:
    """Run the plain timm script."""
    del image_set
    command = [sys.executable, "-m", "benchmarks.timm_script", str(folder), str(args.data / WEIGHTS)]
    epochs = args.epochs or 10
    output = _run([*command, str(epochs), str(seed)])
    test_images = sum(1 for path in (folder / "test").glob("*/*"))
    accuracy = float(output.strip().splitlines()[-1].rpartition(" ")[2])
    return {"accuracy": accuracy, "test_images": test_images, "start": arm, "image_size": 224, "passes": epochs}


def _run(command: list[str]) -> str:
    """Run a command and return its output. An error stops the benchmark; the record has all earlier runs."""
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{process.stdout[-2000:]}\n{process.stderr[-2000:]}")
    return process.stdout


RUN_ARM: dict[str, Callable[[str, ImageSet, Path, int, argparse.Namespace], Row]] = dict.fromkeys(
    ARMS, run_vitascope_arm
) | {"timm script": run_timm_script}


def measure_arm(set_name: str, arm: str, seed: int, args: argparse.Namespace) -> Row:
    """Return the row of one run."""
    folder = write_image_folder(IMAGE_SETS[set_name], args.data, args.images / set_name)
    start = time.perf_counter()
    row = RUN_ARM[arm](arm, IMAGE_SETS[set_name], folder, seed, args)
    seconds = round(time.perf_counter() - start, 1)
    images = sum(1 for path in (folder / "train").glob("*/*"))
    row = {"data": set_name, "arm": arm, "seed": seed, "images": images, "seconds": seconds} | row
    print(row, flush=True)
    return row


def read_earlier_rows(record_path: Path) -> list[Row]:
    """Return the rows of an interrupted record; empty if there is none."""
    return json.loads(record_path.read_text(encoding="utf-8"))["rows"] if record_path.is_file() else []


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the data sets and the weights")
    parser.add_argument("--folders", nargs="+", choices=list(IMAGE_SETS), default=list(IMAGE_SETS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, help="fewer epochs, for a trial")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--images", type=Path, default=Path("images-photos"), help="folder for the image files")
    parser.add_argument("--runs", type=Path, default=Path("runs-photos"))
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=RESULTS_FOLDER / "photos.json")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    args.data = args.data.resolve()
    rows = read_earlier_rows(args.out)
    done = {(row["data"], row["arm"], row["seed"]) for row in rows}
    seeds = " ".join(map(str, args.seeds))
    for seed in args.seeds:
        for set_name in args.folders:
            for arm in args.arms:
                if (set_name, arm, seed) in done:
                    continue
                rows.append(measure_arm(set_name, arm, seed, args))
                write_record(
                    args.out,
                    args.commit,
                    command=f"python -m benchmarks.photos --data FOLDER --folders {' '.join(args.folders)} "
                    f"--seeds {seeds}{f' --epochs {args.epochs}' if args.epochs else ''}",
                    weights=Path(WEIGHTS).name,
                    device="cuda" if torch.cuda.is_available() else "cpu",
                    rows=rows,
                )
    print(f"Record: {args.out}")


if __name__ == "__main__":
    main()
