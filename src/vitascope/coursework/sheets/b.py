"""Sheet B: shapes through attention, and curves at three lengths."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from vitascope.coursework.sheets.experiments import SheetExperiments
from vitascope.coursework.sheets.report import SheetReport, format_shape
from vitascope.errors import UserError
from vitascope.model.attention import SelfAttention
from vitascope.model.config import ModelConfig
from vitascope.model.vit import VisionTransformer
from vitascope.number_format import format_percent
from vitascope.study.report import draw_study_curves
from vitascope.study.results import CombinationResults

TITLE = "shapes through attention, and curves at three lengths"
EXPERIMENTS = {"epochs": "number of epochs"}
FULL_OVERRIDES = ["train.epochs=10,30,50"]
SMALL_MODEL_OVERRIDES = [
    "data.fraction=0.1",
    "model.embed_dim=64",
    "model.depth=3",
    "model.num_heads=4",
]  # for a CPU, with --quick
SMALL_MODEL_OVERRIDES += ["train.batch_size=64", "train.lr=1e-3"]
QUICK_OVERRIDES = ["train.epochs=1,3,5", *SMALL_MODEL_OVERRIDES]


def run_studies_and_fill_report(experiments: SheetExperiments, report: SheetReport) -> None:
    """Run sheet B's studies and fill the report."""
    _seed_and_add_attention_shape_tables(report)
    results = experiments.run_study(
        "epochs", "sheet-c", QUICK_OVERRIDES if experiments.quick else FULL_OVERRIDES, eval_split="test"
    )
    report.add_heading("Curves at three lengths")
    report.add_text(
        f"""The sheet names no data set. These are runs of three lengths on CIFAR-10 with
        {describe_trained_model(experiments)}. The learning rate of each run falls to zero at its own end. The curves
        show held-out images. The accuracy is measured once,
        on the test images."""
    )
    report.save_and_add_figure(
        "curves",
        draw_study_curves(
            results, {cell.name: f"{cell.settings['train.epochs']} epochs" for cell in results.combinations}
        ),
    )
    head = ["epochs", "test accuracy", "training accuracy", "training loss", "held-out loss", "seconds per run"]
    rows = []
    for cell in results.combinations:
        last_values = [
            cell.compute_mean_last_value(name) or 0.0 for name in ("train_accuracy", "train_loss", "val_loss")
        ]
        train_accuracy, train_loss, val_loss = last_values
        values = [f"{100 * train_accuracy:.1f} %", f"{train_loss:z.3f}", f"{val_loss:z.3f}"]
        seconds = f"{cell.compute_mean('seconds'):.0f}"
        rows.append([cell.settings["train.epochs"], cell.formatted_accuracy, *values, seconds])
    report.add_table(head, rows)
    report.add_text(f"{results.conclusion} {_describe_rising_loss_if_any(results.combinations)} {results.timing_note}")
    report.measurements |= {
        "accuracy": {cell.settings["train.epochs"]: cell.accuracies for cell in results.combinations}
    }
    _seed_and_add_input_sizes_section(report)
    report.add_questions_from_template()


def _seed_and_add_input_sizes_section(report: SheetReport) -> None:
    """Try models for 32 × 32 images on other sizes."""
    sizes = (32, 40, 64)
    torch.manual_seed(0)
    small: dict[str, Any] = {"embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 10}
    features = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    builders: dict[str, Callable[[int], nn.Module]] = {
        "ViT, unchanged (it checks the size)": lambda _: VisionTransformer(ModelConfig(32, 4, **small)),
        **{
            f"ViT built for the size, {positions} positions": lambda size, positions=positions: VisionTransformer(
                ModelConfig(size, 4, positions=positions, **small)
            )
            for positions in ("learned", "sinusoidal", "rotary")
        },
        "CNN, global pooling": lambda _: nn.Sequential(
            *features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
        ),
        "CNN, flattened last map": lambda _: nn.Sequential(*features, nn.Flatten(), nn.Linear(8 * 16 * 16, 10)),
    }
    rows = []
    for name, build_model in builders.items():
        weights = build_model(32).state_dict()
        rows.append([name, *(_format_output_shape_or_rejected(build_model(size), weights, size) for size in sizes)])
    layer, tokens = SelfAttention(32, 2), [(size // 4) ** 2 for size in sizes]
    with torch.no_grad():
        rows.append(["attention alone", *(format_shape(layer(torch.randn(1, count, 32))) for count in tokens)])
    report.add_heading("Which input sizes?")
    report.add_table(["weights for 32 × 32, input size", *(f"{size} × {size}" for size in sizes)], rows)


def _format_output_shape_or_rejected(model: nn.Module, state_dict: dict[str, torch.Tensor], image_size: int) -> str:
    """Return the shape of the output with these weights, or 'rejected'."""
    try:
        model.load_state_dict(state_dict)
        with torch.no_grad():
            return format_shape(model(torch.randn(1, 3, image_size, image_size)))
    except (UserError, RuntimeError):
        return "rejected"


def describe_trained_model(experiments: SheetExperiments) -> str:
    return "a model smaller than sheet C's" if experiments.quick else "sheet C's model (`vitascope train sheet-c`)"


def _describe_rising_loss_if_any(cells: list[CombinationResults]) -> str:
    """Name longer runs with a higher loss despite a higher accuracy."""
    comparisons = [
        f"after {late.settings['train.epochs']} epochs than after {early.settings['train.epochs']}"
        for early, late in pairwise(cells)
        if late.mean_accuracy > early.mean_accuracy
        and (late.compute_mean_last_value("val_loss") or 0.0) > (early.compute_mean_last_value("val_loss") or 0.0)
    ]
    likely = "although the accuracy is higher too. A likely reason is growing confidence in wrong predictions."
    return f"The held-out loss is higher {' and '.join(comparisons)}, {likely}" if comparisons else ""


def _seed_and_add_attention_shape_tables(report: SheetReport) -> None:
    torch.manual_seed(0)
    columns, weights = torch.randn(768, 6), torch.randn(3, 768, 768) * 768**-0.5
    query, key, value = (weight @ columns for weight in weights)
    maps = (key.T @ query / 768**0.5).softmax(0)  # over the keys, which are rows here
    output = value @ maps
    wrong = query @ key.T
    report.add_heading("Shapes: X of 768 × 6, tokens as columns")
    report.add_table(
        ["tensor", "the sheet", "computed here"],
        [
            ["Q, K, V = W X", "768 × 6", format_shape(query)],
            ["map", "Q Kᵀ: 768 × 768", f"softmax(Kᵀ Q / √768): {format_shape(maps)}"],
            ["output", "768 × 6", f"V · map: {format_shape(output)}"],
        ],
    )
    report.add_text(
        f"""The sheet computes Q Kᵀ. With tokens as columns this is {format_shape(wrong)}: it compares features with
        features, and its size does not depend on the number of tokens. With tokens as columns, a score is the product
        of two columns, Kᵀ Q. The softmax is over the keys, that is, down each column. Here the column sums differ from
        1 by at most {float((maps.sum(0) - 1).abs().max()):.0e}."""
    )
    _add_multi_head_shapes_table(report)


def _add_multi_head_shapes_table(report: SheetReport) -> None:
    tokens = torch.randn(1, 5, 768)
    layer = SelfAttention(768, 12).eval()
    with torch.no_grad():
        packed = layer.qkv(tokens)[..., :768].reshape(1, 5, 12, 64)
        heads = layer.maps(tokens)
        _, _, values = layer.compute_queries_keys_values(tokens)
        gathered = (heads @ values).transpose(1, 2)
        joined = layer(tokens)
    report.add_table(
        ["multi-head attention, 12 heads", "the sheet", "computed here"],
        [
            ["tokens", "1 × 5 × 768", format_shape(tokens)],
            ["queries, keys, values per head", "1 × 5 × 12 × 64", format_shape(packed)],
            ["maps", "1 × 12 × 5 × 5", format_shape(heads)],
            ["the heads' outputs", "1 × 5 × 12 × 64", format_shape(gathered)],
            ["joined and projected", "1 × 5 × 768", format_shape(joined)],
        ],
    )
    highest = (heads[0].argmax(-1) == torch.arange(5)).float().mean()
    report.add_text(
        f"""The sheet remarks that a token always attends most to itself. In this layer with random initial weights,
        that is the case in {format_percent(float(highest), 0)} of the rows; a uniform choice would give 20 %. The
        weights decide it: nothing in attention prefers the diagonal."""
    )
