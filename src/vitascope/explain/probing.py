"""Write figures and numbers about a model's heads, blocks, positions and features, over many images."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitascope.data.source import UInt8Images
from vitascope.draw.gallery import draw_gallery
from vitascope.draw.probes import draw_blocks, draw_filters, draw_map, draw_positions
from vitascope.errors import UserError
from vitascope.evaluation.choosing import choose, some_own_images
from vitascope.evaluation.report import split_name
from vitascope.explain import probes
from vitascope.explain.figures import save_both
from vitascope.explain.layout import Layout, layout_of
from vitascope.explain.maps import each_batch
from vitascope.explain.subject import Subject
from vitascope.run.files import make_folder, write_whole
from vitascope.shapes import Images

ENOUGH = 8  # images for statistics
MOST = 512
COLOURED = 6  # images whose features are shown as colours


@dataclass(frozen=True)
class Seen:
    """Averages over images: block × head, state × quantile, state × state, per state; and pooled features."""

    distance: Tensor
    entropy: Tensor
    norms: Tensor
    likeness: Tensor
    lens: Tensor
    features: Tensor


def look(subject: Subject, images: Images) -> Seen:
    model, layout = subject.model, layout_of(subject.model)
    distance, entropy, norms, agreed, features = [], [], [], [], []
    likeness: probes.SimilarityOfBlocks | None = None
    for some in probes.batches(images):
        logits, maps = next(each_batch(model, some, batch=len(some)))
        distance.append(torch.stack([probes.attention_distance(block, layout).mean(0) for block in maps]))
        entropy.append(torch.stack([probes.head_entropy(block).mean(0) for block in maps]))
        states = probes.states(model, some)
        lengths = torch.stack([probes.token_norms(state).flatten() for state in states])
        norms.append(torch.stack([lengths.quantile(0.5, 1), lengths.quantile(0.95, 1), lengths.amax(1)], 1))
        with torch.no_grad():
            early = torch.stack([probes.lens(model, state).argmax(1) == logits.argmax(1) for state in states])
        agreed.append(early.float().mean(1))
        read = [probes.read_features(state, layout) for state in states]
        features.append(read[-1])
        likeness = likeness or probes.SimilarityOfBlocks(len(states))
        likeness.add(read)
    if likeness is None:
        raise UserError("No images were given.")
    means = [torch.stack(parts).mean(0).cpu() for parts in (distance, entropy, norms, agreed)]
    return Seen(means[0], means[1], means[2], likeness.matrix(), means[3], torch.cat(features).cpu())


def write_probes(subject: Subject, images: Images, labels: list[int] | None, what: str, out: Path) -> list[Path]:
    """Write the probes of at least eight prepared images; `what` describes them, e.g. validation."""
    if len(images) < ENOUGH:
        raise UserError(f"Probes are averages and need at least {ENOUGH} images, not {len(images)}.")
    make_folder(out)
    model, layout, images = subject.model, layout_of(subject.model), images[:MOST]
    seen = look(subject, images)
    many = f"{len(seen.features)} {what} images"
    text = (
        f"Averages over {many}. Each dot is one head; block 0 is the input. Attention distance: mean distance from a "
        "patch to the patches it attends to. Attention entropy: low is focused, high is spread out. Tokens "
        "with very large norms often hold information about the whole image. Similarity near 1: the blocks in between "
        "change little. Early predictions: the classifier is applied after each block."
    )
    arrays = (part.numpy() for part in (seen.distance, seen.entropy, seen.norms, seen.likeness, seen.lens))
    files = save_both(draw_blocks(*arrays, tokens=layout.prefix + layout.patches, text=text), out / "probes-blocks")
    filters, shares = probes.patch_filters(model)
    text = "Principal components of the patch embedding's filters, each with its fraction of the variance."
    files += save_both(draw_filters(filters.permute(0, 2, 3, 1).numpy(), shares.numpy(), text), out / "probes-filters")
    files += _positions(subject, layout, out) + _colours(subject, images, layout, out)
    if labels is not None:
        text = f"One point per image ({many}). Nearby points have similar features; larger distances have no meaning."
        known = labels[: len(seen.features)]
        files += save_both(draw_map(flattened(seen.features), known, subject.classes, text), out / "probes-map")
    write_whole(out / "probes.json", json.dumps(_numbers(seen, len(seen.features)), indent=1) + "\n")
    return [*files, out / "probes.json"]


Own = tuple[Images, list[int], str]  # a run's own prepared images, their classes, and their description


def probe(subject: Subject, own: Own | None, given: UInt8Images, out: Path) -> list[Path]:
    """Write probes over the run's own images, or over the given ones if there are enough; otherwise nothing."""
    if own is not None:
        return write_probes(subject, *own, out)
    return write_probes(subject, subject.preparation(given), None, "given", out) if len(given) >= ENOUGH else []


def images_of(subject: Subject, split: str | None = None) -> Own | None:
    """Return the run's own prepared images, their classes and description; None if they are not on this machine.

    By default the validation images, else training images. Test images are used only with split="test"."""
    if subject.run is None:
        if split is not None:
            raise UserError(f"--split {split} needs a run, and {subject.name} is not a run. Omit --split.")
        return None
    run, facts = subject.run.run, subject.run.facts
    if split is not None:
        some, words = choose(run, facts, split, None).images.evenly(MOST), split_name(split)
    else:
        found = some_own_images(run, facts, MOST)
        if found is None:
            return None
        some, words = found
    return subject.preparation(some.images), some.labels.tolist(), words


def flattened(features: Tensor) -> np.ndarray:
    """Project the features to two dimensions with t-SNE."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    known = features.numpy()
    known = PCA(min(50, *known.shape), random_state=0).fit_transform(known)
    return TSNE(perplexity=min(30, (len(known) - 1) // 3), init="pca", random_state=0).fit_transform(known)


def _positions(subject: Subject, layout: Layout, out: Path) -> list[Path]:
    try:
        likeness = probes.position_similarity(subject.model, layout)
    except UserError:
        return []  # rotary only, or none
    text = "Position embeddings: each small grid shows the similarity of one patch's position to all positions."
    return save_both(draw_positions(likeness.numpy(), layout.rows, layout.columns, text), out / "probes-positions")


def _colours(subject: Subject, images: Images, layout: Layout, out: Path) -> list[Path]:
    some = images[:COLOURED]
    states = probes.states(subject.model, some)
    chosen = sorted({0, len(states) // 3, 2 * len(states) // 3, len(states) - 1})
    rows = [subject.pictures(some)]
    rows += [list(probes.colours(states[state], layout).numpy()) for state in chosen]
    names = ["image", *(f"after block {state}" if state else "input" for state in chosen)]
    text = (
        "The first three principal components of the patch features, shown as red, green and blue. Patches with equal "
        "colours have similar features. Colours in different rows cannot be compared."
    )
    return save_both(draw_gallery(rows, names, [""] * len(some), text), out / "probes-colours")


def _numbers(seen: Seen, images: int) -> dict[str, Any]:
    rounded = {
        name: np.round(getattr(seen, name).numpy().astype(float), 5).tolist()
        for name in ("distance", "entropy", "norms", "likeness", "lens")
    }
    return {"images": images, **rounded}
