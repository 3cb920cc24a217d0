"""Sheet E: an exercise with tests, and 25, 50 and 70 % on CIFAR-10."""

from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch.nn import functional as F

from vitascope.coursework.sheets.b import SMALL_MODEL_OVERRIDES, describe_trained_model
from vitascope.coursework.sheets.experiments import SheetExperiments, compute_time_to_accuracy
from vitascope.coursework.sheets.report import SheetReport
from vitascope.model.attention import UNFUSED_KERNEL
from vitascope.model.attention_variants import SelfAttention2d
from vitascope.model.config import ModelConfig
from vitascope.model.patches import patchify, unpatchify
from vitascope.model.vit import VisionTransformer
from vitascope.number_format import format_percent
from vitascope.study.report import draw_study_curves
from vitascope.study.results import CombinationResults
from vitascope.weights.torch_layers import to_torch

TITLE = "an exercise with tests, and 25, 50 and 70 % on CIFAR-10"
EXPERIMENTS = {"accuracy": "number of epochs", "alone": "time of one run that was not trained in a batch with others"}
FULL_OVERRIDES = ["train.epochs=10,30"]  # also used by sheet B, and trained once
QUICK_OVERRIDES = ["train.epochs=3,5", *SMALL_MODEL_OVERRIDES]
SINGLE_RUN_OVERRIDES, SINGLE_RUN_QUICK_OVERRIDES = ["train.epochs=30"], ["train.epochs=5", *SMALL_MODEL_OVERRIDES]
TARGET_ACCURACIES = (0.25, 0.50, 0.70)


def run_studies_and_fill_report(experiments: SheetExperiments, report: SheetReport) -> None:
    """Run sheet E's studies and fill the report."""
    _seed_and_add_torch_comparison_section(report)
    results = experiments.run_study("accuracy", "sheet-c", QUICK_OVERRIDES if experiments.quick else FULL_OVERRIDES)
    overrides = SINGLE_RUN_QUICK_OVERRIDES if experiments.quick else SINGLE_RUN_OVERRIDES
    [alone] = experiments.copy_for_single_run().run_study("alone", "sheet-c", overrides).combinations
    report.add_heading("25, 50 and 70 % accuracy on held-out images")
    report.add_text(
        f"""Runs with {describe_trained_model(experiments)}; the test images are not used. Seconds count up to the end
        of the first epoch that reached the accuracy, including the validation after every epoch. {results.timing_note}
        The last column is a single run, timed from the images on the device, including compilation and CUDA graph
        recording."""
    )
    _add_time_to_accuracy_table(report, results.combinations, alone)
    labels = {cell.name: f"{cell.settings['train.epochs']} epochs" for cell in results.combinations}
    report.save_and_add_figure("curves", draw_study_curves(results, labels))
    report.measurements |= {"accuracy": {cell.name: cell.accuracies for cell in results.combinations}}
    report.measurements |= {"seconds": _collect_seconds_by_target_accuracy(results.combinations, alone)}
    report.add_text(
        """To check your own solution against PyTorch's layers and see which mistake it has: `vitascope check FILE.py`.
        To get skeletons with the sheet's points: `vitascope exercise start`."""
    )


def _add_time_to_accuracy_table(
    report: SheetReport, cells: list[CombinationResults], single_run_results: CombinationResults
) -> None:
    """Add when each target accuracy was reached, in the study and in the single run."""
    num_epochs = len(single_run_results.get_curves_of_all_seeds("val_accuracy")[0])
    header = ["held-out accuracy", "points", *(f"{cell.settings['train.epochs']} epochs" for cell in cells)]
    rows = [
        [
            format_percent(target, 0),
            "2",
            *(str(compute_time_to_accuracy(cell, target)) for cell in cells),
            str(compute_time_to_accuracy(single_run_results, target, "waited")),
        ]
        for target in TARGET_ACCURACIES
    ]
    final = [f"{cell.formatted_accuracy}, {cell.compute_mean('seconds'):.0f} s" for cell in cells]
    final.append(
        f"{single_run_results.formatted_accuracy}, {single_run_results.get_curves_of_all_seeds('waited')[0][-1]:.0f} s"
    )
    rows.append(["final accuracy", "", *final])
    report.add_table([*header, f"{num_epochs} epochs, a single run"], rows)


def _collect_seconds_by_target_accuracy(
    combinations: list[CombinationResults], combination_trained_alone: CombinationResults
) -> dict[str, list[list[float]]]:
    """Return target accuracy -> the seconds of all seeds, for each combination."""
    seconds = {
        str(target): [compute_time_to_accuracy(cell, target).seconds for cell in combinations]
        for target in TARGET_ACCURACIES
    }
    return seconds | {
        f"{target}, alone": [compute_time_to_accuracy(combination_trained_alone, target, "waited").seconds]
        for target in TARGET_ACCURACIES
    }


def _seed_and_add_torch_comparison_section(report: SheetReport) -> None:
    """Compare the sheet's parts with PyTorch's layers, forward and gradient."""
    torch.manual_seed(0)
    rows = []
    for heads, points in ((1, "1 + 3"), (4, "2")):
        layer = SelfAttention2d(32, heads).double().eval()
        grid = torch.randn(2, 32, 3, 5, dtype=torch.float64, requires_grad=True)
        tokens = rearrange(grid, "batch feature row column -> batch (row column) feature")
        torch_layer: Any = to_torch(layer.attn).eval()
        expected = torch_layer(tokens, tokens, tokens, need_weights=False)[0]
        expected = rearrange(expected, "batch (row column) feature -> batch feature row column", row=3)
        output = layer.mix(layer.maps(grid), grid)
        name = "SelfAttention2d: parts, one head" if heads == 1 else f"SelfAttention2d, {heads} heads"
        rows.append(
            [name, points, "nn.MultiheadAttention", *_format_output_and_gradient_differences(output, expected, grid)]
        )
    rows += _make_block_comparison_rows()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    unfolded = F.unfold(images, 4, stride=4).mT
    rows.append(
        ["patchify", "2", "F.unfold", *_format_output_and_gradient_differences(patchify(images, 4), unfolded, images)]
    )
    restored = unpatchify(patchify(images, 4), 4, (2, 2))
    rows.append(
        [
            "patchify and unpatchify",
            "",
            "the images",
            *_format_output_and_gradient_differences(restored, images, images),
        ]
    )
    rows.append(_make_timm_comparison_row())
    report.add_heading("Comparison with PyTorch's layers (float64)")
    report.add_table(
        ["ours", "points", "reference", "largest difference, forward", "largest difference, gradient"], rows
    )
    report.add_text(
        """All of these comparisons are unit tests of Vitascope. They use unfused attention (`SelfAttention.maps` and
        `mix`). The fused path, which the sheet does not allow, gives the same numbers (a test). PyTorch has no vision
        transformer, so the whole model is compared with timm's, with the same weights."""
    )


def _make_block_comparison_rows() -> list[list[str]]:
    """Compare the feed-forward part and the whole block; return two rows of the table."""
    block: Any = VisionTransformer(ModelConfig(embed_dim=32, num_heads=4, depth=1)).blocks[0].double().eval()
    torch_block: Any = to_torch(block).eval()
    block.attn.kernel = UNFUSED_KERNEL
    tokens = torch.randn(2, 5, 32, dtype=torch.float64, requires_grad=True)
    feed_forward = torch_block.linear2(F.gelu(torch_block.linear1(tokens)))
    name = "nn.TransformerEncoderLayer(norm_first=True)"
    return [
        [
            "feed-forward block",
            "1",
            "nn.Linear, F.gelu, nn.Linear",
            *_format_output_and_gradient_differences(block.mlp(tokens), feed_forward, tokens),
        ],
        [
            "self-attention block",
            "2",
            name,
            *_format_output_and_gradient_differences(block(tokens), torch_block(tokens), tokens),
        ],
    ]


def _make_timm_comparison_row() -> list[str]:
    """Compare the whole model with timm's, with the same weights; return a row of the table."""
    from timm.models.vision_transformer import VisionTransformer as TimmViT

    model: Any = VisionTransformer(ModelConfig(32, 4, embed_dim=32, num_heads=4, depth=2, num_classes=10))
    timm_model: Any = TimmViT(img_size=32, patch_size=4, embed_dim=32, num_heads=4, depth=2, num_classes=10)
    timm_model.load_state_dict(model.state_dict())
    for block in model.blocks:
        block.attn.kernel = UNFUSED_KERNEL
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64, requires_grad=True)
    differences = _format_output_and_gradient_differences(
        model.double().eval()(images), timm_model.double().eval()(images), images
    )
    return ["VisionTransformer: parts, forward", "2 + 1", "timm's VisionTransformer", *differences]


class MaxDifferences(NamedTuple):
    """The largest absolute differences, as text."""

    forward: str
    gradient: str


def _format_output_and_gradient_differences(
    vitascope_output: torch.Tensor, reference_output: torch.Tensor, inputs: torch.Tensor
) -> MaxDifferences:
    """Compare two outputs and their gradients with respect to the inputs, for a random linear loss."""
    loss_weights = torch.randn_like(vitascope_output)
    gradient, reference_gradient = (
        torch.autograd.grad((output * loss_weights).sum(), inputs, retain_graph=True)[0]
        for output in (vitascope_output, reference_output)
    )
    return MaxDifferences(
        f"{float((vitascope_output - reference_output).detach().abs().max()):.0e}",
        f"{float((gradient - reference_gradient).abs().max()):.0e}",
    )
