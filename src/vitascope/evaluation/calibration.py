"""Measure calibration (does confidence match accuracy?), and fit a temperature."""

import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from vitascope.data.dataset import Labels
from vitascope.shapes import Logits

NUM_BINS = 15
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0


@dataclass(frozen=True)
class CalibrationBin:
    """The images whose confidence lies above `low` and at most at `high`."""

    low: float
    high: float
    images: int
    confidence: float | None  # mean; None where the bin is empty
    accuracy: float | None


@dataclass(frozen=True)
class Calibration:
    """Expected calibration error (Guo et al. 2017, eq. 3) and its bins."""

    ece: float
    gap: float  # mean confidence − accuracy: above 0 the model is over-confident, below 0 under-confident
    loss: float  # mean −log probability of the true class
    brier: float  # Brier score, summed over classes: 0 to 2
    bins: list[CalibrationBin]

    @property
    def description(self) -> str:
        """The expected calibration error, and whether the model is over- or under-confident, in one phrase.

        The size of the gap is given only where it differs from the error, which is the mean of the bins' gaps."""
        error, gap = f"{100 * self.ece:.1f}", f"{100 * abs(self.gap):.1f}"
        text = f"expected calibration error {error} %"
        if error == "0.0":
            return text
        if gap == "0.0":
            return f"{text}, over-confident in some bins and under-confident in others"
        direction = "over-confident" if self.gap > 0 else "under-confident"
        if gap != error:
            return f"{text}; {direction} by {gap} percentage points"
        where = self._describe_nonempty_bins()
        return f"{text}, {direction} in {where}" if self.all_gaps_have_same_sign else f"{text}, mostly {direction}"

    def _describe_nonempty_bins(self) -> str:
        """Return for example "both non-empty bins (of 15 confidence bins)"."""
        num_bins, num_nonempty = len(self.bins), sum(bin_.images > 0 for bin_ in self.bins)
        if num_nonempty == num_bins:
            return f"all {num_bins} bins"
        nonempty = {1: "the only non-empty bin", 2: "both non-empty bins"}
        return f"{nonempty.get(num_nonempty, f'all {num_nonempty} non-empty bins')} (of {num_bins} confidence bins)"

    @property
    def all_gaps_have_same_sign(self) -> bool:
        """Whether the confidence is above the accuracy in all bins, or below it in all; empty bins do not count."""
        gaps = [
            bin_.confidence - bin_.accuracy
            for bin_ in self.bins
            if bin_.confidence is not None and bin_.accuracy is not None
        ]
        return min(gaps, default=0.0) >= 0 or max(gaps, default=0.0) <= 0


@dataclass(frozen=True)
class TemperatureScaling:
    """Temperature scaling: logits are divided by `value`, so the predicted class does not change."""

    value: float
    fitted_on: int  # validation images
    ece: float  # on the evaluated images, after scaling
    loss: float
    bins: list[CalibrationBin]


def compute_calibration_and_scores(logits: Logits, labels: Labels, num_bins: int = NUM_BINS) -> Calibration:
    """Return the calibration over equal-width bins; computed in float64, because many values are close to 1."""
    probabilities = logits.double().softmax(1)
    confidence, predicted = probabilities.max(1)
    correct = (predicted == labels).double()
    truth = F.one_hot(labels, probabilities.shape[1])
    bins = _bin_by_confidence(confidence, correct, num_bins)
    gaps = [bin_.images * abs((bin_.accuracy or 0) - (bin_.confidence or 0)) for bin_ in bins]  # 0 where empty
    return Calibration(
        ece=sum(gaps) / len(labels),
        gap=(confidence.mean() - correct.mean()).item(),
        loss=F.cross_entropy(logits.double(), labels).item(),
        brier=((probabilities - truth) ** 2).sum(1).mean().item(),
        bins=bins,
    )


def _bin_by_confidence(confidence: torch.Tensor, correct: torch.Tensor, num_bins: int) -> list[CalibrationBin]:
    """Return bins of equal width; each excludes its lower and includes its upper edge."""
    bin_indices = (torch.ceil(confidence * num_bins).long() - 1).clamp(0, num_bins - 1)
    bins = []
    for index in range(num_bins):
        inside = bin_indices == index
        images = int(inside.sum())
        means = (confidence[inside].mean().item(), correct[inside].mean().item()) if images else (None, None)
        bins.append(CalibrationBin(index / num_bins, (index + 1) / num_bins, images, *means))
    return bins


def fit_temperature_within_bounds(logits: Logits, labels: Labels) -> float | None:
    """Return the temperature with the lowest loss on these images, which must not be the evaluated ones.

    Return None if the optimum lies at a bound, e.g. because all images are classified correctly.
    """
    from scipy.optimize import minimize_scalar  # half a second to import

    float64_logits = logits.double()

    def loss(log_temperature: float) -> float:
        return F.cross_entropy(float64_logits / math.exp(log_temperature), labels).item()

    low, high = math.log(MIN_TEMPERATURE), math.log(MAX_TEMPERATURE)
    optimum = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-6})
    best = min((low, high, float(optimum.x)), key=loss)  # pyright: ignore[reportAttributeAccessIssue]
    return None if best - low < 0.01 or high - best < 0.01 else math.exp(best)


def compute_temperature_scaled_calibration(
    logits: Logits, labels: Labels, temperature: float, num_fit_images: int
) -> TemperatureScaling:
    """Return the calibration of these images with a temperature that was fitted on other images."""
    scaled = compute_calibration_and_scores(logits.double() / temperature, labels)
    return TemperatureScaling(temperature, num_fit_images, scaled.ece, scaled.loss, scaled.bins)
