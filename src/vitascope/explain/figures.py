"""Write the figures and numbers of `vitascope explain` for each image."""

import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from vitascope.draw.explanation import draw_attention_heads, draw_deletion_and_insertion, draw_heat_maps_over_image
from vitascope.draw.style import save_figure
from vitascope.errors import UserError
from vitascope.explain.attribution import (
    AttributionInputs,
    build_attribution_inputs,
    extract_query_or_classifier_attention,
    predict_probabilities,
    uses_sequence_pooling,
)
from vitascope.explain.faithfulness import (
    Faithfulness,
    FaithfulnessCurves,
    attribute_at_random_with_fixed_seed,
    compute_deletion_and_insertion_curves,
    count_curve_passes,
    describe_curve_sampling,
    summarise_and_rank_faithfulness,
)
from vitascope.explain.maps import PatchPosition, TokenLayout, denormalize_images
from vitascope.explain.methods import METHODS, get_method_label, make_panel_title
from vitascope.explain.model_statistics import apply_logit_lens_per_token, describe_tokens_before_first_block
from vitascope.explain.progress import StepReporter, iterate_and_report
from vitascope.inference.classifier import Classifier
from vitascope.inference.prediction import LoadedImages
from vitascope.number_format import format_percent
from vitascope.run.files import make_folder
from vitascope.run.temperature import describe_unscaled_probabilities


@dataclass(frozen=True)
class ExplainRequest:
    """What to explain. Blocks, heads and the query patch's row and column are counted from 1; None means all blocks or
    heads, what the classifier reads as the query, and the predicted class as the target."""

    methods: list[str] = field(default_factory=lambda: list(METHODS))
    blocks: list[int] | None = None
    heads: list[int] | None = None
    query_patch: PatchPosition | None = None
    target: int | None = None
    report_step: StepReporter = lambda _: None  # gets a short sentence before each method and image


class ImageResult(TypedDict):
    """The numbers of one image; the keys are stored in explanations.json."""

    image: str
    answer: str  # the predicted class
    probability: float  # of the predicted class
    explained: str  # the explained class
    heat: dict[str, list[list[float]]]  # method -> row × column


@dataclass
class ExplainReport:
    """The files that were written, and their numbers."""

    files: list[Path] = field(default_factory=list)
    image_results: list[ImageResult] = field(default_factory=list)
    faithfulness: list[Faithfulness] = field(default_factory=list)
    seconds_per_pass: float = 0.0  # of one image through the model, measured on the curves

    def as_dict(self) -> dict[str, Any]:
        return {
            "images": self.image_results,
            "evidence": [_replace_nan_by_none(asdict(row)) for row in self.faithfulness],
            "files": [str(path) for path in self.files],
        }


def _replace_nan_by_none(fields: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN, which JSON does not have: the standard error of one image."""
    return {name: None if value != value else value for name, value in fields.items()}


class AttentionMapSelection(NamedTuple):
    """The attention maps to draw; blocks and heads are counted from 1, the query patch from 0."""

    blocks: list[int]
    heads: list[int]
    query_patch: PatchPosition | None  # None: what the classifier reads


def write_explanation_figures(
    subject: Classifier, loaded_images: LoadedImages, request: ExplainRequest, output_folder: Path
) -> ExplainReport:
    """Write explanations and attention maps of each image, and the faithfulness of each method over all images."""
    inputs = build_attribution_inputs(subject.model, subject.preprocessing(loaded_images.images), request.target)
    selection = check_and_select_maps(request, inputs)
    with torch.no_grad():
        probabilities = predict_probabilities(subject.model, inputs.images)
    iterate = partial(iterate_and_report, request.report_step)
    methods = iterate(request.methods, "Explaining, method", get_method_label)
    heatmaps = {method: METHODS[method](inputs).cpu() for method in methods}
    make_folder(output_folder)
    report, names = ExplainReport(), make_unique_file_stems(loaded_images)
    pixels = denormalize_images(subject.preprocessing, inputs.images)
    for index, (name, image) in enumerate(zip(iterate(names, "Drawing image"), pixels, strict=True)):
        target, image_heatmaps = int(inputs.targets[index]), {key: heatmap[index] for key, heatmap in heatmaps.items()}
        result = _build_image_result_json(name, subject.classes, probabilities[index], target, image_heatmaps)
        title = f"{name}\nprediction: {result['answer']} ({format_percent(result['probability'])})"
        probability = float(probabilities[index, target])
        caption = _format_explanation_caption(subject.classes[target], probability, image_heatmaps)
        caption = f"{caption} {describe_unscaled_probabilities(subject.find_temperature())}".rstrip()
        panels = {make_panel_title(method): heatmap.numpy() for method, heatmap in image_heatmaps.items()}
        figure = draw_heat_maps_over_image(image, panels, title, caption)
        report.files += save_png_and_svg(figure, output_folder / f"explanations-{name}")
        figure = draw_attention_of_selected_heads(inputs, index, selection, image, title)
        report.files += save_png_and_svg(figure, output_folder / f"heads-{name}")
        report.image_results.append(result)
    report.files += _write_logit_lens_figures(subject, inputs, names, output_folder)
    heatmaps["random"], start = attribute_at_random_with_fixed_seed(inputs), time.perf_counter()
    curves = {
        method: compute_deletion_and_insertion_curves(inputs, heatmaps[method])
        for method in iterate(list(heatmaps), "Measuring faithfulness, method", get_method_label)
    }
    num_passes = len(curves) * len(inputs.images) * count_curve_passes(inputs.layout.num_patches)
    report.seconds_per_pass = (time.perf_counter() - start) / num_passes
    report.files += _write_faithfulness_figure(curves, inputs, output_folder)
    report.faithfulness = summarise_and_rank_faithfulness(curves)
    return report


def check_and_select_maps(request: ExplainRequest, inputs: AttributionInputs) -> AttentionMapSelection:
    """Check the requested blocks, heads and query patch."""
    return AttentionMapSelection(
        check_one_based_indices_or_list_all(request.blocks, len(inputs.maps), "block"),
        check_one_based_indices_or_list_all(request.heads, inputs.maps[0].shape[1], "head"),
        None
        if request.query_patch is None
        else _check_and_convert_patch_to_zero_based(request.query_patch, inputs.layout),
    )


def draw_attention_of_selected_heads(
    inputs: AttributionInputs, image_index: int, selection: AttentionMapSelection, image: NDArray, title: str
) -> Figure:
    heads = [head - 1 for head in selection.heads]
    maps = torch.stack([inputs.maps[block - 1][image_index, heads] for block in selection.blocks])
    maps = extract_query_or_classifier_attention(
        maps, inputs.layout, selection.query_patch, inputs.query_weights[image_index]
    )
    names = [f"block {block}" for block in selection.blocks], [f"head {head}" for head in selection.heads]
    caption = _format_attention_caption(inputs.layout, selection.query_patch, uses_sequence_pooling(inputs.model))
    return draw_attention_heads(image, maps.cpu().numpy(), names, selection.query_patch, title, caption)


def check_one_based_indices_or_list_all(requested: list[int] | None, count: int, item_name: str) -> list[int]:
    """Return the chosen blocks or heads, counted from 1; None is all."""
    for index in requested or []:
        if not 1 <= index <= count:
            raise UserError(f"There is no {item_name} {index}: the model has {item_name}s 1 to {count}.")
    return requested or list(range(1, count + 1))


def _check_and_convert_patch_to_zero_based(one_based_row_column: PatchPosition, layout: TokenLayout) -> PatchPosition:
    """Return the row and column, counted from 0, of a patch that is counted from 1."""
    if not (1 <= one_based_row_column.row <= layout.rows and 1 <= one_based_row_column.column <= layout.columns):
        raise UserError(
            f"There is no patch in row {one_based_row_column.row}, column {one_based_row_column.column}: the grid has "
            f"rows 1 to {layout.rows} and columns 1 to {layout.columns}."
        )
    return PatchPosition(one_based_row_column.row - 1, one_based_row_column.column - 1)


def make_unique_file_stems(loaded_images: LoadedImages) -> list[str]:
    """Return the file names without ending, numbered if two are equal."""
    names: list[str] = []
    for index in range(len(loaded_images.images)):
        name = Path(loaded_images.files[index]).stem if loaded_images.files else str(index)
        names.append(name if name not in names else f"{name}-{index}")
    return names


def save_png_and_svg(figure: Figure, path_without_suffix: Path) -> list[Path]:
    """Save the figure as PNG (for the screen) and SVG (for papers)."""
    png, svg = (path_without_suffix.with_name(f"{path_without_suffix.name}.{ending}") for ending in ("png", "svg"))
    save_figure(figure, png)
    figure.set_layout_engine("none")  # the SVG keeps the PNG's layout, which takes half of the time to draw
    return [png, save_figure(figure, svg)]


@torch.no_grad()
def _write_logit_lens_figures(
    subject: Classifier, inputs: AttributionInputs, file_stems: list[str], output_folder: Path
) -> list[Path]:
    """Draw the class probability of every patch after every block (logit lens)."""
    states = inputs.maps_and_states.hidden_states
    probabilities = [apply_logit_lens_per_token(inputs.model, state).softmax(-1) for state in states]
    files, trained_on = [], _describe_classifier_input(inputs)
    pictures = denormalize_images(subject.preprocessing, inputs.images)
    for index, (name, image) in enumerate(zip(file_stems, pictures, strict=True)):
        target = int(inputs.targets[index])
        image_slice = slice(index, index + 1)
        grids = {
            f"after block {block}" if block else "before block 1": inputs.layout.reshape_patches_to_grid(
                block_probabilities[image_slice, :, target]
            )[0].numpy()
            for block, block_probabilities in enumerate(probabilities)
        }
        text = (
            f"Logit lens: the probability of '{subject.classes[target]}' if the classifier is applied to this patch's "
            f"token instead of {trained_on}. Before block 1, a token holds only its "
            f"{describe_tokens_before_first_block(inputs.model)}, because attention comes later. The classifier was "
            f"trained only on {trained_on} after the last block, so values at patches and earlier blocks are "
            "approximate. Each panel has its own scale."
        )
        files += save_png_and_svg(
            draw_heat_maps_over_image(image, grids, name, text, num_columns=5), output_folder / f"lens-{name}"
        )
    return files


def _describe_classifier_input(inputs: AttributionInputs) -> str:
    """Return what the classifier got in training: one token, or a mean over tokens."""
    if inputs.layout.reads_class_token:
        return "the class token"
    return f"the {'weighted ' if uses_sequence_pooling(inputs.model) else ''}mean of the patch tokens"


def _write_faithfulness_figure(
    curves_by_method: dict[str, FaithfulnessCurves], inputs: AttributionInputs, output_folder: Path
) -> list[Path]:
    num_images = len(inputs.images)
    images_text = "One image" if num_images == 1 else f"Mean over {num_images} images"
    text = (
        f"{images_text}, with the area under each curve (AUC). Left: patches are made grey (0 after "
        "normalisation), most important first. Right: patches of a blurred image are restored in the same order. For a "
        "faithful method, both curves change faster than for a random order."
    )
    text = f"{text} {describe_curve_sampling(inputs.layout.num_patches)}".rstrip()
    means = {get_method_label(method): curves for method, curves in curves_by_method.items()}
    deletion = {label: curves.deletion.mean(0).numpy() for label, curves in means.items()}
    insertion = {label: curves.insertion.mean(0).numpy() for label, curves in means.items()}
    figure = draw_deletion_and_insertion(deletion, insertion, [get_method_label(name) for name in METHODS], text)
    return save_png_and_svg(figure, output_folder / "faithfulness")


def _format_explanation_caption(target_class: str, probability: float, heatmaps: dict[str, Tensor]) -> str:
    text = f"Importance of each patch for the class '{target_class}' (probability {format_percent(probability)}). "
    text += "Each method has its own scale."
    class_independent = [method for method in heatmaps if not METHODS[method].is_class_specific]
    if class_independent:
        text += f" Not specific to the class: {', '.join(class_independent)}."
    signed = [method for method, heatmap in heatmaps.items() if heatmap.min() < 0]
    if signed:
        scores = [f"the {METHODS[method].score} ({method})" for method in signed]
        text += f" Red patches increase the class's score, blue patches decrease it: {', '.join(scores)}."
    if len(signed) < len(heatmaps):
        text += " In the others, yellow is most important." if signed else " Yellow is most important."
    return text


def _format_attention_caption(
    layout: TokenLayout, query_patch: PatchPosition | None, uses_pool_weights: bool = False
) -> str:
    """Describe the attention maps; `query` is counted from 0."""
    if query_patch is not None:
        row, column = query_patch.row + 1, query_patch.column + 1
        subject_text = f"Attention from the patch in row {row}, column {column} (framed) to each patch"
    elif layout.reads_class_token:
        subject_text = "Attention from the class token to each patch"
    else:
        weighting = " with the weights of the sequence pooling" if uses_pool_weights else ""
        subject_text = f"Attention each patch receives, averaged over all query patches{weighting}"
    prefix_text = f" Attention to the {layout.prefix_name} is not shown." if layout.num_prefix_tokens else ""
    uniform = 1 / (layout.num_prefix_tokens + layout.num_patches)
    return (
        f"{subject_text}, by block and head. Each row has its own colour scale, from 0 to the number at its end: "
        f"the block's largest value, at least {2 * uniform:.3g} (twice uniform attention). "
        f"Uniform attention would be {uniform:.3g}.{prefix_text}"
    )


def _build_image_result_json(
    image_name: str, class_names: list[str], probabilities: Tensor, target: int, heatmaps: dict[str, Tensor]
) -> ImageResult:
    return {
        "image": image_name,
        "answer": class_names[int(probabilities.argmax())],
        "probability": float(probabilities.max()),
        "explained": class_names[target],
        "heat": {
            method: [[round(value, 6) for value in row] for row in heatmap.tolist()]
            for method, heatmap in heatmaps.items()
        },
    }
