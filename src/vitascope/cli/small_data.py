"""Draw the figures of `vitascope draw shifted` and `vitascope draw fewer`."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitascope.data.digits import digits
from vitascope.draw.gallery import draw_tiles
from vitascope.draw.look import save
from vitascope.draw.patch_marks import draw_grid, hatch_patches, outline_groups, shades_of_groups
from vitascope.errors import UserError, format_count
from vitascope.evaluation.reading import as_stored, check_readable
from vitascope.evaluation.trained import TrainedTransformer, load
from vitascope.model import fewer
from vitascope.model.patches import shifted

WAYS = ("original", "shifted down, right", "shifted down, left", "shifted up, right", "shifted up, left")
TINT = 0.55
SIDE = 32  # side of the drawn image in pixels


def draw_shifted(image: Path | None, patch_size: int, out: Path) -> Path:
    """Draw the five images whose patches tokenizer=spt concatenates."""
    if not 2 <= patch_size <= SIDE // 2 or SIDE % patch_size:
        raise UserError(
            f"--patch-size {patch_size}: choose 2, 4, 8 or 16, which divide the image of {SIDE}×{SIDE} pixels."
        )
    if image is None:
        stored = torch.nn.functional.interpolate(digits().load("train").images[:1].float(), size=(SIDE, SIDE))
    else:
        stored = as_stored(image, (3, SIDE, SIDE)).images.float()
    seen = shifted(stored / 255, patch_size)[0].unflatten(0, (5, -1))
    text = (
        f"Shifted patch tokenization: each patch of {patch_size}×{patch_size} pixels is cut from all five images at "
        f"the same position. Its token also contains {patch_size // 2} pixels beyond each edge of the patch. The "
        f"padding is 0. The image is {'enlarged' if image is None else 'resized'} to {SIDE}×{SIDE} pixels."
    )
    figure = draw_tiles([_pixels(part) for part in seen], WAYS, text, columns=5)
    for panel in figure.axes:
        draw_grid(panel, (SIDE // patch_size, SIDE // patch_size), (patch_size, patch_size))
    return save(figure, out)


def draw_fewer(word: str, image: Path, count: int, out: Path) -> Path:
    """Draw the image, its merged patches as coloured groups, and its dropped patches hatched."""
    model = load(word)
    model.answer_with(merge_tokens=0, drop_tokens=0)
    check_readable(model.facts.stored)
    stored = as_stored(image, model.facts.stored).images[:1]
    pixels, patch = model.facts.preparation.fit(stored)[0], model.config.patch_shape
    parts, words = [_pixels(pixels)], [_said(model, stored, f"all {model.config.num_patches} patches")]
    owners: list[NDArray] = []
    for name, how in (("merge_tokens", "merged"), ("drop_tokens", "dropped")):
        model.answer_with(**({"merge_tokens": 0, "drop_tokens": 0} | {name: count}))
        owners.append(fewer.groups(model, model.facts.preparation(stored))[0].unflatten(0, model.config.grid).numpy())
        left = format_count(len(set(owners[-1][owners[-1] >= 0].tolist())), "token")
        words.append(_said(model, stored, f"{how}: {left} left"))
    merged, dropped = owners
    parts += [_tint_groups(_pixels(pixels), merged, patch), _pixels(pixels)]
    text = (
        f"Each of the {model.config.depth} blocks removes at most {count} tokens. Merged: patches of one colour form "
        "one token; patches without colour were not merged. Dropped: hatched patches were removed. Below each title: "
        "the prediction and its probability."
    )
    figure = draw_tiles(parts, words, text, columns=3)
    outline_groups(figure.axes[1], merged, patch)
    hatch_patches(figure.axes[2], dropped < 0, patch)
    return save(figure, out)


def _said(model: TrainedTransformer, stored: Tensor, what: str) -> str:
    found = model.predict(stored)[0]
    return f"{what}\n{found.label}, {found.probability:.0%}"


def _tint_groups(pixels: NDArray, owner: NDArray, patch: tuple[int, int]) -> NDArray:
    """Tint each group of several patches in its own colour."""
    groups, sizes = np.unique(owner, return_counts=True)
    colours = shades_of_groups(int((sizes > 1).sum()))
    painted = np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels.copy()
    which = owner.repeat(patch[0], 0).repeat(patch[1], 1)
    for group, colour in zip(groups[sizes > 1], colours, strict=True):
        painted[which == group] = (1 - TINT) * painted[which == group] + TINT * colour
    return painted


def _pixels(image: Tensor) -> NDArray:
    return image.clamp(0, 1).permute(1, 2, 0).numpy()
