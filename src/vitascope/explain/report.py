"""Write report.html about a run: one self-contained file without network access."""

import json
import re
from base64 import b64encode
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from matplotlib import colormaps

import vitascope
from vitascope.data.source import UInt8Images
from vitascope.draw.html import picture
from vitascope.draw.palette import SEQUENTIAL
from vitascope.errors import UserError
from vitascope.evaluation.choosing import own_images
from vitascope.evaluation.figures import as_html, count_errors
from vitascope.evaluation.report import Evaluation, split_name
from vitascope.evaluation.trained import TrainedTransformer
from vitascope.explain.answers import answer, packed
from vitascope.explain.attribution import METHODS, question
from vitascope.explain.layout import layout_of
from vitascope.explain.probing import images_of, write_probes
from vitascope.explain.subject import Subject, open_subject
from vitascope.recipe.writing import recipe_yaml
from vitascope.run.files import write_whole

PAGE = Path(__file__).parent / "page"
EXAMPLES = 8  # up to half of them errors
ERRORS = 12  # shown with their relevance
GUARD = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:"


def write_report(run: Path, split: str | None = None, out: Path | None = None) -> Path:
    """Write the report on the validation images; without them, no evaluation. Test images only with split="test"."""
    subject = open_subject(str(run))
    model = subject.run
    if model is None:
        raise UserError(f"{run} is not a run. Reports can be written only for runs.")
    if split is None and model.run.recipe.data.validation > 0:
        split = "val"
    found = model.evaluate(split, robust=False) if split else None
    target = out or model.run.file("report.html")
    write_whole(target, page(subject, model, found))
    return target


def page(subject: Subject, model: TrainedTransformer, found: Evaluation | None) -> str:
    name = f"{model.run.recipe.name}: {model.run.path.name}"
    about = f"<details><summary>Recipe</summary><pre>{escape(recipe_yaml(model.run.recipe))}</pre></details>"
    good = f'<div class="wide">{as_html(found, errors=False)}</div>' if found else _earlier(model)
    sections = [
        ("Model", model._repr_html_() + about),
        ("Training curves", _file_picture(model.run.file("curves.png"))),
        ("Attention maps", _look(subject, *(from_evaluation(model, found) if found else from_training(model)))),
        ("Evaluation", good),
        ("Worst errors", _mistakes(subject, found) if found else ""),
        ("Heads, blocks and features", _probes(subject)),
    ]
    body = "".join(f"<section><h2>{escape(title)}</h2>{content}</section>" for title, content in sections if content)
    what = f"{split_name(found.choice.split)} images" if found else "training images"
    lines = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{GUARD}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(name)} · Vitascope</title><style>{(PAGE / 'page.css').read_text(encoding='utf-8')}</style>",
        f'<script type="importmap">{_modules()}</script></head><body>',
        f"<h1>{escape(name)}</h1><p class='soft'>Written by vitascope report {vitascope.__version__}. The images are "
        f"the run's {escape(what)}. This page is self-contained and makes no network requests.</p>",
        body,
        "<script type='module'>import 'page/main.js';</script></body></html>",
    ]
    return "\n".join(lines)


def from_evaluation(model: TrainedTransformer, found: Evaluation) -> tuple[UInt8Images, list[str]]:
    """Return the worst errors, then the first correct images, and the list entry of each."""
    images = found.choice.images
    wrong = [(item.index, f"true: {item.label}, predicted: {item.said}") for item in found.worst[: EXAMPLES // 2]]
    first = min(8 * EXAMPLES, len(images))
    said = model.predict(images.images[:first])
    right = [
        (place, f"{item.label}, correct")
        for place, (item, label) in enumerate(zip(said, images.labels[:first].tolist(), strict=True))
        if item.label == found.classes[label]
    ]
    chosen = [*wrong, *right[: EXAMPLES - len(wrong)]]
    return images.images[[place for place, _ in chosen]], [words for _, words in chosen]


def from_training(model: TrainedTransformer) -> tuple[UInt8Images, list[str]]:
    split = own_images(model.run, model.facts, "train")
    if split is None:
        raise UserError("The run has no training images to show.")
    images, labels = split.images[:EXAMPLES], split.labels[:EXAMPLES].tolist()
    said = [item.label for item in model.predict(images)]
    words = [f"true: {model.classes[label]}, predicted: {word}" for label, word in zip(labels, said, strict=True)]
    return images, words


def _look(subject: Subject, images: UInt8Images, words: list[str]) -> str:
    model = subject.model
    layout = layout_of(model)
    blocks = [packed(answer(model, subject.preparation(image[None]), image[None])) for image in images]
    manifest: dict[str, Any] = {
        "layout": {
            "prefix": layout.prefix,
            "rows": layout.rows,
            "columns": layout.columns,
            "reads_class": layout.reads_class,
            "prefix_name": layout.prefix_name,
        },
        "examples": words,
        "table": (np.array(colormaps[SEQUENTIAL].colors) * 255).round().astype(int).flatten().tolist(),  # pyright: ignore
    }
    data = "".join(f'<script type="text/plain" class="example">{block}</script>' for block in blocks)
    told = json.dumps(manifest).replace("</", "<\\/")
    frame = (PAGE / "look.html").read_text(encoding="utf-8")
    ratio = images.shape[3] / images.shape[2]
    style = f"<style>.stage{{--ratio:{ratio:g}}}</style>"
    return f'{frame}{style}<script type="application/json" id="manifest">{told}</script>{data}'


def _mistakes(subject: Subject, found: Evaluation) -> str:
    """Show each error beside the relevance (Chefer et al. 2021) for the predicted class."""
    cards = []
    for item in found.worst[:ERRORS]:
        stored = found.choice.images.images[item.index : item.index + 1]
        image = subject.preparation(stored)
        heat = METHODS["relevance"](question(subject.model, image))[0].numpy()
        shown = stored[0].permute(1, 2, 0).numpy()
        words = f"true: {item.label} ({item.probability_of_label:.1%}), predicted: {item.said} ({item.probability:.0%})"
        pair = f"{picture(shown, 96)} {picture(_overlaid(shown, heat), 96)}"
        cards.append(f"<figure>{pair}<figcaption>{escape(words)}</figcaption></figure>")
    if not cards:
        return "<p>There are no errors on these images.</p>"
    shown = count_errors(found, len(cards)).capitalize()
    text = (
        f"<p>{shown}. Left: the image. Right: the relevance of each patch for the wrong prediction; yellow is the "
        "maximum. Some of these images may be mislabelled in the data set.</p>"
    )
    return f'{text}<div class="pairs">{"".join(cards)}</div>'


def _overlaid(image: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """Return the image overlaid with the map's colours, one colour per patch."""
    rows, columns = image.shape[0] // heat.shape[0], image.shape[1] // heat.shape[1]
    level = np.clip(heat / max(float(heat.max()), 1e-12), 0, 1)
    wide = np.kron(level, np.ones((rows, columns)))
    colours = colormaps[SEQUENTIAL](wide)[..., :3] * 255
    grey = np.broadcast_to(image.mean(-1, keepdims=True), (*image.shape[:2], 3))
    return (0.6 * colours + 0.4 * grey).round().astype(np.uint8)


def _earlier(model: TrainedTransformer) -> str:
    """Return the figures of the newest `vitascope evaluate`, if there is one."""
    told = sorted(model.run.file("evaluation").glob("*/report.json"), key=lambda path: path.stat().st_mtime)
    if not told:
        return "<p>The run has no validation images (data.validation=0). Run vitascope evaluate first.</p>"
    said = json.loads(told[-1].read_text(encoding="utf-8"))
    views = f", {said['views']} views" if said["views"] > 1 else ""
    views += "" if said.get("weights", "last") == "last" else f", weights: {escape(said['weights'])}"
    images = f"{said['images']:,} {escape(split_name(said['split']))} images{views}"
    text = f"<p>Accuracy {said['accuracy']:.2%} on {images}, from vitascope evaluate.</p>"
    return text + "".join(_file_picture(path) for path in sorted(told[-1].parent.glob("*.png")))


def _probes(subject: Subject) -> str:
    own = images_of(subject)
    if own is None:
        return ""
    with TemporaryDirectory() as folder:
        files = write_probes(subject, *own, Path(folder))
        return "".join(_file_picture(path) for path in files if path.suffix == ".png")


def _file_picture(path: Path) -> str:
    if not path.is_file():
        return ""
    data = b64encode(path.read_bytes()).decode()
    return f'<figure><img alt="{escape(path.stem)}" src="data:image/png;base64,{data}"></figure>'


def _modules() -> str:
    """Return every page/*.js as a data: URL, so that the page needs no server. Imports use from './name.js'."""
    found = {}
    for path in sorted(PAGE.glob("*.js")):
        source = re.sub(r"from '\./([\w-]+\.js)'", r"from 'page/\1'", path.read_text(encoding="utf-8"))
        found[f"page/{path.name}"] = f"data:text/javascript;base64,{b64encode(source.encode()).decode()}"
    return json.dumps({"imports": found})
