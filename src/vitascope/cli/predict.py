"""`vitascope predict`, `embed`, `similar` and `probe`: apply a trained model to new images."""

import csv
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer
from rich.console import Console

from vitascope.cli.console import (
    create_console,
    create_table,
    open_model_and_print_notes_to_stderr,
    print_notes_to_stderr,
)
from vitascope.cli.evaluate import (
    BestOption,
    ModelRef,
    RunPath,
    ViewsOption,
    check_views_option_matches_training,
    print_unreadable_files,
)
from vitascope.errors import UserError, format_count
from vitascope.number_format import format_number, format_percent

if TYPE_CHECKING:
    from vitascope.inference.classifier import Classifier
    from vitascope.inference.prediction import Predictions

ThresholdOption = Annotated[
    float, typer.Option(help="Below this probability, a prediction is unsure. `evaluate` suggests a value.")
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(help="Divide the logits by this. Default: the run's, which `evaluate` fits. 1 switches it off."),
]
TopKOption = Annotated[
    int | None, typer.Option(help="Number of classes to print. Default: 3 as text, 1 as CSV, all as JSON.", min=1)
]
SPREAD_NOTE = (
    "(0: collapsed, all images have the same features; 1: maximal)\n"
    "Each image's feature vector is scaled to length 1; the variances of all features are summed; the spread is the "
    "square root of the sum."
)


def predict(
    run: ModelRef,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE…|FOLDER", help="Image files or folders of images.")],
    views: ViewsOption = 1,
    threshold: ThresholdOption = 0.0,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    fast: Annotated[bool, typer.Option("--fast", help="Faster inference, if its accuracy is checked.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print only JSON, with the probability of every class.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print only CSV: file, class, probability.")] = False,
) -> None:
    """Predict the class of image files, with probabilities. Images are preprocessed as in training.

    Example: vitascope predict runs/digits photos/ --csv
    """
    from vitascope.data.sources.folder import describe_ignored_files
    from vitascope.inference.prediction import check_threshold_and_temperature

    if as_json and as_csv:
        raise UserError("Choose one of --json and --csv.")
    check_threshold_and_temperature(threshold, temperature)

    model = open_model_and_print_notes_to_stderr(run, device="auto", fast=fast)
    check_views_option_matches_training(model, views)
    predictions = model.predict(
        images, views=cast(Literal[1, 2, 6, 10], views), threshold=threshold, temperature=temperature
    )
    print_unreadable_files(predictions.unreadable_files)
    ignored = describe_ignored_files(images)
    print_notes_to_stderr([*([ignored] if ignored else []), *_list_inference_notes(model, views, temperature)])
    if as_json:
        print(json.dumps([prediction.as_dict(top_k) for prediction in predictions]))
    elif as_csv:
        _print_csv(predictions, top_k or 1)
    else:
        _print_prediction_table(model.name, predictions, top_k or 3)


def _list_inference_notes(model: "Classifier", views: int, temperature_option: float | None) -> list[str]:
    """Return how the model is made faster, and which temperature scales the probabilities, or how to get one."""
    notes = [f"--fast: {model.fast.description}."] if model.fast else []
    if temperature_option is not None or not model.is_run:
        return notes
    rows = model.run.metrics
    if model.find_temperature(views) is None and rows and "val_accuracy" in rows[-1]:  # it has validation images
        options = " --split val" + (f" --views {views}" if views > 1 else "")
        command = f"vitascope evaluate {model.name}{options}"
        return [*notes, f"The probabilities are not calibrated. To fit a temperature for predict: {command}"]
    return [*notes, *(f"{note} --temperature 1 switches this off." for note in _list_temperature_notes(model, views))]


def _list_temperature_notes(model: "Classifier", views: int = 1) -> list[str]:
    temperature = model.find_temperature(views)
    if temperature is None or temperature.value == 1:
        return []
    return [f"Logits are divided by the run's {temperature.description}."]


def _print_csv(predictions: "Predictions", top_k: int) -> None:
    """Print one row per image. Further classes and their probabilities are further columns."""
    top_k = min(top_k, len(predictions[0].probabilities))
    further = [name for rank in range(2, top_k + 1) for name in (f"class_{rank}", f"probability_{rank}")]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["file", "class", "probability", "unsure", *further])
    for item in predictions:
        best = [text for name, value in item.classes_by_probability[1:top_k] for text in (name, f"{value:.6f}")]
        writer.writerow([item.file, item.label, f"{item.probability:.6f}", str(item.is_unsure).lower(), *best])


def _print_prediction_table(model_name: str, predictions: "Predictions", top_k: int) -> None:
    rows = []
    for item in predictions:
        cells = [f"{name} {format_percent(probability)}" for name, probability in item.classes_by_probability[:top_k]]
        cells[0] = f"unsure: {cells[0]}" if item.is_unsure else cells[0]
        rows.append([str(item.file), *cells])
    ranks = ["prediction", "second", "third", *(f"{rank}th" for rank in range(4, top_k + 1))]
    num_unsure = sum(item.is_unsure for item in predictions)
    title = f"Predictions of {model_name} for {format_count(len(rows), 'image')}"
    title += f", {num_unsure:,} of them unsure" if num_unsure else ""
    create_console().print(create_table(title, ["file", *ranks][: len(rows[0])], rows))


def embed(
    run: ModelRef,
    folder: Annotated[list[Path], typer.Argument(metavar="FOLDER…", help="Folders of images or image files.")],
    out: Annotated[Path, typer.Option(help="Output file: .npz, or .parquet (requires pyarrow).")],
) -> None:
    """Save the features of images (the classifier's input) with file, folder and predicted class.

    Example: vitascope embed runs/digits photos/ --out features.npz
    """
    from vitascope.evaluation import embedding

    embedding.check_feature_file_suffix(out)
    model = open_model_and_print_notes_to_stderr(run, device="auto")
    features = embedding.compute_features_of_image_files(model, folder)
    features.save(out)
    print_notes_to_stderr(_list_temperature_notes(model))
    print_unreadable_files(features.unreadable_files)
    print(f"{len(features.files):,} images × {features.features.shape[1]} features: {out}")


def find_and_draw_similar_images(
    run: ModelRef,
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="An image file.")],
    among: Annotated[Path | None, typer.Option(help="Folder to search. Default: the run's training images.")] = None,
    count: Annotated[int, typer.Option(help="Number of images to show.", min=1, max=59)] = 11,
    out: Annotated[Path, typer.Option(help="File for the figure. The extension sets the format.")] = Path(
        "similar.png"
    ),
) -> None:
    """Find and draw the images whose features are most similar to those of an image."""
    from vitascope.draw.style import check_figure_suffix, save_figure
    from vitascope.evaluation import embedding
    from vitascope.evaluation.figures import SAME, draw_query_and_neighbours

    check_figure_suffix(out)
    model = open_model_and_print_notes_to_stderr(run, device="auto")
    similar = embedding.find_similar_images(model, image, among, count)
    print_notes_to_stderr(_list_temperature_notes(model))
    print_unreadable_files(similar.unreadable_files)
    print(f"{'Run' if model.is_run else 'Model'}: {model.name}")
    labels = [name + SAME * same for name, same in zip(similar.labels, similar.identical, strict=True)]
    columns = {"class" if among is None else "folder": labels}
    columns["cosine similarity"] = [format_number(cosine, "z.3f") for cosine in similar.similarities]
    if similar.nearest_samples.file_paths:
        columns["file"] = similar.nearest_samples.file_paths
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    best = similar.prediction
    prediction = f", predicted {best.label} ({format_percent(best.probability)})" if best else ""
    title = f"{image}{prediction}: most similar of {similar.searched_description}"
    create_console().print(create_table(title, list(columns), rows, right_aligned={"cosine similarity"}))
    print(f"Figure: {save_figure(draw_query_and_neighbours(similar), out)}")


def probe(
    run: RunPath,
    split: Annotated[str, typer.Option(help="val (validation images) or test.")] = "val",
    neighbours: Annotated[int, typer.Option(help="Number of nearest neighbours.")] = 20,
    labels: Annotated[float, typer.Option(help="Fraction of the training labels to use.")] = 1.0,
    max_images: Annotated[int, typer.Option(help="Use at most this many training images. 0: all.")] = 0,
    best: BestOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Evaluate a run's frozen features with k-nearest neighbours and a linear probe.

    Example: vitascope probe runs/cifar10-dino --labels 0.1
    """
    from vitascope.evaluation.probe import evaluate_knn_and_linear_probe
    from vitascope.evaluation.report import spell_out_split_name

    model = open_model_and_print_notes_to_stderr(run, best=best, device="auto")
    with Console(stderr=True).status(
        "Computing features. On a CPU this can take minutes; --max-images limits the images …"
    ):
        result = evaluate_knn_and_linear_probe(
            model, split, num_neighbours=neighbours, max_train_images=max_images or None, label_fraction=labels
        )
    if as_json:
        print(json.dumps(result.as_dict()))
        return
    print(f"Run: {model.run.path}")
    knn_name = f"k-nearest neighbours (k={result.neighbours})"
    rows = [
        [knn_name, format_percent(result.knn, 2), _format_interval(result.knn_interval)],
        ["linear probe", format_percent(result.linear, 2), _format_interval(result.linear_interval)],
    ]
    title = (
        f"Accuracy on {result.images:,} {spell_out_split_name(result.split)} images, "
        f"fitted on {result.known:,} training images"
    )
    create_console().print(
        create_table(title, ["classifier", "accuracy", "95 % confidence interval"], rows, right_aligned=("accuracy",))
    )
    print(f"Feature spread: {result.spread:.3f} {SPREAD_NOTE}")


def _format_interval(interval: tuple[float, float]) -> str:
    return f"{format_percent(interval[0], 2)} to {format_percent(interval[1], 2)}"
