"""Test-time views: copies of an image, mirrored or shifted, whose logits are averaged."""

from collections.abc import Callable, Iterator
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitascope.errors import UserError
from vitascope.recipe.schema import Recipe
from vitascope.shapes import Images, Logits

Shift = tuple[int, int]  # rows, columns


class View(NamedTuple):
    """One copy of the image. Pixel (r, c) of the copy is pixel (r, c) + shift of the image; then it is mirrored."""

    shift: Shift  # rows, columns: each −1, 0 or 1
    mirrored: bool  # left to right
    weight: int  # relative to the other views


NO_SHIFT = (0, 0)
DIAGONAL_SHIFTS = ((-1, -1), (1, 1), (-1, 1), (1, -1))


def _make_plain_and_mirror_views(weight_by_shift: dict[Shift, int]) -> tuple[View, ...]:
    """Return each shift once unmirrored and once mirrored, with the same weight."""
    return tuple(
        View(shift, mirrored, weight) for shift, weight in weight_by_shift.items() for mirrored in (False, True)
    )


# Six and ten views are those of the CNN speedruns (Jordan 2024, airbench: mirror and translate by one pixel).
VIEWS: dict[int, tuple[View, ...]] = {
    1: (View(NO_SHIFT, mirrored=False, weight=1),),
    2: _make_plain_and_mirror_views({NO_SHIFT: 1}),
    6: _make_plain_and_mirror_views({NO_SHIFT: 2, (-1, -1): 1, (1, 1): 1}),
    10: _make_plain_and_mirror_views(dict.fromkeys((NO_SHIFT, *DIAGONAL_SHIFTS), 1)),
}
VIEW_DESCRIPTIONS = {
    1: "one view of each image",
    2: "the image and its mirror image, averaged",
    6: "the image, two copies shifted by one pixel at half weight and the mirror images of all three, averaged",
    10: "the image, four copies shifted diagonally by one pixel and the mirror images of all five, averaged",
}


def check_views_match_training(recipe: Recipe, num_views: int, views_format: str = "views={}") -> None:
    """Raise an error for an unknown number of views, and for views that the run was not trained with. `views_format`:
    how the user writes the number, such as "--views {}"."""
    views_text = views_format.format(num_views)
    if num_views not in VIEWS:
        raise UserError(
            f"{views_text} is not available. Choose 1 (the image), 2 (also its mirror image), 6 or 10 (also "
            "shifted by one pixel)."
        )
    augment = recipe.data.augment
    if not augment.flip and any(view.mirrored for view in VIEWS[num_views]):
        raise UserError(
            f"{views_text} adds the mirror image, but this run was trained with data.augment.flip=0. "
            f"Use {views_format.format(1)}."
        )
    if not augment.shift and any(view.shift != NO_SHIFT for view in VIEWS[num_views]):
        raise UserError(
            f"{views_text} adds shifted images, but this run was trained with data.augment.shift=0. "
            f"Use {views_format.format(2)}."
        )


def average_logits_over_views(model: Callable[[Images], Tensor], images: Images, num_views: int) -> Logits:
    """Return the weighted mean of the logits over all views of preprocessed images, in float32."""
    views = VIEWS[num_views]
    copies = zip(views, make_shifted_and_mirrored_views(images, views), strict=True)
    total = reduce(torch.add, (view.weight * model(copy).float() for view, copy in copies))
    return total / sum(view.weight for view in views)


def make_shifted_and_mirrored_views(images: Images, views: tuple[View, ...]) -> Iterator[Images]:
    """Yield the copy of the preprocessed images for each view. Shifted copies are padded by reflection."""
    height, width = images.shape[2:]
    is_shifted = any(view.shift != NO_SHIFT for view in views)
    padded = F.pad(images, (1, 1, 1, 1), mode="reflect") if is_shifted else images
    for (row, column), mirrored, _ in views:
        copy = images
        if (row, column) != NO_SHIFT:
            copy = padded[:, :, 1 + row : 1 + row + height, 1 + column : 1 + column + width]
        yield copy.flip(-1) if mirrored else copy.contiguous()
