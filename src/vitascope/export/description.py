"""What the weights alone do not say -> words that travel inside an exported file."""

import json

import vitascope
from vitascope.weights.facts import ModelFacts

FILE = "vitascope.json"  # inside a .pt2 file; an ONNX file has its own place for them


def described(facts: ModelFacts, run: str) -> dict[str, str]:
    """Everything as strings, lists as JSON: that is all an ONNX file can hold."""
    return {
        "classes": json.dumps(facts.classes, ensure_ascii=False),
        "mean": json.dumps(facts.preparation.mean),
        "std": json.dumps(facts.preparation.std),
        "img_size": json.dumps(facts.model.image_shape),
        "in_chans": str(facts.model.in_chans),
        "preparation": "cut around the centre to img_size's shape and resized to it (rows, columns), pixels / 255, "
        "minus mean, divided by std, per channel; float32, batch × channel × rows × columns",
        "vitascope": vitascope.__version__,
        "run": run,
    }
