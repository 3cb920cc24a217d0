"""Draw figures from numbers, with one style and palette; independent of the models."""

from typing import NamedTuple

# Okabe & Ito's palette, readable for colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
CROSS_ENTROPY = "cross-entropy"
SEQUENTIAL, DIVERGING = "viridis", "RdBu_r"


class CurvePanel(NamedTuple):
    """A panel of the learning curves besides loss and accuracy."""

    title: str
    unit: str
    metric_by_label: dict[str, str]  # label of a line -> column of metrics.jsonl
    caption: str
