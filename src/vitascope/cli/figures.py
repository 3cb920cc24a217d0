"""Draw the figures of `vitascope draw` and `vitascope data preview`."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitascope.coursework.sheets.figures import plot_causal_mask, plot_sinusoidal_positions
from vitascope.data.config import AugmentConfig, resolve_augmentation
from vitascope.data.dataset import Split
from vitascope.data.preprocessing import Preprocessing
from vitascope.data.sampling import draw_epoch_augmentation, select_step_draws
from vitascope.data.sources.arrays import open_digits
from vitascope.data.splits import open_training_data
from vitascope.data.statistics import PREVIEW_SIZE
from vitascope.draw.explanation import draw_forward_pass
from vitascope.draw.images import draw_gallery, draw_heatmap, draw_image_tiles
from vitascope.draw.palette import DIVERGING
from vitascope.draw.patch_marks import draw_grid, hatch_patches, outline_groups, shades_of_groups
from vitascope.draw.style import add_caption, create_figure, save_figure
from vitascope.errors import UserError, format_count
from vitascope.evaluation.eval_data import sample_run_images
from vitascope.evaluation.prediction import check_channels_readable, convert_to_stored_images
from vitascope.evaluation.trained import TrainedTransformer, load
from vitascope.model import token_merging as fewer
from vitascope.model.block import Block
from vitascope.model.config import ModelConfig
from vitascope.model.patches import concat_shifted_copies
from vitascope.model.positions import make_rotary_table, make_sincos2d_table
from vitascope.model.vit import VisionTransformer
from vitascope.recipe.reading import list_recipe_names, read_recipe
from vitascope.recipe.train import DinoConfig
from vitascope.run.directory import open_run
from vitascope.training.objectives.dino import NUM_GLOBAL_CROPS, make_view_policies


def draw_sinusoidal_positions(num_positions: int | None, num_features: int | None, figure_path: Path) -> Path:
    """Draw the two tables of sheet D, 100 × 16 and 1000 × 160, or one of the given size."""
    asked = num_positions is not None or num_features is not None
    sizes = [(num_positions or 100, num_features or 16)] if asked else [(100, 16), (1000, 160)]
    return save_figure(plot_sinusoidal_positions(sizes), figure_path)


def draw_grid_positions(position_type: str, grid_shape: tuple[int, int], num_features: int, figure_path: Path) -> Path:
    """Draw the 2-D positions of a patch grid, row by row."""
    if num_features < 4 or num_features % 4:
        raise UserError(
            f"--width {num_features} must be a multiple of 4: rows and columns each need sines and cosines."
        )
    figure, panels = create_figure(1, width=7.5, height=4.6)
    if position_type == "rotary":
        values, bar = (
            make_rotary_table(grid_shape, num_features, base=100.0)[0].repeat_interleave(2, dim=1).T.numpy(),
            "cosine of the angle",
        )
        text = (
            "Rotary positions: queries and keys are rotated by an angle. The colour shows the cosine of the rotation "
            "angle. The first half of the features encodes the row, the second half the column."
        )
    else:
        values, bar = make_sincos2d_table(grid_shape, num_features).T.numpy(), "value"
        text = "2-D sin-cos positions: the first half of the features encodes the column, the second half the row."
    title = f"{position_type}, grid of {grid_shape[0]}×{grid_shape[1]} patches, {num_features} features"
    draw_heatmap(
        figure,
        panels[0],
        values,
        title=title,
        x_label="patch index (row by row)",
        y_label="feature",
        colormap=DIVERGING,
        colorbar_label=bar,
    )
    add_caption(figure, text)
    return save_figure(figure, figure_path)


def draw_causal_mask(num_tokens: int, figure_path: Path) -> Path:
    return save_figure(plot_causal_mask(num_tokens), figure_path)


def draw_untrained_forward_pass(config: ModelConfig, seed: int, figure_path: Path) -> Path:
    """Draw the steps from a handwritten digit to its prediction, with random weights."""
    torch.manual_seed(seed)
    _check_image_classifier(config)
    digit = F.interpolate(open_digits().load_split("train").images[:1].float(), size=config.image_shape).byte()
    stored = digit.expand(1, config.in_chans, -1, -1)
    text = "The weights are random, so all classes are about equally likely."
    return _draw_model_forward_pass(
        VisionTransformer(config).eval(), stored, stored.float() / 255, "A digit", text, None, figure_path
    )


def draw_trained_forward_pass(run_path: Path, figure_path: Path) -> Path:
    """Draw the steps from one of a run's images to its prediction, with the trained weights."""
    model = load(open_run(run_path))
    _check_image_classifier(model.config)
    found = sample_run_images(model.run, model.info, 1)
    if found is None:
        raise UserError(
            f"The images of {run_path} are not available. See data.name and data.root in {run_path}/recipe.yaml."
        )
    stored, name = found[0].images, model.classes[int(found[0].labels[0])]
    text = f"The model was trained on {Path(model.run.recipe.data.name).name}."
    what = f"An image of class {name}"
    return _draw_model_forward_pass(
        model, stored, model.info.preparation(stored), what, text, model.classes, figure_path
    )


def _check_image_classifier(config: ModelConfig) -> None:
    if config.in_chans not in (1, 3) or not config.num_classes:
        raise UserError("draw story needs an image model with classes: in_chans=1 or 3, and num_classes of at least 1.")


def _draw_model_forward_pass(
    model: VisionTransformer,
    raw_image: Tensor,
    model_input: Tensor,
    image_description: str,
    weights_note: str,
    class_names: list[str] | None,
    figure_path: Path,
) -> Path:
    config = model.config
    with torch.inference_mode():
        tokens = model.embed(model_input)
        block = cast(Block, model.blocks[0])
        maps = block.attn.maps(block.norm1(tokens), rotation=model.rotation)
        answer = model(model_input).softmax(-1)
    first = " (row 0 is the class token)" if config.class_token else ""
    text = (
        f"{image_description} is cut into patches. Each patch becomes a token{first}. The attention map shows the first head of the "
        f"first block: how much each token attends to every other. The output is a probability per class. {weights_note}"
    )
    picture = raw_image[0].permute(1, 2, 0).squeeze(-1).numpy()
    parts = (tokens[0].numpy(), maps[0, 0].numpy(), answer[0].numpy())
    return save_figure(draw_forward_pass(picture, config.grid, *parts, text, class_names), figure_path)


SHIFT_TITLES = ("original", "shifted down, right", "shifted down, left", "shifted up, right", "shifted up, left")
TINT = 0.55
IMAGE_SIZE = 32  # side of the drawn image in pixels


def draw_shifted_copies(image_path: Path | None, patch_size: int, figure_path: Path) -> Path:
    """Draw the five images whose patches tokenizer=spt concatenates."""
    if not 2 <= patch_size <= IMAGE_SIZE // 2 or IMAGE_SIZE % patch_size:
        raise UserError(
            f"--patch-size {patch_size}: choose 2, 4, 8 or 16, which divide the image of {IMAGE_SIZE}×{IMAGE_SIZE} pixels."
        )
    if image_path is None:
        stored = torch.nn.functional.interpolate(
            open_digits().load_split("train").images[:1].float(), size=(IMAGE_SIZE, IMAGE_SIZE)
        )
    else:
        stored = convert_to_stored_images(image_path, (3, IMAGE_SIZE, IMAGE_SIZE)).images.float()
    seen = concat_shifted_copies(stored / 255, patch_size)[0].unflatten(0, (5, -1))
    text = (
        f"Shifted patch tokenization: each patch of {patch_size}×{patch_size} pixels is cut from all five images at "
        f"the same position. Its token also contains {patch_size // 2} pixels beyond each edge of the patch. The "
        f"padding is 0. The image is {'enlarged' if image_path is None else 'resized'} to {IMAGE_SIZE}×{IMAGE_SIZE} pixels."
    )
    figure = draw_image_tiles([_convert_to_numpy(part) for part in seen], SHIFT_TITLES, text, num_columns=5)
    for panel in figure.axes:
        draw_grid(panel, (IMAGE_SIZE // patch_size, IMAGE_SIZE // patch_size), (patch_size, patch_size))
    return save_figure(figure, figure_path)


def draw_token_reduction(model_ref: str, image_path: Path, tokens_per_block: int, figure_path: Path) -> Path:
    """Draw the image, its merged patches as coloured groups, and its dropped patches hatched."""
    model = load(model_ref)
    model.set_token_reduction(merge_tokens=0, drop_tokens=0)
    check_channels_readable(model.info.stored)
    stored = convert_to_stored_images(image_path, model.info.stored).images[:1]
    pixels, patch = model.info.preparation.scale_and_resize(stored)[0], model.config.patch_shape
    parts, words = (
        [_convert_to_numpy(pixels)],
        [_format_prediction_title(model, stored, f"all {model.config.num_patches} patches")],
    )
    owners: list[NDArray] = []
    for name, how in (("merge_tokens", "merged"), ("drop_tokens", "dropped")):
        model.set_token_reduction(**({"merge_tokens": 0, "drop_tokens": 0} | {name: tokens_per_block}))
        owners.append(
            fewer.assign_patches_to_tokens(model, model.info.preparation(stored))[0]
            .unflatten(0, model.config.grid)
            .numpy()
        )
        left = format_count(len(set(owners[-1][owners[-1] >= 0].tolist())), "token")
        words.append(_format_prediction_title(model, stored, f"{how}: {left} left"))
    merged, dropped = owners
    parts += [_tint_groups(_convert_to_numpy(pixels), merged, patch), _convert_to_numpy(pixels)]
    text = (
        f"Each of the {model.config.depth} blocks removes at most {tokens_per_block} tokens. Merged: patches of one colour form "
        "one token; patches without colour were not merged. Dropped: hatched patches were removed. Below each title: "
        "the prediction and its probability."
    )
    figure = draw_image_tiles(parts, words, text, num_columns=3)
    outline_groups(figure.axes[1], merged, patch)
    hatch_patches(figure.axes[2], dropped < 0, patch)
    return save_figure(figure, figure_path)


def _format_prediction_title(model: TrainedTransformer, raw_image: Tensor, first_line: str) -> str:
    found = model.predict(raw_image)[0]
    return f"{first_line}\n{found.label}, {found.probability:.0%}"


def _tint_groups(pixels: NDArray, owner: NDArray, patch: tuple[int, int]) -> NDArray:
    """Tint each group of several patches in its own colour."""
    groups, sizes = np.unique(owner, return_counts=True)
    colours = shades_of_groups(int((sizes > 1).sum()))
    painted = np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels.copy()
    which = owner.repeat(patch[0], 0).repeat(patch[1], 1)
    for group, colour in zip(groups[sizes > 1], colours, strict=True):
        painted[which == group] = (1 - TINT) * painted[which == group] + TINT * colour
    return painted


def _convert_to_numpy(image: Tensor) -> NDArray:
    return image.clamp(0, 1).permute(1, 2, 0).numpy()


NUM_IMAGES, NUM_VERSIONS = 6, 8


def draw_augmentation_preview(
    data_name: str, overrides: list[str], data_root: str | None, seed: int, figure_path: Path
) -> Path:
    """Draw each image in a row with eight augmented versions, or with its crops for train.objective=dino."""
    base = _find_base_recipe(data_name, overrides)
    recipe = read_recipe(base, overrides)
    config = replace(recipe.data, name=data_name, root=data_root or recipe.data.root, validation=0.0)
    data = open_training_data(config, *PREVIEW_SIZE, seed)
    policy = resolve_augmentation(config.augment, data_name, data.train.images.shape[1], recipe.train.objective)
    height, width = data.train.images.shape[2:]
    prepare = replace(data.preprocessing, size=(height, width))
    chosen = data.train.select_evenly(NUM_IMAGES)
    if recipe.train.objective == "dino":
        versions, titles = _make_dino_crops(prepare, chosen, policy, recipe.dino, seed)
    else:
        versions, titles = _make_augmented_versions(prepare, chosen, policy, seed)
    columns = [prepare.denormalize(part) for part in (prepare(chosen.images), *versions)]
    rows = [[column[row].permute(1, 2, 0).numpy() for column in columns] for row in range(len(chosen))]
    names = [data.classes[label] for label in chosen.labels.tolist()]
    kind = "crops for DINO's student" if recipe.train.objective == "dino" else "versions"
    text = f"{data.source.name}: the original image, then {len(versions)} {kind} {_describe(base, overrides, policy)}"
    return save_figure(draw_gallery(rows, names, ["original", *titles], text), figure_path)


def _describe(base: str | None, settings: list[str], policy: AugmentConfig) -> str:
    """Describe where the augmentation comes from, its settings, and how images are mixed."""
    changed = ", ".join(word for word in settings if word.startswith("data.augment."))
    which = f"as in recipe {base}" if base else "with the default augmentation of this data"
    which += f", changed by {changed}" if changed else ""
    text = f"{which} ({policy.description or 'no augmentation'})."
    mixes = {
        "mixup": "With mixup, a version is a weighted average of two images.",
        "cutmix": "With CutMix, a rectangle comes from another image.",
    }
    used = [sentence for name, sentence in mixes.items() if policy.mix_prob and getattr(policy, name)]
    return " ".join([text, *used, *(["The labels are mixed in the same proportion."] if used else [])])


def _find_base_recipe(data_name: str, overrides: list[str]) -> str | None:
    """Return the shipped self-supervised recipe for this data if `train.objective` names one: it has the crop sizes."""
    asked = [f"{data_name}-{word.partition('=')[2]}" for word in overrides if word.startswith("train.objective=")]
    return next((found for found in asked if found in list_recipe_names()), None)


def _make_augmented_versions(
    preprocessing: Preprocessing, selected_images: Split, policy: AugmentConfig, seed: int
) -> tuple[list[Tensor], list[str]]:
    draws = draw_epoch_augmentation(policy, NUM_VERSIONS, len(selected_images), seed, epoch=0)
    found = [
        preprocessing.augment_and_mix(
            selected_images.images, selected_images.labels, select_step_draws(draws, number), policy
        )[0]
        for number in range(NUM_VERSIONS)
    ]
    return found, [f"version {number + 1}" for number in range(NUM_VERSIONS)]


def _make_dino_crops(
    preprocessing: Preprocessing, selected_images: Split, policy: AugmentConfig, dino_config: DinoConfig, seed: int
) -> tuple[list[Tensor], list[str]]:
    """Return the two global crops, which the teacher gets too, and the local crops."""
    found, small = [], (dino_config.local_size, dino_config.local_size)
    for view, own in enumerate(make_view_policies(policy, dino_config)):
        draws = select_step_draws(draw_epoch_augmentation(own, 1, len(selected_images), seed, 0, view_index=view), 0)
        found.append(
            preprocessing.augment(selected_images.images, draws, own, small if view >= NUM_GLOBAL_CROPS else None)
        )
    return found, ["global 1", "global 2", *[f"local {number + 1}" for number in range(dino_config.local_crops)]]
