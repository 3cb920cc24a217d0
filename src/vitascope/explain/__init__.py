"""Explain predictions: attention maps, attribution methods, and how faithful they are."""

from vitascope.explain.attribution import integrated_gradients, relevance, rollout
from vitascope.explain.faithfulness import (
    Faithfulness,
    correlate_with_shuffled_weights,
    deletion,
    insertion,
    measure_faithfulness,
)
from vitascope.explain.maps import (
    TokenLayout,
    attention_maps,
    compute_logits_and_maps,
    get_token_layout,
    iterate_logits_and_maps,
)
from vitascope.explain.methods import METHODS, explain

__all__ = [
    "METHODS",
    "Faithfulness",
    "TokenLayout",
    "attention_maps",
    "compute_logits_and_maps",
    "correlate_with_shuffled_weights",
    "deletion",
    "explain",
    "get_token_layout",
    "insertion",
    "integrated_gradients",
    "iterate_logits_and_maps",
    "measure_faithfulness",
    "relevance",
    "rollout",
]
