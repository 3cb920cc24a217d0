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
from vitascope.errors import UserError
from vitascope.evaluation.reading import Pictures
from vitascope.explain import probes
from vitascope.explain.attribution import METHODS, Question, probabilities, question
from vitascope.explain.faithfulness import Faithfulness, at_random, curves_of, summarise
from vitascope.explain.layout import Layout
from vitascope.explain.subject import Subject
from vitascope.run.files import make_folder

WORDS = {
    "attention": "attention (last block)",
    "rollout": "rollout",
    "rollout-max": "rollout-max (lowest 90 % discarded)",
    "gradient": "gradient × attention (last block)",
    "relevance": "relevance",
    "integrated-gradients": "integrated gradients (of the logit)",
    "occlusion": "occlusion (drop in probability)",
}


@dataclass(frozen=True)
class Asked:
    """What to explain: methods, blocks and heads (counted from 1; None: all), a query patch, a class."""

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
    if asked.query is not None:
        layout.token(*asked.query)
    blocks, heads = chosen(asked.blocks, len(maps), "block"), chosen(asked.heads, maps[0].shape[1], "head")
    with torch.no_grad():
        chances = probabilities(subject.model, images)
    heats = {name: METHODS[name](about).cpu() for name in asked.methods}
    make_folder(out)
    written = Written()
    names = file_names(pictures)
    for number, (name, shown) in enumerate(zip(names, subject.pictures(images), strict=True)):
        mine = {WORDS[method]: heat[number].numpy() for method, heat in heats.items()}
        target = int(targets[number])
        said, share = subject.classes[int(chances[number].argmax())], float(chances[number].max())
        text = _explained(subject, target, float(chances[number, target]), mine)
        first = f"{name}\nprediction: {said} ({share:.1%})"
        written.files += save_both(draw_explanations(shown, mine, first, text), out / f"explanations-{name}")
        looked = torch.stack([maps[block - 1][number, [head - 1 for head in heads]] for block in blocks])
        looked = from_query(looked, layout, asked.query)
        labels = [f"block {block}" for block in blocks], [f"head {head}" for head in heads]
        picture = draw_heads(shown, looked.numpy(), labels, asked.query, first, _looked(layout, asked.query))
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
    many = f"{len(asked.images)} image{'s' if len(asked.images) > 1 else ''}"
    text = (
        f"Mean over {many}. Left: patches are made grey, most important first. Right: patches of a blurred image are "
        "restored in the same order. For a faithful method, both curves change faster than for a random order."
    )
    means = [{name: pair[way].mean(0).numpy() for name, pair in curves.items()} for way in (0, 1)]
    files += save_both(draw_evidence(means[0], means[1], list(METHODS), text), out / "evidence")
    return summarise(curves)


def _explained(subject: Subject, target: int, chance: float, heats: dict[str, NDArray]) -> str:
    text = f"Importance of each patch for the class '{subject.classes[target]}' (probability {chance:.1%}). "
    text += "Each method has its own scale."
    if any(name.startswith(("attention", "rollout")) for name in heats):
        text += " Attention and rollout do not depend on the class."
    if any(heat.min() < 0 for heat in heats.values()):
        text += " Red patches increase the score of the class, blue patches decrease it."
    return text


def _looked(layout: Layout, query: tuple[int, int] | None) -> str:
    if query is not None:
        who = f"the patch in row {query[0]}, column {query[1]} (framed)"
    else:
        who = "the class token" if layout.reads_class else "all patches (mean)"
    rest = " Attention to class and register tokens is not shown." if layout.prefix else ""
    return (
        f"Attention of {who}, by block and head. Each block has its own scale, from 0 to the number at the "
        f"end of its row. Uniform attention would be {1 / (layout.prefix + layout.patches):.2g}.{rest}"
    )


def _numbers(name: str, said: str, share: float, target: str, heats: dict[str, Tensor], number: int) -> dict[str, Any]:
    found = {method: [[round(v, 6) for v in row] for row in heat[number].tolist()] for method, heat in heats.items()}
    return {"image": name, "answer": said, "probability": share, "explained": target, "heat": found}
