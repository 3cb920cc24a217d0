"""Sheet D's larger model on MNIST: from scratch, and from ImageNet weights in the sheet's two ways."""

from pathlib import Path
from statistics import mean

from vitascope.errors import UserError
from vitascope.model.anatomy import total_parameters
from vitascope.sheets.lab import Lab
from vitascope.sheets.writing import Report
from vitascope.study.answer import Cell
from vitascope.training.pretrained import settled_word
from vitascope.weights.pretrained import ONLINE, open_weights

WEIGHTS = "timm:deit_tiny_patch16_224.fb_in1k"
MNIST = ["data.name=mnist", "model.in_chans=1"]
OWN = ["model.img_size=28", "model.patch_size=4"]
LARGE = ["model.img_size=224", "model.patch_size=16", "train.lr=5e-4"]
FULL = ["train.epochs=2"]
QUICK = ["data.validation=0.01", "data.fraction=0.005", "train.epochs=2", "train.batch_size=16"]
SAYS = {
    "from scratch": "about an hour, starts near 30 %, poor",
    "ImageNet weights, images resized to 224": "better than from scratch",
    "ImageNet weights, the model changed to 28 × 28": "learns much quicker",
}


def compare_starts(lab: Lab, report: Report) -> None:
    report.heading("A larger model, from scratch and from ImageNet weights")
    word = settled_word(lab.weights or WEIGHTS)
    try:
        found = open_weights(word, img_size=224)
    except UserError as error:
        report.text(
            f"""Not run, for want of weights: {error} With a file at hand: `vitascope sheet D --weights FILE`. What was
            measured on an H200 is in docs/pretrained.md."""
        )
        return
    shape = found.facts.model
    sizes = {"embed_dim": shape.embed_dim, "depth": shape.depth, "num_heads": shape.num_heads}
    scratch = ["weights=null", "train.layer_decay=1", *(f"model.{name}={size}" for name, size in sizes.items())]
    ways = {
        "from scratch": ("start-scratch", [*scratch, *OWN]),
        "ImageNet weights, images resized to 224": ("start-resized", [f"weights={word}", *LARGE]),
        "ImageNet weights, the model changed to 28 × 28": ("start-changed", [f"weights={word}", *OWN]),
    }
    common = [*MNIST, *(QUICK if lab.quick else FULL)]
    cells = {
        name: lab.study(place, "cifar10-finetune", [*common, *words]).cells[0] for name, (place, words) in ways.items()
    }
    called = word if word.startswith(ONLINE) else Path(word).name
    _told(report, cells, called, total_parameters(shape))


def _told(report: Report, cells: dict[str, Cell], weights: str, parameters: int) -> None:
    epochs = len(_curves(next(iter(cells.values())), "train_accuracy")[0])
    rows = [
        [name, SAYS[name], f"{100 * _first(cell):.1f} %", cell.percent, f"{cell.number('seconds'):.0f}"]
        for name, cell in cells.items()
    ]
    head = ["start", "the sheet (86 M parameters)", "right in the first epoch, training images"]
    report.table([*head, f"held-back accuracy after {epochs} epochs", "seconds a run"], rows)
    scratch, resized, changed = cells.values()
    cost = resized.number("seconds") / changed.number("seconds")
    report.text(
        f"""{weights}, {parameters / 1e6:.1f} M parameters, instead of `vit_base_patch16_224`'s 86 M: the same
        questions, sooner answered. In the first epoch {100 * _first(scratch):.0f} % of the training images are right
        from scratch, {100 * _first(resized):.0f} % with the weights and large images, {100 * _first(changed):.0f} %
        with the changed model, whose run takes 1/{cost:.1f} of the time: 49 patches instead of 196."""
    )
    report.numbers["starts"] = {name: cell.accuracies for name, cell in cells.items()}


def _first(cell: Cell) -> float:
    return mean(curve[0] for curve in _curves(cell, "train_accuracy"))


def _curves(cell: Cell, name: str) -> list[list[float]]:
    return [found["curves"][name] for found in cell.results.values()]
