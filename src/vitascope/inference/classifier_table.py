"""Describe a classifier as an HTML table, for a notebook."""

from vitascope.draw.html import make_html_table
from vitascope.inference.classifier import Classifier
from vitascope.model.anatomy import count_parameters
from vitascope.model.vit import VisionTransformer


def make_classifier_html_table(classifier: Classifier) -> str:
    """Return a table of the weights, the network, the inference and the classes."""
    channels, (rows, columns) = len(classifier.preprocessing.mean), classifier.preprocessing.size
    epoch = f"{classifier.run.path}, {classifier.weights_label.split(',')[0]} epoch"
    temperature = classifier.find_temperature()
    return make_html_table(
        ["property", "value"],
        [
            ["run", epoch] if classifier.is_run else ["weights", classifier.name],
            ["image", f"{channels} × {rows} × {columns}"],
            *_list_network_rows(classifier),
            ["inference", classifier.fast.description if classifier.fast else "float32"],
            *([["probabilities", temperature.description]] if temperature and temperature.value != 1 else []),
            ["classes", ", ".join(classifier.classes[:12]) + (" …" if len(classifier.classes) > 12 else "")],
        ],
    )


def _list_network_rows(classifier: Classifier) -> list[list[str]]:
    if not isinstance(classifier.model, VisionTransformer):
        return [["network", f"timm's {type(classifier.model).__name__}"]]
    config, reduction = classifier.config, classifier.token_reduction_description
    return [
        ["tokens", f"{config.num_tokens}{f', {reduction}' if reduction else ''}"],
        ["blocks", f"{config.depth}, width {config.embed_dim}, {config.num_heads} heads"],
        ["parameters", f"{count_parameters(config):,}"],
    ]
