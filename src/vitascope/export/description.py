"""Metadata of an exported file: classes, preprocessing and origin."""

import json

import vitascope
from vitascope.weights.facts import ModelFacts

FILE = "vitascope.json"  # inside a .pt2 file; ONNX files have metadata fields


def described(facts: ModelFacts, run: str) -> dict[str, str]:
    """Return all values as strings and lists as JSON, because ONNX metadata holds only strings."""
    return {
        "classes": json.dumps(facts.classes, ensure_ascii=False),
        "mean": json.dumps(facts.preparation.mean),
        "std": json.dumps(facts.preparation.std),
        "img_size": json.dumps(facts.model.image_shape),
        "in_chans": str(facts.model.in_chans),
        "preparation": "centre crop to the shape of img_size (rows, columns), resize to img_size, pixels / 255, "
        "subtract mean, divide by std (per channel); float32, batch × channels × rows × columns",
        "vitascope": vitascope.__version__,
        "run": run,
    }
