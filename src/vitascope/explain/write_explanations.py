"""Write all output of `vitascope explain`: figures, and explanations.json with the numbers."""

import json
from pathlib import Path

from vitascope.evaluation.prediction import EXPLANATIONS_FILE, LoadedImages
from vitascope.explain.figures import ExplainReport, ExplainRequest, write_explanation_figures
from vitascope.explain.model_figures import load_preprocessed_run_images, write_model_statistics_if_possible
from vitascope.explain.over_time import write_snapshot_figures_if_any
from vitascope.explain.subject import ExplainedModel
from vitascope.run.files import write_atomically


def write_explanations_and_statistics(
    subject: ExplainedModel,
    loaded_images: LoadedImages,
    request: ExplainRequest,
    output_folder: Path,
    *,
    analysis: bool = True,
    split: str | None = None,
) -> ExplainReport:
    """Write everything; `analysis` adds statistics of the model on the run's images of `split` and over its epochs."""
    # Loaded first, so that a wrong split is reported before anything is drawn.
    run_images = load_preprocessed_run_images(subject, split) if analysis else None
    report = write_explanation_figures(subject, loaded_images, request, output_folder)
    if analysis:
        report.files += write_model_statistics_if_possible(subject, run_images, loaded_images.images, output_folder)
        report.files += write_snapshot_figures_if_any(
            subject, subject.preprocessing(loaded_images.images), output_folder
        )
    report.files.append(output_folder / EXPLANATIONS_FILE)
    write_atomically(output_folder / EXPLANATIONS_FILE, json.dumps(report.as_dict(), indent=1, allow_nan=False) + "\n")
    return report
