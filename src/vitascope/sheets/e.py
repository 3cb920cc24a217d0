"""Sheet E: an exercise with tests, and 25, 50 and 70 % on CIFAR-10."""

from typing import Any

import torch
from einops import rearrange
from torch.nn import functional as F

from vitascope.model.attention import WRITTEN
from vitascope.model.attention2d import SelfAttention2d
from vitascope.model.config import ModelConfig
from vitascope.model.patches import patchify, unpatchify
from vitascope.model.vit import VisionTransformer
from vitascope.sheets.b import SMALL, model_of
from vitascope.sheets.lab import Lab, reached
from vitascope.sheets.writing import Report
from vitascope.study.report import bands
from vitascope.weights.native import to_torch

TITLE = "an exercise with tests, and 25, 50 and 70 % on CIFAR-10"
EXPERIMENTS = {"accuracy": "number of epochs", "alone": "one run, trained alone to measure its time"}
FULL = ["train.epochs=10,30"]  # also used by sheet B, and trained once
QUICK = ["train.epochs=3,5", *SMALL]
ALONE, ALONE_QUICK = ["train.epochs=30"], ["train.epochs=5", *SMALL]
MARKS = (0.25, 0.50, 0.70)


def run(lab: Lab, report: Report) -> None:
    _against_native(report)
    found = lab.study("accuracy", "sheet-c", QUICK if lab.quick else FULL)
    [alone] = lab.alone().study("alone", "sheet-c", ALONE_QUICK if lab.quick else ALONE).cells
    report.heading("25, 50 and 70 % accuracy on held-out images")
    report.text(
        f"""Runs with {model_of(lab)}; the test images are not used. Seconds count up to the end of the first epoch that
        reached the accuracy, including the validation after every epoch. {found.clock} The last column is a single run,
        timed from the images on the device, including compilation and CUDA graph recording."""
    )
    length = len(alone.curves("val_accuracy")[0])
    head = ["held-out accuracy", "points", *(f"{cell.settings['train.epochs']} epochs" for cell in found.cells)]
    head.append(f"{length} epochs, a single run")
    rows = [
        [f"{mark:.0%}", "2", *(str(reached(cell, mark)) for cell in found.cells), str(reached(alone, mark, "waited"))]
        for mark in MARKS
    ]
    ends = [f"{cell.percent}, {cell.number('seconds'):.0f} s" for cell in found.cells]
    rows.append(["final accuracy", "", *ends, f"{alone.percent}, {alone.curves('waited')[0][-1]:.0f} s"])
    report.table(head, rows)
    report.picture(
        "curves", bands(found, {cell.name: f"{cell.settings['train.epochs']} epochs" for cell in found.cells})
    )
    times = {str(mark): [reached(cell, mark).seconds for cell in found.cells] for mark in MARKS}
    times |= {f"{mark}, alone": [reached(alone, mark, "waited").seconds] for mark in MARKS}
    report.numbers |= {"accuracy": {cell.name: cell.accuracies for cell in found.cells}, "seconds": times}
    report.text(
        """To check your own solution against PyTorch's layers and see which mistake it has: `vitascope check FILE.py`.
        To get skeletons with the sheet's points: `vitascope exercise start`."""
    )


def _against_native(report: Report) -> None:
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
        rows.append([name, points, "nn.MultiheadAttention", *_apart(written, theirs, grid)])
    rows += _block_rows()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    unfolded = F.unfold(images, 4, stride=4).mT
    rows.append(["patchify", "2", "F.unfold", *_apart(patchify(images, 4), unfolded, images)])
    back = unpatchify(patchify(images, 4), 4, (2, 2))
    rows.append(["patchify and unpatchify", "", "the images", *_apart(back, images, images)])
    rows.append(_whole_row())
    report.heading("Comparison with PyTorch's layers (float64)")
    report.table(["ours", "points", "reference", "largest difference, forward", "largest difference, gradient"], rows)
    report.text(
        """All of these comparisons are unit tests of Vitascope. They use unfused attention (`SelfAttention.maps` and
        `mix`). The fused path, which the sheet does not allow, gives the same numbers (a test). PyTorch has no vision
        transformer, so the whole model is compared with timm's, with the same weights."""
    )


def _block_rows() -> list[list[str]]:
    """The feed-forward part and the whole block."""
    ours: Any = VisionTransformer(ModelConfig(embed_dim=32, num_heads=4, depth=1)).blocks[0].double().eval()
    native: Any = to_torch(ours).eval()
    ours.attn.kernel = WRITTEN
    tokens = torch.randn(2, 5, 32, dtype=torch.float64, requires_grad=True)
    forward = native.linear2(F.gelu(native.linear1(tokens)))
    name = "nn.TransformerEncoderLayer(norm_first=True)"
    return [
        ["feed-forward block", "1", "nn.Linear, F.gelu, nn.Linear", *_apart(ours.mlp(tokens), forward, tokens)],
        ["self-attention block", "2", name, *_apart(ours(tokens), native(tokens), tokens)],
    ]


def _whole_row() -> list[str]:
    from timm.models.vision_transformer import VisionTransformer as TimmViT

    ours: Any = VisionTransformer(ModelConfig(32, 4, embed_dim=32, num_heads=4, depth=2, num_classes=10))
    theirs: Any = TimmViT(img_size=32, patch_size=4, embed_dim=32, num_heads=4, depth=2, num_classes=10)
    theirs.load_state_dict(ours.state_dict())
    for block in ours.blocks:
        block.attn.kernel = WRITTEN
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64, requires_grad=True)
    apart = _apart(ours.double().eval()(images), theirs.double().eval()(images), images)
    return ["VisionTransformer: parts, forward", "2 + 1", "timm's VisionTransformer", *apart]


def _apart(ours: torch.Tensor, theirs: torch.Tensor, given: torch.Tensor) -> list[str]:
    numbers = torch.randn_like(ours)
    one, other = (torch.autograd.grad((found * numbers).sum(), given, retain_graph=True)[0] for found in (ours, theirs))
    return [f"{float((ours - theirs).detach().abs().max()):.0e}", f"{float((one - other).abs().max()):.0e}"]
