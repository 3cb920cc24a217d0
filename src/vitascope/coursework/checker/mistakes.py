"""The known mistakes: what each one is, and a hint that does not give the solution away."""

from typing import NamedTuple


class Mistake(NamedTuple):
    """A description of a mistake, and a hint where to look."""

    description: str
    hint: str


MISTAKES = {
    "missing-scale": Mistake(
        "Scaling by 1/sqrt(d_k) is missing.",
        "The variance of a dot product grows with the length of the vectors. How do large scores change the softmax?",
    ),
    "scale-by-width": Mistake(
        "The scores are scaled with the full embedding width instead of the width of one head.",
        "How many products are added up in one dot product of one head?",
    ),
    "scale-not-sqrt": Mistake(
        "The scores are divided by the width instead of its square root.",
        "How does the standard deviation of a dot product grow with the vector length d: like d, or more slowly?",
    ),
    "softmax-over-queries": Mistake(
        "The softmax runs over the queries instead of the keys.",
        "Along which axis does your attention map sum to 1? For each query, its weights over all keys should sum to 1.",
    ),
    "softmax-over-heads": Mistake(
        "The softmax runs over the heads instead of the keys.",
        "Along which axis does your attention map sum to 1? Each head has its own softmax.",
    ),
    "feature-attention": Mistake(
        "Attention is computed between features instead of tokens.",
        "Print the shape of the attention map. It should be tokens × tokens. Which axis does your product sum over?",
    ),
    "weight-not-transposed": Mistake(
        "A weight of shape output × input is used as if its shape were input × output.",
        "What is the shape of nn.Linear(2, 3).weight? Try your product with a matrix that is not square. "
        "If your weights have shape input × output, state this in the docstring.",
    ),
    "heads-not-transposed": Mistake(
        "The features are split into heads, but the head axis is not moved before the token axis.",
        "Print the shapes just before the product of queries and keys. Which two axes does @ multiply?",
    ),
    "heads-joined-wrongly": Mistake(
        "The outputs of the heads are concatenated in the wrong order.",
        "The first features of token 0 should come from head 0 and token 0. Where do yours come from?",
    ),
    "missing-output-projection": Mistake(
        "The output projection is missing.",
        "nn.MultiheadAttention has one more layer after the heads are concatenated. What does it do?",
    ),
    "mask-inverted": Mistake(
        "The mask is inverted: allowed and masked-out tokens are swapped.",
        "Which tokens may the first token attend to? Compare with the first row of your mask or attention map. "
        "By default, True in a mask means that attention is allowed. If yours means the opposite, "
        "state this in the docstring.",
    ),
    "mask-after-softmax": Mistake(
        "The mask is applied after the softmax.",
        "Add up one row of the masked attention map. Is the sum still 1?",
    ),
    "mask-too-small": Mistake(
        "Masked scores get a finite value that is not low enough.",
        "Are the masked weights exactly 0 after the softmax, even if their scores were very high before masking?",
    ),
    "dropout-in-eval": Mistake(
        "The result is random in eval mode: two calls with the same input differ.",
        "Call model.eval(), then call the model twice with the same input. What switches dropout off?",
    ),
    "query-key-swapped": Mistake(
        "Queries and keys are swapped.",
        "Row i of the attention map belongs to token i. Is token i the query or the key in this row?",
    ),
    "missing-residual": Mistake(
        "A residual connection is missing: the unchanged input is not added to the output.",
        "If attention returned only zeros, what should the block return?",
    ),
    "norm-after": Mistake(
        "The norm is applied after the layer (post-norm) instead of before it (pre-norm).",
        "Compare your code with equations 2 and 3 of Dosovitskiy et al. (2021). What is normalised, and what is not?",
    ),
    "missing-norm": Mistake(
        "A norm is missing or not used.",
        "Count the norms that forward() uses. A block has one before attention and one before the MLP. "
        "A ViT has one more before the head.",
    ),
    "class-token-at-end": Mistake(
        "The class token is at the end, or the head reads the last token instead of the first.",
        "At which index is the class token, and which index does the head read?",
    ),
    "position-misplaced": Mistake(
        "The position embeddings are added in the wrong place, shifted, or not added.",
        "Which row of the position embeddings belongs to the class token, and which to the first patch?",
    ),
    "patches-in-column-order": Mistake(
        "The patches are ordered column by column instead of row by row.",
        "Number the pixels of a small image and print patch 1. Is it to the right of patch 0 or below it?",
    ),
    "pixels-interleaved": Mistake(
        "The pixels of a patch do not form one square of the image.",
        "Number the pixels of a small image and print patch 0. Are its pixels neighbours in the image?",
    ),
    "wrong-in-proj-slice": Mistake(
        "The wrong rows of the packed weight are used for queries, keys and values.",
        "in_proj_weight has 3·width rows in the order Q, K, V. How many rows belong to each?",
    ),
    "sin-cos-swapped": Mistake(
        "Sine and cosine are swapped.",
        "Print the values at position 0. Which features are 0 and which are 1?",
    ),
    "wrong-frequency": Mistake(
        "The frequencies of sine and cosine are wrong.",
        "The angle of feature 0 grows by 1 per position. By how much do the angles of the next features grow? "
        "Compare your exponent with the paper.",
    ),
    "unknown": Mistake(
        "At least one check fails, but the mistake is not one of the known mistakes.",
        "Compute a small example by hand, step by step, and compare it with your code.",
    ),
}
