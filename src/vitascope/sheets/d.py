"""Sheet D: three studies on MNIST, what attention costs, an image that is too small, and little data."""

from dataclasses import asdict
from typing import Any

from vitascope.errors import UserError
from vitascope.model.anatomy import anatomy
from vitascope.model.attention_cost import draw_costs, exponents, measure_attention, token_counts
from vitascope.model.config import ModelConfig
from vitascope.run.machine import device_names, machine_name
from vitascope.sheets.lab import Lab
from vitascope.sheets.pictures import positions_figure
from vitascope.sheets.starts import compare_starts, find_weights
from vitascope.sheets.writing import Report
from vitascope.study.answer import Answer, Cell
from vitascope.study.report import bands, table
from vitascope.training.hardware import choose_device

TITLE = "three studies on MNIST, what attention costs, a small image, little data"
STUDIES = {
    "width": ("model.embed_dim=16,32,64,128", "32 best, 16 converges slightly slower, 128 worst and slowest"),
    "patch": ("model.patch_size=2,4,7,14,28", "2 “has problem with the learning”, 14 ideal, 28 is no patching at all"),
    "depth": ("model.depth=2,4,6,8", "6 best, 8 unstable, 2 starts worse and ends well"),
}
CLAIMS = {"width": "32", "patch": "14", "depth": "6"}
NAMES = {"width": "embed_dim", "patch": "patch size", "depth": "blocks"}
QUICK = ["data.fraction=0.02", "train.epochs=3", "train.batch_size=32"]
FEW = ["data.fraction=0.0186", "data.repeat=10", "train.epochs=30"]  # 1,000 images: 2,340 steps
FEW_QUICK = ["data.fraction=0.0186", "train.epochs=4", "train.batch_size=16"]
REMEDIES = {
    "SPT": "model.tokenizer=patch,spt",
    "LSA": "model.attention=plain,lsa",
    "dropout 0.1": "model.proj_drop_rate=0,0.1",
    "stochastic depth 0.1": "model.drop_path_rate=0,0.1",
    "varied images (shift by 2)": "data.augment.shift=0,2",
}


def run(lab: Lab, report: Report) -> None:
    weights = find_weights(lab)
    report.text(
        """The model: pre-norm blocks (LayerNorm → multi-head attention with output projection → sum → LayerNorm →
        GELU MLP → sum), class token, sinusoidal positions (`vitascope anatomy sheet-d`); 4 heads, batch 128, AdamW
        1e-3. Studies are judged by images held back from training; the test images are not touched."""
    )
    report.heading("The position embedding")
    report.picture("positions", positions_figure([(100, 16), (1000, 160)]))
    found = {name: _study(lab, report, name) for name in STUDIES}
    costs = _cost(report)
    _small_image(report)
    compare_starts(lab, report, weights)
    gains = _little_data(lab, report)
    out, fused = costs["written out"], costs["fused"]
    claims = " ".join(_claim(name, one) for name, one in found.items())
    told = "; ".join(f"{name} {points} points ({verdict})" for name, (points, verdict) in gains.items())
    report.questions(time=out["seconds"], memory=out["peak_bytes"], fused=fused["peak_bytes"], claims=claims, told=told)
    report.numbers |= {name: {cell.name: cell.accuracies for cell in one.cells} for name, one in found.items()}


def _study(lab: Lab, report: Report, name: str) -> Answer:
    words, claimed = STUDIES[name]
    found = lab.study(name, "sheet-d", [words, *(QUICK if lab.quick else [])])
    report.heading(f"Study: {words}")
    report.picture(name, bands(found))
    report.table(*table(found))
    report.text(
        f"""The sheet: {claimed}. Here, {lab.seeds} seeds of {found.epochs} epochs: {found.sentence} {stability(found)}
        {found.clock}"""
    )
    return found


def stability(found: Answer) -> str:
    """Which value's seeds lie furthest apart, which the sheet calls unstable from one run."""
    spreads = {cell.name: 100 * (max(cell.accuracies) - min(cell.accuracies)) for cell in found.cells}
    name = max(spreads, key=lambda one: spreads[one])
    told = ", ".join(f"{one}: {spread:.2f}" for one, spread in spreads.items())
    return f"Points between the worst and the best seed: {told}; widest for {name}."


def _cost(report: Report) -> dict[str, dict[str, float]]:
    device = choose_device("auto")
    costs = measure_attention(4, 64, token_counts(4, device), device)
    fits = exponents(costs)
    report.numbers["cost"] = [asdict(cost) for cost in costs]
    report.heading("What attention costs as tokens grow")
    report.picture("cost", draw_costs(costs, "4 heads of width 64"))
    rows = [[way, f"tokens^{fit['seconds']:.2f}", f"tokens^{fit['peak_bytes']:.2f}"] for way, fit in fits.items()]
    where = machine_name(device_names(), device)
    report.table([f"4 heads of 64, {where}", "time", "memory"], [["the sheet", "tokens²", "tokens²"], *rows])
    stages = {stage.name: stage.flops for stage in anatomy(ModelConfig(32, 4, embed_dim=256, depth=1, num_heads=4))}
    attention = {name.split(".")[-1]: flops for name, flops in stages.items() if ".attn." in name}
    projections = sum(flops for name, flops in attention.items() if name in ("query", "key", "value", "proj", "joined"))
    meeting = sum(attention.values()) - projections
    report.text(
        f"""At 65 tokens of width 256 the projections cost {projections / 1e6:.1f} million operations and the maps
        with what is gathered along them {meeting / 1e6:.1f}: the N² part is the smaller one until N is twice the
        width."""
    )
    return fits


def _small_image(report: Report) -> None:
    """What timm does with 28 × 28 pixels, tried."""
    import timm
    import torch

    report.heading("A 28 × 28 image for vit_base_patch16_224")
    with torch.no_grad():
        try:
            timm.create_model("vit_tiny_patch16_224")(torch.zeros(1, 3, 28, 28))
            said = "answers"
        except AssertionError as error:
            said = str(error)
        model: Any = timm.create_model("vit_tiny_patch16_224", img_size=28)
    grid = model.patch_embed.grid_size
    try:
        ModelConfig(img_size=28, patch_size=16)
        ours = "accepted"
    except UserError as error:
        ours = str(error)
    seen = grid[0] * grid[1] * 256 / 784
    report.table(
        ["what", "what happens"],
        [
            ["timm, unchanged", said],
            [
                "timm, img_size=28",
                f"a grid of {grid[0]} × {grid[1]} patches that sees {seen:.1%} of the pixels, silently",
            ],
            ["Vitascope, img_size=28, patch_size=16", ours],
        ],
    )
    report.text(
        """(Tried with timm's tiny model, which checks sizes as the base one does.) The sheet blames self-attention. It
        is the position table, which has 196 places, and the size check; attention takes any number of tokens. A CNN
        with global pooling runs on 28 × 28, but ends with a single place after 32-fold downsampling. What to
        do: resize the images, or resample the table and cut smaller patches: `vitascope adapt`, measured below."""
    )


def _little_data(lab: Lab, report: Report) -> dict[str, tuple[str, str]]:
    """Per change its points and the verdict."""
    report.heading("Little data: a thousand images")
    gains: dict[str, tuple[str, str]] = {}
    rows, passes = [], 0
    for name, words in REMEDIES.items():
        place = "few-" + words.split("=")[0].split(".")[-1]
        found = lab.study(place, "sheet-d", [words, *(FEW_QUICK if lab.quick else FEW)])
        plain, changed = found.cells
        passes = found.epochs * found.design.recipe_for(plain.settings, 1).data.repeat
        gains[name] = _gain(found, plain, changed)
        report.numbers[place] = {cell.name: cell.accuracies for cell in found.cells}
        learnt = [f"{100 * (one.last('train_accuracy') or 0.0):.0f} %" for one in found.cells]
        rows.append([name, plain.percent, changed.percent, *gains[name], " → ".join(learnt)])
    report.table(["change", "without", "with", "points", "", "training images right"], rows)
    report.text(
        f"""Every image is learnt from {passes} times; {lab.seeds} seeds. Differences are taken seed by seed, with 95 %
        intervals. The last column is of the training images as they were learnt from: shifted, with features or blocks
        dropped, where that is the change."""
    )
    return gains


def _gain(found: Answer, plain: Cell, changed: Cell) -> tuple[str, str]:
    better = found.best is changed
    other = found.against_best(plain if better else changed)
    if other is None:
        return "–", "not compared"
    half = "" if other.half is None else f" ± {100 * other.half:.2f}"
    verdict = ("helps" if better else "hurts") if other.verdict == "worse" else other.verdict
    return f"{100 * (-other.points if better else other.points):+.2f}{half}", verdict


def _claim(name: str, found: Answer) -> str:
    """Whether the sheet's favourite is the best here."""
    claimed = next((cell for cell in found.cells if next(iter(cell.settings.values())) == CLAIMS[name]), None)
    best = found.best
    if claimed is None:
        return f"{NAMES[name]}: {found.sentence}"
    if claimed is best:
        rest = "and every other value is worse" if not found.as_good else "but others cannot be told from it"
        return f"{NAMES[name]}: the sheet's {CLAIMS[name]} is the best here too ({claimed.percent}), {rest}."
    other = found.against_best(claimed)
    if other is not None and other.verdict == "worse":
        return (
            f"{NAMES[name]}: the sheet's {CLAIMS[name]} ({claimed.percent}) is not the best: {best.name} reaches "
            f"{best.percent}, beyond the seeds' noise."
        )
    return (
        f"{NAMES[name]}: the sheet's {CLAIMS[name]} ({claimed.percent}) cannot be told from the best, {best.name} "
        f"({best.percent})."
    )
