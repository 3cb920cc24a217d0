"""Initial weights of a run: pretrained weights, an earlier stage's weights, linear probe, whitened patch projection.

Neighbouring pixels of photographs are correlated: a few smooth patterns explain almost all variance of a patch, and a
random projection passes on little else. Whitening gives every direction the same variance (Coates & Ng 2012; Jordan
2024, arXiv 2404.00498, for convolutions). Both maps are linear, so the projection is initialised as their product and
then trained as usual.
"""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vitascope.data.open_data import TrainingData, draw_stratified_subset_indices
from vitascope.errors import UserError
from vitascope.inference.hardware import InferenceHardware
from vitascope.inference.scoring import compute_outputs_in_eval_mode
from vitascope.model.patches import PatchEmbed, patchify
from vitascope.model.vit import VisionTransformer
from vitascope.recipe.reading import read_recipe
from vitascope.recipe.schema import Recipe, format_value_for_command_line
from vitascope.run.directory import is_run_folder, open_run_or_newest
from vitascope.shapes import Patches
from vitascope.training.objectives.feature_metrics import fit_linear_probe
from vitascope.weights.adaptation import CLASSIFIER_WEIGHT_NAMES, SETTINGS_WITHOUT_WEIGHTS, AdaptedModel, adapt
from vitascope.weights.adaptation_report import ADAPTABLE_SETTINGS, AdaptationReport, TensorChange
from vitascope.weights.files import WEIGHTS_SUFFIXES
from vitascope.weights.pretrained import MODEL_PREFIXES, read_pretrained_model


def load_and_adapt_pretrained_weights(recipe: Recipe, class_names: list[str] | None = None) -> AdaptedModel:
    """Load the pretrained weights and adapt them to the recipe. `class_names`: of the data; None if it has none."""
    pretrained = read_pretrained_model(make_model_ref_absolute(recipe.weights or ""), img_size=recipe.model.img_size)
    # These settings come from the recipe, all others from the weights.
    settings = {name: getattr(recipe.model, name) for name in (*ADAPTABLE_SETTINGS, *SETTINGS_WITHOUT_WEIGHTS)}
    # A linear probe was fitted with labels that this run may not use.
    keep = not pretrained.info.probe
    adapted = adapt(pretrained, classes=class_names, keep_classifier=keep, seed=recipe.train.seed, **settings)
    adapted = replace(adapted, info=replace(adapted.info, probe=False))
    if class_names is not None or "head.weight" in adapted.report.new:
        return adapted
    note = "the classifier was kept, because the data has no class names to compare"
    return replace(adapted, report=replace(adapted.report, notes=[*adapted.report.notes, note]))


def find_validation_leakage_warning(recipe: Recipe) -> str | None:
    """Return a warning if the weights come from a run on the same data with other validation images."""
    path = Path(recipe.weights or "")
    if recipe.data.validation == 0 or not is_run_folder(path):
        return None
    earlier = open_run_or_newest(path).recipe
    same = earlier.data.name == recipe.data.name
    split, earlier_split = ((each.train.seed, each.data.validation) for each in (recipe, earlier))
    if not same or split == earlier_split:
        return None
    return (
        "  note: the weights were trained on some of the validation images, so validation accuracy will be too high. "
        f"For the same validation images, set train.seed={earlier_split[0]} data.validation={earlier_split[1]}."
    )


def make_model_ref_absolute(model_ref: str) -> str:
    """Make the path absolute. The folder of a recipe is replaced by its newest run."""
    path = Path(model_ref).expanduser()
    if model_ref.startswith(MODEL_PREFIXES) or not path.exists():
        return model_ref
    if path.suffix not in WEIGHTS_SUFFIXES and not (path / "config.json").is_file():
        path = open_run_or_newest(path).path
    return str(path.resolve())


def format_adaptation_report(report: AdaptationReport) -> str:
    """Format the report as a few lines for the terminal."""
    lines = [f"Weights: {report.weights} (format: {report.library}), {report.kept} tensors unchanged"]
    if (report.image_before, report.patch_before) != (report.image_after, report.patch_after):
        lines.append(f"  {_describe_size_changes(report)}")
    if report.grid_before != report.grid_after:
        lines.append(f"  {_describe_token_grid(report)}")
    lines += [f"  {_describe_tensor_change(change, report)}" for change in report.resampled]
    if report.resampled:
        settings = [f"{name}={format_value_for_command_line(value)}" for name, value in report.settings.items()]
        command = shlex.join(["vitascope", "adapt", report.weights, *settings])
        lines.append(f"  To see how much information this loses: {command}")
    is_head_replaced = any(note.startswith("head replaced") for note in report.notes)  # the note says all about it
    for label, names in (("dropped", report.dropped), ("new", report.new)):
        if names := [name for name in names if not (is_head_replaced and name in CLASSIFIER_WEIGHT_NAMES)]:
            lines.append(f"  {label}: {', '.join(names)}")
    lines += [f"  assumed: {'; '.join(report.assumed)}"] if report.assumed else []
    lines += [f"  note: {text}" for text in report.notes]
    return "\n".join(lines)


def _describe_size_changes(report: AdaptationReport) -> str:
    """Name the image and patch size, what changed, and the settings that keep the sizes of the weights."""
    sizes = {
        "image size": ("model.img_size", report.image_before, report.image_after),
        "patch size": ("model.patch_size", report.patch_before, report.patch_after),
    }
    texts = [
        f"{name} {_format_size_change(before, after)} pixels"
        if before != after
        else f"{name} unchanged ({_format_size_change(after)} pixels)"
        for name, (_, before, after) in sizes.items()
    ]
    own = [
        f"{setting}={rows if rows == columns else f'[{rows},{columns}]'}"
        for setting, (rows, columns), after in sizes.values()
        if [rows, columns] != after
    ]
    kept = "sizes" if len(own) > 1 else "size"
    return f"{', '.join(texts)}, as set for this run. To keep the weights' own {kept}, add {' '.join(own)}."


def _describe_token_grid(report: AdaptationReport) -> str:
    """Compare tokens and FLOPs per image with the weights' own; a warning if there are more."""
    start = "warning: " if report.tokens_after > report.tokens_before else ""
    before, after = (_format_size_change(grid) for grid in (report.grid_before, report.grid_after))
    return (
        f"{start}{report.tokens_after:,} tokens per image ({after} patches) instead of the weights' "
        f"{report.tokens_before:,} ({before}): {report.flops_after / report.flops_before:.2g} times the FLOPs."
    )


def _describe_tensor_change(change: TensorChange, report: AdaptationReport) -> str:
    """Say how a tensor was resampled, with sizes before and after."""
    if change.name == "pos_embed":
        sizes = _format_size_change(report.grid_before, report.grid_after)
        text = f"resampled for the grid of patches {sizes}, {change.how}"
    elif change.before[2:] != change.after[2:]:
        sizes = _format_size_change(report.patch_before, report.patch_after)
        text = f"resampled for patches of {sizes} pixels, {change.how}"
    else:
        text = change.how
    return f"{change.name}: {text}"


def _format_size_change(*sizes: list[int]) -> str:
    """Return for example '14×14 → 8×8'."""
    return " → ".join("×".join(map(str, sides)) for sides in sizes)


STAGE_PREFIX = "recipe:"


def read_first_stage_recipe(later_recipe: Recipe) -> Recipe:
    """Return the recipe of the first stage (weights=recipe:NAME).

    It uses all training images that are not held out, without data.fraction."""
    first = read_recipe((later_recipe.weights or "").removeprefix(STAGE_PREFIX))
    if first.weights and first.weights.startswith(STAGE_PREFIX):
        raise UserError(
            f"weights={later_recipe.weights}: that recipe has an earlier stage itself. "
            "At most two stages are supported."
        )
    later = later_recipe.data
    data = replace(
        first.data,
        name=later.name,
        labels=later.labels,
        root=later.root,
        download=later.download,
        validation=later.validation,
        strict=later.strict,
        memory=later.memory,
        fingerprint=later.fingerprint,
    )
    train = replace(first.train, seed=later_recipe.train.seed, device=later_recipe.train.device)
    return replace(first, data=data, train=train)


MAX_PROBE_IMAGES = 20_000  # training images that the first classifier is fitted to


@torch.no_grad()
def fit_head_by_linear_probe(model: VisionTransformer, data: TrainingData, hardware: InferenceHardware) -> None:
    """Initialise the classifier by logistic regression on the features of the pretrained weights.

    Fine-tuning a random classifier distorts good features in its first steps (Kumar et al. 2022, arXiv 2202.10054).
    The L2 penalty is scikit-learn's default, C = 1."""
    fraction = min(1.0, MAX_PROBE_IMAGES / len(data.train))
    samples = data.train.select(draw_stratified_subset_indices(data.train.labels, fraction, seed=0))
    features = compute_outputs_in_eval_mode(
        model, model.compute_pooled_features, samples, data.preprocessing, hardware
    ).to(hardware.device)
    labels = samples.labels.to(hardware.device)
    probe = fit_linear_probe(features, labels, len(data.classes), l2_penalty=0.5 / len(samples))
    model.head.weight.copy_(probe.weight)  # pyright: ignore[reportArgumentType, reportCallIssue]
    model.head.bias.copy_(probe.bias)  # pyright: ignore[reportArgumentType, reportCallIssue]


MAX_IMAGES = 1000  # for the covariance of patches: 64,000 patches of 4 × 4 pixels for a 48 × 48 matrix
MAX_VALUES = 2**25  # pixel values of these images at most; of large images fewer are used
VARIANCE_OFFSET = 0.01  # added to every variance (about 1 on average), so that noise is not amplified


class Whitening(NamedTuple):
    """Whitened patch = matrix · (patch − mean)."""

    mean: Tensor
    matrix: Tensor


def compute_whitening_mean_and_matrix(patches: Patches) -> Whitening:
    """Compute the mean patch and the symmetric matrix that gives all directions of the patches variance 1 (ZCA)."""
    rows = patches.flatten(0, 1).double()
    mean = rows.mean(0)
    variances, directions = torch.linalg.eigh(torch.cov(rows.T))
    return Whitening(mean, directions * (variances.clamp(min=0) + VARIANCE_OFFSET).rsqrt() @ directions.T)


@torch.no_grad()
def fold_whitening_into_patch_embedding(patch_embed: PatchEmbed, data: TrainingData) -> None:
    """Change the patch projection in place, so that it is applied to whitened patches."""
    values_per_image = data.preprocessing(data.train.fetch(slice(1))).numel()
    images = data.preprocessing(
        data.train.select_evenly(max(1, min(MAX_IMAGES, MAX_VALUES // values_per_image))).images
    )
    mean, matrix = compute_whitening_mean_and_matrix(patchify(images, patch_embed.patch_size))
    weight = patch_embed.proj.weight
    product = weight.flatten(1).double() @ matrix
    weight.copy_(product.view_as(weight))
    if patch_embed.proj.bias is not None:
        patch_embed.proj.bias.sub_(product @ mean)
