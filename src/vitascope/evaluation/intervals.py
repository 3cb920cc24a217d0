"""95 % confidence interval of a fraction such as an accuracy (Wilson 1927)."""

import math
from statistics import NormalDist
from typing import NamedTuple

Z_SCORE = NormalDist().inv_cdf(0.975)


class Interval(NamedTuple):
    low: float
    high: float


def wilson_interval(num_correct: int, num_images: int) -> Interval:
    """Return the Wilson interval. Unlike p ± 1.96·√(p(1−p)/n), it is valid for few images and for p near 1."""
    if not num_images:
        return Interval(0.0, 1.0)
    fraction, square = num_correct / num_images, Z_SCORE * Z_SCORE
    centre = (fraction + square / (2 * num_images)) / (1 + square / num_images)
    half_width = (
        Z_SCORE
        / (1 + square / num_images)
        * math.sqrt(fraction * (1 - fraction) / num_images + square / (4 * num_images**2))
    )
    low, high = centre - half_width, centre + half_width
    return Interval(0.0 if num_correct == 0 else low, 1.0 if num_correct == num_images else high)
