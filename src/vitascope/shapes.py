"""The glossary: every tensor that crosses a function has a name here.

Tests check these shapes at every call (jaxtyping and beartype); at run time they are only words.
"""

from typing import TypeAlias

from jaxtyping import Bool, Float, Int
from torch import Tensor

Images: TypeAlias = Float[Tensor, "batch channel height width"]
Patches: TypeAlias = Float[Tensor, "batch patch pixel"]  # pixel = channel · patch rows · patch columns
PatchTokens: TypeAlias = Float[Tensor, "batch patch feature"]
Tokens: TypeAlias = Float[Tensor, "batch token feature"]  # class token, then registers, then patches
OutputTokens: TypeAlias = Float[
    Tensor, "batch asked feature"
]  # all tokens, or the first ones, which somebody will read
TokenSizes: TypeAlias = Float[Tensor, "batch counted"]  # how many patches each token stands for
PatchMembership: TypeAlias = Float[Tensor, "batch asked everyone"]  # 1 where a token stands for a patch
PrefixTokens: TypeAlias = Float[Tensor, "one prefix feature"]  # class token and registers, before they meet a batch
HeadTokens: TypeAlias = Float[Tensor, "batch head token width"]  # keys or values, one head beside the other
Queries: TypeAlias = Float[Tensor, "batch head query width"]  # of every token, or only of those that are asked for
AttentionMaps: TypeAlias = Float[Tensor, "batch head query key"]  # who looks at whom; each row sums to 1
AttentionMapsByBlock: TypeAlias = Float[Tensor, "batch block head query key"]  # those of all blocks in one tensor
AttentionMask: TypeAlias = Bool[Tensor, "query key"]  # True: this query may look at this key
Features: TypeAlias = Float[Tensor, "batch feature"]
Logits: TypeAlias = Float[Tensor, "batch class"]
PositionTable: TypeAlias = Float[Tensor, "position feature"]
RotaryTable: TypeAlias = Float[Tensor, "cosine_sine *one token pair"]  # turns each pair of a query's or key's features
PatchHeatmap: TypeAlias = Float[Tensor, "batch row column"]  # one number per patch
TokenRelevance: TypeAlias = Float[Tensor, "batch token token"]  # how much each token took from each
TargetClasses: TypeAlias = Int[Tensor, "batch"]  # the class that is asked about, per image
PatchNoise: TypeAlias = Float[Tensor, "batch patch"]  # a random number for every patch
TokenIndices: TypeAlias = Int[Tensor, "batch patch"]  # numbers of patches or tokens, in some order
VisibleIndices: TypeAlias = Int[Tensor, "batch visible"]  # numbers of the patches that MAE's encoder sees
ProbabilityCurves: TypeAlias = Float[Tensor, "batch steps"]  # a probability after each step
HeadValues: TypeAlias = Float[Tensor, "batch head"]  # one number per image and head
