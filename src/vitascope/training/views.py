"""Views at test time: which shifted and mirrored copies of an image a model sees, and how their logits are averaged."""

from collections.abc import Callable, Iterator
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitascope.errors import UserError
from vitascope.recipe.schema import Recipe
from vitascope.shapes import Images, Logits


class View(NamedTuple):
    """One copy of the image. Pixel (r, c) of the copy is pixel (r, c) + shift of the image; then it is mirrored."""

    shift: tuple[int, int]  # rows, columns: each −1, 0 or 1
    mirrored: bool  # left to right
    weight: int  # relative to the other views of the same number


CENTRE = (0, 0)
DIAGONALS = ((-1, -1), (1, 1), (-1, 1), (1, -1))


def _add_mirror_views(weights: dict[tuple[int, int], int]) -> tuple[View, ...]:
    """Each shift once as it is and once mirrored, with the same weight."""
    return tuple(View(shift, mirrored, weight) for shift, weight in weights.items() for mirrored in (False, True))


# Six and ten views are those of the CNN speedruns (Jordan 2024, airbench: mirror and translate by one pixel).
VIEWS: dict[int, tuple[View, ...]] = {
    1: (View(CENTRE, mirrored=False, weight=1),),
    2: _add_mirror_views({CENTRE: 1}),
    6: _add_mirror_views({CENTRE: 2, (-1, -1): 1, (1, 1): 1}),
    10: _add_mirror_views(dict.fromkeys((CENTRE, *DIAGONALS), 1)),
}
DESCRIPTIONS = {
    1: "one view of each image",
    2: "the image and its mirror image, averaged",
    6: "the image, two copies shifted by one pixel at half weight and the mirror images of all three, averaged",
    10: "the image, four copies shifted diagonally by one pixel and the mirror images of all five, averaged",
}


def check_views(recipe: Recipe, views: int) -> None:
    """Raise an error for an unknown number of views, and for views that the run was not trained with."""
    if views not in VIEWS:
        raise UserError(
            f"views={views} is not available. Choose 1 (the image), 2 (also its mirror image), 6 or 10 (also shifted "
            "by one pixel)."
        )
    augment = recipe.data.augment
    if not augment.flip and any(view.mirrored for view in VIEWS[views]):
        raise UserError(
            f"views={views} adds the mirror image, but this run was trained with data.augment.flip=0. Use views=1."
        )
    if not augment.shift and any(view.shift != CENTRE for view in VIEWS[views]):
        raise UserError(
            f"views={views} adds shifted images, but this run was trained with data.augment.shift=0. Use views=2."
        )


def average_logits(model: Callable[[Images], Tensor], images: Images, views: int) -> Logits:
    """The weighted mean over all views of prepared images, in float32."""
    chosen = VIEWS[views]
    copies = zip(chosen, make_views(images, chosen), strict=True)
    total = reduce(torch.add, (view.weight * model(copy).float() for view, copy in copies))
    return total / sum(view.weight for view in chosen)


def make_views(images: Images, chosen: tuple[View, ...]) -> Iterator[Images]:
    """The copies of prepared images, one after the other. One mirrored pixel comes in at each edge."""
    height, width = images.shape[2:]
    is_shifted = any(view.shift != CENTRE for view in chosen)
    padded = F.pad(images, (1, 1, 1, 1), mode="reflect") if is_shifted else images
    for (row, column), mirrored, _ in chosen:
        copy = images
        if (row, column) != CENTRE:
            copy = padded[:, :, 1 + row : 1 + row + height, 1 + column : 1 + column + width]
        yield copy.flip(-1) if mirrored else copy.contiguous()
