"""Write report.html about a run: one self-contained file without network access.

A row of a map is stored as bytes and one scale, its maximum divided by 255. The error is at most 0.2 % of the row's
maximum; one scale for all rows would be twenty times less precise.
"""

import gzip
import json
import re
from base64 import b64encode
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib import colormaps
from numpy.typing import NDArray
from safetensors.numpy import save
from torch import Tensor, nn

import vitascope
from vitascope.data.dataset import UInt8Images
from vitascope.draw import SEQUENTIAL
from vitascope.draw.html import Picture, render_template
from vitascope.errors import UserError
from vitascope.evaluation.figures import (
    describe_number_of_shown_errors,
    describe_possible_mislabelling,
    make_evaluation_document_parts,
)
from vitascope.evaluation.report import Evaluation, Misclassification, spell_out_split_name
from vitascope.explain.attribution import build_attribution_inputs, uses_sequence_pooling
from vitascope.explain.maps import get_token_layout
from vitascope.explain.methods import METHODS
from vitascope.explain.model_figures import (
    MIN_IMAGES,
    try_to_load_run_images,
    write_model_statistics_figures_and_json,
)
from vitascope.inference.classifier import Classifier
from vitascope.inference.open_model import open_model
from vitascope.model.replay import compute_logits
from vitascope.recipe.schema import format_recipe_yaml
from vitascope.run.files import write_atomically
from vitascope.run.images import load_run_split_if_any
from vitascope.run.temperature import describe_unscaled_probabilities
from vitascope.shapes import Images

PAGE_FOLDER = Path(__file__).parent / "page"
NUM_EXAMPLES = 8  # up to half of them errors
NUM_SHOWN_ERRORS = 12  # shown with their relevance
PageArrays = dict[str, NDArray]  # the keys are read by page/*.js


def evaluate_and_write_html_report(run_path: Path, split: str | None = None, output_path: Path | None = None) -> Path:
    """Write the report on the validation images; without them, no evaluation. Test images only with split="test"."""
    model = open_model(run_path)
    if not model.is_run:
        raise UserError(f"{run_path} is not a run. Reports can be written only for runs.")
    if split is None and model.run.recipe.data.validation > 0:
        split = "val"
    evaluation = model.evaluate(split) if split else None
    path = output_path or model.run.get_path("report.html")
    write_atomically(path, render_html_report(model, evaluation))
    return path


def render_html_report(model: Classifier, evaluation: Evaluation | None) -> str:
    examples = (
        choose_errors_and_correct_examples(model, evaluation) if evaluation else choose_first_training_examples(model)
    )
    errors = _explain_worst_errors(model, evaluation) if evaluation else []
    curves = model.run.get_path("curves.png")
    return render_template(
        "report.html.j2",
        title=f"{model.run.recipe.name}: {model.run.path.name}",
        version=vitascope.__version__,
        images_name=f"{spell_out_split_name(evaluation.eval_data.split)} images" if evaluation else "training images",
        model_html=model._repr_html_(),
        recipe=format_recipe_yaml(model.run.recipe),
        curves=[Picture.from_file(curves)] if curves.is_file() else [],
        page_data=build_report_script_data(model, *examples),
        stage_ratio=examples.images.shape[3] / examples.images.shape[2],
        evaluation_parts=make_evaluation_document_parts(evaluation, include_worst_errors=False) if evaluation else None,
        saved_evaluation=None if evaluation else _find_newest_saved_evaluation(model),
        errors=errors,
        errors_description=describe_number_of_shown_errors(evaluation, len(errors)).capitalize() if evaluation else "",
        mislabelling_note=describe_possible_mislabelling(len(errors)),
        temperature_note=describe_unscaled_probabilities(model.find_temperature()),
        statistics=_draw_model_statistics(model),
        import_map=_build_javascript_import_map(),
    )


class Examples(NamedTuple):
    images: UInt8Images
    captions: list[str]  # shown in the page's list of images


def choose_errors_and_correct_examples(model: Classifier, evaluation: Evaluation) -> Examples:
    """Return the worst errors, then the first correct images, and the list entry of each."""
    samples = evaluation.eval_data.samples
    wrong = [
        (prediction.index, f"true: {prediction.label}, predicted: {prediction.said}")
        for prediction in evaluation.worst_errors[: NUM_EXAMPLES // 2]
    ]
    num_candidates = min(8 * NUM_EXAMPLES, len(samples))
    predictions = model.predict(samples.fetch(slice(num_candidates)))
    correct = [
        (index, f"{prediction.label}, correct")
        for index, (prediction, label) in enumerate(
            zip(predictions, samples.labels[:num_candidates].tolist(), strict=True)
        )
        if prediction.label == evaluation.classes[label]
    ]
    chosen = [*wrong, *correct[: NUM_EXAMPLES - len(wrong)]]
    return Examples(samples.images[[index for index, _ in chosen]], [caption for _, caption in chosen])


def choose_first_training_examples(model: Classifier) -> Examples:
    """Return the first training images, with their true and predicted classes."""
    samples = load_run_split_if_any(model.run, model.info, "train")
    if samples is None:
        raise UserError("The run has no training images to show.")
    images, labels = samples.fetch(slice(NUM_EXAMPLES)), samples.labels[:NUM_EXAMPLES].tolist()
    predicted = [item.label for item in model.predict(images)]
    captions = [
        f"true: {model.classes[label]}, predicted: {name}" for label, name in zip(labels, predicted, strict=True)
    ]
    return Examples(images, captions)


def build_report_script_data(subject: Classifier, images: UInt8Images, captions: list[str]) -> dict[str, Any]:
    """Return the data of the page's script: one JSON object, with the arrays of each image in base64."""
    layout = get_token_layout(subject.model)
    examples = [
        {
            "caption": caption,
            "arrays": compress_arrays_to_base64(
                compute_page_arrays_of_image(subject.model, subject.preprocessing(image[None]), image[None])
            ),
        }
        for image, caption in zip(images, captions, strict=True)
    ]
    return {
        "layout": {
            "prefix": layout.num_prefix_tokens,
            "rows": layout.rows,
            "columns": layout.columns,
            "reads_class": layout.reads_class_token,
            "has_pool_weights": uses_sequence_pooling(subject.model),
            "prefix_name": layout.prefix_name,
        },
        "examples": examples,
        "colours": (np.array(colormaps[SEQUENTIAL].colors) * 255).round().astype(int).flatten().tolist(),  # pyright: ignore
    }


class ExplainedError(NamedTuple):
    image: NDArray[np.uint8]
    relevance: NDArray[np.uint8]  # drawn over the image, for the predicted class
    error: Misclassification


def _explain_worst_errors(subject: Classifier, evaluation: Evaluation) -> list[ExplainedError]:
    """Return the worst errors with their relevance (Chefer et al. 2021) for the predicted class."""
    explained_errors = []
    for error in evaluation.worst_errors[:NUM_SHOWN_ERRORS]:
        stored = evaluation.eval_data.samples.images[error.index : error.index + 1]
        inputs = build_attribution_inputs(subject.model, subject.preprocessing(stored))
        picture = stored[0].permute(1, 2, 0).numpy()
        overlay = _blend_grey_image_with_heatmap(picture, METHODS["relevance"](inputs)[0].numpy())
        explained_errors.append(ExplainedError(picture, overlay, error))
    return explained_errors


def _blend_grey_image_with_heatmap(image: np.ndarray, heatmap: np.ndarray) -> np.ndarray:
    """Return the image overlaid with the map's colours, one colour per patch."""
    rows, columns = image.shape[0] // heatmap.shape[0], image.shape[1] // heatmap.shape[1]
    level = np.clip(heatmap / max(float(heatmap.max()), 1e-12), 0, 1)
    pixel_levels = np.kron(level, np.ones((rows, columns)))
    colours = colormaps[SEQUENTIAL](pixel_levels)[..., :3] * 255
    grey = np.broadcast_to(image.mean(-1, keepdims=True), (*image.shape[:2], 3))
    return (0.6 * colours + 0.4 * grey).round().astype(np.uint8)


class SavedEvaluation(NamedTuple):
    accuracy: float
    images_description: str
    figures: list[Picture]


def _find_newest_saved_evaluation(model: Classifier) -> SavedEvaluation | None:
    """Return the accuracy and figures of the newest `vitascope evaluate`, if there is one."""
    reports = sorted(model.run.get_path("evaluation").glob("*/report.json"), key=lambda path: path.stat().st_mtime)
    if not reports:
        return None
    report = json.loads(reports[-1].read_text(encoding="utf-8"))
    description = f"{report['images']:,} {spell_out_split_name(report['split'])} images"
    description += f", {report['views']} views" if report["views"] > 1 else ""
    description += "" if report.get("weights", "last") == "last" else f", weights: {report['weights']}"
    figures = [Picture.from_file(path) for path in sorted(reports[-1].parent.glob("*.png"))]
    return SavedEvaluation(report["accuracy"], description, figures)


def _draw_model_statistics(subject: Classifier) -> list[Picture]:
    run_images = try_to_load_run_images(subject)
    if run_images is None or len(run_images.images) < MIN_IMAGES:
        return []
    with TemporaryDirectory() as folder:
        files = write_model_statistics_figures_and_json(
            subject, run_images.images, run_images.labels, run_images.description, Path(folder)
        )
        return [Picture.from_file(path) for path in files if path.suffix == ".png"]


def _build_javascript_import_map() -> dict[str, dict[str, str]]:
    """Return every page/*.js as a data: URL, so that the page needs no server. Imports use from './name.js'."""
    urls = {}
    for path in sorted(PAGE_FOLDER.glob("*.js")):
        source = re.sub(r"from '\./([\w-]+\.js)'", r"from 'page/\1'", path.read_text(encoding="utf-8"))
        urls[f"page/{path.name}"] = f"data:text/javascript;base64,{b64encode(source.encode()).decode()}"
    return {"imports": urls}


def compute_page_arrays_of_image(model: nn.Module, image: Images, stored_image: UInt8Images) -> PageArrays:
    """Return the arrays of one image: `image` is prepared for the model, `stored_image` holds its bytes."""
    inputs = build_attribution_inputs(model, image)
    maps, maps_scale = quantise_rows_to_uint8(torch.cat(inputs.maps_and_gradients[0]))  # block × head × query × key
    relevance, relevance_scale = quantise_rows_to_uint8(
        inputs.relevance_without_identity[0]
    )  # query × key, for the predicted class
    with torch.no_grad():
        logits = compute_logits(model, image)
    return {
        "logits": logits[0].float().cpu().numpy(),
        "query_weights": inputs.query_weights[0].float().cpu().numpy(),  # of what the classifier reads
        "maps_scale": maps_scale,
        "relevance_scale": relevance_scale,
        "image": np.ascontiguousarray(stored_image[0].permute(1, 2, 0).cpu().numpy()),
        "maps": maps,
        "relevance": relevance,
    }


class QuantisedRows(NamedTuple):
    values: NDArray[np.uint8]
    scales: NDArray[np.float32]  # one per row


def quantise_rows_to_uint8(values: Tensor) -> QuantisedRows:
    """Quantise rows of non-negative numbers to bytes, with one scale per row."""
    rows = values.float().cpu().numpy()
    scales = np.maximum(rows.max(-1), 1e-12) / 255
    return QuantisedRows(np.rint(rows / scales[..., None]).astype(np.uint8), scales.astype(np.float32))


def compress_arrays_to_base64(arrays: PageArrays) -> str:
    """Return the arrays as gzipped safetensors in base64, for an HTML page."""
    return b64encode(gzip.compress(save(arrays), mtime=0)).decode()
