"""Draw the figures of `vitascope draw shifted` and `vitascope draw fewer`."""

from pathlib import Path

import torch
from torch import Tensor

from vitascope.data.digits import digits
from vitascope.draw.gallery import draw_tiles
from vitascope.draw.look import save
from vitascope.errors import UserError
from vitascope.evaluation.reading import as_stored, check_readable
from vitascope.evaluation.trained import TrainedTransformer, load
from vitascope.model import fewer
from vitascope.model.patches import shifted

WAYS = ("original", "shifted down, right", "shifted down, left", "shifted up, right", "shifted up, left")
SIDE = 32  # side of the drawn image in pixels


def draw_shifted(image: Path | None, patch_size: int, out: Path) -> Path:
    """Draw the five images whose patches tokenizer=spt concatenates."""
    if not 2 <= patch_size <= SIDE // 2:
        raise UserError(f"--patch-size {patch_size}: choose 2 to {SIDE // 2}. The image has {SIDE}×{SIDE} pixels.")
    if image is None:
        stored = torch.nn.functional.interpolate(digits().load("train").images[:1].float(), size=(SIDE, SIDE))
    else:
        stored = as_stored(image, (3, SIDE, SIDE)).images.float()
    seen = shifted(stored / 255, patch_size)[0].unflatten(0, (5, -1))
    text = (
        f"Shifted patch tokenization: each {patch_size}×{patch_size} patch is cut from all five images at the same "
        f"position. Its token also contains {patch_size // 2} pixels beyond each edge of the patch. The padding is 0."
    )
    return save(draw_tiles([_pixels(part) for part in seen], WAYS, text, columns=5), out)


def draw_fewer(word: str, image: Path, count: int, out: Path) -> Path:
    """Draw the image, its merged patches in their mean colour, and the patches that were not dropped."""
    model = load(word)
    model.answer_with(merge_tokens=0, drop_tokens=0)
    check_readable(model.facts.stored)
    stored = as_stored(image, model.facts.stored).images[:1]
    pixels = model.facts.preparation.fit(stored)
    parts, words = [pixels[0]], [_said(model, stored, f"all {model.config.num_patches} patches")]
    for name, how in (("merge_tokens", "merged"), ("drop_tokens", "dropped")):
        model.answer_with(**({"merge_tokens": 0, "drop_tokens": 0} | {name: count}))
        owner = fewer.groups(model, model.facts.preparation(stored))[0].unflatten(0, model.config.grid)
        which = owner.repeat_interleave(model.config.patch_shape[0], 0)
        parts.append(_painted(pixels[0], which.repeat_interleave(model.config.patch_shape[1], 1)))
        left = len(owner.unique()) - int((owner < 0).any())
        words.append(_said(model, stored, f"{how}: {left} left"))
    text = (
        f"Each of the {model.config.depth} blocks removes {count} tokens. Merged: patches that form one token have one "
        "colour. Dropped: removed patches are faint. Below each title: the prediction and its probability."
    )
    return save(draw_tiles([_pixels(part) for part in parts], words, text, columns=3), out)


def _said(model: TrainedTransformer, stored: Tensor, what: str) -> str:
    found = model.predict(stored)[0]
    return f"{what}\n{found.label}, {found.probability:.0%}"


def _painted(pixels: Tensor, which: Tensor) -> Tensor:
    """Paint each merged group in its mean colour; if patches were dropped, fade them instead."""
    if (which < 0).any():
        return torch.where(which < 0, 0.88 + 0.12 * pixels, pixels)
    painted = torch.empty_like(pixels)
    for group in which.unique().tolist():
        painted[:, which == group] = pixels[:, which == group].mean(1, keepdim=True)
    return painted


def _pixels(image: Tensor):
    return image.clamp(0, 1).permute(1, 2, 0).numpy()
