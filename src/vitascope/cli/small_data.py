"""The pictures behind `vitascope draw shifted` and `vitascope draw fewer`."""

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

WAYS = ("the image", "from above left", "from above right", "from below left", "from below right")
SIDE = 32  # pixels of the picture that is shifted


def draw_shifted(image: Path | None, patch_size: int, out: Path) -> Path:
    """The five images whose patches a model with tokenizer=spt sees side by side."""
    if not 2 <= patch_size <= SIDE // 2:
        raise UserError(f"--patch-size {patch_size}: choose 2 to {SIDE // 2}; the picture is drawn as {SIDE}×{SIDE}.")
    if image is None:
        stored = torch.nn.functional.interpolate(digits().load("train").images[:1].float(), size=(SIDE, SIDE))
    else:
        stored = as_stored(image, (3, SIDE, SIDE)).images.float()
    seen = shifted(stored / 255, patch_size)[0].unflatten(0, (5, -1))
    text = (
        f"Shifted patch tokens: a patch of {patch_size}×{patch_size} pixels is cut from all five at the same place, so "
        f"its token also sees {patch_size // 2} pixels of its neighbours on each side. Beyond the border: 0."
    )
    return save(draw_tiles([_pixels(part) for part in seen], WAYS, text, columns=5), out)


def draw_fewer(word: str, image: Path, count: int, out: Path) -> Path:
    """The image; every patch in the mean colour of those that became one token with it; those not dropped."""
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
        words.append(_said(model, stored, f"{how}, {left} left"))
    text = (
        f"{count} patches fewer in each of the {model.config.depth} blocks, and what is answered then. Merged: patches "
        "that ended as one token have one colour. Dropped: faint."
    )
    return save(draw_tiles([_pixels(part) for part in parts], words, text, columns=3), out)


def _said(model: TrainedTransformer, stored: Tensor, what: str) -> str:
    found = model.predict(stored)[0]
    return f"{what}\n{found.label}, {found.probability:.0%}"


def _painted(pixels: Tensor, which: Tensor) -> Tensor:
    """Every group of patches in its mean colour; or, where some are dropped, those faint and the others as they are."""
    if (which < 0).any():
        return torch.where(which < 0, 0.88 + 0.12 * pixels, pixels)
    painted = torch.empty_like(pixels)
    for group in which.unique().tolist():
        painted[:, which == group] = pixels[:, which == group].mean(1, keepdim=True)
    return painted


def _pixels(image: Tensor):
    return image.clamp(0, 1).permute(1, 2, 0).numpy()
