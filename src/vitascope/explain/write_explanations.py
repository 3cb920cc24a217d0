"""Write all output of `vitascope explain`: figures, numbers, and figures over the epochs if there are snapshots."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from PIL import Image

from vitascope.draw import COLOURS, SEQUENTIAL
from vitascope.draw.explanation import draw_heat_maps_over_image
from vitascope.draw.images import draw_gallery
from vitascope.draw.style import add_caption, create_figure, set_labels
from vitascope.explain.attribution import (
    AttributionInputs,
    choose_target_or_predicted_classes,
    predict_probabilities,
)
from vitascope.explain.figures import ExplainReport, ExplainRequest, save_png_and_svg, write_explanation_figures
from vitascope.explain.maps import denormalize_images, get_token_layout
from vitascope.explain.methods import METHODS, make_panel_title
from vitascope.explain.model_figures import (
    ProbeStatistics,
    compute_head_and_block_statistics,
    try_to_load_run_images,
    write_model_statistics_if_enough_images,
)
from vitascope.inference.classifier import Classifier
from vitascope.inference.hardware import set_malloc_to_keep_memory
from vitascope.inference.prediction import EXPLANATIONS_FILE, LoadedImages
from vitascope.model.vit import VisionTransformer
from vitascope.number_format import format_percent
from vitascope.run.checkpoint import SNAPSHOTS_FOLDER, load_weights_file_into_model
from vitascope.run.files import write_atomically
from vitascope.shapes import Images, PatchHeatmap, TargetClasses

MAX_PROBE_IMAGES = 64  # images for the averages
NUM_SHOWN_IMAGES = 3  # images in the strip
SHOWN_METHODS = ("attention", "relevance")
FRAME_MILLISECONDS = 700  # milliseconds


def find_snapshot_files_by_epoch(subject: Classifier) -> dict[int, Path]:
    """Return the weight file of each epoch with a snapshot."""
    if not subject.is_run:
        return {}
    files = sorted(subject.run.get_path(SNAPSHOTS_FOLDER).glob("epoch-*.safetensors"))
    return {int(path.stem.removeprefix("epoch-")): path for path in files}


def write_snapshot_figures_if_any(subject: Classifier, images: Images, output_folder: Path) -> list[Path]:
    """Write the figures; nothing if the run has fewer than two snapshots. Averages are over the run's own images."""
    files = find_snapshot_files_by_epoch(subject)
    if len(files) < 2 or not isinstance(subject.model, VisionTransformer):
        return []
    run_images = try_to_load_run_images(subject)
    shown, targets = (
        images[:NUM_SHOWN_IMAGES],
        choose_target_or_predicted_classes(subject.model, images[:NUM_SHOWN_IMAGES], None),
    )
    statistics: dict[int, ProbeStatistics] = {}
    rows: list[list[np.ndarray]] = [[] for _ in shown]
    frames: list[Image.Image] = []
    for epoch, path in files.items():
        snapshot = replace(subject, model=_copy_with_snapshot_weights(subject.model, path))
        inputs = AttributionInputs(snapshot.model, shown, targets, get_token_layout(snapshot.model))
        heatmaps = {name: METHODS[name](inputs) for name in SHOWN_METHODS}
        for row, heatmap in zip(rows, heatmaps["relevance"], strict=True):
            row.append(colormaps[SEQUENTIAL]((heatmap / heatmap.max().clamp(min=1e-12)).clamp(min=0).numpy())[..., :3])
        frames.append(_draw_animation_frame(snapshot, shown, targets, heatmaps, epoch))
        if run_images is not None:
            statistics[epoch] = compute_head_and_block_statistics(snapshot, run_images.images[:MAX_PROBE_IMAGES])
    pictures = denormalize_images(subject.preprocessing, shown)
    column_names = ["image", *(f"epoch {epoch}" for epoch in files)]
    row_names = [subject.classes[int(target)] for target in targets]
    strip = [[picture, *row] for picture, row in zip(pictures, rows, strict=True)]
    text = "Relevance of each patch for the final prediction (named at the left), by epoch. "
    text += "In each map dark is 0 and yellow is the maximum."
    written = save_png_and_svg(draw_gallery(strip, row_names, column_names, text), output_folder / "over-time-strip")
    if statistics:
        written += save_png_and_svg(
            _draw_statistics_over_epochs(statistics, len(run_images.images[:MAX_PROBE_IMAGES]) if run_images else 0),
            output_folder / "over-time-analysis",
        )
    written.append(_write_gif(frames, output_folder / "over-time.gif"))
    return written


def _copy_with_snapshot_weights(model: VisionTransformer, weights_path: Path) -> VisionTransformer:
    snapshot = VisionTransformer(model.config).eval()
    load_weights_file_into_model(snapshot, weights_path)
    return snapshot


def _draw_animation_frame(
    subject: Classifier, images: Images, targets: TargetClasses, heatmaps: dict[str, PatchHeatmap], epoch: int
) -> Image.Image:
    """Draw the first image's explanations after this epoch."""
    picture = denormalize_images(subject.preprocessing, images[:1])[0]
    with torch.no_grad():
        probability = float(predict_probabilities(subject.model, images[:1])[0, targets[0]])
    panels = {make_panel_title(name): heatmap[0].numpy() for name, heatmap in heatmaps.items()}
    title = f"epoch {epoch}\n{subject.classes[int(targets[0])]}: {format_percent(probability, 0)}"
    figure = draw_heat_maps_over_image(
        picture,
        panels,
        title,
        "Attention, and relevance for the class, by epoch. Yellow is most important. The scale changes between epochs.",
        num_columns=3,
    )
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    return Image.open(file).convert("P", palette=Image.Palette.ADAPTIVE)


def _write_gif(frames: list[Image.Image], path: Path) -> Path:
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=FRAME_MILLISECONDS, loop=0)
    write_atomically(path, file.getvalue())
    return path


def _draw_statistics_over_epochs(statistics_by_epoch: dict[int, ProbeStatistics], num_images: int) -> Figure:
    """Draw one line per block; early blocks are pale."""
    figure, panels = create_figure(3, width=13.0, height=4.0)
    epochs = list(statistics_by_epoch)
    depth = len(next(iter(statistics_by_epoch.values())).distance)
    for panel, field, title, unit in (
        (panels[0], "distance", "attention distance", "mean distance in patches"),
        (panels[1], "entropy", "attention entropy", "entropy in nats"),
        (panels[2], "lens", "early predictions (logit lens)", "agreement with final prediction in %"),
    ):
        for block in range(depth):
            values = [
                100 * statistics.lens[block + 1].item()
                if field == "lens"
                else getattr(statistics, field)[block].mean().item()
                for statistics in statistics_by_epoch.values()
            ]
            shade = 0.25 + 0.75 * (block + 1) / depth
            panel.plot(epochs, values, "o-", color=COLOURS[0], alpha=shade, label=f"block {block + 1}")
        set_labels(panel, title, "epoch", unit)
        panel.set_ylim(0, 1.1 * panel.get_ylim()[1])
        panel.set_xticks(epochs)
    panels[2].legend(fontsize=7, ncols=2)
    add_caption(figure, f"Means over heads and over {num_images} of the run's images, one line per block, by epoch.")
    return figure


def write_explanations_and_statistics(
    subject: Classifier,
    loaded_images: LoadedImages,
    request: ExplainRequest,
    output_folder: Path,
    *,
    analysis: bool = True,
    split: str | None = None,
) -> ExplainReport:
    """Write everything; `analysis` adds statistics of the model on the run's images of `split` and over its epochs."""
    set_malloc_to_keep_memory()  # occlusion and faithfulness run the same large batches many times
    # Loaded first, so that a wrong split is reported before anything is drawn.
    run_images = try_to_load_run_images(subject, split) if analysis else None
    report = write_explanation_figures(subject, loaded_images, request, output_folder)
    if analysis:
        request.report_step("Analysing heads, blocks and features")
        report.files += write_model_statistics_if_enough_images(
            subject, run_images, loaded_images.images, output_folder
        )
        report.files += write_snapshot_figures_if_any(
            subject, subject.preprocessing(loaded_images.images), output_folder
        )
    report.files.append(output_folder / EXPLANATIONS_FILE)
    write_atomically(output_folder / EXPLANATIONS_FILE, json.dumps(report.as_dict(), indent=1, allow_nan=False) + "\n")
    return report
