"""Sheet B: shapes through attention, and curves at three lengths."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from vitascope.errors import UserError
from vitascope.model.attention import SelfAttention
from vitascope.model.config import ModelConfig
from vitascope.model.vit import VisionTransformer
from vitascope.sheets.lab import Lab
from vitascope.sheets.writing import Report, shape_of
from vitascope.study.answer import Cell
from vitascope.study.report import bands

TITLE = "shapes through attention, and curves at three lengths"
EXPERIMENTS = {"epochs": "number of epochs"}
FULL = ["train.epochs=10,30,50"]
SMALL = ["data.fraction=0.1", "model.embed_dim=64", "model.depth=3", "model.num_heads=4"]  # for a CPU, with --quick
SMALL += ["train.batch_size=64", "train.lr=1e-3"]
QUICK = ["train.epochs=1,3,5", *SMALL]


def run(lab: Lab, report: Report) -> None:
    _shapes(report)
    found = lab.study("epochs", "sheet-c", QUICK if lab.quick else FULL, judge="test")
    report.heading("Curves at three lengths")
    report.text(
        f"""The sheet names no data set. These are runs of three lengths on CIFAR-10 with {model_of(lab)}. The learning
        rate of each run falls to zero at its own end. The curves show held-out images. The accuracy is measured once,
        on the test images."""
    )
    report.picture(
        "curves", bands(found, {cell.name: f"{cell.settings['train.epochs']} epochs" for cell in found.cells})
    )
    head = ["epochs", "test accuracy", "training accuracy", "training loss", "held-out loss", "seconds per run"]
    rows = []
    for cell in found.cells:
        numbers = [cell.last(name) or 0.0 for name in ("train_accuracy", "train_loss", "val_loss")]
        measured = [
            f"{100 * numbers[0]:.1f} %",
            f"{numbers[1]:.3f}",
            f"{numbers[2]:.3f}",
            f"{cell.number('seconds'):.0f}",
        ]
        rows.append([cell.settings["train.epochs"], cell.percent, *measured])
    report.table(head, rows)
    report.text(f"{found.sentence} {_surer(found.cells)} {found.clock}")
    report.numbers |= {"accuracy": {cell.settings["train.epochs"]: cell.accuracies for cell in found.cells}}
    _input_sizes(report)
    report.questions()


def _input_sizes(report: Report) -> None:
    """Try models for 32 × 32 images on other sizes."""
    sizes = (32, 40, 64)
    torch.manual_seed(0)
    small: dict[str, Any] = {"embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 10}
    features = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    asked: dict[str, Callable[[int], nn.Module]] = {
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
    for name, model in asked.items():
        weights = model(32).state_dict()
        rows.append([name, *(_answers(model(size), weights, size) for size in sizes)])
    layer, tokens = SelfAttention(32, 2), [(size // 4) ** 2 for size in sizes]
    with torch.no_grad():
        rows.append(["attention alone", *(shape_of(layer(torch.randn(1, count, 32))) for count in tokens)])
    report.heading("Which input sizes?")
    report.table(["weights for 32 × 32, input size", *(f"{size} × {size}" for size in sizes)], rows)


def _answers(model: nn.Module, weights: dict[str, torch.Tensor], size: int) -> str:
    """The shape of the output with these weights, or 'rejected'."""
    try:
        model.load_state_dict(weights)
        with torch.no_grad():
            return shape_of(model(torch.randn(1, 3, size, size)))
    except (UserError, RuntimeError):
        return "rejected"


def model_of(lab: Lab) -> str:
    return "a model smaller than sheet C's" if lab.quick else "sheet C's model (`vitascope train sheet-c`)"


def _surer(cells: list[Cell]) -> str:
    """Name longer runs with a higher loss despite a higher accuracy."""
    found = [
        f"after {late.settings['train.epochs']} epochs than after {early.settings['train.epochs']}"
        for early, late in pairwise(cells)
        if late.accuracy > early.accuracy and (late.last("val_loss") or 0.0) > (early.last("val_loss") or 0.0)
    ]
    likely = "although the accuracy is higher too. A likely reason is growing confidence in wrong predictions."
    return f"The held-out loss is higher {' and '.join(found)}, {likely}" if found else ""


def _shapes(report: Report) -> None:
    torch.manual_seed(0)
    columns, weights = torch.randn(768, 6), torch.randn(3, 768, 768) * 768**-0.5
    query, key, value = (weight @ columns for weight in weights)
    maps = (key.T @ query / 768**0.5).softmax(0)  # over the keys, which are rows here
    output = value @ maps
    wrong = query @ key.T
    report.heading("Shapes: X of 768 × 6, tokens as columns")
    report.table(
        ["tensor", "the sheet", "computed here"],
        [
            ["Q, K, V = W X", "768 × 6", shape_of(query)],
            ["map", "Q Kᵀ: 768 × 768", f"softmax(Kᵀ Q / √768): {shape_of(maps)}"],
            ["output", "768 × 6", f"V · map: {shape_of(output)}"],
        ],
    )
    report.text(
        f"""The sheet computes Q Kᵀ. With tokens as columns this is {shape_of(wrong)}: it compares features with
        features, and its size does not depend on the number of tokens. With tokens as columns, a score is the product
        of two columns, Kᵀ Q. The softmax is over the keys, that is, down each column. Here the column sums differ from
        1 by at most {float((maps.sum(0) - 1).abs().max()):.0e}."""
    )
    _heads(report)


def _heads(report: Report) -> None:
    tokens = torch.randn(1, 5, 768)
    layer = SelfAttention(768, 12).eval()
    with torch.no_grad():
        packed = layer.qkv(tokens)[..., :768].reshape(1, 5, 12, 64)
        heads = layer.maps(tokens)
        _, _, values = layer.queries_keys_values(tokens)
        gathered = (heads @ values).transpose(1, 2)
        joined = layer(tokens)
    report.table(
        ["multi-head attention, 12 heads", "the sheet", "computed here"],
        [
            ["tokens", "1 × 5 × 768", shape_of(tokens)],
            ["queries, keys, values per head", "1 × 5 × 12 × 64", shape_of(packed)],
            ["maps", "1 × 12 × 5 × 5", shape_of(heads)],
            ["the heads' outputs", "1 × 5 × 12 × 64", shape_of(gathered)],
            ["joined and projected", "1 × 5 × 768", shape_of(joined)],
        ],
    )
    highest = (heads[0].argmax(-1) == torch.arange(5)).float().mean()
    report.text(
        f"""The sheet remarks that a token always attends most to itself. In this layer with random initial weights,
        that is the case in {highest:.0%} of the rows; a uniform choice would give 20%. The weights decide it: nothing
        in attention prefers the diagonal."""
    )
