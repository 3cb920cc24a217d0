"""Sheet D's larger model on MNIST: from scratch, and from ImageNet weights in two ways."""

from dataclasses import fields
from pathlib import Path
from statistics import mean

from vitascope.errors import UserError
from vitascope.recipe.writing import word as typed
from vitascope.sheets.claims import gain
from vitascope.sheets.lab import Lab
from vitascope.sheets.writing import Report
from vitascope.study.answer import Cell
from vitascope.training.pretrained import settled_word
from vitascope.weights.pretrained import ONLINE, Pretrained, open_weights

WEIGHTS = "timm:deit_tiny_patch16_224.fb_in1k"
MNIST = ["data.name=mnist", "model.in_chans=1"]
OWN = ["model.img_size=28", "model.patch_size=4"]
RATE = "5e-4"
LARGE = ["model.img_size=224", "model.patch_size=16", f"train.lr={RATE}"]
ITS_OWN = (
    "img_size",
    "patch_size",
    "in_chans",
    "num_classes",
    "drop_path_rate",
)  # set by this comparison, not by the weights
FULL = ["train.epochs=2"]
QUICK = ["data.validation=0.01", "data.fraction=0.005", "train.epochs=2", "train.batch_size=16"]
STARTS = {  # name -> its study and the sheet's claim
    "from scratch, 28 × 28": ("start-scratch", "about an hour, starts near 30 %, poor"),
    "pretrained weights, images resized to 224": ("start-resized", "better than from scratch"),
    "pretrained weights, the model changed to 28 × 28": ("start-changed", "learns much quicker"),
}


def find_weights(lab: Lab) -> Pretrained | UserError:
    """Open the weights. An error is raised if the user named them, and returned for the default weights."""
    if lab.weights is not None and "," in lab.weights:
        raise UserError(f"--weights {lab.weights}: the name must not contain a comma. Rename the file.")
    try:
        return open_weights(settled_word(lab.weights or WEIGHTS), img_size=224)
    except UserError as error:
        if lab.weights is not None:
            raise
        return error


def compare_starts(lab: Lab, report: Report, found: Pretrained | UserError) -> None:
    report.heading("A larger model, from scratch and from pretrained weights")
    if isinstance(found, UserError):
        report.text(
            f"""Not run, because the weights are missing: {found} To use a file: `vitascope sheet D --weights FILE`.
            Results from an H200 are in docs/pretrained.md."""
        )
        for place, _ in STARTS.values():
            lab.say(f"{lab.title(place)}: skipped, because the pretrained weights are missing.")
        return
    word, shape = settled_word(lab.weights or WEIGHTS), found.facts.model
    own = {item.name: getattr(shape, item.name) for item in fields(shape) if item.name not in ITS_OWN}
    scratch = ["weights=null", "train.layer_decay=1", *(f"model.{name}={typed(value)}" for name, value in own.items())]
    ways = ([*scratch, *OWN], [f"weights={word}", *LARGE], [f"weights={word}", *OWN])
    common = [*MNIST, *(QUICK if lab.quick else FULL)]
    cells = {
        name: lab.study(place, "cifar10-finetune", [*common, *words]).cells[0]
        for (name, (place, _)), words in zip(STARTS.items(), ways, strict=True)
    }
    called = word if word.startswith(ONLINE) else Path(word).name
    _told(report, cells, called)


def _told(report: Report, cells: dict[str, Cell], weights: str) -> None:
    scratch, resized, changed = cells.values()
    epochs = len(scratch.curves("train_accuracy")[0])
    rows = [
        [name, STARTS[name][1], f"{100 * _first(cell):.1f} %", cell.percent, f"{cell.number('seconds'):.0f}"]
        for name, cell in cells.items()
    ]
    head = [
        "start",
        "the sheet (86 M parameters; small, 22 M, was its best)",
        "training accuracy, first epoch",
    ]
    report.table(
        [*head, f"held-out accuracy after {epochs} epochs, {len(scratch.results)} seeds", "seconds per run"], rows
    )
    cost = resized.number("seconds") / changed.number("seconds")
    better, verdict = gain(scratch, changed, 2)
    other, other_verdict = gain(resized, changed, 2)
    no = "no " if _first(changed) <= _first(resized) else ""
    report.text(
        f"""Weights: {weights}, {changed.number("parameters") / 1e6:.1f} M parameters with ten classes. After {epochs}
        epochs the accuracy of the model from scratch still rises steeply. At that point the pretrained weights change
        the accuracy on 28 × 28 images by {better} points ({verdict}). Changing the model instead of resizing the images
        changes it by {other} points ({other_verdict}). Both differences are taken seed by seed. Per epoch the changed
        model learns {no}faster: its training accuracy in the first epoch is {100 * _first(changed):.1f} %, that of the
        resized images {100 * _first(resized):.1f} %. Each has a learning rate that suits its size: for resized images
        half, {RATE}. An epoch of the changed model takes 1/{cost:.1f} of the time, with 49 patches instead of 196. The
        sheet's own `vit_base_patch16_224` (86 M parameters) and `vit_small_patch16_224` (22 M, its best) were not run
        here. To compare them, use `--weights timm:vit_small_patch16_224`."""
    )
    report.numbers["starts"] = {name: cell.accuracies for name, cell in cells.items()}


def _first(cell: Cell) -> float:
    return mean(curve[0] for curve in cell.curves("train_accuracy"))
