"""The pictures behind `vitascope draw`: tables from the model, drawn as heat maps."""

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
    """Sheet D's two tables, 100 × 16 and 1000 × 160, or one of the asked size."""
    asked = length is not None or width is not None
    sizes = [(length or 100, width or 16)] if asked else [(100, 16), (1000, 160)]
    return save(positions_figure(sizes), out)


def draw_grid_positions(kind: str, grid: tuple[int, int], width: int, out: Path) -> Path:
    """2-d positions of a grid of patches, in reading order."""
    if width < 4 or width % 4:
        raise UserError(f"--width {width} must be a multiple of 4: sines and cosines for rows and for columns.")
    figure, panels = new_figure(1, width=7.5, height=4.6)
    if kind == "rotary":
        values, bar = rotation(grid, width, base=100.0)[0].repeat_interleave(2, dim=1).T.numpy(), "cosine of the angle"
        text = "Rotary positions: queries and keys turn by these angles, the first half by row, the second by column."
    else:
        values, bar = sincos2d(grid, width).T.numpy(), "value"
        text = "2-d sin-cos positions: the first half of the features tells the column, the second half the row."
    title = f"{kind}, {grid[0]}×{grid[1]} patches, {width} features"
    heatmap(
        figure, panels[0], values, title=title, x="patch, in reading order", y="feature", colours=DIVERGING, bar=bar
    )
    caption(figure, text)
    return save(figure, out)


def draw_causal_mask(tokens: int, out: Path) -> Path:
    return save(mask_figure(tokens), out)


def draw_fresh_story(config: ModelConfig, seed: int, out: Path) -> Path:
    """A handwritten digit on its way through a model with fresh weights."""
    torch.manual_seed(seed)
    _check_story(config)
    digit = F.interpolate(digits().load("train").images[:1].float(), size=config.image_shape).byte()
    stored = digit.expand(1, config.in_chans, -1, -1)
    text = "The weights are fresh: nothing has been learnt yet, so all answers are about equally likely."
    return _draw_story(VisionTransformer(config).eval(), stored, stored.float() / 255, "A digit", text, None, out)


def draw_trained_story(run: Path, out: Path) -> Path:
    """One of a run's own images on its way through its trained model."""
    model = load(open_run(run))
    _check_story(model.config)
    found = some_own_images(model.run, model.facts, 1)
    if found is None:
        raise UserError(f"{run}'s images are not here, so there is none to follow. See its data in {run}/recipe.yaml.")
    stored, name = found[0].images, model.classes[int(found[0].labels[0])]
    text = f"The weights were learnt from {Path(model.run.recipe.data.name).name}."
    what = f"An image of the class {name}"
    return _draw_story(model, stored, model.facts.preparation(stored), what, text, model.classes, out)


def _check_story(config: ModelConfig) -> None:
    if config.in_chans not in (1, 3) or not config.num_classes:
        raise UserError("A story needs a picture and an answer: in_chans=1 or 3, and num_classes of at least 1.")


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
        f"{what} is cut into patches; each becomes a token{first}; each token decides how much to look at each other "
        f"(first head of the first block); the last state gives the answer. {weights}"
    )
    picture = stored[0].permute(1, 2, 0).squeeze(-1).numpy()
    parts = (tokens[0].numpy(), maps[0, 0].numpy(), answer[0].numpy())
    return save(draw_story(picture, config.grid, *parts, text, classes), out)
