"""Draw probes and explanations over the epochs of a run with weight snapshots (train.weight_snapshots)."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from PIL import Image

from vitascope.draw.explanation import draw_explanations
from vitascope.draw.gallery import draw_gallery
from vitascope.draw.look import caption, label, new_figure
from vitascope.draw.palette import COLOURS, SEQUENTIAL
from vitascope.explain.attribution import METHODS, Question, probabilities, targets_for
from vitascope.explain.figures import TITLES, save_both
from vitascope.explain.layout import layout_of
from vitascope.explain.probing import Seen, images_of, look
from vitascope.explain.subject import Subject
from vitascope.model.vit import VisionTransformer
from vitascope.run.files import write_whole
from vitascope.run.weights import KEPT, load_file_into
from vitascope.shapes import Images

ENOUGH = 64  # images for the averages
SHOWN = 3  # images in the strip
SHOWN_METHODS = ("attention", "relevance")
FRAME = 700  # milliseconds


def kept_files(subject: Subject) -> dict[int, Path]:
    """Return the weight file of each epoch with a snapshot."""
    if subject.run is None:
        return {}
    files = sorted(subject.run.run.file(KEPT).glob("epoch-*.safetensors"))
    return {int(path.stem.removeprefix("epoch-")): path for path in files}


def write_over_time(subject: Subject, images: Images, out: Path) -> list[Path]:
    """Write the figures; nothing if the run has fewer than two snapshots. Averages are over the run's own images."""
    files = kept_files(subject)
    if len(files) < 2 or not isinstance(subject.model, VisionTransformer):
        return []
    own = images_of(subject)
    shown, targets = images[:SHOWN], targets_for(subject.model, images[:SHOWN], None)
    seen: dict[int, Seen] = {}
    rows: list[list[np.ndarray]] = [[] for _ in shown]
    frames: list[Image.Image] = []
    for epoch, path in files.items():
        then = replace(subject, model=_at(subject.model, path))
        asked = Question(then.model, shown, targets, layout_of(then.model))
        heats = {name: METHODS[name](asked) for name in SHOWN_METHODS}
        for row, heat in zip(rows, heats["relevance"], strict=True):
            row.append(colormaps[SEQUENTIAL]((heat / heat.max().clamp(min=1e-12)).clamp(min=0).numpy())[..., :3])
        frames.append(_frame(then, shown, targets, heats, epoch))
        if own is not None:
            seen[epoch] = look(then, own[0][:ENOUGH])
    pictures = subject.pictures(shown)
    names = ["image", *(f"epoch {epoch}" for epoch in files)]
    rows_named = [subject.classes[int(target)] for target in targets]
    strip = [[picture, *row] for picture, row in zip(pictures, rows, strict=True)]
    text = "Relevance of each patch for the final prediction (named at the left), by epoch. "
    text += "In each map dark is 0 and yellow is the maximum."
    written = save_both(draw_gallery(strip, rows_named, names, text), out / "over-time-strip")
    if seen:
        written += save_both(_lines(seen, len(own[0][:ENOUGH]) if own else 0), out / "over-time-probes")
    written.append(_animation(frames, out / "over-time.gif"))
    return written


def _at(model: VisionTransformer, path: Path) -> VisionTransformer:
    twin = VisionTransformer(model.config).eval()
    load_file_into(twin, path)
    return twin


def _frame(
    then: Subject, shown: Images, targets: torch.Tensor, heats: dict[str, torch.Tensor], epoch: int
) -> Image.Image:
    """Draw the first image's explanations after this epoch."""
    picture = then.pictures(shown[:1])[0]
    with torch.no_grad():
        chance = float(probabilities(then.model, shown[:1])[0, targets[0]])
    mine = {TITLES[name]: heat[0].numpy() for name, heat in heats.items()}
    said = f"epoch {epoch}\n{then.classes[int(targets[0])]}: {chance:.0%}"
    figure = draw_explanations(
        picture,
        mine,
        said,
        "Attention, and relevance for the class, by epoch. Yellow is most important. The scale changes between epochs.",
        columns=3,
    )
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    return Image.open(file).convert("P", palette=Image.Palette.ADAPTIVE)


def _animation(frames: list[Image.Image], path: Path) -> Path:
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=FRAME, loop=0)
    write_whole(path, file.getvalue())
    return path


def _lines(seen: dict[int, Seen], images: int) -> Figure:
    """Draw one line per block; early blocks are pale."""
    figure, panels = new_figure(3, width=13.0, height=4.0)
    epochs = list(seen)
    depth = len(next(iter(seen.values())).distance)
    for panel, part, title, unit in (
        (panels[0], "distance", "attention distance", "mean distance in patches"),
        (panels[1], "entropy", "attention entropy", "entropy in nats"),
        (panels[2], "lens", "early predictions (logit lens)", "equal to the final prediction, in %"),
    ):
        for block in range(depth):
            values = [
                100 * found.lens[block + 1].item() if part == "lens" else getattr(found, part)[block].mean().item()
                for found in seen.values()
            ]
            shade = 0.25 + 0.75 * (block + 1) / depth
            panel.plot(epochs, values, "o-", color=COLOURS[0], alpha=shade, label=f"block {block + 1}")
        label(panel, title, "epoch", unit)
        panel.set_ylim(0, 1.1 * panel.get_ylim()[1])
        panel.set_xticks(epochs)
    panels[2].legend(fontsize=7, ncols=2)
    caption(figure, f"Means over heads and over {images} of the run's images, one line per block, by epoch.")
    return figure
