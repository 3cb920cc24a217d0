"""A model and many images -> what the model is like inside, as pictures and numbers."""

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
    """Averages over many images: block × head, state × quantile, state × state, per state; and pooled features."""

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
        raise UserError("There are no images to look at.")
    means = [torch.stack(parts).mean(0).cpu() for parts in (distance, entropy, norms, agreed)]
    return Seen(means[0], means[1], means[2], likeness.matrix(), means[3], torch.cat(features).cpu())


def write_probes(subject: Subject, images: Images, labels: list[int] | None, what: str, out: Path) -> list[Path]:
    """`images` as the model sees them, at least eight; `what` they are, such as held-back."""
    if len(images) < ENOUGH:
        raise UserError(f"Probes are averages: give at least {ENOUGH} images, not {len(images)}.")
    make_folder(out)
    model, layout, images = subject.model, layout_of(subject.model), images[:MOST]
    seen = look(subject, images)
    many = f"{len(seen.features)} {what} images"
    text = (
        f"Averages over {many}. A dot is a head: how far away a patch looks, and over how many tokens it spreads. Very "
        "long tokens are outliers, often used as notebooks. Blocks that are alike compute little in between. Last: how "
        "often the answer after each block is already the final one."
    )
    arrays = (part.numpy() for part in (seen.distance, seen.entropy, seen.norms, seen.likeness, seen.lens))
    files = save_both(draw_blocks(*arrays, tokens=layout.prefix + layout.patches, text=text), out / "probes-blocks")
    filters, shares = probes.patch_filters(model)
    text = "Principal components of the patch embedding's filters, and the share of the variance each carries."
    files += save_both(draw_filters(filters.permute(0, 2, 3, 1).numpy(), shares.numpy(), text), out / "probes-filters")
    files += _positions(subject, layout, out) + _colours(subject, images, layout, out)
    if labels is not None:
        text = f"{many} by what the classifier sees of them (t-SNE of pooled features). Only nearness means something."
        known = labels[: len(seen.features)]
        files += save_both(draw_map(flattened(seen.features), known, subject.classes, text), out / "probes-map")
    write_whole(out / "probes.json", json.dumps(_numbers(seen, len(seen.features)), indent=1) + "\n")
    return [*files, out / "probes.json"]


Own = tuple[Images, list[int], str]  # a run's own images as the model sees them, their classes, and which they are


def probe(subject: Subject, own: Own | None, given: UInt8Images, out: Path) -> list[Path]:
    """Over the run's own images, or over the given ones if they are enough; else nothing."""
    if own is not None:
        return write_probes(subject, *own, out)
    return write_probes(subject, subject.preparation(given), None, "given", out) if len(given) >= ENOUGH else []


def images_of(subject: Subject, split: str | None = None) -> Own | None:
    """The run's own images as the model sees them, their classes, and which they are; None: there are none here.

    Without a split the held-back ones, else training images; test images only when asked for."""
    if subject.run is None:
        if split is not None:
            raise UserError(f"--split {split} names a part of a run's data; {subject.name} is not a run.")
        return None
    run, facts = subject.run.run, subject.run.facts
    if split is not None:
        some, words = choose(run, facts, split, None).images.evenly(MOST), split
    else:
        found = some_own_images(run, facts, MOST)
        if found is None:
            return None
        some, words = found
    return subject.preparation(some.images), some.labels.tolist(), words


def flattened(features: Tensor) -> np.ndarray:
    """Two numbers per image, so that like images lie near each other."""
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
    text = "Each small grid: how alike the position of the patch at that place is to every patch's."
    return save_both(draw_positions(likeness.numpy(), layout.rows, layout.columns, text), out / "probes-positions")


def _colours(subject: Subject, images: Images, layout: Layout, out: Path) -> list[Path]:
    some = images[:COLOURED]
    states = probes.states(subject.model, some)
    chosen = sorted({0, len(states) // 3, 2 * len(states) // 3, len(states) - 1})
    rows = [subject.pictures(some)]
    rows += [list(probes.colours(states[state], layout).numpy()) for state in chosen]
    names = ["image", *(f"after block {state}" if state else "embedded" for state in chosen)]
    text = (
        "The patches' three largest principal components as red, green and blue, per block: patches of one colour are "
        "alike to the model. Colours of different rows cannot be compared."
    )
    return save_both(draw_gallery(rows, names, [""] * len(some), text), out / "probes-colours")


def _numbers(seen: Seen, images: int) -> dict[str, Any]:
    rounded = {
        name: np.round(getattr(seen, name).numpy().astype(float), 5).tolist()
        for name in ("distance", "entropy", "norms", "likeness", "lens")
    }
    return {"images": images, **rounded}
