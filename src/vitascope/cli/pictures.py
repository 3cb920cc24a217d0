"""Draw the figures of `vitascope draw`: positions, mask, and the steps from image to prediction."""

from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from vitascope.data.digits import digits
from vitascope.draw.heatmap import heatmap
from vitascope.draw.look import caption, new_figure, save
from vitascope.draw.palette import DIVERGING
from vitascope.draw.story import draw_story
from vitascope.errors import UserError
from vitascope.evaluation.choosing import some_own_images
from vitascope.evaluation.trained import load
from vitascope.model.block import Block
from vitascope.model.config import ModelConfig
from vitascope.model.positions import sincos2d
from vitascope.model.rotary import rotation
from vitascope.model.vit import VisionTransformer
from vitascope.run.directory import open_run
from vitascope.sheets.pictures import mask_figure, positions_figure


def draw_sinusoidal(length: int | None, width: int | None, out: Path) -> Path:
    """Draw the two tables of sheet D, 100 × 16 and 1000 × 160, or one of the given size."""
    asked = length is not None or width is not None
    sizes = [(length or 100, width or 16)] if asked else [(100, 16), (1000, 160)]
    return save(positions_figure(sizes), out)


def draw_grid_positions(kind: str, grid: tuple[int, int], width: int, out: Path) -> Path:
    """Draw the 2-D positions of a patch grid, row by row."""
    if width < 4 or width % 4:
        raise UserError(f"--width {width} must be a multiple of 4: rows and columns each need sines and cosines.")
    figure, panels = new_figure(1, width=7.5, height=4.6)
    if kind == "rotary":
        values, bar = rotation(grid, width, base=100.0)[0].repeat_interleave(2, dim=1).T.numpy(), "cosine of the angle"
        text = (
            "Rotary positions: queries and keys are rotated by an angle. The colour shows the cosine of the rotation "
            "angle. The first half of the features encodes the row, the second half the column."
        )
    else:
        values, bar = sincos2d(grid, width).T.numpy(), "value"
        text = "2-D sin-cos positions: the first half of the features encodes the column, the second half the row."
    title = f"{kind}, grid of {grid[0]}×{grid[1]} patches, {width} features"
    heatmap(
        figure, panels[0], values, title=title, x="patch index (row by row)", y="feature", colours=DIVERGING, bar=bar
    )
    caption(figure, text)
    return save(figure, out)


def draw_causal_mask(tokens: int, out: Path) -> Path:
    return save(mask_figure(tokens), out)


def draw_fresh_story(config: ModelConfig, seed: int, out: Path) -> Path:
    """Draw the steps from a handwritten digit to its prediction, with random weights."""
    torch.manual_seed(seed)
    _check_story(config)
    digit = F.interpolate(digits().load("train").images[:1].float(), size=config.image_shape).byte()
    stored = digit.expand(1, config.in_chans, -1, -1)
    text = "The weights are random, so all classes are about equally likely."
    return _draw_story(VisionTransformer(config).eval(), stored, stored.float() / 255, "A digit", text, None, out)


def draw_trained_story(run: Path, out: Path) -> Path:
    """Draw the steps from one of a run's images to its prediction, with the trained weights."""
    model = load(open_run(run))
    _check_story(model.config)
    found = some_own_images(model.run, model.facts, 1)
    if found is None:
        raise UserError(f"The images of {run} are not available. See data.name and data.root in {run}/recipe.yaml.")
    stored, name = found[0].images, model.classes[int(found[0].labels[0])]
    text = f"The model was trained on {Path(model.run.recipe.data.name).name}."
    what = f"An image of class {name}"
    return _draw_story(model, stored, model.facts.preparation(stored), what, text, model.classes, out)


def _check_story(config: ModelConfig) -> None:
    if config.in_chans not in (1, 3) or not config.num_classes:
        raise UserError("draw story needs an image model with classes: in_chans=1 or 3, and num_classes of at least 1.")


def _draw_story(
    model: VisionTransformer,
    stored: Tensor,
    image: Tensor,
    what: str,
    weights: str,
    classes: list[str] | None,
    out: Path,
) -> Path:
    config = model.config
    with torch.inference_mode():
        tokens = model.embed(image)
        block = cast(Block, model.blocks[0])
        maps = block.attn.maps(block.norm1(tokens), rotation=model.rotation)
        answer = model(image).softmax(-1)
    first = " (row 0 is the class token)" if config.class_token else ""
    text = (
        f"{what} is cut into patches. Each patch becomes a token{first}. The attention map shows the first head of the "
        f"first block: how much each token attends to every other. The output is a probability per class. {weights}"
    )
    picture = stored[0].permute(1, 2, 0).squeeze(-1).numpy()
    parts = (tokens[0].numpy(), maps[0, 0].numpy(), answer[0].numpy())
    return save(draw_story(picture, config.grid, *parts, text, classes), out)
