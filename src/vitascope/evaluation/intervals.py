"""95 % confidence interval of a fraction such as an accuracy (Wilson 1927)."""

import math
from statistics import NormalDist

Z_SCORE = NormalDist().inv_cdf(0.975)


def wilson_interval(num_correct: int, num_images: int) -> tuple[float, float]:
    """Return the Wilson interval. Unlike p ± 1.96·√(p(1−p)/n), it is valid for few images and for p near 1."""
    if not num_images:
        return 0.0, 1.0
    share, square = num_correct / num_images, Z_SCORE * Z_SCORE
    centre = (share + square / (2 * num_images)) / (1 + square / num_images)
    half = (
        Z_SCORE / (1 + square / num_images) * math.sqrt(share * (1 - share) / num_images + square / (4 * num_images**2))
    )
    low, high = centre - half, centre + half
    return (0.0 if num_correct == 0 else low), (1.0 if num_correct == num_images else high)
