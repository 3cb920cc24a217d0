"""Evaluate a model on images: accuracy, calibration, scores per class, worst errors and robustness."""

import time
from dataclasses import replace
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from vitascope.data.dataset import Dataset, Labels, UInt8Images
from vitascope.evaluation.calibration import Calibration, compute_calibration_and_scores
from vitascope.evaluation.coverage import (
    DEFAULT_TARGET_ERROR,
    Coverage,
    SuggestedThreshold,
    check_target_error,
    compute_coverage_rows,
    find_lowest_threshold,
    find_min_error_below,
)
from vitascope.evaluation.eval_data import EvalData, load_eval_data
from vitascope.evaluation.report import (
    ClassScore,
    Evaluation,
    Misclassification,
    compute_class_scores,
    compute_confusion_matrix,
)
from vitascope.evaluation.robustness import ProgressReporter, measure_accuracy_under_corruptions
from vitascope.evaluation.temperature import (
    FittedTemperature,
    ValidationLogits,
    compute_validation_logits_or_give_reason,
    fit_and_store_run_temperature,
)
from vitascope.inference.classifier import Classifier
from vitascope.inference.scoring import check_views_match_training, choose_inference_batch_size
from vitascope.run.machine import (
    EVALUATE,
    get_device_names_by_type,
    get_device_or_cpu_name,
    is_trained_by_this_process,
    measure_process_wall_seconds_if_alone,
    record_task_start_in_this_process,
)
from vitascope.run.temperature import RunTemperature
from vitascope.run.test_set_log import EntryId, add_test_use_entry, log_test_set_result, read_test_set_log
from vitascope.shapes import Logits

MAX_WORST_ERRORS = 24


def evaluate_and_log_test_use(
    classifier: Classifier,
    split: str | None = None,
    *,
    data: str | None = None,
    views: int = 1,
    robustness: bool = False,
    target_error: float = DEFAULT_TARGET_ERROR,
    report_progress: ProgressReporter | None = None,
) -> Evaluation:
    """Evaluate on the model's device. Each use of test images is logged in the run, before and after.

    `report_progress` is called during the corruption tests."""
    check_views_match_training(classifier.run.recipe, views)
    check_target_error(target_error)
    eval_data = load_eval_data(classifier.run, classifier.info, split, data)
    evaluation = _evaluate_uncorrupted_and_log_use(classifier, eval_data, views, target_error)
    if not robustness:
        return evaluation
    curves = measure_accuracy_under_corruptions(classifier, eval_data.samples, views, report_progress)
    return replace(evaluation, robustness=curves)


def _evaluate_uncorrupted_and_log_use(
    classifier: Classifier, eval_data: EvalData, views: int, target_error: float
) -> Evaluation:
    run = classifier.run
    validation = compute_validation_logits_or_give_reason(classifier, eval_data, views)
    fitted = FittedTemperature.fit_or_give_reason(validation)
    entry_id = _add_test_use_entry_if_test_images(classifier, eval_data, views)
    timed = _compute_and_time_logits(classifier, eval_data.samples.images, views)
    if eval_data.is_run_validation:  # their temperature is stored, but not reported: it fits these images too well
        validation = ValidationLogits(timed.logits, eval_data.samples.labels)
    run_temperature = fit_and_store_run_temperature(classifier, validation, fitted, views)
    evaluation = Evaluation(
        run=run,
        eval_data=eval_data,
        classes=classifier.classes,
        views=views,
        weights_label=classifier.weights_label,
        test_use_count=next((entry.use_count for entry in read_test_set_log(run) if entry.entry_id == entry_id), None),
        seconds=timed.seconds,
        set_up_seconds=timed.set_up_seconds,
        wall_seconds=timed.wall_seconds,
        reduction=classifier.token_reduction_description,
        is_linear_probe=classifier.is_linear_probe,
        temperature=fitted.compute_scaled_calibration(timed.logits, eval_data.samples.labels),
        temperature_note=fitted.note,
        run_temperature=run_temperature,
        coverage=_compute_coverage(timed.logits, eval_data, validation, run_temperature, target_error),
        **_compute_evaluation_scores(timed.logits, eval_data.samples, classifier.classes),
    )
    if entry_id is not None:  # before the slow part, so that an interrupted evaluation has its result
        log_test_set_result(run, entry_id, _build_result_log_entry(evaluation))
    return evaluation


class Scores(TypedDict):
    """The fields of `Evaluation` that depend only on the logits and labels."""

    top5: float
    confusion_matrix: Tensor
    calibration: Calibration
    per_class: dict[str, ClassScore]
    worst_errors: list[Misclassification]


def _compute_evaluation_scores(logits: Logits, samples: Dataset, classes: list[str]) -> Scores:
    confusion_matrix = compute_confusion_matrix(samples.labels, logits.argmax(1), len(classes))
    return {
        "top5": top_k_accuracy(logits, samples.labels, 5),
        "confusion_matrix": confusion_matrix,
        "calibration": compute_calibration_and_scores(logits, samples.labels),
        "per_class": compute_class_scores(confusion_matrix, classes),
        "worst_errors": find_errors_with_lowest_true_probability(logits, samples, classes),
    }


def _compute_coverage(
    logits: Logits,
    eval_data: EvalData,
    validation: ValidationLogits | str,
    run_temperature: RunTemperature | None,
    target_error: float,
) -> Coverage:
    """Return coverage and accuracy by threshold. The suggested threshold is chosen on the validation images, or on the
    evaluated images if there are none."""
    temperature = run_temperature.value if run_temperature else 1.0
    rows = compute_coverage_rows(logits, eval_data.samples.labels, temperature)
    if isinstance(validation, str):
        split, count, rows_to_choose_from = eval_data.split, len(eval_data.samples), rows
    else:
        split, count = "val", len(validation.labels)
        rows_to_choose_from = compute_coverage_rows(*validation, temperature)
    chosen = find_lowest_threshold(rows_to_choose_from, target_error)
    min_error_below = find_min_error_below(rows_to_choose_from, chosen.threshold) if chosen else None
    suggestion = SuggestedThreshold(target_error, split, count, chosen, min_error_below)
    return Coverage(temperature, rows, suggestion)


def _add_test_use_entry_if_test_images(classifier: Classifier, eval_data: EvalData, views: int) -> EntryId | None:
    """Log a use of test images before it starts, and return its id; None for training and validation images."""
    if eval_data.split not in ("test", "all"):
        return None
    return add_test_use_entry(
        classifier.run,
        data=eval_data.data_name,
        split=eval_data.split,
        images=len(eval_data.samples),
        views=views,
        weights=classifier.weights_label,
        machine=get_device_or_cpu_name(get_device_names_by_type(), classifier.device.type),
        data_hash=eval_data.samples.fingerprint(),
    )


def top_k_accuracy(logits: Logits, labels: Labels, k: int) -> float:
    """Return the fraction of images whose class is among the `k` most probable."""
    top_classes = logits.topk(min(k, logits.shape[1]), dim=1).indices
    return (top_classes == labels[:, None]).any(1).double().mean().item()


def find_errors_with_lowest_true_probability(
    logits: Logits, samples: Dataset, classes: list[str], max_errors: int = MAX_WORST_ERRORS
) -> list[Misclassification]:
    """Return the wrong predictions with the lowest probability of the true class, worst first."""
    probabilities = logits.double().softmax(1)
    predicted = logits.argmax(1)
    true_probabilities = probabilities.gather(1, samples.labels[:, None])[:, 0]
    wrong_indices = (predicted != samples.labels).nonzero().flatten()
    order = wrong_indices[torch.argsort(true_probabilities[wrong_indices], stable=True)][:max_errors].tolist()
    return [
        Misclassification(
            index,
            samples.file_paths[index] if samples.file_paths else None,
            classes[int(samples.labels[index])],
            classes[int(predicted[index])],
            probabilities[index, predicted[index]].item(),
            true_probabilities[index].item(),
        )
        for index in order
    ]


def _build_result_log_entry(evaluation: Evaluation) -> dict[str, Any]:
    """Return what `vitascope record` reads from the log of test set uses."""
    wall_fields = {}
    if evaluation.wall_seconds is not None:
        wall_fields = {
            "wall_seconds": round(evaluation.wall_seconds, 2),
            "wall_includes_training": is_trained_by_this_process(evaluation.run),
        }
    return {
        "accuracy": evaluation.accuracy,
        "loss": evaluation.loss,
        "top5": evaluation.top5,
        "ece": evaluation.ece,
        "recall": {name: row.recall for name, row in evaluation.per_class.items()},
        "seconds": round(evaluation.seconds, 3),
        "set_up_seconds": round(evaluation.set_up_seconds, 3),
        **wall_fields,
    }


class TimedLogits(NamedTuple):
    """Logits and their computing time. On a GPU, a first empty batch loads the kernels; it counts as set-up."""

    logits: Tensor
    seconds: float
    set_up_seconds: float
    wall_seconds: float | None  # from the process's start


def _compute_and_time_logits(classifier: Classifier, images: UInt8Images, views: int) -> TimedLogits:
    record_task_start_in_this_process(EVALUATE, classifier.run)
    start = time.monotonic()
    if classifier.device.type == "cuda":
        batch_size = choose_inference_batch_size(classifier.model, "cuda")
        classifier.compute_logits_of_stored_images(torch.zeros_like(images[:batch_size]))
    after_set_up = time.monotonic()
    logits = classifier.compute_logits_of_stored_images(images, views=views)
    return TimedLogits(
        logits,
        time.monotonic() - after_set_up,
        after_set_up - start,
        measure_process_wall_seconds_if_alone(classifier.run),
    )
