"""Sheet A: a minimal ViT on MNIST, and its attention map."""

from vitascope.coursework.sheets.experiments import SheetExperiments, compute_time_to_accuracy
from vitascope.coursework.sheets.figures import draw_sample_attention_map
from vitascope.coursework.sheets.report import SheetReport
from vitascope.errors import format_count
from vitascope.model.anatomy import count_parameters
from vitascope.model.config import ModelConfig, Size
from vitascope.run.directory import Run
from vitascope.study.report import draw_study_curves
from vitascope.study.results import CombinationResults, StudyResults

TITLE = "a minimal ViT on MNIST, and its attention map"
EXPERIMENTS = {  # folder -> title, in the order of the sheet
    "images": "patch size × number of training images",
    "alone": "time of one run that was not trained in a batch with others",
}
SHEET_ACCURACY = 0.9461  # the sheet's result after 1,000 epochs
NO_AUGMENTATION = ["data.augment.shift=0", "data.augment.rotate=0", "data.augment.scale=0", "train.label_smoothing=0"]
PATCH_SIZES = ["model.patch_size=14,7"]  # the first is compared with the sheet, the last one's attention is shown
FULL_OVERRIDES = [*PATCH_SIZES, "data.validation=0.1666667", "data.fraction=0.02,0.8", "train.epochs=200"]
SINGLE_RUN_OVERRIDES = ["model.patch_size=14", "data.validation=0.1666667", "data.fraction=0.8", "train.epochs=20"]
SINGLE_RUN_QUICK_OVERRIDES = ["model.patch_size=14", "data.validation=0.1", "data.fraction=0.05", "train.epochs=8"]
QUICK_OVERRIDES = [*PATCH_SIZES, "data.validation=0.1", "data.fraction=0.0186,0.05", "train.epochs=8"]


def run_studies_and_fill_report(experiments: SheetExperiments, report: SheetReport) -> None:
    """Run sheet A's studies and fill the report."""
    overrides = QUICK_OVERRIDES if experiments.quick else FULL_OVERRIDES
    results = experiments.run_study(
        "images", "sheet-a", [*overrides, *NO_AUGMENTATION], eval_split="test", needs_weights=True
    )
    overrides = SINGLE_RUN_QUICK_OVERRIDES if experiments.quick else SINGLE_RUN_OVERRIDES
    single_run = experiments.copy_for_single_run()
    [alone] = single_run.run_study("alone", "sheet-a", [*overrides, *NO_AUGMENTATION]).combinations
    runs = [_get_run_of_combination(experiments, cell) for cell in results.combinations]
    image_counts = [run.machine.get("training_images", 0) for run in runs[:2]]
    report.add_text(_describe_models(runs[1].recipe.model, runs[-1].recipe.model))
    report.add_heading("The sheet's numbers beside ours")
    _add_accuracy_table(report, results.combinations, alone, image_counts)
    labels = {
        cell.name: f"{count:,} images, {_describe_patches(cell.settings['model.patch_size'])}"
        for cell, count in zip(results.combinations, image_counts * 2, strict=True)
    }
    report.save_and_add_figure("curves", draw_study_curves(results, labels))
    _add_conclusions(report, results, alone)
    _add_attention_map_and_questions(report, runs[-1])


def _add_accuracy_table(
    report: SheetReport,
    cells: list[CombinationResults],
    single_run_results: CombinationResults,
    image_counts: list[int],
) -> None:
    """Add the sheet's numbers beside those measured here, for large and small patches."""
    few, many, few_small, many_small = cells
    time_alone = compute_time_to_accuracy(single_run_results, SHEET_ACCURACY, "waited")
    num_epochs = len(single_run_results.get_curves_of_all_seeds("val_accuracy")[0])
    rows = [
        [
            f"accuracy with {image_counts[1]:,} images",
            "94.61 % after 1,000 epochs",
            *map(_format_accuracy, (many, many_small)),
        ],
        [f"accuracy with {image_counts[0]:,} images", "not reported", *map(_format_accuracy, (few, few_small))],
        [
            "94.61 % first reached (held-out images)",
            "not reported",
            *(str(compute_time_to_accuracy(cell, SHEET_ACCURACY)) for cell in (many, many_small)),
        ],
        [
            f"time to 94.61 % in one run of {num_epochs} epochs, including start-up",
            "not reported",
            f"{time_alone} (one seed)",
            "not run",
        ],
        ["converged", "after about 200 epochs", *map(_describe_first_epoch_near_final_accuracy, (many, many_small))],
    ]
    seeds = format_count(len(many.results), "seed")
    header = [f"here, {_describe_patches(cell.settings['model.patch_size'])}, {seeds}" for cell in (many, many_small)]
    report.add_table(["quantity", "the sheet", *header], rows)


def _add_conclusions(report: SheetReport, results: StudyResults, single_run_results: CombinationResults) -> None:
    """Add the comparison of the patch sizes, overfitting, and the measurements."""
    few, many, few_small, many_small = results.combinations
    large, small = (_describe_patches(cell.settings["model.patch_size"]) for cell in (many, many_small))
    time, time_alone = (
        compute_time_to_accuracy(many, SHEET_ACCURACY),
        compute_time_to_accuracy(single_run_results, SHEET_ACCURACY, "waited"),
    )
    num_epochs = time_alone.num_epochs
    likely = """A likely reason: without a position embedding the model sees an unordered set of patches. Only the
    content of each patch counts, and a large patch contains more."""
    likely = likely if many.mean_accuracy > many_small.mean_accuracy else ""
    patches = f"With {large} the accuracy is {many.formatted_accuracy}, with {small} {many_small.formatted_accuracy}."
    sooner = f"""The run of {num_epochs} epochs reaches 94.61 % in fewer epochs. A likely reason is the warm-up of the
    learning rate over the first tenth of a run: {num_epochs // 10} epochs instead of {time.num_epochs // 10}."""
    sooner = sooner if time_alone.epochs and time.epochs and time_alone.epochs[0] < min(time.epochs) else ""
    overfitting = _describe_overfitting_if_any(many, many_small)
    report.add_text(f"{patches} {likely} {overfitting} {sooner} {results.format_timing_note('All other times')}")
    report.measurements |= {"accuracy": many.accuracies, "accuracy_few": few.accuracies}
    report.measurements |= {"accuracy_small": many_small.accuracies, "accuracy_few_small": few_small.accuracies}
    report.measurements |= {
        "reached": [time.epochs, time.seconds],
        "reached_alone": [time_alone.epochs, time_alone.seconds],
    }


def _describe_models(large_patch_config: ModelConfig, small_patch_config: ModelConfig) -> str:
    large, small = large_patch_config, small_patch_config
    return f"""The model has {large.depth} blocks of width {large.embed_dim} with one head, no normalisation, no output
        projection, no position embedding and an MLP with input, hidden and output width {large.embed_dim}. The class
        token is drawn from N(0, 1). The model has {count_parameters(large):,} parameters with
        {_describe_patches(large.patch_size)} and {count_parameters(small):,} with
        {_describe_patches(small.patch_size)}. The sheet does not give width, depth, patch size, learning rate, batch
        size or the evaluated split. We chose width 64, depth 2,
        learning rate 1e-3 and batch size 256 (`vitascope anatomy sheet-a`), and both patch sizes. No augmentation is
        used. The curves show held-out images. The accuracy is measured on the 10,000 test images, once, after the last
        epoch."""


def _get_run_of_combination(experiments: SheetExperiments, cell: CombinationResults) -> Run:
    """Find the first run of a combination."""
    fraction, size = float(cell.settings["data.fraction"]), int(cell.settings["model.patch_size"])
    return experiments.get_first_finished_run("images", **{"data.fraction": fraction, "model.patch_size": size})


def _describe_patches(patch_size: Size | str) -> str:
    return f"patches of {patch_size}×{patch_size} pixels"


def _format_accuracy(cell: CombinationResults) -> str:
    num_epochs = len(cell.get_curves_of_all_seeds("val_accuracy")[0])
    return f"{cell.formatted_accuracy}, {num_epochs} epochs, {cell.compute_mean('seconds'):.0f} s per run"


def _add_attention_map_and_questions(report: SheetReport, run: Run) -> None:
    model = run.recipe.model
    report.add_heading(f"The attention map, {_describe_patches(model.patch_size)}")
    figure, maps = draw_sample_attention_map(run)
    report.save_and_add_figure("map", figure)
    tokens, self_attention = len(maps), maps.diagonal()
    strongest = int((maps.argmax(1) == maps.new_tensor(range(tokens)).long()).sum())
    report.add_text(
        f"""The figure shows one held-out image and the last block of the first seed's model. The map has {tokens} ×
        {tokens} values: one row per query, one column per key, the class token first. Every row sums to 1 (within
        {float((maps.sum(1) - 1).abs().max()):.0e}). A token's weight on itself is {self_attention.mean():.3f} on
        average; uniform
        attention would give {1 / tokens:.3f}. In {strongest} of {tokens} rows the token's own
        weight is the largest. Whether a
        token attends to itself is learnt, not built in."""
    )
    sizes = {"width": model.embed_dim, "root": model.embed_dim**0.5, "tokens": tokens, "edges": tokens**2}
    report.add_questions_from_template(**sizes, largest=float(maps[0, 1:].max()))


def _describe_overfitting_if_any(*cells: CombinationResults) -> str:
    """Describe overfitting: the held-out loss rises again although the accuracy does not fall."""
    rises = []
    for cell in cells:
        losses = cell.compute_mean_curve("val_loss")
        lowest = min(range(len(losses)), key=losses.__getitem__)
        if losses[-1] > 1.1 * losses[lowest]:
            patch_size = cell.settings["model.patch_size"]
            train_accuracy = 100 * (cell.compute_mean_last_value("train_accuracy") or 0)
            rises.append(
                f"with {_describe_patches(patch_size)} from {losses[lowest]:.3f} (epoch {lowest + 1}) to "
                f"{losses[-1]:.3f}, with {train_accuracy:.0f} % training accuracy"
            )
    if not rises:
        return ""
    return f"""The held-out loss rises again: {"; ".join(rises)}. The model overfits; a likely reason is growing
        confidence in wrong predictions."""


def _describe_first_epoch_near_final_accuracy(cell: CombinationResults) -> str:
    """Return the first epoch after which the mean curve stays within half a percentage point of its last value. In
    the last
    quarter of the run this says nothing about convergence."""
    mean = cell.compute_mean_curve("val_accuracy")
    late = [epoch for epoch, value in enumerate(mean, start=1) if abs(value - mean[-1]) > 0.005]
    first = (late[-1] if late else 0) + 1
    if first > 0.75 * len(mean):
        return f"not converged in {format_count(len(mean), 'epoch')}"
    return f"within 0.5 points of the final value from epoch {first} on"
