"""Draw figures from numbers, with one style and palette; independent of the models."""

# Okabe & Ito's palette, readable for colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LOSS_NAMES = {  # train.objective -> its loss, for labels
    "classify": "cross-entropy",
    "mae": "mean squared error of hidden patches",
    "dino": "cross-entropy of teacher and student",
}
SEQUENTIAL, DIVERGING = "viridis", "RdBu_r"
