"""Initial weights of a run: pretrained weights, an earlier stage's weights, whitened patch projection.

In photographs neighbouring pixels are alike: a few slow patterns make up almost all of what a patch varies in, and a
random projection passes on little else. Whitening first makes every direction vary as much (Coates & Ng 2012; Jordan
2024, arXiv 2404.00498, for convolutions). Both maps are linear, so the projection simply starts as their
product; afterwards it learns as always.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from vitascope.data.splits import TrainingData
from vitascope.errors import UserError
from vitascope.model.patches import PatchEmbed, patchify
from vitascope.recipe.reading import read_recipe
from vitascope.recipe.schema import Recipe
from vitascope.run.directory import is_run, open_run
from vitascope.shapes import Patches
from vitascope.weights.adaptation import ADAPTABLE_SETTINGS, SETTINGS_WITHOUT_WEIGHTS, AdaptedModel, adapt
from vitascope.weights.files import WEIGHTS_SUFFIXES
from vitascope.weights.pretrained import ONLINE_PREFIXES, open_weights
from vitascope.weights.resampling import AdaptationReport, TensorChange


def load_pretrained_weights(recipe: Recipe, class_names: list[str] | None = None) -> AdaptedModel:
    """Load and adapt the weights. `classes`: class names of the data, None if it has none."""
    found = open_weights(resolve_weights_path(recipe.weights or ""), img_size=recipe.model.img_size)
    # These settings come from the recipe, all others from the weights.
    settings = {name: getattr(recipe.model, name) for name in (*ADAPTABLE_SETTINGS, *SETTINGS_WITHOUT_WEIGHTS)}
    # A linear probe was trained with labels that this run may have to do without.
    keep = not found.info.probe
    made = adapt(found, classes=class_names, keep_classifier=keep, seed=recipe.train.seed, **settings)
    made = replace(made, info=replace(made.info, probe=False))
    if class_names is not None or "head.weight" in made.report.new:
        return made
    note = "the classifier was kept, because the data has no class names to compare"
    return replace(made, report=replace(made.report, notes=[*made.report.notes, note]))


def make_leakage_warning(recipe: Recipe) -> str | None:
    """A warning if the weights come from a run on the same data with other validation images."""
    path = Path(recipe.weights or "")
    if recipe.data.validation == 0 or not is_run(path):
        return None
    earlier = open_run(path).recipe
    same = earlier.data.name == recipe.data.name
    ours, theirs = ((one.train.seed, one.data.validation) for one in (recipe, earlier))
    if not same or ours == theirs:
        return None
    return (
        "  note: the weights were trained on some of the validation images, so validation accuracy will be too high. "
        f"For the same validation images, set train.seed={theirs[0]} data.validation={theirs[1]}."
    )


def resolve_weights_path(model_ref: str) -> str:
    """Make the path absolute. The folder of a recipe stands for its newest run."""
    path = Path(model_ref).expanduser()
    if model_ref.startswith(ONLINE_PREFIXES) or not path.exists():
        return model_ref
    if path.suffix not in WEIGHTS_SUFFIXES and not (path / "config.json").is_file():
        path = open_run(path).path
    return str(path.resolve())


def format_adaptation_report(report: AdaptationReport) -> str:
    """The report as a few lines for the terminal."""
    lines = [f"Weights: {report.weights} (format: {report.library}), {report.kept} tensors unchanged"]
    if (report.image_before, report.patch_before) != (report.image_after, report.patch_after):
        image, patch = (
            rows if rows == columns else f"[{rows},{columns}]"
            for rows, columns in (report.image_before, report.patch_before)
        )
        lines.append(
            f"  image size {_arrow(report.image_before, report.image_after)}, patch size "
            f"{_arrow(report.patch_before, report.patch_after)} pixels, as in the recipe. "
            f"The weights' own sizes: model.img_size={image} model.patch_size={patch}"
        )
    lines += [f"  {_describe_change(change, report)}, relative error {change.lost:.0%}" for change in report.resampled]
    if report.dropped:
        lines.append(f"  removed: {', '.join(report.dropped)}")
    if report.new:
        lines.append(f"  newly initialised: {', '.join(report.new)}")
    lines += [f"  assumed: {words}" for words in report.assumed] + [f"  note: {words}" for words in report.notes]
    return "\n".join(lines)


def _describe_change(change: TensorChange, report: AdaptationReport) -> str:
    if change.name == "pos_embed":
        how = f"resampled for the grid of patches {_arrow(report.grid_before, report.grid_after)}, {change.how}"
    elif change.before[2:] != change.after[2:]:
        how = f"resampled for patches of {_arrow(report.patch_before, report.patch_after)} pixels, {change.how}"
    else:
        how = change.how
    return f"{change.name}: {how}"


def _arrow(before: list[int], after: list[int]) -> str:
    """14×14 → 8×8."""
    return " → ".join("×".join(map(str, sides)) for sides in (before, after))


STAGE_PREFIX = "recipe:"


def make_first_stage_recipe(recipe: Recipe) -> Recipe:
    """The recipe of the first stage. It uses all training images that are not held out, without data.fraction."""
    first = read_recipe((recipe.weights or "").removeprefix(STAGE_PREFIX))
    if first.weights and first.weights.startswith(STAGE_PREFIX):
        raise UserError(
            f"weights={recipe.weights}: that recipe has an earlier stage itself. At most two stages are supported."
        )
    own, later = first.data, recipe.data
    data = replace(
        own,
        name=later.name,
        root=later.root,
        download=later.download,
        validation=later.validation,
        strict=later.strict,
    )
    train = replace(first.train, seed=recipe.train.seed, device=recipe.train.device)
    return replace(first, data=data, train=train)


MAX_IMAGES = 1000  # enough to know how patches vary: 64,000 of 4 × 4 pixels, for 48 × 48 numbers
MAX_VALUES = 2**25  # of large images fewer are enough: more pixels than these are not held at once
VARIANCE_OFFSET = (
    0.01  # added to every variance (of normalised pixels: about 1 on average), so that noise is not blown up
)


def compute_whitening(patches: Patches) -> tuple[Tensor, Tensor]:
    """The mean patch, and the symmetric matrix after which patches vary by 1 in all directions."""
    rows = patches.flatten(0, 1).double()
    mean = rows.mean(0)
    variances, directions = torch.linalg.eigh(torch.cov(rows.T))
    return mean, directions * (variances.clamp(min=0) + VARIANCE_OFFSET).rsqrt() @ directions.T


@torch.no_grad()
def whiten_patch_embedding(patch_embed: PatchEmbed, data: TrainingData) -> None:
    """The projection of patches -> the projection of whitened patches."""
    one = data.preprocessing(data.train.images[:1]).numel()
    images = data.preprocessing(data.train.select_evenly(max(1, min(MAX_IMAGES, MAX_VALUES // one))).images)
    mean, matrix = compute_whitening(patchify(images, patch_embed.patch_size))
    weight = patch_embed.proj.weight
    product = weight.flatten(1).double() @ matrix
    weight.copy_(product.view_as(weight))
    if patch_embed.proj.bias is not None:
        patch_embed.proj.bias.sub_(product @ mean)
