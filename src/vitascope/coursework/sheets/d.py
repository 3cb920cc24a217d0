"""Sheet D: three studies on MNIST, the cost of attention, a small image, and little data."""

from dataclasses import asdict
from typing import Any, NamedTuple

from vitascope.coursework.sheets.claims import (
    EPOCHS_TO_TARGET,
    FINAL_ACCURACY,
    FIRST_EPOCH_ACCURACY,
    LARGEST_DROP,
    SECONDS_PER_RUN,
    AccuracyGain,
    Claim,
    format_accuracy_gain,
)
from vitascope.coursework.sheets.experiments import SheetExperiments
from vitascope.coursework.sheets.figures import draw_sinusoidal_positions
from vitascope.coursework.sheets.initial_weights import (
    INITIALIZATIONS,
    run_or_skip_initialization_comparison,
    try_to_open_weights,
)
from vitascope.coursework.sheets.report import SheetReport
from vitascope.errors import UserError
from vitascope.inference.hardware import choose_or_check_device
from vitascope.model.anatomy import list_stages
from vitascope.model.attention_cost import (
    AttentionCost,
    choose_token_counts_to_measure,
    draw_attention_costs,
    fit_exponents_by_implementation,
    measure_attention_costs,
    measure_projection_and_attention_seconds,
)
from vitascope.model.config import ModelConfig
from vitascope.number_format import format_percent
from vitascope.recipe.reading import read_recipe
from vitascope.records.ablation import MIN_SEEDS_FOR_INTERVAL
from vitascope.run.machine import get_device_names_by_type, get_device_or_cpu_name
from vitascope.study.report import build_results_table, draw_study_curves
from vitascope.study.results import StudyResults

TITLE = "three studies on MNIST, the cost of attention, a small image, little data"


class SheetStudy(NamedTuple):
    """A study of the sheet: the varied setting and the sheet's claims."""

    override: str
    claims: list[Claim]


STUDIES = {
    "width": SheetStudy(
        "model.embed_dim=16,32,64,128",
        [
            Claim("32 features are best", "32"),
            Claim("16 converge slightly slower", "16", EPOCHS_TO_TARGET, compared_value="32"),
            Claim("128 are worst", "128", FINAL_ACCURACY, expects_higher=False),
            Claim("128 are slowest, in epochs", "128", EPOCHS_TO_TARGET),
            Claim("128 are slowest, in seconds", "128", SECONDS_PER_RUN),
        ],
    ),
    "patch": SheetStudy(
        "model.patch_size=2,4,7,14,28",
        [
            Claim("patches of 2 have a problem with learning", "2", EPOCHS_TO_TARGET),
            Claim("patches of 14 are ideal", "14"),
        ],
    ),
    "depth": SheetStudy(
        "model.depth=2,4,6,8",
        [
            Claim("6 blocks are best", "6"),
            Claim("8 blocks are unstable", "8", LARGEST_DROP),
            Claim("2 blocks start worse", "2", FIRST_EPOCH_ACCURACY, expects_higher=False),
            Claim("2 blocks end well", "2", allows_ties=True),
        ],
    ),
}
STUDY_REMARKS = {"patch": "With patches of 28×28 pixels there is one patch and the class token."}
COST_IMAGES_AND_TOKENS = (64, 65)  # images and tokens, for the cost of projections and of attention maps
QUICK_OVERRIDES = ["data.fraction=0.02", "train.epochs=3", "train.batch_size=32"]
SMALL_DATA_OVERRIDES = [
    "data.fraction=0.0186",
    "data.passes_per_epoch=10",
    "train.epochs=30",
]  # 1,000 images: 2,340 steps
SMALL_DATA_QUICK_OVERRIDES = ["data.fraction=0.0186", "train.epochs=4", "train.batch_size=16"]
SMALL_DATA_CHANGES = {
    "SPT": "model.tokenizer=patch,spt",
    "LSA": "model.attention=plain,lsa",
    "dropout 0.1": "model.proj_drop_rate=0,0.1",
    "stochastic depth 0.1": "model.drop_path_rate=0,0.1",
    "augmentation (shift by up to 2 pixels)": "data.augment.shift=0,2",
}


def _make_small_data_study_name(override: str) -> str:
    """Return the name of a comparison with little data: few-attention for model.attention=plain,lsa."""
    return "few-" + override.split("=")[0].split(".")[-1]


EXPERIMENTS = {  # folder -> title, in the order of the sheet
    "width": "model width",
    "patch": "patch size",
    "depth": "number of blocks",
    **{item.study_name: f"a larger model, {name}" for name, item in INITIALIZATIONS.items()},
    **{
        _make_small_data_study_name(override): f"a thousand images, without and with {name}"
        for name, override in SMALL_DATA_CHANGES.items()
    },
}


def run_studies_and_fill_report(experiments: SheetExperiments, report: SheetReport) -> None:
    """Run sheet D's studies and fill the report."""
    weights = try_to_open_weights(experiments)
    plain = read_recipe("sheet-d", QUICK_OVERRIDES if experiments.quick else [])
    report.add_text(
        f"""The model has pre-norm blocks (LayerNorm → multi-head attention with output projection → residual sum →
        LayerNorm → GELU MLP → residual sum), a class token and sinusoidal positions (`vitascope anatomy sheet-d`). It
        has {plain.model.num_heads} heads. Training uses batch size {plain.train.batch_size} and AdamW with learning
        rate {plain.train.lr:g}. Unless a study varies them, the width is {plain.model.embed_dim}, the patch size
        {plain.model.patch_size} and the depth {plain.model.depth}. Studies compare the accuracy on held-out images. The
        test images are not used."""
    )
    report.add_heading("The position embedding")
    report.save_and_add_figure("positions", draw_sinusoidal_positions([(100, 16), (1000, 160)]))
    claims = " ".join(_run_study_add_section_and_summarize_claims(experiments, report, name) for name in STUDIES)
    costs = _add_attention_cost_and_return_exponents(experiments, report)
    _try_28_pixel_image_and_add_section(report)
    run_or_skip_initialization_comparison(experiments, report, weights)
    gains = _run_and_add_small_data_comparisons(experiments, report)
    unfused, fused = costs["written out"], costs["fused"]
    effects = "; ".join(f"{name} {gain.points} points ({gain.verdict})" for name, gain in gains.items())
    report.add_questions_from_template(
        time=unfused["seconds"], memory=unfused["peak_bytes"], fused=fused["peak_bytes"], claims=claims, effects=effects
    )


def _run_study_add_section_and_summarize_claims(
    experiments: SheetExperiments, report: SheetReport, study_name: str
) -> str:
    """Run one study and return the verdicts on the sheet's claims as text."""
    override, claims = STUDIES[study_name]
    results = experiments.run_study(study_name, "sheet-d", [override, *(QUICK_OVERRIDES if experiments.quick else [])])
    report.add_heading(f"Study: {override}")
    report.save_and_add_figure(study_name, draw_study_curves(results))
    report.add_table(*build_results_table(results))
    report.add_text(f"{results.conclusion} Every run has {results.max_epochs} epochs. {results.timing_note}")
    return _add_claim_verdicts_and_summarize(report, study_name, claims, results)


def _add_claim_verdicts_and_summarize(
    report: SheetReport, study_name: str, claims: list[Claim], study_result: StudyResults
) -> str:
    """Add the verdicts on the sheet's claims and return them as text."""
    verdicts_by_claim = {claim.text: claim.evaluate(study_result, len(claims)) for claim in claims}
    rows = [[text, *verdict] for text, verdict in verdicts_by_claim.items()]
    report.add_table(
        ["claim of the sheet, from one run each", "verdict over the seeds", "measured (differences seed by seed)"], rows
    )
    num_seeds = len(study_result.design.seeds)
    report.add_text(
        f"""“Best” and “well” are tested as in the table above: no other value is significantly better.
        {_explain_bonferroni_correction("The ± of a difference is its", num_seeds, f"{len(claims)} claims")}
        {STUDY_REMARKS.get(study_name, "")}"""
    )
    report.measurements[study_name] = {cell.name: cell.accuracies for cell in study_result.combinations}
    verdicts = "; ".join(f"“{text}”: {verdict}" for text, (verdict, _) in verdicts_by_claim.items())
    return f"{study_name.capitalize()}: {study_result.conclusion} Claims of the sheet: {verdicts}."


def _explain_bonferroni_correction(subject: str, num_seeds: int, comparisons_text: str) -> str:
    """Explain what ± means, if it is printed: from three seeds on. `subject` starts the sentence."""
    if num_seeds == 1:
        return ""
    interval = f"{subject} 95 % confidence interval," if num_seeds >= MIN_SEEDS_FOR_INTERVAL else "The verdicts are"
    return f"{interval} corrected for {comparisons_text} (Bonferroni)."


def _add_attention_cost_and_return_exponents(
    experiments: SheetExperiments, report: SheetReport
) -> dict[str, dict[str, float]]:
    """Measure the cost of attention; return implementation -> exponents of seconds and peak_bytes."""
    measurement = experiments.load_or_measure_and_store(
        "cost", lambda: _measure_attention_cost(choose_or_check_device(experiments.device))
    )
    costs = [AttentionCost(**cost) for cost in measurement["costs"]]
    seconds_by_part, machine = measurement["parts"], measurement["machine"]
    exponents = fit_exponents_by_implementation(costs)
    report.measurements["cost"] = measurement
    report.add_heading("The cost of attention by the number of tokens")
    report.save_and_add_figure("cost", draw_attention_costs(costs, "4 heads of width 64"))
    rows = [
        [implementation, f"tokens^{fit['seconds']:.1f}", f"tokens^{fit['peak_bytes']:.1f}"]
        for implementation, fit in exponents.items()
    ]
    report.add_table([f"4 heads of 64, {machine}", "time", "memory"], [["the sheet", "tokens²", "tokens²"], *rows])
    stages = {stage.name: stage.flops for stage in list_stages(ModelConfig(32, 4, embed_dim=256, depth=1, num_heads=4))}
    attention = {name.split(".")[-1]: flops for name, flops in stages.items() if ".attn." in name}
    projections = sum(flops for name, flops in attention.items() if name in ("query", "key", "value", "proj", "concat"))
    maps_and_sums = sum(attention.values()) - projections
    report.add_text(
        f"""The exponents are log-log slopes, fitted to the larger half of the token counts. At
        {COST_IMAGES_AND_TOKENS[1]} tokens of width 256 the projections cost {projections / 1e6:.1f} million operations;
        the attention maps and the weighted sums of the values cost {maps_and_sums / 1e6:.1f} million. The N² part is
        smaller until N is twice the width. Measured
        with a batch of {COST_IMAGES_AND_TOKENS[0]} images:
        {", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in seconds_by_part.items())}.
        {_describe_time_flops_mismatch(seconds_by_part)}"""
    )
    return exponents


def _describe_time_flops_mismatch(seconds_by_part: dict[str, float]) -> str:
    """Describe when the part with fewer operations takes longer, or nearly as long."""
    projections, unfused, fused = seconds_by_part.values()
    if unfused < projections / 2:
        return ""
    return f"""Time is not proportional to the number of operations. Maps and weighted sums have an eighth of the
        operations, but without fusion they take {unfused / projections:.1f} times as long as the projections
        ({fused / projections:.1f} times when fused). A likely reason is that the maps are written to memory and read
        again in several steps."""


def _measure_attention_cost(device: str) -> dict[str, Any]:
    costs = measure_attention_costs(4, 64, choose_token_counts_to_measure(4, device), device)
    parts = measure_projection_and_attention_seconds(*COST_IMAGES_AND_TOKENS, embed_dim=256, num_heads=4, device=device)
    machine = get_device_or_cpu_name(get_device_names_by_type(), device)
    return {"machine": machine, "costs": [asdict(cost) for cost in costs], "parts": parts}


def _try_28_pixel_image_and_add_section(report: SheetReport) -> None:
    """Try a 28 × 28 image with timm and with Vitascope."""
    import timm
    import torch

    report.add_heading("A 28 × 28 image for vit_base_patch16_224")
    with torch.no_grad():
        try:
            timm.create_model("vit_tiny_patch16_224")(torch.zeros(1, 3, 28, 28))
            timm_result = "runs"
        except AssertionError as error:
            timm_result = str(error)
        model: Any = timm.create_model("vit_tiny_patch16_224", img_size=28)
    grid = model.patch_embed.grid_size
    try:
        ModelConfig(img_size=28, patch_size=16)
        vitascope_result = "accepted"
    except UserError as error:
        vitascope_result = str(error)
    used = f"which uses {format_percent(grid[0] * grid[1] * 256 / 784)} of the pixels, without a warning"
    report.add_table(
        ["model", "result"],
        [
            ["timm, unchanged", timm_result],
            ["timm, img_size=28", f"a grid of {grid[0]}×{grid[1]} patches, {used}"],
            ["Vitascope, img_size=28, patch_size=16", vitascope_result],
        ],
    )
    report.add_text(
        """Tried with timm's tiny model, which checks sizes like the base model. According to the sheet, self-attention
        is the cause. The actual causes are the position table, which has 196 entries, and the size check: attention
        accepts any number of tokens. A CNN with global pooling runs on 28 × 28 images, but only one position is left
        after 32-fold downsampling. There are two solutions: resize the images, or resample the position table and use
        smaller patches (`vitascope adapt`, measured below)."""
    )


def _run_and_add_small_data_comparisons(experiments: SheetExperiments, report: SheetReport) -> dict[str, AccuracyGain]:
    """Measure each change with little data; return change -> gain."""
    report.add_heading("Little data: a thousand images")
    gains: dict[str, AccuracyGain] = {}
    rows, passes = [], 0
    common_overrides = SMALL_DATA_QUICK_OVERRIDES if experiments.quick else SMALL_DATA_OVERRIDES
    for name, override in SMALL_DATA_CHANGES.items():
        study_name = _make_small_data_study_name(override)
        results = experiments.run_study(study_name, "sheet-d", [override, *common_overrides])
        plain, changed = results.combinations
        passes = results.max_epochs * results.design.build_recipe(plain.settings, 1).data.passes_per_epoch
        gains[name] = format_accuracy_gain(plain, changed, len(SMALL_DATA_CHANGES))
        report.measurements[study_name] = {cell.name: cell.accuracies for cell in results.combinations}
        train_accuracies = [cell.compute_mean_last_value("train_accuracy") or 0.0 for cell in results.combinations]
        formatted = " → ".join(f"{100 * accuracy:.0f} %" for accuracy in train_accuracies)
        rows.append([name, plain.formatted_accuracy, changed.formatted_accuracy, *gains[name], formatted])
    report.add_table(
        ["change", "without", "with", "difference in points", "verdict", "training accuracy, without → with"], rows
    )
    num_comparisons = f"{len(SMALL_DATA_CHANGES)} comparisons"
    report.add_text(
        f"""Every image is used {passes} times; {experiments.num_seeds} seeds. Differences are taken seed by seed.
        {_explain_bonferroni_correction("Their ± is a", experiments.num_seeds, num_comparisons)}
        The training accuracy is measured during training, so it includes the shift, dropout or stochastic depth of
        the change."""
    )
    return gains
