"""Sheet C: one head, many heads, a causal mask, and CIFAR-10."""

from itertools import pairwise
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from vitascope.coursework.sheets.b import SMALL_MODEL_OVERRIDES
from vitascope.coursework.sheets.claims import format_accuracy_gain
from vitascope.coursework.sheets.experiments import SheetExperiments
from vitascope.coursework.sheets.figures import draw_additive_causal_mask, format_additive_causal_mask
from vitascope.coursework.sheets.report import SheetReport, format_shape
from vitascope.data.open_data import load_train_and_validation_data
from vitascope.model.attention_variants import SingleHeadAttention
from vitascope.model.vit import VisionTransformer
from vitascope.recipe.reading import read_recipe
from vitascope.records.ablation import NOT_SIGNIFICANT, format_percent_mean_or_values
from vitascope.study.report import draw_study_curves
from vitascope.study.results import CombinationResults
from vitascope.study.storage import Curves
from vitascope.weights.torch_layers import from_torch

TITLE = "one head, many heads, a causal mask, and CIFAR-10"
EXPERIMENTS = {"variation": "training images with and without shift"}
FULL_OVERRIDES = ["train.epochs=30", "data.augment.shift=0,4"]
QUICK_OVERRIDES = ["train.epochs=6", "data.augment.shift=0,4", *SMALL_MODEL_OVERRIDES]


def run_studies_and_fill_report(experiments: SheetExperiments, report: SheetReport) -> None:
    """Run sheet C's studies and fill the report."""
    _seed_and_add_weight_shapes_section(report)
    report.add_heading("The causal mask for 5 tokens")
    report.add_code(format_additive_causal_mask(5))
    report.save_and_add_figure("mask", draw_additive_causal_mask(5))
    results = experiments.run_study("variation", "sheet-c", QUICK_OVERRIDES if experiments.quick else FULL_OVERRIDES)
    without, varied = results.combinations
    _add_cifar10_comparison_table(report, experiments.quick)
    _add_training_section(
        report, varied, draw_study_curves(results, {without.name: "flip only", varied.name: "flip and shift"})
    )
    gain = format_accuracy_gain(without, varied, 1)
    verdict = f"the shift {gain.verdict}" if gain.verdict in ("helps", "hurts") else NOT_SIGNIFICANT
    _add_questions_about_shift(report, without, varied, f"{gain.points} points: {verdict}")
    report.measurements |= {"accuracy": varied.accuracies, "without_shift": without.accuracies}


def _seed_and_add_weight_shapes_section(report: SheetReport) -> None:
    single_head = SingleHeadAttention(256, key_width=64, value_width=256, bias=False)
    shapes = {name: format_shape(getattr(single_head, name).weight.T) for name in ("query", "key", "value")}
    torch.manual_seed(0)
    torch_layer = nn.MultiheadAttention(768, 12, batch_first=True)
    layer: Any = from_torch(torch_layer).eval()
    tokens = torch.randn(2, 5, 768)
    with torch.no_grad():
        expected = torch_layer.eval()(tokens, tokens, tokens)[0]
        max_difference = float((expected - layer(tokens)).abs().max())
    report.add_heading("Shapes of the weight matrices")
    report.add_table(
        ["weight (input × output)", "the sheet", "here"],
        [
            ["one head, width 256: W_q", "256 × 64", shapes["query"]],
            ["W_k", "256 × 64 (its text swaps it with W_v)", shapes["key"]],
            ["W_v", "256 × 256", shapes["value"]],
            ["12 heads, width 768: W_q, W_k, W_v", "768 × 768 each", format_shape(layer.W_Q)],
            [
                "inside nn.MultiheadAttention",
                "in_proj_weight[0], [1], [2]",
                "rows [0:768], [768:1536], [1536:] of " + format_shape(torch_layer.in_proj_weight),
            ],
        ],
    )
    row = torch_layer.in_proj_weight[0]
    report.add_text(
        f"""The sheet takes `in_proj_weight[0]` for W_Q, but it is a single row of {row.numel()} numbers. Split into
        three blocks of 768 rows, the weights give the same output in our layer as in PyTorch's: the largest difference
        is {max_difference:.1e}. PyTorch stores output × input; the table gives input × output, as the sheet does."""
    )


def _add_cifar10_comparison_table(report: SheetReport, quick: bool = False) -> None:
    recipe = read_recipe("sheet-c")  # the full recipe, also for a shortened report
    data = load_train_and_validation_data(recipe.data, recipe.model.image_shape, 3, recipe.train.seed)
    std = ", ".join(f"{value:.4f}" for value in data.preprocessing.std)
    model = VisionTransformer(recipe.model).eval()
    with torch.no_grad():
        tokens = model.embed(torch.zeros(2, 3, 32, 32))
        encoded = model.encode(tokens)
    report.add_heading("CIFAR-10")
    report.add_table(
        ["quantity", "the sheet", "here"],
        [
            ["std of the training images", "0.2023, 0.1994, 0.2010", f"{std} (measured without the held-out images)"],
            [
                "validation images",
                "are the test set",
                "held out from the training images; the test set is not used",
            ],
            [
                "augmentation",
                "flip, 32-crop with padding 4",
                "the same, on the device, drawn separately for each image",
            ],
            ["batch size", "192", str(recipe.train.batch_size)],
            [
                "input and output of the encoder",
                "batch × 65 × 256",
                f"{format_shape(tokens)} → {format_shape(encoded)}",
            ],
        ],
    )
    report.add_text(
        """The sheet's std is a well-known mistake: it is the mean of the standard deviations of single images, not the
        standard deviation of all pixels. `model.encode(tokens)` takes embeddings, as the sheet's encoder does."""
        + (
            f" The table describes `sheet-c`; the shortened runs below use {' '.join(SMALL_MODEL_OVERRIDES[1:])}."
            if quick
            else ""
        )
    )


def _add_training_section(report: SheetReport, cell: CombinationResults, curves_figure: Figure) -> None:
    curves = [result["curves"] for result in cell.results.values()]
    num_epochs = len(curves[0]["val_accuracy"])
    epochs = [max(1, round(num_epochs * fraction)) for fraction in (1 / 3, 2 / 3, 1)]
    rows = []
    for epoch in epochs:
        means = {name: sum(seed_curves[name][epoch - 1] for seed_curves in curves) / len(curves) for name in curves[0]}
        rows.append(
            [
                str(epoch),
                f"{100 * means['train_accuracy']:.1f} %",
                format_percent_mean_or_values([seed_curves["val_accuracy"][epoch - 1] for seed_curves in curves]),
                f"{means['train_loss']:z.3f}",
                f"{means['val_loss']:z.3f}",
            ]
        )
    report.save_and_add_figure("curves", curves_figure)
    report.add_table(["epochs", "training accuracy", "held-out accuracy", "training loss", "held-out loss"], rows)
    report.add_text(
        f"""As in the sheet, the rows are epochs of the same runs ({len(curves)} seeds).
        {_describe_whether_accuracy_rises(curves, epochs)} The learning rate falls to zero only at epoch
        {num_epochs}. The
        earlier rows are therefore not the results of shorter
        runs; for those see sheet B."""
    )


def _describe_whether_accuracy_rises(curves_by_seed: list[Curves], epochs: list[int]) -> str:
    """Describe whether the accuracy rises in every seed."""
    accuracies = [[curves["val_accuracy"][epoch - 1] for epoch in epochs] for curves in curves_by_seed]
    pairs = [pair for seed_accuracies in accuracies for pair in pairwise(seed_accuracies)]
    if all(before < after for before, after in pairs):
        return (
            "The accuracy rises from row to row in every seed. The sheet plots it falling because its list is reversed."
        )
    return "The accuracy does not rise from row to row in every seed. The sheet plots it falling throughout."


def _add_questions_about_shift(
    report: SheetReport, without_shift: CombinationResults, with_shift: CombinationResults, verdict: str
) -> None:
    train_accuracies = {
        name: 100 * (cell.compute_mean_last_value("train_accuracy") or 0)
        for name, cell in (("without", without_shift), ("varied", with_shift))
    }
    results = {"without": without_shift.formatted_accuracy, "varied": with_shift.formatted_accuracy, "verdict": verdict}
    overfits = (
        with_shift.mean_accuracy > without_shift.mean_accuracy
        and train_accuracies["without"] > train_accuracies["varied"]
    )
    results["heart"] = ": without the shift the model overfits" if overfits else ""
    report.add_questions_from_template(
        **results, learnt_without=train_accuracies["without"], learnt_varied=train_accuracies["varied"]
    )
