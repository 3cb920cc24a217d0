"""Sheet A: a minimal ViT on MNIST, and its attention map."""

from vitascope.model.anatomy import total_parameters
from vitascope.model.config import ModelConfig
from vitascope.run.directory import Run
from vitascope.sheets.lab import Lab, reached
from vitascope.sheets.pictures import map_figure
from vitascope.sheets.writing import Report
from vitascope.study.answer import Cell
from vitascope.study.report import bands

TITLE = "a minimal ViT on MNIST, and its attention map"
SHEETS = 0.9461  # what it reports after 1,000 epochs
PLAIN = ["data.augment.shift=0", "data.augment.rotate=0", "data.augment.scale=0", "train.label_smoothing=0"]
PATCHES = ["model.patch_size=14,7"]  # the first is compared with the sheet, the last is looked into
FULL = [*PATCHES, "data.validation=0.1666667", "data.fraction=0.02,0.8", "train.epochs=200"]
ALONE = ["model.patch_size=14", "data.validation=0.1666667", "data.fraction=0.8", "train.epochs=20"]
ALONE_QUICK = ["model.patch_size=14", "data.validation=0.1", "data.fraction=0.05", "train.epochs=8"]
QUICK = [*PATCHES, "data.validation=0.1", "data.fraction=0.0186,0.05", "train.epochs=8"]


def run(lab: Lab, report: Report) -> None:
    words = QUICK if lab.quick else FULL
    found = lab.study("images", "sheet-a", [*words, *PLAIN], judge="test", weights=True)
    few, many, few_small, many_small = found.cells
    runs = [_run_of(lab, cell) for cell in found.cells]
    counts = [run.machine["training_images"] for run in runs[:2]]
    when = reached(many, SHEETS)
    [alone] = lab.alone().study("alone", "sheet-a", [*(ALONE_QUICK if lab.quick else ALONE), *PLAIN]).cells
    waited, length = reached(alone, SHEETS, "waited"), len(alone.curves("val_accuracy")[0])
    large, small = (cell.settings["model.patch_size"] for cell in (many, many_small))
    report.text(_model_words(runs[1].recipe.model, runs[-1].recipe.model))
    report.heading("The sheet's numbers beside ours")
    seeds = len(many.results)
    rows = [
        [f"accuracy with {counts[1]:,} images", "94.61 % after 1,000 epochs", *map(_accuracy, (many, many_small))],
        [f"accuracy with {counts[0]:,} images", "(trained first, not reported)", *map(_accuracy, (few, few_small))],
        ["94.61 % is first reached (held-back images)", "(not said)", str(when), str(reached(many_small, SHEETS))],
        [f"the same in a run of {length} epochs, alone, with setting up", "", f"{waited} (one seed)", "(not run)"],
        ["converged", "after about 200 epochs", _converged(many), _converged(many_small)],
    ]
    report.table(["what", "the sheet", *(f"here, patches of {size}, {seeds} seeds" for size in (large, small))], rows)
    names = {
        cell.name: f"{count:,} images, patches of {cell.settings['model.patch_size']}"
        for cell, count in zip(found.cells, counts * 2, strict=True)
    }
    report.picture("curves", bands(found, names))
    likely = """A likely reason: without a position embedding the model is handed a bag of patches; which lay where
    cannot be told, so what one patch shows by itself decides, and a large one shows more."""
    likely = likely if many.accuracy > many_small.accuracy else ""
    told = f"Patches of {large} reach {many.percent}, patches of {small} {many_small.percent}. {likely}"
    sooner = f"""The run of {length} epochs is there sooner, probably because the rate rises in the first tenth of every
    run: in {length // 10} epochs instead of {when.length // 10}."""
    sooner = sooner if waited.epochs and when.epochs and waited.epochs[0] < min(when.epochs) else ""
    report.text(f"{told} {_by_heart(many, many_small)} {sooner} {found.clock}")
    report.numbers |= {"accuracy": many.accuracies, "accuracy_few": few.accuracies}
    report.numbers |= {"accuracy_small": many_small.accuracies, "accuracy_few_small": few_small.accuracies}
    report.numbers |= {"reached": [when.epochs, when.seconds], "reached_alone": [waited.epochs, waited.seconds]}
    _look(report, runs[-1])


def _model_words(large: ModelConfig, small: ModelConfig) -> str:
    return f"""The model: {large.depth} blocks of {large.embed_dim} features with one head, no norm, no output
        projection, no positions, an MLP of widths [d, d, d]; a class token drawn from N(0, 1);
        {total_parameters(large):,} parameters with patches of {large.patch_size}, {total_parameters(small):,} with
        patches of {small.patch_size}. The sheet gives neither width, depth, patch size, rate, batch nor the
        split it scored: 64, 2, 1e-3 and 256 are our choice (`vitascope anatomy sheet-a`), patches are tried in both
        sizes, images are not varied, the curves are of images held back from training, and the accuracy is that of the
        10,000 test images, looked at once, after the last epoch."""


def _run_of(lab: Lab, cell: Cell) -> Run:
    fraction, size = float(cell.settings["data.fraction"]), int(cell.settings["model.patch_size"])
    return lab.run("images", **{"data.fraction": fraction, "model.patch_size": size})


def _accuracy(cell: Cell) -> str:
    return f"{cell.percent}, {len(cell.curves('val_accuracy')[0])} epochs, {cell.number('seconds'):.0f} s a run"


def _look(report: Report, first: Run) -> None:
    model = first.recipe.model
    report.heading(f"The attention map, patches of {model.patch_size}")
    figure, maps = map_figure(first)
    report.picture("map", figure)
    tokens, own = len(maps), maps.diagonal()
    strongest = int((maps.argmax(1) == maps.new_tensor(range(tokens)).long()).sum())
    report.text(
        f"""One held-back image, the last block, the first seed's model. The map has {tokens} × {tokens} numbers: one
        row per query, one column per key, the class token first. Every row sums to 1 (to within
        {float((maps.sum(1) - 1).abs().max()):.0e}). A token gives itself {own.mean():.3f} on average (an even share
        would be {1 / tokens:.3f}), and in {strongest} of {tokens} rows its own place is the strongest: whether a token
        looks at itself is learnt, not built in."""
    )
    sizes = {"width": model.embed_dim, "root": model.embed_dim**0.5, "tokens": tokens, "edges": tokens**2}
    report.questions(**sizes, largest=float(maps[0, 1:].max()))


def _by_heart(*cells: Cell) -> str:
    """Where the held-back loss rises again although accuracy stays."""
    told = []
    for cell in cells:
        losses = cell.mean_curve("val_loss")
        lowest = min(range(len(losses)), key=losses.__getitem__)
        if losses[-1] > 1.1 * losses[lowest]:
            size, learnt = cell.settings["model.patch_size"], 100 * (cell.last("train_accuracy") or 0)
            told.append(
                f"patches of {size} from {losses[lowest]:.3f} (epoch {lowest + 1}) to {losses[-1]:.3f}, with "
                f"{learnt:.0f} % of the training images right"
            )
    if not told:
        return ""
    return f"""The held-back loss rises again ({"; ".join(told)}): the images are learnt by heart, and wrong answers
        probably become surer."""


def _converged(cell: Cell) -> str:
    """The first epoch from which on the mean curve stays within half a point of its last value."""
    mean = cell.mean_curve("val_accuracy")
    late = [epoch for epoch, value in enumerate(mean, start=1) if abs(value - mean[-1]) > 0.005]
    return f"within half a point of the end from epoch {(late[-1] if late else 0) + 1} on"
