"""Sheet D's larger model on MNIST: from scratch, and from ImageNet weights in two ways."""

from dataclasses import fields
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from vitascope.coursework.sheets.claims import format_accuracy_gain
from vitascope.coursework.sheets.experiments import SheetExperiments
from vitascope.coursework.sheets.report import SheetReport
from vitascope.errors import UserError
from vitascope.recipe.schema import format_value_for_command_line
from vitascope.study.results import CombinationResults
from vitascope.training.initial_weights import make_model_ref_absolute
from vitascope.weights.pretrained import MODEL_PREFIXES, PretrainedModel, read_pretrained_model

DEFAULT_WEIGHTS = "timm:deit_tiny_patch16_224.fb_in1k"
MNIST_OVERRIDES = ["data.name=mnist", "model.in_chans=1"]
ORIGINAL_SIZE_OVERRIDES = ["model.img_size=28", "model.patch_size=4"]
RESIZED_LR = "5e-4"
RESIZED_OVERRIDES = ["model.img_size=224", "model.patch_size=16", f"train.lr={RESIZED_LR}"]
EXCLUDED_MODEL_FIELDS = (
    "img_size",
    "patch_size",
    "in_chans",
    "num_classes",
    "drop_path_rate",
)  # set by this comparison, not by the weights
FULL_OVERRIDES = ["train.epochs=2"]
QUICK_OVERRIDES = ["data.validation=0.01", "data.fraction=0.005", "train.epochs=2", "train.batch_size=16"]


class Initialization(NamedTuple):
    """How the larger model is initialized: the study that trains it, and what the sheet claims."""

    study_name: str
    sheet_claim: str


INITIALIZATIONS = {  # name -> its study and the sheet's claim
    "from scratch, 28 × 28": Initialization("start-scratch", "about an hour, starts near 30 %, poor"),
    "pretrained weights, images resized to 224": Initialization("start-resized", "better than from scratch"),
    "pretrained weights, the model changed to 28 × 28": Initialization("start-changed", "learns much quicker"),
}


def try_to_open_weights(experiments: SheetExperiments) -> PretrainedModel | UserError:
    """Open the weights. An error is raised if the user named them, and returned for the default weights."""
    if experiments.weights_ref is not None and "," in experiments.weights_ref:
        raise UserError(f"--weights {experiments.weights_ref}: the name must not contain a comma. Rename the file.")
    try:
        return read_pretrained_model(make_model_ref_absolute(experiments.weights_ref or DEFAULT_WEIGHTS), img_size=224)
    except UserError as error:
        if experiments.weights_ref is not None:
            raise
        return error


def run_or_skip_initialization_comparison(
    experiments: SheetExperiments, report: SheetReport, pretrained: PretrainedModel | UserError
) -> None:
    report.add_heading("A larger model, from scratch and from pretrained weights")
    if isinstance(pretrained, UserError):
        report.add_text(
            f"""Not run, because the weights are missing: {pretrained} To use a file: `vitascope sheet D --weights
            FILE`. Results from an H200 are in docs/pretrained.md."""
        )
        for study_name, _ in INITIALIZATIONS.values():
            experiments.print_line(
                f"{experiments.format_study_title(study_name)}: skipped, because the pretrained weights are missing."
            )
        return
    weights_path = make_model_ref_absolute(experiments.weights_ref or DEFAULT_WEIGHTS)
    config = pretrained.info.model
    names = [field.name for field in fields(config) if field.name not in EXCLUDED_MODEL_FIELDS]
    model_overrides = [f"model.{name}={format_value_for_command_line(getattr(config, name))}" for name in names]
    overrides_by_study = (
        ["weights=null", "train.layer_decay=1", *model_overrides, *ORIGINAL_SIZE_OVERRIDES],
        [f"weights={weights_path}", *RESIZED_OVERRIDES],
        [f"weights={weights_path}", *ORIGINAL_SIZE_OVERRIDES],
    )
    common = [*MNIST_OVERRIDES, *(QUICK_OVERRIDES if experiments.quick else FULL_OVERRIDES)]
    cells = {
        name: experiments.run_study(study_name, "cifar10-finetune", [*common, *overrides]).combinations[0]
        for (name, (study_name, _)), overrides in zip(INITIALIZATIONS.items(), overrides_by_study, strict=True)
    }
    weights_name = weights_path if weights_path.startswith(MODEL_PREFIXES) else Path(weights_path).name
    _add_initialization_results_section(report, cells, weights_name)


def _add_initialization_results_section(
    report: SheetReport, cells: dict[str, CombinationResults], weights_name: str
) -> None:
    scratch, resized, changed = cells.values()
    epochs = len(scratch.get_curves_of_all_seeds("train_accuracy")[0])
    rows = [
        [
            name,
            INITIALIZATIONS[name].sheet_claim,
            f"{100 * _compute_first_epoch_accuracy(cell):.1f} %",
            cell.formatted_accuracy,
            f"{cell.compute_mean('seconds'):.0f}",
        ]
        for name, cell in cells.items()
    ]
    head = ["start", "the sheet (86 M parameters; small, 22 M, was its best)", "training accuracy, first epoch"]
    report.add_table(
        [*head, f"held-out accuracy after {epochs} epochs, {len(scratch.results)} seeds", "seconds per run"], rows
    )
    cost = resized.compute_mean("seconds") / changed.compute_mean("seconds")
    better, verdict = format_accuracy_gain(scratch, changed, 2)
    other, other_verdict = format_accuracy_gain(resized, changed, 2)
    no = "no " if _compute_first_epoch_accuracy(changed) <= _compute_first_epoch_accuracy(resized) else ""
    report.add_text(
        f"""Weights: {weights_name}, {changed.compute_mean("parameters") / 1e6:.1f} M parameters with ten classes. After
        {epochs} epochs the accuracy of the model from scratch still rises steeply. At that point the pretrained
        weights change
        the accuracy on 28 × 28 images by {better} points ({verdict}). Changing the model instead of resizing the images
        changes it by {other} points ({other_verdict}). Both differences are taken seed by seed. Per epoch the changed
        model learns {no}faster: its training accuracy in the first epoch is
        {100 * _compute_first_epoch_accuracy(changed):.1f} %, that of the resized images
        {100 * _compute_first_epoch_accuracy(resized):.1f} %. Each has a learning rate that suits its size: for resized
        images half, {RESIZED_LR}. An epoch of the changed model takes 1/{cost:.1f} of the time, with 49 patches instead
        of 196. The sheet's own `vit_base_patch16_224` (86 M parameters) and `vit_small_patch16_224` (22 M, its best)
        were not run
        here. To compare them, use `--weights timm:vit_small_patch16_224`."""
    )
    report.measurements["starts"] = {name: cell.accuracies for name, cell in cells.items()}


def _compute_first_epoch_accuracy(cell: CombinationResults) -> float:
    return mean(curve[0] for curve in cell.get_curves_of_all_seeds("train_accuracy"))
