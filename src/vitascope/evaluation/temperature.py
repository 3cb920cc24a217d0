"""Fit a temperature on a run's validation images, and store it in the run for `predict`."""

from typing import NamedTuple

from torch.nn import functional as F

from vitascope.data.dataset import Labels
from vitascope.errors import UserError
from vitascope.evaluation.calibration import (
    TemperatureScaling,
    compute_temperature_scaled_calibration,
    fit_temperature_within_bounds,
)
from vitascope.evaluation.eval_data import EvalData
from vitascope.inference.classifier import Classifier
from vitascope.run.images import load_run_split_if_any
from vitascope.run.temperature import RunTemperature, store_run_temperature_if_possible
from vitascope.shapes import Logits

UNSCALED = "No temperature scaling"


class ValidationLogits(NamedTuple):
    """Logits and labels of the run's validation images."""

    logits: Logits
    labels: Labels


def compute_validation_logits_or_give_reason(
    classifier: Classifier, eval_data: EvalData, views: int
) -> ValidationLogits | str:
    """Return a sentence if the evaluated images are the validation images, or if there are no validation images."""
    if eval_data.is_run_validation:
        return "The metrics are without temperature scaling, because the temperature is fitted on these same images."
    try:
        validation = load_run_split_if_any(classifier.run, classifier.info, "val")
    except UserError as error:
        return f"{UNSCALED}: {error}"
    if validation is None:
        return f"{UNSCALED}: the run has no validation images (data.validation=0)."
    logits = classifier.compute_logits_of_stored_images(validation.images, views=views)
    return ValidationLogits(logits, validation.labels)


class FittedTemperature(NamedTuple):
    temperature: float | None
    num_fit_images: int
    note: str  # the images it was fitted on, or a sentence: why there is none

    @classmethod
    def fit_or_give_reason(cls, validation: ValidationLogits | str) -> "FittedTemperature":
        if isinstance(validation, str):
            return cls(None, 0, validation)
        logits, labels = validation
        temperature = fit_temperature_within_bounds(logits, labels)
        if temperature is None:
            all_correct = bool((logits.argmax(1) == labels.to(logits.device)).all())
            reason = "all correct" if all_correct else "no better than random guessing"
            note = f"{UNSCALED}: predictions on the {len(labels):,} validation images are {reason}."
            return cls(None, len(labels), note)
        return cls(temperature, len(labels), f"fitted on {len(labels):,} validation images")

    def compute_scaled_calibration(self, logits: Logits, labels: Labels) -> TemperatureScaling | None:
        if self.temperature is None:
            return None
        return compute_temperature_scaled_calibration(logits, labels, self.temperature, self.num_fit_images)


def fit_and_store_run_temperature(
    classifier: Classifier, validation: ValidationLogits | str, fitted: FittedTemperature, views: int
) -> RunTemperature | None:
    """Return the temperature that `predict` applies from now on; None if there are no validation images, or if it
    cannot be stored.

    `fitted`: the temperature that is reported; without one, it is fitted here. A temperature that does not lower the
    loss of the validation images is replaced by 1."""
    if isinstance(validation, str):
        return None
    if not fitted.num_fit_images:
        fitted = FittedTemperature.fit_or_give_reason(validation)
    value, logits = fitted.temperature or 1.0, validation.logits.double()
    loss, scaled_loss = (F.cross_entropy(logits / divisor, validation.labels).item() for divisor in (1.0, value))
    if scaled_loss >= loss:
        value, scaled_loss = 1.0, loss
    temperature = RunTemperature(value, len(validation.labels), loss, scaled_loss)
    is_stored = store_run_temperature_if_possible(classifier.run, classifier.weights_label, views, temperature)
    return temperature if is_stored else None
