"""Names and axes of the tensors in function signatures.

Tests check these shapes at every call (jaxtyping and beartype). At run time they are not checked.
"""

from typing import TypeAlias

from jaxtyping import Bool, Float, Int
from torch import Tensor

Images: TypeAlias = Float[Tensor, "batch channel height width"]
Patches: TypeAlias = Float[Tensor, "batch patch pixel"]  # pixel = channel · patch rows · patch columns
PatchTokens: TypeAlias = Float[Tensor, "batch patch feature"]
Tokens: TypeAlias = Float[Tensor, "batch token feature"]  # class token, then registers, then patches
OutputTokens: TypeAlias = Float[Tensor, "batch output_token feature"]  # all tokens, or the first num_output_tokens
TokenSizes: TypeAlias = Float[Tensor, "batch merged_token"]  # number of patches merged into each token
TokenWeights: TypeAlias = Float[Tensor, "batch token"]  # weight of each token in the features; each row sums to 1
PatchMembership: TypeAlias = Float[Tensor, "batch output_token original_token"]  # 1 where the token contains the patch
AllTokens: TypeAlias = Float[Tensor, "batch original_token feature"]  # one value per original token, merged or not
AllTokenMaps: TypeAlias = Float[Tensor, "batch head original_token original_token"]  # attention between original tokens
PrefixTokens: TypeAlias = Float[Tensor, "1 prefix_token feature"]  # class token and registers, without a batch
HeadTokens: TypeAlias = Float[Tensor, "batch head token head_width"]  # keys or values, per head
Queries: TypeAlias = Float[Tensor, "batch head query head_width"]  # queries of all tokens, or of the first ones
AttentionMaps: TypeAlias = Float[Tensor, "batch head query key"]  # attention weights; each row sums to 1
AttentionMapsByBlock: TypeAlias = Float[Tensor, "batch block head query key"]  # attention weights of all blocks
AttentionMask: TypeAlias = Bool[Tensor, "query key"]  # True: this query may attend to this key
Features: TypeAlias = Float[Tensor, "batch feature"]
Logits: TypeAlias = Float[Tensor, "batch class"]
Probabilities: TypeAlias = Float[Tensor, "batch class"]  # a softmax over classes; each row sums to 1
PositionTable: TypeAlias = Float[Tensor, "position feature"]
RotaryTable: TypeAlias = Float[Tensor, "cosine_sine *image token pair"]  # rotation of each pair of features
PatchHeatmap: TypeAlias = Float[Tensor, "batch row column"]  # one value per patch of the grid
TokenRelevance: TypeAlias = Float[Tensor, "batch token token"]  # contribution of each token (second) to each (first)
TargetClasses: TypeAlias = Int[Tensor, "batch"]  # the class to explain, per image
PatchMask: TypeAlias = Bool[Tensor, "batch patch"]  # True: this patch is hidden
PatchNoise: TypeAlias = Float[Tensor, "batch patch"]  # a random number for every patch
BlockNoise: TypeAlias = Float[Tensor, "batch block"]  # a random number for every block of patches
DepthNoise: TypeAlias = Float[Tensor, "batch branch"]  # a random number for every residual branch: two per block
BranchNoise: TypeAlias = Float[Tensor, "batch"]  # a random number for one residual branch
TokenIndices: TypeAlias = Int[Tensor, "batch patch"]  # indices of patches or tokens, in any order
VisibleIndices: TypeAlias = Int[Tensor, "batch visible_patch"]  # indices of the patches that the encoder receives
ProbabilityCurves: TypeAlias = Float[Tensor, "batch step"]  # a probability after each step
