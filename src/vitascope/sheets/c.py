"""Sheet C: one head, many heads, a causal mask, and CIFAR-10."""

from itertools import pairwise
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from vitascope.data.training_data import open_training_data
from vitascope.model.single_head import SingleHeadAttention
from vitascope.model.vit import VisionTransformer
from vitascope.recipe.reading import read_recipe
from vitascope.records.arms import NOT_SIGNIFICANT, format_mean
from vitascope.sheets.b import SMALL
from vitascope.sheets.claims import gain
from vitascope.sheets.lab import Lab
from vitascope.sheets.pictures import mask_as_text, mask_figure
from vitascope.sheets.writing import Report, shape_of
from vitascope.study.answer import Cell
from vitascope.study.report import bands
from vitascope.weights.native import from_torch

TITLE = "one head, many heads, a causal mask, and CIFAR-10"
EXPERIMENTS = {"variation": "training images with and without shift"}
FULL = ["train.epochs=30", "data.augment.shift=0,4"]
QUICK = ["train.epochs=6", "data.augment.shift=0,4", *SMALL]


def run(lab: Lab, report: Report) -> None:
    _weights(report)
    report.heading("The causal mask for 5 tokens")
    report.code(mask_as_text(5))
    report.picture("mask", mask_figure(5))
    found = lab.study("variation", "sheet-c", QUICK if lab.quick else FULL)
    without, varied = found.cells
    _data(report, lab.quick)
    _training(report, varied, bands(found, {without.name: "flip only", varied.name: "flip and shift"}))
    points, worth = gain(without, varied, 1)
    verdict = f"the shift {worth}" if worth in ("helps", "hurts") else NOT_SIGNIFICANT
    _answers(report, without, varied, f"{points} points: {verdict}")
    report.numbers |= {"accuracy": varied.accuracies, "without_shift": without.accuracies}


def _weights(report: Report) -> None:
    one = SingleHeadAttention(256, key_width=64, value_width=256, bias=False)
    shapes = {name: shape_of(getattr(one, name).weight.T) for name in ("query", "key", "value")}
    torch.manual_seed(0)
    native = nn.MultiheadAttention(768, 12, batch_first=True)
    ours: Any = from_torch(native).eval()
    tokens = torch.randn(2, 5, 768)
    with torch.no_grad():
        apart = float((native.eval()(tokens, tokens, tokens)[0] - ours(tokens)).abs().max())
    report.heading("Shapes of the weight matrices")
    report.table(
        ["weight (input × output)", "the sheet", "here"],
        [
            ["one head, width 256: W_q", "256 × 64", shapes["query"]],
            ["W_k", "256 × 64 (its text swaps it with W_v)", shapes["key"]],
            ["W_v", "256 × 256", shapes["value"]],
            ["12 heads, width 768: W_q, W_k, W_v", "768 × 768 each", shape_of(ours.W_Q)],
            [
                "inside nn.MultiheadAttention",
                "in_proj_weight[0], [1], [2]",
                "rows [0:768], [768:1536], [1536:] of " + shape_of(native.in_proj_weight),
            ],
        ],
    )
    row = native.in_proj_weight[0]
    report.text(
        f"""The sheet takes `in_proj_weight[0]` for W_Q, but it is a single row of {row.numel()} numbers. Split into
        three blocks of 768 rows, the weights give the same output in our layer as in PyTorch's: the largest difference
        is {apart:.1e}. PyTorch stores output × input; the table gives input × output, as the sheet does."""
    )


def _data(report: Report, quick: bool = False) -> None:
    recipe = read_recipe("sheet-c")  # the full recipe, also for a shortened report
    data = open_training_data(recipe.data, recipe.model.image_shape, 3, recipe.train.seed)
    std = ", ".join(f"{value:.4f}" for value in data.preparation.std)
    model = VisionTransformer(recipe.model).eval()
    with torch.no_grad():
        tokens = model.embed(torch.zeros(2, 3, 32, 32))
        encoded = model.encode(tokens)
    report.heading("CIFAR-10")
    report.table(
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
            ["input and output of the encoder", "batch × 65 × 256", f"{shape_of(tokens)} → {shape_of(encoded)}"],
        ],
    )
    report.text(
        """The sheet's std is a well-known mistake: it is the mean of the standard deviations of single images, not the
        standard deviation of all pixels. `model.encode(tokens)` takes embeddings, as the sheet's encoder does."""
        + (f" The table describes `sheet-c`; the shortened runs below use {' '.join(SMALL[1:])}." if quick else "")
    )


def _training(report: Report, cell: Cell, figure: Figure) -> None:
    curves = [found["curves"] for found in cell.results.values()]
    length = len(curves[0]["val_accuracy"])
    epochs = [max(1, round(length * share)) for share in (1 / 3, 2 / 3, 1)]
    rows = []
    for epoch in epochs:
        means = {name: sum(own[name][epoch - 1] for own in curves) / len(curves) for name in curves[0]}
        rows.append(
            [
                str(epoch),
                f"{100 * means['train_accuracy']:.1f} %",
                format_mean([own["val_accuracy"][epoch - 1] for own in curves]),
                f"{means['train_loss']:.3f}",
                f"{means['val_loss']:.3f}",
            ]
        )
    report.picture("curves", figure)
    report.table(["epochs", "training accuracy", "held-out accuracy", "training loss", "held-out loss"], rows)
    report.text(
        f"""As in the sheet, the rows are epochs of the same runs ({len(curves)} seeds). {_rises(curves, epochs)} The
        learning rate falls to zero only at epoch {length}. The earlier rows are therefore not the results of shorter
        runs; for those see sheet B."""
    )


def _rises(curves: list[dict[str, list[float]]], epochs: list[int]) -> str:
    """Whether the accuracy rises in every seed."""
    pairs = [pair for own in curves for pair in pairwise(own["val_accuracy"][epoch - 1] for epoch in epochs)]
    if all(before < after for before, after in pairs):
        return (
            "The accuracy rises from row to row in every seed. The sheet plots it falling because its list is reversed."
        )
    return "The accuracy does not rise from row to row in every seed. The sheet plots it falling throughout."


def _answers(report: Report, without: Cell, varied: Cell, verdict: str) -> None:
    learnt = {
        name: 100 * (cell.last("train_accuracy") or 0) for name, cell in (("without", without), ("varied", varied))
    }
    results = {"without": without.percent, "varied": varied.percent, "verdict": verdict}
    overfits = varied.accuracy > without.accuracy and learnt["without"] > learnt["varied"]
    results["heart"] = ": without the shift the model overfits" if overfits else ""
    report.questions(**results, learnt_without=learnt["without"], learnt_varied=learnt["varied"])
