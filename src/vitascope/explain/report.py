"""Write report.html about a run: one self-contained file without network access.

A row of a map is stored as bytes and one scale, its maximum divided by 255. The error is at most 0.2 % of the row's
maximum; one scale for all rows would be twenty times less precise.
"""

import gzip
import json
import re
from base64 import b64encode
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from numpy.typing import NDArray
from safetensors.numpy import save
from torch import Tensor, nn

import vitascope
from vitascope.data.dataset import UInt8Images
from vitascope.draw.html import encode_image_as_html
from vitascope.draw.palette import SEQUENTIAL
from vitascope.errors import UserError
from vitascope.evaluation.eval_data import load_run_split
from vitascope.evaluation.figures import count_errors, format_evaluation_html
from vitascope.evaluation.report import Evaluation, format_split_name
from vitascope.evaluation.trained import TrainedTransformer
from vitascope.explain.attribution import METHODS, build_attribution_inputs
from vitascope.explain.maps import compute_logits
from vitascope.explain.model_figures import load_run_images, write_probes
from vitascope.explain.subject import ExplainedModel, get_token_layout, open_subject
from vitascope.recipe.writing import format_recipe_yaml
from vitascope.run.files import write_atomically
from vitascope.shapes import Images

PAGE_FOLDER = Path(__file__).parent / "page"
NUM_EXAMPLES = 8  # up to half of them errors
ERRORS = 12  # shown with their relevance
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:"
)


def write_run_report(run_path: Path, split: str | None = None, output_path: Path | None = None) -> Path:
    """Write the report on the validation images; without them, no evaluation. Test images only with split="test"."""
    subject = open_subject(str(run_path))
    model = subject.trained_run_model
    if model is None:
        raise UserError(f"{run_path} is not a run. Reports can be written only for runs.")
    if split is None and model.run.recipe.data.validation > 0:
        split = "val"
    found = model.evaluate(split, robust=False) if split else None
    target = output_path or model.run.get_path("report.html")
    write_atomically(target, render_report_page(subject, model, found))
    return target


def render_report_page(subject: ExplainedModel, model: TrainedTransformer, evaluation: Evaluation | None) -> str:
    name = f"{model.run.recipe.name}: {model.run.path.name}"
    about = f"<details><summary>Recipe</summary><pre>{escape(format_recipe_yaml(model.run.recipe))}</pre></details>"
    good = (
        f'<div class="wide">{format_evaluation_html(evaluation, errors=False)}</div>'
        if evaluation
        else _render_saved_evaluation(model)
    )
    sections = [
        ("Model", model._repr_html_() + about),
        ("Training curves", _render_png_file(model.run.get_path("curves.png"))),
        (
            "Attention maps",
            _render_attention_viewer(
                subject,
                *(choose_evaluated_examples(model, evaluation) if evaluation else choose_training_examples(model)),
            ),
        ),
        ("Evaluation", good),
        ("Worst errors", _render_worst_errors(subject, evaluation) if evaluation else ""),
        ("Heads, blocks and features", _render_probe_figures(subject)),
    ]
    body = "".join(f"<section><h2>{escape(title)}</h2>{content}</section>" for title, content in sections if content)
    what = f"{format_split_name(evaluation.eval_data.split)} images" if evaluation else "training images"
    lines = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(name)} · Vitascope</title><style>{(PAGE_FOLDER / 'page.css').read_text(encoding='utf-8')}</style>",
        f'<script type="importmap">{_build_import_map()}</script></head><body>',
        f"<h1>{escape(name)}</h1><p class='soft'>Written by vitascope report {vitascope.__version__}. The images are "
        f"the run's {escape(what)}. This page is self-contained and makes no network requests.</p>",
        body,
        "<script type='module'>import 'page/main.js';</script></body></html>",
    ]
    return "\n".join(lines)


def choose_evaluated_examples(model: TrainedTransformer, evaluation: Evaluation) -> tuple[UInt8Images, list[str]]:
    """Return the worst errors, then the first correct images, and the list entry of each."""
    images = evaluation.eval_data.samples
    wrong = [
        (item.index, f"true: {item.label}, predicted: {item.said}")
        for item in evaluation.worst_errors[: NUM_EXAMPLES // 2]
    ]
    first = min(8 * NUM_EXAMPLES, len(images))
    said = model.predict(images.images[:first])
    right = [
        (place, f"{item.label}, correct")
        for place, (item, label) in enumerate(zip(said, images.labels[:first].tolist(), strict=True))
        if item.label == evaluation.classes[label]
    ]
    chosen = [*wrong, *right[: NUM_EXAMPLES - len(wrong)]]
    return images.images[[place for place, _ in chosen]], [words for _, words in chosen]


def choose_training_examples(model: TrainedTransformer) -> tuple[UInt8Images, list[str]]:
    split = load_run_split(model.run, model.info, "train")
    if split is None:
        raise UserError("The run has no training images to show.")
    images, labels = split.images[:NUM_EXAMPLES], split.labels[:NUM_EXAMPLES].tolist()
    said = [item.label for item in model.predict(images)]
    words = [f"true: {model.classes[label]}, predicted: {word}" for label, word in zip(labels, said, strict=True)]
    return images, words


def _render_attention_viewer(subject: ExplainedModel, images: UInt8Images, captions: list[str]) -> str:
    model = subject.model
    layout = get_token_layout(model)
    blocks = [
        encode_arrays_base64(compute_page_arrays(model, subject.preprocessing(image[None]), image[None]))
        for image in images
    ]
    manifest: dict[str, Any] = {
        "layout": {
            "prefix": layout.num_prefix_tokens,
            "rows": layout.rows,
            "columns": layout.columns,
            "reads_class": layout.reads_class_token,
            "prefix_name": layout.prefix_name,
        },
        "examples": captions,
        "table": (np.array(colormaps[SEQUENTIAL].colors) * 255).round().astype(int).flatten().tolist(),  # pyright: ignore
    }
    data = "".join(f'<script type="text/plain" class="example">{block}</script>' for block in blocks)
    told = json.dumps(manifest).replace("</", "<\\/")
    frame = (PAGE_FOLDER / "look.html").read_text(encoding="utf-8")
    ratio = images.shape[3] / images.shape[2]
    style = f"<style>.stage{{--ratio:{ratio:g}}}</style>"
    return f'{frame}{style}<script type="application/json" id="manifest">{told}</script>{data}'


def _render_worst_errors(subject: ExplainedModel, evaluation: Evaluation) -> str:
    """Show each error beside the relevance (Chefer et al. 2021) for the predicted class."""
    cards = []
    for item in evaluation.worst_errors[:ERRORS]:
        stored = evaluation.eval_data.samples.images[item.index : item.index + 1]
        image = subject.preprocessing(stored)
        heat = METHODS["relevance"](build_attribution_inputs(subject.model, image))[0].numpy()
        shown = stored[0].permute(1, 2, 0).numpy()
        words = f"true: {item.label} ({item.probability_of_label:.1%}), predicted: {item.said} ({item.probability:.0%})"
        pair = f"{encode_image_as_html(shown, 96)} {encode_image_as_html(_overlay_heatmap(shown, heat), 96)}"
        cards.append(f"<figure>{pair}<figcaption>{escape(words)}</figcaption></figure>")
    if not cards:
        return "<p>There are no errors on these images.</p>"
    shown = count_errors(evaluation, len(cards)).capitalize()
    text = (
        f"<p>{shown}. Left: the image. Right: the relevance of each patch for the wrong prediction; yellow is the "
        "maximum. Some of these images may be mislabelled in the data set.</p>"
    )
    return f'{text}<div class="pairs">{"".join(cards)}</div>'


def _overlay_heatmap(image: np.ndarray, heatmap: np.ndarray) -> np.ndarray:
    """Return the image overlaid with the map's colours, one colour per patch."""
    rows, columns = image.shape[0] // heatmap.shape[0], image.shape[1] // heatmap.shape[1]
    level = np.clip(heatmap / max(float(heatmap.max()), 1e-12), 0, 1)
    wide = np.kron(level, np.ones((rows, columns)))
    colours = colormaps[SEQUENTIAL](wide)[..., :3] * 255
    grey = np.broadcast_to(image.mean(-1, keepdims=True), (*image.shape[:2], 3))
    return (0.6 * colours + 0.4 * grey).round().astype(np.uint8)


def _render_saved_evaluation(model: TrainedTransformer) -> str:
    """Return the figures of the newest `vitascope evaluate`, if there is one."""
    told = sorted(model.run.get_path("evaluation").glob("*/report.json"), key=lambda path: path.stat().st_mtime)
    if not told:
        return "<p>The run has no validation images (data.validation=0). Run vitascope evaluate first.</p>"
    said = json.loads(told[-1].read_text(encoding="utf-8"))
    views = f", {said['views']} views" if said["views"] > 1 else ""
    views += "" if said.get("weights", "last") == "last" else f", weights: {escape(said['weights'])}"
    images = f"{said['images']:,} {escape(format_split_name(said['split']))} images{views}"
    text = f"<p>Accuracy {said['accuracy']:.2%} on {images}, from vitascope evaluate.</p>"
    return text + "".join(_render_png_file(path) for path in sorted(told[-1].parent.glob("*.png")))


def _render_probe_figures(subject: ExplainedModel) -> str:
    own = load_run_images(subject)
    if own is None:
        return ""
    with TemporaryDirectory() as folder:
        files = write_probes(subject, *own, Path(folder))
        return "".join(_render_png_file(path) for path in files if path.suffix == ".png")


def _render_png_file(path: Path) -> str:
    if not path.is_file():
        return ""
    data = b64encode(path.read_bytes()).decode()
    return f'<figure><img alt="{escape(path.stem)}" src="data:image/png;base64,{data}"></figure>'


def _build_import_map() -> str:
    """Return every page/*.js as a data: URL, so that the page needs no server. Imports use from './name.js'."""
    found = {}
    for path in sorted(PAGE_FOLDER.glob("*.js")):
        source = re.sub(r"from '\./([\w-]+\.js)'", r"from 'page/\1'", path.read_text(encoding="utf-8"))
        found[f"page/{path.name}"] = f"data:text/javascript;base64,{b64encode(source.encode()).decode()}"
    return json.dumps({"imports": found})


def compute_page_arrays(model: nn.Module, image: Images, stored_image: UInt8Images) -> dict[str, NDArray]:
    """Return the arrays of one image: `image` is prepared for the model, `stored` holds its bytes."""
    asked = build_attribution_inputs(model, image)
    whole, whole_scale = quantise_rows(torch.cat(asked.maps_and_gradients[0]))  # block × head × query × key
    counts, counts_scale = quantise_rows(asked.relevance[0])  # query × key, for the predicted class
    with torch.no_grad():
        logits = compute_logits(model, image)
    return {
        "logits": logits[0].float().cpu().numpy(),
        "maps_scale": whole_scale,
        "relevance_scale": counts_scale,
        "image": np.ascontiguousarray(stored_image[0].permute(1, 2, 0).cpu().numpy()),
        "maps": whole,
        "relevance": counts,
    }


def quantise_rows(values: Tensor) -> tuple[NDArray, NDArray]:
    """Quantise rows of non-negative numbers to bytes; return them and each row's scale."""
    rows = values.float().cpu().numpy()
    scale = np.maximum(rows.max(-1), 1e-12) / 255
    return np.rint(rows / scale[..., None]).astype(np.uint8), scale.astype(np.float32)


def encode_arrays_base64(arrays: dict[str, NDArray]) -> str:
    """Return the arrays as gzipped safetensors in base64, for an HTML page."""
    return b64encode(gzip.compress(save(arrays), mtime=0)).decode()
