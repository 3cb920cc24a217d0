"""Explain predictions: attention maps, attribution methods, and how faithful they are."""

from vitascope.explain.attribution import METHODS, explain, integrated_gradients, relevance, rollout
from vitascope.explain.faithfulness import Faithfulness, deletion, insertion, measure, survives_random_weights
from vitascope.explain.layout import Layout, layout_of
from vitascope.explain.maps import attention_maps, each_batch, logits_and_maps

__all__ = [
    "METHODS",
    "Faithfulness",
    "Layout",
    "attention_maps",
    "deletion",
    "each_batch",
    "explain",
    "insertion",
    "integrated_gradients",
    "layout_of",
    "logits_and_maps",
    "measure",
    "relevance",
    "rollout",
    "survives_random_weights",
]
