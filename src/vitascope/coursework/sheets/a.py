"""Sheet A: a minimal ViT on MNIST, and its attention map."""

from vitascope.coursework.sheets.experiments import SheetExperiments, compute_time_to_accuracy
from vitascope.coursework.sheets.figures import plot_attention_map
from vitascope.coursework.sheets.report import SheetReport
from vitascope.errors import format_count
from vitascope.model.anatomy import count_parameters
from vitascope.model.config import ModelConfig, Size
from vitascope.run.directory import Run
from vitascope.study.report import draw_study_curves
from vitascope.study.results import CombinationResults

TITLE = "a minimal ViT on MNIST, and its attention map"
EXPERIMENTS = {  # folder -> title, in the order of the sheet
    "images": "patch size × number of training images",
    "alone": "one run, trained alone to measure its time",
}
SHEET_ACCURACY = 0.9461  # the sheet's result after 1,000 epochs
NO_AUGMENTATION = ["data.augment.shift=0", "data.augment.rotate=0", "data.augment.scale=0", "train.label_smoothing=0"]
PATCH_SIZES = ["model.patch_size=14,7"]  # the first is compared with the sheet, the last one's attention is shown
FULL_OVERRIDES = [*PATCH_SIZES, "data.validation=0.1666667", "data.fraction=0.02,0.8", "train.epochs=200"]
SINGLE_RUN_OVERRIDES = ["model.patch_size=14", "data.validation=0.1666667", "data.fraction=0.8", "train.epochs=20"]
SINGLE_RUN_QUICK_OVERRIDES = ["model.patch_size=14", "data.validation=0.1", "data.fraction=0.05", "train.epochs=8"]
QUICK_OVERRIDES = [*PATCH_SIZES, "data.validation=0.1", "data.fraction=0.0186,0.05", "train.epochs=8"]


def run_experiments(experiments: SheetExperiments, report: SheetReport) -> None:
    words = QUICK_OVERRIDES if experiments.quick else FULL_OVERRIDES
    found = experiments.run_study(
        "images", "sheet-a", [*words, *NO_AUGMENTATION], eval_split="test", needs_weights=True
    )
    few, many, few_small, many_small = found.combinations
    runs = [_find_run(experiments, cell) for cell in found.combinations]
    counts = [run.machine["training_images"] for run in runs[:2]]
    when = compute_time_to_accuracy(many, SHEET_ACCURACY)
    [alone] = (
        experiments.copy_for_single_run()
        .run_study(
            "alone",
            "sheet-a",
            [*(SINGLE_RUN_QUICK_OVERRIDES if experiments.quick else SINGLE_RUN_OVERRIDES), *NO_AUGMENTATION],
        )
        .combinations
    )
    waited, length = compute_time_to_accuracy(alone, SHEET_ACCURACY, "waited"), len(alone.get_curves("val_accuracy")[0])
    large, small = (cell.settings["model.patch_size"] for cell in (many, many_small))
    report.add_text(_describe_models(runs[1].recipe.model, runs[-1].recipe.model))
    report.add_heading("The sheet's numbers beside ours")
    seeds = len(many.results)
    rows = [
        [
            f"accuracy with {counts[1]:,} images",
            "94.61 % after 1,000 epochs",
            *map(_format_accuracy, (many, many_small)),
        ],
        [f"accuracy with {counts[0]:,} images", "not reported", *map(_format_accuracy, (few, few_small))],
        [
            "94.61 % first reached (held-out images)",
            "not reported",
            str(when),
            str(compute_time_to_accuracy(many_small, SHEET_ACCURACY)),
        ],
        [f"time to 94.61 % in one run of {length} epochs, including start-up", "", f"{waited} (one seed)", "not run"],
        ["converged", "after about 200 epochs", _describe_convergence(many), _describe_convergence(many_small)],
    ]
    head = [f"here, {_patches(size)}, {format_count(seeds, 'seed')}" for size in (large, small)]
    report.add_table(["quantity", "the sheet", *head], rows)
    names = {
        cell.name: f"{count:,} images, {_patches(cell.settings['model.patch_size'])}"
        for cell, count in zip(found.combinations, counts * 2, strict=True)
    }
    report.add_figure("curves", draw_study_curves(found, names))
    likely = """A likely reason: without a position embedding the model sees an unordered set of patches. Only the
    content of each patch counts, and a large patch contains more."""
    likely = likely if many.mean_accuracy > many_small.mean_accuracy else ""
    reach = f"With {_patches(large)} the accuracy is {many.formatted_accuracy}, with {_patches(small)} {many_small.formatted_accuracy}. {likely}"
    sooner = f"""The run of {length} epochs reaches 94.61 % in fewer epochs. A likely reason is the warm-up of the
    learning rate over the first tenth of a run: {length // 10} epochs instead of {when.num_epochs // 10}."""
    sooner = sooner if waited.epochs and when.epochs and waited.epochs[0] < min(when.epochs) else ""
    report.add_text(f"{reach} {_describe_overfitting(many, many_small)} {sooner} {found.timing_note}")
    report.measurements |= {"accuracy": many.accuracies, "accuracy_few": few.accuracies}
    report.measurements |= {"accuracy_small": many_small.accuracies, "accuracy_few_small": few_small.accuracies}
    report.measurements |= {"reached": [when.epochs, when.seconds], "reached_alone": [waited.epochs, waited.seconds]}
    _add_attention_map_section(report, runs[-1])


def _describe_models(large_patch_config: ModelConfig, small_patch_config: ModelConfig) -> str:
    return f"""The model has {large_patch_config.depth} blocks of width {large_patch_config.embed_dim} with one head, no normalisation, no output
        projection, no position embedding and an MLP with input, hidden and output width {large_patch_config.embed_dim}. The class
        token is drawn from N(0, 1). The model has {count_parameters(large_patch_config):,} parameters with
        {_patches(large_patch_config.patch_size)} and {count_parameters(small_patch_config):,} with {_patches(small_patch_config.patch_size)}. The sheet does
        not give width, depth, patch size, learning rate, batch size or the evaluated split. We chose width 64, depth 2,
        learning rate 1e-3 and batch size 256 (`vitascope anatomy sheet-a`), and both patch sizes. No augmentation is
        used. The curves show held-out images. The accuracy is measured on the 10,000 test images, once, after the last
        epoch."""


def _find_run(experiments: SheetExperiments, cell: CombinationResults) -> Run:
    fraction, size = float(cell.settings["data.fraction"]), int(cell.settings["model.patch_size"])
    return experiments.find_run("images", **{"data.fraction": fraction, "model.patch_size": size})


def _patches(size: Size | str) -> str:
    return f"patches of {size}×{size} pixels"


def _format_accuracy(cell: CombinationResults) -> str:
    return f"{cell.formatted_accuracy}, {len(cell.get_curves('val_accuracy')[0])} epochs, {cell.compute_mean('seconds'):.0f} s per run"


def _add_attention_map_section(report: SheetReport, run: Run) -> None:
    model = run.recipe.model
    report.add_heading(f"The attention map, {_patches(model.patch_size)}")
    figure, maps = plot_attention_map(run)
    report.add_figure("map", figure)
    tokens, own = len(maps), maps.diagonal()
    strongest = int((maps.argmax(1) == maps.new_tensor(range(tokens)).long()).sum())
    report.add_text(
        f"""The figure shows one held-out image and the last block of the first seed's model. The map has {tokens} ×
        {tokens} values: one row per query, one column per key, the class token first. Every row sums to 1 (within
        {float((maps.sum(1) - 1).abs().max()):.0e}). A token's weight on itself is {own.mean():.3f} on average; uniform
        attention would give {1 / tokens:.3f}. In {strongest} of {tokens} rows this weight is the largest. Whether a
        token attends to itself is learnt, not built in."""
    )
    sizes = {"width": model.embed_dim, "root": model.embed_dim**0.5, "tokens": tokens, "edges": tokens**2}
    report.add_questions(**sizes, largest=float(maps[0, 1:].max()))


def _describe_overfitting(*cells: CombinationResults) -> str:
    """Describe overfitting: the held-out loss rises again although the accuracy does not fall."""
    rises = []
    for cell in cells:
        losses = cell.compute_mean_curve("val_loss")
        lowest = min(range(len(losses)), key=losses.__getitem__)
        if losses[-1] > 1.1 * losses[lowest]:
            size, learnt = (
                cell.settings["model.patch_size"],
                100 * (cell.compute_mean_last_value("train_accuracy") or 0),
            )
            rises.append(
                f"with {_patches(size)} from {losses[lowest]:.3f} (epoch {lowest + 1}) to {losses[-1]:.3f}, with "
                f"{learnt:.0f} % training accuracy"
            )
    if not rises:
        return ""
    return f"""The held-out loss rises again: {"; ".join(rises)}. The model overfits; a likely reason is growing
        confidence in wrong predictions."""


def _describe_convergence(cell: CombinationResults) -> str:
    """The first epoch after which the mean curve stays within half a percentage point of its last value. In the last
    quarter of the run this says nothing about convergence."""
    mean = cell.compute_mean_curve("val_accuracy")
    late = [epoch for epoch, value in enumerate(mean, start=1) if abs(value - mean[-1]) > 0.005]
    first = (late[-1] if late else 0) + 1
    if first > 0.75 * len(mean):
        return f"not converged in {format_count(len(mean), 'epoch')}"
    return f"within 0.5 points of the final value from epoch {first} on"
