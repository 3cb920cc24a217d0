"""Sheet D: three studies on MNIST, the cost of attention, a small image, and little data."""

from dataclasses import asdict
from typing import Any

from vitascope.errors import UserError
from vitascope.model.anatomy import anatomy
from vitascope.model.attention_cost import Cost, draw_costs, exponents, measure_attention, measure_parts, token_counts
from vitascope.model.config import ModelConfig
from vitascope.recipe.reading import read_recipe
from vitascope.records.arms import ENOUGH
from vitascope.run.machine import device_names, machine_name
from vitascope.sheets.claims import END, FALL, SLOW, START, TIME, Claim, gain
from vitascope.sheets.lab import Lab
from vitascope.sheets.pictures import positions_figure
from vitascope.sheets.starts import STARTS, compare_starts, find_weights
from vitascope.sheets.writing import Report
from vitascope.study.answer import Answer
from vitascope.study.report import bands, table
from vitascope.training.hardware import choose_device

TITLE = "three studies on MNIST, the cost of attention, a small image, little data"
STUDIES = {  # name -> the varied setting and the sheet's claims
    "width": (
        "model.embed_dim=16,32,64,128",
        [
            Claim("32 features are best", "32"),
            Claim("16 converge slightly slower", "16", SLOW, than="32"),
            Claim("128 are worst", "128", END, more=False),
            Claim("128 are slowest, in epochs", "128", SLOW),
            Claim("128 are slowest, in seconds", "128", TIME),
        ],
    ),
    "patch": (
        "model.patch_size=2,4,7,14,28",
        [
            Claim("patches of 2 have a problem with learning", "2", SLOW),
            Claim("patches of 14 are ideal", "14"),
        ],
    ),
    "depth": (
        "model.depth=2,4,6,8",
        [
            Claim("6 blocks are best", "6"),
            Claim("8 blocks are unstable", "8", FALL),
            Claim("2 blocks start worse", "2", START, more=False),
            Claim("2 blocks end well", "2", shared=True),
        ],
    ),
}
REMARKS = {"patch": "With patches of 28×28 pixels there is one patch and the class token."}
PARTS = (64, 65)  # images and tokens, for the cost of projections and of attention maps
QUICK = ["data.fraction=0.02", "train.epochs=3", "train.batch_size=32"]
FEW = ["data.fraction=0.0186", "data.passes_per_epoch=10", "train.epochs=30"]  # 1,000 images: 2,340 steps
FEW_QUICK = ["data.fraction=0.0186", "train.epochs=4", "train.batch_size=16"]
REMEDIES = {
    "SPT": "model.tokenizer=patch,spt",
    "LSA": "model.attention=plain,lsa",
    "dropout 0.1": "model.proj_drop_rate=0,0.1",
    "stochastic depth 0.1": "model.drop_path_rate=0,0.1",
    "augmentation (shift by up to 2 pixels)": "data.augment.shift=0,2",
}


def _few(words: str) -> str:
    """The folder of a comparison with little data."""
    return "few-" + words.split("=")[0].split(".")[-1]


EXPERIMENTS = {  # folder -> title, in the order of the sheet
    "width": "model width",
    "patch": "patch size",
    "depth": "number of blocks",
    **{place: f"a larger model, {name}" for name, (place, _) in STARTS.items()},
    **{_few(words): f"a thousand images, without and with {name}" for name, words in REMEDIES.items()},
}


def run(lab: Lab, report: Report) -> None:
    weights = find_weights(lab)
    plain = read_recipe("sheet-d", QUICK if lab.quick else [])
    report.text(
        f"""The model has pre-norm blocks (LayerNorm → multi-head attention with output projection → residual sum →
        LayerNorm → GELU MLP → residual sum), a class token and sinusoidal positions (`vitascope anatomy sheet-d`). It
        has {plain.model.num_heads} heads. Training uses batch size {plain.train.batch_size} and AdamW with learning
        rate {plain.train.lr:g}. Unless a study varies them, the width is {plain.model.embed_dim}, the patch size
        {plain.model.patch_size} and the depth {plain.model.depth}. Studies compare the accuracy on held-out images. The
        test images are not used."""
    )
    report.heading("The position embedding")
    report.picture("positions", positions_figure([(100, 16), (1000, 160)]))
    claims = " ".join(_study(lab, report, name) for name in STUDIES)
    costs = _cost(lab, report)
    _small_image(report)
    compare_starts(lab, report, weights)
    gains = _little_data(lab, report)
    out, fused = costs["written out"], costs["fused"]
    effects = "; ".join(f"{name} {points} points ({verdict})" for name, (points, verdict) in gains.items())
    report.questions(
        time=out["seconds"], memory=out["peak_bytes"], fused=fused["peak_bytes"], claims=claims, told=effects
    )


def _study(lab: Lab, report: Report, name: str) -> str:
    """Run one study and return the verdicts on the sheet's claims as text."""
    words, claims = STUDIES[name]
    found = lab.study(name, "sheet-d", [words, *(QUICK if lab.quick else [])])
    report.heading(f"Study: {words}")
    report.picture(name, bands(found))
    report.table(*table(found))
    report.text(f"{found.sentence} Every run has {found.epochs} epochs. {found.clock}")
    return _judge(report, name, claims, found)


def _judge(report: Report, name: str, claims: list[Claim], found: Answer) -> str:
    judged = {claim.text: claim.judged(found, len(claims)) for claim in claims}
    rows = [[text, verdict, measured] for text, (verdict, measured) in judged.items()]
    report.table(
        ["claim of the sheet, from one run each", "verdict over the seeds", "measured (differences seed by seed)"], rows
    )
    report.text(
        f"""“Best” and “well” are tested as in the table above: no other value is significantly better.
        {_explain_correction("The ± of a difference is its", len(found.design.seeds), f"{len(claims)} claims")}
        {REMARKS.get(name, "")}"""
    )
    report.numbers[name] = {cell.name: cell.accuracies for cell in found.cells}
    verdicts = "; ".join(f"“{text}”: {verdict}" for text, (verdict, _) in judged.items())
    return f"{name.capitalize()}: {found.sentence} Claims of the sheet: {verdicts}."


def _explain_correction(what: str, seeds: int, comparisons: str) -> str:
    """What ± means, where it is printed: from three seeds on."""
    if seeds == 1:
        return ""
    interval = f"{what} 95 % confidence interval," if seeds >= ENOUGH else "The verdicts are"
    return f"{interval} corrected for {comparisons} (Bonferroni)."


def _cost(lab: Lab, report: Report) -> dict[str, dict[str, float]]:
    known = lab.once("cost", lambda: _measured(choose_device(lab.device)))
    costs, parts, where = [Cost(**cost) for cost in known["costs"]], known["parts"], known["machine"]
    fits = exponents(costs)
    report.numbers["cost"] = known
    report.heading("The cost of attention by the number of tokens")
    report.picture("cost", draw_costs(costs, "4 heads of width 64"))
    rows = [[way, f"tokens^{fit['seconds']:.1f}", f"tokens^{fit['peak_bytes']:.1f}"] for way, fit in fits.items()]
    report.table([f"4 heads of 64, {where}", "time", "memory"], [["the sheet", "tokens²", "tokens²"], *rows])
    stages = {stage.name: stage.flops for stage in anatomy(ModelConfig(32, 4, embed_dim=256, depth=1, num_heads=4))}
    attention = {name.split(".")[-1]: flops for name, flops in stages.items() if ".attn." in name}
    projections = sum(flops for name, flops in attention.items() if name in ("query", "key", "value", "proj", "joined"))
    meeting = sum(attention.values()) - projections
    report.text(
        f"""The exponents are log-log slopes, fitted to the larger half of the token counts. At {PARTS[1]} tokens of
        width 256 the projections cost {projections / 1e6:.1f} million operations; the attention maps and the weighted
        sums of the values cost {meeting / 1e6:.1f} million. The N² part is smaller until N is twice the width. Measured
        with a batch of {PARTS[0]} images:
        {", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in parts.items())}. {_not_time(parts)}"""
    )
    return fits


def _not_time(parts: dict[str, float]) -> str:
    """Describe when the part with fewer operations takes longer, or nearly as long."""
    projections, written, fused = parts.values()
    if written < projections / 2:
        return ""
    return f"""Time is not proportional to the number of operations. Maps and weighted sums have an eighth of the
        operations, but without fusion they take {written / projections:.1f} times as long as the projections
        ({fused / projections:.1f} times when fused). A likely reason is that the maps are written to memory and read
        again in several steps."""


def _measured(device: str) -> dict[str, Any]:
    costs = measure_attention(4, 64, token_counts(4, device), device)
    parts = measure_parts(*PARTS, width=256, heads=4, device=device)
    machine = machine_name(device_names(), device)
    return {"machine": machine, "costs": [asdict(cost) for cost in costs], "parts": parts}


def _small_image(report: Report) -> None:
    """Try a 28 × 28 image with timm and with Vitascope."""
    import timm
    import torch

    report.heading("A 28 × 28 image for vit_base_patch16_224")
    with torch.no_grad():
        try:
            timm.create_model("vit_tiny_patch16_224")(torch.zeros(1, 3, 28, 28))
            said = "runs"
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
        ["model", "result"],
        [
            ["timm, unchanged", said],
            [
                "timm, img_size=28",
                f"a grid of {grid[0]}×{grid[1]} patches, which uses {seen:.1%} of the pixels, without a warning",
            ],
            ["Vitascope, img_size=28, patch_size=16", ours],
        ],
    )
    report.text(
        """Tried with timm's tiny model, which checks sizes like the base model. According to the sheet, self-attention
        is the cause. The actual causes are the position table, which has 196 entries, and the size check: attention
        accepts any number of tokens. A CNN with global pooling runs on 28 × 28 images, but only one position is left
        after 32-fold downsampling. There are two solutions: resize the images, or resample the position table and use
        smaller patches (`vitascope adapt`, measured below)."""
    )


def _little_data(lab: Lab, report: Report) -> dict[str, tuple[str, str]]:
    """Measure each change with little data; return its difference in points and the verdict."""
    report.heading("Little data: a thousand images")
    gains: dict[str, tuple[str, str]] = {}
    rows, passes = [], 0
    for name, words in REMEDIES.items():
        place = _few(words)
        found = lab.study(place, "sheet-d", [words, *(FEW_QUICK if lab.quick else FEW)])
        plain, changed = found.cells
        passes = found.epochs * found.design.recipe_for(plain.settings, 1).data.passes_per_epoch
        gains[name] = gain(plain, changed, len(REMEDIES))
        report.numbers[place] = {cell.name: cell.accuracies for cell in found.cells}
        learnt = [f"{100 * (one.last('train_accuracy') or 0.0):.0f} %" for one in found.cells]
        rows.append([name, plain.percent, changed.percent, *gains[name], " → ".join(learnt)])
    report.table(
        ["change", "without", "with", "difference in points", "verdict", "training accuracy, without → with"], rows
    )
    report.text(
        f"""Every image is used {passes} times; {lab.seeds} seeds. Differences are taken seed by seed.
        {_explain_correction("Their ± is a", lab.seeds, f"{len(REMEDIES)} comparisons")} The training accuracy is
        measured during training, so it includes the shift, dropout or stochastic depth of the change."""
    )
    return gains
