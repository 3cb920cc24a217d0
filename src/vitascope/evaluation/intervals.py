"""95 % confidence interval of a fraction such as an accuracy (Wilson 1927)."""

import math
from statistics import NormalDist

Z = NormalDist().inv_cdf(0.975)


def wilson(right: int, images: int) -> tuple[float, float]:
    """Return the Wilson interval. Unlike p ± 1.96·√(p(1−p)/n), it is valid for few images and for p near 1."""
    if not images:
        return 0.0, 1.0
    share, square = right / images, Z * Z
    centre = (share + square / (2 * images)) / (1 + square / images)
    half = Z / (1 + square / images) * math.sqrt(share * (1 - share) / images + square / (4 * images**2))
    low, high = centre - half, centre + half
    return (0.0 if right == 0 else low), (1.0 if right == images else high)
