"""Evaluate a model on images: accuracy, calibration, scores per class, worst errors and robustness."""

import time
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitascope.data.dataset import Labels, Split, UInt8Images
from vitascope.data.statistics import compute_data_hash
from vitascope.errors import UserError
from vitascope.evaluation.calibration import compute_calibration, evaluate_temperature, fit_temperature
from vitascope.evaluation.eval_data import EvalData, load_run_split, open_eval_data
from vitascope.evaluation.report import (
    Evaluation,
    Misclassification,
    compute_class_scores,
    compute_confusion_matrix,
    describe_reduction,
)
from vitascope.evaluation.robustness import measure_robustness
from vitascope.model.vit import VisionTransformer
from vitascope.run.directory import Run
from vitascope.run.machine import get_device_names, get_machine_name
from vitascope.run.test_set_log import log_test_set_result, log_test_set_use, read_test_set_log
from vitascope.run.wall_clock import EVALUATE, begin_task, is_trained_by_this_process, measure_task_seconds
from vitascope.shapes import Logits
from vitascope.training.hardware import make_inference_hardware
from vitascope.training.scoring import check_views, choose_batch_size, compute_logits
from vitascope.weights.model_info import ModelInfo

MAX_WORST_ERRORS = 24
UNSCALED = "No temperature scaling"


def evaluate(
    model: VisionTransformer,
    run: Run,
    model_info: ModelInfo,
    *,
    split: str | None = None,
    data: str | None = None,
    views: int = 1,
    weights_label: str = "last",
    robust: bool = True,
) -> Evaluation:
    """Evaluate in float32 on the model's device. Each use of test images is logged in the run, before and after."""
    check_views(run.recipe, views)
    choice = open_eval_data(run, model_info, split, data)
    value, words = fit_validation_temperature(model, run, model_info, choice, views)
    tie = _log_test_set_use(model, run, choice, views, weights_label) if choice.split in ("test", "all") else None
    logits, seconds, set_up, wall = _compute_logits_timed(model, run, choice.samples.images, model_info, views)
    labels, classes = choice.samples.labels, model_info.classes
    counts = compute_confusion_matrix(labels, logits.argmax(1), len(classes))
    found = Evaluation(
        run=run,
        eval_data=choice,
        classes=classes,
        views=views,
        weights_label=weights_label,
        test_use_count=next((known.use_count for known in read_test_set_log(run) if known.entry_id == tie), None),
        seconds=seconds,
        set_up_seconds=set_up,
        wall_seconds=wall,
        top5=top_k_accuracy(logits, labels, 5),
        confusion_matrix=counts,
        calibration=compute_calibration(logits, labels),
        temperature=evaluate_temperature(logits, labels, *value) if value else None,
        temperature_note=words,
        per_class=compute_class_scores(counts, classes),
        worst_errors=find_worst_errors(logits, choice.samples, classes),
    )
    if tie is not None:  # before the slow part, so that an interrupted evaluation has its result
        log_test_set_result(run, tie, _build_result_log_entry(found))
    declines = (
        measure_robustness(model, choice.samples, model_info.preparation, make_inference_hardware(model), views)
        if robust
        else {}
    )
    return replace(found, reduction=describe_reduction(model_info.model), robustness=declines)


def fit_validation_temperature(
    model: VisionTransformer, run: Run, model_info: ModelInfo, eval_data: EvalData, views: int
) -> tuple[tuple[float, int] | None, str]:
    """Return the temperature and the number of validation images, and a text; or None and the reason."""
    if eval_data.is_run_data and eval_data.split == "val":
        return None, f"{UNSCALED}: it would be fitted on these same images."
    try:
        watched = load_run_split(run, model_info, "val")
    except UserError as error:
        return None, f"{UNSCALED}: {error}"
    if watched is None:
        return None, f"{UNSCALED}: the run has no validation images (data.validation=0)."
    seen = compute_logits(
        model, watched.images, model_info.preparation, make_inference_hardware(model), num_views=views
    )
    value = fit_temperature(seen, watched.labels)
    if value is None:
        right = bool((seen.argmax(1) == watched.labels.to(seen.device)).all())
        why = "all correct" if right else "no better than random guessing"
        return None, f"{UNSCALED}: predictions on the {len(watched):,} validation images are {why}."
    return (value, len(watched)), f"fitted on {len(watched):,} validation images"


def _log_test_set_use(model: VisionTransformer, run: Run, eval_data: EvalData, views: int, weights_label: str) -> int:
    return log_test_set_use(
        run,
        data=eval_data.data_name,
        split=eval_data.split,
        images=len(eval_data.samples),
        views=views,
        weights=weights_label,
        machine=get_machine_name(get_device_names(), make_inference_hardware(model).device),
        data_hash=compute_data_hash(eval_data.samples.images, eval_data.samples.labels),
    )


def top_k_accuracy(logits: Logits, labels: Labels, k: int) -> float:
    """Return the top-`count` accuracy: the fraction of images whose class is among the `count` most probable."""
    likely = logits.topk(min(k, logits.shape[1]), dim=1).indices
    return (likely == labels[:, None]).any(1).double().mean().item()


def find_worst_errors(
    logits: Logits, samples: Split, classes: list[str], max_errors: int = MAX_WORST_ERRORS
) -> list[Misclassification]:
    """Return the wrong predictions with the lowest probability of the true class, worst first."""
    shares = logits.double().softmax(1)
    said = logits.argmax(1)
    truth = shares.gather(1, samples.labels[:, None])[:, 0]
    wrong = (said != samples.labels).nonzero().flatten()
    order = wrong[torch.argsort(truth[wrong], stable=True)][:max_errors].tolist()
    return [
        Misclassification(
            index,
            samples.file_paths[index] if samples.file_paths else None,
            classes[int(samples.labels[index])],
            classes[int(said[index])],
            shares[index, said[index]].item(),
            truth[index].item(),
        )
        for index in order
    ]


def _build_result_log_entry(evaluation: Evaluation) -> dict[str, Any]:
    """Return what `vitascope record` reads from the log of test set uses."""
    wall = {}
    if evaluation.wall_seconds is not None:
        wall = {
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
        **wall,
    }


class TimedLogits(NamedTuple):
    """Logits and their computing time. On a GPU, a first empty batch loads the kernels; it counts as set-up."""

    logits: Tensor
    seconds: float
    set_up_seconds: float
    wall_seconds: float | None  # from the process's start


def _compute_logits_timed(
    model: VisionTransformer, run: Run, images: UInt8Images, model_info: ModelInfo, views: int
) -> TimedLogits:
    begin_task(EVALUATE, run)
    hardware, start = make_inference_hardware(model), time.monotonic()
    if hardware.device == "cuda":
        compute_logits(
            model,
            torch.zeros_like(images[: choose_batch_size(model, hardware.device)]),
            model_info.preparation,
            hardware,
        )
    ready = time.monotonic()
    logits = compute_logits(model, images, model_info.preparation, hardware, num_views=views)
    return TimedLogits(logits, time.monotonic() - ready, ready - start, measure_task_seconds(run))
