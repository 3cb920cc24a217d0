"""Write figures and numbers about a model's heads, blocks, positions and features, over many images."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vitascope.data.dataset import UInt8Images
from vitascope.draw.images import draw_gallery
from vitascope.draw.probes import (
    draw_block_statistics,
    draw_filter_components,
    draw_position_similarity,
    draw_tsne_points,
)
from vitascope.errors import UserError
from vitascope.evaluation.eval_data import load_eval_data
from vitascope.evaluation.report import spell_out_split_name
from vitascope.explain import model_statistics
from vitascope.explain.figures import save_png_and_svg
from vitascope.explain.maps import TokenLayout, denormalize_images, get_token_layout
from vitascope.inference.classifier import Classifier
from vitascope.model.replay import replay_forward_pass
from vitascope.run.files import make_folder, write_atomically
from vitascope.run.images import try_to_sample_run_images
from vitascope.shapes import Images

MIN_IMAGES = 8  # images for statistics
MAX_IMAGES = 512
NUM_COLOURED_IMAGES = 6  # images whose features are shown as colours


@dataclass(frozen=True)
class ProbeStatistics:
    """Averages over images: block × head, state × quantile, state × state, per state; and pooled features."""

    distance: Tensor
    entropy: Tensor
    norms: Tensor
    likeness: Tensor
    lens: Tensor
    features: Tensor


def compute_head_and_block_statistics(subject: Classifier, images: Images) -> ProbeStatistics:
    model, layout = subject.model, get_token_layout(subject.model)
    distance, entropy, norms, agreement, features = [], [], [], [], []
    similarity: model_statistics.MinibatchCKA | None = None
    for batch in model_statistics.iterate_equal_batches_dropping_rest(images):
        with torch.no_grad():
            result = replay_forward_pass(model, batch)
            sizes = result.token_sizes or [None] * len(result.hidden_states)
            states = list(zip(result.hidden_states, sizes, strict=True))
            lens_logits = [model_statistics.apply_logit_lens(model, *state) for state in states]
        all_token_maps = result.expand_maps_to_all_tokens()
        distance.append(
            _compute_mean_per_block_and_head(model_statistics.compute_mean_attention_distance, all_token_maps, layout)
        )
        entropy.append(_compute_mean_per_block_and_head(model_statistics.compute_attention_entropy, result.maps))
        norms.append(torch.stack([_compute_token_norm_median_q95_max(tokens) for tokens in result.hidden_states]))
        answers = result.logits.argmax(1)
        agreement.append(torch.stack([(logits.argmax(1) == answers).float().mean() for logits in lens_logits]))
        pooled = [model_statistics.pool_class_token_or_mean(tokens, layout, size) for tokens, size in states]
        features.append(pooled[-1])
        similarity = similarity or model_statistics.MinibatchCKA(len(states))
        similarity.add_batch(pooled)
    if similarity is None:
        raise UserError("No images were given.")
    means = [torch.stack(parts).mean(0).cpu() for parts in (distance, entropy, norms, agreement)]
    return ProbeStatistics(
        means[0], means[1], means[2], similarity.compute_cka_matrix(), means[3], torch.cat(features).cpu()
    )


def _compute_mean_per_block_and_head(
    compute_statistic: Callable[..., Tensor], maps: list[Tensor], *arguments: Any
) -> Float[Tensor, "block head"]:
    """Return the mean over images of a statistic of each head: block × head."""
    return torch.stack([compute_statistic(block, *arguments).mean(0) for block in maps])


def _compute_token_norm_median_q95_max(tokens: Tensor) -> Float[Tensor, "3"]:
    """Return the median, the 95 % quantile and the maximum of the token norms."""
    token_norms = model_statistics.compute_token_norms(tokens).flatten()
    return torch.stack([token_norms.quantile(0.5), token_norms.quantile(0.95), token_norms.amax()])


def _write_block_statistics_figure(
    statistics: ProbeStatistics, layout: TokenLayout, input_text: str, images_text: str, output_folder: Path
) -> list[Path]:
    text = (
        f"Computed on {images_text}. Attention distance and entropy: each dot is one head. Input: {input_text}, "
        "before block 1. Attention distance: mean distance from a patch to the patches it attends to. "
        "Attention entropy: low is focused, high is spread out. Tokens with very large norms often hold information "
        "about the whole image. "
        f"{_make_block_cka_caption(layout.reads_class_token)} Early predictions: the classifier is applied after each "
        "block."
    )
    arrays = (getattr(statistics, field).numpy() for field in ("distance", "entropy", "norms", "likeness", "lens"))
    figure = draw_block_statistics(*arrays, num_tokens=layout.num_prefix_tokens + layout.num_patches, caption_text=text)
    return save_png_and_svg(figure, output_folder / "analysis-blocks")


def write_model_statistics_figures_and_json(
    subject: Classifier, images: Images, labels: list[int] | None, images_description: str, output_folder: Path
) -> list[Path]:
    """Write the analysis of at least eight prepared images; `images_description` is, e.g., validation."""
    if len(images) < MIN_IMAGES:
        raise UserError(f"The analysis computes averages and needs at least {MIN_IMAGES} images, not {len(images)}.")
    make_folder(output_folder)
    model, layout, indices = subject.model, get_token_layout(subject.model), _choose_evenly_spaced_indices(len(images))
    images_text = f"{_describe_image_count_and_subsampling(len(indices), len(images))} {images_description} images"
    images, labels = images[indices], labels and [labels[index] for index in indices.tolist()]
    statistics = compute_head_and_block_statistics(subject, images)
    input_text = model_statistics.describe_tokens_before_first_block(model)
    files = _write_block_statistics_figure(statistics, layout, input_text, images_text, output_folder)
    filters, variance_fractions = model_statistics.compute_patch_filter_pca(model)
    text = "Principal components of the patch embedding's filters, each with its fraction of the variance."
    files += save_png_and_svg(
        draw_filter_components(filters.permute(0, 2, 3, 1).numpy(), variance_fractions.numpy(), text),
        output_folder / "analysis-filters",
    )
    files += _write_position_similarity_figure_if_any(subject, layout, output_folder)
    files += _write_feature_pca_figure(subject, images, layout, output_folder)
    if labels is not None:
        text = (
            f"One point per image ({images_text}). Nearby points have similar features; distances between far points "
            "cannot be interpreted."
        )
        points = project_to_2d_with_pca_and_tsne(statistics.features)
        figure = draw_tsne_points(points, labels, subject.classes, text)
        files += save_png_and_svg(figure, output_folder / "analysis-tsne")
    numbers = json.dumps(_build_statistics_json(statistics, len(statistics.features)), indent=1)
    write_atomically(output_folder / "analysis.json", numbers + "\n")
    return [*files, output_folder / "analysis.json"]


def _make_block_cka_caption(reads_class_token: bool) -> str:
    text = "Similarity: linear CKA of the class token." if reads_class_token else ""
    text = text or "Similarity: linear CKA of the mean of the patch tokens."
    if reads_class_token:
        text += " Before block 1, the class token is equal for all images, so its similarity is undefined (empty)."
    return f"{text} CKA near 1: the representation hardly changes between the blocks of that row and column."


def _choose_evenly_spaced_indices(num_images: int) -> Tensor:
    """Choose as many images as fill whole batches. Images of a folder are sorted by class, so the first ones are no
    sample of all."""
    num_used, batch_size = min(num_images, MAX_IMAGES), model_statistics.BATCH_SIZE
    num_used -= num_used % batch_size if num_used > batch_size else 0
    return torch.linspace(0, num_images - 1, num_used, dtype=torch.float64).round().long()


def _describe_image_count_and_subsampling(num_used: int, num_given: int) -> str:
    """Describe the images used; `MAX_IMAGES` given images are already a selection from the split."""
    if num_used < num_given:
        return f"{num_used} of the {num_given}"
    return f"a selection of {num_used}" if num_given == MAX_IMAGES else str(num_used)


class RunImages(NamedTuple):
    """Some of a run's images, prepared for the model."""

    images: Images
    labels: list[int]
    description: str  # validation, training or test


def write_model_statistics_if_enough_images(
    subject: Classifier, run_images: RunImages | None, given_images: UInt8Images, output_folder: Path
) -> list[Path]:
    """Write the analysis over the run's own images, or over the given ones if there are enough; otherwise nothing."""
    if run_images is not None and len(run_images.images) >= MIN_IMAGES:
        return write_model_statistics_figures_and_json(
            subject, run_images.images, run_images.labels, run_images.description, output_folder
        )
    return (
        write_model_statistics_figures_and_json(
            subject, subject.preprocessing(given_images), None, "given", output_folder
        )
        if len(given_images) >= MIN_IMAGES
        else []
    )


def try_to_load_run_images(subject: Classifier, split: str | None = None) -> RunImages | None:
    """Return some of the run's images; None if they are not on this machine.

    By default the validation images, else training images. Test images are used only with split="test"."""
    if not subject.is_run:
        if split is not None:
            raise UserError(f"--split {split} needs a run, and {subject.name} is not a run. Omit --split.")
        return None
    run, model_info = subject.run, subject.info
    if split is not None:
        samples, description = (
            load_eval_data(run, model_info, split, None).samples.select_evenly(MAX_IMAGES),
            spell_out_split_name(split),
        )
    else:
        run_sample = try_to_sample_run_images(run, model_info, MAX_IMAGES)
        if run_sample is None:
            return None
        samples, description = run_sample
    return RunImages(subject.preprocessing(samples.images), samples.labels.tolist(), description)


def project_to_2d_with_pca_and_tsne(features: Tensor) -> np.ndarray:
    """Project the features to two dimensions with t-SNE."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    points = features.numpy()
    points = PCA(min(50, *points.shape), random_state=0).fit_transform(points)
    return TSNE(perplexity=min(30, (len(points) - 1) // 3), init="pca", random_state=0).fit_transform(points)


def _write_position_similarity_figure_if_any(
    subject: Classifier, layout: TokenLayout, output_folder: Path
) -> list[Path]:
    try:
        similarity = model_statistics.compute_position_similarity_matrix(subject.model, layout.num_patches)
    except UserError:
        return []  # rotary only, or none
    text = "Position embeddings: each small grid shows the similarity of one patch's position to all positions."
    return save_png_and_svg(
        draw_position_similarity(similarity.numpy(), layout.rows, layout.columns, text),
        output_folder / "analysis-positions",
    )


def _write_feature_pca_figure(
    subject: Classifier, images: Images, layout: TokenLayout, output_folder: Path
) -> list[Path]:
    shown = images[:NUM_COLOURED_IMAGES]
    states = model_statistics.compute_hidden_states_of_all_tokens(subject.model, shown)
    chosen_states = sorted({0, len(states) // 3, 2 * len(states) // 3, len(states) - 1})
    rows = [denormalize_images(subject.preprocessing, shown)]
    rows += [
        list(model_statistics.project_patches_to_pca_rgb(states[state], layout).numpy()) for state in chosen_states
    ]
    names = ["image", *(f"after block {state}" if state else "before block 1" for state in chosen_states)]
    text = (
        "The first three principal components of the patch features, shown as red, green and blue. Patches with equal "
        "colours have similar features. "
        f"Before block 1: {model_statistics.describe_tokens_before_first_block(subject.model)}. "
        "Colours in different rows cannot be compared. A selection of blocks."
    )
    return save_png_and_svg(draw_gallery(rows, names, [""] * len(shown), text), output_folder / "analysis-colours")


def _build_statistics_json(statistics: ProbeStatistics, num_images: int) -> dict[str, Any]:
    rounded = {
        name: _convert_to_json_numbers(getattr(statistics, name))
        for name in ("distance", "entropy", "norms", "likeness", "lens")
    }
    return {"images": num_images, **rounded}


def _convert_to_json_numbers(values: Tensor) -> list[Any]:
    """Return nested lists; JSON has no NaN, so an undefined value is None."""
    rounded = np.round(values.numpy().astype(float), 5)
    with_none = rounded.astype(object)
    with_none[np.isnan(rounded)] = None
    return with_none.tolist()
