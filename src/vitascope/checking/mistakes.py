"""The mistakes that can be named: what each is, and a hint that does not give the solution away."""

from typing import NamedTuple


class Mistake(NamedTuple):
    """One line of what it is, one line of where to look."""

    meaning: str
    hint: str


MISTAKES = {
    "missing-scale": Mistake(
        "The scores are not scaled before the softmax.",
        "Dot products of long vectors are large. What does the paper do to them before the softmax, and why?",
    ),
    "scale-by-width": Mistake(
        "The scale is made from the full width instead of one head's.",
        "How many numbers are multiplied and added up in one dot product of one head?",
    ),
    "scale-not-sqrt": Mistake(
        "The scores are divided by the width itself, not by its square root.",
        "How does the spread of a dot product grow with its length: like d, or slower?",
    ),
    "softmax-over-queries": Mistake(
        "The softmax runs over the queries.",
        "Add up your map's weights for one query. Whose weights should sum to one?",
    ),
    "softmax-over-heads": Mistake(
        "The softmax runs over the heads.",
        "Heads do not compete with each other. Along which axis do your weights sum to one?",
    ),
    "feature-attention": Mistake(
        "The map is between features, not between tokens.",
        "Print the map's shape: it should count tokens twice. Which axis did the product sum over?",
    ),
    "weight-not-transposed": Mistake(
        "A weight is stored as output × input and used as if it were input × output.",
        "What is the shape of nn.Linear(2, 3).weight? Try your product with a matrix that is not square. "
        "(Are your weights input × output? Then say so in the docstring.)",
    ),
    "heads-not-transposed": Mistake(
        "The heads are cut out, but their axis is not moved before the tokens'.",
        "Print the shape just before the product of queries and keys. Which two axes does @ multiply?",
    ),
    "heads-joined-wrongly": Mistake(
        "The heads' outputs are put together in the wrong order.",
        "After joining, whose numbers are the first few features of token 0? They should be head 0's, of token 0.",
    ),
    "missing-output-projection": Mistake(
        "The joined heads are not projected.",
        "What lets the heads' results mix? nn.MultiheadAttention has one more layer after joining.",
    ),
    "mask-inverted": Mistake(
        "The mask hides what should be seen, and shows what should be hidden.",
        "Which tokens may the first one look at? Print its row of the map. "
        "(True means may look, unless you say otherwise.)",
    ),
    "mask-after-softmax": Mistake(
        "The mask is applied after the softmax.",
        "Add up one row of the masked map. Does it still sum to one?",
    ),
    "mask-too-small": Mistake(
        "Masked scores get a finite number that leaks.",
        "After the softmax, are the masked weights exactly zero, also when their scores are very high?",
    ),
    "dropout-in-eval": Mistake(
        "It gives other numbers each time, in eval mode too.",
        "Call it twice with the same input after model.eval(). Who tells your dropout that training is over?",
    ),
    "query-key-swapped": Mistake(
        "Queries and keys have changed places.",
        "Row i of the map belongs to which token: the one that asks, or the one that is looked at?",
    ),
    "missing-residual": Mistake(
        "What came in is not added to what comes out.",
        "If attention gave zeros everywhere, what should the block return?",
    ),
    "norm-after": Mistake(
        "The normalisation stands after the layer instead of before it.",
        "Compare equations 2 and 3 of Dosovitskiy et al.: what is normalised, and what is left as it is?",
    ),
    "missing-norm": Mistake(
        "A normalisation is missing or unused.",
        "Count the normalisations that really run: one before attention, one before the feed-forward layer.",
    ),
    "class-token-at-end": Mistake(
        "The class token stands, or is looked for, at the end.",
        "Where in the sequence is the class token, and which token does the head read?",
    ),
    "position-misplaced": Mistake(
        "The positions are added in the wrong place, shifted, or not at all.",
        "Which row of the table belongs to the class token, and which to the first patch?",
    ),
    "patches-in-column-order": Mistake(
        "The patches run down the columns instead of along the rows.",
        "Number the pixels of a small image and print patch 1. Is it right of patch 0, or below it?",
    ),
    "pixels-interleaved": Mistake(
        "A patch holds pixels from all over the image.",
        "Number the pixels of a small image and print patch 0. Are they neighbours?",
    ),
    "wrong-in-proj-slice": Mistake(
        "Queries, keys and values are cut from the packed weight at the wrong rows.",
        "in_proj_weight has 3·width rows in the order Q, K, V. How many rows belong to each?",
    ),
    "sin-cos-swapped": Mistake(
        "Sines and cosines have changed places.",
        "Position 0 tells: which features are 0 there, and which are 1?",
    ),
    "wrong-frequency": Mistake(
        "The angles grow at the wrong rate.",
        "Feature 0 turns by 1 per position; by how much do the next pairs turn? Compare with the paper's exponent.",
    ),
    "unknown": Mistake(
        "It differs in a way that is not in the list.",
        "Start from the evidence and the smallest example: work it out by hand, step by step.",
    ),
}
