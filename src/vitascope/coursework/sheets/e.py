"""Sheet E: an exercise with tests, and 25, 50 and 70 % on CIFAR-10."""

from typing import Any

import torch
from einops import rearrange
from torch.nn import functional as F

from vitascope.coursework.sheets.b import SMALL_MODEL_OVERRIDES, describe_model
from vitascope.coursework.sheets.experiments import SheetExperiments, compute_time_to_accuracy
from vitascope.coursework.sheets.report import SheetReport
from vitascope.model.attention import UNFUSED_KERNEL
from vitascope.model.attention_variants import SelfAttention2d
from vitascope.model.config import ModelConfig
from vitascope.model.patches import patchify, unpatchify
from vitascope.model.vit import VisionTransformer
from vitascope.study.report import draw_study_curves
from vitascope.weights.torch_layers import to_torch

TITLE = "an exercise with tests, and 25, 50 and 70 % on CIFAR-10"
EXPERIMENTS = {"accuracy": "number of epochs", "alone": "one run, trained alone to measure its time"}
FULL_OVERRIDES = ["train.epochs=10,30"]  # also used by sheet B, and trained once
QUICK_OVERRIDES = ["train.epochs=3,5", *SMALL_MODEL_OVERRIDES]
SINGLE_RUN_OVERRIDES, SINGLE_RUN_QUICK_OVERRIDES = ["train.epochs=30"], ["train.epochs=5", *SMALL_MODEL_OVERRIDES]
TARGET_ACCURACIES = (0.25, 0.50, 0.70)


def run_experiments(experiments: SheetExperiments, report: SheetReport) -> None:
    _add_torch_comparison_section(report)
    found = experiments.run_study("accuracy", "sheet-c", QUICK_OVERRIDES if experiments.quick else FULL_OVERRIDES)
    [alone] = (
        experiments.copy_for_single_run()
        .run_study("alone", "sheet-c", SINGLE_RUN_QUICK_OVERRIDES if experiments.quick else SINGLE_RUN_OVERRIDES)
        .combinations
    )
    report.add_heading("25, 50 and 70 % accuracy on held-out images")
    report.add_text(
        f"""Runs with {describe_model(experiments)}; the test images are not used. Seconds count up to the end of the first epoch that
        reached the accuracy, including the validation after every epoch. {found.timing_note} The last column is a single run,
        timed from the images on the device, including compilation and CUDA graph recording."""
    )
    length = len(alone.get_curves("val_accuracy")[0])
    head = ["held-out accuracy", "points", *(f"{cell.settings['train.epochs']} epochs" for cell in found.combinations)]
    head.append(f"{length} epochs, a single run")
    rows = [
        [
            f"{mark:.0%}",
            "2",
            *(str(compute_time_to_accuracy(cell, mark)) for cell in found.combinations),
            str(compute_time_to_accuracy(alone, mark, "waited")),
        ]
        for mark in TARGET_ACCURACIES
    ]
    ends = [f"{cell.formatted_accuracy}, {cell.compute_mean('seconds'):.0f} s" for cell in found.combinations]
    rows.append(["final accuracy", "", *ends, f"{alone.formatted_accuracy}, {alone.get_curves('waited')[0][-1]:.0f} s"])
    report.add_table(head, rows)
    report.add_figure(
        "curves",
        draw_study_curves(found, {cell.name: f"{cell.settings['train.epochs']} epochs" for cell in found.combinations}),
    )
    times = {
        str(mark): [compute_time_to_accuracy(cell, mark).seconds for cell in found.combinations]
        for mark in TARGET_ACCURACIES
    }
    times |= {f"{mark}, alone": [compute_time_to_accuracy(alone, mark, "waited").seconds] for mark in TARGET_ACCURACIES}
    report.measurements |= {"accuracy": {cell.name: cell.accuracies for cell in found.combinations}, "seconds": times}
    report.add_text(
        """To check your own solution against PyTorch's layers and see which mistake it has: `vitascope check FILE.py`.
        To get skeletons with the sheet's points: `vitascope exercise start`."""
    )


def _add_torch_comparison_section(report: SheetReport) -> None:
    """Compare the sheet's parts with PyTorch's layers, forward and gradient."""
    torch.manual_seed(0)
    rows = []
    for heads, points in ((1, "1 + 3"), (4, "2")):
        ours = SelfAttention2d(32, heads).double().eval()
        grid = torch.randn(2, 32, 3, 5, dtype=torch.float64, requires_grad=True)
        tokens = rearrange(grid, "batch feature row column -> batch (row column) feature")
        native: Any = to_torch(ours.attn).eval()
        theirs = native(tokens, tokens, tokens, need_weights=False)[0]
        theirs = rearrange(theirs, "batch (row column) feature -> batch feature row column", row=3)
        written = ours.mix(ours.maps(grid), grid)
        name = "SelfAttention2d: parts, one head" if heads == 1 else f"SelfAttention2d, {heads} heads"
        rows.append([name, points, "nn.MultiheadAttention", *_format_max_differences(written, theirs, grid)])
    rows += _compare_block_with_torch()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    unfolded = F.unfold(images, 4, stride=4).mT
    rows.append(["patchify", "2", "F.unfold", *_format_max_differences(patchify(images, 4), unfolded, images)])
    back = unpatchify(patchify(images, 4), 4, (2, 2))
    rows.append(["patchify and unpatchify", "", "the images", *_format_max_differences(back, images, images)])
    rows.append(_compare_vit_with_timm())
    report.add_heading("Comparison with PyTorch's layers (float64)")
    report.add_table(
        ["ours", "points", "reference", "largest difference, forward", "largest difference, gradient"], rows
    )
    report.add_text(
        """All of these comparisons are unit tests of Vitascope. They use unfused attention (`SelfAttention.maps` and
        `mix`). The fused path, which the sheet does not allow, gives the same numbers (a test). PyTorch has no vision
        transformer, so the whole model is compared with timm's, with the same weights."""
    )


def _compare_block_with_torch() -> list[list[str]]:
    """The feed-forward part and the whole block."""
    ours: Any = VisionTransformer(ModelConfig(embed_dim=32, num_heads=4, depth=1)).blocks[0].double().eval()
    native: Any = to_torch(ours).eval()
    ours.attn.kernel = UNFUSED_KERNEL
    tokens = torch.randn(2, 5, 32, dtype=torch.float64, requires_grad=True)
    forward = native.linear2(F.gelu(native.linear1(tokens)))
    name = "nn.TransformerEncoderLayer(norm_first=True)"
    return [
        [
            "feed-forward block",
            "1",
            "nn.Linear, F.gelu, nn.Linear",
            *_format_max_differences(ours.mlp(tokens), forward, tokens),
        ],
        ["self-attention block", "2", name, *_format_max_differences(ours(tokens), native(tokens), tokens)],
    ]


def _compare_vit_with_timm() -> list[str]:
    from timm.models.vision_transformer import VisionTransformer as TimmViT

    ours: Any = VisionTransformer(ModelConfig(32, 4, embed_dim=32, num_heads=4, depth=2, num_classes=10))
    theirs: Any = TimmViT(img_size=32, patch_size=4, embed_dim=32, num_heads=4, depth=2, num_classes=10)
    theirs.load_state_dict(ours.state_dict())
    for block in ours.blocks:
        block.attn.kernel = UNFUSED_KERNEL
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64, requires_grad=True)
    apart = _format_max_differences(ours.double().eval()(images), theirs.double().eval()(images), images)
    return ["VisionTransformer: parts, forward", "2 + 1", "timm's VisionTransformer", *apart]


def _format_max_differences(
    vitascope_output: torch.Tensor, reference_output: torch.Tensor, inputs: torch.Tensor
) -> list[str]:
    numbers = torch.randn_like(vitascope_output)
    one, other = (
        torch.autograd.grad((found * numbers).sum(), inputs, retain_graph=True)[0]
        for found in (vitascope_output, reference_output)
    )
    return [
        f"{float((vitascope_output - reference_output).detach().abs().max()):.0e}",
        f"{float((one - other).abs().max()):.0e}",
    ]
