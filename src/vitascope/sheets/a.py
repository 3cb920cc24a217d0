"""Sheet A: a minimal ViT on MNIST, and its attention map."""

from vitascope.errors import format_count
from vitascope.model.anatomy import total_parameters
from vitascope.model.config import ModelConfig, Size
from vitascope.run.directory import Run
from vitascope.sheets.lab import Lab, reached
from vitascope.sheets.pictures import map_figure
from vitascope.sheets.writing import Report
from vitascope.study.answer import Cell
from vitascope.study.report import bands

TITLE = "a minimal ViT on MNIST, and its attention map"
EXPERIMENTS = {  # folder -> title, in the order of the sheet
    "images": "patch size × number of training images",
    "alone": "one run, trained alone to measure its time",
}
SHEETS = 0.9461  # the sheet's result after 1,000 epochs
PLAIN = ["data.augment.shift=0", "data.augment.rotate=0", "data.augment.scale=0", "train.label_smoothing=0"]
PATCHES = ["model.patch_size=14,7"]  # the first is compared with the sheet, the last one's attention is shown
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
        [f"accuracy with {counts[0]:,} images", "not reported", *map(_accuracy, (few, few_small))],
        ["94.61 % first reached (held-out images)", "not reported", str(when), str(reached(many_small, SHEETS))],
        [f"time to 94.61 % in one run of {length} epochs, including start-up", "", f"{waited} (one seed)", "not run"],
        ["converged", "after about 200 epochs", _converged(many), _converged(many_small)],
    ]
    head = [f"here, {_patches(size)}, {format_count(seeds, 'seed')}" for size in (large, small)]
    report.table(["quantity", "the sheet", *head], rows)
    names = {
        cell.name: f"{count:,} images, {_patches(cell.settings['model.patch_size'])}"
        for cell, count in zip(found.cells, counts * 2, strict=True)
    }
    report.picture("curves", bands(found, names))
    likely = """A likely reason: without a position embedding the model sees an unordered set of patches. Only the
    content of each patch counts, and a large patch contains more."""
    likely = likely if many.accuracy > many_small.accuracy else ""
    reach = (
        f"With {_patches(large)} the accuracy is {many.percent}, with {_patches(small)} {many_small.percent}. {likely}"
    )
    sooner = f"""The run of {length} epochs reaches 94.61 % in fewer epochs. A likely reason is the warm-up of the
    learning rate over the first tenth of a run: {length // 10} epochs instead of {when.length // 10}."""
    sooner = sooner if waited.epochs and when.epochs and waited.epochs[0] < min(when.epochs) else ""
    report.text(f"{reach} {_by_heart(many, many_small)} {sooner} {found.clock}")
    report.numbers |= {"accuracy": many.accuracies, "accuracy_few": few.accuracies}
    report.numbers |= {"accuracy_small": many_small.accuracies, "accuracy_few_small": few_small.accuracies}
    report.numbers |= {"reached": [when.epochs, when.seconds], "reached_alone": [waited.epochs, waited.seconds]}
    _look(report, runs[-1])


def _model_words(large: ModelConfig, small: ModelConfig) -> str:
    return f"""The model has {large.depth} blocks of width {large.embed_dim} with one head, no normalisation, no output
        projection, no position embedding and an MLP with input, hidden and output width {large.embed_dim}. The class
        token is drawn from N(0, 1). The model has {total_parameters(large):,} parameters with
        {_patches(large.patch_size)} and {total_parameters(small):,} with {_patches(small.patch_size)}. The sheet does
        not give width, depth, patch size, learning rate, batch size or the evaluated split. We chose width 64, depth 2,
        learning rate 1e-3 and batch size 256 (`vitascope anatomy sheet-a`), and both patch sizes. No augmentation is
        used. The curves show held-out images. The accuracy is measured on the 10,000 test images, once, after the last
        epoch."""


def _run_of(lab: Lab, cell: Cell) -> Run:
    fraction, size = float(cell.settings["data.fraction"]), int(cell.settings["model.patch_size"])
    return lab.run("images", **{"data.fraction": fraction, "model.patch_size": size})


def _patches(size: Size | str) -> str:
    return f"patches of {size}×{size} pixels"


def _accuracy(cell: Cell) -> str:
    return f"{cell.percent}, {len(cell.curves('val_accuracy')[0])} epochs, {cell.number('seconds'):.0f} s per run"


def _look(report: Report, first: Run) -> None:
    model = first.recipe.model
    report.heading(f"The attention map, {_patches(model.patch_size)}")
    figure, maps = map_figure(first)
    report.picture("map", figure)
    tokens, own = len(maps), maps.diagonal()
    strongest = int((maps.argmax(1) == maps.new_tensor(range(tokens)).long()).sum())
    report.text(
        f"""The figure shows one held-out image and the last block of the first seed's model. The map has {tokens} ×
        {tokens} values: one row per query, one column per key, the class token first. Every row sums to 1 (within
        {float((maps.sum(1) - 1).abs().max()):.0e}). A token's weight on itself is {own.mean():.3f} on average; uniform
        attention would give {1 / tokens:.3f}. In {strongest} of {tokens} rows this weight is the largest. Whether a
        token attends to itself is learnt, not built in."""
    )
    sizes = {"width": model.embed_dim, "root": model.embed_dim**0.5, "tokens": tokens, "edges": tokens**2}
    report.questions(**sizes, largest=float(maps[0, 1:].max()))


def _by_heart(*cells: Cell) -> str:
    """Describe overfitting: the held-out loss rises again although the accuracy does not fall."""
    rises = []
    for cell in cells:
        losses = cell.mean_curve("val_loss")
        lowest = min(range(len(losses)), key=losses.__getitem__)
        if losses[-1] > 1.1 * losses[lowest]:
            size, learnt = cell.settings["model.patch_size"], 100 * (cell.last("train_accuracy") or 0)
            rises.append(
                f"with {_patches(size)} from {losses[lowest]:.3f} (epoch {lowest + 1}) to {losses[-1]:.3f}, with "
                f"{learnt:.0f} % training accuracy"
            )
    if not rises:
        return ""
    return f"""The held-out loss rises again: {"; ".join(rises)}. The model overfits; a likely reason is growing
        confidence in wrong predictions."""


def _converged(cell: Cell) -> str:
    """The first epoch after which the mean curve stays within half a percentage point of its last value. In the last
    quarter of the run this says nothing about convergence."""
    mean = cell.mean_curve("val_accuracy")
    late = [epoch for epoch, value in enumerate(mean, start=1) if abs(value - mean[-1]) > 0.005]
    first = (late[-1] if late else 0) + 1
    if first > 0.75 * len(mean):
        return f"not converged in {format_count(len(mean), 'epoch')}"
    return f"within 0.5 points of the final value from epoch {first} on"
