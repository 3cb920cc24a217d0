"""`vitascope explain` and `report`: explain predictions and measure how faithful each explanation is."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from vitascope.cli.console import (
    create_console,
    create_table,
    format_duration,
    open_model_and_print_notes_to_stderr,
    print_notes_to_stderr,
)
from vitascope.cli.evaluate import BestOption, ModelRef, print_unreadable_files
from vitascope.errors import UserError, format_count
from vitascope.number_format import format_number, format_percent

if TYPE_CHECKING:
    from rich.progress import Progress

    from vitascope.explain.figures import ExplainReport, ExplainRequest
    from vitascope.explain.maps import PatchPosition
    from vitascope.inference.classifier import Classifier
    from vitascope.inference.prediction import LoadedImages

Analysis = Annotated[bool, typer.Option(help="Also analyse heads, blocks and features on validation images.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print only JSON: predictions, maps and faithfulness.")]
MethodsOption = Annotated[
    str | None,
    typer.Option(help="all, or methods such as rollout,occlusion. Default: all, without occlusion above 64 patches."),
]
QueryOption = Annotated[
    str | None,
    typer.Option(help="ROW,COLUMN of the query patch, from 1. Default: the class token, or the mean over all patches."),
]
MAX_LISTED_FILES = 30
FIGURE_DESCRIPTIONS = {  # start of the file name -> what the figure shows
    "explanations-": "heat maps of the methods",
    "heads-": "attention maps of the heads",
    "lens-": "logit lens: the class probability by block and patch",
    "faithfulness": "deletion and insertion curves",
    "analysis-blocks": "statistics of heads and blocks",
    "analysis-filters": "filters of the patch embedding",
    "analysis-positions": "position embeddings",
    "analysis-colours": "features of the patches, as colours",
    "analysis-tsne": "t-SNE of the features",
}


def explain(
    run: ModelRef,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE…", help="Image files or folders of images.")],
    out: Annotated[Path | None, typer.Option(help="Folder for figures and numbers. Default: explained/.")] = None,
    methods: MethodsOption = None,
    blocks: Annotated[str | None, typer.Option(help="Blocks to draw, from 1, such as 1,4,8. Default: all.")] = None,
    heads: Annotated[str | None, typer.Option(help="Heads to draw, from 1. Default: all.")] = None,
    query: QueryOption = None,
    target: Annotated[str | None, typer.Option(help="Class name or index to explain. Default: the prediction.")] = None,
    best: BestOption = False,
    analysis: Analysis = True,
    split: Annotated[str | None, typer.Option(help="Images for --analysis: val (default), train or test.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Explain predictions: attention maps, attribution methods, and how faithful each method is.

    Example: vitascope explain runs/digits photo.png
    """
    from vitascope.explain.figures import ExplainRequest
    from vitascope.explain.maps import get_token_layout
    from vitascope.explain.methods import METHODS, list_default_methods
    from vitascope.inference.prediction import read_image_files_and_folders

    method_names, query_patch = _parse_methods(methods), _parse_query_patch(query)
    subject = open_model_and_print_notes_to_stderr(run, best=best)
    loaded = read_image_files_and_folders(images, subject.stored_shape)
    class_index = None if target is None else subject.find_class_index(target)
    num_patches = get_token_layout(subject.model).num_patches
    method_names = method_names or list_default_methods(num_patches)
    block_numbers, head_numbers = _parse_integers(blocks, "--blocks"), _parse_integers(heads, "--heads")
    request = ExplainRequest(method_names, block_numbers, head_numbers, query_patch, class_index)
    with TemporaryDirectory() as temporary_folder:  # --json without --out writes no files
        folder = out or (Path(temporary_folder) if as_json else Path("explained"))
        report = _write_explanations_showing_progress(subject, loaded, request, folder, analysis, split)
    print_unreadable_files(loaded.unreadable_files)
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        _print_predictions_faithfulness_and_files(report, len(loaded.images), folder, num_patches)
        left_out = [] if methods else [name for name in METHODS if name not in method_names]
        _print_methods_left_out(report, left_out, len(loaded.images), num_patches)


def _parse_query_patch(query: str | None) -> "PatchPosition | None":
    from vitascope.explain.maps import PatchPosition

    position = _parse_integers(query, "--query")
    if position is not None and len(position) != 2:
        raise UserError(f"--query {query} must be ROW,COLUMN, such as 3,5.")
    return PatchPosition(*position) if position else None


def _parse_methods(method_list: str | None) -> list[str] | None:
    """Return the chosen methods; None if they are not given."""
    from vitascope.explain.methods import METHODS, get_method_key

    if method_list == "all":
        return list(METHODS)
    return None if method_list is None else [get_method_key(name) for name in method_list.split(",")]


def _write_explanations_showing_progress(
    classifier: "Classifier",
    images: "LoadedImages",
    request: "ExplainRequest",
    out_folder: Path,
    with_analysis: bool,
    analysis_split: str | None,
) -> "ExplainReport":
    from vitascope.explain.faithfulness import count_forward_passes
    from vitascope.explain.maps import get_token_layout
    from vitascope.explain.write_explanations import write_explanations_and_statistics
    from vitascope.run.temperature import describe_unscaled_probabilities

    note = describe_unscaled_probabilities(classifier.find_temperature())
    print_notes_to_stderr([note] if note else [])
    num_images = len(images.images)
    num_passes = count_forward_passes(request.methods, get_token_layout(classifier.model).num_patches, num_images)
    with _create_progress_bar() as progress:
        task = progress.add_task(f"Explaining {format_count(num_images, 'image')}", total=num_passes)
        hook = classifier.model.register_forward_hook(lambda _, inputs, __: progress.advance(task, len(inputs[0])))

        def report_step(step: str) -> None:
            progress.update(task, description=step)
            if progress.disable:  # without a terminal, one line per step
                print(step, file=sys.stderr, flush=True)

        try:
            request = replace(request, report_step=report_step)
            return write_explanations_and_statistics(
                classifier, images, request, out_folder, analysis=with_analysis, split=analysis_split
            )
        finally:
            hook.remove()


def _create_progress_bar() -> "Progress":
    """Create a bar on stderr, which is not drawn without a terminal."""
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _print_methods_left_out(
    report: "ExplainReport", method_names: list[str], num_images: int, num_patches: int
) -> None:
    """Name the slow methods that were not computed, and the time that they would take."""
    from vitascope.explain.faithfulness import count_forward_passes
    from vitascope.explain.methods import get_method_label

    for name in method_names:
        num_passes = count_forward_passes([name], num_patches, num_images) - count_forward_passes(
            [], num_patches, num_images
        )
        print(
            f"Left out because it is slow with {num_patches} patches: {get_method_label(name)} ({num_passes:,} forward "
            f"passes, about {format_duration(num_passes * report.seconds_per_pass)}). To add it: --methods all"
        )


def _print_predictions_faithfulness_and_files(
    report: "ExplainReport", num_images: int, out_folder: Path, num_patches: int
) -> None:
    from vitascope.explain.faithfulness import describe_curve_sampling
    from vitascope.explain.methods import describe_method_or_random, get_method_label

    rows = [
        [
            get_method_label(row.method),
            format_number(row.insertion - row.deletion, "+z.3f"),
            f"{row.deletion:.3f}",
            f"{row.insertion:.3f}",
        ]
        for row in report.faithfulness
    ]
    for result in report.image_results[:MAX_LISTED_FILES]:
        explained = f", explained class: {result['explained']}" if result["explained"] != result["answer"] else ""
        print(f"{result['image']}: prediction {result['answer']} ({format_percent(result['probability'])}){explained}")
    if len(report.image_results) > MAX_LISTED_FILES:
        print(f"… and {len(report.image_results) - MAX_LISTED_FILES} more (explanations.json)")
    title = f"Faithfulness of the methods, best first ({format_count(num_images, 'image')})"
    columns = ["method", "insertion − deletion", "deletion AUC ↓", "insertion AUC ↑"]
    create_console().print(create_table(title, columns, rows, right_aligned=set(columns[1:])))
    print(
        "AUC: area under the curve of the explained class's probability while patches are changed, most important\n"
        "first (↓ lower is better, ↑ higher is better). Deletion: patches turn grey (the mean that the\n"
        "normalisation subtracts). Insertion: patches of a blurred image are restored. Insertion − deletion: higher\n"
        "is better. Even a random order can score above 0, so compare each method with the row 'random', on\n"
        "many images."
    )
    if sampling_text := describe_curve_sampling(num_patches):
        print(sampling_text)
    for row in report.faithfulness:
        print(f"  {get_method_label(row.method):<21}{describe_method_or_random(row.method)}")
    files = [_format_figure_path_with_description(path) for path in report.files if path.suffix == ".png"]
    num_unlisted = len(files) - MAX_LISTED_FILES
    print("\n".join(files[:MAX_LISTED_FILES]) + (f"\n… and {num_unlisted} more" if num_unlisted > 0 else ""))
    print(f"All figures (PNG and SVG) and numbers (explanations.json): {out_folder}")


def _format_figure_path_with_description(path: Path) -> str:
    """Return the path and what the figure shows."""
    matching = (text for prefix, text in FIGURE_DESCRIPTIONS.items() if path.stem.startswith(prefix))
    description = next(matching, None)
    return f"{path}: {description}" if description else str(path)


def _parse_integers(comma_separated: str | None, option_name: str) -> list[int] | None:
    if comma_separated is None:
        return None
    try:
        return [int(text) for text in comma_separated.split(",")]
    except ValueError as error:
        raise UserError(f"{option_name} {comma_separated} must be whole numbers separated by commas.") from error


def write_html_report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or runs/RECIPE for its newest run.")],
    split: Annotated[
        str | None,
        typer.Option(
            help="val (default; training images if the run has no validation images), train or test. Each use of the "
            "test set is logged in the run."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output file. Default: RUN/report.html.")] = None,
) -> None:
    """Write one HTML page about a run: curves, errors, analysis and interactive attention maps."""
    from vitascope.explain.report import evaluate_and_write_html_report

    with Console(stderr=True).status("Evaluating the run and analysing the model …"):
        report_path = evaluate_and_write_html_report(run, split, out)
    print(
        f"Report: {report_path} ({report_path.stat().st_size / 2**20:.1f} MiB). Open it in a browser. It works offline."
    )
