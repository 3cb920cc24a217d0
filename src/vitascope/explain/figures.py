"""Write the figures and numbers of `vitascope explain` for each image."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from vitascope.draw.explanation import draw_attention_heads, draw_deletion_and_insertion, draw_explanations
from vitascope.draw.style import save_figure
from vitascope.errors import UserError, format_count
from vitascope.evaluation.prediction import LoadedImages
from vitascope.explain import model_statistics as probes
from vitascope.explain.attribution import (
    CLASS_INDEPENDENT,
    METHODS,
    AttributionInputs,
    build_attribution_inputs,
    predict_probabilities,
)
from vitascope.explain.faithfulness import (
    Faithfulness,
    attribute_at_random,
    compute_deletion_and_insertion,
    summarise_faithfulness,
)
from vitascope.explain.subject import ExplainedModel, TokenLayout
from vitascope.run.files import make_folder

TITLES = {  # of panels: the method's name and a reminder of what it shows
    "attention": "attention\n(last block)",
    "rollout": "rollout\n(all blocks, mean over heads)",
    "rollout-max": "rollout-max\n(largest 10 % of each attention row)",
    "gradient": "gradient\n(× attention, last block)",
    "relevance": "relevance\n(gradient × attention, all blocks)",
    "integrated-gradients": "integrated-gradients\n(of the logit)",
    "occlusion": "occlusion\n(drop in probability)",
}


@dataclass(frozen=True)
class ExplainRequest:
    """What to explain: methods; blocks and heads (None: all) and the query patch's row and column, counted from 1; a
    class."""

    methods: list[str] = field(default_factory=lambda: list(METHODS))
    blocks: list[int] | None = None
    heads: list[int] | None = None
    query_patch: tuple[int, int] | None = None
    target: int | None = None


@dataclass
class ExplainReport:
    """The files that were written, and their numbers."""

    files: list[Path] = field(default_factory=list)
    image_results: list[dict[str, Any]] = field(default_factory=list)
    faithfulness: list[Faithfulness] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "images": self.image_results,
            "evidence": [asdict(row) for row in self.faithfulness],
            "files": [str(path) for path in self.files],
        }


def write_explanations(
    subject: ExplainedModel, loaded_images: LoadedImages, request: ExplainRequest, output_folder: Path
) -> ExplainReport:
    """Write explanations and attention maps of each image, and the faithfulness of each method over all images."""
    about = build_attribution_inputs(subject.model, subject.preprocessing(loaded_images.images), request.target)
    images, targets, layout, maps = about.images, about.targets, about.layout, about.maps
    query = None if request.query_patch is None else _find_patch(request.query_patch, layout)
    blocks, heads = (
        select_blocks_or_heads(request.blocks, len(maps), "block"),
        select_blocks_or_heads(request.heads, maps[0].shape[1], "head"),
    )
    with torch.no_grad():
        chances = predict_probabilities(subject.model, images)
    heats = {name: METHODS[name](about).cpu() for name in request.methods}
    make_folder(output_folder)
    written = ExplainReport()
    names = make_unique_file_stems(loaded_images)
    for number, (name, shown) in enumerate(zip(names, subject.denormalize_images(images), strict=True)):
        mine = {method: heat[number].numpy() for method, heat in heats.items()}
        target = int(targets[number])
        said, share = subject.classes[int(chances[number].argmax())], float(chances[number].max())
        text = _format_explanation_caption(subject, target, float(chances[number, target]), mine)
        first = f"{name}\nprediction: {said} ({share:.1%})"
        titled = {TITLES[method]: heat for method, heat in mine.items()}
        written.files += save_png_and_svg(
            draw_explanations(shown, titled, first, text), output_folder / f"explanations-{name}"
        )
        looked = torch.stack([maps[block - 1][number, [head - 1 for head in heads]] for block in blocks])
        looked = extract_query_attention(looked, layout, query)
        labels = [f"block {block}" for block in blocks], [f"head {head}" for head in heads]
        picture = draw_attention_heads(shown, looked.numpy(), labels, query, first, _describe_attention(layout, query))
        written.files += save_png_and_svg(picture, output_folder / f"heads-{name}")
        written.image_results.append(_build_image_result(name, said, share, subject.classes[target], heats, number))
    written.files += _write_logit_lens_figures(subject, about, names, output_folder)
    written.faithfulness = _write_faithfulness_figure(about, heats, output_folder, written.files)
    return written


def select_blocks_or_heads(requested: list[int] | None, count: int, item_name: str) -> list[int]:
    """Return the chosen blocks or heads, counted from 1; None is all."""
    for number in requested or []:
        if not 1 <= number <= count:
            raise UserError(f"There is no {item_name} {number}: the model has {item_name}s 1 to {count}.")
    return requested or list(range(1, count + 1))


def _find_patch(query: tuple[int, int], layout: TokenLayout) -> tuple[int, int]:
    """Return the row and column, counted from 0, of a patch that is counted from 1."""
    if not (1 <= query[0] <= layout.rows and 1 <= query[1] <= layout.columns):
        raise UserError(
            f"There is no patch in row {query[0]}, column {query[1]}: the grid has rows 1 to {layout.rows} and columns "
            f"1 to {layout.columns}."
        )
    return query[0] - 1, query[1] - 1


def extract_query_attention(maps: Tensor, layout: TokenLayout, query_patch: tuple[int, int] | None) -> Tensor:
    """Return the attention of the query patch, or of the classifier's token, as (block, head, row, column)."""
    row = (
        layout.select_classifier_row(maps)
        if query_patch is None
        else maps[..., layout.get_token_index(*query_patch), :]
    )
    return row[..., layout.num_prefix_tokens :].unflatten(-1, (layout.rows, layout.columns))


def make_unique_file_stems(loaded_images: LoadedImages) -> list[str]:
    """Return the file names without ending, numbered if two are equal."""
    names: list[str] = []
    for number in range(len(loaded_images.images)):
        name = Path(loaded_images.files[number]).stem if loaded_images.files else str(number)
        names.append(name if name not in names else f"{name}-{number}")
    return names


def save_png_and_svg(figure: Figure, path_without_suffix: Path) -> list[Path]:
    """Save the figure as PNG (for the screen) and SVG (for papers)."""
    return [
        save_figure(figure, path_without_suffix.with_name(f"{path_without_suffix.name}.{ending}"))
        for ending in ("png", "svg")
    ]


@torch.no_grad()
def _write_logit_lens_figures(
    subject: ExplainedModel, inputs: AttributionInputs, file_stems: list[str], output_folder: Path
) -> list[Path]:
    """Draw the class probability of every patch after every block (logit lens)."""
    states = probes.record_hidden_states(inputs.model, inputs.images)
    chances = [probes.logit_lens_per_token(inputs.model, state).softmax(-1) for state in states]
    files = []
    for number, (name, shown) in enumerate(zip(file_stems, subject.denormalize_images(inputs.images), strict=True)):
        target = int(inputs.targets[number])
        one = slice(number, number + 1)
        grids = {
            f"after block {block}" if block else "input": inputs.layout.reshape_to_grid(chance[one, :, target])[
                0
            ].numpy()
            for block, chance in enumerate(chances)
        }
        text = (
            f"Logit lens: the probability of '{subject.classes[target]}' if the classifier reads only this "
            "patch's token after each block. Each panel has its own scale. Early blocks were not trained to predict."
        )
        files += save_png_and_svg(
            draw_explanations(shown, grids, name, text, num_columns=5), output_folder / f"lens-{name}"
        )
    return files


def _write_faithfulness_figure(
    inputs: AttributionInputs, heatmaps: dict[str, Tensor], output_folder: Path, written_files: list[Path]
) -> list[Faithfulness]:
    curves = {
        name: compute_deletion_and_insertion(inputs, heat)
        for name, heat in {**heatmaps, "random": attribute_at_random(inputs)}.items()
    }
    text = (
        f"Mean over {format_count(len(inputs.images), 'image')}. Left: patches are made grey, most important first. "
        "Right: patches of a blurred image are restored in the same order. For a faithful method, both "
        "curves change faster than for a random order."
    )
    means = [{name: pair[way].mean(0).numpy() for name, pair in curves.items()} for way in (0, 1)]
    written_files += save_png_and_svg(
        draw_deletion_and_insertion(means[0], means[1], list(METHODS), text), output_folder / "evidence"
    )
    return summarise_faithfulness(curves)


def _format_explanation_caption(
    subject: ExplainedModel, target: int, probability: float, heatmaps: dict[str, NDArray]
) -> str:
    text = f"Importance of each patch for the class '{subject.classes[target]}' (probability {probability:.1%}). "
    text += "Each method has its own scale."
    for_all = [method for method in heatmaps if method in CLASS_INDEPENDENT]
    if for_all:
        text += f" Not specific to the class: {', '.join(for_all)}."
    signed = [method for method, heat in heatmaps.items() if heat.min() < 0]
    if signed:
        text += f" In {' and '.join(signed)}, red patches increase the score of the class, blue patches decrease it."
    if len(signed) < len(heatmaps):
        text += " In the others, yellow is most important." if signed else " Yellow is most important."
    return text


def _describe_attention(layout: TokenLayout, query: tuple[int, int] | None) -> str:
    """Describe the attention maps; `query` is counted from 0."""
    if query is not None:
        what = f"Attention from the patch in row {query[0] + 1}, column {query[1] + 1} (framed) to each patch"
    elif layout.reads_class_token:
        what = "Attention from the class token to each patch"
    else:
        what = "Attention each patch receives, averaged over all query patches"
    rest = f" Attention to the {layout.prefix_name} is not shown." if layout.num_prefix_tokens else ""
    return (
        f"{what}, by block and head. Each block has its own scale, from 0 to the number at the end of its row. "
        f"Uniform attention would be {1 / (layout.num_prefix_tokens + layout.num_patches):.3f}.{rest}"
    )


def _build_image_result(
    image_name: str,
    predicted_class: str,
    probability: float,
    target_class: str,
    heatmaps: dict[str, Tensor],
    image_index: int,
) -> dict[str, Any]:
    found = {
        method: [[round(v, 6) for v in row] for row in heat[image_index].tolist()] for method, heat in heatmaps.items()
    }
    return {
        "image": image_name,
        "answer": predicted_class,
        "probability": probability,
        "explained": target_class,
        "heat": found,
    }
