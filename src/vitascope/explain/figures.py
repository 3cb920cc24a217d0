"""Write the figures and numbers of `vitascope explain` for each image."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from vitascope.draw.evidence import draw_evidence
from vitascope.draw.explanation import draw_explanations
from vitascope.draw.heads import draw_heads
from vitascope.draw.look import save
from vitascope.errors import UserError, format_count
from vitascope.evaluation.reading import Pictures
from vitascope.explain import probes
from vitascope.explain.attribution import CLASS_INDEPENDENT, METHODS, Question, probabilities, question
from vitascope.explain.faithfulness import Faithfulness, at_random, curves_of, summarise
from vitascope.explain.layout import Layout
from vitascope.explain.subject import Subject
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
class Asked:
    """What to explain: methods; blocks and heads (None: all) and the query patch's row and column, counted from 1; a
    class."""

    methods: list[str] = field(default_factory=lambda: list(METHODS))
    blocks: list[int] | None = None
    heads: list[int] | None = None
    query: tuple[int, int] | None = None
    target: int | None = None


@dataclass
class Written:
    """The files that were written, and their numbers."""

    files: list[Path] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)
    evidence: list[Faithfulness] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "images": self.images,
            "evidence": [asdict(row) for row in self.evidence],
            "files": [str(path) for path in self.files],
        }


def write_explanations(subject: Subject, pictures: Pictures, asked: Asked, out: Path) -> Written:
    """Write explanations and attention maps of each image, and the faithfulness of each method over all images."""
    about = question(subject.model, subject.preparation(pictures.images), asked.target)
    images, targets, layout, maps = about.images, about.targets, about.layout, about.maps
    query = None if asked.query is None else _find_patch(asked.query, layout)
    blocks, heads = chosen(asked.blocks, len(maps), "block"), chosen(asked.heads, maps[0].shape[1], "head")
    with torch.no_grad():
        chances = probabilities(subject.model, images)
    heats = {name: METHODS[name](about).cpu() for name in asked.methods}
    make_folder(out)
    written = Written()
    names = file_names(pictures)
    for number, (name, shown) in enumerate(zip(names, subject.pictures(images), strict=True)):
        mine = {method: heat[number].numpy() for method, heat in heats.items()}
        target = int(targets[number])
        said, share = subject.classes[int(chances[number].argmax())], float(chances[number].max())
        text = _explained(subject, target, float(chances[number, target]), mine)
        first = f"{name}\nprediction: {said} ({share:.1%})"
        titled = {TITLES[method]: heat for method, heat in mine.items()}
        written.files += save_both(draw_explanations(shown, titled, first, text), out / f"explanations-{name}")
        looked = torch.stack([maps[block - 1][number, [head - 1 for head in heads]] for block in blocks])
        looked = from_query(looked, layout, query)
        labels = [f"block {block}" for block in blocks], [f"head {head}" for head in heads]
        picture = draw_heads(shown, looked.numpy(), labels, query, first, _describe_attention(layout, query))
        written.files += save_both(picture, out / f"heads-{name}")
        written.images.append(_numbers(name, said, share, subject.classes[target], heats, number))
    written.files += _write_lens(subject, about, names, out)
    written.evidence = _write_evidence(about, heats, out, written.files)
    return written


def chosen(asked: list[int] | None, count: int, what: str) -> list[int]:
    """Return the chosen blocks or heads, counted from 1; None is all."""
    for number in asked or []:
        if not 1 <= number <= count:
            raise UserError(f"There is no {what} {number}: the model has {what}s 1 to {count}.")
    return asked or list(range(1, count + 1))


def _find_patch(query: tuple[int, int], layout: Layout) -> tuple[int, int]:
    """Return the row and column, counted from 0, of a patch that is counted from 1."""
    if not (1 <= query[0] <= layout.rows and 1 <= query[1] <= layout.columns):
        raise UserError(
            f"There is no patch in row {query[0]}, column {query[1]}: the grid has rows 1 to {layout.rows} and columns "
            f"1 to {layout.columns}."
        )
    return query[0] - 1, query[1] - 1


def from_query(maps: Tensor, layout: Layout, query: tuple[int, int] | None) -> Tensor:
    """Return the attention of the query patch, or of the classifier's token, as (block, head, row, column)."""
    row = layout.answer_row(maps) if query is None else maps[..., layout.token(*query), :]
    return row[..., layout.prefix :].unflatten(-1, (layout.rows, layout.columns))


def file_names(pictures: Pictures) -> list[str]:
    """Return the file names without ending, numbered if two are equal."""
    names: list[str] = []
    for number in range(len(pictures.images)):
        name = Path(pictures.files[number]).stem if pictures.files else str(number)
        names.append(name if name not in names else f"{name}-{number}")
    return names


def save_both(figure: Figure, path: Path) -> list[Path]:
    """Save the figure as PNG (for the screen) and SVG (for papers)."""
    return [save(figure, path.with_name(f"{path.name}.{ending}")) for ending in ("png", "svg")]


@torch.no_grad()
def _write_lens(subject: Subject, asked: Question, names: list[str], out: Path) -> list[Path]:
    """Draw the class probability of every patch after every block (logit lens)."""
    states = probes.states(asked.model, asked.images)
    chances = [probes.lens_of_tokens(asked.model, state).softmax(-1) for state in states]
    files = []
    for number, (name, shown) in enumerate(zip(names, subject.pictures(asked.images), strict=True)):
        target = int(asked.targets[number])
        one = slice(number, number + 1)
        grids = {
            f"after block {block}" if block else "input": asked.layout.grid(chance[one, :, target])[0].numpy()
            for block, chance in enumerate(chances)
        }
        text = (
            f"Logit lens: the probability of '{subject.classes[target]}' if the classifier reads only this "
            "patch's token after each block. Each panel has its own scale. Early blocks were not trained to predict."
        )
        files += save_both(draw_explanations(shown, grids, name, text, columns=5), out / f"lens-{name}")
    return files


def _write_evidence(asked: Question, heats: dict[str, Tensor], out: Path, files: list[Path]) -> list[Faithfulness]:
    curves = {name: curves_of(asked, heat) for name, heat in {**heats, "random": at_random(asked)}.items()}
    text = (
        f"Mean over {format_count(len(asked.images), 'image')}. Left: patches are made grey, most important first. "
        "Right: patches of a blurred image are restored in the same order. For a faithful method, both "
        "curves change faster than for a random order."
    )
    means = [{name: pair[way].mean(0).numpy() for name, pair in curves.items()} for way in (0, 1)]
    files += save_both(draw_evidence(means[0], means[1], list(METHODS), text), out / "evidence")
    return summarise(curves)


def _explained(subject: Subject, target: int, chance: float, heats: dict[str, NDArray]) -> str:
    text = f"Importance of each patch for the class '{subject.classes[target]}' (probability {chance:.1%}). "
    text += "Each method has its own scale."
    for_all = [method for method in heats if method in CLASS_INDEPENDENT]
    if for_all:
        text += f" Not specific to the class: {', '.join(for_all)}."
    signed = [method for method, heat in heats.items() if heat.min() < 0]
    if signed:
        text += f" In {' and '.join(signed)}, red patches increase the score of the class, blue patches decrease it."
    if len(signed) < len(heats):
        text += " In the others, yellow is most important." if signed else " Yellow is most important."
    return text


def _describe_attention(layout: Layout, query: tuple[int, int] | None) -> str:
    """Describe the attention maps; `query` is counted from 0."""
    if query is not None:
        what = f"Attention from the patch in row {query[0] + 1}, column {query[1] + 1} (framed) to each patch"
    elif layout.reads_class:
        what = "Attention from the class token to each patch"
    else:
        what = "Attention each patch receives, averaged over all query patches"
    rest = f" Attention to the {layout.prefix_name} is not shown." if layout.prefix else ""
    return (
        f"{what}, by block and head. Each block has its own scale, from 0 to the number at the end of its row. "
        f"Uniform attention would be {1 / (layout.prefix + layout.patches):.3f}.{rest}"
    )


def _numbers(name: str, said: str, share: float, target: str, heats: dict[str, Tensor], number: int) -> dict[str, Any]:
    found = {method: [[round(v, 6) for v in row] for row in heat[number].tolist()] for method, heat in heats.items()}
    return {"image": name, "answer": said, "probability": share, "explained": target, "heat": found}
